"""Lists as the recorder writes them, read page by page in half of the time that pyarrow takes.

Taken are required lists of required numbers or flags, in data pages of version 1 whose levels are run lengths, plain or
byte-stream-split, in zstd or uncompressed (https://github.com/apache/parquet-format). A column of which anything is
otherwise is left to pyarrow; so is one whose pages contradict themselves or their checksums, of which pyarrow says what
is wrong. Files claim what they like: counts are held against the bytes at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.dumps.lending import MEMORY, Bytes
from mismatchctl.footer import Compact
from mismatchctl.measure.kernels.machine_code import Loop

try:
    from isal.isal_zlib import crc32
except ImportError:  # it is not built for every machine: checksums are then a twentieth of an analysis
    from zlib import crc32

lists, unsplit = (Loop("mismatchctl.dumps.page_loops", name) for name in ("lists", "unsplit"))
MOST_VALUES, MOST_PAGE = 1 << 24, 1 << 26
"""Values of a column that are read at once, and bytes of a page: units of work stay far below."""
_HEADER = 1 << 10
_I32 = 5
_FORM = {1: _I32, 2: _I32, 3: _I32, 4: _I32, 5: {1: _I32, 2: _I32, 3: _I32, 4: _I32}}
"""Of a page its kind, its bytes before and after compression and its checksum; of a data page (5) its values, and the
encodings of these and of both levels."""
_PLAIN, _RUN_LENGTHS, _SPLIT = 0, 3, 9
_TYPES = {
    "FLOAT": pa.float32(), "DOUBLE": pa.float64(), "INT32": pa.int32(), "INT64": pa.int64(), "BOOLEAN": pa.bool_(),
}  # fmt: skip


class _RefusedError(Exception):
    """It is for pyarrow to read this, or to say what is wrong with it."""


@dataclass(frozen=True)
class _Page:
    """A data page: how many bytes its body has once decompressed, its values (one for an empty list) and encoding."""

    body: pa.Buffer
    size: int
    count: int
    encoding: int


def read_lists(
    file: pa.NativeFile, footer: pq.FileMetaData, schema: pa.Schema, groups: Sequence[int], columns: Sequence[str]
) -> dict[str, pa.Array]:
    """Those of the columns that can be read here, of some row groups, each as pyarrow would give it."""
    leaves = {footer.schema.column(index).path: index for index in range(footer.num_columns)}
    found = {}
    for name in columns:
        leaf = leaves.get(f"{name}.list.element")
        if leaf is None or not _is_taken(schema.field(name), footer.schema.column(leaf)):
            continue
        chunks = [(footer.row_group(group).num_rows, footer.row_group(group).column(leaf)) for group in groups]
        try:
            found[name] = _read(file, chunks, schema.field(name).type)
        except (_RefusedError, pa.ArrowException, OSError, LookupError, ValueError):
            continue
    return found


def _is_taken(field: pa.Field, leaf: pq.ColumnSchema) -> bool:
    """Whether it is a column of lists without nulls, whose values lie as Arrow wants them."""
    kind = field.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    required = leaf.max_definition_level == leaf.max_repetition_level == 1
    nullable = field.nullable or kind.value_field.nullable
    return required and not nullable and bool(kind.value_type == _TYPES.get(leaf.physical_type))


def _read(file: pa.NativeFile, chunks: list[tuple[int, pq.ColumnChunkMetaData]], kind: pa.DataType) -> pa.Array:
    """The lists of some column chunks, each of so many rows."""
    sizes = [size for rows, chunk in chunks for size in (rows, chunk.num_values, chunk.total_compressed_size)]
    rows, count = sum(sizes[::3]), sum(sizes[1::3])
    if min(sizes) < 1 or max(rows, count) > MOST_VALUES:
        raise _RefusedError
    width = kind.value_type.bit_width // 8
    values, offsets, empty = _PageValues(count, width), np.empty(rows + 1, np.int64), np.empty(rows, np.int64)
    state, end = np.zeros(3, np.int64), 0
    for length, chunk in chunks:
        state[2], end = False, end + length
        for page in _pages(file, chunk, width):
            body = _decompressed(page, chunk.compression)
            start = lists(body, page.count, state, offsets[:end], empty)
            if start < 0:
                raise _RefusedError
            values.add(body, start, int(state[1]) - values.filled, page.encoding)
        if state[0] != end:
            raise _RefusedError
    offsets[rows] = values.filled
    places = pa.py_buffer(offsets.astype(np.int32 if pa.types.is_list(kind) else np.int64, copy=False))
    return pa.Array.from_buffers(kind, rows, [None, places], null_count=0, children=[values.array(kind.value_type)])


def _pages(file: pa.NativeFile, chunk: pq.ColumnChunkMetaData, width: int) -> Iterator[_Page]:
    """The pages of a column chunk, their checksums verified, each read when asked for: it stays in the cache.

    Their headers fill a few dozen bytes each.
    """
    if chunk.has_dictionary_page or chunk.compression not in ("ZSTD", "UNCOMPRESSED"):
        raise _RefusedError
    at, missing = chunk.data_page_offset, chunk.num_values
    stop = at + chunk.total_compressed_size
    if at < 0 or stop > file.size():
        raise _RefusedError
    while missing > 0:
        file.seek(at)
        header = Compact(file.read(min(_HEADER, stop - at)))
        fields = header.struct(0, _FORM)
        own, stored, after = fields[5], fields[3], at + header.at
        known = own[2] == _PLAIN or (own[2] == _SPLIT and width > 0)
        if fields[1] != 0 or not known or {own[3], own[4]} != {_RUN_LENGTHS}:
            raise _RefusedError
        if not (0 < own[1] <= missing and 0 < stored <= min(stop - after, MOST_PAGE) and 0 < fields[2] <= MOST_PAGE):
            raise _RefusedError
        file.seek(after)
        body = MEMORY.lend(stored)
        if file.readinto(body) != stored:
            raise _RefusedError
        if 4 in fields and crc32(body) != fields[4] & 0xFFFFFFFF:
            raise _RefusedError
        yield _Page(pa.py_buffer(body), fields[2], own[1], own[2])
        at, missing = after + stored, missing - own[1]
    if at != stop:
        raise _RefusedError


def _decompressed(page: _Page, compression: str) -> Bytes:
    body = page.body
    if compression == "ZSTD":
        body = pa.Codec("zstd").decompress(body, page.size)  # to this size, or it raises
    if body.size != page.size:
        raise _RefusedError
    return np.frombuffer(body, np.uint8)


class _PageValues:
    """The values of all pages, end to end; flags take a byte each until they are all there."""

    def __init__(self, count: int, width: int) -> None:
        self._width, self.filled = width, 0
        self._bytes: Bytes = MEMORY.lend(count * (width or 1))

    def add(self, body: Bytes, start: int, count: int, encoding: int) -> None:
        """`count` values, which are all that a body holds from `start` on."""
        width = self._width
        if len(body) - start != (count * width if width else (count + 7) // 8):
            raise _RefusedError
        out = self._bytes[self.filled * (width or 1) : (self.filled + count) * (width or 1)]
        if not width:
            out[:] = np.unpackbits(body[start:], count=count, bitorder="little")
        elif encoding == _PLAIN:
            out[:] = body[start:]
        elif width == 4:
            unsplit(body, start, count, out.view(np.uint32))
        else:
            out.reshape(count, width)[:] = body[start:].reshape(width, count).T
        self.filled += count

    def array(self, kind: pa.DataType) -> pa.Array:
        """All of them."""
        own = self._bytes[: self.filled * (self._width or 1)]
        held = own if self._width else np.packbits(own, bitorder="little")
        return pa.Array.from_buffers(kind, self.filled, [None, pa.py_buffer(held)])
