"""Figures that show distributions, layers, or K3 by position, probability or response length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import escape_terminal, format_number, shorten, shorten_exponents
from mismatchctl.diagnosis.layer_reports import LayerReport
from mismatchctl.report.figures.figure import Axis, Figure, Marks, ReferenceLine, interval_line, to_floats
from mismatchctl.results.model import Breakdown, Distribution, JointDistribution
from mismatchctl.results.summary import percent

MAX_RUNS = 6
_MAX_CELLS = 110  # maximum number of drawn bins, because finer bins would contain single tokens
_X_TITLE, _Y_TITLE = "log ratio, train − rollout (nats)", "share of tokens per nat"
_FAR = 1.0
_MIN_SHARE, _PEAK, _DISAGREEMENT = 0.0005, 3.0, 0.1
"""A title only names a bin if it has the largest K3, at least 0.05% of all tokens, and 3 times the mean K3."""


def layers_figure(report: LayerReport, name: str) -> Figure | None:
    known = [(layer, value) for layer, value in report.growth if value]
    if len(known) < 2:
        return None
    layers, values = zip(*known, strict=True)
    bad = report.first_bad or report.first_apart
    place = None if bad is None else bad.layer
    rules = () if place is None else (ReferenceLine("x", float(place), f"first difference: layer {place}"),)
    measure = escape_terminal(report.measure.partition(",")[0])
    return Figure(
        name, "Difference after each layer" if place is None else f"The two sides differ from layer {place} on",
        "Noise grows gradually from layer to layer. A jump marks a layer that the two sides compute differently.",
        Axis("layer", limits=(min(layers), max(layers))), Axis(measure, "log"),
        (Marks("line", "difference", layers, values),), rules,
    )  # fmt: skip


def distribution_figure(distribution: Distribution, name: str) -> Figure | None:
    figure = distributions_figure({"tokens": distribution}, name)
    if figure is None:
        return None
    edges, tokens, k3 = (np.array(getattr(distribution, key), np.float64) for key in ("edges", "tokens", "k3"))
    far = np.minimum(np.abs(edges[1:]), np.abs(edges[:-1])) >= _FAR
    share, of_k3 = (float(part[far].sum() / part.sum()) if part.sum() > 0 else 0.0 for part in (tokens, k3))
    title = f"{percent(share)} of tokens have a |log ratio| above 1 nat and cause {percent(of_k3)} of K3"
    return replace(figure, title=title) if share else figure


def distributions_figure(sides: Mapping[str, Distribution], name: str = "distribution") -> Figure | None:
    shown = {side: found for side, found in list(sides.items())[:MAX_RUNS] if sum(found.tokens)}
    edges = np.unique([edge for found in shown.values() for edge in found.edges])
    if len(edges) < 4:
        return None
    # tokens of a bin that the common edges split are divided in proportion to width
    counts = [np.diff(np.interp(edges, found.edges, np.cumsum([0.0, *found.tokens]))) for found in shown.values()]
    middle = linear_threshold(edges, np.sum(counts, axis=0))
    cells, joined = merge_bins(edges, middle, *counts)
    densities = [tokens / tokens.sum() / np.diff(cells) for tokens in joined]
    floor = min(float(density[density > 0].min()) for density in densities) / 3
    top = max(float(density.max()) for density in densities) * 1.5
    marks = tuple(
        Marks("stairs", shorten(side, 24), cells.tolist(), np.maximum(density, floor).tolist(), color=color)
        for color, (side, density) in enumerate(zip(shown, densities, strict=True))
    )
    ends = float(cells[0]), float(cells[-1])
    ticks = tuple((tick, shorten_exponents(f"{tick:g}")) for tick in _signed_ticks(*ends, middle))
    x = Axis(_X_TITLE, "symlog", ends, linear_to=middle, ticks=ticks)
    return Figure(
        name, "Distribution of the log ratio",
        f"From −{middle:g} to {middle:g} nats, the horizontal axis is linear. Outside this range, it is logarithmic. "
        "Noise is symmetric. Tokens in a long left tail are far less likely in the trainer than in the rollout.",
        x, Axis(_Y_TITLE, "log", (floor, top)), marks,
    )  # fmt: skip


def _signed_ticks(low: float, high: float, bend: float) -> list[float]:
    ends = [max(-low, 0.0), max(high, 0.0)]
    decades = max(1, math.ceil(math.log10(max(*ends, bend) / bend)))
    sizes = [bend * 10.0**exponent for exponent in range(0, decades + 1, math.ceil(decades / 3))]
    return [-size for size in reversed(sizes) if size <= ends[0]] + [0.0] + [size for size in sizes if size <= ends[1]]


def linear_threshold(edges: Float64s, tokens: Float64s) -> float:
    """Return the end of the linear part of a log axis: usually the power of ten below the median |log ratio|."""
    size = np.maximum(np.abs(edges[1:]), np.abs(edges[:-1]))
    order = np.argsort(size, kind="stable")
    median = float(size[order][np.searchsorted(np.cumsum(tokens[order]), tokens.sum() / 2)])
    largest = float(max(abs(edges[0]), abs(edges[-1])))
    return 10.0 ** max(math.floor(math.log10(median)), math.ceil(math.log10(largest)) - 6)


def merge_bins(edges: Float64s, bend: float, *counts: Float64s) -> tuple[Float64s, list[Float64s]]:
    size = np.abs(edges) / bend
    place = np.sign(edges) * np.where(size < 1, size, 1 + np.log10(np.maximum(size, 1)))
    cell = np.floor((place - place[0]) / (place[-1] - place[0]) * _MAX_CELLS)
    starts = np.flatnonzero(np.diff(cell[:-1], prepend=-1) > 0)
    return np.append(edges[starts], edges[-1]), [np.add.reduceat(values, starts) for values in counts]


def joint_figure(joint: JointDistribution, name: str) -> Figure | None:
    if not joint.tokens:
        return None
    counts, x, y = np.array(joint.tokens, np.float64), np.array(joint.x), np.array(joint.y)
    apart = float(counts[np.abs(x - y) > _DISAGREEMENT].sum() / counts.sum())
    title = f"{percent(apart)} of tokens differ in probability by more than {_DISAGREEMENT:g}"
    mark = Marks("hexagons", "tokens", joint.x, joint.y, values=joint.tokens, shift=joint.width)
    return Figure(
        name, title if apart else "Rollout and train probability",
        "Darker cells contain more tokens. Tokens on the diagonal have the same probability on both sides.",
        Axis("rollout probability", limits=(0.0, 1.0)), Axis("train probability", limits=(0.0, 1.0)), (mark,),
        size="square",
    )  # fmt: skip


QUANTITIES = {
    "position": ("K3 by position", "position in the response (tokens)", "position",
                 "If the mismatch is noise, the curve is flat. "
                 "If an error accumulates along the response, the curve rises."),
    "surprisal": ("K3 by probability", "rollout probability of the token", "rollout probability",
                  "Noise in the logits causes a high K3 for rare tokens. If the curve is also high on the right, "
                  "likely tokens have a large mismatch too."),
    "length": ("K3 by response length", "length of the response (tokens)", "response length",
               "K3 per token, for responses of each length."),
}  # fmt: skip
"""Quantity -> texts of its figure: title, axis title, noun (such as `position` in "At position 5"), and caption."""
_PROBABILITY_TICKS = (1e-6, 0.01, 0.2, 0.6, 0.9, 0.99, 0.999)


def breakdowns_figure(sides: Mapping[str, Breakdown], name: str) -> Figure | None:
    shown = {side: found for side, found in list(sides.items())[:MAX_RUNS] if found.low}
    if not any((value or 0) > 0 for found in shown.values() for value in found.k3):
        return None
    quantity = next(iter(shown.values())).quantity
    subject, axis, noun, caption = QUANTITIES.get(quantity, (f"K3 by {quantity}", quantity, quantity, ""))
    marks = []
    for color, (side, found) in enumerate(shown.items()):
        line = interval_line(shorten(side, 24), bin_positions(found), found.k3, found.k3_se, log=True, color=color)
        marks.append(replace(line, labels=[format_bin(found, index) for index in range(len(found.low))]))
    first = next(iter(shown.values()))
    places = sorted({place for found in shown.values() for place in bin_positions(found)})
    if quantity == "surprisal":
        ticks = [(_mirror(-math.log(p)), shorten_exponents(f"{p:g}")) for p in _PROBABILITY_TICKS]
        inside = tuple(tick for tick in ticks if places[0] - 0.01 <= tick[0] <= places[-1] + 0.01)
        room = 0.0 if places[-1] > places[0] else 0.5
        limits = places[0] - room, places[-1] + room
        x = Axis(axis, limits=limits, ticks=inside or ((places[0], format_bin(first, 0)),))
    else:
        x = Axis(axis, "log", (places[0], places[-1]) if places[-1] > places[0] else (places[0] / 2, places[0] * 2))
    title = _peak_message(first, noun) if len(shown) == 1 else ""
    return Figure(name, title or subject, caption, x, Axis("mean K3 (nats/token)", "log"), tuple(marks))


def _peak_message(breakdown: Breakdown, noun: str) -> str:
    tokens, k3 = np.array(breakdown.tokens, np.float64), np.nan_to_num(to_floats(breakdown.k3))
    counted = np.where(tokens >= _MIN_SHARE * tokens.sum(), k3, -1.0)
    place, mean = int(np.argmax(counted)), float((tokens * k3).sum() / max(tokens.sum(), 1))
    if not mean or counted[place] < _PEAK * mean:
        return ""
    return f"At {noun} {format_bin(breakdown, place)}, K3 is {format_number(float(k3[place] / mean))}x the mean"


def format_bin(breakdown: Breakdown, index: int) -> str:
    """Format the ends of a bin: surprisals as probabilities, other quantities as whole numbers."""
    low, high = breakdown.low[index], breakdown.high[index]
    if breakdown.quantity == "surprisal":
        ends = [0.0 if high is None else math.exp(-high), math.exp(-low)]
        return f"{format_number(ends[0])} to {format_number(ends[1])}"
    first = math.ceil(low)
    if high is None:
        return f"{first:,} and more"
    last = math.ceil(high) - 1
    return f"{first:,}" if last <= first else f"{first:,} to {last:,}"


def bin_positions(breakdown: Breakdown) -> list[float]:
    """Return the x of each bin's center. The axis of surprisals is mirrored, so that likely tokens are on the right."""
    low, high = np.array(breakdown.low), to_floats(breakdown.high)
    high = np.where(np.isnan(high), 2 * np.maximum(low, 1), high)
    if breakdown.quantity == "length":  # lengths are whole numbers
        high = np.maximum(high - 1, low)
    centers: list[float] = np.sqrt(np.maximum(low, high / 2) * high).tolist()
    return list(map(_mirror, centers)) if breakdown.quantity == "surprisal" else centers


def _mirror(surprisal: float) -> float:
    return -math.log10(max(surprisal, 5e-324))
