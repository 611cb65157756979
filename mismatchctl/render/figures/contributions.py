"""What a change of K3 is made of: level and mix of each bin, step or value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mismatchctl.compare.model import Contribution, Decomposition
from mismatchctl.compare.words import with_sign
from mismatchctl.numbers import number
from mismatchctl.render.figures.canvas import LEGEND_ROW, Canvas, area_key
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.series import SURE, floats
from mismatchctl.render.figures.shapes import FigureLayout
from mismatchctl.render.figures.theme import MUTED, RAMP, SERIES
from mismatchctl.render.text import clean, label, short

MOST_PARTS = 24
"""Bars of one figure; of more values, those that contribute most."""
_SHADES = (SERIES[0], RAMP[3])
"""Level and mix: dark and light, so that they can be told in grey."""


def contributions_figure(decomposition: Decomposition, name: str) -> Figure | None:
    """What each bin, step or value adds to the change of K3, as level and mix; None where nothing changed."""
    parts = in_order(decomposition)
    if not any(part.total for part in parts):
        return None
    level, mix = floats([part.level for part in parts]), floats([part.mix for part in parts])
    reach = SURE * np.nan_to_num(floats([part.se for part in parts]))
    ends = np.concatenate([level, mix, level + mix - reach, level + mix + reach, [0.0]])
    where = np.arange(len(parts), dtype=np.float64)
    names = [_tick(decomposition, part) for part in parts]

    def paint(canvas: Canvas) -> None:
        margin = 0.06 * (ends.max() - ends.min())
        canvas.linear("y", float(ends.min() - margin), float(ends.max() + margin))
        sides = (level, mix, _SHADES[0]), (mix, level, _SHADES[1])
        for shift, (values, _, color) in zip((-0.2, 0.2), sides, strict=True):
            canvas.polygons(_bars(where + shift, values), [color] * len(values))
        canvas.bars(where, level + mix - reach, level + mix + reach, color=MUTED, width=1.2)
        canvas.line([0, 1], [0, 0], color=MUTED, width=0.9, space="up")
        step = max(math.ceil(len(parts) / 6), math.ceil((max(map(len, names)) + 2) * len(parts) / 46))
        canvas.ticks("x", list(where[::step]), lambda place: names[int(place)], (-0.7, len(parts) - 0.3))
        canvas.labels(_axis(decomposition), "contribution (nats/token)")
        canvas.legend([(text, area_key(color)) for text, color in zip(("level", "mix"), _SHADES, strict=True)])

    noun = "probability" if decomposition.quantity == "surprisal" else short(decomposition.quantity, 40)
    largest = max(range(len(parts)), key=lambda index: abs(parts[index].total))
    moved = " of ".join(with_sign(change) for change in (parts[largest].total, decomposition.difference))
    return Figure(
        name, f"{noun[:1].upper()}{noun[1:]} {names[largest]} moves K3 most: {moved} nats/token",
        f"What the change is made of, by {noun}",
        "Level: K3 there is larger or smaller. Mix: more or fewer tokens are there. All bars add up to the change; "
        "lines are ± 2 standard errors of both together.",
        clean(f"Bars of the contribution to the change of K3 by {noun}, {names[0]} to {names[-1]}; largest at "
              f"{names[largest]}: {moved} nats/token."),
        Data((_axis(decomposition), "level (nats/token)", "mix (nats/token)", "standard error of both"),
             tuple((text, part.level, part.mix, part.se) for text, part in zip(names, parts, strict=True))),
        paint, FigureLayout(below=LEGEND_ROW),
    )  # fmt: skip


def _bars(where: Any, values: Any) -> Any:
    """Rectangles [N, 4, 2] from 0."""
    left, right, zero = where - 0.19, where + 0.19, np.zeros_like(values)
    return np.stack(
        [np.column_stack(corner) for corner in ((left, zero), (right, zero), (right, values), (left, values))], axis=1
    )


def in_order(decomposition: Decomposition) -> list[Contribution]:
    """Parts as they lie on an axis; of too many values, those that contribute most."""
    parts = decomposition.parts if decomposition.parts[0].low is not None else decomposition.parts[:MOST_PARTS]
    return sorted(parts, key=_place, reverse=decomposition.quantity == "surprisal")


def _place(part: Contribution) -> tuple[int, float, str]:
    if part.low is not None:
        return 0, part.low, ""
    number_like = isinstance(part.label, (int, float))
    return (0, float(part.label or 0), "") if number_like else (1, 0.0, label(part.label))


def _tick(decomposition: Decomposition, part: Contribution) -> str:
    if part.low is None:
        return short(label(part.label), 12)
    if decomposition.quantity == "surprisal":
        return number(math.exp(-part.low)) if part.low else "1"
    return f"{math.ceil(part.low):,}"


def _axis(decomposition: Decomposition) -> str:
    return {
        "surprisal": "rollout probability of the token, up to",
        "position": "position in the response, from",
        "length": "length of the response, from",
    }.get(decomposition.quantity, short(decomposition.quantity, 40))
