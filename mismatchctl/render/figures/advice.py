"""Corrections in the two parts of the gradient's error: what more data takes away, and what it does not."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatchctl.advise import Advice
from mismatchctl.batch import Bools, Float64s
from mismatchctl.frameworks import presets
from mismatchctl.render.figures.canvas import Canvas
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.fronts import name_points
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
    errors |= {own.name: (own.bias2_counted, own.variance) for own in (*advice.advice, *advice.yours)}
    names, first = list(errors), advice.advice[0]
    shipped = set(presets()) - {"none"}
    advised, yours = ({own.name for own in group} for group in (advice.advice, advice.yours))
    bias2, variance = np.array([errors[own] for own in names]).T
    scale = advice.uncorrected
    x, y = bias2 / scale, variance / scale

    def paint(canvas: Canvas) -> None:
        low, high = _axis(canvas, "x", x)
        bottom, top = _axis(canvas, "y", y)
        shown = np.maximum(x, low)
        even = (np.geomspace if low > 0 else np.linspace)(low, high, 200)
        level = (first.bias2_counted + first.variance) / scale - even
        inside = (level >= bottom) & (level <= top)
        canvas.rule(even[inside], level[inside])
        front = np.flatnonzero(_unbeaten(x, y))
        front = front[np.lexsort((-y[front], x[front]))]
        canvas.line(shown[front], y[front], color=MUTED, width=0.8, opacity=0.6)
        styles: tuple[tuple[set[str] | None, dict[str, Any]], ...] = (
            (None, {"mark": "o", "size": 3, "color": MUTED, "opacity": 0.6}),
            (shipped, {"mark": "D", "size": 4, "color": MUTED}),
            (advised, {"mark": "o", "size": 6, "color": SERIES[0]}),
            (yours, {"mark": "s", "size": 6, "color": SERIES[1]}),
        )
        for group, style in styles:
            chosen = [i for i, own in enumerate(names) if (own in group if group is not None else True)]
            canvas.line(shown[chosen], y[chosen], dash="", clip=False, **style)
        told = [names.index(own) for own in dict.fromkeys([first.name, *sorted(yours), "none", *sorted(advised)])]
        short = {"none": "no correction"} | ({next(iter(yours)): "yours"} if len(yours) == 1 else {})
        name_points(canvas, shown, y, np.array(told), [short.get(own, own) for own in names], before=1 + len(yours))
        canvas.labels("bias² (more data does not take it away)", "variance (more data does)")

    standing = [_standing(own, advised, yours, shipped) for own in names]
    rows = tuple(zip(names, x.tolist(), y.tolist(), standing, strict=True))
    more = f", of {len(names)} candidates" if len(names) > 1 else ""
    title = f"{clean(first.name)} is advised{more}"
    return Figure(
        name, title, "error of one update's gradient; that of no correction is 1",
        "Large dots are advised, squares yours, diamonds what frameworks ship; the thin line is the front, which none "
        "beats in both. Below the dashed line is less error than the advised has. Bias that cannot be told from 0 "
        "stands at the left.",
        f"Points by squared bias and variance, {len(names)} corrections. {title}.",
        Data(("correction", "bias²", "variance", "standing"), rows), paint,
    )  # fmt: skip


def _axis(canvas: Canvas, which: str, values: Float64s) -> tuple[float, float]:
    """An axis that holds the values; its ends. Where it is logarithmic, what is not above 0 stands at its low end."""
    above = values[values > 0]
    least, most = (float(above.min()), float(above.max())) if len(above) else (0.0, 1.0)
    if least > 0 and most / least > _WIDE:
        low, high = least / 1.5, most * (2.5 if which == "x" else 1.5)  # room for names at the right
        canvas.log(which, low, high)
        return low, high
    room = 0.1 * (most - float(values.min())) or 0.1 * most
    low, high = float(values.min()) - room, most + room
    canvas.linear(which, low, high, plain, 5)
    return low, high


def _standing(own: str, advised: set[str], yours: set[str], shipped: set[str]) -> str:
    return "yours" if own in yours else "advised" if own in advised else "preset" if own in shipped else "candidate"


def _unbeaten(x: Float64s, y: Float64s) -> Bools:
    """Points that no other beats in one part of the error without losing in the other."""
    less = (x[:, None] <= x) & (y[:, None] <= y) & ((x[:, None] < x) | (y[:, None] < y))
    return np.asarray(~less.any(axis=0))
