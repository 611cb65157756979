"""What a figure is made of, as data: two axes, lines with marks, areas, words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.render.figures.theme import INK, MUTED

WIDTH, HEIGHT = 360.0, 224.0
"""Points that a figure measures before it is scaled to its column."""
LINEAR_SHARE = 0.6
"""Of an axis that is linear near 0 and logarithmic beyond: decades that its linear part takes."""
_MARGINS = {"left": 70.0, "right": 12.0, "top": 10.0, "bottom": 42.0}
_FAR_BELOW = -1000.0
"""Where a logarithmic axis has what is not above 0."""

_NEAR = 1e-9
_TICK = 6.5
"""Points between an axis and the texts of its ticks."""

Space = Literal["data", "across", "up", "axes", "figure"]
"""What places are in: data; data across, or up, and a share of the axes else; shares of the axes, of the figure."""


@dataclass(frozen=True)
class FigureLayout:
    """How high a figure is and what its axes leave free at the left and below, in points beside the usual."""

    height: float = HEIGHT
    left: float = 0.0
    below: float = 0.0

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the axes, downwards."""
        left = max(self.left, _MARGINS["left"])
        return left, _MARGINS["top"], WIDTH - _MARGINS["right"], self.height - _MARGINS["bottom"] - self.below


@dataclass
class FigureAxis:
    """One axis: its ends, how it is scaled, its ticks with their texts; `linear_to` is where symlog bends."""

    limits: tuple[float, float] = (0.0, 1.0)
    scale: Literal["linear", "log", "symlog"] = "linear"
    linear_to: float = 1.0
    ticks: Sequence[tuple[float, str]] = ()

    def shares(self, values: Any) -> Float64s:
        """Where values lie between the ends, 0 to 1."""
        low, high = self._scaled(np.array(self.limits)).tolist()
        shares: Float64s = (self._scaled(np.asarray(values, np.float64)) - low) / (high - low)
        return shares

    @property
    def inside(self) -> list[tuple[float, str]]:
        """Ticks between the ends that have a text."""
        return [tick for tick in self.ticks if tick[1] and -_NEAR <= self.shares(tick[0]) <= 1 + _NEAR]

    def _scaled(self, values: Float64s) -> Float64s:
        if self.scale == "linear":
            return values
        if self.scale == "log":
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.where(values <= 0, _FAR_BELOW, np.log10(values))
        size, linear = np.abs(values) / self.linear_to, LINEAR_SHARE / 0.9
        return np.sign(values) * np.where(size <= 1, linear * size, linear + np.log10(np.maximum(size, 1)))


@dataclass(frozen=True)
class LineShape:
    """A line, marks at its points, or both; NaN interrupts it.

    Attributes:
        dash: of `theme.DASHES`; empty: marks alone.
        mark: of `theme.MARKS`; empty: none.
        size: of a mark, in points.
        face: colour inside a mark, else that of the line.
        edge: width of a mark's outline, in points.
        order: what is drawn later lies above.
        clip: whether it ends where the axes do.
    """

    x: Any
    y: Any
    color: str
    width: float = 1.7
    dash: str = "-"
    opacity: float = 1.0
    mark: str = ""
    size: float = 4.0
    face: str = ""
    edge: float = 0.0
    space: Space = "data"
    order: float = 2.0
    clip: bool = True
    cap: Literal["butt", "projecting"] = "projecting"


@dataclass(frozen=True)
class Areas:
    """Filled polygons [N, corners, 2], or such of unlike numbers of corners, each in its colour."""

    corners: Sequence[Any]
    colors: Sequence[str]
    opacity: float = 1.0
    space: Space = "data"
    order: float = 1.0


@dataclass(frozen=True)
class Words:
    """A text at a place, `lift` points beside and above it; upright ones are read from below."""

    x: float
    y: float
    text: str
    color: str = INK
    size: float = 11.0
    side: Literal["left", "center", "right"] = "center"
    base: Literal["baseline", "center_baseline", "bottom", "top"] = "baseline"
    lift: tuple[float, float] = (0.0, 0.0)
    upright: bool = False
    space: Space = "data"
    order: float = 3.0


Shape = LineShape | Areas | Words


@dataclass
class Drawing:
    """All of one figure: its axes, and what is painted in and beside them."""

    layout: FigureLayout
    x: FigureAxis = field(default_factory=FigureAxis)
    y: FigureAxis = field(default_factory=FigureAxis)
    shapes: list[Shape] = field(default_factory=list)

    def frame(self) -> list[Shape]:
        """The axes themselves: lines at the left and below, the texts of ticks that lie between the ends."""
        words: list[Shape] = [
            Words(at, 0, text, size=10.5, base="top", lift=(0, -_TICK), space="across", order=0.5)
            for at, text in self.x.inside
        ]
        words += [
            Words(0, at, text, size=10.5, side="right", base="center_baseline", lift=(-_TICK, 0), space="up", order=0.5)
            for at, text in self.y.inside
        ]
        edges = ([0, 0], [0, 1]), ([0, 1], [0, 0])
        return [*words, *(LineShape(x, y, MUTED, width=0.8, space="axes", order=2.5, clip=False) for x, y in edges)]
