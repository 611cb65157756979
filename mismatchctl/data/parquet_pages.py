"""Read list columns of Parquet page by page. With pyarrow's reader, `analyze` (30 M tokens) needs 33% more CPU time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mismatchctl.core.machine_code import CompiledLoop
from mismatchctl.io.parquet_footer import CompactReader

try:
    from isal.isal_zlib import crc32
except ImportError:  # isal is not available for this machine
    from zlib import crc32

Bytes = NDArray[np.uint8]

find_list_offsets, join_split_bytes = (
    CompiledLoop("mismatchctl.core.compiler", name) for name in ("find_list_offsets", "join_split_bytes")
)
MOST_VALUES, MOST_PAGE = 1 << 24, 1 << 26
"""Limits of `read_lists`: rows or values of a column (MOST_VALUES), and bytes of a page (MOST_PAGE)."""
_HEADER = 1 << 10
_I32 = 5
_HEADER_FORM = {1: _I32, 2: _I32, 3: _I32, 4: _I32, 5: {1: _I32, 2: _I32, 3: _I32, 4: _I32}}
"""Field numbers in a page header: 1 page type, 2 uncompressed size, 3 compressed size, 4 checksum, 5 data page header.
In the data page header: 1 number of values, 2 encoding of values, 3 of definition levels, 4 of repetition levels.
"""
_PLAIN_ENCODING, _RUN_LENGTH_ENCODING, _SPLIT_ENCODING = 0, 3, 9
_TYPES = {
    "FLOAT": pa.float32(), "DOUBLE": pa.float64(), "INT32": pa.int32(), "INT64": pa.int64(), "BOOLEAN": pa.bool_(),
}  # fmt: skip


class _RefusedError(Exception):
    """Raised if this module cannot read a column. pyarrow then reads the column or reports its error."""


class _Page(NamedTuple):
    body: pa.Buffer
    size: int
    values: int
    encoding: int


def read_lists(
    file: pa.NativeFile, footer: pq.FileMetaData, schema: pa.Schema, groups: Sequence[int], columns: Sequence[str]
) -> dict[str, pa.Array]:
    """Read the columns that this module supports, and leave out the others. The arrays are equal to pyarrow's."""
    leaves = {footer.schema.column(index).path: index for index in range(footer.num_columns)}
    found = {}
    for name in columns:
        leaf = leaves.get(f"{name}.list.element")
        if leaf is None or not _is_supported(schema.field(name), footer.schema.column(leaf)):
            continue
        chunks = [(footer.row_group(group).num_rows, footer.row_group(group).column(leaf)) for group in groups]
        try:
            found[name] = _read_chunks(file, chunks, schema.field(name).type)
        except (_RefusedError, pa.ArrowException, OSError, LookupError, ValueError):
            continue
    return found


def _is_supported(field: pa.Field, leaf: pq.ColumnSchema) -> bool:
    """Return True for a list column that cannot contain nulls and whose values need no type conversion."""
    kind = field.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    required = leaf.max_definition_level == leaf.max_repetition_level == 1
    nullable = field.nullable or kind.value_field.nullable
    return required and not nullable and bool(kind.value_type == _TYPES.get(leaf.physical_type))


def _read_chunks(file: pa.NativeFile, chunks: list[tuple[int, pq.ColumnChunkMetaData]], kind: pa.DataType) -> pa.Array:
    sizes = [size for rows, chunk in chunks for size in (rows, chunk.num_values, chunk.total_compressed_size)]
    rows, count = sum(sizes[::3]), sum(sizes[1::3])
    if min(sizes) < 1 or max(rows, count) > MOST_VALUES:
        raise _RefusedError
    width = kind.value_type.bit_width // 8
    values, offsets, empty = _PageValues(count, width), np.empty(rows + 1, np.int64), np.empty(rows, np.int64)
    state, end = np.zeros(3, np.int64), 0
    for length, chunk in chunks:
        state[2], end = False, end + length
        for page in _read_pages(file, chunk, width):
            is_packed = chunk.compression == "ZSTD"
            body = pa.Codec("zstd").decompress(page.body, page.size) if is_packed else page.body
            if body.size != page.size:
                raise _RefusedError
            body = np.frombuffer(body, np.uint8)
            start = find_list_offsets(body, page.values, state, offsets[:end], empty)
            if start < 0:
                raise _RefusedError
            values.add(body, start, int(state[1]) - values.filled, page.encoding)
        if state[0] != end:
            raise _RefusedError
    offsets[rows] = values.filled
    places = pa.py_buffer(offsets.astype(np.int32 if pa.types.is_list(kind) else np.int64, copy=False))
    return pa.Array.from_buffers(kind, rows, [None, places], null_count=0, children=[values.array(kind.value_type)])


def _read_pages(file: pa.NativeFile, chunk: pq.ColumnChunkMetaData, width: int) -> Iterator[_Page]:
    """Yield the pages of a column after checking their checksums. A single page fits in the CPU cache while in use."""
    if chunk.has_dictionary_page or chunk.compression not in ("ZSTD", "UNCOMPRESSED"):
        raise _RefusedError
    at, missing = chunk.data_page_offset, chunk.num_values
    stop = at + chunk.total_compressed_size
    if at < 0 or stop > file.size():
        raise _RefusedError
    while missing > 0:
        file.seek(at)
        header = CompactReader(file.read(min(_HEADER, stop - at)))
        fields = header.struct(0, _HEADER_FORM)
        own, stored, after = fields[5], fields[3], at + header.at
        known = own[2] == _PLAIN_ENCODING or (own[2] == _SPLIT_ENCODING and width > 0)
        if fields[1] != 0 or not known or {own[3], own[4]} != {_RUN_LENGTH_ENCODING}:
            raise _RefusedError
        if not (0 < own[1] <= missing and 0 < stored <= min(stop - after, MOST_PAGE) and 0 < fields[2] <= MOST_PAGE):
            raise _RefusedError
        file.seek(after)
        body = np.empty(stored, np.uint8)
        if file.readinto(body) != stored:
            raise _RefusedError
        if 4 in fields and crc32(body.data) != fields[4] & 0xFFFFFFFF:
            raise _RefusedError
        yield _Page(pa.py_buffer(body), fields[2], own[1], own[2])
        at, missing = after + stored, missing - own[1]
    if at != stop:
        raise _RefusedError


class _PageValues:
    """The values of all pages of a column. A boolean takes one byte here. `array` packs eight booleans into a byte."""

    def __init__(self, count: int, width: int) -> None:
        self._width, self.filled = width, 0
        self._bytes: Bytes = np.empty(count * (width or 1), np.uint8)

    def add(self, body: Bytes, start: int, count: int, encoding: int) -> None:
        width = self._width
        if len(body) - start != (count * width if width else (count + 7) // 8):
            raise _RefusedError
        out = self._bytes[self.filled * (width or 1) : (self.filled + count) * (width or 1)]
        if not width:
            out[:] = np.unpackbits(body[start:], count=count, bitorder="little")
        elif encoding == _PLAIN_ENCODING:
            out[:] = body[start:]
        elif width == 4:
            join_split_bytes(body, start, count, out.view(np.uint32))
        else:
            out.reshape(count, width)[:] = body[start:].reshape(width, count).T
        self.filled += count

    def array(self, kind: pa.DataType) -> pa.Array:
        own = self._bytes[: self.filled * (self._width or 1)]
        held = own if self._width else np.packbits(own, bitorder="little")
        return pa.Array.from_buffers(kind, self.filled, [None, pa.py_buffer(held)])
