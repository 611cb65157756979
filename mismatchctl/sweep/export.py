"""A sweep as a file: Parquet, CSV or JSON, one row per run, correction, point and group or overall."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mismatchctl.errors import ConfigError
from mismatchctl.escape import FORMULA
from mismatchctl.files import replaced_when_done
from mismatchctl.finite import finite, finite_table
from mismatchctl.marks import PARQUET
from mismatchctl.sweep.model import Sweep
from mismatchctl.sweep.saved import FORMAT
from mismatchctl.sweep.words import says

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".parquet", ".csv", ".json")


def check_suffix(path: Path) -> None:
    """Refuse a file whose name does not say its format.

    Raises:
        ConfigError: it ends in something else.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: a sweep is written as {', '.join(SUFFIXES)}; name the file so")


def write(sweep: Sweep, path: Path) -> None:
    """Write all rows in the format that the name says; the file appears whole or not at all."""
    check_suffix(path)
    with replaced_when_done(path) as temporary:
        if path.suffix == ".json":
            temporary.write_text(to_json(sweep), encoding="utf-8")
        elif path.suffix == ".csv":
            _as_text(finite_table(rows(sweep))).sink_csv(temporary)
        else:
            finite_table(rows(sweep)).sink_parquet(temporary, compression="zstd", metadata=PARQUET)


def rows(sweep: Sweep) -> pl.LazyFrame:
    """All rows: overall ones first, then those of groups."""
    import polars as pl

    return pl.concat([sweep.overall.lazy(), sweep.groups], how="diagonal_relaxed")


def _as_text(table: pl.LazyFrame) -> pl.LazyFrame:
    """As a spreadsheet should have it: no text that it takes for a formula."""
    import polars as pl
    from polars import selectors

    text = selectors.string().as_expr()  # of which polars 1 can make another
    safe = pl.when(text.str.contains(FORMULA)).then("'" + text).otherwise(text)
    return table.with_columns(safe.name.keep())


def to_json(sweep: Sweep) -> str:
    """Strict JSON, compact, ending in a newline: inputs, studies, what was solved, and the table by column."""
    table = finite_table(rows(sweep)).collect()
    data = {
        "format": FORMAT,
        "tool": "mismatchctl",
        "version": sweep.version,
        "inputs": [file.model_dump(mode="json") for file in sweep.inputs],
        "left_out": [item.model_dump(mode="json") for item in sweep.left_out],
        "warnings": sweep.warnings,
        "says": {run: says(sweep, run) for run in sweep.runs},
        "studies": [
            {
                "correction": study.correction.to_mapping(),
                "axes": [{"path": axis.path, "values": list(axis.values), "log": axis.log} for axis in study.axes],
            }
            for study in sweep.studies
        ],
        "presets": [asdict(mark) for mark in sweep.marks],
        "targets": [asdict(target) for target in sweep.targets],
        "predictions": [asdict(forecast) for forecast in sweep.forecasts],
    }
    data = finite(data) | {"table": {name: table[name].to_list() for name in table.columns}}
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n"
