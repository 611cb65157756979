"""Points in two costs, and those that no other beats; predictions against what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Float64s
from mismatchctl.predict.prediction import BackTest
from mismatchctl.render.figures.canvas import Canvas
from mismatchctl.render.figures.curves import REACH
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.scales import Text, percent, plain
from mismatchctl.render.figures.theme import INK, MUTED, RAMP, SERIES
from mismatchctl.render.text import clean, short

_BEST: dict[str, Any] = {"dash": "", "mark": "o", "size": 6.5, "edge": 0.7, "order": 4, "clip": False}
_LETTER = 5.8
_NAMED, _TRIED = 6, 24  # points named on a front, and how many are tried for room
_OFFSETS = ((1, 0), (-1, 0), (1, 9), (-1, -9))  # sides of a point on which its name may stand, and how much higher


@dataclass(frozen=True)
class Front:
    """Points in two costs, and which of them no other beats; `shade` from 0 to 1 is the bias."""

    subject: str
    across: tuple[str, Float64s]
    up: tuple[str, Float64s]
    shade: Float64s
    best: Bools
    names: tuple[str, ...]
    caption: str
    shares: bool = True


def front_figure(front: Front, name: str) -> Figure | None:
    """All points, the best ones filled and some of them named; None where fewer than two are known."""
    (across, x), (up, y) = front.across, front.up
    known = np.isfinite(x) & np.isfinite(y)
    if known.sum() < 2:
        return None
    best = np.flatnonzero(known & front.best)

    def paint(canvas: Canvas) -> None:
        for which, values, share in (("x", x[known], front.shares), ("y", y[known], True)):
            room = 0.08 * (values.max() - values.min()) or 0.01
            high = values.max() + (2 * room if which == "x" else room)
            canvas.linear(which, values.min() - room, high, _percents(values, high) if share else plain, 5)
        others = known & ~front.best
        canvas.line(x[others], y[others], dash="", mark="o", size=3, color=MUTED, opacity=0.45, clip=False)
        shades = 2 + np.round(6 * np.nan_to_num(front.shade[best])).astype(int)
        for shade in dict.fromkeys(shades.tolist()):
            these = best[shades == shade]
            canvas.line(x[these], y[these], color=INK, face=RAMP[shade], **_BEST)
        name_points(canvas, x, y, best, front.names)
        canvas.labels(across, up)

    rows = [
        (front.names[point], float(x[point]), float(y[point]), "yes" if front.best[point] else "no")
        for point in np.flatnonzero(known)
    ]
    count = f"{len(best):,} of {int(known.sum()):,} points"
    return Figure(
        name, f"No other point beats {count}", front.subject, front.caption,
        clean(f"Points by {across} and {up}; no other beats {count}."),
        Data(("point", across, up, "no other beats it"), tuple(rows)), paint,
    )  # fmt: skip


def _percents(values: Float64s, high: float) -> Text:
    """Ticks as percentages; none that would be cut at the end of the axis."""
    span = float(np.ptp(values))
    text = (lambda value: f"{100 * value:.2f} %") if span < 0.01 else percent
    return lambda tick: text(tick) if tick < high - 0.05 * span else ""


def name_points(
    canvas: Canvas, x: Float64s, y: Float64s, best: NDArray[np.int64], names: Sequence[str], before: int = 1
) -> None:
    """Some of the best points named, far from each other and where there is room; so many come before the others."""
    left, top, right, bottom = canvas.layout.box
    wide, high = right - left, bottom - top
    places = np.column_stack([wide * canvas.axis("x").shares(x), high * canvas.axis("y").shares(y)])
    taken = [(across - 3, up - 3, across + 3, up + 3) for across, up in places[best].tolist()]
    distance = np.full(len(best), np.inf)
    named = 0
    for place in range(min(_TRIED, len(best))):
        index = place if place < before else int(distance.argmax())
        point, (across, up) = best[index], places[best[index]]
        distance = np.minimum(distance, np.hypot(*(places[best] - places[point]).T))
        text = short(names[point], 24)
        for side, lift in _OFFSETS:
            start = across + 8 if side > 0 else across - 8 - _LETTER * len(text)
            spot = (start, up + lift - 7, start + _LETTER * len(text), up + lift + 7)
            if start >= 0 and spot[2] <= wide and spot[3] <= high and not any(_touch(spot, other) for other in taken):
                taken.append(spot)
                canvas.write(
                    x[point], y[point], text, lift=(8 * side, lift), side="left" if side > 0 else "right",
                    base="center_baseline", size=9.5,
                )  # fmt: skip
                named += 1
                break
        if named == _NAMED:
            return


def _touch(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    across = min(one[2], other[2]) - max(one[0], other[0])
    return across > -2 and min(one[3], other[3]) - max(one[1], other[1]) > -1


def checks_figure(checks: Sequence[BackTest], name: str) -> Figure | None:
    """Rejection predicted for long responses against what they show; None without a check."""
    if not checks:
        return None
    predicted, observed, noise = (
        np.concatenate([getattr(check, key) for check in checks]) for key in ("predicted", "observed", "noise")
    )
    low, high = np.clip(observed - REACH * noise, 0, 1), np.clip(observed + REACH * noise, 0, 1)
    top = min(1.0, 1.05 * float(max(predicted.max(), high.max(), 1e-3)))

    def paint(canvas: Canvas) -> None:
        canvas.linear("x", -0.02 * top, 1.04 * top, percent)
        canvas.linear("y", -0.02 * top, 1.04 * top, percent)
        canvas.rule([0, top], [0, top])
        canvas.bars(predicted, low, high, color=SERIES[0], width=1.4, opacity=0.55)
        canvas.line(predicted, observed, dash="", mark="o", size=5, color=SERIES[0], clip=False)
        canvas.labels("rejection predicted from the first tokens", "rejection observed")

    inside = int(((low <= predicted) & (predicted <= high)).sum())
    said = f"{inside} of {len(predicted)} predictions are within 90 % of what was observed"
    return Figure(
        name, said, "Predictions tried on the dump",
        "On the dashed line a prediction is right. Bars are what the number of responses leaves open, "
        "± 1.645 standard errors (90 %).",
        f"Rejection observed against predicted, up to {percent(round(top, 3))}. {said}.",
        Data.of(("predicted (share)", "observed (share)", "standard error"), predicted, observed, noise),
        paint,
    )  # fmt: skip
