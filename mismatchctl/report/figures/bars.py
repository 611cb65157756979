"""Dot and bar charts: corrections compared, contributions of parts, errors of advice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatchctl.api.advise.advice import RunAdvice
from mismatchctl.api.compare.comparison import Contribution, Decomposition, format_signed
from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.formatting import escape_terminal, format_label, format_number, shorten
from mismatchctl.frameworks.registry import load_presets
from mismatchctl.report.figures.figure import DataCell, Figure, FigureData
from mismatchctl.report.figures.series import BAND_STANDARD_ERRORS, to_floats
from mismatchctl.report.figures.svg import (
    LEGEND_ROW_HEIGHT,
    LETTER_WIDTH,
    MUTED,
    RAMP,
    SERIES,
    SURFACE,
    Canvas,
    FigureLayout,
    area_style,
    format_percent,
    format_plain,
)
from mismatchctl.report.figures.sweep import label_points
from mismatchctl.results.model import Value

MAX_PARTS = 24
"""Maximum number of bars. The largest contributions are shown."""
_LEVEL_MIX_COLORS = (SERIES[0], RAMP[3])
"""Colors of level and mix, dark and light so that they differ in grayscale."""


def contributions_figure(decomposition: Decomposition, name: str) -> Figure | None:
    """Draw the contributions to a change of K3, split into level and mix, if K3 changed."""
    parts = order_parts(decomposition)
    if not any(part.total for part in parts):
        return None
    level, mix = to_floats([part.level for part in parts]), to_floats([part.mix for part in parts])
    reach = BAND_STANDARD_ERRORS * np.nan_to_num(to_floats([part.se for part in parts]))
    ends = np.concatenate([level, mix, level + mix - reach, level + mix + reach, [0.0]])
    where = np.arange(len(parts), dtype=np.float64)
    names = [_tick_label(decomposition, part) for part in parts]

    def paint(canvas: Canvas) -> None:
        margin = 0.06 * (ends.max() - ends.min())
        canvas.linear("y", float(ends.min() - margin), float(ends.max() + margin))
        sides = (level, mix, _LEVEL_MIX_COLORS[0]), (mix, level, _LEVEL_MIX_COLORS[1])
        for shift, (values, _, color) in zip((-0.2, 0.2), sides, strict=True):
            canvas.polygons(_bar_corners(where + shift, values), [color] * len(values))
        canvas.bars(where, level + mix - reach, level + mix + reach, color=MUTED, width=1.2)
        canvas.line([0, 1], [0, 0], color=MUTED, width=0.9, space="up")
        step = max(math.ceil(len(parts) / 6), math.ceil((max(map(len, names)) + 2) * len(parts) / 46))
        canvas.ticks("x", list(where[::step]), lambda place: names[int(place)], (-0.7, len(parts) - 0.3))
        canvas.axis_titles(_axis_title(decomposition), "contribution (nats/token)")
        canvas.legend(
            [(text, area_style(color)) for text, color in zip(("level", "mix"), _LEVEL_MIX_COLORS, strict=True)]
        )

    noun = "probability" if decomposition.quantity == "surprisal" else shorten(decomposition.quantity, 40)
    largest = max(range(len(parts)), key=lambda index: abs(parts[index].total))
    moved = " of ".join(format_signed(change) for change in (parts[largest].total, decomposition.difference))
    return Figure(
        name, f"{noun[:1].upper()}{noun[1:]} {names[largest]} moves K3 most: {moved} nats/token",
        f"What the change is made of, by {noun}",
        "Level: K3 there is larger or smaller. Mix: more or fewer tokens are there. All bars add up to the change; "
        "lines are ± 2 standard errors of both together.",
        escape_terminal(
            f"Bars of the contribution to the change of K3 by {noun}, {names[0]} to {names[-1]}; largest at "
            f"{names[largest]}: {moved} nats/token."
        ),
        FigureData((_axis_title(decomposition), "level (nats/token)", "mix (nats/token)", "standard error of both"),
                   tuple((text, part.level, part.mix, part.se) for text, part in zip(names, parts, strict=True))),
        paint, FigureLayout(below=LEGEND_ROW_HEIGHT),
    )  # fmt: skip


def _bar_corners(where: Any, values: Any) -> Any:
    """Return rectangles [N, 4, 2] from 0 to the values."""
    left, right, zero = where - 0.19, where + 0.19, np.zeros_like(values)
    return np.stack(
        [np.column_stack(corner) for corner in ((left, zero), (right, zero), (right, values), (left, values))], axis=1
    )


def order_parts(decomposition: Decomposition) -> list[Contribution]:
    """Sort the parts by their position on the axis, keeping the largest if there are too many."""
    parts = decomposition.parts if decomposition.parts[0].low is not None else decomposition.parts[:MAX_PARTS]
    return sorted(parts, key=_part_position, reverse=decomposition.quantity == "surprisal")


def _part_position(part: Contribution) -> tuple[int, float, str]:
    if part.low is not None:
        return 0, part.low, ""
    number_like = isinstance(part.label, (int, float))
    return (0, float(part.label or 0), "") if number_like else (1, 0.0, format_label(part.label))


def _tick_label(decomposition: Decomposition, part: Contribution) -> str:
    if part.low is None:
        return shorten(format_label(part.label), 12)
    if decomposition.quantity == "surprisal":
        return format_number(math.exp(-part.low)) if part.low else "1"
    return f"{math.ceil(part.low):,}"


def _axis_title(decomposition: Decomposition) -> str:
    return {
        "surprisal": "rollout probability of the token, up to",
        "position": "position in the response, from",
        "length": "length of the response, from",
    }.get(decomposition.quantity, shorten(decomposition.quantity, 40))


_MAX_NAME_LENGTH = 22
_ROW_HEIGHT = 20.0
"""Height of a row in points."""
_BARS_NOTE = "Bars are ± 2 standard errors."


@dataclass(frozen=True)
class DotPlot:
    """One or two metrics per correction, drawn as a filled and a hollow dot.

    Attributes:
        message: template with the placeholders {name} and {value}.
        smallest: True if the message is about the smallest value, not the largest.
        reference: value of the reference line. The message is then about the value farthest from it.
    """

    name: str
    subject: str
    axis: str
    keys: tuple[tuple[str, str], ...]
    share: bool = False
    reference: float | None = None
    log: bool = False
    caption: str = ""
    message: str = ""
    smallest: bool = False


CORRECTION_PLOTS = (
    DotPlot(
        "rejected", "What each correction rejects", "share rejected",
        (("rejected_tokens", "tokens"), ("fully_rejected_sequences", "whole sequences")), share=True,
        caption="The data that is thrown away.", message="{name} rejects most: {value} of tokens",
    ),
    DotPlot(
        "ess-after", "Effective sample size after", "share left, in effect",
        (("ess_token", "tokens"), ("ess_sequence", "sequences")), share=True,
        caption="What weighting and rejection together leave of the data; further right is cheaper.",
        message="{name} leaves least of the tokens: {value}", smallest=True,
    ),
    DotPlot(
        "scale", "Bias: mean weight and loss scale", "ratio",
        (("weight_mean", "mean weight"), ("loss_scale", "loss scale")), reference=1.0,
        caption="1 is unbiased. Below 1 the bound takes away more than it gives, or rejected tokens stay in the "
        "denominator.", message="Mean weight is farthest from 1 under {name}: {value}",
    ),
    DotPlot(
        "k3-kept", "K3 of what is kept", "K3 (nats/token)", (("k3_kept", "K3 of kept tokens"),), log=True,
        caption="The mismatch that remains in the data that trains.",
        message="{name} leaves the smallest K3: {value}", smallest=True,
    ),
)  # fmt: skip

SELECTION_PLOTS = tuple(
    DotPlot(
        f"kept-{name}", f"Mean {name}, kept against rejected", axis,
        ((f"kept_{name}", "kept"), (f"rejected_{name}", "rejected")),
        caption="Where the two differ beyond their bars, rejection selects, and changes what is learned.",
    )
    for name, axis in (("reward", "mean reward"), ("advantage", "mean advantage"), ("length", "mean length (tokens)"))
)  # fmt: skip


def sides_plot(by: str) -> DotPlot:
    """Return the plot of each side's error against a reference, by `by`."""
    return DotPlot(
        f"errors-by-{by}", f"Errors against the reference by {by}", "root mean square error (nats)",
        (("rollout", "rollout"), ("train", "train")), log=True,
        caption="Whose dots lie further right is further from the reference there.",
        message=f"{by} {{name}} has the rollout's largest error: {{value}}",
    )  # fmt: skip


def dots_figure(dots: DotPlot, corrections: Mapping[str, Mapping[str, Value]], name: str) -> Figure | None:
    """Draw one dot plot, if a correction has every metric of the plot."""
    rows = {
        correction: [values.get(key, Value(value=None)) for key, _ in dots.keys]
        for correction, values in corrections.items()
    }
    complete = [values for values in rows.values() if all(value.value is not None for value in values)]
    if not complete or (dots.log and not any((v.value or 0) > 0 for values in complete for v in values)):
        return None
    names = [shorten(correction, _MAX_NAME_LENGTH) for correction in rows]
    two = len(dots.keys) > 1
    height = 70 + _ROW_HEIGHT * len(rows) + (LEGEND_ROW_HEIGHT if two else 0)
    layout = FigureLayout(height, left=12 + LETTER_WIDTH * max(map(len, names)), below=LEGEND_ROW_HEIGHT if two else 0)

    def paint(canvas: Canvas) -> None:
        canvas.ticks("y", range(len(rows)), lambda place: names[int(place)], (len(rows) - 0.4, -0.6))
        _add_value_axis(canvas, dots, [value for values in rows.values() for value in values])
        if dots.reference is not None:
            canvas.reference_line([dots.reference] * 2, [len(rows) - 0.4, -0.6])
        for index in range(len(dots.keys)):
            _draw_metric(
                canvas, index, [values[index] for values in rows.values()], 0.16 * (2 * index - 1) if two else 0
            )
        canvas.axis_titles(dots.axis)
        if two:
            canvas.legend([(text, _dot_style(index)) for index, (_, text) in enumerate(dots.keys)])

    return Figure(
        name, _plot_message(dots, rows), dots.subject, _plot_caption(dots, rows), _alt_text(dots, rows),
        _plot_data(dots, rows), paint, layout,
    )  # fmt: skip


def _plot_caption(dots: DotPlot, rows: Mapping[str, Sequence[Value]]) -> str:
    bars = any(value.se for values in rows.values() for value in values)
    return f"{dots.caption} {_BARS_NOTE}" if bars else dots.caption


def _dot_style(index: int) -> dict[str, Any]:
    """Return the style of a filled or a hollow dot."""
    face = SERIES[index] if index == 0 else SURFACE
    return {"dash": "", "mark": "o", "size": 6, "color": SERIES[index], "face": face, "edge": 1.5}


def _draw_metric(canvas: Canvas, index: int, values: Sequence[Value], shift: float) -> None:
    """Draw one metric of every correction, dots above error bars."""
    known = [
        (place + shift, v.value, BAND_STANDARD_ERRORS * (v.se or 0.0))
        for place, v in enumerate(values)
        if v.value is not None
    ]
    low, high = canvas.axis("x").limits
    bars = np.array([(y, max(x - reach, low), min(x + reach, high)) for y, x, reach in known if reach]).reshape(-1, 3)
    canvas.bars(*bars.T, across=True, color=SERIES[index], width=1.6, opacity=0.55)
    canvas.line([x for _, x, _ in known], [y for y, _, _ in known], clip=False, order=4, **_dot_style(index))


def _add_value_axis(canvas: Canvas, dots: DotPlot, values: Sequence[Value]) -> None:
    known = [(value.value, BAND_STANDARD_ERRORS * (value.se or 0.0)) for value in values if value.value is not None]
    if dots.log:
        positive = [value for value, _ in known if value > 0]
        canvas.log("x", min(positive) / 2, max(value + se for value, se in known) * 1.5)
        return
    if dots.share:
        top = min(1.0, max([value + se for value, se in known] + [1e-3]))
        canvas.linear("x", -0.03 * top, 1.05 * top, format_percent, 5)
        return
    ends = [value + side * min(se, 3 * abs(value) + 1) for value, se in known for side in (-1, 1)]
    ends += [] if dots.reference is None else [dots.reference]
    margin = 0.05 * (max(ends) - min(ends)) or 0.05
    canvas.linear("x", min(ends) - margin, max(ends) + margin, format_plain, 5)


def _plot_message(dots: DotPlot, rows: Mapping[str, Sequence[Value]]) -> str:
    """Return the message about the most extreme correction."""
    if not dots.message:
        return _selection_message(dots, rows)
    first = {name: values[0].value for name, values in rows.items() if values[0].value is not None}
    if not first:
        return dots.subject
    far = {name: abs(value - dots.reference) if dots.reference is not None else value for name, value in first.items()}
    if len(set(far.values())) == 1:
        label, value = dots.keys[0][1], next(iter(first.values()))
        return f"{label[:1].upper()}{label[1:]}: {_format_value(dots, value)} for all"
    name = (min if dots.smallest else max)(far, key=far.__getitem__)
    return dots.message.format(name=shorten(name, 40), value=_format_value(dots, first[name]))


def _selection_message(dots: DotPlot, rows: Mapping[str, Sequence[Value]]) -> str:
    noun = dots.subject.partition(",")[0].lower()
    distance = {}
    for name, (kept, rejected) in rows.items():
        if kept.value is not None and rejected.value is not None:
            error = float(np.hypot(kept.se or 0.0, rejected.se or 0.0))
            distance[name] = (rejected.value - kept.value) / error if error else 0.0
    name = max(distance, key=lambda key: abs(distance[key]))
    if abs(distance[name]) < BAND_STANDARD_ERRORS:
        return f"The {noun} of what is rejected is that of what is kept, within the errors"
    kept, rejected = rows[name]
    word = "higher" if distance[name] > 0 else "lower"
    values = " against ".join(_format_value(dots, value.value) for value in (rejected, kept))
    return f"{shorten(name, 40)} rejects a {word} {noun}: {values}"


def _format_value(dots: DotPlot, value: float | None) -> str:
    return format_number(value, "fraction" if dots.share else "")


def _alt_text(dots: DotPlot, rows: Mapping[str, Sequence[Value]]) -> str:
    descriptions = []
    for name, values in rows.items():
        shown = [
            f"{text} {_format_value(dots, value.value)}" for (_, text), value in zip(dots.keys, values, strict=True)
        ]
        descriptions.append(f"{shorten(name, 40)}: {', '.join(shown)}.")
    return escape_terminal(f"Dots of {dots.axis} by correction. {' '.join(descriptions)}")


def _plot_data(dots: DotPlot, rows: Mapping[str, Sequence[Value]]) -> FigureData:
    heads = ["correction"]
    for _, text in dots.keys:
        heads += [f"{text} ({dots.axis})", "standard error"]
    cells: list[tuple[DataCell, ...]] = []
    for name, values in rows.items():
        cells.append((name, *(cell for value in values for cell in (value.value, value.se))))
    return FigureData(tuple(heads), tuple(cells))


_LOG_AXIS_SPAN = 4.0
"""Axes that span more than this factor are logarithmic."""


def advice_figure(advice: RunAdvice, name: str) -> Figure | None:
    """Draw bias and variance of all candidates, if they are ranked."""
    if not advice.advice:
        return None
    errors = {own: (bias2, variance) for own, (bias2, variance, _) in advice.front.items()}
    errors |= {own.name: (max(own.bias2, 0.0), own.variance) for own in (*advice.advice, *advice.yours)}
    names, first = list(errors), advice.advice[0]
    shipped = set(load_presets()) - {"none"}
    advised, yours = ({own.name for own in group} for group in (advice.advice, advice.yours))
    bias2, variance = np.array([errors[own] for own in names]).T
    scale = advice.uncorrected
    x, y = bias2 / scale, variance / scale

    def paint(canvas: Canvas) -> None:
        low, high = _add_axis(canvas, "x", x)
        bottom, top = _add_axis(canvas, "y", y)
        shown = np.maximum(x, low)
        even = (np.geomspace if low > 0 else np.linspace)(low, high, 200)
        level = (first.mse) / scale - even
        inside = (level >= bottom) & (level <= top)
        canvas.reference_line(even[inside], level[inside])
        front = np.flatnonzero(_pareto_points(x, y))
        front = front[np.lexsort((-y[front], x[front]))]
        canvas.line(shown[front], y[front], color=MUTED, width=0.8, opacity=0.6)
        styles: tuple[tuple[set[str] | None, dict[str, Any]], ...] = (
            (None, {"mark": "o", "size": 3, "color": MUTED, "opacity": 0.6}),
            (shipped, {"mark": "D", "size": 4, "color": MUTED}),
            (advised, {"mark": "o", "size": 6, "color": SERIES[0]}),
            (yours, {"mark": "s", "size": 6, "color": SERIES[1]}),
        )
        for group, style in styles:
            chosen = [i for i, own in enumerate(names) if (own in group if group is not None else True)]
            canvas.line(shown[chosen], y[chosen], dash="", clip=False, **style)
        named = [names.index(own) for own in dict.fromkeys([first.name, *sorted(yours), "none", *sorted(advised)])]
        short = {"none": "no correction"} | ({next(iter(yours)): "yours"} if len(yours) == 1 else {})
        label_points(canvas, shown, y, np.array(named), [short.get(own, own) for own in names], before=1 + len(yours))
        canvas.axis_titles("bias² (more data does not take it away)", "variance (more data does)")

    standing = [_describe_standing(own, advised, yours, shipped) for own in names]
    rows = tuple(zip(names, x.tolist(), y.tolist(), standing, strict=True))
    more = f", of {len(names)} candidates" if len(names) > 1 else ""
    title = f"{escape_terminal(first.name)} is advised{more}"
    return Figure(
        name, title, "error of one update's gradient; that of no correction is 1",
        "Large dots are advised, squares yours, diamonds what frameworks ship; the thin line is the front, which none "
        "beats in both. Below the dashed line is less error than the advised has. Bias that cannot be told from 0 "
        "stands at the left.",
        f"Points by squared bias and variance, {len(names)} corrections. {title}.",
        FigureData(("correction", "bias²", "variance", "standing"), rows), paint,
    )  # fmt: skip


def _add_axis(canvas: Canvas, which: str, values: Float64s) -> tuple[float, float]:
    """Add an axis for the values and return its limits. On a log axis, values up to 0 are drawn at the lower end."""
    above = values[values > 0]
    least, most = (float(above.min()), float(above.max())) if len(above) else (0.0, 1.0)
    if least > 0 and most / least > _LOG_AXIS_SPAN:
        low, high = least / 1.5, most * (2.5 if which == "x" else 1.5)  # space for names on the right
        canvas.log(which, low, high)
        return low, high
    room = 0.1 * (most - float(values.min())) or 0.1 * most
    low, high = float(values.min()) - room, most + room
    canvas.linear(which, low, high, format_plain, 5)
    return low, high


def _describe_standing(own: str, advised: set[str], yours: set[str], shipped: set[str]) -> str:
    return "yours" if own in yours else "advised" if own in advised else "preset" if own in shipped else "candidate"


def _pareto_points(x: Float64s, y: Float64s) -> Bools:
    """Return True for each point on the Pareto front."""
    less = (x[:, None] <= x) & (y[:, None] <= y) & ((x[:, None] < x) | (y[:, None] < y))
    return np.asarray(~less.any(axis=0))
