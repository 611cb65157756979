"""How a Result behaves in a notebook: rows, tables, text. What is drawn is the front door's to say."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

HEADLINE = ("k3", "abs_log_ratio_mean", "ess_token", "ess_sequence", "tokens", "sequences")
"""Metrics that text shows, where they are there; the first ones of a run otherwise."""
FIGURES: list[Callable[[Any, str], Any]] = []
"""What draws a figure of a run by its name: filled by the package that draws."""


class RunViews:
    """One run as metrics by attribute, and steps as a table."""

    overall: Any
    groups: Any

    def __getattr__(self, name: str) -> Any:
        metrics = self.__dict__["overall"].metrics if "overall" in self.__dict__ else {}
        if name in metrics:
            return metrics[name]
        raise AttributeError(f"a run has no {name!r}; its metrics are {', '.join(metrics)}")

    @property
    def steps(self) -> pl.DataFrame:
        """One row per training step: its label and the value of every metric."""
        import polars as pl

        metrics = {name: series.value for name, series in self.groups.metrics.items()}
        return pl.DataFrame({"step": self.groups.labels, **metrics}, strict=False)

    def figure(self, name: str) -> Any:
        """A matplotlib figure of one of its parts: `distribution`, `k3_by_position`, `k3_by_surprisal`, ..."""
        import importlib

        if not FIGURES:
            importlib.import_module("mismatchctl.door")
        return FIGURES[0](self, name)


class ResultViews:
    """Runs by name, and all their values as rows."""

    if TYPE_CHECKING:  # the model declares it, in its own order
        runs: dict[str, Any]

    def __getitem__(self, run: str) -> Any:
        """A run by its name, or by the end of it that no other has."""
        if run in self.runs:
            return self.runs[run]
        ends = [name for name in self.runs if name.rstrip("/").endswith(run)]
        if len(ends) == 1:
            return self.runs[ends[0]]
        raise KeyError(f"no run {run!r}: there are {', '.join(self.runs)}")

    def to_frame(self) -> pl.DataFrame:
        """Every value overall as a row: run, correction (null: of none), metric, value, se, low, high, status."""
        import polars as pl

        rows = [
            {"run": run, "correction": correction, "metric": name, "value": value.value, "se": value.se,
             "low": (value.interval or (None, None))[0], "high": (value.interval or (None, None))[1],
             "status": value.status}
            for run, found in self.runs.items()
            for correction, values in ((None, found.overall.metrics), *found.overall.corrections.items())
            for name, value in values.items()
        ]  # fmt: skip
        kinds: dict[str, Any] = dict.fromkeys(("run", "correction", "metric"), pl.String)
        kinds |= dict.fromkeys(("value", "se", "low", "high"), pl.Float64)
        return pl.DataFrame(rows, schema=kinds | {"status": pl.String})

    def _headlines(self) -> tuple[list[str], list[list[str]]]:
        first: Mapping[str, Any] = next(iter(self.runs.values())).overall.metrics if self.runs else {}
        names = [name for name in HEADLINE if name in first] or list(first)[:5]
        rows = [[run, *(_shown(found.overall.metrics.get(name)) for name in names)] for run, found in self.runs.items()]
        return ["run", *names], rows

    def __str__(self) -> str:
        head, rows = self._headlines()
        widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        head, rows = self._headlines()
        cells = [("th", head), *(("td", row) for row in rows)]
        made = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in cells)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in made) + "</table>"


def _shown(value: Any) -> str:
    if value is None or value.value is None:
        return "-" if value is None else f"- ({value.status})"
    return f"{value.value:.4g}" + (f" \u00b1 {value.se:.2g}" if value.se is not None else "")
