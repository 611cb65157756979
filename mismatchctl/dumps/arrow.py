"""Arrow: IPC files (Feather), streams, and tables in memory. Each record batch says how long it and its lists are.

The values are decoded by pyarrow. It does not tell how many rows a record batch has without decoding it, so the few
fields that say so are read here, from the format's messages: a length, a flatbuffer, a body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from mismatchctl.dumps.contents import Contents, Span
from mismatchctl.dumps.kinds import is_list, plain

MAGIC = b"ARROW1"
_FIRST_READ = 4096
_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", bytes(4))
_SCHEMA, _BATCH = 1, 3
"""What a message can hold: these, and dictionaries."""


@dataclass(frozen=True)
class Message:
    """One message of the format: where it lies and, of a record batch, its rows, and length and nulls of its arrays."""

    kind: int
    start: int
    size: int
    rows: int = 0
    lengths: tuple[int, ...] = ()
    nulls: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arrow(Contents):
    """An Arrow file or stream; its groups are its record batches.

    Attributes:
        stream: whether it is a stream, which has no footer.
        batches: its record batches.
        others: of a stream, the schema and the dictionaries that stand before and between them.
    """

    stream: bool
    batches: tuple[Message, ...] = field(repr=False)
    others: tuple[Message, ...] = field(repr=False)
    group_name: ClassVar[str] = "record batch"

    @classmethod
    def of(cls, file: pa.NativeFile) -> Arrow:
        """Read the messages of an opened file without their bodies.

        Raises:
            ValueError: truncated, damaged, or not Arrow.
        """
        stream = file.read_at(len(MAGIC), 0) != MAGIC
        try:
            if stream:
                found = list(_stream(file))
                if not found or found[0].kind != _SCHEMA:
                    raise ValueError("it does not begin with a schema")
                schema = _opened(file, found[:1]).schema
            else:
                schema = pa.ipc.open_file(file).schema  # verifies the footer
                found = [_message(file, start) for start in _blocks(file)]
        except struct.error:
            raise ValueError("a message is damaged") from None
        batches = tuple(message for message in found if message.kind == _BATCH)
        others = tuple(message for message in found if message.kind != _BATCH)
        arrays = sum(_arrays(kind) for kind in schema.types)
        unfit = any(batch.rows < 0 or len(batch.lengths) != arrays for batch in batches)
        if unfit or (others and not stream):
            raise ValueError("its record batches do not fit its schema")
        return cls(schema, tuple(batch.rows for batch in batches), stream, batches, others)

    def elements(self, group: int, column: str) -> int:
        """Length of the column, or of what its lists hold."""
        first, kind = self._arrays_of(column)
        return self.batches[group].lengths[first + is_list(kind)]

    def spans(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> list[Span | None]:
        """By a look at the one column; of a stream, where that means to read it all, nothing is known."""
        if self.stream or not pa.types.is_integer(self.schema.field(column).type):
            return [None] * len(self.rows)
        with opening as file:
            return [self._span(file, group, column) for group in range(len(self.rows))]

    def is_void(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> bool:
        """What the messages say of its array and of those that its lists hold."""
        first, kind = self._arrays_of(column)
        last = first
        while is_list(kind):
            last, kind = last + 1, _storage(kind.value_type)
        filled = [batch for batch in self.batches if batch.rows]
        return bool(filled) and all(
            any(batch.nulls[place] == batch.lengths[place] for place in range(first, last + 1)) for batch in filled
        )

    def decode(
        self, file: pa.NativeFile, groups: Sequence[int], columns: list[str], rows: int | None
    ) -> Iterator[pa.Table]:
        """Record batches, of which the named columns alone are read; their offsets are verified."""
        fields = [self.schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        reader = None if self.stream else pa.ipc.open_file(file, options=options)

        def table_of(group: int) -> pa.Table:
            if reader is None:
                before = [other for other in self.others if other.start < self.batches[group].start]
                batch = _opened(file, [*before, self.batches[group]], options).read_next_batch()
            else:
                batch = reader.get_batch(group)
            for array in batch.columns:
                _verify(array)
            return pa.Table.from_batches([batch]).select(columns)

        if rows is None:
            yield pa.concat_tables([table_of(group) for group in groups])
            return
        for group in groups:
            table = table_of(group)
            for first in range(0, max(len(table), 1), rows):
                yield table.slice(first, rows)

    def _arrays_of(self, column: str) -> tuple[int, pa.DataType]:
        """The first of the arrays that a column is made of, and its type."""
        number, kinds = self.schema.get_field_index(column), self.schema.types
        return sum(_arrays(kind) for kind in kinds[:number]), _storage(kinds[number])

    def _span(self, file: pa.NativeFile, group: int, column: str) -> Span | None:
        try:
            (table,) = self.decode(file, [group], [column], None)
        except (OSError, pa.ArrowException):
            return None  # whoever decodes the group will say what is wrong
        return _min_max(table.column(column))


GROUP_VALUES = 1 << 20
"""Values of the longest column in a group of a table in memory: its groups are read in parallel."""


@dataclass(frozen=True)
class MemoryTable(Contents):
    """A table in memory, read like a file of one run; its groups are slices of its rows.

    Attributes:
        table: the rows.
        title: what messages and provenance call it.
        number: its place among the tables of a call; with `memory`, the name of its run.
    """

    table: pa.Table = field(repr=False, compare=False)
    title: str
    number: int
    group_name: ClassVar[str] = "row group"

    @classmethod
    def of(cls, table: pa.Table, title: str = "the table in memory", number: int = 1) -> MemoryTable:
        """Cut a table into groups, which depend on its size alone."""
        table = pa.table(
            {name: _readable(column) for name, column in zip(table.schema.names, table.columns, strict=True)}
        )
        longest = max([len(table), *(_values(column) for column in table.columns)])
        size = max(1, len(table) * GROUP_VALUES // max(longest, 1))
        rows = tuple(min(size, len(table) - start) for start in range(0, len(table), size))
        return cls(table.schema, rows, table, title, number)

    def elements(self, group: int, column: str) -> int:
        """Values in the column, or in its lists."""
        return _values(self._group(group).column(column))

    def spans(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> list[Span | None]:
        """By a look at the column."""
        if not pa.types.is_integer(self.schema.field(column).type):
            return [None] * len(self.rows)
        return [_min_max(self._group(group).column(column)) for group in range(len(self.rows))]

    def is_void(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> bool:
        """By a look at the column and what its lists hold."""
        import pyarrow.compute as pc

        values = self.table.column(column)
        while is_list(values.type):
            values = pc.list_flatten(values)
        return len(self.table) > 0 and values.null_count == len(values)

    def decode(
        self, file: pa.NativeFile, groups: Sequence[int], columns: list[str], rows: int | None
    ) -> Iterator[pa.Table]:
        """Slices of the rows, without a copy; no file is opened."""
        tables = [self._group(group).select(columns) for group in groups]
        if rows is None:
            yield pa.concat_tables(tables)
            return
        for table in tables:
            for first in range(0, max(len(table), 1), rows):
                yield table.slice(first, rows)

    def _group(self, group: int) -> pa.Table:
        return self.table.slice(sum(self.rows[:group]), self.rows[group])


def _readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without extension types and views of text, which files do not hold either."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _readable(column.cast(kind.storage_type))
    return column.cast(pa.large_string()) if str(kind) == "string_view" else column


def _values(column: pa.ChunkedArray) -> int:
    import pyarrow.compute as pc

    return (pc.sum(pc.list_value_length(column)).as_py() or 0) if is_list(plain(column.type)) else len(column)


def _min_max(column: pa.ChunkedArray) -> Span | None:
    import pyarrow.compute as pc

    found = pc.min_max(column).as_py()
    return None if found["min"] is None else (found["min"], found["max"])


def _opened(file: pa.NativeFile, parts: Sequence[Message], options: Any = None) -> pa.RecordBatchStreamReader:
    """A stream of some messages of the file."""
    content = b"".join(file.read_at(part.size, part.start) for part in parts)
    return pa.ipc.open_stream(pa.py_buffer(content), options=options)


def _verify(array: pa.Array) -> None:
    """Refuse offsets that lead out of the buffers; text that is not UTF-8 does no harm."""
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.view(pa.binary() if pa.types.is_string(array.type) else pa.large_binary())
    array.validate(full=True)


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _arrays(kind: pa.DataType) -> int:
    """How many arrays a column of this type is made of: itself and its children."""
    kind = _storage(kind)
    return 1 + sum(_arrays(kind.field(number).type) for number in range(kind.num_fields))


def _stream(file: pa.NativeFile) -> Iterator[Message]:
    """The messages of a stream, up to its mark of the end or the end of the file."""
    start, size = 0, file.size()
    while start < size and file.read_at(8, start) not in _ENDS:
        message = _message(file, start)
        yield message
        start += message.size


def _blocks(file: pa.NativeFile) -> list[int]:
    """Where the record batches of a file begin, as its footer (Footer table of File.fbs) says."""
    tail = len(MAGIC) + 4
    (length,) = struct.unpack("<i", file.read_at(4, file.size() - tail))
    footer = file.read_at(length, file.size() - tail - length)
    (root,) = struct.unpack_from("<I", footer)
    place = _target(footer, root, 3)
    (count,) = struct.unpack_from("<I", footer, place)
    return list(struct.unpack_from(f"<{3 * count}q", footer, place + 4)[::3])  # each with the lengths of its parts


def _message(file: pa.NativeFile, start: int) -> Message:
    """The message that begins at `start`: its flatbuffer (Message.fbs) is read, its body is not."""
    head = file.read_at(_FIRST_READ, start)
    first, second = struct.unpack_from("<ii", head)
    prefix, length = (8, second) if first == -1 else (4, first)  # before version 0.15 there was no mark
    body = prefix + length
    if length <= 0 or start + body > file.size():
        raise ValueError("it is truncated, or not Arrow")
    buffer = (head if body <= len(head) else file.read_at(body, start))[prefix:body]
    (root,) = struct.unpack_from("<I", buffer)
    (kind,) = _field(buffer, root, 1, "<B")
    (size,) = _field(buffer, root, 3, "<q")
    if size < 0 or start + body + size > file.size():
        raise ValueError("it is truncated")
    if kind != _BATCH:
        return Message(kind, start, body + size)
    batch = _target(buffer, root, 2)
    (rows,) = _field(buffer, batch, 0, "<q")
    nodes = _target(buffer, batch, 1)
    (count,) = struct.unpack_from("<I", buffer, nodes)
    counts = struct.unpack_from(f"<{2 * count}q", buffer, nodes + 4)
    return Message(kind, start, body + size, rows, counts[::2], counts[1::2])


def _place(buffer: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table stands; 0 where it has its default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    (size,) = struct.unpack_from("<H", buffer, vtable)
    entry = 4 + 2 * number
    if entry >= size:
        return 0
    (offset,) = struct.unpack_from("<H", buffer, vtable + entry)
    return table + offset if offset else 0


def _field(buffer: bytes, table: int, number: int, form: str) -> tuple[int, ...]:
    place = _place(buffer, table, number)
    return struct.unpack_from(form, buffer, place) if place else (0,)


def _target(buffer: bytes, table: int, number: int) -> int:
    """Where a field of a table points."""
    place = _place(buffer, table, number)
    if not place:
        raise ValueError("a message is damaged")
    return place + int(struct.unpack_from("<I", buffer, place)[0])
