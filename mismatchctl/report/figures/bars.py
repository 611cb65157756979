"""Figures with a point per correction, check, part, cause or candidate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from mismatchctl.api.advise.advice import RunAdvice
from mismatchctl.api.compare.comparison import Change, Decomposition, format_part, format_signed
from mismatchctl.api.gate.verdict import Check, check_name
from mismatchctl.core.formatting import INTERVAL_Z, escape_terminal, shorten
from mismatchctl.frameworks.registry import load_presets
from mismatchctl.report.figures.figure import MUTED, Axis, Figure, Marks, Number, ReferenceLine, Scale
from mismatchctl.results.model import NOT_RECORDED, Finding, SidesGroup, Value

MAX_PARTS, MAX_CHECKS = 24, 16
"""Maximum parts of a decomposition, and checks, in one figure. The largest and the failed ones are shown."""
_MAX_NAME = 30
_LOG_SPAN = 4.0
"""Axes that span more than this factor are logarithmic."""
FrontPoint = tuple[str, float | None, float | None]
"""Name, rejected share of tokens and K3 of the kept tokens of a point on a sweep's Pareto front."""
_BAND = Axis("", "band")


def corrections_figure(
    runs: Mapping[str, Mapping[str, Mapping[str, Value]]], name: str, front: Sequence[FrontPoint] = ()
) -> Figure | None:
    """Draw rejection against the remaining K3 per run and correction, or against the ESS if nothing is rejected."""
    every = [values for corrections in runs.values() for values in corrections.values()]
    rejects = any((values.get("rejected_tokens", NOT_RECORDED).value or 0) > 0 for values in every)
    x_key, y_key = ("rejected_tokens", "k3_kept") if rejects else ("loss_scale", "ess_token")
    marks: list[Marks] = []
    known = sorted((x, y, shorten(text, _MAX_NAME)) for text, x, y in front if x is not None and y)
    if known and rejects:
        points = [list(column) for column in zip(*known, strict=True)]
        marks.append(Marks("line", "Pareto front of the sweep", points[0], points[1], color=MUTED, labels=points[2]))
    for place, (run, corrections) in enumerate(runs.items()):
        found = [
            (shorten(key, _MAX_NAME), across, up)
            for key, values in corrections.items()
            if (across := values.get(x_key, NOT_RECORDED)).value is not None
            and (up := values.get(y_key, NOT_RECORDED)).value is not None
            and (up.value > 0 or not rejects)
        ]
        if found:
            labels = [text for text, _, _ in found]
            x, y = [across.value for _, across, _ in found], [up.value for _, _, up in found]
            ends = _interval_ends([up for _, _, up in found], log=rejects)
            label = shorten(run, 24) if len(runs) > 1 else "corrections"
            index = place if len(runs) > 1 else None
            marks.append(Marks("dots", label, x, y, *ends, labels=labels, color=place, run=index))
    if sum(len(mark.y) for mark in marks) < 2:
        return None
    if rejects:
        title, subject = "Rejected data and remaining mismatch", "rejected tokens against the K3 of the kept tokens"
        caption = "Left: a correction rejects less. Below: less mismatch remains in training."
        axes = Axis("tokens rejected", percent=True), Axis("K3 of the kept tokens (nats/token)", "log")
    else:
        title, subject = "Loss scale and effective sample size", "loss scale against the effective sample size"
        caption = "A loss scale of 1 is unbiased. Higher points use more of the data."
        axes = Axis("loss scale"), Axis("effective sample size", percent=True)
    rules = () if rejects else (ReferenceLine("x", 1.0, "", None, "limit"),)
    return Figure(name, title, subject, caption, *axes, tuple(marks), rules, "wide")


def _interval_ends(values: Sequence[Value], *, log: bool = False) -> tuple[list[Number], list[Number]]:
    """Return the ends of the intervals. On a log axis, they stay within a factor of 10."""
    low: list[Number] = []
    high: list[Number] = []
    for found in values:
        value, reach = found.value, INTERVAL_Z * (found.se or 0.0)
        ends = (None, None) if value is None else found.interval or (value - reach, value + reach)
        if log and value:
            ends = max(ends[0] or 0.0, value / 10), min(ends[1] or value, value * 10)
        low.append(ends[0])
        high.append(ends[1])
    return low, high


def _across(
    label: str, x: Sequence[Number], names: Sequence[str], ends: Iterable[Sequence[Number]] = (), *, color: int = 0,
    hollow: bool = False, shift: float = 0.0,
) -> Marks:  # fmt: skip
    low, high = ends or ((), ())
    return Marks("dots", label, x, names, low, high, across=True, color=color, hollow=hollow, shift=shift)


def _rule(at: float, text: str = "") -> tuple[ReferenceLine]:
    return (ReferenceLine("x", at, text, None, "limit"),)


def selection_figure(
    corrections: Mapping[str, Mapping[str, Value]], metric: str, axis: str, name: str
) -> Figure | None:
    """Draw the mean of a metric over kept and over rejected sequences, for each correction that rejects."""
    chosen = {
        row: [values.get(f"{side}_{metric}", NOT_RECORDED) for side in ("kept", "rejected")]
        for row, values in corrections.items()
        if values.get("rejected_tokens", NOT_RECORDED).value
    }
    if not any(kept.value is not None and rejected.value is not None for kept, rejected in chosen.values()):
        return None
    names = _unique_names(chosen)
    marks = []
    for place, label in enumerate(("kept", "rejected")):
        values = [found[place] for found in chosen.values()]
        x, shift = [value.value for value in values], 4.0 * (2 * place - 1)
        marks.append(_across(label, x, names, _interval_ends(values), color=place, hollow=place > 0, shift=shift))
    return Figure(
        name, f"Mean {metric}, kept and rejected", axis, "If the two differ, rejection changes the training data.",
        Axis(axis), _BAND, tuple(marks),
    )  # fmt: skip


def sides_figure(groups: Sequence[SidesGroup], by: str, name: str) -> Figure | None:
    """Draw the error of rollout and trainer for each value of a column."""
    errors = {"rollout": [own.rollout_rms for own in groups], "train": [own.train_rms for own in groups]}
    if not all(value and value > 0 for values in errors.values() for value in values):
        return None
    names = _unique_names([own.label for own in groups])
    marks = [
        _across(side, values, names, color=place, hollow=place > 0, shift=4.0 * (2 * place - 1))
        for place, (side, values) in enumerate(errors.items())
    ]
    axis = "root mean square error (nats)"
    caption = "The side on the right has the larger error."
    return Figure(name, f"Error of each side by {by}", axis, caption, Axis(axis, "log"), _BAND, tuple(marks))


def causes_figure(runs: Mapping[str, Sequence[Finding]], name: str) -> Figure | None:
    """Draw the share of K3 that each cause explains, for each run."""
    marks = []
    for place, (run, findings) in enumerate(runs.items()):
        shares = {shorten(found.title, 2 * _MAX_NAME): found.share_k3 for found in findings if found.share_k3}
        if shares:
            label = shorten(run, 24) if len(runs) > 1 else "share of K3"
            marks.append(_across(label, list(shares.values()), list(shares), color=place))
    x = Axis("share of K3", limits=(0.0, 1.02), percent=True)
    caption = "Shares of causes that overlap add up to more than 100%."
    title = "What the mismatch consists of"
    return Figure(name, title, "share of K3 by cause", caption, x, _BAND, tuple(marks), size="wide") if marks else None


def changes_figure(runs: Mapping[str, Mapping[str, Change]], titles: Mapping[str, str], name: str) -> Figure | None:
    """Draw the relative change of each metric with its interval, for each compared run."""
    marks = []
    for place, (run, changes) in enumerate(runs.items()):
        known = [key for key in titles if key in changes and changes[key].relative is not None]
        ends = [changes[key].relative_interval or (None, None) for key in known]
        if known:
            low, high = ([pair[side] for pair in ends] for side in (0, 1))
            label = shorten(run, 24) if len(runs) > 1 else "change"
            names = [shorten(titles[key], 2 * _MAX_NAME) for key in known]
            x = [changes[key].relative for key in known]
            marks.append(_across(label, x, names, (low, high), color=place, shift=5.0 * (place - (len(runs) - 1) / 2)))
    return Figure(
        name, "Change of the main metrics", "relative change of the main metrics",
        "Bars that include 0% show no significant change of this metric alone.",
        Axis("change relative to the reference", percent=True), _BAND, tuple(marks), _rule(0.0), "wide",
    ) if marks else None  # fmt: skip


def _unique_names(names: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Shorten names. Names that become equal get a number."""
    found: list[str] = []
    for name in names:
        text = shorten(name, _MAX_NAME)
        found.append(text if text not in found else f"{text} ({len(found) + 1})")
    return found


def verdict_figure(checks: Sequence[Check], name: str) -> Figure | None:
    """Draw new values and baselines relative to their limits."""
    order = ("failed", "undecided", "passed")
    known = [check for check in checks if (check.value or 0) > 0 and (check.limit or 0) > 0]
    shown = sorted(known, key=lambda check: order.index(check.outcome))[:MAX_CHECKS]
    if not shown:
        return None
    names = _unique_names([check_name(check) for check in shown])

    def marks(label: str, key: Literal["value", "baseline"], color: int, shift: float) -> Marks:
        intervals = [check.interval if key == "value" else check.baseline_interval for check in shown]
        values = [check.value if key == "value" else check.baseline for check in shown]
        scaled = [
            [part / (check.limit or 1) if part and part > 0 else None for part in (value, *(ends or (None, None)))]
            for check, value, ends in zip(shown, values, intervals, strict=True)
        ]
        x, *ends = (list(column) for column in zip(*scaled, strict=True))
        return _across(label, x, names, ends, color=color, hollow=key == "baseline", shift=shift)

    found = [marks("new", "value", 1, 4.0)]
    if any(check.baseline for check in shown):
        found.append(marks("baseline", "baseline", 0, -4.0))
    failed = sum(check.outcome == "failed" for check in shown)
    title = f"{failed} of {len(shown)} checks failed" if failed else "New values and their limits"
    caption = "Values are relative to the limit of each check (dotted line)."
    return Figure(
        name, title, "new values and baselines relative to the limit", caption, Axis("value / limit", "log"), _BAND,
        tuple(found), _rule(1.0, "limit"), "wide",
    )  # fmt: skip


def parts_figure(check: Check, name: str) -> Figure:
    """Draw how much each part of K3 rose: bulk (most tokens), shoulder, and tail."""
    texts = {"bulk": "most tokens (bulk)", "tail": "rare tokens (tail)"}
    parts = [part for part in check.parts if part.rise is not None]
    low, high = ([None if part.interval is None else part.interval[end] for part in parts] for end in (0, 1))
    names = [texts.get(part.name, part.name) for part in parts]
    return Figure(
        name, "What rose", "relative rise of the parts of K3",
        "A rise of rare tokens only points to routing or sampling, a rise of most tokens to a dtype or a kernel.",
        Axis("rise over the baseline", percent=True), _BAND,
        (_across("rise", [part.rise for part in parts], names, (low, high)),), _rule(0.0),
    )  # fmt: skip


def contributions_figure(decomposition: Decomposition, name: str) -> Figure | None:
    """Draw each part's contribution to a change of K3, split into level and mix, if K3 changed."""
    parts = decomposition.parts[:MAX_PARTS]
    if not any(part.total for part in parts):
        return None
    names = _unique_names([format_part(decomposition, part) for part in parts])
    reach = [INTERVAL_Z * (part.se or 0.0) for part in parts]
    totals = [part.total for part in parts]
    ends = ([total + sign * r for total, r in zip(totals, reach, strict=True)] for sign in (-1, 1))
    marks = (
        _across("whole contribution", totals, names, ends),
        _across("level: K3 there is larger", [part.level for part in parts], names, color=1, hollow=True, shift=-5.0),
        _across("mix: more tokens there", [part.mix for part in parts], names, color=2, hollow=True, shift=5.0),
    )
    noun = shorten(decomposition.quantity, 40)
    largest = max(range(len(parts)), key=lambda index: abs(totals[index]))
    moved = " of ".join(format_signed(change) for change in (totals[largest], decomposition.difference))
    return Figure(
        name, f"{names[largest]} contributes most: {moved} nats/token",
        f"contributions to the change of K3, by {noun}", "All contributions add up to the change of K3.",
        Axis("contribution (nats/token)"), Axis(noun, "band"), marks, _rule(0.0),
    )  # fmt: skip


def advice_figure(advice: RunAdvice, name: str) -> Figure | None:
    """Draw bias and variance of all candidates, if they are ranked."""
    if not advice.advice:
        return None
    errors = {own: (bias2, variance) for own, (bias2, variance, _) in advice.front.items()}
    errors |= {own.name: (max(own.bias2, 0.0), own.variance) for own in (*advice.advice, *advice.yours)}
    advised, yours = ({own.name for own in group} for group in (advice.advice, advice.yours))
    shipped = set(load_presets()) - {"none"} - advised - yours
    places = {own: tuple(part / advice.uncorrected for part in parts) for own, parts in errors.items()}
    x, y = (_fit_axis([place[side] for place in places.values()]) for side in (0, 1))
    marks = []
    for label, group, color in (
        ("candidates", set(errors) - advised - yours - shipped, MUTED), ("presets", shipped, MUTED),
        ("advised", advised, 0), ("yours", yours, 1),
    ):  # fmt: skip
        chosen = [own for own in places if own in group]
        ends = [[max(places[own][side], axis[1]) for own in chosen] for side, axis in enumerate((x, y))]
        names = [shorten(own, _MAX_NAME) for own in chosen] if color != MUTED else []
        if chosen:
            marks.append(
                Marks("dots", label, ends[0], ends[1], color=color, hollow=label == "candidates", labels=names)
            )
    first = escape_terminal(advice.advice[0].name)
    return Figure(
        name, f"{first} is advised, of {len(errors)} candidates" if len(errors) > 1 else f"{first} is advised",
        "error of one update's gradient, relative to no correction",
        "Lower left is better. More data reduces the variance but not the bias. A bias indistinguishable from 0 is at "
        "the left end.",
        Axis("bias² (more data does not reduce it)", x[0]), Axis("variance (more data reduces it)", y[0]), tuple(marks),
    )  # fmt: skip


def _fit_axis(values: Sequence[float]) -> tuple[Scale, float]:
    """Return the scale of an axis, and the smallest value that it shows."""
    above = [value for value in values if value > 0]
    if above and max(above) / min(above) > _LOG_SPAN:
        return "log", min(above)
    return "linear", -math.inf
