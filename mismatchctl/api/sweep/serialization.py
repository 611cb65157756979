"""Write a Sweep as Parquet, CSV or JSON, and read a Sweep from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import polars as pl
from polars import selectors
from pydantic import BaseModel, ConfigDict, Field

from mismatchctl.api.sweep.result import (
    GROUP_SCOPE,
    OVERALL_SCOPE,
    Forecast,
    SolvedThreshold,
    Sweep,
    sweep_sentences,
)
from mismatchctl.api.sweep.study import AxisValue, Study, ThresholdAxis, validate_study
from mismatchctl.core.formatting import CSV_CONTROLS, FORMULA_START
from mismatchctl.core.validation import replace_nonfinite_in_table
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.errors import ConfigError
from mismatchctl.io.files import PARQUET_METADATA, atomic_output
from mismatchctl.measure.metrics.registry import sweep_metrics
from mismatchctl.results.model import InputFile, SkippedData

_TEXT_COLUMNS, _FLAG_COLUMN = ("run", "correction", "scope"), "pareto"
ColumnValues = list[bool | int | float | str | None]
_REQUIRED_COLUMNS = (*_TEXT_COLUMNS, "point", "group", "tokens", "sequences", _FLAG_COLUMN)


class _SavedModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _AxisData(_SavedModel):
    path: str
    values: list[AxisValue] = Field(min_length=1)
    log: bool


class _StudyData(_SavedModel):
    correction: dict[str, Any]
    axes: list[_AxisData] = Field(min_length=1)


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
    saved = _SweepData.model_validate(data)
    studies = tuple(_build_study(item) for item in saved.studies)
    table = _build_table(saved.table, studies)
    runs = set(table["run"].to_list())
    _require_known(studies, runs, saved)
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


def _build_study(item: _StudyData) -> Study:
    axes = tuple(ThresholdAxis(axis.path, tuple(axis.values), axis.log) for axis in item.axes)
    try:
        return validate_study(Study(parse_correction(item.correction), axes))
    except ConfigError as error:
        raise ValueError(f"studies: {error}") from None


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
        try:
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
        raise ValueError("table: a group has no number of tokens")
    return table


def _require_known(studies: tuple[Study, ...], runs: set[str], saved: _SweepData) -> None:
    points = {study.name: len(study.points) for study in studies}
    for target in saved.targets:
        if target.run not in runs:
            raise ValueError(f"targets: unknown run {target.run}")
        if target.correction is not None:
            try:
                parse_correction(target.correction)
            except ConfigError as error:
                raise ValueError(f"targets: {error}") from None
    for forecast in saved.predictions:
        if forecast.run not in runs or not 0 <= forecast.point < points.get(forecast.correction, 0):
            raise ValueError(f"predictions: unknown point {forecast.point} of {forecast.correction} on {forecast.run}")


SUFFIXES = (".parquet", ".csv", ".json")


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path}: a sweep can be written as {', '.join(SUFFIXES)}; change the ending of the file name"
        )


def write_sweep(sweep: Sweep, path: Path) -> None:
    with atomic_output(path) as temporary:
        table = replace_nonfinite_in_table(sweep.all_rows())
        if path.suffix == ".json":
            temporary.write_text(sweep.to_json(), encoding="utf-8")
        elif path.suffix == ".csv":  # control characters and strings that a spreadsheet would read as formulas
            text = selectors.string().as_expr()  # polars 1 requires the conversion
            shown = text.str.replace_all(CSV_CONTROLS, "\N{REPLACEMENT CHARACTER}")
            table.with_columns(shown.str.replace_all(FORMULA_START, "${1}'${2}").name.keep()).sink_csv(temporary)
        else:
            table.sink_parquet(temporary, compression="zstd", metadata=PARQUET_METADATA)
