"""msprobe compare: a row a tensor in the order of calls, as CSV, or as JSON of ranks (`-da`).

Its Result marks where an error arises, not where it is: it looks at one call's inputs against its outputs, so a layer
that inherits an error passes, and an error below its limits passes everywhere. Values here are relative, so that what
parts from all before is seen all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mismatchctl.frameworks.layers.model import LayerRow, LayerTable, Notes, finite, layer_in, number_in
from mismatchctl.frameworks.layers.next import MSPROBE

TOOL = "msprobe compare"
TARGET, GOLDEN = "NPU Name", "Bench Name"
_SPELLED = {"target": "npu", "test": "npu", "device": "npu", "golden": "bench", "benchmark": "bench", "gpu": "bench"}
"""How the two sides may be called in place of NPU and Bench."""
_FACTS = (
    *("Name", "Dtype", "max", "min", "mean", "l2norm"),
    *("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr"),
    *("MD5", "Result", "Err_message", "Accuracy Reached or Not"),
)
_CANONICAL = {
    re.sub(r"[^a-z0-9]", "", f"{side} {fact}".lower()): f"{side}{' ' if side else ''}{fact}"
    for side in ("", "NPU", "Bench")
    for fact in _FACTS
} | {"npumd5": "NPU MD5", "benchmd5": "BENCH MD5"}
NO_ROW = "modules that only the golden side has leave no row in such a report"
_RANK = re.compile(r"rank_?(\d+)")

Cells = Mapping[str, Any]


def recognizes(columns: Sequence[str]) -> bool:
    """Whether a table with these columns is such a report."""
    return {TARGET, GOLDEN} <= {_canonical(column) for column in columns}


def is_rows(document: Any) -> bool:
    """Whether a JSON document is a list of rows of such a report."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(row, Mapping) for row in document)
        and recognizes([*document[0]])
    )


def _canonical(column: Any) -> str:
    """The name of a column as msprobe writes it, whatever its case and signs, and however the sides are called."""
    words = re.findall(r"[a-z0-9]+", str(column).lower())
    return _CANONICAL.get("".join([_SPELLED.get(words[0], words[0]), *words[1:]] if words else []), str(column))


def recognizes_ranks(document: Any) -> bool:
    """Whether a JSON document is what `-da` writes of one rank."""
    return (
        isinstance(document, Mapping)
        and bool(document)
        and all(isinstance(call, Mapping) and {"is_same", "op_items"} <= call.keys() for call in document.values())
    )


def recognizes_first(document: Any) -> bool:
    """Whether a JSON document is what `-da` writes of the first differing calls of all ranks."""
    return (
        isinstance(document, Mapping)
        and bool(document)
        and all(
            _RANK.fullmatch(str(rank))
            and isinstance(calls, list)
            and all(isinstance(call, Mapping) and "op_name" in call for call in calls)
            for rank, calls in document.items()
        )
    )


def table(cells: Sequence[Cells], file: str) -> LayerTable:
    """The rows of a CSV."""
    cells = [{_canonical(name): value for name, value in cell.items()} for cell in cells]
    value, measure = _measure(cells[0].keys() if cells else ())
    notes = Notes()
    rows = list(_rows(cells, value, notes, _flagged))
    return LayerTable(
        TOOL,
        f"{measure}; failed where Result says error or warning",
        rows,
        [*notes.sentences(), NO_ROW],
        _rank(file),
        MSPROBE,
    )


def ranks_table(document: Mapping[str, Any], file: str) -> LayerTable:
    """The rows of what `-da` writes of one rank, where Result is empty and the whole call is the same or not."""
    notes, rows = Notes(), []
    measure = "relative"
    for call in document.values():
        given = call["op_items"] if isinstance(call["op_items"], list) else []
        items = [item for item in given if isinstance(item, Mapping)]
        value, measure = _measure(items[0].keys() if items else ())
        found = list(_rows(items, value, notes, lambda _: ""))
        if call["is_same"] is False and found:
            last = found[-1]
            found[-1] = LayerRow(
                last.name, last.layer, None, last.value, True, "the call is not the same (is_same false)"
            )
        rows += found
    return LayerTable(
        TOOL, f"{measure}; failed where is_same is false", rows, [*notes.sentences(), NO_ROW], _rank(file), MSPROBE
    )


def first_tables(document: Mapping[str, Any]) -> list[LayerTable]:
    """The first differing calls of each rank."""
    why = "the first call that is not the same"
    return [
        LayerTable(
            TOOL,
            "no values: the first differing calls alone",
            [LayerRow(str(call["op_name"]), layer_in(str(call["op_name"])), failed=True, why=why) for call in calls],
            [NO_ROW],
            _rank(rank),
            MSPROBE,
        )
        for rank, calls in document.items()
    ]


def _rows(
    cells: Sequence[Cells], value: Callable[[Cells], float | None], notes: Notes, flagged: Callable[[Cells], str]
) -> Iterator[LayerRow]:
    for cell in cells:
        name = str(cell.get(TARGET))
        if cell.get(GOLDEN) in (None, "", "N/A"):
            notes.add("has no counterpart on the golden side, which Result lets pass", name)
            continue
        why = flagged(cell)
        yield LayerRow(name, layer_in(name), None, value(cell), bool(why), why)


def _flagged(cell: Cells) -> str:
    result = str(cell.get("Result", "")).strip().lower()
    missed = str(cell.get("Accuracy Reached or Not", "")).strip().lower() == "no"  # of versions without Result
    if result not in ("error", "warning") and not missed:
        return ""
    message = str(cell.get("Err_message") or "").strip("[]\"' ")
    return message.partition('", "')[0] or ("accuracy not reached" if missed else result)


def _measure(columns: Any) -> tuple[Callable[[Cells], float | None], str]:
    if "NormRelativeErr" in columns:
        return _statistics, "relative error of the norm, or of the extrema where the norm agrees"
    if "MaxAbsErr" in columns:
        return _tensor, "largest absolute difference over the largest magnitude"
    return _checksum, "checksums: 0 equal, 1 different"


def _statistics(cell: Cells) -> float | None:
    norm = _number(cell.get("NormRelativeErr"))
    if norm != 0.0:
        return norm
    others = (_number(cell.get(name)) for name in ("MaxRelativeErr", "MinRelativeErr"))
    return max((other for other in others if other is not None), default=0.0)


def _tensor(cell: Cells) -> float | None:
    difference = _number(cell.get("MaxAbsErr"))
    bounds = [_number(cell.get(name)) for name in ("Bench max", "Bench min")]
    size = max((abs(bound) for bound in bounds if bound is not None), default=0.0)
    return difference if difference is None or size == 0 else difference / size


def _checksum(cell: Cells) -> float | None:
    return float(cell.get("NPU MD5") != cell.get("BENCH MD5")) if "NPU MD5" in cell else None


def _number(cell: Any) -> float | None:
    """A number, a percentage as text, or None for `N/A`, `Nan`, `inf`, `unsupported`, `shape unmatched`."""
    if not isinstance(cell, str):
        return finite(cell)
    text = cell.strip()
    number = number_in(text.removesuffix("%"))
    return None if number is None else abs(number) / (100 if text.endswith("%") else 1)


def _rank(name: str) -> str | None:
    found = _RANK.search(name)
    return found[1] if found else None
