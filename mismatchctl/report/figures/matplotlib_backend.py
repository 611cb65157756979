"""Figures drawn with matplotlib, for files and notebooks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib import rc_params_from_file, rcParams
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy

from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.report.figures.runs import run_figures
from mismatchctl.report.figures.svg import (
    DASHES,
    FIGURE_WIDTH,
    INK,
    LINEAR_SHARE,
    MUTED,
    SURFACE,
    AreaShape,
    Drawing,
    LineShape,
    Shape,
)
from mismatchctl.results.model import RunResult


@contextmanager
def draw_with_matplotlib(drawing: Drawing) -> Iterator[Figure]:
    """Draw with matplotlib in the theme, and restore its settings afterwards."""
    values: Any = rcParams
    before = dict(dict.items(values))  # reading rcParams["backend"] would load a backend
    dict.update(values, _rc_settings())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            yield _build_figure(drawing)
    finally:
        dict.update(values, before)


@cache
def _rc_settings() -> dict[str, Any]:
    """Return the settings of the theme, independent of the user's matplotlibrc."""
    sheet = rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=True)
    colors = {"text.color": INK, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED}
    colors |= {"xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK}
    kept = {name: value for name, value in sheet.items() if not name.startswith(("backend", "interactive", "toolbar"))}
    return kept | colors | {"axes.facecolor": SURFACE, "figure.facecolor": SURFACE}


def _build_figure(drawing: Drawing) -> Figure:
    high = drawing.layout.height
    left, top, right, bottom = drawing.layout.box
    figure = Figure(figsize=(FIGURE_WIDTH / 72, high / 72))
    axes = figure.add_axes(
        (left / FIGURE_WIDTH, 1 - bottom / high, (right - left) / FIGURE_WIDTH, (bottom - top) / high)
    )
    for which, axis in (("x", drawing.x), ("y", drawing.y)):
        bend = {"linthresh": axis.linear_to, "linscale": LINEAR_SHARE} if axis.scale == "symlog" else {}
        getattr(axes, f"set_{which}scale")(axis.scale, **bend)
        ticks = getattr(axes, f"{which}axis")
        ticks.set_ticks([at for at, _ in axis.ticks], [text for _, text in axis.ticks])
        ticks.set_ticks([], minor=True)
        getattr(axes, f"set_{which}lim")(*axis.limits)
    for shape in drawing.shapes:
        _add_shape(figure, axes, shape)
    return figure


def _add_shape(figure: Any, axes: Any, shape: Shape) -> None:
    """Add a shape as a matplotlib artist."""
    holder = figure if shape.space == "figure" else axes
    place = {
        "data": axes.transData, "across": axes.get_xaxis_transform(), "up": axes.get_yaxis_transform(),
        "axes": axes.transAxes, "figure": figure.transFigure,
    }[shape.space]  # fmt: skip
    if isinstance(shape, LineShape):
        dashes = DASHES.get(shape.dash)
        holder.add_artist(
            Line2D(
                shape.x, shape.y, color=shape.color, linewidth=shape.width, solid_capstyle=shape.cap,
                linestyle=(0, dashes) if dashes else "-" if shape.dash else "", clip_on=shape.clip,
                marker=shape.mark, markersize=shape.size, markerfacecolor=shape.face or shape.color,
                markeredgewidth=shape.edge, transform=place, zorder=shape.order, alpha=shape.opacity,
            )
        )  # fmt: skip
    elif isinstance(shape, AreaShape):
        holder.add_artist(
            PolyCollection(
                shape.corners, facecolors=shape.colors, linewidths=0, clip_on=shape.space == "data",
                transform=place, zorder=shape.order, alpha=shape.opacity,
            )
        )  # fmt: skip
    else:
        holder.text(
            shape.x, shape.y, shape.text, color=shape.color, fontsize=shape.size, ha=shape.side, va=shape.base,
            rotation=90 if shape.upright else 0, rotation_mode="anchor", zorder=shape.order,
            transform=offset_copy(place, figure, *shape.lift, units="points"),
        )  # fmt: skip


_ALIASES = {"steps": "k3"}


def draw_figure(run: RunResult, name: str) -> Figure:
    """Return a figure of a report as a matplotlib figure, for example `k3`, `distribution` or `k3_by_position`.

    Raises:
        ConfigError: the name is unknown.
    """
    found = {figure.name.partition("-")[2]: figure for figure in run_figures(run, "run")}
    wanted = _ALIASES.get(name, name)
    if wanted not in found:
        raise ConfigError(
            f"there is no figure {name!r}{suggestion(name, found)}: there are {', '.join(found) or 'none'}"
        )
    figure = found[wanted]
    with draw_with_matplotlib(figure.drawing) as shown:
        shown.axes[0].set_title(figure.title, fontsize="small", wrap=True)
        return shown
