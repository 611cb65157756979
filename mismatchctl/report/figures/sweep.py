"""Figures of a sweep: curves, maps, Pareto fronts, and checks of predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mismatchctl.api.sweep import result as api
from mismatchctl.api.sweep.result import Sweep
from mismatchctl.api.sweep.study import Study
from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import INTERVAL_Z, file_stems, shorten
from mismatchctl.corrections.labels import rule_name
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.report.figures.figure import MUTED, Axis, Figure, Marks, ReferenceLine
from mismatchctl.report.figures.runs import K3_AXIS, TrendChart, name_presets, tokens_and_sequences

MAX_START_REJECTION = 0.05
"""The explorer opens at a point that rejects at most this share of tokens, if there is one."""
_MAX_NAMED = 6
"""Maximum number of labeled points on a Pareto front."""


@dataclass(frozen=True)
class StudyRun:
    """One correction on one run, with its rows by point and the prefix `stem` of its figure names."""

    sweep: Sweep
    run: str
    study: Study
    rows: Sequence[api.SweepRow]
    anchor: str
    stem: str

    @cached_property
    def start(self) -> int:
        """Return the point where curves and the explorer start: the correction as it is configured."""
        places = []
        for axis in self.study.axes:
            own = api.preset_values(self.study.correction, self.study.correction, axis.path) if axis.is_numeric else []
            if not own:
                return choose_start_point(self.rows)
            places.append(int(np.argmin([abs(float(value or 0.0) - own[0]) for value in axis.values])))
        return int(np.ravel_multi_index(places, self.study.shape))

    def points_along(self, place: int) -> list[int]:
        through = list(np.unravel_index(self.start, self.study.shape))
        return [
            int(np.ravel_multi_index([*through[:place], index, *through[place + 1 :]], self.study.shape))
            for index in range(len(self.study.axes[place].values))
        ]

    def floats(self, key: str) -> Float64s:
        return np.array([math.nan if row.get(key) is None else row[key] for row in self.rows], np.float64)


def choose_start_point(rows: Sequence[api.SweepRow]) -> int:
    """Return the point that rejects most within `MAX_START_REJECTION`, or else the point that rejects least."""
    known = [row for row in rows if row["pareto"]] or list(rows)
    lost = [math.inf if row["rejected_tokens"] is None else row["rejected_tokens"] for row in known]
    affordable = [share for share in lost if share <= MAX_START_REJECTION]
    wanted = max(affordable) if affordable else min(lost)
    equal = [row["point"] for row, share in zip(known, lost, strict=True) if share == wanted]
    return int(equal[len(equal) // 2])


def axis_label(correction: Correction, path: str) -> str:
    """Return the meaning of an axis, for example "bound x of the geometric mean"."""
    kind, _, rest = path.partition(".")
    index = rest.partition(".")[0]
    rule: Weight | Gate | None = correction.weight if kind == "weight" else None
    if kind == "gates" and index.isdecimal() and int(index) < len(correction.gates):
        rule = correction.gates[int(index)]
    return path if rule is None else f"bound x of the {rule_name(rule)}"


_CURVES = (
    TrendChart("rejected", "Rejected", "share rejected", "percent",
               "The share of the data that a threshold removes from training.",
               (("rejected_tokens", "tokens"), ("rejected_sequences", "sequences"))),
    TrendChart("ess", "Effective sample size", "effective sample size", "percent",
               "The share of the data that still counts after weights and rejection.", tokens_and_sequences("ess")),
    TrendChart("bias", "Mean weight", "mean weight", "linear",
               "A mean weight of 1 is unbiased. A bound on the weights moves the mean weight away from 1.",
               (("weight_mean", "mean weight"),), 1.0),
    TrendChart("k3_kept", "K3 of the kept tokens", K3_AXIS, "linear",
               "K3 of the kept tokens: the mismatch that remains in training.", (("k3_kept", "K3 kept"),)),
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
        marked = [*_threshold_rules(own, axis.path)]
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


def _threshold_rules(own: StudyRun, path: str) -> Iterator[ReferenceLine]:
    """Yield a line at each preset, and at each threshold that meets a target if the correction has only one rule."""
    for mark in own.sweep.marks:
        if (mark.correction, mark.path) == (own.study.name, path):
            yield ReferenceLine("x", mark.value, name_presets(mark.presets, 1), style="limit")
    correction = own.study.correction
    if (correction.weight is not None) + len(correction.gates) != 1:
        return
    for target in own.sweep.targets:
        if target.run == own.run and target.correction is not None and target.status == "ok":
            solved = parse_correction(target.correction, "target")
            wish = f"{api.format_target(target.wish, target.wanted)} at {api.format_threshold(target.threshold)}"
            for value in api.preset_values(solved, correction, path):
                low, high = target.interval or (None, None)
                interval = None if low is None or high is None else (low, high)
                yield ReferenceLine("x", value, wish, interval, color=3)


def front_figure(own: StudyRun) -> Figure | None:
    """Draw the remaining K3 or the ESS against the rejected share, with presets."""
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
    presets: list[tuple[str, int]] = []
    for mark in own.sweep.marks if len(study.axes) == 1 and study.axes[0].is_numeric else ():
        if mark.correction == study.name:
            point = int(np.argmin([abs(float(value or 0) - mark.value) for value in study.axes[0].values]))
            presets += [(shorten(name_presets(mark.presets, 1), 30), point)] if known[point] else []

    def dots(name: str, points: Any, **more: Any) -> Marks:
        return Marks("dots", name, across[points].tolist(), up[points].tolist(), **more)

    marks = [
        dots("other points", others, color=MUTED, hollow=True),
        dots("Pareto front", best, labels=labels),
        dots("presets", [point for _, point in presets], color=1, labels=[text for text, _ in presets]),
    ]
    caption = (
        "No other point beats a point on the Pareto front in rejection, ESS and bias at once. The labels are "
        "thresholds and presets."
    )
    title = f"Pareto front ({len(best):,} of {int(known.sum()):,} points)"
    shown = tuple(mark for mark in marks if len(mark.x))
    return Figure(f"{own.stem}-front", title, caption, x, y, shown, size="wide")


def _format_threshold(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else api.format_threshold(value)
