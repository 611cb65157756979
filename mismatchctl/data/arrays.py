"""Arrow types and arrays: describe column types, and convert arrays to numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Ints
from mismatchctl.core.schema import COLUMNS_BY_NAME, ColumnKind, DumpColumn

NUMBER_TYPE, FLAG_TYPE, TEXT_TYPE, NULL_TYPE = "numbers", "true/false", "text", "nothing"


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values, without dictionary encoding or extension type."""
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


def classify(kind: pa.DataType) -> tuple[int, str]:
    """Return the depth of nested lists, and the kind of their values: of `VALUE_KINDS`, or the name of the type."""
    depth, kind = 0, plain_type(kind)
    while is_list(kind):
        depth, kind = depth + 1, plain_type(kind.value_type)
    return depth, next((name for name, fits in VALUE_KINDS.items() if fits(kind)), str(kind))


def describe_type(kind: pa.DataType) -> str:
    """Describe the values of a type. Two columns are compatible if their descriptions are equal."""
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
"""Expected element in words, depth of its lists, and kinds of its values. Ids can have any type that is not nested."""


def find_type_misfit(column: DumpColumn, kind: pa.DataType, layout: str) -> str | None:
    kind = plain_type(kind)
    if layout == "wide" and (column.per_token or (column.kind is ColumnKind.PER_TOKEN_OR_SCALAR and is_list(kind))):
        if not is_list(kind):
            return f"contains {describe_type(kind)} where lists, one element per token, are needed"
        kind = plain_type(kind.value_type)
        if pa.types.is_null(kind):
            return None  # lists that are all empty may have the null type
    (depth, values), (wanted, wanted_depth, accepted) = classify(kind), _EXPECTED[column.kind]
    if depth == wanted_depth and (values in accepted or (not accepted and not pa.types.is_nested(kind))):
        return None
    return f"contains {describe_type(kind)} ({kind}) where {wanted} are needed"


def is_text(kind: pa.DataType) -> bool:
    return str(kind) in ("string", "large_string", "binary", "large_binary")


_LONG_TEXT, _KEPT_TEXT = 1 << 10, 40
"""Length in bytes above which a string is shortened, and the bytes kept at each end."""


def _shorten_texts(array: pa.Array) -> pa.Array:
    """Shorten long strings, because each row of a small file may refer to the same huge string."""
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
    """Return the column as a single array, without dictionary encoding or extension type."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        if not is_text(column.type.value_type):
            return column.dictionary_decode()
        return _shorten_texts(column.dictionary).take(column.indices)
    return _shorten_texts(column) if is_text(column.type) else column


@dataclass(frozen=True)
class ListColumn:
    """A list column as flat values: row i is `values[starts[i] : starts[i] + lengths[i]]`.

    A null row has length 0, even if values are stored for it.
    """

    values: pa.Array
    starts: Ints
    lengths: Ints
    null: Bools | None

    @classmethod
    def of(cls, array: pa.Array) -> ListColumn:
        # `values` is the whole child array even of a slice, and `flatten` drops what null rows hide: only
        # `values` together with the slice's own offsets is safe.
        if isinstance(array.type, _LIST_VIEWS):  # a cast to lists would assume that they are in order
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
        if pa.types.is_null(values.type):  # some writers store empty lists like this
            values = values.cast(pa.float32())
        return cls(values, starts, lengths, null)

    @property
    def missing(self) -> Bools:
        return np.zeros(len(self.lengths), np.bool_) if self.null is None else self.null

    def flat(self, keep: Bools | None) -> pa.Array:
        """Return the elements of the rows in `keep` (None: all rows), without a copy if the rows are adjacent."""
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
    """Convert numbers or flags to numpy, without a copy if possible. The value of a null is undefined."""
    if pa.types.is_boolean(array.type) and not array.null_count:
        bits = np.frombuffer(array.buffers()[1] or b"", np.uint8)  # four times as fast as pyarrow's own
        first, skipped = divmod(array.offset, 8)
        return np.unpackbits(bits[first:], count=skipped + len(array), bitorder="little")[skipped:].view(np.bool_)
    if array.null_count:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values


def to_scalars(array: pa.Array, column: DumpColumn | None) -> NDArray[Any]:
    """Convert values per sequence to int64, float64 (NaN for null) or objects (None for null).

    If a column of ids has nulls or ids above int64, the ids become Python ints, so that an id is equal in all files.
    `column` is None for a `--by` column.
    """
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
    """Convert ids stored as floats to integers. NaN becomes None.

    A fractional step stays a number. Other fractional ids become strings.
    """
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
    """Convert positions to int64. Nulls and fractions become null."""
    if pa.types.is_boolean(array.type):
        return array.cast(pa.int8()).cast(pa.int64())
    missing, values = find_nulls(array), to_numpy(array)
    if np.issubdtype(values.dtype, np.signedinteger):
        return array if array.type == pa.int64() else array.cast(pa.int64())
    bad = ~((values == np.round(values)) & (np.abs(values) < 2.0**53))  # NaN too
    bad = bad if missing is None else bad | missing
    return pa.array(np.where(bad, 0, values).astype(np.int64), mask=bad)


def to_texts(array: pa.Array) -> pa.Array:
    if pa.types.is_integer(array.type) or pa.types.is_string(array.type):
        return array.cast(pa.string())
    values = to_scalars(array, COLUMNS_BY_NAME["sequence_id"]).tolist()
    return pa.array([None if value is None else str(value) for value in values], pa.string())


def _to_objects(array: pa.Array) -> NDArray[Any]:
    """Convert values to strings or flags.

    Bytes that are not UTF-8 are escaped, also in strings, as Parquet allows.
    """
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
    """Return flags [N - 1] of the values that differ from the previous value."""
    differ: Bools
    before, after = array.slice(0, max(len(array) - 1, 0)), array.slice(1)
    if pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
        left, right = to_numpy(before), to_numpy(after)
        differ = (left != right) & ~(np.isnan(left) & np.isnan(right))
    elif pa.types.is_integer(array.type):
        differ = to_numpy(before) != to_numpy(after)
    else:
        import pyarrow.compute as pc  # slow to import, not needed for files of numbers

        differ = pc.not_equal(before, after).fill_null(False).to_numpy(zero_copy_only=False)
    gone = find_nulls(array)
    if gone is not None:
        differ = np.where(gone[:-1] | gone[1:], gone[:-1] != gone[1:], differ)
    return differ
