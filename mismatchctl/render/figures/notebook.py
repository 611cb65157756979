"""Figures of a run by name, as matplotlib has them: for notebooks."""

from __future__ import annotations

from matplotlib.figure import Figure

from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.render.figures.of_run import run_figures
from mismatchctl.render.figures.with_matplotlib import drawn
from mismatchctl.result import RunResult

_CALLED = {"steps": "k3"}


def figure_of(run: RunResult, name: str) -> Figure:
    """A figure of a report by its name: `k3` (or `steps`), `distribution`, `k3_by_position`, `rejected`, ...

    Its axes are matplotlib's, to be changed at will; it shows itself in a notebook.

    Raises:
        ConfigError: there is no such figure.
    """
    found = {figure.name.partition("-")[2]: figure for figure in run_figures(run, "run")}
    wanted = _CALLED.get(name, name)
    if wanted not in found:
        raise ConfigError(
            f"there is no figure {name!r}{suggestion(name, found)}: there are {', '.join(found) or 'none'}"
        )
    figure = found[wanted]
    with drawn(figure.drawing) as shown:
        shown.axes[0].set_title(figure.title, fontsize="small", wrap=True)
        return shown
