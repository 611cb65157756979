"""One file's rows as record batches, and the Parquet settings of every file that is converted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.frameworks.importers.layout import Layout, Row

ROWS, TOKENS = 512, 1 << 21
"""Rows of a batch, which becomes a row group, and tokens that end one earlier."""


@contextmanager
def parquet_writer(place: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A writer with the settings that the reader decodes fastest (the recorder's)."""
    floats = [
        f"{column.name}.list.element" if pa.types.is_list(column.type) else column.name
        for column in schema
        if pa.types.is_floating(getattr(column.type, "value_type", column.type))
    ]
    with pq.ParquetWriter(
        place,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        use_byte_stream_split=floats,
        write_statistics=["step"],
        write_page_checksum=True,
    ) as writer:
        yield writer


def raw_batches(path: Path, layout: Layout) -> Iterator[pa.RecordBatch]:
    """The rows of one file; where batches end depends on the file alone.

    Raises:
        DataError: the file cannot be read, or it is not as its layout says.
    """
    rows: list[Row] = []
    tokens = 0
    for row in layout.read(path):
        rows.append(row)
        tokens += len(row["response_mask"])
        if len(rows) == ROWS or tokens >= TOKENS:
            yield _batch(rows, layout.schema)
            rows, tokens = [], 0
    if rows:
        yield _batch(rows, layout.schema)


def _batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([_column([row[one.name] for row in rows], one) for one in schema], schema=schema)


def _column(values: list[Any], column: pa.Field) -> pa.Array:
    if not pa.types.is_list(column.type):
        plain = [value.item() if hasattr(value, "item") else value for value in values]
        if pa.types.is_string(column.type):
            plain = [None if value is None else str(value) for value in plain]
        return pa.array(plain, column.type)
    absent = [value is None for value in values]
    lengths = [0 if value is None else len(value) for value in values]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    filled = [value for value in values if value is not None and len(value)]
    elements = pa.array(np.concatenate(filled) if filled else [], column.type.value_type)
    nulls = pa.array(absent) if any(absent) else None
    return pa.ListArray.from_arrays(offsets, elements, type=column.type, mask=nulls)
