"""The class `Sweep`: a table with one row per point (combination of thresholds), and predictions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import polars as pl
from polars import selectors
from pydantic import BaseModel, ConfigDict, Field, field_validator

from mismatchctl.api.predict import (
    BackTest,
    Prediction,
    SequenceSample,
    predict_at_length,
    predict_at_step,
    predict_batch_rejection,
)
from mismatchctl.api.sweep.study import INTERVAL_FIELDS, Study, ThresholdAxis, validate_study
from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.formatting import CSV_CONTROLS, DASH, FORMULA_START, format_number
from mismatchctl.core.validation import LARGEST_SUM, replace_nonfinite, replace_nonfinite_in_table
from mismatchctl.corrections.labels import threshold_label
from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.errors import ConfigError
from mismatchctl.io import __version__
from mismatchctl.io.files import PARQUET_METADATA, atomic_output
from mismatchctl.measure.metrics.metric import Metric, value_status
from mismatchctl.measure.metrics.registry import sweep_metrics
from mismatchctl.results.model import InputFile, SkippedData
from mismatchctl.results.views import SWEEP_COLUMNS, TableText, View, format_cell

MAX_FORECAST_POINTS = 8
"""Maximum number of points with predictions per study. From a larger study, evenly spaced points are chosen."""
REJECTION_METRICS = ("rejected_sequences", "rejected_tokens")


@dataclass(frozen=True)
class ForecastRequest:
    """The predictions that a sweep makes. A field that is `None` or () adds no predictions."""

    batch: int | None = None  # predict for a batch of this number of sequences
    lengths: tuple[int, ...] = ()  # predict for responses with these numbers of tokens
    ahead: float | None = None  # predict for this number of steps after the last step


@dataclass(frozen=True)
class Forecast:
    """Predictions for one run and one point of a sweep."""

    run: str
    correction: str
    point: int
    predictions: tuple[Prediction, ...]


def make_forecasts(
    outlook: ForecastRequest,
    points: Sequence[tuple[Study, int]],
    runs: Sequence[str],
    sample: SequenceSample,
    groups: pl.LazyFrame,
) -> tuple[Forecast, ...]:
    found = []
    for run in runs:
        own = sample.of_run(run)
        for number, (study, point) in enumerate(points):
            predictions: list[Prediction] = []
            if outlook.batch is not None:
                predictions.append(predict_batch_rejection(own, number, outlook.batch, "sequences"))
                predictions.append(predict_batch_rejection(own, number, outlook.batch, "tokens"))
            for length in outlook.lengths:
                predictions += predict_at_length(own, study.correction_at(point), length)
            if outlook.ahead is not None:
                predictions += _forecast_step(groups, run, study.name, point, outlook.ahead)
            if predictions:
                found.append(Forecast(run, study.name, point, tuple(predictions)))
    return tuple(found)


def _forecast_step(groups: pl.LazyFrame, run: str, name: str, point: int, ahead: float) -> list[Prediction]:
    own = (pl.col("run") == run) & (pl.col("correction") == name) & (pl.col("point") == point)
    rows = groups.filter(own & (pl.col("scope") == "group")).select("group", *REJECTION_METRICS).collect()
    steps = rows["group"].cast(pl.Float64, strict=False).to_list()  # text unless all steps and values are numbers
    return [predict_at_step(key, steps, rows[key].to_list(), ahead) for key in REJECTION_METRICS]


FORMAT = 2
"""Version of the JSON of a Sweep. The version increases if a key is removed or changes its meaning."""
METRICS_WITH_ERRORS = ("rejected_tokens", "rejected_sequences", "ess_token", "ess_sequence", "weight_mean")
"""The table `Sweep.overall` has a column `<key>_se` with the standard error of each of these metrics."""
OVERALL_SCOPE = "overall"
"""Value of column `scope` for a whole run. It is `group` for a step, and the column's name for a `--by` value."""
GROUP_SCOPE = "group"
MET_EVERYWHERE = "met at every threshold"
"""`SolvedThreshold.status` starts with this text if every tried threshold meets the target."""


@dataclass(frozen=True)
class SolvedThreshold:
    """The threshold of a rule that meets a target on one run, for example 1% rejected tokens."""

    run: str
    wish: str  # the target's metric: rejected_tokens, rejected_sequences or ess_token
    wanted: float  # the target's value
    rule: str  # description of the rule, such as "token weights truncated at x"
    correction: dict[str, Any] | None = None  # the correction with this threshold, or None if no threshold is found
    threshold: float | None = None  # the value of x in `rule`
    # 95% interval of `threshold`. An end beyond all tried thresholds is None. With one cluster, `interval` is None.
    interval: tuple[float | None, float | None] | None = None
    reached: float | None = None  # value of the metric at this threshold
    status: str = "ok"  # "ok", or the reason why no threshold is given


@dataclass(repr=False)
class Sweep(View):
    """The result of `sweep`.

    - `studies`: each correction, with the fields that vary. A point is one combination of values of these fields.
    - `overall`: a polars DataFrame with one row per run, correction and point. The columns are run, correction, point,
      each field that varies (such as `weight.truncate`), scope (always "overall"), group (always null), tokens,
      sequences, the metrics, the standard errors of some metrics (`<key>_se`), and `pareto`.
    - `groups`: a LazyFrame with such rows for each training step and each value of a `by` column, but without standard
      errors and `pareto`. In `overall` and `groups`, undefined values are null, and overflows are infinite. The method
      `reason` explains such a value.
    - `metrics`: the metrics by key, in the order of the columns of `overall`.
    - `targets`: the thresholds that meet the requested targets, such as 1% rejected tokens.
    - `forecasts`: the requested predictions, such as for longer responses.
    - `by`: the columns of the dump that `groups` is broken down by.
    - `summary`: for each run, sentences about the targets and the point of each correction that rejects least.
    """

    studies: tuple[Study, ...]
    metrics: dict[str, Metric]
    overall: pl.DataFrame
    groups: pl.LazyFrame
    inputs: list[InputFile]
    left_out: list[SkippedData] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    targets: tuple[SolvedThreshold, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    by: tuple[str, ...] = ()
    version: str = __version__
    summary: dict[str, list[str]] = field(default_factory=dict)

    @property
    def runs(self) -> list[str]:
        """Return the names of the runs."""
        return list(self.overall["run"].unique(maintain_order=True))

    @property
    def axis_paths(self) -> list[str]:
        """Return the fields that vary in a study, such as `weight.truncate`. These fields are columns of `overall`."""
        return list(dict.fromkeys(axis.path for study in self.studies for axis in study.axes))

    def place(self, correction: str, point: int) -> dict[str, Any]:
        """Return the value of each varying field at one point, such as `{"weight.truncate": 2.0}`."""
        study = self.study(correction)
        return dict(zip([axis.path for axis in study.axes], study.points[point], strict=True))

    def study(self, name: str) -> Study:
        """Return the study of the correction with this name."""
        return next(study for study in self.studies if study.name == name)

    def reason(self, row: Mapping[str, Any], key: str) -> str:
        """Return "ok" if the metric `key` has a finite value in this row, or else the reason why not."""
        value, metric = row[key], self.metrics[key]
        if value is not None and math.isfinite(value):
            return "ok"
        weight = self.study(row["correction"]).correction_at(row["point"]).weight
        if key == "normalization_factor" and (weight is None or weight.normalize == "none"):
            return metric.undefined
        return value_status(math.nan if value is None else value, metric.undefined, empty=row["tokens"] == 0)

    def all_rows(self) -> pl.LazyFrame:
        """Return the rows of `overall`, then the rows of `groups`."""
        return pl.concat([self.overall.lazy(), self.groups], how="diagonal_relaxed")

    def to_json(self) -> str:
        """Return JSON without NaN and infinity, as `mismatchctl sweep --json` prints it."""
        table = replace_nonfinite_in_table(self.all_rows()).collect()
        data = {
            "format": FORMAT,
            "tool": "mismatchctl",
            "version": self.version,
            "inputs": [file.model_dump(mode="json") for file in self.inputs],
            "left_out": [item.model_dump(mode="json") for item in self.left_out],
            "warnings": self.warnings,
            "says": self.summary,
            "studies": [
                {"correction": study.correction.to_mapping(), "axes": [asdict(axis) for axis in study.axes]}
                for study in self.studies
            ],
            "targets": [asdict(target) for target in self.targets],
            "predictions": [asdict(forecast) for forecast in self.forecasts],
        }
        data = replace_nonfinite(data) | {"table": {name: table[name].to_list() for name in table.columns}}
        return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n"

    def rows(self, run: str, correction: str) -> pl.DataFrame:
        """Return the rows of `overall` for one run and one correction, ordered by point."""
        return self.overall.filter((pl.col("run") == run) & (pl.col("correction") == correction)).sort(
            "point", maintain_order=True
        )

    def to_polars(self) -> pl.DataFrame:
        """Return the table `overall`, with one row per run, correction and point."""
        return self.overall

    def _lines(self) -> list[str]:
        count = f"{self.overall.height:,} points over {', '.join(self.axis_paths)}"
        return [count, *(f"{run}: {lines[0]}" for run, lines in self.summary.items() if lines)]

    def _table(self) -> TableText:
        kept = [
            name for name in ("run", "correction", *self.axis_paths, *SWEEP_COLUMNS) if name in self.overall.columns
        ]
        return kept, [[format_cell(value) for value in row] for row in self.overall.select(kept).rows()]


_ROUNDING_BITS = 33  # about ten significant digits


def pareto_mask(costs: Float64s) -> Bools:
    """Return True for each point on the Pareto front. `costs` is [points, objectives]. Lower costs are better."""
    found = np.zeros(len(costs), np.bool_)
    front, size = np.zeros(costs.T.shape), 0  # one contiguous row per objective is faster
    for row in np.lexsort(costs.T[::-1]):
        own = costs[row]
        if np.isnan(own).any() or (front[:, :size] <= own[:, None]).all(axis=0).any():
            continue  # of points with equal costs, only the first is on the front
        found[row] = True
        front[:, size], size = own, size + 1
    return found


def add_pareto_column(overall: pl.DataFrame, studies: Sequence[Study]) -> pl.DataFrame:
    """Add the column `pareto`, which is true for the points on the Pareto front of each correction.

    A good point rejects few tokens, has a high ESS of tokens, and a low bias. The bias of weights is the change of the
    mean weight that their bounds cause. The bias of gates is the K3 of the tokens that they keep. Values are rounded to
    about ten digits, because the order of summation changes the other digits. Of several points with equal values, only
    the point with the loosest bounds is on the front.
    """
    weighted = [study.name for study in studies if study.correction.weight is not None]
    gated = [study.name for study in studies if study.correction.gates]
    is_weighted, is_gated = (overall["correction"].is_in(names).to_numpy() for names in (weighted, gated))
    rejected, ess, left, mean, bias = (
        overall[key].cast(pl.Float64).fill_null(math.nan).to_numpy()
        for key in ("rejected_tokens", "ess_token", "k3_kept", "weight_mean", "weight_bias")
    )
    with np.errstate(invalid="ignore"):  # if weights overflow, their bias is undefined
        # round the mean weight with and without the bound first, or the difference may only be a rounding error
        moved = np.abs(round_values(mean) - round_values(mean - bias))
    costs = np.column_stack(
        [
            round_values(rejected),
            -round_values(ess),
            np.where(is_weighted, moved, 0.0),
            np.where(is_gated, round_values(left), 0.0),
        ]
    )
    places = {study.name: np.argsort(order_by_strictness(study)) for study in studies}
    place = np.array([places[name][point] for name, point in overall.select("correction", "point").iter_rows()])
    groups = overall.select(pl.struct("run", "correction").rank("dense")).to_series().to_numpy()
    flags = np.zeros(len(overall), np.bool_)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        rows = rows[np.argsort(place[rows])]
        flags[rows] = pareto_mask(costs[rows])
    return overall.with_columns(pl.Series("pareto", flags))


def sort_by_cost(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    costs = [round_values(np.array([row[key] for row in rows], np.float64)) for key in ("ess_token", "rejected_tokens")]
    return [rows[row] for row in np.lexsort((-costs[0], costs[1]))]


def round_values(values: Float64s) -> Float64s:
    """Round to about ten significant digits, because the order of summation changes the other digits."""
    mantissa, exponent = np.frexp(values)
    kept: Float64s = np.ldexp(np.round(np.ldexp(mantissa, _ROUNDING_BITS)), exponent - _ROUNDING_BITS)
    return kept


def order_by_strictness(study: Study) -> list[int]:
    """Return the indices of a study's points, sorted from the loosest to the strictest bounds."""
    columns = []
    for path in study.paths:
        variants, places = study.variants(path)
        columns.append(np.array([_bound_strictness(own, path) for own in variants])[places])
    points = np.arange(len(study.points))
    return [*map(int, points[np.lexsort(columns[::-1])] if columns else points)]


def _bound_strictness(correction: Correction, path: str) -> float:
    """Return a number for sorting by strictness: larger is stricter. Return 0 if the field at `path` is not a bound."""
    parts = path.split(".")
    is_entry = len(parts) > 1 and parts[-2] in INTERVAL_FIELDS
    if not is_entry and parts[-1] not in (*INTERVAL_FIELDS, "truncate"):
        return 0.0
    found: Any = correction
    for part in parts:
        found = found[int(part)] if isinstance(found, tuple) else getattr(found, part, None)
    if isinstance(found, tuple):
        low, high = found
        return -math.inf if low is None or high is None else low - high
    if found is None:
        return -math.inf
    return float(found) if is_entry and parts[-1] == "0" else -float(found)


POINT_METRICS = {
    "rejected_tokens": ("fraction", 0),
    "rejected_sequences": ("fraction", 4),
    "ess_token": ("fraction", 0),
    "ess_sequence": ("fraction", 3),
    "weight_mean": ("ratio", 5),
    "weight_bias": ("ratio", 2),
    "k3_kept": ("nats/token", 1),
}
"""Metric -> (unit, number). Narrow terminals drop the column with the largest number first. Number 0 always stays."""
TARGET_TEXTS = {
    "rejected_tokens": "of tokens rejected",
    "rejected_sequences": "of sequences rejected",
    "ess_token": "ESS of tokens",
}
_THRESHOLD_DIGITS = 6
_WIDE_INTERVAL, _MIN_DISTANCE = 0.02, 1e-3
"""In an interval of at least 2 percentage points, an end within 0.1% of 0 or 1 is shown as "< 0.1%" or "> 99.9%"."""

SweepRow = Mapping[str, Any]
Item = TypeVar("Item")


def run_predictions(sweep: Sweep, run: str) -> dict[str, Sequence[Prediction]]:
    found: dict[str, Sequence[Prediction]] = {}
    for forecast in sweep.forecasts:
        if forecast.run == run:
            study = next(each for each in sweep.studies if each.name == forecast.correction)
            title = f"{study.name}: {format_point(study, forecast.point)}"
            if title in found:  # rounded labels of two points may be equal
                place = sweep.place(forecast.correction, forecast.point)
                title += f" ({', '.join(map(format_threshold, place.values()))})"
            found[title] = forecast.predictions
    return found


def format_threshold(value: Any) -> str:
    if value is None:
        return DASH
    return f"{value:.{_THRESHOLD_DIGITS}g}" if isinstance(value, float) else str(value)


def format_point(study: Study, point: int) -> str:
    """Describe the thresholds of a point, for example "token weight ≤ 2"."""
    correction = study.correction_at(point)
    return ", ".join(dict.fromkeys(threshold_label(correction, axis.path) for axis in study.axes))


def distinguishing_metrics(rows: Sequence[SweepRow]) -> list[tuple[str, str]]:
    """Return (metric, unit) of the columns to show: rejected tokens, ESS, and each metric that differs between rows."""
    always = ("rejected_tokens", "ess_token")
    differing = (key for key in POINT_METRICS if key in always or any(row[key] != rows[0][key] for row in rows))
    return [(key, POINT_METRICS[key][0]) for key in differing]


def group_by_target(targets: Sequence[SolvedThreshold]) -> dict[tuple[str, float], list[SolvedThreshold]]:
    found: dict[tuple[str, float], list[SolvedThreshold]] = {}
    for target in targets:
        found.setdefault((target.wish, target.wanted), []).append(target)
    return found


def format_target(key: str, wanted: float) -> str:
    return f"{100 * wanted:.10g}% {TARGET_TEXTS[key]}"


def sweep_sentences(sweep: Sweep, run: str) -> list[str]:
    summaries = [_describe_cheapest(study, sweep.rows(run, study.name).to_dicts()) for study in sweep.studies]
    found = "; ".join(filter(None, summaries))
    sentences = [
        f"For each correction, the threshold that rejects least: {found}."
        if found
        else "No point has values of all metrics, so there is no Pareto front."
    ]
    for (key, wanted), chosen in group_by_target([target for target in sweep.targets if target.run == run]).items():
        met = [_describe_target(target) for target in chosen if target.status.startswith(("ok", MET_EVERYWHERE))]
        sentences.append(f"Thresholds x for {format_target(key, wanted)}: {'; '.join(met) or 'no threshold meets it'}.")
    return sentences


def _describe_target(target: SolvedThreshold) -> str:
    if target.status != "ok":
        return f"{target.rule}: {target.status}"
    interval = "" if target.interval is None else f" ({format_target_interval(target)})"
    return f"{target.rule}: {format_threshold(target.threshold)}{interval}"


def _describe_cheapest(study: Study, rows: Sequence[SweepRow]) -> str:
    """Describe the point on the Pareto front that rejects the fewest tokens."""
    known = sort_by_cost([row for row in rows if row["pareto"]])
    if not known:
        return ""
    row = known[0]
    lost = row["rejected_tokens"]
    cost = f"rejects {format_number(lost, 'fraction')} of tokens" if lost else "rejects nothing"
    gain = f"ESS {format_number(row['ess_token'], 'fraction')}"
    if study.correction.weight is not None:
        gain += f", changes the mean weight by {format_number(row['weight_bias'], 'ratio')}"
    return f"{study.name} ({format_point(study, row['point'])}) {cost} ({gain})"


def thin_rows(rows: Sequence[Item], most: int) -> list[Item]:
    """Select at most `most` evenly spaced rows."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def format_target_interval(target: SolvedThreshold) -> str:
    if target.interval is None:
        return DASH
    low, high = target.interval
    return (
        f"{'below' if low is None else format_threshold(low)} to {'beyond' if high is None else format_threshold(high)}"
    )


def format_interval(found: Prediction) -> str:
    if found.interval is None:
        return DASH
    low, high = found.interval
    if high - low < _WIDE_INTERVAL:
        return f"{format_number(low, 'fraction')} to {format_number(high, 'fraction')}"
    below = f"< {_MIN_DISTANCE:.1%}" if 0 < low < _MIN_DISTANCE else format_number(low, "fraction")
    above = f"> {1 - _MIN_DISTANCE:.1%}" if 1 - _MIN_DISTANCE < high < 1 else format_number(high, "fraction")
    return f"{below} to {above}"


def describe_check(check: BackTest) -> str:
    """Describe how well the first tokens of responses predict the rejected share at larger lengths."""
    lengths = " and ".join(f"{length:,}" for length in dict.fromkeys(check.lengths))
    noise = math.sqrt(2 / math.pi) * sum(check.noise) / len(check.noise)  # mean |error| that noise alone causes
    return (
        f"Test on the dump: from the first {check.start:,} tokens of responses, the predicted rejection at {lengths} "
        f"tokens is {100 * check.error:.1f} percentage points off on average. Noise alone causes {100 * noise:.1f}."
    )


_TEXT_COLUMNS, _FLAG_COLUMN = ("run", "correction", "scope"), "pareto"
ColumnValues = list[Any]  # each is a bool, int, float, str or None
_REQUIRED_COLUMNS = (*_TEXT_COLUMNS, "point", "group", "tokens", "sequences", _FLAG_COLUMN)


class _StudyData(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    correction: dict[str, Any]
    axes: list[ThresholdAxis] = Field(min_length=1)

    @field_validator("axes")
    @classmethod
    def _require_values(cls, axes: list[ThresholdAxis]) -> list[ThresholdAxis]:
        if not all(axis.values for axis in axes):
            raise ValueError("an axis needs at least one value")
        return axes


class _SweepData(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    format: Literal[2]
    tool: str
    version: str
    inputs: list[InputFile]
    left_out: list[SkippedData]
    warnings: list[str]
    says: dict[str, list[str]] = Field(default_factory=dict)
    studies: list[_StudyData] = Field(min_length=1)
    targets: list[SolvedThreshold]
    predictions: list[Forecast]
    table: dict[str, ColumnValues]


def sweep_from_json(data: Mapping[str, Any]) -> Sweep:
    """Make a Sweep from its parsed JSON. Raises ValueError or ConfigError if the JSON is not a valid Sweep."""
    saved = _SweepData.model_validate(data)
    found = [Study(parse_correction(item.correction), tuple(item.axes)) for item in saved.studies]
    studies = tuple(map(validate_study, found))
    table = _build_table(saved.table, studies)
    runs, points = table["run"].to_list(), {study.name: len(study.points) for study in studies}
    for target in saved.targets:
        if target.run not in runs:
            raise ValueError(f"targets: unknown run {target.run}")
        if target.correction is not None:
            parse_correction(target.correction)
    for forecast in saved.predictions:
        if forecast.run not in runs or not 0 <= forecast.point < points.get(forecast.correction, 0):
            raise ValueError(f"predictions: unknown point {forecast.point} of {forecast.correction} on {forecast.run}")
    made = Sweep(
        studies=studies,
        metrics={metric.key: metric for study in studies for metric in sweep_metrics(study.correction)},
        overall=table.filter(pl.col("scope") == OVERALL_SCOPE),
        groups=table.filter(pl.col("scope") != OVERALL_SCOPE).lazy(),
        inputs=saved.inputs,
        left_out=saved.left_out,
        warnings=saved.warnings,
        targets=tuple(saved.targets),
        forecasts=tuple(saved.predictions),
        version=saved.version,
    )
    made.summary = {run: sweep_sentences(made, run) for run in made.runs}
    return made


def _build_table(columns: Mapping[str, ColumnValues], studies: tuple[Study, ...]) -> pl.DataFrame:
    paths = {axis.path for study in studies for axis in study.axes}
    metrics = {metric.key for study in studies for metric in sweep_metrics(study.correction)}
    if missing := sorted({*_REQUIRED_COLUMNS, *paths, *metrics} - set(columns)):
        raise ValueError(f"table: no column {missing[0]}")
    if len({*map(len, columns.values())}) > 1:
        raise ValueError("table: the columns have different lengths")
    kinds: dict[str, type[pl.DataType]] = dict.fromkeys(columns.keys() - {"group", *paths}, pl.Float64)
    kinds |= dict.fromkeys(_TEXT_COLUMNS, pl.String) | {"point": pl.Int64, _FLAG_COLUMN: pl.Boolean}
    series = []
    for name, values in columns.items():
        if name.endswith("_se") and any(
            type(value) in (int, float) and not 0 <= value < LARGEST_SUM for value in values
        ):
            raise ValueError(f"table: column {name} contains a standard error below 0 or above {LARGEST_SUM:g}")
        try:
            types = {*map(type, values)}
            if {list, dict} & types:
                raise TypeError
            if {int, float} <= types:  # some tools write the float 1.0 as 1
                values = [float(value) if type(value) is int else value for value in values]
            own = pl.Series(name, values)
            series.append(own.cast(kinds[name]) if name in kinds else own)
        except (TypeError, OverflowError, pl.exceptions.PolarsError):
            raise ValueError(f"table: column {name} contains an invalid value") from None
    table = pl.DataFrame(series)
    points = [(study.name, point) for study in studies for point in range(len(study.points))]
    if len({*points}) < len(points):
        raise ValueError("studies: two studies have the same name")
    if unknown := {*table.select("correction", "point").iter_rows()} - {*points}:
        raise ValueError("table: point {1} of {0} does not belong to a study".format(*unknown.pop()))
    overall = table.filter(pl.col("scope") == OVERALL_SCOPE).select("run", "correction", "point").rows()
    runs = table["run"].unique().to_list()
    if not runs or sorted(overall) != sorted((run, *point) for run in runs for point in points):
        raise ValueError("table: each run must have one overall row for each point")
    if table.filter(pl.col("scope") == GROUP_SCOPE)["tokens"].null_count():
        raise ValueError("table: a group lacks its number of tokens")
    return table


SUFFIXES = (".parquet", ".csv", ".json")


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: the name of a file for a sweep must end in {', '.join(SUFFIXES)}")


def write_sweep(sweep: Sweep, path: Path) -> None:
    with atomic_output(path) as temporary:
        table = replace_nonfinite_in_table(sweep.all_rows())
        if path.suffix == ".json":
            temporary.write_text(sweep.to_json(), encoding="utf-8")
        elif path.suffix == ".csv":  # replace control characters, escape formulas
            text = selectors.string().as_expr()  # polars 1 needs this conversion
            shown = text.str.replace_all(CSV_CONTROLS, "\N{REPLACEMENT CHARACTER}")
            table.with_columns(shown.str.replace_all(FORMULA_START, "${1}'${2}").name.keep()).sink_csv(temporary)
        else:
            table.sink_parquet(temporary, compression="zstd", metadata=PARQUET_METADATA)
