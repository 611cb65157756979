"""Figures of a sweep: curves and Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mismatchctl.api.sweep import result as api
from mismatchctl.api.sweep.result import Sweep
from mismatchctl.api.sweep.study import Study, ThresholdAxis
from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import INTERVAL_Z, file_stems
from mismatchctl.corrections.labels import correction_label, rule_name
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import load_presets
from mismatchctl.report.figures.figure import MUTED, Axis, Figure, Marks, ReferenceLine
from mismatchctl.report.figures.runs import K3_AXIS, UNBIASED, TrendChart, tokens_and_sequences

START_REJECTION = 0.05  # if no point is `usual`, the explorer starts near this rejected share
USUAL = "usual default"  # label of the point that is the studied correction itself
_MAX_NAMED = 6  # maximum number of labeled points on a Pareto front


@dataclass(frozen=True)
class StudyRun:
    """One correction on one run of a sweep. `rows` has a row per point. The names of its figures start with `stem`."""

    sweep: Sweep
    run: str
    study: Study
    rows: Sequence[api.SweepRow]
    anchor: str
    stem: str

    @cached_property
    def usual(self) -> int | None:
        """Return the index of the point that has the study's own thresholds, if the sweep contains them."""
        every = range(len(self.study.points))
        return next((point for point in every if self.study.correction_at(point) == self.study.correction), None)

    @property
    def start(self) -> int:
        """Return the index of the first shown point: `usual`, or the point that rejects about START_REJECTION."""
        lost = [abs((row["rejected_tokens"] or 0.0) - START_REJECTION) for row in self.rows]
        return lost.index(min(lost)) if self.usual is None else self.usual

    def points_along(self, place: int) -> list[int]:
        through = list(np.unravel_index(self.start, self.study.shape))
        return [
            int(np.ravel_multi_index([*through[:place], index, *through[place + 1 :]], self.study.shape))
            for index in range(len(self.study.axes[place].values))
        ]

    def floats(self, key: str) -> Float64s:
        return np.array([math.nan if row.get(key) is None else row[key] for row in self.rows], np.float64)


def find_rule(correction: Correction, path: str) -> Weight | Gate | None:
    """Return the rule of a correction that a path such as `gates.0.keep` refers to."""
    kind, *rest = path.split(".")
    return correction.weight if kind == "weight" else correction.gates[int(rest[0])] if kind == "gates" else None


def axis_label(correction: Correction, path: str) -> str:
    rule = find_rule(correction, path)
    return path if rule is None else f"bound x of the {rule_name(rule)}"


_CURVES = (
    TrendChart("rejected", "Rejected", Axis("share rejected", percent=True),
               "The curves show the share of the data that each threshold rejects.",
               (("rejected_tokens", "tokens"), ("rejected_sequences", "sequences"))),
    TrendChart("ess", "Effective sample size", Axis("effective sample size", percent=True),
               "The data has the same information as this share of uncorrected data.", tokens_and_sequences("ess")),
    TrendChart("bias", "Mean weight", Axis("mean weight"),
               "A mean weight of 1 is unbiased. A bound on the weights moves the mean weight away from 1.",
               (("weight_mean", "mean weight"),), UNBIASED),
    TrendChart("k3_kept", "K3 of the kept tokens", Axis(K3_AXIS),
               "The mismatch of the tokens that the correction keeps.", (("k3_kept", "K3 left"),)),
)  # fmt: skip


def curve_figures(own: StudyRun) -> Iterator[tuple[str, Figure]]:
    study, place_of = own.study, f"{own.sweep.runs.index(own.run)}-{own.sweep.studies.index(own.study)}"
    absent = {"k3_kept" if study.correction.weight is not None else "bias"}
    absent |= set() if study.correction.gates else {"rejected"}
    for place, (axis, stem) in enumerate(zip(study.axes, file_stems([axis.path for axis in study.axes]), strict=True)):
        if not axis.is_numeric or len(axis.values) < 2:
            continue
        values = np.array([value or 0.0 for value in axis.values], np.float64)
        order = np.argsort(values, kind="stable")
        points, values = np.array(own.points_along(place))[order], values[order]
        label = axis_label(study.correction, axis.path)
        x = Axis(label, "log" if axis.log else "linear", (float(values[0]), float(values[-1])))
        marked = [rule for rule in _threshold_rules(own, place) if values[0] <= (rule.at or 0.0) <= values[-1]]
        for chart in (chart for chart in _CURVES if chart.key not in absent):
            marks = [
                _curve(own, points, values, key, name, color, chart.y) for color, (key, name) in enumerate(chart.lines)
            ]
            if any(math.isfinite(y) for mark in marks for y in mark.y if isinstance(y, float)):
                yield f"{place_of}-{place}", Figure(
                    f"{own.stem}-{stem}-{chart.key}", chart.subject, chart.caption, x, chart.y, tuple(marks),
                    (*marked, *chart.rules),
                )  # fmt: skip


def _curve(own: StudyRun, points: Any, x: Float64s, key: str, name: str, color: int, axis: Axis) -> Marks:
    y, reach = own.floats(key)[points], INTERVAL_Z * np.nan_to_num(own.floats(f"{key}_se")[points])
    ends = [np.clip(end, 0, 1) if axis.percent else end for end in (y - reach, y + reach)] if reach.any() else [(), ()]
    low, high = ([*map(float, end)] for end in ends)
    return Marks("line", name, x.tolist(), y.tolist(), low, high, color=color)


def _preset_thresholds(own: StudyRun, axis: ThresholdAxis) -> dict[float, list[str]]:
    """Return {threshold: names of presets that use it}, for rules of the same type as the rule of `axis`."""
    rule, found = find_rule(own.study.correction, axis.path), dict[float, list[str]]()
    field, *end = axis.path.split(".")[2 if axis.path.startswith("gates") else 1 :]
    for name, preset in load_presets().items() if rule else ():
        rules: tuple[Weight | Gate | None, ...] = (preset.correction.weight, *preset.correction.gates)
        for other in rules:
            alike = rule and other and rule_name(other) == rule_name(rule)
            bound = getattr(other, field, None) if alike else None
            if isinstance(bound, tuple):
                low, high = bound
                mirrored = low and high and math.isclose(low * high, 1, rel_tol=1e-4)
                bound = bound[int(end[0])] if end else high if mirrored else None
            if isinstance(bound, float):
                found.setdefault(float(f"{bound:.6g}"), []).append(name)
    return found


def _threshold_rules(own: StudyRun, place: int) -> Iterator[ReferenceLine]:
    study, path = own.study, own.study.axes[place].path
    for value, names in _preset_thresholds(own, study.axes[place]).items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield ReferenceLine("x", value, f"{names[0]}{more}", style="limit")
    for target in own.sweep.targets if (study.correction.weight is not None) + len(study.correction.gates) == 1 else ():
        if target.run == own.run and target.correction is not None and target.status == "ok":
            try:
                own_rule = Study(study.correction, (ThresholdAxis(path, (target.threshold,)),)).correction_at(0)
            except ConfigError:  # the threshold is invalid for this rule, such as a high below the low
                continue
            if correction_label(own_rule) == correction_label(parse_correction(target.correction, "target")):
                wish = f"{api.format_target(target.wish, target.wanted)} at {_format_threshold(target.threshold)}"
                low, high = target.interval or (None, None)
                interval = None if low is None or high is None else (low, high)
                yield ReferenceLine("x", target.threshold, wish, interval, color=3)


def front_figure(own: StudyRun) -> Figure | None:
    """Draw the Pareto front: usually K3 of the kept tokens against the share of rejected tokens."""
    study, rejected, k3 = own.study, own.floats("rejected_tokens"), own.floats("k3_kept")
    rejects = bool(np.nanmax(rejected, initial=0.0) > 0)
    x, across = Axis("tokens rejected", percent=True), rejected
    if not rejects:
        x, across = Axis("|bias of the bound|"), np.abs(own.floats("weight_bias"))
    if rejects and np.nanmin(k3, initial=math.inf) > 0:
        y, up = Axis("K3 of the kept tokens (nats/token)", "log"), k3
    else:
        y, up = Axis("effective sample size of tokens", percent=True), own.floats("ess_token")
    known, pareto = np.isfinite(across) & np.isfinite(up), np.array([bool(row["pareto"]) for row in own.rows])
    if known.sum() < 2:
        return None
    best, others = np.flatnonzero(known & pareto), np.flatnonzero(known & ~pareto)
    best = best[np.argsort(across[best], kind="stable")]
    named = set(best[np.linspace(0, len(best) - 1, min(_MAX_NAMED, len(best))).astype(int)].tolist())
    labels = [", ".join(map(_format_threshold, study.points[point])) if point in named else "" for point in best]
    usual = [] if own.usual is None or not known[own.usual] else [own.usual]

    def dots(name: str, points: Any, **more: Any) -> Marks:
        return Marks("dots", name, across[points].tolist(), up[points].tolist(), **more)

    marks = [
        dots("other points", others, color=MUTED, hollow=True),
        dots("Pareto front", best, labels=labels),
        dots(USUAL, usual, color=1, labels=[USUAL for _ in usual]),
    ]
    caption = "The front contains the best compromises between rejection, ESS and bias. The labels are thresholds."
    title = f"Pareto front ({len(best):,} of {int(known.sum()):,} points)"
    shown = tuple(mark for mark in marks if len(mark.x))
    return Figure(f"{own.stem}-front", title, caption, x, y, shown, size="wide")


def _format_threshold(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else api.format_threshold(value)
