"""Corrections in the two parts of the gradient's error: what more data takes away, and what it does not."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatchctl.advise import Advice
from mismatchctl.batch import Float64s
from mismatchctl.render.figures.canvas import Canvas
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.fronts import name_points
from mismatchctl.render.figures.library import Line2D
from mismatchctl.render.figures.scales import plain
from mismatchctl.render.figures.theme import MUTED, SERIES
from mismatchctl.render.text import clean

_WIDE = 4.0
"""Axes that span more are logarithmic."""


def advice_figure(advice: Advice, name: str) -> Figure | None:
    """Every candidate, the advised and yours named; None where nothing is ranked."""
    if not advice.advice:
        return None
    errors = {own: (bias2, variance) for own, (bias2, variance, _) in advice.front.items()}
    errors |= {own.name: (own.bias2, own.variance) for own in (*advice.advice, *advice.yours)}
    names, first = list(errors), advice.advice[0]
    advised, yours = ({own.name for own in group} for group in (advice.advice, advice.yours))
    bias2, variance = np.array([errors[own] for own in names]).T
    scale = max((own.mse for own in (*advice.advice, *advice.yours)), default=1.0) or 1.0
    x, y = np.maximum(bias2, 0.0) / scale, variance / scale

    def paint(canvas: Canvas) -> None:
        low, high = _axis(canvas, "x", x)
        bottom, top = _axis(canvas, "y", y)
        shown = np.maximum(x, low)
        even = np.linspace(low, high, 200)
        level = (max(first.bias2, 0.0) + first.variance) / scale - even
        inside = (level >= bottom) & (level <= top)
        canvas.rule(even[inside], level[inside])
        styles: tuple[tuple[set[str] | None, dict[str, Any]], ...] = (
            (None, {"marker": "o", "markersize": 3, "color": MUTED, "alpha": 0.6}),
            (advised, {"marker": "o", "markersize": 6, "color": SERIES[0]}),
            (yours, {"marker": "s", "markersize": 6, "color": SERIES[1]}),
        )
        for group, style in styles:
            chosen = [i for i, own in enumerate(names) if (own in group if group is not None else True)]
            canvas.axes.add_line(Line2D(shown[chosen], y[chosen], linestyle="", clip_on=False, **style))
        told = [i for i, own in enumerate(names) if own in advised or own in yours or own == "none"]
        told.sort(key=lambda i: names[i] != first.name)  # where there is room for few, the first has it
        name_points(canvas, shown, y, np.array(told), [_called(own, yours) for own in names])
        canvas.labels("bias² (more data does not take it away)", "variance (more data does)")

    rows = [(own, float(a), float(b), _standing(own, advised, yours)) for own, a, b in zip(names, x, y, strict=True)]
    more = f", of {len(names)} candidates" if len(names) > 1 else ""
    title = f"{clean(first.name)} is advised{more}"
    return Figure(
        name, title, "error of one update's gradient; the largest error of those advised, and yours, is 1",
        "Below the dashed line is less error than the advised has. Bias that cannot be told from 0 stands at the left.",
        f"Points by squared bias and variance, {len(names)} corrections. {title}.",
        Data(("correction", "bias²", "variance", "standing"), tuple(rows)), paint,
    )  # fmt: skip


def _axis(canvas: Canvas, which: str, values: Float64s) -> tuple[float, float]:
    """An axis that holds the values; its ends. Where it is logarithmic, what is not above 0 stands at its low end."""
    above = values[values > 0]
    least, most = (float(above.min()), float(above.max())) if len(above) else (0.0, 1.0)
    if least > 0 and most / least > _WIDE:
        low, high = least / 1.5, most * 1.5
        canvas.log(which, low, high)
        return low, high
    room = 0.1 * (most - float(values.min())) or 0.1 * most
    low, high = float(values.min()) - room, most + room
    canvas.linear(which, low, high, plain, 5)
    return low, high


def _called(own: str, yours: set[str]) -> str:
    return f"yours: {own}" if own in yours else "no correction" if own == "none" else own


def _standing(own: str, advised: set[str], yours: set[str]) -> str:
    return "yours" if own in yours else "advised" if own in advised else "candidate"
