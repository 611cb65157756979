"""Rows of a report in their order of execution: the first bad tensor, and the first that parts from all before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from mismatchctl.frameworks.layers.model import LayerReport, LayerRow, LayerTable, Tensor
from mismatchctl.frameworks.layers.next import again

JUMP = 30.0
"""A value that many times the largest of all layers before it is no growth of the same noise, which grows by small
factors from layer to layer, in bfloat16 too (within 4 in the samples)."""
UNORDERED = "its tensors are in no order of execution: they were put in that of their layers"
REVERSED = "its layers descend, and it is a forward pass ({why}): it was read from its end"
BACKWARD = "its layers descend: a backward pass ({why})"
EITHER = (
    "its layers descend: it was read as a backward pass; a forward pass that was written from its end looks the same, "
    "and would be bad from its lowest layer on"
)
_TURNS = 0.5
"""Changes of layer that turn back, of all: a pass forward, one backward after it, or ranks one by one turn seldom."""
_FEWEST = 8
_DESCENT = 3
"""Layers that descend, at least, before anything is concluded from it."""
_GRADIENT = re.compile(r"(?:^|[._/]|__)(?:backward|grads?|gradients?|d?grad_(?:in|out)put)(?=$|[._/\d])", re.IGNORECASE)
_HEAD = re.compile(r"(?:^|[./])(?:lm_head|logits?|output_layer|ln_f|(?:final_?)?(?:layer_?)?norm)(?=$|[._/:])")
"""Tensors of no layer that come after all of them."""
_FORWARD = re.compile(r"(?:^|[._/])forward(?=$|[._/\d])", re.IGNORECASE)


def in_order(rows: Sequence[LayerRow]) -> tuple[Sequence[LayerRow], str]:
    """The rows in the order of execution, and what was done about it, in a sentence; "" where nothing was."""
    places = [(row.step, row.layer) for row in rows if row.layer is not None]
    changes = [b - a for (first, a), (second, b) in pairwise(places) if first == second and a != b]
    turns = sum((a > 0) != (b > 0) for a, b in pairwise(changes))
    if len(changes) >= _FEWEST and turns > _TURNS * (len(changes) - 1):
        return _by_layer(rows), UNORDERED
    if len(changes) + 1 < _DESCENT or max(changes) > 0:
        return rows, ""
    return _descending(rows)


def _by_layer(rows: Sequence[LayerRow]) -> Sequence[LayerRow]:
    """By step and layer; what has no layer goes before the layers, the head and what leads to it after them."""
    steps = {step: place for place, step in enumerate(dict.fromkeys(row.step for row in rows))}
    last = 1 + max((row.layer for row in rows if row.layer is not None), default=0)

    def place(row: LayerRow) -> int:
        return row.layer if row.layer is not None else last if _HEAD.search(row.name) else -1

    return sorted(rows, key=lambda row: (steps[row.step], place(row)))


def _descending(rows: Sequence[LayerRow]) -> tuple[Sequence[LayerRow], str]:
    """Layers from the last to the first: gradients, or a forward pass that was sorted or written from its end.

    Names tell, or what is bad: an error stays in all that is computed after it.
    """
    if any(_GRADIENT.search(row.name) for row in rows):
        return rows, BACKWARD.format(why="its names say so")
    if any(_FORWARD.search(row.name) for row in rows):
        return _from_the_end(rows), REVERSED.format(why="its names say so")
    of_layers = [row for row in rows if row.layer is not None]
    of_layers = [row for row in of_layers if row.step == of_layers[0].step]
    top, bottom = ([row for row in of_layers if row.layer == end.layer] for end in (of_layers[0], of_layers[-1]))
    if _worse(top, bottom):
        return _from_the_end(rows), REVERSED.format(why="its last layer is bad and its first is good")
    if _worse(bottom, top):
        return rows, BACKWARD.format(why="its first layer is bad and its last is good")
    bad = any(row.failed for row in rows)
    return rows, EITHER if bad else ""


def _worse(some: Sequence[LayerRow], others: Sequence[LayerRow]) -> bool:
    """Whether a layer is bad and the other is not: by the tool's verdict, or by a jump of the values."""
    bad, other_bad = (any(row.failed for row in layer) for layer in (some, others))
    if bad != other_bad:
        return bad
    value, other = (max((row.value for row in layer if row.value is not None), default=0.0) for layer in (some, others))
    return value > JUMP * other


def _from_the_end(rows: Sequence[LayerRow]) -> Sequence[LayerRow]:
    """Step by step in the order given; within a step from its end, or by layer where each layer runs forward."""
    steps = dict.fromkeys(row.step for row in rows)
    inside = [(_part(a.name), _part(b.name)) for a, b in pairwise(rows) if a.layer is not None and a.layer == b.layer]
    forward = sum(a < b for a, b in inside) > sum(a > b for a, b in inside)
    if forward:
        return _by_layer(rows)
    return [row for step in steps for row in reversed([row for row in rows if row.step == step])]


def _part(name: str) -> int:
    """How far within a layer a tensor is computed: inputs and attention before the feed-forward part and outputs."""
    later = ("mlp", "moe", "ffn", "feed_forward", "experts", "post_attention")
    return 2 * any(word in name for word in later) + ("output" in name)


_SPAN = 8
"""Layers that are compared next, at most."""


def judge(table: LayerTable, file: str) -> LayerReport:
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


def _next(table: LayerTable, layer: int | None, last_good: int | None) -> str | None:
    """What to compare next: the layers from the last good one to the first that is not, on few sequences."""
    if layer is None:
        return again(table.unlayered, []) if table.unlayered else None
    return again(table.again, range(layer if last_good is None else min(last_good, layer), layer + 1)[-_SPAN:])


def _parting(rows: Sequence[LayerRow]) -> int | None:
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


def _growth(rows: Sequence[LayerRow]) -> list[tuple[int, float | None]]:
    """The largest value of each layer over all its tensors and steps; None where one of them has no number."""
    found: dict[int, float | None] = {}
    for row in rows:
        if row.layer is None:
            continue
        known = found.get(row.layer, 0.0)
        found[row.layer] = None if known is None or row.value is None else max(known, row.value)
    return sorted(found.items())


def _tensor(row: LayerRow, why: str) -> Tensor:
    return Tensor(name=row.name, layer=row.layer, step=row.step, value=row.value, why=why)
