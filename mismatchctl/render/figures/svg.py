"""A figure's drawing as SVG for a page: classes for colours, text that the page's font shows, few bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from markupsafe import escape

from mismatchctl.batch import Float64s
from mismatchctl.render.figures.shapes import WIDTH, Areas, Drawing, LineShape, Shape, Space, Words
from mismatchctl.render.figures.theme import DASHES, name_of

_ANCHORS = {"left": "", "center": ' text-anchor="middle"', "right": ' text-anchor="end"'}
_BASES = {"baseline": 0.0, "top": 0.9, "center_baseline": 0.45, "bottom": -0.22}
"""How far below a text's place its letters stand, as a share of their size."""
_MANY = 128
"""Of a line with so many points, what shows is written."""
_BEYOND = np.array([-1.0, -1.0, 1.0, 1.0])
"""Lines end a point beyond the axes: their ends are not seen."""
_NOT_0 = 1e-300


def elements(drawing: Drawing) -> str:
    """The elements of a figure, in units of a point; nothing in them has an id or a colour of its own."""
    pen = _Pen(drawing)
    shapes = sorted([*drawing.shapes, *drawing.frame()], key=lambda shape: (shape.space == "figure", shape.order))
    return f'<rect class="f-surface" width="100%" height="100%"/>{"".join(map(pen.drawn, shapes))}'


class _Pen:
    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing

    def drawn(self, shape: Shape) -> str:
        if isinstance(shape, Words):
            return self._words(shape)
        return self._areas(shape) if isinstance(shape, Areas) else self._line(shape)

    def _places(self, x: Any, y: Any, space: Space) -> Float64s:
        """Points [N, 2], from the upper left corner."""
        drawing = self._drawing
        across = drawing.x.shares(x) if space in ("data", "across") else np.asarray(x, np.float64)
        up = drawing.y.shares(y) if space in ("data", "up") else np.asarray(y, np.float64)
        left, top, right, bottom = (0, 0, WIDTH, drawing.layout.height) if space == "figure" else drawing.layout.box
        return np.stack([left + across * (right - left), bottom - up * (bottom - top)], axis=-1)

    def _line(self, line: LineShape) -> str:
        points, said = self._places(line.x, line.y, line.space), ""
        if line.dash:
            box = np.array(self._drawing.layout.box) + _BEYOND if line.clip and line.space != "figure" else None
            data = "".join(_path(_showing(part)) for part in _parts(points, box))
            said += _element(data, stroke=line.color, width=line.width, opacity=line.opacity, dash=line.dash)
        if line.mark:
            known = points[np.isfinite(points).all(axis=1)].tolist()
            data = "".join(_mark(line.mark, line.size / 2, x, y) for x, y in known)
            outline = line.color if line.edge else ""
            said += _element(data, line.face or line.color, outline, line.edge, line.opacity)
        return said

    def _areas(self, areas: Areas) -> str:
        """Areas of one colour are one element."""
        data: dict[str, str] = {}
        for corners, color in zip(areas.corners, areas.colors, strict=True):
            x, y = np.asarray(corners).T
            data[color] = f"{data.get(color, '')}{_path(self._places(x, y, areas.space))}z"
        return "".join(_element(said, color, opacity=areas.opacity) for color, said in data.items())

    def _words(self, words: Words) -> str:
        x, y = self._places(words.x, words.y, words.space).tolist()
        x, y = _short(x + words.lift[0]), _short(y - words.lift[1] + _BASES[words.base] * words.size)
        place = f'transform="translate({x} {y})rotate(-90)"' if words.upright else f'x="{x}" y="{y}"'
        look = f'font-size="{_short(words.size)}"{_ANCHORS[words.side]} class="f-{name_of(words.color)}"'
        return f"<text {place} {look}>{escape(words.text)}</text>"


def _parts(points: Float64s, box: Float64s | None) -> Iterator[Float64s]:
    """The parts of a line that lie in a box, between gaps (NaN)."""
    if box is None or not ((points < box[:2]) | (points > box[2:])).any():
        gaps = np.flatnonzero(~np.isfinite(points).all(axis=1))
        for first, end in zip([0, *(gaps + 1)], [*gaps, len(points)], strict=True):
            if end - first > 1:
                yield points[first:end]
        return
    start, step = points[:-1], np.diff(points, axis=0)
    with np.errstate(all="ignore"):
        meets = (box.reshape(2, 1, 2) - start) / np.where(step == 0, _NOT_0, step)
        enters, leaves = meets.min(axis=0).max(axis=1).clip(0), meets.max(axis=0).min(axis=1).clip(max=1)
    seen = np.flatnonzero(enters <= leaves)
    breaks = np.flatnonzero((np.diff(seen) > 1) | (enters[seen[1:]] > 0)) + 1
    for run in np.split(seen, breaks) if len(seen) else ():
        first = start[run[:1]] + enters[run[:1], None] * step[run[:1]]
        yield np.concatenate([first, start[run] + leaves[run, None] * step[run]])


def _showing(points: Float64s) -> Float64s:
    """Of many points in the same half unit across the first, the last, the highest and the lowest."""
    if len(points) < _MANY:
        return points
    cell = np.floor(2 * points[:, 0])
    starts = np.flatnonzero(np.diff(cell, prepend=np.nan))
    sizes, up = np.diff(starts, append=len(points)), points[:, 1]
    kept = (up == np.repeat(np.minimum.reduceat(up, starts), sizes)) | (
        up == np.repeat(np.maximum.reduceat(up, starts), sizes)
    )
    kept[starts] = kept[starts + sizes - 1] = True
    shown: Float64s = points[kept]
    return shown


def _path(points: Float64s) -> str:
    """A line through points, to a tenth of a unit."""
    first, *others = (f"{x:g} {y:g}" for x, y in points.round(1).tolist())
    return f"M{first}L{' '.join(others)}"


def _mark(mark: str, half: float, x: float, y: float) -> str:
    """A mark about a place."""
    if mark == "o":
        around = f"a{_short(half)} {_short(half)} 0 1 0"
        return f"M{round(x - half, 1):g} {round(y, 1):g}{around} {_short(2 * half)} 0{around} {_short(-2 * half)} 0z"
    return f"{_path(_CORNERS[mark] * half + (x, y))}z"


_CORNERS = {
    "s": np.array([(-1, 1), (1, 1), (1, -1), (-1, -1)]),
    "^": np.array([(0, -1), (-1, 1), (1, 1)]),
    "D": np.array([(0, 1), (1, 0), (0, -1), (-1, 0)]) * np.sqrt(2),
}
"""Corners of marks, downwards; the diamond is a square that stands on a corner."""


def _element(
    data: str, fill: str = "", stroke: str = "", width: float = 0.0, opacity: float = 1.0, dash: str = "-"
) -> str:
    """What is filled, outlined or both; nothing where there is nothing."""
    if not data:
        return ""
    classes = [f"{kind}-{name_of(color)}" for kind, color in (("f", fill), ("l", stroke)) if color]
    look = f' class="{" ".join(classes)}"' + ("" if fill else ' fill="none"')
    if opacity < 1:
        look += "".join(
            f' {kind}-opacity="{opacity:.2g}"' for kind, color in (("fill", fill), ("stroke", stroke)) if color
        )
    if stroke:
        look += f' stroke-width="{_short(width)}"'
    if DASHES[dash]:
        look += f' stroke-dasharray="{" ".join(_short(width * length) for length in DASHES[dash])}"'
    return f'<path d="{data}"{look}/>'


def _short(value: float) -> str:
    return f"{round(value, 2):g}"
