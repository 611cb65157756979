"""Mean K3 by position, probability or length, of one run or of several over each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.numbers import number
from mismatchctl.render.figures.canvas import Canvas, legend_height
from mismatchctl.render.figures.distributions import MOST_SIDES
from mismatchctl.render.figures.figure import Cell, Data, Figure
from mismatchctl.render.figures.scales import log_ticks, power
from mismatchctl.render.figures.series import SURE, floats
from mismatchctl.render.figures.shapes import FigureLayout
from mismatchctl.render.figures.theme import SERIES
from mismatchctl.render.figures.words import described
from mismatchctl.render.text import short
from mismatchctl.result import Breakdown

_MATTERS = 0.0005
"""A bin with a smaller share of the tokens does not set the axis, nor the message."""


@dataclass(frozen=True)
class BreakdownStyle:
    """How a breakdown is drawn: its axis, what a bin is called, the words under it."""

    subject: str
    axis: str
    bin: str
    caption: str = ""


QUANTITIES = {
    "position": BreakdownStyle(
        "K3 by position", "position in the response (tokens)", "position",
        "Flat for noise; rising where an error accumulates (a cache, a context that went apart).",
    ),
    "surprisal": BreakdownStyle(
        "K3 by probability", "rollout probability of the token", "probability",
        "Noise in logits shows at rare tokens; a raised right end means that sure tokens disagree.",
    ),
    "length": BreakdownStyle(
        "K3 by response length", "length of the response (tokens)", "length",
        "Whether long responses are worse per token than short ones.",
    ),
}  # fmt: skip


def quantity_of(name: str) -> BreakdownStyle:
    """How a breakdown of this name is drawn."""
    return QUANTITIES.get(name) or BreakdownStyle(f"K3 by {name}", name, name)


def breakdown_figure(breakdown: Breakdown, name: str) -> Figure | None:
    """Mean K3 by bin of a quantity, with its error; None where K3 is 0 everywhere."""
    return _figure({"K3": breakdown}, name)


def breakdowns_figure(sides: Mapping[str, Breakdown], name: str) -> Figure | None:
    """Mean K3 by bin of several runs over each other; None where all are 0."""
    shown = {side: breakdown for side, breakdown in sides.items() if breakdown.low}
    return _figure(dict(list(shown.items())[:MOST_SIDES]), name) if shown else None


def _figure(sides: Mapping[str, Breakdown], name: str) -> Figure | None:
    words = quantity_of(next(iter(sides.values())).quantity)
    values = {side: floats(breakdown.k3) for side, breakdown in sides.items()}
    if not any((k3 > 0).any() for k3 in values.values()):
        return None
    spots = {side: places(breakdown) for side, breakdown in sides.items()}
    _, ticks = spots[max(sides, key=lambda side: len(sides[side].low))]
    limits = _limits(sides, values)
    ends = np.concatenate([where for where, _ in spots.values()])

    def paint(canvas: Canvas) -> None:
        canvas.log("y", *limits)
        for index, (side, breakdown) in enumerate(sides.items()):
            where, k3 = spots[side][0], values[side]
            reach = SURE * np.nan_to_num(floats(breakdown.k3_se))
            canvas.band(where, np.clip(k3 - reach, *limits), np.clip(k3 + reach, *limits), SERIES[index], 0.15)
            canvas.series(index, where, np.where(k3 > 0, k3, np.nan))
        margin = 0.03 * np.ptp(ends) + 1e-9
        canvas.ticks("x", [at for at, _ in ticks], dict(ticks).__getitem__, (ends.min() - margin, ends.max() + margin))
        canvas.labels(words.axis, "mean K3 (nats/token)")
        if len(sides) > 1:
            canvas.names([short(side, 22) for side in sides])

    first = next(iter(sides))
    worst = max(sides, key=lambda side: float(np.nanmax(np.where(_matters(sides[side]), values[side], 0), initial=0.0)))
    names = [bin_text(sides[worst], index) for index in range(len(sides[worst].low))]
    several = len(sides) > 1
    alike = {side: k3 for side, k3 in values.items() if len(k3) == len(names)}
    return Figure(
        name, _message(sides[worst], values[worst], words, short(worst, 40) if several else ""), words.subject,
        f"{words.caption if not several else ''} {'Bands are' if several else 'The band is'} "
        "± 2 standard errors over clusters.".strip(),
        described("mean K3 (nats/token)", names, alike, words.bin),
        _data(sides) if several else _own_data(sides[first], words),
        paint, FigureLayout(below=legend_height(len(sides)) if several else 0.0),
    )  # fmt: skip


def _message(breakdown: Breakdown, k3: Float64s, words: BreakdownStyle, side: str) -> str:
    """Where K3 is largest, and how it compares with all tokens."""
    tokens = np.array(breakdown.tokens, np.float64)
    counted = np.where(_matters(breakdown) & np.isfinite(k3), k3, -1.0)
    place = int(np.argmax(counted))
    mean = float(np.nansum(tokens * np.nan_to_num(k3)) / tokens.sum())
    of = f" of {side}" if side else ""
    return (
        f"K3{of} is largest at {words.bin} {bin_text(breakdown, place)}: "
        f"{number(float(k3[place]))}, {number(float(k3[place] / mean)) if mean else '1'} times the mean"
    )


def bin_text(breakdown: Breakdown, index: int) -> str:
    """The ends of a bin as its axis counts them: probabilities of surprisals, whole numbers of positions."""
    low, high = breakdown.low[index], breakdown.high[index]
    if breakdown.quantity == "surprisal":
        ends = [0.0 if high is None else math.exp(-high), math.exp(-low)]
        return f"{number(ends[0])} to {number(ends[1])}"
    first = math.ceil(low)
    if high is None:
        return f"{first:,} and more"
    last = math.ceil(high) - 1
    return f"{first:,}" if last <= first else f"{first:,} to {last:,}"


def _matters(breakdown: Breakdown) -> Bools:
    tokens = np.array(breakdown.tokens)
    many: Bools = tokens >= _MATTERS * tokens.sum()
    return many


_NO_LIMITS = 1e-6, 1.0


def _limits(sides: Mapping[str, Breakdown], values: Mapping[str, Float64s]) -> tuple[float, float]:
    """Ends of the axis of K3, set by bins that hold enough tokens to matter."""
    kept = [values[side][_matters(breakdown) & (values[side] > 0)] for side, breakdown in sides.items()]
    shown = np.concatenate(kept)
    if not len(shown):
        shown = np.concatenate([k3[k3 > 0] for k3 in values.values()])
    if not len(shown):  # no bin has a value that can be drawn
        return _NO_LIMITS
    drawn = {side: breakdown for side, breakdown in sides.items() if np.isfinite(values[side]).any()}
    reach = [np.nanmax(values[side] + SURE * np.nan_to_num(floats(b.k3_se))) for side, b in drawn.items()]
    most = float(max(np.nanmax(values[side]) for side in drawn))
    top = min(float(max(reach)), 10 * most) if len(sides) == 1 else float(shown.max())
    return float(shown.min()) / 2, max(top, float(shown.max())) * 1.5


def _own_data(breakdown: Breakdown, words: BreakdownStyle) -> Data:
    rows = [
        (bin_text(breakdown, index), breakdown.tokens[index], breakdown.k3[index], breakdown.k3_se[index])
        for index in range(len(breakdown.low))
    ]
    return Data((words.axis, "tokens", "mean K3 (nats/token)", "standard error"), tuple(rows))


def _data(sides: Mapping[str, Breakdown]) -> Data:
    rows: dict[str, dict[str, Cell]] = {}
    for side, breakdown in sides.items():
        for index, k3 in enumerate(breakdown.k3):
            rows.setdefault(bin_text(breakdown, index), {})[side] = k3
    heads = (quantity_of(next(iter(sides.values())).quantity).axis, *(f"{side} (nats/token)" for side in sides))
    return Data(heads, tuple((text, *(row.get(side) for side in sides)) for text, row in rows.items()))


def places(breakdown: Breakdown) -> tuple[Float64s, list[tuple[float, str]]]:
    """Middles of the bins on a logarithmic axis (base 10), and its ticks."""
    low = np.array(breakdown.low)
    high = floats(breakdown.high)
    high = np.where(np.isnan(high), 2 * np.maximum(low, 1), high)
    if breakdown.quantity == "surprisal":
        return _probability_places(low, high)
    if breakdown.quantity == "length":  # bins hold whole numbers
        high = np.maximum(high - 1, low)
    where = np.log10(np.sqrt(np.maximum(low, high / 2) * high))
    if len(where) == 1:  # its middle is no number that anybody knows
        return where, [(float(where[0]), bin_text(breakdown, 0))]
    ticks = log_ticks(10.0 ** float(where.min()), 10.0 ** float(where.max()))
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
