"""Figures of where the mismatch sits: the distribution, both probabilities, K3 by position, probability, length."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.render.figures.canvas import (
    HEIGHT,
    INK,
    MUTED,
    RAMP,
    SERIES,
    WIDTH,
    Canvas,
    Figure,
    log_ticks,
    power,
)
from mismatchctl.render.series import SURE
from mismatchctl.result import Breakdown, Distribution, Joint

_CELLS = 110
"""Steps across the distribution: finer bins would only show single tokens."""


def distribution_figure(distribution: Distribution, name: str) -> Figure | None:
    """Density of the log ratio: linear near 0, logarithmic beyond; None where every log ratio is 0."""
    tokens = np.array(distribution.tokens, np.float64)
    edges = np.array(distribution.edges)
    if len(tokens) < 3:
        return None
    middle = bend(edges, tokens)
    edges, (tokens, k3) = coarser(edges, middle, tokens, np.array(distribution.k3))
    total, width = tokens.sum(), np.diff(edges)
    density = tokens / total / width
    canvas = Canvas(name)
    canvas.axes.set_xscale("symlog", linthresh=middle, linscale=0.6)
    canvas.axes.set_xlim(edges[0], edges[-1])
    canvas.ticks("x", signed_ticks(edges[0], edges[-1], middle), power)
    floor = float(density[density > 0].min()) / 3
    canvas.log("y", floor, float(density.max()) * 2)
    canvas.axes.fill_between(
        np.repeat(edges, 2)[1:-1],
        floor,
        np.repeat(np.maximum(density, floor), 2),
        color=SERIES[0],
        alpha=0.3,
        linewidth=0,
    )
    canvas.axes.stairs(np.maximum(density, floor), edges, color=SERIES[0], linewidth=1.2, baseline=None)
    canvas.labels("log ratio, train − rollout (nats)", "share of tokens per nat")
    return canvas.finish(
        "Distribution of the log ratio",
        f"Linear within ±{power(middle)}, logarithmic beyond. {_where_k3_is(edges, k3)} "
        "Noise is symmetric and thin-tailed; a long left tail is what the trainer finds far less likely than "
        "the rollout did.",
    )


def bend(edges: Float64s, tokens: Float64s) -> float:
    """The power of ten below the median of |x|, but not so small that the tails lose their room."""
    size = np.maximum(np.abs(edges[1:]), np.abs(edges[:-1]))
    order = np.argsort(size, kind="stable")
    middle = float(size[order][np.searchsorted(np.cumsum(tokens[order]), tokens.sum() / 2)])
    largest = float(max(abs(edges[0]), abs(edges[-1])))
    return 10.0 ** max(math.floor(math.log10(middle)), math.ceil(math.log10(largest)) - 6)


def coarser(edges: Float64s, bend: float, *counts: Float64s) -> tuple[Float64s, list[Float64s]]:
    """Neighbouring bins joined until each is as wide as a cell of the drawing."""
    place = np.sign(edges) * np.where(
        np.abs(edges) < bend, np.abs(edges) / bend, 1 + np.log10(np.maximum(np.abs(edges) / bend, 1))
    )
    cell = np.floor((place - place[0]) / (place[-1] - place[0]) * _CELLS)
    starts = np.flatnonzero(np.diff(cell[:-1], prepend=-1) > 0)
    return np.append(edges[starts], edges[-1]), [np.add.reduceat(values, starts) for values in counts]


def signed_ticks(low: float, high: float, bend: float) -> list[float]:
    """Zero, and powers of ten on either side of it."""
    ends = [max(-low, 0.0), max(high, 0.0)]
    decades = max(1, math.ceil(math.log10(max(*ends, bend) / bend)))
    step = math.ceil(decades / 4)
    sizes = [bend * 10.0**exponent for exponent in range(0, decades + 1, step)]
    return [-s for s in reversed(sizes) if s <= ends[0]] + [0.0] + [s for s in sizes if s <= ends[1]]


def _where_k3_is(edges: Float64s, k3: Float64s) -> str:
    total = k3.sum()
    if not total > 0:
        return ""
    far = np.minimum(np.abs(edges[1:]), np.abs(edges[:-1])) >= 1.0
    return f"Tokens beyond ±1 nat hold {100 * float(k3[far].sum() / total):.0f} % of K3."


def joint_figure(joint: Joint, name: str) -> Figure | None:
    """Hexagons of rollout against train probability; a colour is a power of the count."""
    if not joint.tokens:
        return None
    counts = np.array(joint.tokens, np.float64)
    canvas = Canvas(name, height=HEIGHT + 0.35, bottom=24)
    level = np.minimum((np.log(counts) / np.log(max(counts.max(), 2) + 1) * len(RAMP)).astype(int), len(RAMP) - 1)
    for index, color in enumerate(RAMP):
        chosen = level == index
        canvas.polygons(_hexagons(np.array(joint.x)[chosen], np.array(joint.y)[chosen], joint.width), color)
    canvas.line([0, 1], [0, 1], INK, dashed=True, width=0.9)
    canvas.linear("x", -0.02, 1.02)
    canvas.linear("y", -0.02, 1.02)
    canvas.labels("rollout probability", "train probability")
    _colour_key(canvas, float(counts.max()))
    return canvas.finish(
        "Rollout against train probability",
        "Tokens by the probability that each side gave the sampled token; a stronger colour is more. "
        "On the dashed line both agree; a cloud off the line is another distribution, not noise.",
    )


def _hexagons(x: Float64s, y: Float64s, width: float) -> Float64s:
    """Corners of pointy-topped hexagons [N, 6, 2]."""
    angles = np.pi / 6 + np.pi / 3 * np.arange(6)
    radius = width / math.sqrt(3) * 1.02
    return np.stack([x[:, None] + radius * np.cos(angles), y[:, None] + radius * np.sin(angles)], axis=2)


def _colour_key(canvas: Canvas, most: float) -> None:
    """A strip of the ramp below the axes, with the counts that its ends stand for."""
    wide, high = 72 * WIDTH, 72 * (HEIGHT + 0.35)
    key = canvas.figure.add_axes((0.42, 6 / high, 0.3, 8 / high))
    for index, color in enumerate(RAMP):
        key.axvspan(index, index + 1, color=color, linewidth=0)
    key.set_xlim(0, len(RAMP))
    key.axis("off")
    for x, text, side in ((0.42, "1", "right"), (0.72, f"{int(most):,} tokens", "left")):
        shift = -6 / wide if side == "right" else 6 / wide
        canvas.figure.text(x + shift, 6 / high, text, ha=side, va="bottom", color=MUTED)


@dataclass(frozen=True)
class Quantity:
    """How a breakdown is drawn: its axis, the words under it."""

    title: str
    axis: str
    caption: str


QUANTITIES = {
    "position": Quantity(
        "K3 by position", "position in the response (tokens)",
        "Flat for noise; rising where an error accumulates (a cache, a context that went apart).",
    ),
    "surprisal": Quantity(
        "K3 by probability", "rollout probability of the token",
        "Noise in logits shows at rare tokens; a raised right end means that sure tokens disagree.",
    ),
    "length": Quantity(
        "K3 by response length", "length of the response (tokens)",
        "Whether long responses are worse per token than short ones.",
    ),
}  # fmt: skip


def breakdown_figure(breakdown: Breakdown, name: str) -> Figure | None:
    """Mean K3 by bin of a quantity, with its error; None where K3 is 0 everywhere."""
    words = QUANTITIES.get(breakdown.quantity) or Quantity(f"K3 by {breakdown.quantity}", breakdown.quantity, "")
    values = np.array([np.nan if value is None else value for value in breakdown.k3], np.float64)
    errors = np.array([se or 0.0 for se in breakdown.k3_se], np.float64)
    if not (values > 0).any():
        return None
    where, ticks = places(breakdown)
    canvas = Canvas(name)
    inside = np.array(breakdown.tokens) >= 0.0005 * sum(breakdown.tokens)
    shown = values[inside & (values > 0)] if (inside & (values > 0)).any() else values[values > 0]
    limits = float(shown.min()) / 2, min(float(np.nanmax(values + SURE * errors)), 10 * float(np.nanmax(values))) * 1.5
    canvas.log("y", *limits)
    canvas.band(where, np.clip(values - SURE * errors, *limits), np.clip(values + SURE * errors, *limits), SERIES[0])
    canvas.line(where, np.where(values > 0, values, np.nan), SERIES[0], points=True)
    canvas.axes.set_xlim(where.min() - 0.03 * np.ptp(where) - 1e-9, where.max() + 0.03 * np.ptp(where) + 1e-9)
    canvas.ticks("x", [place for place, _ in ticks], dict(ticks).__getitem__)
    canvas.labels(words.axis, "mean K3 (nats/token)")
    return canvas.finish(words.title, f"{words.caption} The band is ± 2 standard errors over clusters.".strip())


def places(breakdown: Breakdown) -> tuple[Float64s, list[tuple[float, str]]]:
    """Middles of the bins on a logarithmic axis (base 10), and its ticks."""
    low = np.array(breakdown.low)
    high = np.array([np.nan if end is None else end for end in breakdown.high], np.float64)
    high = np.where(np.isnan(high), 2 * np.maximum(low, 1), high)
    if breakdown.quantity == "surprisal":
        return _probability_places(low, high)
    if breakdown.quantity == "length":  # bins hold whole numbers
        high = np.maximum(high - 1, low)
    where = np.log10(np.sqrt(np.maximum(low, high / 2) * high))
    ticks = log_ticks(10.0 ** float(where.min()), max(10.0 ** float(where.max()), 10.0 ** float(where.min()) * 1.01))
    inside = [tick for tick in ticks if where.min() - 0.02 <= math.log10(tick) <= where.max() + 0.02]
    return where, [(math.log10(tick), power(tick)) for tick in inside]


def _probability_places(low: Float64s, high: Float64s) -> tuple[Float64s, list[tuple[float, str]]]:
    """Surprisal on a logarithmic axis, mirrored, so that sure tokens stand at the right; ticks are probabilities."""
    where = -np.log10(np.sqrt(np.maximum(low, high / 2) * high))
    ticks = [(-math.log10(-math.log(p)), text) for p, text in _PROBABILITIES]
    return where, [(place, text) for place, text in ticks if where.min() <= place <= where.max()]


_PROBABILITIES = [
    (1e-6, "10⁻⁶"), (1e-2, "0.01"), (0.2, "0.2"), (0.6, "0.6"), (0.9, "0.9"), (0.99, "0.99"), (0.999, "0.999"),
]  # fmt: skip
