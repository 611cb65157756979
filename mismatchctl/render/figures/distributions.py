"""The distribution of the log ratio, of one run or of several over each other, and of both sides' probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.numbers import number
from mismatchctl.render.figures.canvas import Canvas, legend_height, line_key
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.scales import power, signed_ticks
from mismatchctl.render.figures.shapes import HEIGHT, WIDTH, FigureLayout
from mismatchctl.render.figures.theme import INK, MUTED, RAMP, SERIES
from mismatchctl.render.text import clean, short
from mismatchctl.result import Distribution, Joint

MOST_SIDES = 6
"""Runs that can be told apart in one figure."""
_CELLS = 110
"""Steps across the distribution: finer bins would only show single tokens."""
_SUBJECT = "Distribution of the log ratio"
_X, _Y = "log ratio, train − rollout (nats)", "share of tokens per nat"
_FAR = 1.0


def distribution_figure(distribution: Distribution, name: str) -> Figure | None:
    """Density of the log ratio: linear near 0, logarithmic beyond; None where every log ratio is 0."""
    tokens = np.array(distribution.tokens, np.float64)
    edges = np.array(distribution.edges)
    if len(tokens) < 3:
        return None
    middle = bend(edges, tokens)
    cells, (joined, k3) = coarser(edges, middle, tokens, np.array(distribution.k3))
    density = joined / joined.sum() / np.diff(cells)
    floor = float(density[density > 0].min()) / 3

    def paint(canvas: Canvas) -> None:
        _across(canvas, cells, middle)
        canvas.log("y", floor, float(density.max()) * 2)
        shown = np.maximum(density, floor)
        ends = np.repeat(cells, 2)[1:-1]
        canvas.band(ends, np.full(len(ends), floor), np.repeat(shown, 2), SERIES[0], 0.3)
        canvas.stairs(shown, cells, color=SERIES[0], width=1.2)
        canvas.labels(_X, _Y)

    far = np.minimum(np.abs(cells[1:]), np.abs(cells[:-1])) >= _FAR
    share = float(joined[far].sum() / joined.sum())
    held = float(k3[far].sum() / k3.sum()) if k3.sum() > 0 else 0.0
    message = f"{number(share, 'fraction')} of tokens differ by more than 1 nat and hold {100 * held:.0f} % of K3"
    return Figure(
        name, message if share else "No token differs by more than 1 nat", _SUBJECT,
        f"Linear within ±{power(middle)}, logarithmic beyond. Noise is symmetric and thin-tailed; a long left tail is "
        "what the trainer finds far less likely than the rollout did.",
        f"Density of the log ratio of {int(joined.sum()):,} tokens, from {number(float(cells[0]))} to "
        f"{number(float(cells[-1]))} nats; half of them within ±{number(_half(edges, tokens))}.",
        Data.of(("log ratio from (nats)", "to (nats)", "tokens", "K3 (nats)"),
                cells[:-1], cells[1:], joined.astype(int), k3), paint,
    )  # fmt: skip


def distributions_figure(sides: Mapping[str, Distribution], name: str) -> Figure | None:
    """Densities of the log ratio of several runs over each other; None where none varies."""
    shown = {side: d for side, d in list(sides.items())[:MOST_SIDES] if sum(d.tokens)}
    edges = np.unique([edge for d in shown.values() for edge in d.edges])
    if len(edges) < 4:
        return None
    counts = [_on_grid(d, edges) for d in shown.values()]
    middle = bend(edges, np.sum(counts, axis=0))
    cells, joined = coarser(edges, middle, *counts)
    densities = [tokens / tokens.sum() / np.diff(cells) for tokens in joined]
    floor = min(float(density[density > 0].min()) for density in densities) / 3
    names = [short(side, 22) for side in shown]

    def paint(canvas: Canvas) -> None:
        _across(canvas, cells, middle)
        canvas.log("y", floor, max(float(density.max()) for density in densities) * 2)
        for index, density in enumerate(densities):
            canvas.stairs(np.maximum(density, floor), cells, **line_key(index, marked=False), width=1.4)
        canvas.labels(_X, _Y)
        canvas.names(names, marked=False)

    far = np.minimum(np.abs(cells[1:]), np.abs(cells[:-1])) >= _FAR
    shares = [float(tokens[far].sum() / tokens.sum()) for tokens in joined]
    told = [f"{number(share, 'fraction')} of {side}" for share, side in zip(shares, names, strict=True)]
    return Figure(
        name, f"Beyond ±1 nat lie {', '.join(told)}", _SUBJECT,
        f"Linear within ±{power(middle)}, logarithmic beyond. Where a line lies higher far from 0, its run has "
        "more tokens that the two engines judge differently.",
        clean(f"Densities of the log ratio of {', '.join(shown)}, from {number(float(cells[0]))} to "
              f"{number(float(cells[-1]))} nats."),
        Data.of(("log ratio from (nats)", "to (nats)", *(f"{side} (tokens)" for side in shown)),
                cells[:-1], cells[1:], *joined),
        paint, FigureLayout(below=legend_height(max(len(shown), 2))),
    )  # fmt: skip


def _across(canvas: Canvas, cells: Float64s, middle: float) -> None:
    axis = canvas.axis("x")
    axis.scale, axis.linear_to = "symlog", middle
    ends = float(cells[0]), float(cells[-1])
    canvas.ticks("x", signed_ticks(*ends, middle), power, ends)


def bend(edges: Float64s, tokens: Float64s) -> float:
    """The power of ten below the median of |x|, but not so small that the tails lose their room."""
    largest = float(max(abs(edges[0]), abs(edges[-1])))
    return 10.0 ** max(math.floor(math.log10(_half(edges, tokens))), math.ceil(math.log10(largest)) - 6)


def _half(edges: Float64s, tokens: Float64s) -> float:
    """Half of the tokens lie within this, by the outer edges of bins."""
    size = np.maximum(np.abs(edges[1:]), np.abs(edges[:-1]))
    order = np.argsort(size, kind="stable")
    return float(size[order][np.searchsorted(np.cumsum(tokens[order]), tokens.sum() / 2)])


def coarser(edges: Float64s, bend: float, *counts: Float64s) -> tuple[Float64s, list[Float64s]]:
    """Neighbouring bins joined until each is as wide as a cell of the drawing."""
    place = np.sign(edges) * np.where(
        np.abs(edges) < bend, np.abs(edges) / bend, 1 + np.log10(np.maximum(np.abs(edges) / bend, 1))
    )
    cell = np.floor((place - place[0]) / (place[-1] - place[0]) * _CELLS)
    starts = np.flatnonzero(np.diff(cell[:-1], prepend=-1) > 0)
    return np.append(edges[starts], edges[-1]), [np.add.reduceat(values, starts) for values in counts]


def _on_grid(distribution: Distribution, edges: Float64s) -> Float64s:
    """Counts on a grid that holds all of the distribution's edges; a bin that the grid cuts is shared by width."""
    own, counts = np.array(distribution.edges), np.array(distribution.tokens, np.float64)
    cumulated = np.concatenate([[0.0], np.cumsum(counts)])
    return np.diff(np.interp(edges, own, cumulated))


_KEY = 24.0
_APART = 0.1


def joint_figure(joint: Joint, name: str) -> Figure | None:
    """Hexagons of rollout against train probability; a colour is a power of the count."""
    if not joint.tokens:
        return None
    counts, x, y = np.array(joint.tokens, np.float64), np.array(joint.x), np.array(joint.y)
    level = np.minimum((np.log(counts) / np.log(max(counts.max(), 2) + 1) * len(RAMP)).astype(int), len(RAMP) - 1)
    layout = FigureLayout(height=HEIGHT + 30, below=_KEY)

    def paint(canvas: Canvas) -> None:
        canvas.polygons(_hexagons(x, y, joint.width), [RAMP[index] for index in level])
        canvas.line([0, 1], [0, 1], color=INK, dash="--", width=0.9)
        canvas.linear("x", -0.02, 1.02)
        canvas.linear("y", -0.02, 1.02)
        canvas.labels("rollout probability", "train probability")
        _colour_key(canvas, float(counts.max()))

    apart = float(counts[np.abs(x - y) > _APART].sum() / counts.sum())
    return Figure(
        name, f"{number(apart, 'fraction')} of tokens differ by more than {_APART:g} in probability",
        "Rollout against train probability",
        "Tokens by the probability that each side gave the sampled token; a stronger colour is more. "
        "On the dashed line both agree; a cloud off the line is another distribution, not noise.",
        f"{int(counts.sum()):,} tokens by rollout and train probability in {len(counts):,} hexagons; "
        f"{number(apart, 'fraction')} lie more than {_APART:g} off the diagonal.",
        Data.of(("rollout probability", "train probability", "tokens"), joint.x, joint.y, joint.tokens),
        paint, layout,
    )  # fmt: skip


def _hexagons(x: Float64s, y: Float64s, width: float) -> Float64s:
    """Corners of pointy-topped hexagons [N, 6, 2]."""
    angles = np.pi / 6 + np.pi / 3 * np.arange(6)
    radius = width / math.sqrt(3) * 1.02
    return np.stack([x[:, None] + radius * np.cos(angles), y[:, None] + radius * np.sin(angles)], axis=2)


def _colour_key(canvas: Canvas, most: float) -> None:
    """A strip of the ramp below the axes, with the counts that its ends stand for."""
    left, top, right, bottom = canvas.layout.box
    low, high = 0.42 * WIDTH, 0.72 * WIDTH
    base = canvas.layout.height - 13  # downwards
    up, down = ((bottom - at) / (bottom - top) for at in (base - 8, base))
    ends = (np.linspace(low, high, len(RAMP) + 1) - left) / (right - left)
    strips = [[(a, down), (b, down), (b, up), (a, up)] for a, b in pairwise(ends)]
    canvas.polygons(np.array(strips), RAMP, space="axes")
    for at, text, side in ((low - 6, "1", "right"), (high + 6, f"{int(most):,} tokens", "left")):
        canvas.words(at, base, text, side=side, color=MUTED)
