"""One file's rows as record batches, and the writer of every file that is converted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.dumps.foreign.rows import read_rows, schema_of
from mismatchctl.errors import DataError
from mismatchctl.files import replaced_when_done
from mismatchctl.frameworks.layout import FileLayout, Row
from mismatchctl.marks import signed
from mismatchctl.recorder.formats import parquet_settings

ROWS, TOKENS = 512, 1 << 21
"""Rows of a batch, which becomes a row group, and tokens that end one earlier."""

_REFER = (".pt", ".pkl")
"""Files that may name the same values any number of times."""


def parquet_writer(place: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer with the recorder's settings, whose file is known again as mismatchctl's."""
    return pq.ParquetWriter(place, schema.with_metadata(signed(schema.metadata)), **parquet_settings(schema))


def write_batches(place: Path, batches: Iterable[pa.RecordBatch]) -> bool:
    """Write batches of one schema as a file; whether there was any, and so a file.

    Raises:
        ConfigError: the place cannot be written.
    """
    with ExitStack() as stack:
        writer = None
        for batch in batches:
            if writer is None:
                temporary = stack.enter_context(replaced_when_done(place, at_once=True))
                writer = stack.enter_context(parquet_writer(temporary, batch.schema))
            writer.write_batch(batch)
    return writer is not None


def raw_batches(path: Path, layout: FileLayout) -> Iterator[pa.RecordBatch]:
    """The rows of one file; where batches end depends on the file alone.

    A column that the first of them has no value of is left out.

    Raises:
        DataError: the file cannot be read, or it is not as its layout says.
    """
    schema: pa.Schema | None = None
    tokens, most = 0, path.stat().st_size
    for rows in _parts(read_rows(layout, path)):
        tokens += sum(len(row["response_mask"]) for row in rows)
        if path.suffix in _REFER and tokens > most:
            raise DataError(f"holds {tokens:,} tokens in {most:,} bytes: it names the same ones again", file=str(path))
        batch = _batch(rows, schema_of(layout))
        if schema is None:
            schema = pa.schema([one for one in batch.schema if batch[one.name].null_count < len(batch)])
        yield fitted(batch, schema, path)


def fitted(batch: pa.RecordBatch, schema: pa.Schema, path: Path) -> pa.RecordBatch:
    """The columns of `schema`, null where the batch has none.

    Raises:
        DataError: it has a column that is not there.
    """
    for name in batch.schema.names:
        if name not in schema.names and batch[name].null_count < len(batch):
            problem = f"has {name}, while what was read before it has none"
            raise DataError(problem, file=str(path), column=name, remedy="convert files alike on their own")
    columns = [batch[one.name] if one.name in batch.schema.names else pa.nulls(len(batch), one.type) for one in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _parts(rows: Iterator[Row]) -> Iterator[list[Row]]:
    part: list[Row] = []
    tokens = 0
    for row in rows:
        part.append(row)
        tokens += len(row["response_mask"])
        if len(part) == ROWS or tokens >= TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([_column([row[one.name] for row in rows], one) for one in schema], schema=schema)


def _column(values: list[Any], column: pa.Field) -> pa.Array:
    if not pa.types.is_list(column.type):
        return pa.array(values, column.type)
    absent = [value is None for value in values]
    lengths = [0 if value is None else len(value) for value in values]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    filled = [value for value in values if value is not None and len(value)]
    elements = pa.array(np.concatenate(filled) if filled else [], column.type.value_type)
    nulls = pa.array(absent) if any(absent) else None
    return pa.ListArray.from_arrays(offsets, elements, type=column.type, mask=nulls)
