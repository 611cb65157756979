"""The page of a Sweep: answer, explorer, each correction, targets and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatchctl.api.predict import Prediction
from mismatchctl.api.sweep.result import (
    GROUP_SCOPE,
    MAX_PRESETS,
    POINT_METRICS,
    PresetMark,
    SolvedThreshold,
    Sweep,
    SweepRow,
    describe_check,
    distinguishing_metrics,
    format_interval,
    format_point,
    format_target,
    format_target_interval,
    format_threshold,
    group_by_target,
    preset_values,
    run_predictions,
    sort_by_cost,
    sweep_sentences,
    thin_rows,
)
from mismatchctl.api.sweep.study import INTERVAL_FIELDS, Study
from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import (
    escape_terminal,
    file_stems,
    format_count,
    format_estimate_or_reason,
    format_label,
    format_number,
)
from mismatchctl.corrections.labels import correction_label, rule_name, threshold_label
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.corrections.presets import Preset, parse_correction
from mismatchctl.frameworks.adapter import Framework
from mismatchctl.frameworks.config_files import format_native, format_preset
from mismatchctl.frameworks.registry import load_adapters
from mismatchctl.report.document import (
    EVERYWHERE,
    PAGE_ONLY,
    ColumnHeader,
    DeferredSection,
    Document,
    DocumentPart,
    Explorer,
    Facts,
    Figures,
    Headline,
    Note,
    Section,
    Table,
    TableCell,
    TableColumns,
)
from mismatchctl.report.pages.run_tables import provenance_section
from mismatchctl.report.tables import MAX_ROWS, SHORT_TITLES, MetricRegistry, split_title, text_cell
from mismatchctl.results.model import Value
from mismatchctl.results.summary import skipped_data_notes

if TYPE_CHECKING:
    from mismatchctl.report.figures.figure import Figure, ReferenceLine
    from mismatchctl.report.figures.sweep import CurveChart

MAX_START_REJECTION = 0.05
"""Maximum share of rejected tokens at the explorer's first point, if possible."""
MAX_POINTS_SHOWN, MAX_SPREAD_POINTS = 12, 5
"""Points in a table, and in the table by step."""
_CURVE_METRICS = ("rejected_tokens", "ess_token")


@dataclass(frozen=True)
class StudyRun:
    """One correction on one run, with its overall rows in the order of the points.

    `stem` is the prefix of its figure names.
    """

    sweep: Sweep
    run: str
    study: Study
    rows: Sequence[SweepRow]
    anchor: str
    stem: str

    @cached_property
    def start(self) -> int:
        """Index of the point that curves pass through and the explorer starts with: the correction as configured."""
        own = point_of_correction(self.study)
        return choose_start_point(self.rows) if own is None else own

    def floats(self, key: str) -> Float64s:
        """Return one metric of every point. Undefined values become NaN."""
        return np.array([math.nan if row.get(key) is None else row[key] for row in self.rows], np.float64)


def study_section(study_run: StudyRun, registry: MetricRegistry) -> Section:
    """Build the section of one correction."""
    rows, study = study_run.rows, study_run.study
    best = sort_by_cost([row for row in rows if row["pareto"]])
    chosen = thin_rows(best or rows, MAX_POINTS_SHOWN)
    found = "No point has every figure"
    if best:
        found = f"{len(chosen)} of {len(best)} points that no other beats in rejection, ESS and bias"
    points = _points_table(study_run, chosen, f"{found}.", registry)
    points.title, points.reach = found, EVERYWHERE

    def every() -> Iterator[DocumentPart | None]:
        yield _spread_table(study_run, [row["point"] for row in thin_rows(chosen, MAX_SPREAD_POINTS)])
        table = _points_table(study_run, rows[:MAX_ROWS], f"{format_count(len(rows), 'point')}.", registry)
        table.title, table.folded = f"All points of {escape_terminal(study.name)}", True
        yield table

    return Section(escape_terminal(study.name), study_run.anchor, lead=_lead_sentence(study, study_run.start)).add(
        _axes_note(study),
        _axis_section(study_run),
        DeferredSection(lambda: _figure_parts(study_run)),
        points,
        _presets_section(study_run),
        DeferredSection(every),
    )


def _axes_note(study: Study) -> Note:
    """Describe the axes and the number of points."""
    axes = []
    for axis in study.axes:
        numbers = axis.is_numeric and len(axis.values) > 1
        ends = " to ".join(map(format_threshold, (axis.values[0], axis.values[-1])))
        values = ends if numbers else ", ".join(map(format_threshold, axis.values))
        axes.append(f"{axis_label(study.correction, axis.path)}: {values}")
    return Note(escape_terminal(f"{'; '.join(axes)} ({format_count(len(study.points), 'point')})"), "quiet")


def _axis_section(study_run: StudyRun) -> Section | None:
    """Build the terminal curves of rejection and effective sample size along a single axis."""
    axes, rows = study_run.study.axes, study_run.rows
    if len(axes) != 1 or not axes[0].is_numeric or len(rows) < 3:
        return None
    curves = {
        SHORT_TITLES[key]: [row[key] for row in rows] for key in _CURVE_METRICS if len({row[key] for row in rows}) > 1
    }
    ends = {
        name: f"{format_number(v[0], 'fraction')} → {format_number(v[-1], 'fraction')}" for name, v in curves.items()
    }
    return Section("", "along", terminal=True).add(Facts(list(ends.items()), curves))


def _presets_section(study_run: StudyRun) -> Section:
    """Build the terminal list of presets on the axes."""
    marks = [mark for mark in study_run.sweep.marks if mark.correction == study_run.study.name]
    rows = [(f"{mark.path} {format_threshold(mark.value)}", escape_terminal(_format_presets(mark))) for mark in marks]
    return Section("", "presets", terminal=True).add(Facts(rows))


def _first_preset(mark: PresetMark) -> str:
    """Name the first preset at a mark, and count the others."""
    return f"{mark.presets[0]}{f' +{len(mark.presets) - 1}' if len(mark.presets) > 1 else ''}"


def _format_presets(mark: PresetMark) -> str:
    """Format the first few presets at a mark."""
    more = len(mark.presets) - MAX_PRESETS
    return f"{', '.join(mark.presets[:MAX_PRESETS])}{f' and {more} more' if more > 0 else ''}"


def point_of_correction(study: Study) -> int | None:
    """Return the point nearest to the thresholds that the correction has, if it has one on each axis."""
    places = []
    for axis in study.axes:
        own = preset_values(study.correction, study.correction, axis.path) if axis.is_numeric else []
        if not own:
            return None
        places.append(int(np.argmin([abs(float(value or 0.0) - own[0]) for value in axis.values])))
    return int(np.ravel_multi_index(places, study.shape))


def choose_start_point(rows: Sequence[SweepRow]) -> int:
    """Return the strictest affordable point, or the cheapest. The middle one wins a tie."""
    known = [row for row in rows if row["pareto"]] or list(rows)
    lost = [math.inf if row["rejected_tokens"] is None else row["rejected_tokens"] for row in known]
    affordable = [share for share in lost if share <= MAX_START_REJECTION]
    wanted = max(affordable) if affordable else min(lost)
    equal = [row["point"] for row, share in zip(known, lost, strict=True) if share == wanted]
    return int(equal[len(equal) // 2])


def _lead_sentence(study: Study, start: int) -> str:
    about = f"{escape_terminal(study.correction.about).rstrip('.')}. " if study.correction.about else ""
    paths = [axis.path for axis in study.axes if axis.path.rpartition(".")[2] in INTERVAL_FIELDS]
    names = " and ".join(
        dict.fromkeys(axis_label(study.correction, path).removeprefix("bound x of ") for path in paths)
    )
    sides = f"A bound x of {names} keeps [1/x, x], or [-x, x] for differences. " if paths else ""
    fixed = f"Curves pass through {escape_terminal(format_point(study, start))}." if len(study.axes) > 1 else ""
    return escape_terminal((about[:1].upper() + about[1:] + sides + fixed).strip()) or "One threshold varies."


def _figure_parts(study_run: StudyRun) -> Iterator[DocumentPart]:
    """Yield the curves along each numeric axis, then maps and the Pareto front."""
    from mismatchctl.report.figures.sweep import curves_figure  # slow import, only needed for HTML

    study, start, found, axes = study_run.study, study_run.start, [], []
    paths = file_stems([axis.path for axis in study.axes])
    for place, axis in enumerate(study.axes):
        if not axis.is_numeric or len(axis.values) < 2:
            continue
        order = sorted(range(len(axis.values)), key=lambda index: float(axis.values[index] or 0.0))
        through = list(np.unravel_index(start, study.shape))
        points = [
            int(np.ravel_multi_index([*through[:place], index, *through[place + 1 :]], study.shape)) for index in order
        ]
        values = np.array([axis.values[index] for index in order], np.float64)
        rules = (*_preset_rules(study_run, axis.path), *_target_rules(study_run, axis.path))
        for kind, curves in _curve_charts(study_run, points, place, values, rules).items():
            drawn = curves_figure(curves, f"{study_run.stem}-{paths[place]}-{kind}")
            if drawn is not None:
                found.append(drawn)
                axes.append(
                    f"{study_run.sweep.runs.index(study_run.run)}-{study_run.sweep.studies.index(study)}-{place}"
                )
    yield Figures([_front_figure(study_run)])
    yield Figures(found, axes)
    yield Figures(list(_map_figures(study_run)))


def _curve_charts(
    study_run: StudyRun, points: Sequence[int], place: int, values: Float64s, rules: tuple[ReferenceLine, ...]
) -> dict[str, CurveChart]:
    """Return the figures along an axis by name."""
    from mismatchctl.report.figures.sweep import Curve, CurveChart

    study, axis = study_run.study, study_run.study.axes[place]
    label = axis_label(study.correction, axis.path)

    def line(name: str, key: str, *, errors: bool = True) -> Curve:
        return Curve(name, study_run.floats(key)[points], study_run.floats(f"{key}_se")[points] if errors else None)

    def chart(subject: str, unit: str, lines: tuple[Curve, ...], caption: str, **more: Any) -> CurveChart:
        return CurveChart(subject, unit, label, values, axis.log, lines, caption, rules=rules, **more)

    found = {}
    if study.correction.gates:
        lines = line("tokens", "rejected_tokens"), line("sequences", "rejected_sequences")
        found["rejected"] = chart("Rejected", "share rejected", lines, "Data that is not trained on.", percent=True)
    lines = line("tokens", "ess_token"), line("sequences", "ess_sequence")
    caption = "The data that remains after weights and rejection."
    found["ess"] = chart("Effective sample size", "effective sample size", lines, caption, percent=True)
    if study.correction.weight is not None:
        caption = "1 is unbiased. The bound alone moves the mean weight away from it."
        found["bias"] = chart(
            "Mean weight", "mean weight", (line("mean weight", "weight_mean"),), caption, expected=1.0
        )
    else:
        kept = (line("K3 kept", "k3_kept", errors=False),)
        found["k3_kept"] = chart(
            "K3 of the kept tokens", "K3 (nats/token)", kept, "The mismatch that remains in training."
        )
    return found


def axis_label(correction: Correction, path: str) -> str:
    """Return the meaning of an axis, for example "geometric mean, bound x"."""
    kind, _, rest = path.partition(".")
    index = rest.partition(".")[0]
    rule: Weight | Gate | None = correction.weight if kind == "weight" else None
    if kind == "gates" and index.isdecimal() and int(index) < len(correction.gates):
        rule = correction.gates[int(index)]
    return escape_terminal(path if rule is None else f"bound x of the {rule_name(rule)}")


def _preset_rules(study_run: StudyRun, path: str) -> Iterator[ReferenceLine]:
    """Yield the presets on an axis. Presets at the same place share a rule."""
    from mismatchctl.report.figures.figure import ReferenceLine

    for mark in study_run.sweep.marks:
        if (mark.correction, mark.path) == (study_run.study.name, path):
            yield ReferenceLine("x", mark.value, escape_terminal(_first_preset(mark)), style="limit")


def _target_rules(study_run: StudyRun, path: str) -> Iterator[ReferenceLine]:
    """Yield solved targets, if the correction only has the rule that varies here."""
    from mismatchctl.report.figures.figure import ReferenceLine

    correction = study_run.study.correction
    if (correction.weight is not None) + len(correction.gates) != 1:
        return
    for target in study_run.sweep.targets:
        if target.run == study_run.run and target.correction is not None and target.status == "ok":
            solved = parse_correction(target.correction, "target")
            wish = f"{format_target(target.wish, target.wanted)} at {format_threshold(target.threshold)}"
            for value in preset_values(solved, correction, path):
                low, high = target.interval or (None, None)
                interval = None if low is None or high is None else (low, high)
                yield ReferenceLine("x", value, escape_terminal(wish), interval, color=3)


def _map_figures(study_run: StudyRun) -> Iterator[Figure | None]:
    """Yield maps of rejection and ESS over the first two axes, with the other axes fixed."""
    from mismatchctl.report.figures.sweep import ThresholdMap, map_figure

    study, shape = study_run.study, study_run.study.shape
    if len(study.axes) < 2:
        return
    fixed = np.ravel_multi_index(np.unravel_index(study_run.start, shape)[2:], shape[2:]) if shape[2:] else 0
    up, across = (
        (axis_label(study.correction, a.path), tuple(escape_terminal(format_threshold(value)) for value in a.values))
        for a in study.axes[:2]
    )
    titles = {"rejected_tokens": "Rejected tokens"} if study.correction.gates else {}
    for key, title in (titles | {"ess_token": "Effective sample size of tokens after"}).items():
        values = study_run.floats(key).reshape(*shape[:2], -1)[:, :, fixed]
        yield map_figure(ThresholdMap(title, across, up, values), f"{study_run.stem}-map-{key}")


def _front_figure(study_run: StudyRun) -> Figure | None:
    """Draw the K3 that remains, or the ESS, against the rejected share. Presets on the axes are named."""
    from mismatchctl.report.figures.figure import Axis
    from mismatchctl.report.figures.sweep import ParetoChart, front_figure

    study, rejected = study_run.study, study_run.floats("rejected_tokens")
    rejects = bool(np.nanmax(rejected, initial=0.0) > 0)
    ess = Axis("effective sample size of tokens", percent=True)
    if rejects:
        x, y, up = Axis("tokens rejected", percent=True), Axis("K3 of the kept tokens (nats/token)", "log"), "k3_kept"
    else:
        x, y, up = Axis("|bias of the bound|"), ess, "ess_token"
    across = rejected if rejects else np.abs(study_run.floats("weight_bias"))
    heights = study_run.floats(up)
    if rejects and not np.nanmin(heights, initial=math.inf) > 0:
        y, heights = ess, study_run.floats("ess_token")
    names = tuple(", ".join(format_threshold(value) for value in values) for values in study.points)
    best = np.array([bool(row["pareto"]) for row in study_run.rows])
    caption = "Color: no other point is as good in rejection, ESS and bias at once. Labels are thresholds and presets."
    front = ParetoChart(x, y, across, heights, best, names, caption)
    marks = []
    for mark in study_run.sweep.marks if len(study.axes) == 1 and study.axes[0].is_numeric else ():
        if mark.correction == study.name:
            point = int(np.argmin([abs(float(value or 0) - mark.value) for value in study.axes[0].values]))
            if math.isfinite(across[point]) and math.isfinite(heights[point]):
                marks.append((escape_terminal(_first_preset(mark)), float(across[point]), float(heights[point])))
    return front_figure(front, f"{study_run.stem}-front", marks)


def _points_table(study_run: StudyRun, rows: Sequence[SweepRow], caption: str, registry: MetricRegistry) -> Table:
    """Return one row per point with its thresholds and the metrics that differ."""
    points = study_run.study.points
    keys = {key: POINT_METRICS[key][1] for key, _ in distinguishing_metrics(study_run.rows)}
    columns: list[Any] = []
    for place, axis in enumerate(study_run.study.axes):
        label = axis_label(study_run.study.correction, axis.path)
        kind = "number" if place else "name"
        columns.append((
            ColumnHeader(label, drop=0, short=split_title(label.removeprefix("bound "))),
            lambda row, place=place, kind=kind: _axis_cell(points[row["point"]][place], kind),
        ))  # fmt: skip
    columns += registry.columns(keys, lambda row: {key: _metric_value(study_run.sweep, row, key) for key in keys}, "c")
    table = Table.of(caption, rows, columns, sortable=True)
    if len(points) > len(rows) == MAX_ROWS:
        table.left_out = f"The first {MAX_ROWS} of {len(points):,} points; -o writes all of them."
    return table


def _axis_cell(value: Any, kind: str) -> TableCell:
    return TableCell(
        escape_terminal(format_threshold(value)), sort_key=f"{value:.6g}" if isinstance(value, float) else "", kind=kind
    )


def _metric_value(sweep: Sweep, row: SweepRow, key: str) -> Value:
    reason = sweep.reason(row, key)
    return Value(value=row[key] if reason == "ok" else None, se=row.get(f"{key}_se"), status=reason)


def _spread_table(study_run: StudyRun, points: Sequence[int]) -> Table | None:
    """Return the rejection over the steps at some points, if there are several steps and gates."""
    import polars as pl

    mine = (
        (pl.col("run") == study_run.run)
        & (pl.col("correction") == study_run.study.name)
        & pl.col("point").is_in(list(points))
    )
    steps = study_run.sweep.groups.filter((pl.col("scope") == GROUP_SCOPE) & mine)
    shares = steps.select("point", "group", "rejected_tokens").drop_nulls("rejected_tokens").collect()
    if shares["group"].n_unique() < 2 or not study_run.study.correction.gates:
        return None
    found = [(point, of) for (point,), of in shares.group_by("point", maintain_order=True)]

    def at(share: float) -> Callable[[Any], str]:
        return lambda item: format_number(item[1]["rejected_tokens"].quantile(share, "linear"), "fraction")

    return Table.of("Tokens rejected, step by step", sorted(found, key=lambda item: points.index(item[0])), (
        ("at", lambda item: text_cell(format_point(study_run.study, item[0]), "name")),
        (ColumnHeader("steps"), lambda item: format_number(len(item[1]), "tokens")),
        (ColumnHeader("least"), at(0.0)), (ColumnHeader("median"), at(0.5)), (ColumnHeader("most"), at(1.0)),
        ("most at step",
         lambda item: text_cell(format_label(item[1]["group"][item[1]["rejected_tokens"].arg_max() or 0]))),
        (ColumnHeader("steps emptied"),
         lambda item: format_number(int((item[1]["rejected_tokens"] == 1).sum()), "tokens")),
    ))  # fmt: skip


MAX_EXPLORER_POINTS = 4_000
"""Maximum points of a study in the explorer, summed over runs."""
MAX_CONFIGS = 400
"""Maximum points of a study with a configuration. The Pareto front is chosen first."""
OWN_SYNTAX = "mismatchctl"
EXPLORER_KEYS = (
    "rejected_tokens", "rejected_sequences", "ess_token", "ess_sequence", "weight_mean", "weight_bias",
    "weight_bounded_high", "weight_bounded_low", "normalization_factor", "k3_kept", "empty_prompts",
)  # fmt: skip


def explorer_keys(study: Study) -> list[str]:
    """Return the metrics of a point in the explorer."""
    weighted = study.correction.weight is not None
    keys = [key for key in EXPLORER_KEYS if weighted or ("weight" not in key and key != "normalization_factor")]
    sides = [f"{unit}_{side}" for unit in ("tokens", "sequences") for side in ("low", "high")]
    return [*keys, *(f"gate{gate}_{side}" for gate in range(len(study.correction.gates)) for side in sides)]


def explorer_data(sweep: Sweep, every: Sequence[Sequence[StudyRun]], registry: MetricRegistry) -> dict[str, Any]:
    """Return the data of the explorer's script. Studies with too many points are omitted."""
    emptied, runs = _count_empty_steps(sweep), len(every)
    places = [place for place, own in enumerate(every[0]) if len(own.rows) * runs <= MAX_EXPLORER_POINTS]
    shown = [[own[place] for place in places] for own in every]
    return {
        "runs": [
            {
                "name": escape_terminal(run),
                "studies": [{"start": one.start, "values": _point_texts(one, emptied)} for one in own],
            }
            for run, own in zip(sweep.runs, shown, strict=True)
        ],
        "studies": [
            {
                "name": escape_terminal(one.study.name),
                "title": escape_terminal(correction_label(one.study.correction)),
                "place": place,
                "axes": [
                    {
                        "path": axis_label(one.study.correction, axis.path),
                        "texts": _axis_texts(one.study, at, one.start),
                        "values": list(axis.values) if axis.is_numeric else None,
                    }
                    for at, axis in enumerate(one.study.axes)
                ],
                "titles": [
                    *((registry.metric(key, "c").title, f"c-{key}") for key in explorer_keys(one.study)),
                    ("steps left empty", ""),
                ],
                "configs": _config_data(one.study, [own[place].rows for own in every]),
            }
            for place, one in zip(places, shown[0], strict=True)
        ],
    }


def _axis_texts(study: Study, place: int, start: int) -> list[str]:
    """Return the meaning of each value of an axis, the other axes as at the start."""
    through = list(np.unravel_index(start, study.shape))
    texts = []
    for index, value in enumerate(study.axes[place].values):
        point = int(np.ravel_multi_index([*through[:place], index, *through[place + 1 :]], study.shape))
        label = threshold_label(study.correction_at(point), study.axes[place].path)
        texts.append(escape_terminal(f"{label} (x = {format_threshold(value)})"))
    return texts


def _count_empty_steps(sweep: Sweep) -> dict[tuple[str, str, int], str]:
    """Count the steps without a kept token by run, correction and point."""
    import polars as pl

    empty = (pl.col("kept_tokens") == 0) & (pl.col("tokens") > 0)
    steps = sweep.groups.filter(pl.col("scope") == GROUP_SCOPE)
    counts = steps.group_by("run", "correction", "point", maintain_order=True).agg(
        empty.sum().alias("empty"), pl.len().alias("steps")
    )  # fmt: skip
    rows = counts.filter(pl.col("empty") > 0).collect().iter_rows()
    return {(run, name, point): f"{empty:,} of {steps:,}" for run, name, point, empty, steps in rows}


def _point_texts(study_run: StudyRun, emptied: Mapping[tuple[str, str, int], str]) -> list[list[str]]:
    """Return one list per metric with a string per point."""
    found = [
        [_format_cell(study_run.sweep, row, key) for row in study_run.rows] for key in explorer_keys(study_run.study)
    ]
    return [*found, [emptied.get((study_run.run, study_run.study.name, row["point"]), "0") for row in study_run.rows]]


def _format_cell(sweep: Sweep, row: SweepRow, key: str) -> str:
    reason = sweep.reason(row, key)
    value = row[key] if reason == "ok" else None
    return format_estimate_or_reason(value, row.get(f"{key}_se"), sweep.metrics[key].unit, reason)


def _config_data(study: Study, runs: Sequence[Sequence[SweepRow]]) -> dict[str, Any]:
    """Return the configurations of points in each syntax, as indices into the distinct lines."""
    lines: dict[str, int] = {}
    frameworks = [framework for framework in _explorer_frameworks() if framework.native(study.correction_at(0))[0]]
    points = {
        point: [
            [lines.setdefault(line, len(lines)) for line in text.splitlines()]
            for text in _config_texts(study.correction_at(point), frameworks)
        ]
        for point in _points_with_configs(runs)
    }
    return {
        "names": [OWN_SYNTAX, *(framework.title for framework in frameworks)],
        "lines": list(lines),
        "points": points,
    }


def _config_texts(correction: Correction, frameworks: Sequence[Framework]) -> Iterator[str]:
    """Yield a correction as YAML, then in each framework's syntax."""
    # The description is about another point.
    named = correction.model_copy(update={"name": escape_terminal(correction.name), "about": ""})
    yield format_preset(Preset(named))
    yield from (format_native(named, framework, nearest=True) for framework in frameworks)


def _points_with_configs(runs: Sequence[Sequence[SweepRow]]) -> list[int]:
    """Return the points that get a configuration."""
    rows = [row for run in runs for row in run]
    points = list(dict.fromkeys(row["point"] for row in rows))
    if len(points) <= MAX_CONFIGS:
        return points
    best = sorted({row["point"] for row in rows if row["pareto"]})
    return thin_rows(best, MAX_CONFIGS)


@cache
def _explorer_frameworks() -> tuple[Framework, ...]:
    return tuple(shelf.load("") for shelf in load_adapters())


FOLD_ROWS = 16
"""Number of rows from which a table of predictions is folded."""


def document(sweep: Sweep) -> Document:
    """Build the page of a sweep."""
    corrections = [study.correction for study in sweep.studies]
    registry = MetricRegistry(corrections)
    registry.corrections |= {key: metric for key, metric in sweep.metrics.items() if key not in registry.corrections}
    every, several = [list(_studied_corrections(sweep, index)) for index in range(len(sweep.runs))], len(sweep.runs) > 1
    title = f"{len(sweep.runs)} runs" if several else escape_terminal(sweep.runs[0])
    doc = Document(
        Headline(title, _size_facts(sweep, every), subtitle="thresholds"), version=escape_terminal(sweep.version)
    )
    answer = Section("Summary", "sweep-answer")
    for run in sweep.runs:
        first, *others = map(escape_terminal, sweep_sentences(sweep, run))
        answer.add(Note(f"{escape_terminal(run)}: {first}" if several else first), *map(Note, others))
    warnings = [Note(escape_terminal(note), "alarm") for note in (*sweep.warnings, *skipped_data_notes(sweep.left_out))]
    doc.add(answer, Section("Look at this, too", "sweep-notes", reach=PAGE_ONLY).add(*warnings))
    doc.add(DeferredSection(lambda: [_explorer_section(sweep, every, registry)]))
    for index, own in enumerate(every):
        parts = [*(study_section(one, registry) for one in own), *_run_sections(sweep, index)]
        doc.add(
            *([Section(escape_terminal(sweep.runs[index]), f"thresholds-{index}").add(*parts)] if several else parts)
        )
    doc.add(Section("", "sweep-notes", terminal=True).add(*warnings))
    doc.glossary = lambda: [("Thresholds", registry.entries("c"))]
    return doc.add(provenance_section(sweep.version, sweep.inputs, sweep.left_out, corrections))


def _studied_corrections(sweep: Sweep, index: int) -> Iterator[StudyRun]:
    """Yield each correction on one run."""
    run, names = sweep.runs[index], file_stems([study.name for study in sweep.studies])
    for place, study in enumerate(sweep.studies):
        rows = sweep.rows(run, study.name).to_dicts()
        yield StudyRun(
            sweep, run, study, rows, f"thresholds-{index}-{place}", f"{_figure_prefix(sweep, index)}{names[place]}"
        )


def _figure_prefix(sweep: Sweep, index: int) -> str:
    """Return the prefix of a run's figure names."""
    return f"{file_stems(sweep.runs)[index]}-" if len(sweep.runs) > 1 else ""


def _size_facts(sweep: Sweep, every: Sequence[Sequence[StudyRun]]) -> list[str]:
    first = [own[0].rows[0] for own in every]
    counts = [(int(sum(row[f"{noun}s"] for row in first)), noun) for noun in ("token", "sequence")]
    counts += [(len(sweep.studies), "correction"), (sum(len(study.points) for study in sweep.studies), "point")]
    return [format_count(*each) for each in counts]


def _explorer_section(sweep: Sweep, every: Sequence[Sequence[StudyRun]], registry: MetricRegistry) -> Section:
    """Build the explorer, and list the studies that are too large for it."""
    lead = ["Move a threshold to see its effect and its configuration. The line in the curves moves along."]
    data = explorer_data(sweep, every, registry)
    explored = [study["name"] for study in data["studies"]]
    left = [escape_terminal(study.name) for study in sweep.studies if escape_terminal(study.name) not in explored]
    if left:
        lead.append(f"Too large to explore here (more than {MAX_EXPLORER_POINTS:,} points): {', '.join(left)}.")
    if any(len(study.points) > MAX_CONFIGS for study in sweep.studies if escape_terminal(study.name) in explored):
        lead.append(f"Of more than {MAX_CONFIGS} points, those that no other beats are written as configurations.")
    return Section("Explore", "explore", lead=" ".join(lead)).add(Explorer(data))


def _run_sections(sweep: Sweep, index: int) -> Iterator[Section]:
    """Yield the targets and predictions of one run."""
    run, anchor = sweep.runs[index], f"thresholds-{index}"
    targets = group_by_target([target for target in sweep.targets if target.run == run])
    yield Section("Targets", f"{anchor}-targets").add(
        *(_targets_table(format_target(*wish), t) for wish, t in targets.items())
    )
    predictions = run_predictions(sweep, run)

    def checks() -> Iterator[Figures]:
        from mismatchctl.report.figures.sweep import checks_figure  # slow import, only needed for HTML

        found = [one.check for every in predictions.values() for one in every if one.check is not None]
        yield Figures([checks_figure(found, f"{_figure_prefix(sweep, index)}checks")])

    yield Section(
        "Predictions", f"{anchor}-predictions",
        lead="What some of the points would do where the dump does not reach, each with its 90% interval.",
    ).add(*_prediction_parts(predictions), DeferredSection(checks) if predictions else None)  # fmt: skip


def _targets_table(wish: str, targets: Iterable[SolvedThreshold]) -> Table:
    """Return the thresholds that meet one target."""

    def reached(target: SolvedThreshold) -> TableCell:
        status = escape_terminal(target.status)
        return TableCell(format_number(target.reached, "fraction")) if status == "ok" else TableCell(status, status)

    columns: TableColumns[SolvedThreshold] = (
        ("rule", lambda target: text_cell(target.rule, "name")),
        (ColumnHeader("x", drop=0), lambda target: format_threshold(target.threshold)),
        (ColumnHeader("90% interval", numeric=False, drop=1), format_target_interval),
        (ColumnHeader("reached", numeric=False, drop=0), reached),
    )
    caption = f"Thresholds for {wish}"
    return Table.of(caption, targets, columns, title=caption, reach=EVERYWHERE)


def _prediction_parts(predictions: Mapping[str, Sequence[Prediction]]) -> Iterator[DocumentPart]:
    """Yield a table per question and the models used."""
    questions: dict[str, list[tuple[str, Prediction]]] = {}
    for name, every in predictions.items():
        for one in every:
            questions.setdefault(one.question, []).append((name, one))
    columns: TableColumns[tuple[str, Prediction]] = (
        ("point", lambda item: text_cell(item[0], "name")),
        (ColumnHeader("what", numeric=False, drop=0), lambda item: SHORT_TITLES[item[1].quantity]),
        (ColumnHeader("predicted", drop=0), lambda item: TableCell(
            format_number(item[1].value, "fraction"),
            "" if item[1].status == "ok" else escape_terminal(item[1].status))),
        (ColumnHeader("90% interval", numeric=False, drop=0), lambda item: format_interval(item[1])),
        (ColumnHeader("status", numeric=False, drop=2), lambda item: _short_status(item[1].status)),
    )  # fmt: skip
    for question, found in questions.items():
        caption = f"Predicted: {escape_terminal(question)}"
        yield Table.of(caption, found, columns, title=caption, reach=EVERYWHERE, folded=len(found) > FOLD_ROWS)
        models = dict.fromkeys(sentence for _, one in found for sentence in _describe_model(one))
        yield from (Note(escape_terminal(sentence), "quiet") for sentence in models)


def _describe_model(one: Prediction) -> Iterator[str]:
    if one.status not in ("ok", _short_status(one.status)):
        yield one.status
    yield f"Model: {one.model}."
    if one.check is not None:
        yield describe_check(one.check)


def _short_status(status: str) -> str:
    """Return the part of a status before the colon, or an empty string for `ok`."""
    return "" if status == "ok" else escape_terminal(status.partition(":")[0])
