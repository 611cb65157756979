"""Views of results: text, tables and JSON. `report/` implements the renderer for HTML pages and figures."""

from __future__ import annotations

import html
import json
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, overload

from mismatchctl.core.formatting import escape_terminal, format_estimate
from mismatchctl.errors import ConfigError
from mismatchctl.io import __version__
from mismatchctl.results import load_renderer

if TYPE_CHECKING:
    import os

    import pandas as pd
    import polars as pl
    from matplotlib.figure import Figure as Figure

    StrPath = str | os.PathLike[str]

HEADLINE_METRICS = ("k3", "abs_diff_mean", "ess_token", "ess_sequence", "tokens", "sequences")
"""Metrics that text output shows. If a run lacks all of them, text output shows its first five metrics."""
SWEEP_COLUMNS = ("rejected_tokens", "ess_token", "loss_scale", "pareto")
"""Columns that text output shows for each point of a sweep."""
MAX_LINES, MAX_WIDTH, MAX_CELL = 24, 100, 44

TableText = tuple[list[str], list[list[str]]]
"""A table as text: its headings, and its rows of cells."""
Item = TypeVar("Item")


class Renderer(Protocol):
    """Interface of a renderer, which draws results as pages, notebook cells and figures."""

    def page(self, shown: View) -> str:
        """Return an HTML page that works without other files."""

    def cell(self, shown: View) -> str:
        """Return HTML for a notebook: summary, trend, cause, corrections and one chart."""

    def figure(self, run: TextView, name: str) -> Figure:
        """Return a figure of the report by its name, drawn by matplotlib."""


def get_renderer() -> Renderer:
    return cast("Renderer", load_renderer())


def json_text(data: object) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def add_version(data: Mapping[str, Any]) -> dict[str, Any]:
    """Add the format, the tool name and the tool version to the data that a command prints as JSON."""
    return {"format": 1, "tool": "mismatchctl", "version": __version__} | {**data}


class TextView(ABC):
    """Base class for results that print a short summary and a table."""

    def _lines(self) -> list[str]:
        return []

    @abstractmethod
    def _table(self) -> TableText: ...

    def __str__(self) -> str:
        lead = [line for text in self._lines() for line in textwrap.wrap(escape_terminal(text), MAX_WIDTH, max_lines=2)]
        head, rows = self._table()
        lead = lead[: MAX_LINES // 2]
        room = MAX_LINES - len(lead) - 2
        table = [[_truncate(escape_terminal(cell)) for cell in row] for row in [head, *rows[:room]]] if rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        more = [f"... and {len(rows) - room:,} more"] if len(rows) > room else []
        return "\n".join(_truncate(line.rstrip(), MAX_WIDTH) for line in [*lead, *lines, *more])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class View(TextView):
    """Base class for results of public functions."""

    def _repr_html_(self) -> str:
        return get_renderer().cell(self)

    @overload
    def to_html(self) -> str: ...

    @overload
    def to_html(self, path: StrPath) -> None: ...

    def to_html(self, path: StrPath | None = None) -> str | None:
        """Write the report to `path` as an HTML page. Without a path, return the HTML.

        Args:
            path: The path of the page. The file is either complete or not written at all. Example:
                `result.to_html("report.html")`.
        """
        page = get_renderer().page(self)
        if path is None:
            return page
        _write_text(path, page)
        return None

    @abstractmethod
    def to_json(self) -> str:
        """Return strict JSON, the same that the option `--json` prints."""

    def save(self, path: StrPath) -> None:
        """Write the JSON.

        Args:
            path: A path that ends in `.json`. The file is either complete or not written at all. Example:
                `result.save("result.json")`.

        Raises:
            ConfigError: The path does not end in `.json`.
        """
        if Path(path).suffix != ".json":
            page = ". To write a page, use to_html" if Path(path).suffix in (".html", ".htm") else ""
            raise ConfigError(f"{path}: save writes JSON, so the file name must end in .json{page}")
        _write_text(path, self.to_json())

    @abstractmethod
    def to_polars(self) -> pl.DataFrame:
        """Return all values as a polars table."""

    def to_pandas(self) -> pd.DataFrame:
        """Return all values as a pandas table. pandas must be installed."""
        return self.to_polars().to_pandas()


class ByRun(Generic[Item]):
    """Base class of results with one entry per run: `result["name of the run"]`."""

    if TYPE_CHECKING:  # the models declare it, because it is not their first field

        @property
        def runs(self) -> dict[str, Item]:
            """Return the entries. The keys are the names of the runs."""

    def __getitem__(self, run: str) -> Item:
        """Return the entry of a run. A unique end of its name is enough: `"step_3"` finds the run `"jobs/a/step_3"`."""
        if run in self.runs:
            return self.runs[run]
        ends = [name for name in self.runs if name.rstrip("/").endswith(str(run))]
        if len(ends) == 1:
            return self.runs[ends[0]]
        raise KeyError(f"no run {run!r}; the runs are {', '.join(self.runs)}")


def _write_text(path: StrPath, text: str) -> None:
    from mismatchctl.io.files import write_atomically

    write_atomically(Path(path), text.encode())


def headline_metrics(metrics: Mapping[str, Any]) -> list[str]:
    return [name for name in HEADLINE_METRICS if name in metrics] or list(metrics)[:5]


def make_frame(rows: Iterable[Mapping[str, Any]], *columns: tuple[str, str]) -> pl.DataFrame:
    """Convert rows to a polars table. `columns` are pairs (type, names of columns), such as ("Float64", "value se")."""
    import polars as pl

    kinds = {name: getattr(pl, kind) for kind, names in columns for name in names.split()}
    return pl.DataFrame([{name: row[name] for name in kinds} for row in rows], schema=kinds)


def interval_bounds(interval: tuple[float, float] | None) -> dict[str, float | None]:
    return dict(zip(("low", "high"), interval or (None, None), strict=True))


def format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


def _truncate(text: str, width: int = MAX_CELL) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def format_value(value: Any) -> str:
    if value is None or value.value is None:
        return "-" if value is None else f"- ({value.status})"
    return format_estimate(value.value, value.se, "", value.interval) if value.se else format_cell(value.value)
