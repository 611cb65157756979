"""The footer of Parquet, held against itself before pyarrow looks at its columns.

pyarrow ends the process where what stands beside a column's values contradicts the schema. A footer is a structure of
Thrift's compact protocol (https://github.com/apache/parquet-format, parquet.thrift): it is read here as far as that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

MOST = 8 << 20
"""Bytes of a footer that is looked at; larger ones take too long."""
_GUESS = 64 << 10
"""Bytes that are read at first: a footer mostly, and of an object store more than its words about a failure take."""
_DEPTH = 16
_SCHEMA, _ROW_GROUPS = 2, 4
_COLUMNS, _META, _TYPE, _SIZES = 1, 3, 1, 16
_REPETITION, _CHILDREN, _REPEATED, _OPTIONAL = 3, 5, 2, 1

Struct = dict[int, Any]
Leaf = tuple[Any, int, int]
"""Physical type, and the largest repetition and definition level."""


def check_footer(file: pa.NativeFile) -> None:
    """Refuse a footer that pyarrow would not survive; the file stays where it was.

    Raises:
        pa.ArrowInvalid: types or levels of its column chunks are not those of its schema.
    """
    place, size = file.tell(), file.size()
    file.seek(max(0, size - _GUESS))
    tail = file.read(_GUESS)
    length = int.from_bytes(tail[-8:-4], "little")
    if tail[-4:] == b"PAR1" and length <= min(MOST, size - 8):
        if length + 8 > len(tail):
            file.seek(size - 8 - length)
            tail = file.read(length + 8)
        try:
            footer = _Compact(tail[-8 - length : -8]).struct(0)
            leaves = list(_leaves(iter(footer[_SCHEMA]), 0, 0))
            columns = [group[_COLUMNS] for group in footer.get(_ROW_GROUPS, [])]
        except (IndexError, KeyError, TypeError, ValueError, StopIteration, RuntimeError):
            columns, leaves = [], []  # what cannot be read, pyarrow says itself
        for group in columns:
            _check_group(group, leaves)
    file.seek(place)


def _check_group(chunks: list[Struct], leaves: list[Leaf]) -> None:
    if len(chunks) != len(leaves):
        raise pa.ArrowInvalid(f"a row group has {len(chunks)} columns, and the schema {len(leaves)}")
    for number, (chunk, (kind, repetition, definition)) in enumerate(zip(chunks, leaves, strict=True)):
        meta = chunk.get(_META)
        if not isinstance(meta, dict) or meta.get(_TYPE) != kind:
            raise pa.ArrowInvalid(f"column {number} of a row group has another type than in the schema")
        sizes = meta.get(_SIZES)
        levels = ((2, repetition), (3, definition))
        if isinstance(sizes, dict) and any(len(sizes.get(at) or ()) not in (0, most + 1) for at, most in levels):
            raise pa.ArrowInvalid(f"column {number} of a row group counts levels that the schema does not have")


def _leaves(elements: Iterator[Struct], repetition: int, definition: int, *, root: bool = True) -> Iterator[Leaf]:
    """The leaves below the next element, depth first, as the schema lists them."""
    element = next(elements)
    kind = None if root else element.get(_REPETITION)
    repetition += kind == _REPEATED
    definition += kind in (_REPEATED, _OPTIONAL)
    children = element.get(_CHILDREN) or 0
    if not children and not root:
        yield element.get(_TYPE), repetition, definition
    for _ in range(children):
        yield from _leaves(elements, repetition, definition, root=False)


class _Compact:
    """Thrift's compact protocol: fields by number, lists, and nothing of what they are called."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        integer: Callable[[int], Any] = self._signed
        self._read: dict[int, Callable[[int], Any]] = {
            1: lambda depth: True, 2: lambda depth: False, 3: lambda depth: self._byte(), 4: integer, 5: integer,
            6: integer, 7: lambda depth: self._skip(8), 8: lambda depth: self._skip(self._number()), 9: self._list,
            10: self._list, 12: self.struct,
        }  # fmt: skip

    def struct(self, depth: int) -> Struct:
        """The fields of a structure."""
        if depth > _DEPTH:
            raise ValueError("nested too deeply")
        fields: Struct = {}
        number = 0
        while header := self._byte():
            step = header >> 4
            number = number + step if step else self._signed(depth)
            fields[number] = self._read[header & 15](depth + 1)
        return fields

    def _list(self, depth: int) -> list[Any]:
        header = self._byte()
        count, kind = header >> 4, header & 15
        count = self._number() if count == 15 else count
        if count > len(self._data):
            raise ValueError("more values than bytes")
        if kind in (1, 2):
            return [self._byte() == 1 for _ in range(count)]
        return [self._read[kind](depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _number(self) -> int:
        found = shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    def _signed(self, depth: int) -> int:
        found = self._number()
        return (found >> 1) ^ -(found & 1)

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise IndexError("cut short")
