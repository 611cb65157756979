"""Read metadata and columns of Parquet files, Arrow files and tables in memory."""

from __future__ import annotations

import hashlib
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Ints
from mismatchctl.core.machine_code import compiled_loops_in_use
from mismatchctl.core.schema import COLUMNS_BY_NAME, ColumnKind, DumpColumn
from mismatchctl.io.parquet_footer import check_footer
from mismatchctl.io.stores import Store, format_names

NUMBER_TYPE, FLAG_TYPE, TEXT_TYPE, NULL_TYPE = "numbers", "true/false", "text", "nothing"


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values in a dictionary type or extension type. Other types are unchanged."""
    while isinstance(kind, (pa.BaseExtensionType, pa.DictionaryType)):
        kind = kind.value_type if isinstance(kind, pa.DictionaryType) else kind.storage_type
    return kind


def is_list(kind: pa.DataType) -> bool:
    return isinstance(plain_type(kind), (pa.ListType, pa.LargeListType, pa.FixedSizeListType, *_LIST_VIEWS))


_LIST_VIEWS = (pa.ListViewType, pa.LargeListViewType)
VALUE_KINDS: dict[str, Callable[[pa.DataType], bool]] = {
    "float": pa.types.is_floating,
    "integer": pa.types.is_integer,
    "decimal": pa.types.is_decimal,
    FLAG_TYPE: pa.types.is_boolean,
    TEXT_TYPE: lambda kind: str(kind) in ("string", "large_string", "string_view"),
    NULL_TYPE: pa.types.is_null,
}
_NUMBERS = ("float", "integer", "decimal")


def make_array(cells: Sequence[Any]) -> pa.Array:
    """Convert Python values to Arrow. Integers become text if another value is text, or if one exceeds 64 bits."""
    try:
        return pa.array(cells)
    except OverflowError:
        with suppress(ArithmeticError, TypeError, ValueError, pa.ArrowException):
            return pa.array(cells, pa.uint64())
    except (TypeError, pa.ArrowException):
        if not all(cell is None or isinstance(cell, (str, int)) for cell in cells):
            raise
    return pa.array([*map(_integers_to_text, cells)])


def _integers_to_text(cell: Any) -> Any:
    if isinstance(cell, (list, tuple)):
        return [*map(_integers_to_text, cell)]
    return str(cell) if isinstance(cell, int) else cell


def classify(kind: pa.DataType) -> tuple[int, str]:
    """Return the number of list levels (0: no list) and the kind of values (key of `VALUE_KINDS`, or Arrow's name)."""
    depth, kind = 0, plain_type(kind)
    while is_list(kind):
        depth, kind = depth + 1, plain_type(kind.value_type)
    return depth, next((name for name, fits in VALUE_KINDS.items() if fits(kind)), str(kind))


def describe_type(kind: pa.DataType) -> str:
    """Describe a column type, such as "lists of numbers". Two columns with the same description are compatible."""
    depth, values = classify(kind)
    return "lists of " * depth + (NUMBER_TYPE if values in _NUMBERS else values)


_EXPECTED: dict[ColumnKind, tuple[str, int, tuple[str, ...]]] = {
    ColumnKind.LOG_PROBS: ("floats", 0, ("float",)),
    ColumnKind.MASK: ("0/1 or true/false", 0, (*_NUMBERS, FLAG_TYPE)),
    ColumnKind.TOKENS: ("integers", 0, ("integer",)),
    ColumnKind.PER_TOKEN_OR_SCALAR: ("numbers", 0, _NUMBERS),
    ColumnKind.EXPERTS: ("lists of expert ids", 1, ("integer", NULL_TYPE)),
    ColumnKind.TOP_IDS: ("lists of token ids", 1, ("integer", NULL_TYPE)),
    ColumnKind.TOP_LOG_PROBS: ("lists of log-probs", 1, ("float", NULL_TYPE)),
    ColumnKind.PROMPT: ("lists of integers", 1, ("integer", NULL_TYPE)),
    ColumnKind.NUMBER: ("numbers", 0, (*_NUMBERS, FLAG_TYPE)),
    ColumnKind.ID: ("integers or strings", 0, ()),
}
"""Kind of column -> (name in errors, list levels, accepted `VALUE_KINDS`). () accepts all types except nested types."""


def find_type_misfit(column: DumpColumn, kind: pa.DataType, layout: str) -> str | None:
    kind = plain_type(kind)
    if layout == "wide" and (column.per_token or (column.kind is ColumnKind.PER_TOKEN_OR_SCALAR and is_list(kind))):
        if not is_list(kind):
            return f"contains {describe_type(kind)} instead of lists with one element per token"
        kind = plain_type(kind.value_type)
        if pa.types.is_null(kind):
            return None  # lists that are all empty may have the null type
    (depth, values), (wanted, wanted_depth, accepted) = classify(kind), _EXPECTED[column.kind]
    if depth == wanted_depth and (values in accepted or (not accepted and not pa.types.is_nested(kind))):
        return None
    return f"contains {describe_type(kind)} ({kind}) instead of {wanted}"


def is_text(kind: pa.DataType) -> bool:
    return str(kind) in ("string", "large_string", "binary", "large_binary")


_LONG_TEXT, _KEPT_TEXT = 1 << 10, 40
"""In strings of `_LONG_TEXT` bytes or more, a hash replaces all but the first and last `_KEPT_TEXT` bytes."""


def _shorten_texts(array: pa.Array) -> pa.Array:
    """Shorten long strings to `start...hash...end`, which saves memory if many rows contain the same huge string."""
    import pyarrow.compute as pc

    if not len(array) or (pc.max(pc.binary_length(array)).as_py() or 0) < _LONG_TEXT:
        return array
    values = array.cast(pa.large_binary())
    places = np.flatnonzero(pc.greater_equal(pc.binary_length(values), _LONG_TEXT).fill_null(False))
    short = []
    for place in places.tolist():
        text = values[place].as_py()
        start, end = (part.decode(errors="backslashreplace") for part in (text[:_KEPT_TEXT], text[-_KEPT_TEXT:]))
        short.append(f"{start}...{hashlib.blake2b(text, digest_size=16).hexdigest()}...{end}".encode())
    chosen = np.zeros(len(array), np.bool_)
    chosen[places] = True
    found = pc.replace_with_mask(values, pa.array(chosen), pa.array(short, pa.large_binary()))
    return found.cast(pa.large_binary() if "binary" in str(array.type) else pa.large_string(), safe=False)


def to_plain_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Convert a column to one array without dictionaries and extension types. Shorten long strings."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if str(column.type) in ("string_view", "binary_view"):  # pyarrow cannot select values of such arrays
        is_binary, column = "binary" in str(column.type), column.cast(pa.large_binary())
        column = column if is_binary else column.cast(pa.large_string(), safe=False)
    if pa.types.is_dictionary(column.type):
        if not is_text(column.type.value_type):
            return column.dictionary_decode()
        return _shorten_texts(column.dictionary).take(column.indices)
    return _shorten_texts(column) if is_text(column.type) else column


@dataclass(frozen=True)
class ListColumn:
    """A list column. Row i contains `values[starts[i] : starts[i] + lengths[i]]`. A null list has the length 0."""

    values: pa.Array
    starts: Ints
    lengths: Ints
    null: Bools | None

    @classmethod
    def of(cls, array: pa.Array) -> ListColumn:
        # `flatten` would drop the values of null rows. `values` belongs to the whole array even if `array` is a slice,
        # so the offsets of the slice select from it.
        if isinstance(array.type, _LIST_VIEWS):  # a cast to lists would assume that the views are in order
            starts = array.offsets.to_numpy().astype(np.int64, copy=False)
            lengths = array.sizes.to_numpy().astype(np.int64, copy=False)
        elif pa.types.is_fixed_size_list(array.type):
            size = array.type.list_size
            starts = (np.arange(len(array), dtype=np.int64) + array.offset) * size
            lengths = np.full(len(array), size, np.int64)
        else:
            offsets = array.offsets.to_numpy().astype(np.int64, copy=False)
            starts, lengths = offsets[:-1], np.diff(offsets)
        null = None
        if array.null_count:
            null = array.is_null().to_numpy(zero_copy_only=False)
            lengths = np.where(null, 0, lengths)
        values = to_plain_array(array.values)
        if pa.types.is_null(values.type):  # some writers use this type if all lists are empty
            values = values.cast(pa.float32())
        return cls(values, starts, lengths, null)

    @property
    def missing(self) -> Bools:
        return np.zeros(len(self.lengths), np.bool_) if self.null is None else self.null

    def flat(self, keep: Bools | None) -> pa.Array:
        """Join the lists of the rows where `keep` is True (default: all rows). Adjacent lists are not copied."""
        starts = self.starts if keep is None else self.starts[keep]
        lengths = self.lengths if keep is None else self.lengths[keep]
        ends = starts + lengths
        if len(starts) == 0:
            return self.values.slice(0, 0)
        if np.array_equal(starts[1:], ends[:-1]):
            return self.values.slice(int(starts[0]), int(ends[-1] - starts[0]))
        return self.values.take(pa.array(concatenate_ranges(starts, lengths)))


def concatenate_ranges(starts: Ints, lengths: Ints) -> Ints:
    return np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def find_nulls(array: pa.Array) -> Bools | None:
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def to_numpy(array: pa.Array) -> NDArray[Any]:
    """Convert numbers or flags to numpy, without a copy if possible. A null becomes 0 or False."""
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values


def to_scalars(array: pa.Array, column: DumpColumn | None) -> NDArray[Any]:
    """Convert per-sequence values to int64, float64 (null becomes NaN), or objects (strings, booleans, large ids)."""
    kind = array.type
    number = column is not None and column.kind is not ColumnKind.ID
    if pa.types.is_boolean(kind) and number:
        array, kind = array.cast(pa.int8()).cast(pa.float64()), pa.float64()
    if pa.types.is_integer(kind):
        above = pa.types.is_uint64(kind) and len(array) and to_numpy(array).max() > 2**63 - 1
        if array.null_count == 0 and not above:
            return to_numpy(array).astype(np.int64, copy=False)
        if column is not None and not number:
            return _object_array(array.to_pylist())
        values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
        return values.astype(np.float64)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        exact = array.cast(pa.float64()) if pa.types.is_decimal(kind) else array
        values = exact.to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
        return values if column is None or number else _restore_ids(values, is_step=column.name == "step")
    return np.full(len(array), np.nan) if pa.types.is_null(kind) and number else _to_objects(array)


def _restore_ids(values: NDArray[np.float64], *, is_step: bool) -> NDArray[Any]:
    """Convert ids that were stored as floats: 3.0 to 3, NaN to `None`, 3.5 to "3.5". A step of 3.5 stays a float."""
    missing = np.isnan(values)
    are_whole = (values == np.round(values)) & (np.abs(values) < 2.0**63)
    if are_whole.all():
        return values.astype(np.int64)
    if is_step and not missing.any() and not are_whole.any():
        return values
    return _object_array(
        [
            None if gone else int(value) if is_whole else value if is_step else repr(value)
            for value, gone, is_whole in zip(values.tolist(), missing.tolist(), are_whole.tolist(), strict=True)
        ]
    )


def to_positions(array: pa.Array) -> pa.Array:
    """Convert positions to int64. Nulls and numbers that are not whole become null."""
    if pa.types.is_boolean(array.type):
        return array.cast(pa.int8()).cast(pa.int64())
    missing, values = find_nulls(array), to_numpy(array)
    if np.issubdtype(values.dtype, np.signedinteger):
        return array if array.type == pa.int64() else array.cast(pa.int64())
    bad = ~((values == np.round(values)) & (np.abs(values) < 2.0**53))  # also NaN
    bad = bad if missing is None else bad | missing
    return pa.array(np.where(bad, 0, values).astype(np.int64), mask=bad)


def to_texts(array: pa.Array) -> pa.Array:
    if pa.types.is_integer(array.type) or pa.types.is_string(array.type):
        return array.cast(pa.string())
    values = to_scalars(array, COLUMNS_BY_NAME["sequence_id"]).tolist()
    return pa.array([None if value is None else str(value) for value in values], pa.string())


def _to_objects(array: pa.Array) -> NDArray[Any]:
    """Convert values to strings, except booleans and nulls. Bytes that are not UTF-8 are escaped."""
    kind = plain_type(array.type)
    is_fixed = pa.types.is_fixed_size_binary(kind)
    if describe_type(kind) == TEXT_TYPE or describe_type(kind).endswith("binary") or is_fixed:
        raw = array.cast(pa.binary() if is_fixed else pa.large_binary()).to_pylist()
        return _object_array([None if cell is None else cell.decode(errors="backslashreplace") for cell in raw])
    try:
        values = array.to_pylist()
    except (ValueError, OverflowError):  # times finer than microseconds
        values = array.cast(pa.int64() if pa.types.is_duration(array.type) else pa.string()).to_pylist()
    return _object_array([value if value is None or isinstance(value, bool) else str(value) for value in values])


def _object_array(values: list[Any]) -> NDArray[Any]:
    result = np.empty(len(values), dtype=object)
    result[:] = values
    return result


def find_changes(array: pa.Array) -> Bools:
    """Return a flag for each pair of neighboring values, True if they differ. NaN equals NaN."""
    import pyarrow.compute as pc

    if pa.types.is_floating(array.type):  # the encoder compares bits: make all zeros and all NaN equal
        array = array.cast(pa.float64())
        array = pc.if_else(pc.is_nan(array), math.nan, pc.add(array, 0.0))
    elif "view" in str(array.type):
        array = array.cast(pa.large_binary())
    flags = np.zeros(max(len(array) - 1, 0), np.bool_)
    flags[pc.run_end_encode(array).run_ends.to_numpy()[:-1] - 1] = True
    return flags


IntegerRange = tuple[int, int]
_SAMPLE_ROWS = 256


@dataclass(frozen=True)
class FileContents(ABC):
    """Column types and row counts of a file. They are read before the columns, and can be sent to other processes."""

    schema: pa.Schema = field(repr=False)
    rows: tuple[int, ...]
    group_name: ClassVar[str]  # name of a part in messages, such as "row group"
    split_remedy: ClassVar[str]

    @abstractmethod
    def elements(self, group: int, column: str) -> int:
        """Estimate the number of values of a column in a row group."""

    def integer_ranges(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> list[IntegerRange | None]:
        import pyarrow.compute as pc

        if not pa.types.is_integer(self.schema.field(column).type):
            return [None] * len(self.rows)
        try:
            with opening as file:
                tables = (next(self.decode(file, [group], [column], None)) for group in range(len(self.rows)))
                spans = [pc.min_max(table.column(0)).as_py() for table in tables]
                return [None if span["min"] is None else (span["min"], span["max"]) for span in spans]
        except (OSError, pa.ArrowException):
            return [None] * len(self.rows)  # decoding will report the error

    def is_all_null(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> bool:
        """Return True if a column contains only nulls and empty lists."""
        filled = [group for group, rows in enumerate(self.rows) if rows]
        try:
            with opening as file:
                tables = self.decode(file, filled, [column], _SAMPLE_ROWS)
                return bool(filled) and not any(_has_value(table.column(0)) for table in tables)
        except (OSError, pa.ArrowException):
            return False  # decoding will report the error

    def find_oversize(self, groups: Sequence[int], columns: Sequence[str]) -> str | None:
        return None

    @abstractmethod
    def read_groups(self, file: pa.NativeFile, groups: Sequence[int], columns: list[str]) -> Iterator[pa.Table]:
        """Decode columns of some row groups. Yield one table for all of them, or one table per row group."""

    def decode(
        self, file: pa.NativeFile, groups: Sequence[int], columns: list[str], rows: int | None
    ) -> Iterator[pa.Table]:
        """Read the named columns of row groups. Yield tables of at most `rows` rows (`None`: a single table)."""
        tables = self.read_groups(file, groups, columns)
        if rows is None:
            yield pa.concat_tables(tables)
            return
        for table in tables:
            for first in range(0, max(len(table), 1), rows):
                yield table.slice(first, rows)


MOST_SEQUENCE_TOKENS = 1 << 21
ARROW_MAGIC = b"ARROW1"
_FIRST_READ = 4096
_STREAM_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", bytes(4))
_SCHEMA_MESSAGE, _BATCH_MESSAGE = 1, 3
"""Types of Arrow messages: 1 is a schema, and 3 is a record batch. Messages of all other types are dictionaries."""


@dataclass(frozen=True)
class ArrowMessage:
    """Start and size of an Arrow message in its file. A record batch also has a number of rows and array lengths."""

    kind: int
    start: int
    size: int
    rows: int = 0
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class ArrowContents(FileContents):
    """Metadata of an Arrow file or stream. A record batch is handled like a row group of a Parquet file."""

    stream: bool
    batches: tuple[ArrowMessage, ...] = field(repr=False)
    others: tuple[ArrowMessage, ...] = field(repr=False)
    group_name: ClassVar[str] = "record batch"
    split_remedy: ClassVar[str] = "write smaller record batches"

    @classmethod
    def of(cls, file: pa.NativeFile) -> ArrowContents:
        stream = file.read_at(len(ARROW_MAGIC), 0) != ARROW_MAGIC
        try:
            if stream:
                found = list(_read_messages(file))
                if not found or found[0].kind != _SCHEMA_MESSAGE:
                    raise ValueError("it does not begin with a schema")
                schema = _open_stream(file, found[:1]).schema
            else:
                schema = pa.ipc.open_file(file).schema  # verifies the footer
                found = [_read_message(file, start) for start in _read_batch_offsets(file)]
        except struct.error:
            raise ValueError("a message is damaged") from None
        batches = tuple(message for message in found if message.kind == _BATCH_MESSAGE)
        others = tuple(message for message in found if message.kind != _BATCH_MESSAGE)
        arrays = sum(_count_arrays(kind) for kind in schema.types)
        unfit = any(batch.rows < 0 or len(batch.lengths) != arrays for batch in batches)
        if unfit or (others and not stream):
            raise ValueError("its record batches do not fit its schema")
        return cls(schema, tuple(batch.rows for batch in batches), stream, batches, others)

    def elements(self, group: int, column: str) -> int:
        number, kinds = self.schema.get_field_index(column), self.schema.types
        first = sum(_count_arrays(kind) for kind in kinds[:number])
        return self.batches[group].lengths[first + bool(_storage_type(kinds[number]).num_fields)]

    def integer_ranges(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> list[IntegerRange | None]:
        return [None] * len(self.rows) if self.stream else super().integer_ranges(opening, column)

    def find_oversize(self, groups: Sequence[int], columns: Sequence[str]) -> str | None:
        for group in groups:
            rows, size = self.rows[group], self.batches[group].size
            for name in (name for name in columns if is_list(self.schema.field(name).type)):
                count = self.elements(group, name)
                if count > MOST_SEQUENCE_TOKENS and count > min(MOST_SEQUENCE_TOKENS * rows, 8 * size):
                    return f"record batch {group}, column {name!r}: too many values ({count:,} in {size:,} bytes)"
        return None

    def read_groups(self, file: pa.NativeFile, groups: Sequence[int], columns: list[str]) -> Iterator[pa.Table]:
        """Read the named columns of record batches. Verify that the offsets of lists point into their values."""
        fields = [self.schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
        reader = None if self.stream else pa.ipc.open_file(file, options=options)

        for group in groups:
            if reader is None:
                before = [other for other in self.others if other.start < self.batches[group].start]
                batch = _open_stream(file, [*before, self.batches[group]], options).read_next_batch()
            else:
                batch = reader.get_batch(group)
            for array in batch.columns:
                if str(array.type) in ("string", "large_string"):  # accept invalid UTF-8
                    array = array.view(pa.binary() if array.type == pa.string() else pa.large_binary())
                array.validate(full=True)  # offsets may point outside of the buffers
            yield pa.Table.from_batches([batch]).select(columns)


GROUP_VALUES = 1 << 20
"""A table in memory is read in parallel as several row groups. Each has about this number of values per column."""

_COLUMNS_IN_FILE = b"mismatchctl.columns"


def with_names_in_file(table: pa.Table) -> pa.Table:
    """Store the current column names in the table's metadata, so that messages show them after columns are renamed."""
    return table.replace_schema_metadata({_COLUMNS_IN_FILE: "\0".join(table.schema.names)})


def _names_in_file(schema: pa.Schema) -> list[str]:
    stored = (schema.metadata or {}).get(_COLUMNS_IN_FILE)
    return list(schema.names) if stored is None else stored.decode(errors="replace").split("\0")


def list_columns(schema: pa.Schema) -> str:
    """List the first 24 columns for a message, with the names that they have in the file."""
    return format_names(_names_in_file(schema), 24) or "none"


def find_current_name(schema: pa.Schema, name: str) -> str:
    """Return the current name of the column that has this name in the file, for example token_ids for `responses`."""
    names = [] if name in schema.names else _names_in_file(schema)
    return str(schema.names[names.index(name)]) if name in names else name


@dataclass(frozen=True)
class MemoryTable(FileContents):
    """A table in memory that is read like a file. Its row groups are slices of rows."""

    table: pa.Table = field(repr=False, compare=False)
    title: str
    number: int = 1
    run: str = "memory"
    version: str = ""
    group_name: ClassVar[str] = "part"
    split_remedy: ClassVar[str] = "split the file"

    @classmethod
    def of(cls, table: pa.Table, title: str, number: int = 1, *, run: str = "memory", version: str = "") -> MemoryTable:
        columns = {name: _to_readable(column) for name, column in zip(table.schema.names, table.columns, strict=True)}
        table = pa.table(columns, metadata=table.schema.metadata)
        longest = max([len(table), *(_values(column) for column in table.columns)])
        size = max(1, len(table) * GROUP_VALUES // max(longest, 1))
        rows = tuple(min(size, len(table) - start) for start in range(0, len(table), size))
        return cls(table.schema, rows, table, title, number, run, version)

    def elements(self, group: int, column: str) -> int:
        return _values(self._group(group).column(column))

    def read_groups(self, file: pa.NativeFile, groups: Sequence[int], columns: list[str]) -> Iterator[pa.Table]:
        return (self._group(group).select(columns) for group in groups)  # `file` is not needed

    def _group(self, group: int) -> pa.Table:
        return self.table.slice(sum(self.rows[:group]), self.rows[group])


def _to_readable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _to_readable(column.cast(kind.storage_type))
    return column.cast(pa.large_string()) if str(kind) == "string_view" else column


def _values(column: pa.ChunkedArray) -> int:
    import pyarrow.compute as pc

    return (pc.sum(pc.list_value_length(column)).as_py() or 0) if is_list(column.type) else len(column)


def _open_stream(file: pa.NativeFile, parts: Sequence[ArrowMessage], options: Any = None) -> pa.RecordBatchStreamReader:
    content = b"".join(file.read_at(part.size, part.start) for part in parts)
    return pa.ipc.open_stream(pa.py_buffer(content), options=options)


def _storage_type(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _count_arrays(kind: pa.DataType) -> int:
    kind = _storage_type(kind)
    return 1 + sum(_count_arrays(kind.field(number).type) for number in range(kind.num_fields))


def _read_messages(file: pa.NativeFile) -> Iterator[ArrowMessage]:
    start, size = 0, file.size()
    while start < size and file.read_at(8, start) not in _STREAM_ENDS:
        message = _read_message(file, start)
        yield message
        start += message.size


def _read_batch_offsets(file: pa.NativeFile) -> list[int]:
    tail = len(ARROW_MAGIC) + 4
    (length,) = struct.unpack("<i", file.read_at(4, file.size() - tail))
    footer = file.read_at(length, file.size() - tail - length)
    (root,) = struct.unpack_from("<I", footer)
    place = _follow_offset(footer, root, 3)
    (count,) = struct.unpack_from("<I", footer, place)
    # Each block has an offset and two lengths.
    return list(struct.unpack_from(f"<{3 * count}q", footer, place + 4)[::3])


def _read_message(file: pa.NativeFile, start: int) -> ArrowMessage:
    """Read the header of the Arrow message that begins at byte `start`, but not the message's data."""
    head = file.read_at(_FIRST_READ, start)
    first, second = struct.unpack_from("<ii", head)
    prefix, length = (8, second) if first == -1 else (4, first)  # Arrow before 0.15 does not write the -1
    body = prefix + length
    if length <= 0 or start + body > file.size():
        raise ValueError("it is truncated, or it is not an Arrow file")
    buffer = (head if body <= len(head) else file.read_at(body, start))[prefix:body]
    (root,) = struct.unpack_from("<I", buffer)
    (kind,) = _read_field(buffer, root, 1, "<B")
    (size,) = _read_field(buffer, root, 3, "<q")
    if size < 0 or start + body + size > file.size():
        raise ValueError("it is truncated")
    if kind != _BATCH_MESSAGE:
        return ArrowMessage(kind, start, body + size)
    batch = _follow_offset(buffer, root, 2)
    (rows,) = _read_field(buffer, batch, 0, "<q")
    nodes = _follow_offset(buffer, batch, 1)
    (count,) = struct.unpack_from("<I", buffer, nodes)
    lengths = struct.unpack_from(f"<{2 * count}q", buffer, nodes + 4)[::2]  # without null counts
    return ArrowMessage(kind, start, body + size, rows, lengths)


def _find_field(buffer: bytes, table: int, number: int) -> int:
    """Return the offset of a field in a flatbuffer table, or 0 if the field has its default value."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    (size,) = struct.unpack_from("<H", buffer, vtable)
    entry = 4 + 2 * number
    if entry >= size:
        return 0
    (offset,) = struct.unpack_from("<H", buffer, vtable + entry)
    return table + offset if offset else 0


def _read_field(buffer: bytes, table: int, number: int, form: str) -> tuple[int, ...]:
    place = _find_field(buffer, table, number)
    return struct.unpack_from(form, buffer, place) if place else (0,)


def _follow_offset(buffer: bytes, table: int, number: int) -> int:
    place = _find_field(buffer, table, number)
    if not place:
        raise ValueError("a message is damaged")
    return place + int(struct.unpack_from("<I", buffer, place)[0])


_MOST_TEXT_BYTES = 1 << 28  # maximum size of a string column in one row group, in bytes
_READ_BYTES = 1 << 20
"""Number of bytes that are read at a time from each column of a row group that is too large for memory."""


@dataclass(frozen=True)
class ParquetContents(FileContents):
    """Metadata of a Parquet file."""

    footer: pq.FileMetaData = field(repr=False, compare=False)
    group_name: ClassVar[str] = "row group"
    split_remedy: ClassVar[str] = "write smaller row groups"

    @classmethod
    def of(cls, file: pa.NativeFile) -> ParquetContents:
        check_footer(file)
        footer = pq.read_metadata(file)
        rows = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        return cls(footer.schema.to_arrow_schema(), rows, footer)

    def elements(self, group: int, column: str) -> int:
        leaf = self._first_leaf(column)
        return 0 if leaf is None else int(self.footer.row_group(group).column(leaf).num_values)

    def integer_ranges(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> list[IntegerRange | None]:
        leaf = self._first_leaf(column)
        if leaf is None:
            return [None] * len(self.rows)
        return [_value_span(self.footer.row_group(group).column(leaf)) for group in range(len(self.rows))]

    def is_all_null(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> bool:
        leaf = self._first_leaf(column)
        levels = None if leaf is None else self.footer.schema.column(leaf)
        if levels is None or not levels.max_definition_level:
            return False
        for group, rows in enumerate(self.rows):
            chunk = self.footer.row_group(group).column(leaf)
            statistics = chunk.statistics
            if rows and statistics is not None and statistics.has_null_count and not statistics.null_count:
                return False
            if rows < chunk.num_values and levels.max_definition_level == levels.max_repetition_level:
                return False  # elements cannot be null, and some list is not empty if there are more values than rows
        return super().is_all_null(opening, column)

    def find_oversize(self, groups: Sequence[int], columns: Sequence[str]) -> str | None:
        """Describe the first column with too many bytes of text, too many values per row, or too many per byte."""
        leaves = {name: leaf for name in columns if (leaf := self._first_leaf(name)) is not None}
        for group in groups:
            row_group = self.footer.row_group(group)
            for name, leaf in leaves.items():
                chunk = row_group.column(leaf)
                where, count = f"row group {group}, column {name!r}", chunk.num_values
                if chunk.physical_type == "BYTE_ARRAY" and chunk.total_uncompressed_size > _MOST_TEXT_BYTES:
                    return f"{where}: too much text ({chunk.total_uncompressed_size:,} bytes)"
                if not is_list(self.schema.field(name).type) or count <= MOST_SEQUENCE_TOKENS:
                    continue
                if count > MOST_SEQUENCE_TOKENS * row_group.num_rows:
                    return f"{where}: too many values ({count:,} in {row_group.num_rows:,} rows)"
                if "FLOAT" in chunk.physical_type and count > 8 * chunk.total_compressed_size:
                    return f"{where}: too many values ({count:,} in {chunk.total_compressed_size:,} bytes)"
        return None

    def decode(
        self, file: pa.NativeFile, groups: Sequence[int], columns: list[str], rows: int | None
    ) -> Iterator[pa.Table]:
        if rows is None:
            yield from super().decode(file, groups, columns, rows)
            return
        for batch in self._open(file, columns, _READ_BYTES).iter_batches(
            rows, list(groups), columns, use_threads=False
        ):
            yield pa.Table.from_batches([batch])

    def read_groups(self, file: pa.NativeFile, groups: Sequence[int], columns: list[str]) -> Iterator[pa.Table]:
        lists: dict[str, pa.Array] = {}
        # Loading compiled loops only for this takes longer than it saves. Object stores need larger reads than pages.
        if compiled_loops_in_use() and isinstance(file, pa.OSFile):
            from mismatchctl.data.parquet_pages import read_lists

            lists = read_lists(file, self.footer, self.schema, groups, columns)  # optional, with the same result
        others = [name for name in columns if name not in lists]
        table = self._open(file, columns).read_row_groups(list(groups), columns=others, use_threads=False)
        for name, array in lists.items():
            table = table.append_column(self.schema.field(name), array)
        yield table.select(columns) if lists else table

    def _open(self, file: pa.NativeFile, columns: list[str], buffer_size: int = 0) -> pq.ParquetFile:
        """Open a file so that pyarrow verifies checksums and keeps strings dictionary-encoded, which saves memory."""
        return pq.ParquetFile(
            file,
            metadata=self.footer,
            read_dictionary=[name for name in columns if is_text(self.schema.field(name).type)],
            page_checksum_verification=True,
            buffer_size=buffer_size,
            # True buffers whole compressed row groups, which only saves time for files in object stores.
            pre_buffer=not buffer_size and not isinstance(file, pa.OSFile),
        )

    def _first_leaf(self, column: str) -> int | None:
        """Return the index of a column's first leaf. A leaf is a physical Parquet column with its own statistics."""
        for index in range(self.footer.num_columns):
            path = self.footer.schema.column(index).path
            if path == column or path.startswith(f"{column}."):
                return index
        return None


def _has_value(column: pa.ChunkedArray) -> bool:
    import pyarrow.compute as pc

    while is_list(column.type):
        column = pc.list_flatten(column)
    return bool(column.null_count < len(column))


def _value_span(chunk: pq.ColumnChunkMetaData) -> IntegerRange | None:
    statistics = chunk.statistics
    if statistics is None or not statistics.has_min_max:
        return None
    try:
        low, high = statistics.min, statistics.max
    except (OverflowError, ValueError):  # a timestamp outside of Python's range
        return None
    return (low, high) if type(low) is int and type(high) is int else None


_PARQUET_SUFFIXES, _ARROW_SUFFIXES = (".parquet", ".pq"), (".arrow", ".arrows", ".feather", ".ipc")
_PARQUET_MAGIC = b"PAR1"
SUFFIXES = _PARQUET_SUFFIXES + _ARROW_SUFFIXES


def is_dump_file(path: str, store: Store) -> bool:
    """Return True if a file is Parquet or Arrow by its suffix or first bytes. Spark and Ray can omit the suffix."""
    return path.lower().endswith(SUFFIXES) or store.read_start(path, 6).startswith((_PARQUET_MAGIC, ARROW_MAGIC))


def format_name(path: str) -> str:
    return "Arrow" if path.lower().endswith(_ARROW_SUFFIXES) else "Parquet"


def read_contents(path: str, file: pa.NativeFile) -> FileContents:
    bare = not path.lower().endswith(SUFFIXES)
    if format_name(path) == "Arrow" or (bare and file.read_at(len(ARROW_MAGIC), 0) == ARROW_MAGIC):
        return ArrowContents.of(file)
    return ParquetContents.of(file)
