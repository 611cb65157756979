"""Write a Sweep as Parquet, CSV or JSON, and read a Sweep from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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

if TYPE_CHECKING:
    import polars as pl

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
    import polars as pl

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
    import polars as pl

    paths = {axis.path for study in studies for axis in study.axes}
    metrics = {metric.key for study in studies for metric in sweep_metrics(study.correction)}
    if missing := sorted({*_REQUIRED_COLUMNS, *paths, *metrics} - set(columns)):
        raise ValueError(f"table: no column {missing[0]}")
    if len({*map(len, columns.values())}) > 1:
        raise ValueError("table: the columns have different lengths")
    kinds: dict[str, type[pl.DataType] | None] = dict.fromkeys(columns, pl.Float64)
    kinds |= (
        dict.fromkeys(_TEXT_COLUMNS, pl.String)
        | {"point": pl.Int64, _FLAG_COLUMN: pl.Boolean}
        | dict.fromkeys(("group", *paths))
    )
    table = pl.DataFrame([_build_series(name, values, kinds[name]) for name, values in columns.items()])
    if nulls := next((name for name in (*_TEXT_COLUMNS, "point") if table[name].null_count()), None):
        raise ValueError(f"table: column {nulls} has a missing value")
    _require_points(table, studies)
    return table


def _build_series(name: str, values: ColumnValues, kind: type[pl.DataType] | None) -> pl.Series:
    """Build a column.

    Without a type, the column contains numbers if all values are numbers, and strings otherwise.
    """
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
        raise ValueError(f"table: column {name} contains an invalid value") from None


def _require_points(table: pl.DataFrame, studies: tuple[Study, ...]) -> None:
    """Raise an error if a row belongs to no point, or if a run lacks an overall row."""
    counts = {study.name: len(study.points) for study in studies}
    if len(counts) < len(studies):
        raise ValueError("studies: two studies have the same name")
    for name, point in set(zip(table["correction"].to_list(), table["point"].to_list(), strict=True)):
        if not 0 <= point < counts.get(name, 0):
            raise ValueError(f"table: point {point} of {name} does not belong to a study")
    overall: dict[tuple[str, str], list[int]] = {}
    columns = zip(*(table[name].to_list() for name in ("scope", "run", "correction", "point")), strict=True)
    for scope, run, name, point in columns:
        if scope == OVERALL_SCOPE:
            overall.setdefault((run, name), []).append(point)
    runs = dict.fromkeys(table["run"].to_list())
    for run in runs:
        for name, count in counts.items():
            if sorted(overall.get((run, name), ())) != [*range(count)]:
                raise ValueError(f"table: run {run} must have one overall row for each point of {name}")
    if not runs:
        raise ValueError("table: no rows")
    if GROUP_SCOPE in table["scope"].to_list() and table.filter(table["scope"] == GROUP_SCOPE)["tokens"].null_count():
        raise ValueError("table: a group has no number of tokens")


def _require_known(studies: tuple[Study, ...], runs: set[str], saved: _SweepData) -> None:
    names = {study.name: study for study in studies}
    for target in saved.targets:
        if target.run not in runs:
            raise ValueError(f"targets: unknown run {target.run}")
        if target.correction is not None:
            try:
                parse_correction(target.correction)
            except ConfigError as error:
                raise ValueError(f"targets: {error}") from None
    for forecast in saved.predictions:
        known = names.get(forecast.correction)
        if forecast.run not in runs or known is None or not 0 <= forecast.point < len(known.points):
            raise ValueError(f"predictions: unknown point {forecast.point} of {forecast.correction} on {forecast.run}")


SUFFIXES = (".parquet", ".csv", ".json")


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path}: a sweep can be written as {', '.join(SUFFIXES)}; change the ending of the file name"
        )


def write_sweep(sweep: Sweep, path: Path) -> None:
    check_suffix(path)
    with atomic_output(path) as temporary:
        if path.suffix == ".json":
            temporary.write_text(sweep.to_json(), encoding="utf-8")
        elif path.suffix == ".csv":
            _escape_formulas(replace_nonfinite_in_table(sweep.all_rows())).sink_csv(temporary)
        else:
            replace_nonfinite_in_table(sweep.all_rows()).sink_parquet(
                temporary, compression="zstd", metadata=PARQUET_METADATA
            )


def _escape_formulas(table: pl.LazyFrame) -> pl.LazyFrame:
    """Escape strings that a spreadsheet would read as formulas, and control characters, as `escape_csv` does."""
    from polars import selectors

    text = selectors.string().as_expr()  # polars 1 requires the conversion
    shown = text.str.replace_all(CSV_CONTROLS, "\N{REPLACEMENT CHARACTER}")
    return table.with_columns(shown.str.replace_all(FORMULA_START, "${1}'${2}").name.keep())
