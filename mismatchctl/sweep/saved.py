"""A sweep read back from JSON: whole, each part fitting the others, or refused; nothing behind it doubts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mismatchctl.correction import correction_from_mapping
from mismatchctl.errors import ConfigError
from mismatchctl.measure.metrics import Metric, correction_metrics
from mismatchctl.measure.metrics.corrections import AGGREGATED, COSTS
from mismatchctl.result import InputFile, LeftOut
from mismatchctl.sweep.model import GROUP, OVERALL, Mark, SolvedThreshold, Sweep
from mismatchctl.sweep.outlook import Forecast
from mismatchctl.sweep.study import AxisValue, Study, ThresholdAxis, checked

if TYPE_CHECKING:
    import polars as pl

FORMAT = 1
"""Version of the JSON; it grows when a key changes its meaning or goes away."""
_TEXT, _FLAG = ("run", "correction", "scope"), "pareto"
Cells = list[bool | int | float | str | None]
_LEAST = (*_TEXT, "point", "group", "tokens", "sequences", _FLAG)


class _SavedModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Axis(_SavedModel):
    path: str
    values: list[AxisValue] = Field(min_length=1)
    log: bool


class _Study(_SavedModel):
    correction: dict[str, Any]
    axes: list[_Axis] = Field(min_length=1)


class _Saved(BaseModel):
    """What the file holds."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    format: Literal[1]
    tool: str
    version: str
    inputs: list[InputFile]
    left_out: list[LeftOut]
    warnings: list[str]
    says: dict[str, list[str]] = Field(default_factory=dict)
    studies: list[_Study] = Field(min_length=1)
    presets: list[Mark]
    targets: list[SolvedThreshold]
    predictions: list[Forecast]
    table: dict[str, Cells]


def from_json(data: Mapping[str, Any]) -> Sweep:
    """A Sweep from what `to_json` wrote, read as plain data.

    Raises:
        ValueError: it is something else, or its parts do not fit each other.
    """
    import polars as pl

    saved = _Saved.model_validate(data)
    studies = tuple(_study(item) for item in saved.studies)
    table = _table(saved.table, studies)
    runs = set(table["run"].to_list())
    _require_known(studies, runs, saved)
    return Sweep(
        studies=studies,
        metrics=_metrics(studies, saved.table),
        overall=table.filter(pl.col("scope") == OVERALL),
        groups=table.filter(pl.col("scope") != OVERALL).lazy(),
        inputs=saved.inputs,
        left_out=saved.left_out,
        warnings=saved.warnings,
        targets=tuple(saved.targets),
        saved_marks=tuple(saved.presets),
        forecasts=tuple(saved.predictions),
        version=saved.version,
    )


def _study(item: _Study) -> Study:
    axes = tuple(ThresholdAxis(axis.path, tuple(axis.values), axis.log) for axis in item.axes)
    try:
        return checked(Study(correction_from_mapping(item.correction), axes))
    except ConfigError as error:
        raise ValueError(f"studies: {error}") from None


def _metrics(studies: tuple[Study, ...], columns: Mapping[str, Cells]) -> dict[str, Metric]:
    """The metrics of all studies; those of a loss where it was measured."""
    losses = "loss" in columns
    known = (metric for study in studies for metric in (*correction_metrics(study.correction, losses), *COSTS))
    return {metric.key: metric for metric in known if metric not in AGGREGATED}


def _table(columns: Mapping[str, Cells], studies: tuple[Study, ...]) -> pl.DataFrame:
    """The rows, each column of one kind."""
    import polars as pl

    paths = {axis.path for study in studies for axis in study.axes}
    if missing := sorted({*_LEAST, *paths, *_metrics(studies, columns)} - set(columns)):
        raise ValueError(f"table: no column {missing[0]}")
    if len({*map(len, columns.values())}) > 1:
        raise ValueError("table: columns of several lengths")
    kinds: dict[str, type[pl.DataType] | None] = dict.fromkeys(columns, pl.Float64)
    kinds |= dict.fromkeys(_TEXT, pl.String) | {"point": pl.Int64, _FLAG: pl.Boolean} | dict.fromkeys(("group", *paths))
    table = pl.DataFrame([_series(name, values, kinds[name]) for name, values in columns.items()])
    if nulls := next((name for name in (*_TEXT, "point") if table[name].null_count()), None):
        raise ValueError(f"table: column {nulls} lacks a value")
    _require_points(table, studies)
    return table


def _series(name: str, values: Cells, kind: type[pl.DataType] | None) -> pl.Series:
    """A column; of no kind in particular: of numbers where all are, else of text."""
    import polars as pl

    if kind is None:
        some = [value for value in values if value is not None]
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in some)
        whole = numbers and all(isinstance(value, int) for value in some)
        kind = pl.Int64 if whole else pl.Float64 if numbers else pl.String
        values = values if numbers else [None if value is None else str(value) for value in values]
    if kind == pl.Float64 and all(value is None or type(value) in (int, float) for value in values):
        values = [None if value is None else float(value) for value in values]
    try:
        return pl.Series(name, values, dtype=kind, strict=True)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        raise ValueError(f"table: column {name} holds what is none of its values") from None


def _require_points(table: pl.DataFrame, studies: tuple[Study, ...]) -> None:
    """Refuse rows of no study or point, and a run that lacks a point of one overall."""
    counts = {study.name: len(study.points) for study in studies}
    if len(counts) < len(studies):
        raise ValueError("studies: two of one name")
    for name, point in set(zip(table["correction"].to_list(), table["point"].to_list(), strict=True)):
        if not 0 <= point < counts.get(name, 0):
            raise ValueError(f"table: a row of point {point} of {name}, which is no study's")
    overall: dict[tuple[str, str], list[int]] = {}
    columns = zip(*(table[name].to_list() for name in ("scope", "run", "correction", "point")), strict=True)
    for scope, run, name, point in columns:
        if scope == OVERALL:
            overall.setdefault((run, name), []).append(point)
    runs = dict.fromkeys(table["run"].to_list())
    for run in runs:
        for name, count in counts.items():
            if sorted(overall.get((run, name), ())) != [*range(count)]:
                raise ValueError(f"table: run {run} has not one overall row for each point of {name}")
    if not runs:
        raise ValueError("table: no rows")
    if GROUP in table["scope"].to_list() and table.filter(table["scope"] == GROUP)["tokens"].null_count():
        raise ValueError("table: a group without a number of tokens")


def _require_known(studies: tuple[Study, ...], runs: set[str], saved: _Saved) -> None:
    """Refuse what is said of runs, studies and points that there are not."""
    names = {study.name: study for study in studies}
    for mark in saved.presets:
        if mark.correction not in names or mark.path not in {axis.path for axis in names[mark.correction].axes}:
            raise ValueError(f"presets: {mark.path} of {mark.correction} does not vary")
    for target in saved.targets:
        if target.run not in runs:
            raise ValueError(f"targets: there is no run {target.run}")
        if target.correction is not None:
            try:
                correction_from_mapping(target.correction)
            except ConfigError as error:
                raise ValueError(f"targets: {error}") from None
    for forecast in saved.predictions:
        known = names.get(forecast.correction)
        if forecast.run not in runs or known is None or not 0 <= forecast.point < len(known.points):
            raise ValueError(
                f"predictions: there is no point {forecast.point} of {forecast.correction} on {forecast.run}"
            )
