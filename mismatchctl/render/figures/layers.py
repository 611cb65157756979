"""How far both sides are apart after each layer, as a comparator measured it."""

from __future__ import annotations

from mismatchctl.frameworks.layers import LayerReport
from mismatchctl.numbers import number
from mismatchctl.render.figures.canvas import Canvas
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.theme import SERIES
from mismatchctl.render.text import clean


def layers_figure(report: LayerReport, name: str) -> Figure | None:
    """The largest value of each layer; None where fewer than two are above 0."""
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
            canvas.rule([place] * 2, [low, high])
        canvas.series(0, layers, values, color=SERIES[0])
        canvas.labels("layer", clean(report.measure.partition(",")[0]))

    most = max(known, key=lambda one: one[1])
    parted = "" if place is None else f"; they part at layer {place}"
    title = f"{number(values[0])} after layer {layers[0]}, {number(most[1])} after layer {most[0]}{parted}"
    return Figure(
        name, title, f"difference after each layer, {clean(report.measure)}",
        "What grows evenly is noise that adds up; a step is where something is computed otherwise.",
        f"A line over {len(known)} layers: {title}.",
        Data(("layer", "difference"), tuple(known)), paint,
    )  # fmt: skip
