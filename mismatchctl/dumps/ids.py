"""Token ids of a few sequences, looked up after a pass has found which ones are worth showing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.batch import Ints
from mismatchctl.dumps.arrays import Lists, nulls, numbers, single
from mismatchctl.dumps.blocks import MASK
from mismatchctl.dumps.files import Unit
from mismatchctl.dumps.long import stretches
from mismatchctl.dumps.wide import wide_tables

TOKEN_IDS = "token_ids"


def token_ids(units: Sequence[Unit], rows: Collection[int]) -> dict[int, NDArray[Any]]:
    """Ids of the valid tokens of the sequences at `rows`; `units` are those of one file."""
    wanted = np.unique(np.fromiter(rows, np.int64, len(rows)))
    result: dict[int, NDArray[Any]] = {}
    for unit in units:
        inside = wanted[(wanted >= unit.start) & (wanted < unit.start + unit.rows)]
        if len(inside) and TOKEN_IDS in unit.file.columns:
            result.update(_wide(unit, inside) if unit.file.layout == "wide" else _long(unit, inside))
    return result


def _columns(unit: Unit) -> list[str]:
    return [TOKEN_IDS, *([MASK] if MASK in unit.file.columns else [])]


def _wide(unit: Unit, rows: Ints) -> Iterator[tuple[int, NDArray[Any]]]:
    columns = _columns(unit)
    for first, table in wide_tables(unit, columns):
        lists = [Lists.of(single(table.column(unit.file.columns[column]))) for column in columns]
        for row in rows[(rows >= first) & (rows < first + len(table))].tolist():
            ids, *mask = (
                own.values.slice(int(own.starts[row - first]), int(own.lengths[row - first])) for own in lists
            )
            yield from _valid(row, ids, mask)


def _long(unit: Unit, rows: Ints) -> Iterator[tuple[int, NDArray[Any]]]:
    for stretch in stretches(unit, _columns(unit)):
        ends = np.append(stretch.starts[1:], stretch.length)
        for begin, end in zip(stretch.starts.tolist(), ends.tolist(), strict=True):
            if stretch.first + begin in rows:
                ids = stretch.columns[TOKEN_IDS].slice(begin, end - begin)
                mask = [stretch.columns[MASK].slice(begin, end - begin)] if MASK in stretch.columns else []
                yield from _valid(stretch.first + begin, ids, mask)


def _valid(row: int, ids: pa.Array, mask: Sequence[pa.Array]) -> Iterator[tuple[int, NDArray[Any]]]:
    """The ids under the mask; nothing where they do not fit it or one is missing."""
    if mask and len(mask[0]) != len(ids):
        return
    valid = numbers(mask[0]) == 1 if mask else slice(None)
    missing = nulls(ids)
    if missing is None or not missing[valid].any():
        yield row, numbers(ids)[valid]
