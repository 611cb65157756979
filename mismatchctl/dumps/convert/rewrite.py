"""Parquet of the contract, written anew into one file: its columns under their own names, its lists without nulls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from mismatchctl.dumps import Dump, DumpFile, open_dump
from mismatchctl.dumps.files import pieces
from mismatchctl.dumps.foreign.batches import ROWS
from mismatchctl.errors import DataError
from mismatchctl.frameworks import column_aliases


def open_parquet(place: str) -> Dump:
    """The dump at a place.

    Raises:
        DataError: there is none, or it cannot be used.
    """
    return open_dump([place], aliases=column_aliases())


def parquet_batches(file: DumpFile, rows: int = ROWS) -> Iterator[pa.RecordBatch]:
    """All columns of a file, those of the contract under their own names, and what its folder says; `rows` at most.

    Raises:
        DataError: a part cannot be decoded, or a list of a per-token column holds nulls.
    """
    stored = file.contents.schema.names
    canonical = {actual: column for column, actual in file.columns.items()}
    everything = replace(file, columns={canonical.get(name, name): name for name in stored})
    for table in pieces(everything, list(everything.columns), range(file.row_groups), rows):
        renamed = table.rename_columns([canonical.get(name, name) for name in table.column_names])
        for name, value in file.partition.items():
            if name not in renamed.column_names:
                renamed = renamed.append_column(name, pa.array([value] * len(renamed)))
        for batch in renamed.combine_chunks().to_batches():
            yield _without_nulls(batch, file)


def _without_nulls(batch: pa.RecordBatch, file: DumpFile) -> pa.RecordBatch:
    fields, columns = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        kind = field.type
        if field.name in file.columns and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            if column.flatten().null_count:
                remedy = "correct the dump; analyze --on-bad skip leaves such rows out"
                raise DataError("a list holds nulls", file=file.path, column=field.name, remedy=remedy)
            kind = pa.list_(pa.field("element", kind.value_type, nullable=False))
            column = column.cast(kind)
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
