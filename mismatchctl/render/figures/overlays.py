"""Figures that lay several runs over each other, and what a change of K3 is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.compare.model import Decomposition, Part
from mismatchctl.numbers import number
from mismatchctl.render.figures.canvas import MUTED, SERIES, Canvas, Figure, drawing, power
from mismatchctl.render.figures.distributions import QUANTITIES, Quantity, bend, coarser, places, signed_ticks
from mismatchctl.render.series import SURE
from mismatchctl.render.text import label, short
from mismatchctl.result import Breakdown, Distribution

MOST_SIDES = 6
"""Runs that can be told apart in one figure."""
MOST_PARTS = 24
"""Bars of one figure; of more values, those that contribute most."""
_NAME = 28
_LEGEND = 18.0  # units of height that a line of the legend takes


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
    with drawing():
        canvas = Canvas(name, bottom=_legend_height(shown))
        canvas.axes.set_xscale("symlog", linthresh=middle, linscale=0.6)
        canvas.axes.set_xlim(cells[0], cells[-1])
        canvas.ticks("x", signed_ticks(cells[0], cells[-1], middle), power)
        floor = min(float(density[density > 0].min()) for density in densities) / 3
        canvas.log("y", floor, max(float(density.max()) for density in densities) * 2)
        for index, density in enumerate(densities):
            style = "-" if index == 0 else (0, (4, 1.5))
            canvas.axes.stairs(
                np.maximum(density, floor), cells, color=SERIES[index], linewidth=1.4, linestyle=style, baseline=None
            )
        canvas.labels("log ratio, train − rollout (nats)", "share of tokens per nat")
        _legend(canvas, list(shown))
        return canvas.finish(
            "Distribution of the log ratio",
            f"Linear within ±{power(middle)}, logarithmic beyond. Where a line lies higher far from 0, its run has "
            "more tokens that the two engines judge differently.",
        )


def breakdowns_figure(sides: Mapping[str, Breakdown], name: str) -> Figure | None:
    """Mean K3 by bin of several runs over each other; None where all are 0."""
    shown = {side: breakdown for side, breakdown in sides.items() if breakdown.low}
    shown = dict(list(shown.items())[:MOST_SIDES])
    if not shown:
        return None
    first = next(iter(shown.values()))
    words = QUANTITIES.get(first.quantity) or Quantity(f"K3 by {first.quantity}", first.quantity, "")
    values = {side: _floats(breakdown.k3) for side, breakdown in shown.items()}
    positive = np.concatenate([found[found > 0] for found in values.values()])
    if not len(positive):
        return None
    widest = max(shown.values(), key=lambda breakdown: len(breakdown.low))
    _, ticks = places(widest)
    with drawing():
        canvas = Canvas(name, bottom=_legend_height(shown))
        limits = _limits(shown, values)
        canvas.log("y", *limits)
        for index, (side, breakdown) in enumerate(shown.items()):
            where, _ = places(breakdown)
            k3, reach = values[side], SURE * np.nan_to_num(_floats(breakdown.k3_se))
            canvas.band(where, np.clip(k3 - reach, *limits), np.clip(k3 + reach, *limits), SERIES[index], 0.14)
            canvas.line(where, np.where(k3 > 0, k3, np.nan), SERIES[index], points=True, dashed=index > 0)
        ends = np.concatenate([places(breakdown)[0] for breakdown in shown.values()])
        margin = 0.03 * np.ptp(ends) + 1e-9
        canvas.axes.set_xlim(ends.min() - margin, ends.max() + margin)
        canvas.ticks("x", [place for place, _ in ticks], dict(ticks).__getitem__)
        canvas.labels(words.axis, "mean K3 (nats/token)")
        _legend(canvas, list(shown))
        return canvas.finish(words.title, "Bands are ± 2 standard errors over clusters.")


def contributions_figure(decomposition: Decomposition, name: str) -> Figure | None:
    """What each bin, step or value adds to the change of K3, as level and mix; None where nothing changed."""
    parts = in_order(decomposition)
    if not any(part.total for part in parts):
        return None
    level, mix = _floats([part.level for part in parts]), _floats([part.mix for part in parts])
    reach = SURE * np.nan_to_num(_floats([part.se for part in parts]))
    ends = np.concatenate([level, mix, level + mix - reach, level + mix + reach, [0.0]])
    with drawing():
        canvas = Canvas(name, bottom=_LEGEND)
        where = np.arange(len(parts), dtype=np.float64)
        margin = 0.06 * (ends.max() - ends.min())
        canvas.linear("y", float(ends.min() - margin), float(ends.max() + margin))
        canvas.axes.set_xlim(-0.7, len(parts) - 0.3)
        canvas.axes.axhline(0, color=MUTED, linewidth=0.9)
        canvas.axes.bar(where - 0.2, level, 0.38, color=SERIES[0], linewidth=0)
        canvas.axes.bar(where + 0.2, mix, 0.38, color=SERIES[1], linewidth=0)
        canvas.axes.vlines(where, level + mix - reach, level + mix + reach, color=MUTED, linewidth=1.1)
        names = [_tick(decomposition, part) for part in parts]
        step = max(math.ceil(len(parts) / 6), math.ceil((max(map(len, names)) + 2) * len(parts) / 48))
        canvas.ticks("x", list(where[::step]), lambda place: names[int(place)])
        canvas.labels(_axis(decomposition), "contribution (nats/token)")
        canvas.legend([("level", SERIES[0], False), ("mix", SERIES[1], False)], columns=2, below=True)
        return canvas.finish(
            f"What the change is made of, by {_noun(decomposition.quantity)}",
            "Level: K3 there is larger or smaller. Mix: more or fewer tokens are there. All bars add up to the change; "
            "lines are ± 2 standard errors of both together.",
        )


def in_order(decomposition: Decomposition) -> list[Part]:
    """Parts as they lie on an axis; of too many values, those that contribute most."""
    parts = decomposition.parts if decomposition.parts[0].low is not None else decomposition.parts[:MOST_PARTS]
    return sorted(parts, key=_place, reverse=decomposition.quantity == "surprisal")


def _place(part: Part) -> tuple[int, float, str]:
    if part.low is not None:
        return 0, part.low, ""
    number_like = isinstance(part.label, (int, float))
    return (0, float(part.label or 0), "") if number_like else (1, 0.0, label(part.label))


def _tick(decomposition: Decomposition, part: Part) -> str:
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


def _noun(quantity: str) -> str:
    return "probability" if quantity == "surprisal" else short(quantity, 40)


def _on_grid(distribution: Distribution, edges: Float64s) -> Float64s:
    """Counts on a grid that holds all of the distribution's edges; a bin that the grid cuts is shared by width."""
    own, counts = np.array(distribution.edges), np.array(distribution.tokens, np.float64)
    cumulated = np.concatenate([[0.0], np.cumsum(counts)])
    grid: Float64s = np.diff(np.interp(edges, own, cumulated))
    return grid


def _limits(shown: Mapping[str, Breakdown], values: Mapping[str, Float64s]) -> tuple[float, float]:
    """Ends of the axis of K3, set by bins that hold enough tokens to matter."""
    kept = []
    for side, breakdown in shown.items():
        many = np.array(breakdown.tokens) >= 0.0005 * sum(breakdown.tokens)
        kept.append(values[side][many & (values[side] > 0)])
    found = np.concatenate(kept)
    if not len(found):
        found = np.concatenate([k3[k3 > 0] for k3 in values.values()])
    return float(found.min()) / 2, float(found.max()) * 2


def _legend_height(shown: Mapping[str, object]) -> float:
    return _LEGEND * math.ceil(len(shown) / 2)


def _legend(canvas: Canvas, names: Sequence[str]) -> None:
    entries = [(short(side, _NAME), SERIES[index], index > 0) for index, side in enumerate(names)]
    canvas.legend(entries, columns=min(len(entries), 2), below=True)


def _floats(values: Sequence[float | None]) -> Float64s:
    return np.array([np.nan if value is None else value for value in values], np.float64)
