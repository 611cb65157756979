"""Parquet of the contract, written anew into one file: its columns under their own names, its lists without nulls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from mismatchctl.contract import REQUIRED
from mismatchctl.dumps import Dump, DumpFile, open_dump
from mismatchctl.dumps.arrays import Lists, single
from mismatchctl.dumps.files import pieces
from mismatchctl.dumps.foreign.batches import ROWS
from mismatchctl.dumps.wide import mismatched
from mismatchctl.errors import DataError
from mismatchctl.frameworks import column_aliases

_CHECKED = (*REQUIRED, "response_mask", "current_log_probs", "advantages")
"""Columns whose lists fit each other: those that every analysis reads."""
_REMEDY = "correct the dump; analyze --on-bad skip leaves such rows out"


def open_parquet(place: str) -> Dump:
    """The dump at a place.

    Raises:
        DataError: there is none, or it cannot be used.
    """
    return open_dump([place], aliases=column_aliases())


def parquet_batches(file: DumpFile, rows: int = ROWS) -> Iterator[pa.RecordBatch]:
    """All columns of a file, those of the contract under their own names, and what its folder says; `rows` at most.

    Raises:
        DataError: a part cannot be decoded, lists differ in length, or one of a per-token column holds nulls.
    """
    stored = file.contents.schema.names
    canonical = {actual: column for column, actual in file.columns.items()}
    everything = replace(file, columns={canonical.get(name, name): name for name in stored})
    first = 0
    for table in pieces(everything, list(everything.columns), range(file.row_groups), rows):
        _check_lists(table, file, first)
        first += len(table)
        renamed = table.rename_columns([canonical.get(name, name) for name in table.column_names])
        for name, value in file.partition.items():
            if name not in renamed.column_names:
                renamed = renamed.append_column(name, pa.array([value] * len(renamed)))
        for batch in renamed.combine_chunks().to_batches():
            yield _without_nulls(batch, file)


def _check_lists(table: pa.Table, file: DumpFile, first: int) -> None:
    """Refuse rows that no verb would read."""
    if file.layout == "long":
        return
    named = {column: file.columns[column] for column in _CHECKED if column in file.columns and file.is_list(column)}
    lists = {column: Lists.of(single(table.column(name))) for column, name in named.items()}
    for fault in mismatched(file, lists, np.arange(first, first + len(table))):
        raise replace(fault, remedy=_REMEDY).error(file.path, named[fault.column])


def _without_nulls(batch: pa.RecordBatch, file: DumpFile) -> pa.RecordBatch:
    fields, columns = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        kind = field.type
        if field.name in file.columns and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            if column.flatten().null_count:
                raise DataError("a list holds nulls", file=file.path, column=field.name, remedy=_REMEDY)
            kind = pa.list_(pa.field("element", kind.value_type, nullable=False))
            column = column.cast(kind)
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
