"""Figures with a point per correction, part or candidate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mismatchctl.api.advise.advice import RunAdvice
from mismatchctl.api.compare.comparison import Contribution, Decomposition, format_signed
from mismatchctl.api.gate.verdict import Check, check_name
from mismatchctl.core.formatting import escape_terminal, format_label, format_number, shorten
from mismatchctl.frameworks.registry import load_presets
from mismatchctl.report.figures.figure import MUTED, Axis, Figure, Marks, Number, ReferenceLine, Scale
from mismatchctl.report.figures.series import INTERVAL_Z
from mismatchctl.results.model import NOT_RECORDED, Value

MAX_PARTS = 24
"""Maximum parts of a decomposition in a figure. The largest contributions are shown."""
_MAX_NAME = 30
_LOG_SPAN = 4.0
"""Axes that span more than this factor are logarithmic."""
FrontPoint = tuple[str, float | None, float | None]
"""Name, rejected share of tokens and K3 of the kept tokens of a point on a sweep's Pareto front."""


def corrections_figure(
    runs: Mapping[str, Mapping[str, Mapping[str, Value]]], name: str, front: Sequence[FrontPoint] = ()
) -> Figure | None:
    """Draw rejection against the remaining K3 per run and correction, or against the ESS without rejection."""
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
            low, high = _interval_ends([up for _, _, up in found], log=rejects)
            labels = [text for text, _, _ in found]
            x, y = [across.value for _, across, _ in found], [up.value for _, _, up in found]
            label = shorten(run, 24) if len(runs) > 1 else "corrections"
            index = place if len(runs) > 1 else None
            marks.append(Marks("dots", label, x, y, low, high, labels=labels, color=place, run=index))
    if sum(len(mark.y) for mark in marks) < 2:
        return None
    if rejects:
        title, subject = "Rejected data and remaining mismatch", "rejected tokens against the K3 of the kept tokens"
        caption = "Left: a correction rejects less. Below: less mismatch remains in training. Bars are 90% intervals."
        axes = Axis("tokens rejected", percent=True), Axis("K3 of the kept tokens (nats/token)", "log")
    else:
        title, subject = "Loss scale and effective sample size", "loss scale against the effective sample size"
        caption = "A loss scale of 1 is unbiased. Higher: more of the data counts. Bars are 90% intervals."
        axes = Axis("loss scale"), Axis("effective sample size", percent=True)
    rules = () if rejects else (ReferenceLine("x", 1.0, "", None, "limit"),)
    return Figure(name, title, subject, caption, *axes, tuple(marks), rules, "wide")


def _interval_ends(values: Sequence[Value], *, log: bool = False) -> tuple[list[Number], list[Number]]:
    """Return the ends of 90% intervals. On a log axis, they stay within a factor of 10."""
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


@dataclass(frozen=True)
class DotPlot:
    """Metrics of each row, drawn as a filled and a hollow dot. `keys` are (metric, label) each."""

    name: str
    subject: str
    axis: str
    keys: tuple[tuple[str, str], ...]
    log: bool = False
    caption: str = ""


SELECTION_PLOTS = tuple(
    DotPlot(
        f"kept-{name}", f"Mean {name}, kept and rejected", axis,
        ((f"kept_{name}", "kept"), (f"rejected_{name}", "rejected")),
        caption="If the two differ, rejection changes the training data.",
    )
    for name, axis in (("reward", "mean reward"), ("advantage", "mean advantage"), ("length", "mean length (tokens)"))
)  # fmt: skip


def sides_plot(by: str) -> DotPlot:
    """Return the plot of each side's error against a reference, by `by`."""
    return DotPlot(
        f"errors-by-{by}", f"Error of each side by {by}", "root mean square error (nats)",
        (("rollout", "rollout"), ("train", "train")), log=True,
        caption="The side on the right has the larger error.",
    )  # fmt: skip


def dots_figure(plot: DotPlot, rows: Mapping[str, Mapping[str, Value]], name: str) -> Figure | None:
    """Draw one dot plot, if a row has every metric of the plot."""
    chosen = {row: [values.get(key, NOT_RECORDED) for key, _ in plot.keys] for row, values in rows.items()}
    complete = [values for values in chosen.values() if all(value.value is not None for value in values)]
    if not complete or (plot.log and not all((value.value or 0) > 0 for values in complete for value in values)):
        return None
    names = _unique_names(chosen)
    marks = []
    for place, (_, label) in enumerate(plot.keys):
        values = [found[place] for found in chosen.values()]
        low, high = _interval_ends(values, log=plot.log)
        shift = 4.0 * (2 * place - 1) if len(plot.keys) > 1 else 0.0
        marks.append(Marks(
            "dots", label, [value.value for value in values], names, low, high, across=True, color=place,
            hollow=place > 0, shift=shift,
        ))  # fmt: skip
    axis = Axis(plot.axis, "log" if plot.log else "linear")
    return Figure(name, plot.subject, plot.axis, plot.caption, axis, Axis("", "band"), tuple(marks))


def _unique_names(names: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Shorten names. Names that become equal get a number."""
    found: list[str] = []
    for name in names:
        text = shorten(name, _MAX_NAME)
        found.append(text if text not in found else f"{text} ({len(found) + 1})")
    return found


MAX_CHECKS = 16
"""Maximum checks in one figure. Failed checks come first."""


def verdict_figure(checks: Sequence[Check], name: str) -> Figure | None:
    """Draw new values and baselines relative to their limits."""
    order = ("failed", "undecided", "passed")
    known = [check for check in checks if (check.value or 0) > 0 and (check.limit or 0) > 0]
    shown = sorted(known, key=lambda check: order.index(check.outcome))[:MAX_CHECKS]
    if not shown:
        return None
    names = _unique_names([check_name(check) for check in shown])

    def marks(label: str, key: Literal["value", "baseline"], color: int) -> Marks:
        intervals = [check.interval if key == "value" else check.baseline_interval for check in shown]
        values = [check.value if key == "value" else check.baseline for check in shown]
        scaled = [
            [part / (check.limit or 1) if part and part > 0 else None for part in (value, *(ends or (None, None)))]
            for check, value, ends in zip(shown, values, intervals, strict=True)
        ]
        x, low, high = (list(column) for column in zip(*scaled, strict=True))
        hollow = key == "baseline"
        return Marks(
            "dots", label, x, names, low, high, across=True, color=color, hollow=hollow, shift=-4.0 if hollow else 4.0
        )

    found = [marks("new", "value", 1)]
    if any(check.baseline for check in shown):
        found.append(marks("baseline", "baseline", 0))
    failed = sum(check.outcome == "failed" for check in shown)
    title = f"{failed} of {len(shown)} checks failed" if failed else "New values and their limits"
    caption = "Values are relative to the limit of each check (dotted line). Bars are 90% intervals."
    return Figure(
        name, title, "new values and baselines relative to the limit", caption, Axis("value / limit", "log"),
        Axis("", "band"), tuple(found), (ReferenceLine("x", 1.0, "limit", None, "limit"),), "wide",
    )  # fmt: skip


def parts_figure(check: Check, name: str) -> Figure:
    """Draw how much each part of K3 rose: most tokens, the shoulder, and the tail."""
    texts = {"bulk": "most tokens (bulk)", "shoulder": "shoulder", "tail": "rare tokens (tail)"}
    parts = [part for part in check.parts if part.rise is not None]
    names = [texts.get(part.name, part.name) for part in parts]
    low, high = ([None if part.interval is None else part.interval[end] for part in parts] for end in (0, 1))
    mark = Marks("dots", "rise", [part.rise for part in parts], names, low, high, across=True)
    return Figure(
        name, "What rose", "relative rise of the parts of K3",
        "A rise of rare tokens only points to routing or sampling, a rise of most tokens to a dtype or a kernel.",
        Axis("rise over the baseline", percent=True), Axis("", "band"), (mark,),
        (ReferenceLine("x", 0.0, "", None, "limit"),),
    )  # fmt: skip


def contributions_figure(decomposition: Decomposition, name: str) -> Figure | None:
    """Draw the contributions to a change of K3, split into level and mix, if K3 changed."""
    parts = order_parts(decomposition)
    if not any(part.total for part in parts):
        return None
    names = _unique_names([_part_label(decomposition, part) for part in parts])
    reach = [INTERVAL_Z * (part.se or 0.0) for part in parts]
    totals = [part.total for part in parts]
    ends = [t - r for t, r in zip(totals, reach, strict=True)], [t + r for t, r in zip(totals, reach, strict=True)]
    marks = (
        Marks("dots", "whole contribution", totals, names, *ends, across=True),
        Marks(
            "dots", "level: K3 there is larger", [part.level for part in parts], names, color=1, hollow=True, shift=-5.0
        ),
        Marks("dots", "mix: more tokens there", [part.mix for part in parts], names, color=2, hollow=True, shift=5.0),
    )
    noun = "probability" if decomposition.quantity == "surprisal" else shorten(decomposition.quantity, 40)
    largest = max(range(len(parts)), key=lambda index: abs(totals[index]))
    moved = " of ".join(format_signed(change) for change in (totals[largest], decomposition.difference))
    return Figure(
        name, f"{noun[:1].upper()}{noun[1:]} {names[largest]} contributes most: {moved} nats/token",
        f"contributions to the change of K3, by {noun}", "All contributions add up to the change of K3.",
        Axis("contribution (nats/token)"), Axis(_part_axis(decomposition), "band"), marks,
        (ReferenceLine("x", 0.0, "", None, "limit"),),
    )  # fmt: skip


def order_parts(decomposition: Decomposition) -> list[Contribution]:
    """Sort the parts by their position on the axis, keeping the largest if there are too many."""
    parts = decomposition.parts if decomposition.parts[0].low is not None else decomposition.parts[:MAX_PARTS]
    return sorted(parts, key=_part_position, reverse=decomposition.quantity == "surprisal")


def _part_position(part: Contribution) -> tuple[int, float, str]:
    if part.low is not None:
        return 0, part.low, ""
    number_like = isinstance(part.label, (int, float))
    return (0, float(part.label or 0), "") if number_like else (1, 0.0, format_label(part.label))


def _part_label(decomposition: Decomposition, part: Contribution) -> str:
    if part.low is None:
        return format_label(part.label)
    if decomposition.quantity == "surprisal":
        return format_number(math.exp(-part.low)) if part.low else "1"
    return f"{math.ceil(part.low):,}"


def _part_axis(decomposition: Decomposition) -> str:
    return {
        "surprisal": "rollout probability, up to", "position": "position, from", "length": "response length, from",
    }.get(decomposition.quantity, shorten(decomposition.quantity, 40))  # fmt: skip


def advice_figure(advice: RunAdvice, name: str) -> Figure | None:
    """Draw bias and variance of all candidates, if they are ranked."""
    if not advice.advice:
        return None
    errors = {own: (bias2, variance) for own, (bias2, variance, _) in advice.front.items()}
    errors |= {own.name: (max(own.bias2, 0.0), own.variance) for own in (*advice.advice, *advice.yours)}
    advised, yours = ({own.name for own in group} for group in (advice.advice, advice.yours))
    shipped = set(load_presets()) - {"none"} - advised - yours
    others = set(errors) - advised - yours - shipped
    scale = advice.uncorrected
    places = {own: (bias2 / scale, variance / scale) for own, (bias2, variance) in errors.items()}
    x, y = (_fit_axis([place[side] for place in places.values()]) for side in (0, 1))

    def points(group: set[str], label: str, color: int, *, hollow: bool = False, named: bool = True) -> Iterator[Marks]:
        chosen = [own for own in places if own in group]
        if chosen:
            left, up = zip(*((max(places[own][0], x[1]), max(places[own][1], y[1])) for own in chosen), strict=True)
            names = [shorten(own, _MAX_NAME) for own in chosen]
            yield Marks("dots", label, left, up, color=color, hollow=hollow, labels=names if named else ())

    marks = (
        *points(others, "candidates", MUTED, hollow=True, named=False), *points(shipped, "presets", MUTED, named=False),
        *points(advised, "advised", 0), *points(yours, "yours", 1),
    )  # fmt: skip
    first = escape_terminal(advice.advice[0].name)
    return Figure(
        name, f"{first} is advised, of {len(errors)} candidates" if len(errors) > 1 else f"{first} is advised",
        "error of one update's gradient, relative to no correction",
        "Lower left is better. More data reduces the variance but not the bias. A bias indistinguishable from 0 is at "
        "the left end.",
        Axis("bias² (more data does not reduce it)", x[0]), Axis("variance (more data reduces it)", y[0]), marks,
    )  # fmt: skip


def _fit_axis(values: Sequence[float]) -> tuple[Scale, float]:
    """Return the scale of an axis, and the smallest value that it shows."""
    above = [value for value in values if value > 0]
    if above and max(above) / min(above) > _LOG_SPAN:
        return "log", min(above)
    return "linear", -math.inf
