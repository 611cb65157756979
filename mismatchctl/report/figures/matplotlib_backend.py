"""Figures drawn with matplotlib, for notebooks and for image files."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mismatchctl.core.formatting import escape_markdown, file_stems, shorten_exponents
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.io.files import CAPTIONS_FILE, TOOL_NAME
from mismatchctl.report.document import Document, Figures
from mismatchctl.report.figures.figure import MUTED, Axis, Figure, Marks, ReferenceLine, to_floats
from mismatchctl.report.figures.runs import run_figures
from mismatchctl.results.model import RunResult

SERIES_COLORS = (
    "#2166ac", "#c4570f", "#1b7f5c", "#8e4aa8", "#9a6f05", "#c2366b", "#2f83ad", "#7a6a53", "#5f7d14", "#6565d0",
)  # fmt: skip
INK, GRAY = "#1b2330", "#566172"
_RAMP = LinearSegmentedColormap.from_list("ramp", ["#dcebf7", "#82b4da", "#2a6ba5", "#0a3767"])
_SIZES = {"normal": (6.0, 3.8), "wide": (8.0, 3.8), "square": (5.0, 5.0)}
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif", "font.sans-serif": "DejaVu Sans", "font.size": 10, "text.parse_math": False,
    "text.hinting": "none", "text.color": INK, "axes.titleweight": "bold", "axes.spines.top": False,
    "axes.spines.right": False, "axes.labelsize": 11, "axes.edgecolor": GRAY, "axes.labelcolor": GRAY,
    "xtick.bottom": False, "ytick.left": False, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "figure.dpi": 72, "savefig.dpi": 300, "svg.hashsalt": "mismatchctl", "svg.fonttype": "none", "pdf.fonttype": 42,
}  # fmt: skip


def draw_figure(run: RunResult, name: str) -> Canvas:
    found = {figure.name: figure for figure in chain(*run_figures(run).values())}
    if name not in found:
        raise ConfigError(f"unknown figure {name!r}{suggestion(name, found)}; known: {', '.join(found) or 'none'}")
    with draw_with_matplotlib(found[name]) as canvas:
        return canvas


@contextmanager
def draw_with_matplotlib(figure: Figure) -> Iterator[Canvas]:
    """Draw a figure with matplotlib. Matplotlib settings of the user do not change it."""
    with style.context(["default", _STYLE]), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield _draw(figure)


def _draw(figure: Figure) -> Canvas:
    width, height = _SIZES[figure.size]
    names = dict.fromkeys(name for mark in figure.marks for name in mark.y) if figure.y.scale == "band" else {}
    rows = {name: row for row, name in enumerate(names)}
    canvas = Canvas(figsize=(width, max(height, 1.2 + 0.24 * len(rows))), layout="constrained")
    axes = canvas.subplots()
    axes.set_title(figure.title, fontsize="medium", loc="left", wrap=True)
    for which, axis in (("x", figure.x), ("y", figure.y)):
        _set_axis(axes, which, axis, list(rows))
    if figure.size == "square":
        axes.set_aspect("equal")
    for mark in figure.marks:
        _draw_mark(axes, mark, rows)
    for which, axis in (("x", figure.x), ("y", figure.y)):
        if axis.scale == "log" and not axis.ticks:
            _place_log_ticks(axes, which)
    limits, labels = axes.get_ylim(), list(axes.texts)
    for rule in figure.rules:
        _draw_rule(axes, rule)
    if any(rule.style == "usual" for rule in figure.rules):
        axes.set_ylim(limits)
    if len([mark for mark in figure.marks if mark.name]) > 1:
        legend: Any = (canvas if rows else axes).legend  # rows fill all of the axes
        legend(loc="outside lower center" if rows else "best", fontsize="x-small", frameon=False, ncols=2 + bool(rows))
    if len(labels) > 1:
        _place_labels(canvas, axes, labels)
    return canvas


def _place_labels(canvas: Canvas, axes: Any, labels: list[Any]) -> None:
    """Move labels that overlap. If there is not enough space for a label, remove it."""
    canvas.draw_without_rendering()
    taken = [text.get_window_extent() for text in axes.texts if text not in labels]
    beside = [(5, y, "left") for y in (-10, 15, -21, 26, -32)]
    for label in labels:
        for x, y, side in ((5, 4, "left"), (-5, 4, "right"), (0, 9, "center"), (0, -14, "center"), *beside):
            label.set(position=(x, y), ha=side)
            box = label.get_window_extent()
            if box.x0 >= axes.bbox.x0 and box.x1 <= canvas.bbox.x1 and not box.count_overlaps(taken):
                taken.append(box)
                break
        else:
            label.remove()


def _set_axis(axes: Any, which: str, axis: Axis, rows: list[Any]) -> None:
    holder = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}label")(axis.label)
    if axis.scale == "band":
        step = math.ceil(len(rows) / 40)
        axes.set_yticks(range(0, len(rows), step), rows[::step])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        return
    bend = {"linthresh": axis.linear_to, "linscale": 0.6} if axis.scale == "symlog" else {}
    getattr(axes, f"set_{which}scale")(axis.scale, **bend)
    if rows and axis.scale == "linear":
        holder.set_major_locator(MaxNLocator(5))
    if axis.limits is not None:
        getattr(axes, f"set_{which}lim")(*axis.limits)
    if axis.ticks:
        step = math.ceil(len(axis.ticks) / 10)
        holder.set_ticks([at for at, _ in axis.ticks[::step]], [text for _, text in axis.ticks[::step]])
        holder.set_minor_locator(NullLocator())
    elif axis.percent:
        holder.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    elif axis.scale == "log":
        holder.set_major_formatter(FuncFormatter(_format_log))


def _format_log(value: float, _: int | None = None) -> str:
    return shorten_exponents(f"{value:g}")


def _place_log_ticks(axes: Any, which: str) -> None:
    """Place ticks at powers of ten. On a short axis, also place ticks at 2 and 5 times these powers."""
    holder, (low, high) = getattr(axes, f"{which}axis"), getattr(axes, f"get_{which}lim")()
    decades = math.log10(high / low)
    subs = (1.0,) if decades > 2 else (1.0, 2.0, 5.0)
    holder.set_major_locator(LogLocator(subs=subs) if decades > 0.5 else MaxNLocator(5))
    holder.set_minor_locator(NullLocator())


def _colors(color: int) -> str:
    return GRAY if color == MUTED else SERIES_COLORS[color % len(SERIES_COLORS)]


def _draw_mark(axes: Any, mark: Marks, rows: Mapping[Any, int]) -> None:
    color, bars = _colors(mark.color), len(mark.low) > 0
    x, low, high, values = map(to_floats, (mark.x, mark.low, mark.high, mark.values))
    y = to_floats([rows[name] + mark.shift / 34 for name in mark.y] if rows else mark.y)  # a row has at least 17 points
    if mark.kind == "line":
        dashes, dot = ":" if mark.dashed else "-", "o" if len(x) < 3 else ""
        axes.plot(x, y, color=color, linewidth=1.5, linestyle=dashes, label=mark.name, marker=dot, markersize=3)
        if bars:
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    elif mark.kind == "stairs":
        axes.stairs(y, x, color=color, label=mark.name, baseline=None)
    elif mark.kind == "hexagons":
        angles, radius = np.pi / 6 + np.pi / 3 * np.arange(6), mark.shift / math.sqrt(3) * 1.02
        corners = np.stack([x[:, None] + radius * np.cos(angles), y[:, None] + radius * np.sin(angles)], axis=2)
        norm = LogNorm(1, max(values.max(), 2))
        cells = axes.add_collection(PolyCollection(list(corners), array=values, cmap=_RAMP, norm=norm, linewidths=0))
        axes.plot([0, 1], [0, 1], color=GRAY, linestyle="--", linewidth=0.9)
        key = axes.figure.colorbar(cells, ax=axes, shrink=0.7, label=mark.name, format=FuncFormatter(_format_log))
        key.ax.yaxis.set_minor_locator(NullLocator())
    else:
        if bars:
            draw, place = (axes.hlines, y) if mark.across else (axes.vlines, x)
            draw(place, low, high, color=color, alpha=0.5, linewidth=1.4)
        face = "white" if mark.hollow else color
        axes.plot(x, y, "o", color=color, markerfacecolor=face, markersize=4, label=mark.name)
        for across, up, text in zip(x, y, () if mark.hollow else mark.labels, strict=False):
            if text and np.isfinite((across, up)).all():
                axes.annotate(text, (across, up), (5, 4), textcoords="offset points", fontsize="x-small")


def _draw_rule(axes: Any, rule: ReferenceLine) -> None:
    span, line = (axes.axvspan, axes.axvline) if rule.axis == "x" else (axes.axhspan, axes.axhline)
    color = _colors(rule.color)
    if rule.interval is not None:
        span(*rule.interval, color=color, alpha=0.08 if rule.style == "usual" else 0.15, linewidth=0)
    if rule.at is not None:
        line(rule.at, color=color, linewidth=1, linestyle=":" if rule.style == "limit" else "--")
    if rule.text and rule.style != "usual":
        places: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(rule.text, (rule.at, 1), (3, -10), fontsize="x-small", color=color, **places)


def figures_of_page(document: Document) -> dict[str, Figure]:
    found = [figure for part in document.parts(Figures) for figure in part.figures]
    return dict(zip(file_stems([figure.name for figure in found]), found, strict=True))


def figure_files(figures: Mapping[str, Figure], kind: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield each file to write, as (name, function that returns its content): pictures, CSV files, and the captions."""
    for stem, figure in figures.items():
        yield f"{stem}.{kind}", lambda figure=figure: figure_content(figure, kind)  # type: ignore[misc]
        yield f"{stem}.csv", lambda figure=figure: figure.csv().encode()  # type: ignore[misc]
    yield CAPTIONS_FILE, lambda: _format_captions(figures, kind).encode()


def _format_captions(figures: Mapping[str, Figure], kind: str) -> str:
    lines = [f"<!-- {TOOL_NAME} -->", "", "Shaded bands and error bars are 95% intervals.", ""]
    for stem, figure in figures.items():
        heading = f"## [{escape_markdown(figure.title)}]({stem}.{kind})"
        lines += [heading, "", escape_markdown(figure.caption), "", f"[Numbers]({stem}.csv)", ""]
    return "\n".join(lines)


def figure_content(figure: Figure, kind: str) -> bytes:
    """Return the figure as an `svg`, `png` or `pdf` file. The same figure gives the same bytes."""
    stream = io.BytesIO()
    metadata: dict[str, dict[str, Any]] = {
        "pdf": {"Creator": None, "Producer": TOOL_NAME, "CreationDate": None, "Title": figure.title},
        "svg": {"Creator": TOOL_NAME, "Date": None, "Title": figure.title, "Description": figure.alt},
        "png": {"Software": TOOL_NAME},
    }
    with draw_with_matplotlib(figure) as drawn:
        drawn.savefig(stream, format=kind, metadata=metadata[kind])
    content = stream.getvalue()
    return f"<!-- {TOOL_NAME} -->\n".encode() + content[content.index(b"<svg") :] if kind == "svg" else content
