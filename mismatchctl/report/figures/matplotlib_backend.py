"""Figures drawn with matplotlib, for notebooks and for files with their numbers and captions."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParamsDefault
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mismatchctl.core.formatting import escape_markdown, file_stems
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.io.files import CAPTIONS_FILE, TOOL_NAME
from mismatchctl.report.document import Document, Figures
from mismatchctl.report.figures.figure import MUTED, Axis, Figure, Marks, ReferenceLine
from mismatchctl.report.figures.runs import run_figures
from mismatchctl.results.model import RunResult

SERIES_COLORS = (
    "#2166ac", "#c4570f", "#1b7f5c", "#8e4aa8", "#9a6f05", "#c2366b", "#2f83ad", "#7a6a53", "#5f7d14", "#6565d0",
)  # fmt: skip
INK, GRAY, GRID, SURFACE = "#1b2330", "#566172", "#e3e7ec", "#ffffff"
_RAMP = LinearSegmentedColormap.from_list("ramp", ["#dcebf7", "#82b4da", "#2a6ba5", "#0a3767"])
_SIZES = {"normal": (6.0, 3.8), "wide": (8.0, 3.8), "square": (5.0, 5.0)}
_OF_WINDOWS = ("backend", "interactive", "toolbar")
"""Settings that would load a matplotlib backend. They are not changed."""
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif", "font.sans-serif": "DejaVu Sans", "font.size": 10, "text.parse_math": False,
    "text.hinting": "none", "axes.titleweight": "bold", "axes.unicode_minus": True, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False, "axes.axisbelow": True,
    "axes.labelsize": 11, "xtick.bottom": False, "ytick.left": False, "xtick.labelsize": 10.5, "ytick.labelsize": 10.5,
    "xtick.major.pad": 3, "ytick.major.pad": 3, "figure.dpi": 72, "savefig.dpi": 300, "savefig.facecolor": "white",
    "svg.hashsalt": "mismatchctl", "svg.fonttype": "none", "pdf.fonttype": 42, "text.color": INK,
    "axes.edgecolor": GRAY, "axes.labelcolor": GRAY, "grid.color": GRID, "xtick.color": GRAY, "ytick.color": GRAY,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.facecolor": SURFACE, "figure.facecolor": SURFACE,
}  # fmt: skip


def draw_figure(run: RunResult, name: str) -> Canvas:
    """Return a figure of a report as a matplotlib figure, for example `k3`, `distribution` or `k3_by_position`."""
    found = {figure.name: figure for figure in chain(*run_figures(run).values())}
    if name not in found:
        raise ConfigError(f"unknown figure {name!r}{suggestion(name, found)}; known: {', '.join(found) or 'none'}")
    with draw_with_matplotlib(found[name]) as canvas:
        return canvas


@contextmanager
def draw_with_matplotlib(figure: Figure) -> Iterator[Canvas]:
    """Draw with matplotlib, independent of the user's settings."""
    with rc_context(_settings()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield _draw(figure)


@cache
def _settings() -> Any:
    kept = {name: value for name, value in dict.items(rcParamsDefault) if not name.startswith(_OF_WINDOWS)}
    return kept | _STYLE


def _draw(figure: Figure) -> Canvas:
    width, height = _SIZES[figure.size]
    bands = {which: _band_names(figure, which) for which in ("x", "y")}
    height = max(height, 1.2 + 0.24 * len(bands["y"]))
    canvas = Canvas(figsize=(width, height), layout="constrained")
    axes = canvas.subplots()
    axes.set_title(figure.title, fontsize="medium", loc="left", wrap=True)
    for which, axis in (("x", figure.x), ("y", figure.y)):
        _set_axis(axes, which, axis, bands[which])
    if figure.size == "square":
        axes.set_aspect("equal")
    for mark in figure.marks:
        _DRAWERS[mark.kind](axes, mark, _colors(mark.color), bands)
    for which, axis in (("x", figure.x), ("y", figure.y)):
        if axis.scale == "log" and not axis.ticks:
            _place_log_ticks(axes, which)
    limits = axes.get_ylim()
    for rule in figure.rules:
        _draw_rule(axes, rule)
    if any(rule.style == "usual" for rule in figure.rules):
        axes.set_ylim(limits)
    if len([mark for mark in figure.marks if mark.name]) > 1:
        axes.legend(fontsize="x-small", frameon=False, ncols=2)
    return canvas


def _band_names(figure: Figure, which: str) -> list[Any]:
    if getattr(figure, which).scale != "band":
        return []
    return list(dict.fromkeys(name for mark in figure.marks for name in getattr(mark, which)))


def _set_axis(axes: Any, which: str, axis: Axis, band: Sequence[Any]) -> None:
    holder = getattr(axes, f"{which}axis")
    getattr(axes, f"set_{which}label")(axis.label)
    if axis.scale == "band":
        step = math.ceil(len(band) / (9 if which == "x" else 40))
        holder.set_ticks(range(0, len(band), step), [str(name) for name in band[::step]])
        getattr(axes, f"set_{which}lim")(-0.6, len(band) - 0.4)
        if which == "y":
            axes.invert_yaxis()
        return
    bend = {"linthresh": axis.linear_to, "linscale": 0.6} if axis.scale == "symlog" else {}
    getattr(axes, f"set_{which}scale")(axis.scale, **bend)
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
    return f"{value:g}".replace("e-0", "e-").replace("e+0", "e")


def _place_log_ticks(axes: Any, which: str) -> None:
    """Place ticks at powers of ten, or at 1-2-5 steps if there are few."""
    holder, (low, high) = getattr(axes, f"{which}axis"), getattr(axes, f"get_{which}lim")()
    decades = math.log10(high / low)
    subs = (1.0,) if decades > 2 else (1.0, 2.0, 5.0)
    holder.set_major_locator(LogLocator(subs=subs) if decades > 0.5 else MaxNLocator(5))
    holder.set_minor_locator(NullLocator())


def _colors(color: int) -> str:
    return GRAY if color == MUTED else SERIES_COLORS[color % len(SERIES_COLORS)]


def _numbers(values: Sequence[Any], band: Sequence[Any]) -> Any:
    if band:
        return np.array([band.index(value) for value in values], np.float64)
    return np.array([math.nan if value is None else value for value in values], np.float64)


def _draw_line(axes: Any, mark: Marks, color: str, bands: dict[str, list[Any]]) -> None:
    x, y, style = _numbers(mark.x, ()), _numbers(mark.y, ()), ":" if mark.dashed else "-"
    marker = "o" if len(x) < 3 else ""
    axes.plot(x, y, color=color, linewidth=1.5, linestyle=style, label=mark.name, marker=marker, markersize=3)
    if len(mark.low):
        axes.fill_between(x, _numbers(mark.low, ()), _numbers(mark.high, ()), color=color, alpha=0.15, linewidth=0)


def _draw_stairs(axes: Any, mark: Marks, color: str, bands: dict[str, list[Any]]) -> None:
    axes.stairs(_numbers(mark.y, ()), _numbers(mark.x, ()), color=color, label=mark.name, baseline=None)


def _draw_dots(axes: Any, mark: Marks, color: str, bands: dict[str, list[Any]]) -> None:
    x, y = _numbers(mark.x, bands["x"]), _numbers(mark.y, bands["y"]) + mark.shift / 34  # a row has at least 17 points
    if len(mark.low):
        draw, place = (axes.hlines, y) if mark.across else (axes.vlines, x)
        low, high = _numbers(mark.low, ()), _numbers(mark.high, ())
        draw(place, low, high, color=color, alpha=0.5, linewidth=1.4)
    face = SURFACE if mark.hollow else color
    axes.plot(x, y, "o", color=color, markerfacecolor=face, markersize=4, label=mark.name)
    for across, up, text in zip(x, y, mark.labels, strict=False):
        if text and not mark.hollow and np.isfinite((across, up)).all():
            axes.annotate(text, (across, up), (5, 4), textcoords="offset points", fontsize="x-small")


def _draw_hexagons(axes: Any, mark: Marks, color: str, bands: dict[str, list[Any]]) -> None:
    x, y, counts = (_numbers(values, ()) for values in (mark.x, mark.y, mark.values))
    angles = np.pi / 6 + np.pi / 3 * np.arange(6)
    radius = mark.shift / math.sqrt(3) * 1.02
    corners = np.stack([x[:, None] + radius * np.cos(angles), y[:, None] + radius * np.sin(angles)], axis=2)
    cells = PolyCollection(list(corners), array=counts, cmap=_RAMP, norm=LogNorm(1, max(counts.max(), 2)), linewidths=0)
    axes.add_collection(cells)
    axes.plot([0, 1], [0, 1], color=GRAY, linestyle="--", linewidth=0.9)
    key = axes.figure.colorbar(cells, ax=axes, shrink=0.7, label=mark.name, format=FuncFormatter(_format_log))
    key.ax.yaxis.set_minor_locator(NullLocator())


_DRAWERS = {
    "line": _draw_line, "stairs": _draw_stairs, "dots": _draw_dots, "hexagons": _draw_hexagons,
}  # fmt: skip


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


ContentMaker = Callable[[], bytes]


def figures_of_page(document: Document) -> dict[str, Figure]:
    found = [figure for part in document.parts(Figures) for figure in part.figures]
    return dict(zip(file_stems([figure.name for figure in found]), found, strict=True))


def figure_files(figures: Mapping[str, Figure], kind: str) -> Iterator[tuple[str, ContentMaker]]:
    """Yield names and contents of files: pictures, CSV files, and a file with all captions."""
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
