"""Check the footer of a Parquet file before pyarrow reads the file.

Some damaged footers crash pyarrow, and with it the whole process. A check in a second process would take at least
0.1 s per file, because pyarrow must be imported there. This parser takes less than 1 ms, plus 0.2 s per MB of footer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

MOST_FOOTER_BYTES = 1 << 28
_FIRST_READ_BYTES = 64 << 10
"""Number of bytes to read first. Most footers fit in it, and so do complete error messages of object stores."""
_MOST_DEPTH = 16
_SCHEMA, _ROW_GROUPS = 2, 4
_COLUMNS, _META, _TYPE, _SIZES = 1, 3, 1, 16
_REPETITION, _CHILDREN, _REPEATED, _OPTIONAL = 3, 5, 2, 1
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12

ThriftForm = dict[int, Any]
"""Field number in a Thrift struct -> expected type. A dict represents a nested struct, and `[x]` a list."""
_ELEMENT: ThriftForm = {_TYPE: _I32, _REPETITION: _I32, _CHILDREN: _I32}
_COLUMN_META: ThriftForm = {
    _TYPE: _I32, 2: [_I32], 3: [_BINARY], 8: [{}], 12: {}, 13: [{}], _SIZES: {2: [_I64], 3: [_I64]},
    17: {1: {}, 2: [_I32]},
}  # fmt: skip
_CHUNK: ThriftForm = {_META: _COLUMN_META, 8: {1: {}, 2: {1: [_BINARY]}}}
_FOOTER: ThriftForm = {_SCHEMA: [_ELEMENT], _ROW_GROUPS: [{_COLUMNS: [_CHUNK], 4: [{}]}], 5: [{}], 7: [{}]}
"""Expected types of the fields in a footer. If a type differs, `check_footer` refuses the footer, because pyarrow would
skip the field or read wrong values without an error."""
ThriftStruct = dict[int, Any]
SchemaLeaf = tuple[Any, int, int]
"""Parquet column in the schema: (physical type, maximum repetition level, maximum definition level)."""


def check_footer(file: pa.NativeFile) -> None:
    """Raise ArrowInvalid if the footer of a Parquet file could crash pyarrow. Keep the read position of `file`."""
    place, size = file.tell(), file.size()
    file.seek(max(0, size - _FIRST_READ_BYTES))
    tail = file.read(_FIRST_READ_BYTES)
    length = int.from_bytes(tail[-8:-4], "little")
    if tail[-4:] == b"PAR1" and length <= size - 8:  # if not, pyarrow raises a clear error
        if length > MOST_FOOTER_BYTES:
            raise pa.ArrowInvalid("its footer takes too long to read")
        if length + 8 > len(tail):
            file.seek(size - 8 - length)
            tail = file.read(length + 8)
        _check_bytes(tail[-8 - length : -8])
    file.seek(place)


def _check_bytes(data: bytes) -> None:
    try:
        footer = CompactReader(data).struct(0, _FOOTER)
        leaves = list(_schema_leaves(iter(footer[_SCHEMA]), 0, 0))
        for group in footer.get(_ROW_GROUPS, ()):
            _check_row_group(group[_COLUMNS], leaves)
    except (IndexError, KeyError, ValueError, StopIteration, RuntimeError) as error:
        if isinstance(error, pa.ArrowInvalid):
            raise
        raise pa.ArrowInvalid("its footer is damaged") from error


def _check_row_group(chunks: list[ThriftStruct], leaves: list[SchemaLeaf]) -> None:
    if len(chunks) != len(leaves):
        raise pa.ArrowInvalid(f"a row group has {len(chunks)} columns, but the schema has {len(leaves)}")
    for number, (chunk, (kind, repetition, definition)) in enumerate(zip(chunks, leaves, strict=True)):
        meta = chunk.get(_META, {})
        if meta.get(_TYPE) != kind:
            raise pa.ArrowInvalid(f"column {number} of a row group has another type than in the schema")
        sizes = meta.get(_SIZES, {})
        if any(len(sizes.get(at, ())) not in (0, most + 1) for at, most in ((2, repetition), (3, definition))):
            raise pa.ArrowInvalid(f"column {number} of a row group has nesting levels that the schema lacks")


def _schema_leaves(
    elements: Iterator[ThriftStruct], repetition: int, definition: int, *, root: bool = True
) -> Iterator[SchemaLeaf]:
    element = next(elements)
    kind = None if root else element.get(_REPETITION)
    repetition += kind == _REPEATED
    definition += kind in (_REPEATED, _OPTIONAL)
    children = element.get(_CHILDREN) or 0
    if not children and not root:
        yield element.get(_TYPE), repetition, definition
    for _ in range(children):
        yield from _schema_leaves(elements, repetition, definition, root=False)


class CompactReader:
    """Reader for Thrift's compact protocol, the format of Parquet footers."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self, depth: int, form: ThriftForm) -> ThriftStruct:
        """Read a Thrift struct. Return the fields whose numbers are keys of `form`, and skip all other fields."""
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deeply")
        fields: ThriftStruct = {}
        data, number = self._data, 0
        while header := data[self.at]:
            self.at += 1
            step, kind = header >> 4, header & 15
            number = number + step if step else self._signed()
            if number in form:
                fields[number] = self._value(kind, depth + 1, form[number])
            else:
                _READERS[kind](self, depth + 1)
        self.at += 1
        return fields

    def _value(self, kind: int, depth: int, form: Any) -> Any:
        if kind == form:
            return _READERS[kind](self, depth)
        if kind == _STRUCT and isinstance(form, dict):
            return self.struct(depth, form)
        if kind == _LIST and isinstance(form, list):
            return self._list(depth, form[0])
        raise ValueError("a field of another kind")

    def _list(self, depth: int, form: Any) -> list[Any]:
        if depth > _MOST_DEPTH:
            raise ValueError("nested too deeply")
        header = self._byte()
        count, kind = header >> 4, header & 15
        count = self._number() if count == 15 else count
        if count > len(self._data):
            raise ValueError("more values than bytes")
        if form is not None and kind != (_STRUCT if isinstance(form, dict) else form):
            raise ValueError("a list of another kind")
        if kind in (1, 2):
            return [self._byte() == 1 for _ in range(count)]
        if isinstance(form, dict):
            return [self.struct(depth + 1, form) for _ in range(count)]
        return [_READERS[kind](self, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _number(self) -> int:
        data, at, found, shift = self._data, self.at, 0, 0
        while (byte := data[at]) > 127:
            found |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if shift > 63:
                raise ValueError("a number of too many bytes")
        self.at = at + 1
        return found | byte << shift

    def _signed(self, depth: int = 0) -> int:
        found = self._number()
        return (found >> 1) ^ -(found & 1)

    def _pass(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise IndexError("cut short")


_READERS: dict[int, Callable[[CompactReader, int], Any]] = {
    1: lambda data, depth: True, 2: lambda data, depth: False, 3: lambda data, depth: data._byte(),
    **dict.fromkeys((4, _I32, _I64), CompactReader._signed),
    **dict.fromkeys((_LIST, 10), lambda data, depth: data._list(depth, None)),
    7: lambda data, depth: data._pass(8), 13: lambda data, depth: data._pass(16),
    _BINARY: lambda data, depth: data._pass(data._number()), _STRUCT: lambda data, depth: data.struct(depth, {}),
}  # fmt: skip
"""Thrift type id -> function that reads a value of this type."""
