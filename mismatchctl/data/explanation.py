"""Errors about a whole column: the pattern in all rows, and the one thing to do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatchctl.core.batch import Floats, Ints
from mismatchctl.data.problems import Fault
from mismatchctl.errors import DataError

MAX_TOKENS = 1 << 26
"""Tokens of a file that are read again to count the rows concerned."""
_LEAST = 2
"""A fault in all rows is one of the column if there are at least this many rows."""
_COMPARED = 64
"""Number of rows whose list ends are compared."""


def explain_column(fault: Fault, rows: int, extent: tuple[float, float]) -> tuple[str, str] | None:
    """Return the pattern in all rows of a file and the remedy, or None for an unknown kind of fault."""
    _, _, kind = fault.reason.partition(": ")
    low, high = extent
    if kind == "log-prob above 0" and low >= 0 and high <= 1:
        problem = "hold values between 0 and 1: these look like probabilities"
        return f"all {rows:,} rows {problem}", "store their logarithm"
    if kind == "log-prob above 0" and low >= 0:
        problem = f"hold values from {low + 0.0:.3g} to {high:.3g}: these look like negative log-probs"
        return f"all {rows:,} rows {problem}", "store them with the opposite sign"
    if kind == "log-prob above 0":
        return f"all {rows:,} rows hold values above 0", "check the column: a log-prob is at most 0"
    if kind == "log-prob below all":
        return (
            f"all {rows:,} rows hold values that no policy gives",
            "set response_mask to 0 for sentinels",
        )
    if kind in ("NaN", "null element", "infinite"):
        what = {"NaN": "NaN", "null element": "nulls"}.get(kind, "infinite values")
        remedy = "check response_mask: it may be 1 on padding, or the column was not recorded"
        return f"all {rows:,} rows hold {what} in valid tokens", remedy
    if kind == "null list":
        return f"the list is null in all {rows:,} rows", "record the column, or leave it out"
    if fault.reason == "mask is not 0 or 1":
        return f"{fault.problem}; so it is in all {rows:,} rows", "store 0 and 1: weights are not a mask"
    if kind == "missing":
        return f"the value is missing or not finite in all {rows:,} rows", "record the column, or leave it out"
    return None


def explain_fault(
    fault: Fault, path: str, name: str, rows: int, extent: tuple[float, float], count: Callable[[], int]
) -> DataError:
    """Return the error of a fault, about all rows of the file if all of them have it."""
    if rows < _LEAST:
        return fault.error(path, name)
    if fault.pattern is None and explain_column(fault, rows, extent) is None:
        return fault.error(path, name)
    if count() < rows:
        return fault.error(path, name)
    column = fault.column if name == fault.column else f"{name} ({fault.column})"
    found = fault.pattern or explain_column(fault, rows, extent)
    assert found is not None
    return DataError(found[0], file=path, column=column, remedy=found[1])


def describe_lengths(
    column: str, reference: str, lengths: Ints, reference_lengths: Ints, values: Callable[[int], tuple[Floats, Floats]]
) -> tuple[str, str] | None:
    """Return the pattern in the lengths of two lists and the remedy, or None without a pattern."""
    apart = lengths - reference_lengths
    if len(apart) < _LEAST or not (apart == apart[0]).all() or apart[0] == 0:
        return None
    more = int(apart[0])
    longer, shorter, count = (column, reference, more) if more > 0 else (reference, column, -more)
    entries = "one entry" if count == 1 else f"{count} entries"
    text = f"{longer} has {entries} more than {shorter} in every row"
    end = _extra_end(count, more > 0, range(min(len(apart), _COMPARED)), values)
    if end is None:
        return text, f"store both for the same tokens: cut {entries} off {longer}"
    extra = "the extra one is the" if count == 1 else "the extra ones are the"
    return f"{text}; {extra} {end}", f"cut the {end} {'entry' if count == 1 else f'{count} entries'} off {longer}"


def _extra_end(
    count: int, mine_longer: bool, rows: range, values: Callable[[int], tuple[Floats, Floats]]
) -> str | None:
    """Return the end with the extra entries of the longer list. At the other end the lists agree."""
    apart: dict[str, list[float]] = {"first": [], "last": []}
    for row in rows:
        mine, other = values(row)
        longer, shorter = (mine, other) if mine_longer else (other, mine)
        if len(shorter) == 0:
            continue
        apart["last"].append(float(np.nanmean(np.abs(longer[: len(shorter)] - shorter))))
        apart["first"].append(float(np.nanmean(np.abs(longer[count:] - shorter))))
    if not apart["last"]:
        return None
    first, last = (float(np.median(apart[end])) for end in ("first", "last"))
    if not np.isfinite(first) or not np.isfinite(last):
        return None
    return "first" if first < 0.5 * last else "last" if last < 0.5 * first else None
