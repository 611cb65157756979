"""What follows from the rows of a report: the first bad tensor, and the first that parts from all before it."""

from __future__ import annotations

from collections.abc import Sequence

from mismatchctl.frameworks.layers.model import LayerReport, Row, Table, Tensor
from mismatchctl.frameworks.layers.next import again
from mismatchctl.frameworks.layers.order import JUMP, in_order

_SPAN = 8
"""Layers that are compared next, at most."""


def judge(table: Table, file: str) -> LayerReport:
    """Read both answers off the rows of one report."""
    rows, order = in_order(table.rows)
    bad = next((index for index, row in enumerate(rows) if row.failed), None)
    apart = _parting(rows)
    first = min((index for index in (bad, apart) if index is not None), default=None)
    earlier = rows[:first] if first is not None else rows
    values = [row.value for row in earlier if row.value is not None and row.layer is not None]
    good = [row.layer for row in earlier if row.layer is not None]
    if first is not None:
        good = [layer for layer in good if layer != rows[first].layer]
    return LayerReport(
        file=file,
        tool=table.tool,
        measure=table.measure,
        tensors=len(rows),
        failed=sum(row.failed for row in rows),
        first_bad=None if bad is None else _tensor(rows[bad], rows[bad].why),
        first_apart=None if apart is None else _tensor(rows[apart], "parts from all layers before it"),
        before=max(values, default=None),
        last_good=good[-1] if first is not None and good else None,
        growth=_growth(rows),
        notes=[*([order] if order else ()), *table.notes],
        rank=table.rank,
        next=None if first is None else _next(table, rows[first].layer, good[-1] if good else None),
    )


def _next(table: Table, layer: int | None, last_good: int | None) -> str | None:
    """What to compare next: the layers from the last good one to the first that is not, on few sequences."""
    if layer is None:
        return again(table.unlayered, []) if table.unlayered else None
    return again(table.again, range(layer if last_good is None else min(last_good, layer), layer + 1)[-_SPAN:])


def _parting(rows: Sequence[Row]) -> int | None:
    """The first row that is far above every layer before its own, or differs where those were equal to the bit."""
    before: float | None = None  # the largest of the layers before, in this step
    here = 0.0
    place: tuple[int | None, int] | None = None
    for index, row in enumerate(rows):
        if row.layer is None or row.value is None:
            continue
        if place is None or row.step != place[0]:
            before, here = None, 0.0
        elif row.layer != place[1]:
            before, here = max(before or 0.0, here), 0.0
        place = (row.step, row.layer)
        if before is not None and row.value > JUMP * before:
            return index
        here = max(here, row.value)
    return None


def _growth(rows: Sequence[Row]) -> list[tuple[int, float | None]]:
    """The largest value of each layer over all its tensors and steps; None where one of them has no number."""
    found: dict[int, float | None] = {}
    for row in rows:
        if row.layer is None:
            continue
        known = found.get(row.layer, 0.0)
        found[row.layer] = None if known is None or row.value is None else max(known, row.value)
    return sorted(found.items())


def _tensor(row: Row, why: str) -> Tensor:
    return Tensor(name=row.name, layer=row.layer, step=row.step, value=row.value, why=why)
