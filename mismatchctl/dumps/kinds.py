"""Arrow types in the words of the contract: what a column holds, and whether that will do."""

from __future__ import annotations

import pyarrow as pa

from mismatchctl.contract import NESTED, DumpColumn, Kind

NUMBERS, FLAGS, TEXT, NOTHING = "numbers", "true/false", "text", "nothing"


def plain(kind: pa.DataType) -> pa.DataType:
    """The type of the values themselves, without dictionary encoding or extension."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def is_list(kind: pa.DataType) -> bool:
    """Whether the type is one of the list types that a file can hold."""
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or is_list_view(kind)
    )


def is_list_view(kind: pa.DataType) -> bool:
    """Whether the type is a list view; older pyarrow has no such type."""
    return str(kind).startswith(("list_view<", "large_list_view<"))


def holds(kind: pa.DataType) -> str:
    """What a column of this type holds, in words: equal words in two files mean that they agree."""
    kind = plain(kind)
    if is_list(kind):
        return f"lists of {holds(kind.value_type)}"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return NUMBERS
    if pa.types.is_boolean(kind):
        return FLAGS
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view":
        return TEXT
    return NOTHING if pa.types.is_null(kind) else str(kind)


def agreed(column: DumpColumn | None, kind: pa.DataType) -> str:
    """`holds`, with true/false and numbers as one where the contract takes either."""
    words = holds(kind)
    return words if column is None or column.kind is Kind.ID else words.replace(FLAGS, NUMBERS)


def misfit(column: DumpColumn, kind: pa.DataType, layout: str) -> str | None:
    """Why a column of this type can't serve as `column`; None when it can."""
    kind = plain(kind)
    if layout == "wide" and (column.per_token or (column.kind is Kind.PER_TOKEN_OR_SCALAR and is_list(kind))):
        if not is_list(kind):
            return f"holds {holds(kind)} where lists, one element per token, are needed"
        kind = plain(kind.value_type)
        if pa.types.is_null(kind):
            return None  # lists that are all empty have no type of their own
    wanted = _element(column.kind, kind)
    return None if wanted is None else f"holds {holds(kind)} ({kind}) where {wanted} are needed"


def _element(kind: Kind, actual: pa.DataType) -> str | None:
    """What a single value would have to be instead; None when `actual` will do."""
    number = holds(actual) == NUMBERS
    if kind is Kind.LOG_PROBS:
        return None if pa.types.is_floating(actual) else "floats"
    if kind is Kind.MASK:
        return None if (number or pa.types.is_boolean(actual)) else "0/1 or true/false"
    if kind is Kind.TOKENS:
        return None if pa.types.is_integer(actual) else "integers"
    if kind is Kind.PER_TOKEN_OR_SCALAR:
        return None if number else "numbers"
    if kind is Kind.NUMBER:
        return None if (number or pa.types.is_boolean(actual)) else "numbers"
    if kind is Kind.PROMPT:
        return None if is_list(actual) and pa.types.is_integer(plain(actual).value_type) else "lists of integers"
    if kind in NESTED:
        wanted = pa.types.is_floating if kind is Kind.TOP_LOG_PROBS else pa.types.is_integer
        fits = is_list(actual) and (wanted(plain(actual.value_type)) or pa.types.is_null(actual.value_type))
        return None if fits else kind.value.partition(",")[0]
    return "integers or strings" if pa.types.is_nested(actual) else None
