"""Histograms and breakdowns of a run by position, surprisal, layer and column."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.formatting import escape_terminal, format_number, shorten
from mismatchctl.diagnosis.layer_reports.model import LayerReport
from mismatchctl.report.figures.figure import DataCell, Figure, FigureData
from mismatchctl.report.figures.series import BAND_STANDARD_ERRORS, describe_lines, to_floats
from mismatchctl.report.figures.svg import (
    FIGURE_HEIGHT,
    FIGURE_WIDTH,
    INK,
    MUTED,
    RAMP,
    SERIES,
    Canvas,
    FigureLayout,
    format_power,
    legend_height,
    line_style,
    log_ticks,
    signed_ticks,
)
from mismatchctl.results.model import Breakdown, Distribution, JointDistribution


def layers_figure(report: LayerReport, name: str) -> Figure | None:
    """Draw the largest difference of each layer, if two or more are positive."""
    known = [(layer, value) for layer, value in report.growth if value]
    if len(known) < 2:
        return None
    layers, values = zip(*known, strict=True)
    bad = report.first_bad or report.first_apart
    place = None if bad is None else bad.layer

    def paint(canvas: Canvas) -> None:
        low, high = min(values) / 2, max(values) * 2
        canvas.log("y", low, high)
        canvas.linear("x", min(layers) - 0.5, max(layers) + 0.5)
        if place is not None:
            canvas.reference_line([place] * 2, [low, high])
        canvas.series(0, layers, values, color=SERIES[0])
        canvas.axis_titles("layer", escape_terminal(report.measure.partition(",")[0]))

    most = max(known, key=lambda one: one[1])
    parted = "" if place is None else f"; they part at layer {place}"
    title = (
        f"{format_number(values[0])} after layer {layers[0]}, {format_number(most[1])} after layer {most[0]}{parted}"
    )
    return Figure(
        name, title, f"difference after each layer, {escape_terminal(report.measure)}",
        "What grows evenly is noise that adds up; a step is where something is computed otherwise.",
        f"A line over {len(known)} layers: {title}.",
        FigureData(("layer", "difference"), tuple(known)), paint,
    )  # fmt: skip


MAX_RUNS = 6
"""Maximum runs in one figure."""
_MAX_CELLS = 110
"""Steps of a drawn distribution. Finer bins would show single tokens."""
_SUBJECT = "Distribution of the log ratio"
_X_TITLE, _Y_TITLE = "log ratio, train − rollout (nats)", "share of tokens per nat"
_FAR_FROM_ZERO = 1.0


def distribution_figure(distribution: Distribution, name: str) -> Figure | None:
    """Draw the density of the log ratio, if any log ratio differs from 0."""
    tokens = np.array(distribution.tokens, np.float64)
    edges = np.array(distribution.edges)
    if len(tokens) < 3:
        return None
    middle = linear_threshold(edges, tokens)
    cells, (joined, k3) = merge_bins(edges, middle, tokens, np.array(distribution.k3))
    density = joined / joined.sum() / np.diff(cells)
    floor, half = float(density[density > 0].min()) / 3, _median_magnitude(edges, tokens)

    def paint(canvas: Canvas) -> None:
        _add_horizontal_axis(canvas, cells, middle)
        canvas.log("y", floor, float(density.max()) * 2)
        shown = np.maximum(density, floor)
        ends = np.repeat(cells, 2)[1:-1]
        canvas.band(ends, np.full(len(ends), floor), np.repeat(shown, 2), SERIES[0], 0.3)
        canvas.stairs(shown, cells, color=SERIES[0], width=1.2)
        canvas.axis_titles(_X_TITLE, _Y_TITLE)

    far = np.minimum(np.abs(cells[1:]), np.abs(cells[:-1])) >= _FAR_FROM_ZERO
    share = float(joined[far].sum() / joined.sum())
    share_of_k3 = float(k3[far].sum() / k3.sum()) if k3.sum() > 0 else 0.0
    message = (
        f"{format_number(share, 'fraction')} of tokens differ by more than 1 nat "
        f"and hold {100 * share_of_k3:.0f} % of K3"
    )
    return Figure(
        name, message if share else "No token differs by more than 1 nat", _SUBJECT,
        f"Linear within ±{format_power(middle)}, logarithmic beyond. Noise is symmetric and thin-tailed; a long left "
        "tail is what the trainer finds far less likely than the rollout did.",
        f"Density of the log ratio of {int(joined.sum()):,} tokens, from {format_number(float(cells[0]))} to "
        f"{format_number(float(cells[-1]))} nats; half of them within ±{format_number(half)}.",
        FigureData.of(
            ("log ratio from (nats)", "to (nats)", "tokens", "K3 (nats)"),
            cells[:-1], cells[1:], joined.astype(int), k3,
        ),
        paint,
    )  # fmt: skip


def distributions_figure(sides: Mapping[str, Distribution]) -> Figure | None:
    """Draw the densities of several runs together, if any log ratio varies."""
    shown = {side: d for side, d in list(sides.items())[:MAX_RUNS] if sum(d.tokens)}
    edges = np.unique([edge for d in shown.values() for edge in d.edges])
    if len(edges) < 4:
        return None
    counts = [_resample_bins(d, edges) for d in shown.values()]
    middle = linear_threshold(edges, np.sum(counts, axis=0))
    cells, joined = merge_bins(edges, middle, *counts)
    densities = [tokens / tokens.sum() / np.diff(cells) for tokens in joined]
    floor = min(float(density[density > 0].min()) for density in densities) / 3
    names = [shorten(side, 22) for side in shown]

    def paint(canvas: Canvas) -> None:
        _add_horizontal_axis(canvas, cells, middle)
        canvas.log("y", floor, max(float(density.max()) for density in densities) * 2)
        for index, density in enumerate(densities):
            canvas.stairs(np.maximum(density, floor), cells, **line_style(index, marked=False), width=1.4)
        canvas.axis_titles(_X_TITLE, _Y_TITLE)
        canvas.series_legend(names, marked=False)

    far = np.minimum(np.abs(cells[1:]), np.abs(cells[:-1])) >= _FAR_FROM_ZERO
    shares = [float(tokens[far].sum() / tokens.sum()) for tokens in joined]
    percentages = [f"{format_number(share, 'fraction')} of {side}" for share, side in zip(shares, names, strict=True)]
    return Figure(
        "distribution", f"Beyond ±1 nat lie {', '.join(percentages)}", _SUBJECT,
        f"Linear within ±{format_power(middle)}, logarithmic beyond. Where a line lies higher far from 0, its run has "
        "more tokens that the two engines judge differently.",
        escape_terminal(
            f"Densities of the log ratio of {', '.join(shown)}, from {format_number(float(cells[0]))} to "
            f"{format_number(float(cells[-1]))} nats."
        ),
        FigureData.of(
            ("log ratio from (nats)", "to (nats)", *(f"{side} (tokens)" for side in shown)),
            cells[:-1], cells[1:], *joined,
        ),
        paint, FigureLayout(below=legend_height(max(len(shown), 2))),
    )  # fmt: skip


def _add_horizontal_axis(canvas: Canvas, cells: Float64s, middle: float) -> None:
    axis = canvas.axis("x")
    axis.scale, axis.linear_to = "symlog", middle
    ends = float(cells[0]), float(cells[-1])
    canvas.ticks("x", signed_ticks(*ends, middle), format_power, ends)


def linear_threshold(edges: Float64s, tokens: Float64s) -> float:
    """Return the width of the linear axis part: the power of ten below the median of |x|, within limits."""
    largest = float(max(abs(edges[0]), abs(edges[-1])))
    return 10.0 ** max(math.floor(math.log10(_median_magnitude(edges, tokens))), math.ceil(math.log10(largest)) - 6)


def _median_magnitude(edges: Float64s, tokens: Float64s) -> float:
    """Return the smallest |x| that covers half of the tokens."""
    size = np.maximum(np.abs(edges[1:]), np.abs(edges[:-1]))
    order = np.argsort(size, kind="stable")
    return float(size[order][np.searchsorted(np.cumsum(tokens[order]), tokens.sum() / 2)])


def merge_bins(edges: Float64s, bend: float, *counts: Float64s) -> tuple[Float64s, list[Float64s]]:
    """Merge neighboring bins until each is at least one cell of the drawing wide."""
    place = np.sign(edges) * np.where(
        np.abs(edges) < bend, np.abs(edges) / bend, 1 + np.log10(np.maximum(np.abs(edges) / bend, 1))
    )
    cell = np.floor((place - place[0]) / (place[-1] - place[0]) * _MAX_CELLS)
    starts = np.flatnonzero(np.diff(cell[:-1], prepend=-1) > 0)
    return np.append(edges[starts], edges[-1]), [np.add.reduceat(values, starts) for values in counts]


def _resample_bins(distribution: Distribution, edges: Float64s) -> Float64s:
    """Return counts on a finer grid. A bin that the grid splits is shared by width."""
    own_edges, counts = np.array(distribution.edges), np.array(distribution.tokens, np.float64)
    cumulated = np.concatenate([[0.0], np.cumsum(counts)])
    return np.diff(np.interp(edges, own_edges, cumulated))


_COLOR_KEY_HEIGHT = 24.0
_DISAGREEMENT = 0.1


def joint_figure(joint: JointDistribution, name: str) -> Figure | None:
    """Draw rollout against train probability as hexagons with logarithmic colors."""
    if not joint.tokens:
        return None
    counts, x, y = np.array(joint.tokens, np.float64), np.array(joint.x), np.array(joint.y)
    level = np.minimum((np.log(counts) / np.log(max(counts.max(), 2) + 1) * len(RAMP)).astype(int), len(RAMP) - 1)
    layout = FigureLayout(height=FIGURE_HEIGHT + 30, below=_COLOR_KEY_HEIGHT)

    def paint(canvas: Canvas) -> None:
        canvas.polygons(_hexagon_corners(x, y, joint.width), [RAMP[index] for index in level])
        canvas.line([0, 1], [0, 1], color=INK, dash="--", width=0.9)
        canvas.linear("x", -0.02, 1.02)
        canvas.linear("y", -0.02, 1.02)
        canvas.axis_titles("rollout probability", "train probability")
        _draw_color_key(canvas, float(counts.max()))

    apart = float(counts[np.abs(x - y) > _DISAGREEMENT].sum() / counts.sum())
    return Figure(
        name, f"{format_number(apart, 'fraction')} of tokens differ by more than {_DISAGREEMENT:g} in probability",
        "Rollout against train probability",
        "Tokens by the probability that each side gave the sampled token; a stronger colour is more. "
        "On the dashed line both agree; a cloud off the line is another distribution, not noise.",
        f"{int(counts.sum()):,} tokens by rollout and train probability in {len(counts):,} hexagons; "
        f"{format_number(apart, 'fraction')} lie more than {_DISAGREEMENT:g} off the diagonal.",
        FigureData.of(("rollout probability", "train probability", "tokens"), joint.x, joint.y, joint.tokens),
        paint, layout,
    )  # fmt: skip


def _hexagon_corners(x: Float64s, y: Float64s, width: float) -> Float64s:
    """Return corners of pointy-topped hexagons [N, 6, 2]."""
    angles = np.pi / 6 + np.pi / 3 * np.arange(6)
    radius = width / math.sqrt(3) * 1.02
    return np.stack([x[:, None] + radius * np.cos(angles), y[:, None] + radius * np.sin(angles)], axis=2)


def _draw_color_key(canvas: Canvas, most: float) -> None:
    """Draw the color key below the axes."""
    left, top, right, bottom = canvas.layout.box
    low, high = 0.42 * FIGURE_WIDTH, 0.72 * FIGURE_WIDTH
    base = canvas.layout.height - 13  # y in points from the top
    up, down = ((bottom - at) / (bottom - top) for at in (base - 8, base))
    ends = (np.linspace(low, high, len(RAMP) + 1) - left) / (right - left)
    strips = [[(a, down), (b, down), (b, up), (a, up)] for a, b in pairwise(ends)]
    canvas.polygons(np.array(strips), RAMP, space="axes")
    for at, text, side in ((low - 6, "1", "right"), (high + 6, f"{int(most):,} tokens", "left")):
        canvas.write_outside(at, base, text, side=side, color=MUTED)


_MIN_SHARE = 0.0005
"""Bins with a smaller share of the tokens affect neither the axis nor the message."""


@dataclass(frozen=True)
class BreakdownStyle:
    """Axis title, bin name and caption of a breakdown."""

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


def find_quantity(name: str) -> BreakdownStyle:
    """Return the style of a breakdown."""
    return QUANTITIES.get(name) or BreakdownStyle(f"K3 by {name}", name, name)


def breakdown_figure(breakdown: Breakdown, name: str) -> Figure | None:
    """Draw mean K3 per bin of a quantity, with its error, if K3 is positive in any bin."""
    return _build_figure({"K3": breakdown}, name)


def breakdowns_figure(sides: Mapping[str, Breakdown], name: str) -> Figure | None:
    """Draw mean K3 per bin of several runs together, if K3 is positive in any bin."""
    shown = {side: breakdown for side, breakdown in sides.items() if breakdown.low}
    return _build_figure(dict(list(shown.items())[:MAX_RUNS]), name) if shown else None


def _build_figure(sides: Mapping[str, Breakdown], name: str) -> Figure | None:
    words = find_quantity(next(iter(sides.values())).quantity)
    values = {side: to_floats(breakdown.k3) for side, breakdown in sides.items()}
    if not any((k3 > 0).any() for k3 in values.values()):
        return None
    spots = {side: bin_positions(breakdown) for side, breakdown in sides.items()}
    _, ticks = spots[max(sides, key=lambda side: len(sides[side].low))]
    limits = _axis_limits(sides, values)
    ends = np.concatenate([where for where, _ in spots.values()])

    def paint(canvas: Canvas) -> None:
        canvas.log("y", *limits)
        for index, (side, breakdown) in enumerate(sides.items()):
            where, k3 = spots[side][0], values[side]
            reach = BAND_STANDARD_ERRORS * np.nan_to_num(to_floats(breakdown.k3_se))
            canvas.band(where, np.clip(k3 - reach, *limits), np.clip(k3 + reach, *limits), SERIES[index], 0.15)
            canvas.series(index, where, np.where(k3 > 0, k3, np.nan))
        margin = 0.03 * np.ptp(ends) + 1e-9
        canvas.ticks("x", [at for at, _ in ticks], dict(ticks).__getitem__, (ends.min() - margin, ends.max() + margin))
        canvas.axis_titles(words.axis, "mean K3 (nats/token)")
        if len(sides) > 1:
            canvas.series_legend([shorten(side, 22) for side in sides])

    first = next(iter(sides))
    worst = max(
        sides, key=lambda side: float(np.nanmax(np.where(_significant_bins(sides[side]), values[side], 0), initial=0.0))
    )
    names = [format_bin(sides[worst], index) for index in range(len(sides[worst].low))]
    several = len(sides) > 1
    alike = {side: k3 for side, k3 in values.items() if len(k3) == len(names)}
    return Figure(
        name, _breakdown_message(sides[worst], values[worst], words, shorten(worst, 40) if several else ""),
        words.subject,
        f"{words.caption if not several else ''} {'Bands are' if several else 'The band is'} "
        "± 2 standard errors over clusters.".strip(),
        describe_lines("mean K3 (nats/token)", names, alike, words.bin),
        _breakdown_data(sides) if several else _run_data(sides[first], words),
        paint, FigureLayout(below=legend_height(len(sides)) if several else 0.0),
    )  # fmt: skip


def _breakdown_message(breakdown: Breakdown, k3: Float64s, words: BreakdownStyle, side: str) -> str:
    """Return the bin with the largest K3, compared with the mean."""
    tokens = np.array(breakdown.tokens, np.float64)
    counted = np.where(_significant_bins(breakdown) & np.isfinite(k3), k3, -1.0)
    place = int(np.argmax(counted))
    mean = float(np.nansum(tokens * np.nan_to_num(k3)) / tokens.sum())
    of = f" of {side}" if side else ""
    return (
        f"K3{of} is largest at {words.bin} {format_bin(breakdown, place)}: "
        f"{format_number(float(k3[place]))}, {format_number(float(k3[place] / mean)) if mean else '1'} times the mean"
    )


def format_bin(breakdown: Breakdown, index: int) -> str:
    """Format a bin by its ends: probabilities for surprisal, whole numbers for positions and lengths."""
    low, high = breakdown.low[index], breakdown.high[index]
    if breakdown.quantity == "surprisal":
        ends = [0.0 if high is None else math.exp(-high), math.exp(-low)]
        return f"{format_number(ends[0])} to {format_number(ends[1])}"
    first = math.ceil(low)
    if high is None:
        return f"{first:,} and more"
    last = math.ceil(high) - 1
    return f"{first:,}" if last <= first else f"{first:,} to {last:,}"


def _significant_bins(breakdown: Breakdown) -> Bools:
    tokens = np.array(breakdown.tokens)
    many: Bools = tokens >= _MIN_SHARE * tokens.sum()
    return many


_DEFAULT_LIMITS = 1e-6, 1.0


def _axis_limits(sides: Mapping[str, Breakdown], values: Mapping[str, Float64s]) -> tuple[float, float]:
    """Return the limits of the K3 axis, based on bins with enough tokens."""
    kept = [values[side][_significant_bins(breakdown) & (values[side] > 0)] for side, breakdown in sides.items()]
    shown = np.concatenate(kept)
    if not len(shown):
        shown = np.concatenate([k3[k3 > 0] for k3 in values.values()])
    if not len(shown):  # no bin has a positive value
        return _DEFAULT_LIMITS
    drawn = {side: breakdown for side, breakdown in sides.items() if np.isfinite(values[side]).any()}
    reach = [
        np.nanmax(values[side] + BAND_STANDARD_ERRORS * np.nan_to_num(to_floats(b.k3_se))) for side, b in drawn.items()
    ]
    most = float(max(np.nanmax(values[side]) for side in drawn))
    top = min(float(max(reach)), 10 * most) if len(sides) == 1 else float(shown.max())
    return float(shown.min()) / 2, max(top, float(shown.max())) * 1.5


def _run_data(breakdown: Breakdown, words: BreakdownStyle) -> FigureData:
    rows = [
        (format_bin(breakdown, index), breakdown.tokens[index], breakdown.k3[index], breakdown.k3_se[index])
        for index in range(len(breakdown.low))
    ]
    return FigureData((words.axis, "tokens", "mean K3 (nats/token)", "standard error"), tuple(rows))


def _breakdown_data(sides: Mapping[str, Breakdown]) -> FigureData:
    rows: dict[str, dict[str, DataCell]] = {}
    for side, breakdown in sides.items():
        for index, k3 in enumerate(breakdown.k3):
            rows.setdefault(format_bin(breakdown, index), {})[side] = k3
    heads = (find_quantity(next(iter(sides.values())).quantity).axis, *(f"{side} (nats/token)" for side in sides))
    return FigureData(heads, tuple((text, *(row.get(side) for side in sides)) for text, row in rows.items()))


def bin_positions(breakdown: Breakdown) -> tuple[Float64s, list[tuple[float, str]]]:
    """Return the bin centers on a log10 axis, and the ticks."""
    low = np.array(breakdown.low)
    high = to_floats(breakdown.high)
    high = np.where(np.isnan(high), 2 * np.maximum(low, 1), high)
    if breakdown.quantity == "surprisal":
        return _probability_positions(low, high)
    if breakdown.quantity == "length":  # bins hold whole numbers
        high = np.maximum(high - 1, low)
    where = np.log10(np.sqrt(np.maximum(low, high / 2) * high))
    if len(where) == 1:  # label the bin, because its center is not a familiar number
        return where, [(float(where[0]), format_bin(breakdown, 0))]
    ticks = log_ticks(10.0 ** float(where.min()), 10.0 ** float(where.max()))
    inside = [tick for tick in ticks if where.min() - 0.02 <= math.log10(tick) <= where.max() + 0.02]
    return where, [(math.log10(tick), format_power(tick)) for tick in inside]


def _probability_positions(low: Float64s, high: Float64s) -> tuple[Float64s, list[tuple[float, str]]]:
    """Return mirrored log positions of surprisal bins, and probability ticks."""
    where = -np.log10(np.sqrt(np.maximum(low, high / 2) * high))
    ticks = [(-math.log10(-math.log(p)), text) for p, text in _PROBABILITY_TICKS]
    return where, [(place, text) for place, text in ticks if where.min() <= place <= where.max()]


_PROBABILITY_TICKS = [
    (1e-6, "10⁻⁶"), (1e-2, "0.01"), (0.2, "0.2"), (0.6, "0.6"), (0.9, "0.9"), (0.99, "0.99"), (0.999, "0.999"),
]  # fmt: skip
