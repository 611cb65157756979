"""How results show themselves: as text of one screen, as tables and JSON, and, through a registered renderer, as pages.

`report/` implements the renderer. It is above `results/`, so the public package registers it, lazily.
"""

from __future__ import annotations

import html
import json
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, overload

from mismatchctl.core.formatting import escape_terminal
from mismatchctl.errors import ConfigError
from mismatchctl.io import __version__
from mismatchctl.results import load_renderer

if TYPE_CHECKING:
    import os

    import pandas as pd
    import polars as pl
    from matplotlib.figure import Figure

    StrPath = str | os.PathLike[str]

HEADLINE_METRICS = ("k3", "abs_diff_mean", "ess_token", "ess_sequence", "tokens", "sequences")
"""Metrics in text, if the run has them. Otherwise the first metrics of the run."""
SWEEP_COLUMNS = ("rejected_tokens", "ess_token", "loss_scale", "pareto")
"""Metrics of a sweep's points that text shows."""
MAX_LINES, MAX_WIDTH, MAX_CELL = 24, 100, 44
"""Maximum lines and columns of a text."""

TableText = tuple[list[str], list[list[str]]]
"""Headings, and rows of cells."""
Item = TypeVar("Item")


class Renderer(Protocol):
    """What draws results as pages, notebook cells and figures."""

    def page(self, shown: View) -> str:
        """Return a self-contained HTML page."""

    def cell(self, shown: View) -> str:
        """Return HTML for a notebook: summary, trend, cause, corrections and one chart."""

    def figure(self, run: RunViews, name: str) -> Figure:
        """Return a figure of the report by its name, drawn by matplotlib."""


def get_renderer() -> Renderer:
    """Return the registered renderer."""
    return cast("Renderer", load_renderer())


def json_text(data: object) -> str:
    """Return strict JSON as files and stdout contain it, ending in a newline."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def add_version(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data of a command's JSON, after its format, the tool and its version."""
    return {"format": 1, "tool": "mismatchctl", "version": __version__} | {**data}


class TextView(ABC):
    """Something that shows itself in a few sentences and a table, no larger than a screen."""

    def _lines(self) -> list[str]:
        """Sentences that come first."""
        return []

    @abstractmethod
    def _table(self) -> TableText:
        """The headline table."""

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
    """A result of one of the public functions."""

    def _repr_html_(self) -> str:
        return get_renderer().cell(self)

    @overload
    def to_html(self) -> str: ...

    @overload
    def to_html(self, path: StrPath) -> None: ...

    def to_html(self, path: StrPath | None = None) -> str | None:
        """Write the report as one HTML page; without a path, return it.

        Args:
            path: The file. It appears whole or not at all. Example: `result.to_html("report.html")`.
        """
        page = get_renderer().page(self)
        if path is None:
            return page
        _write_text(path, page)
        return None

    @abstractmethod
    def to_json(self) -> str:
        """Return strict JSON, as the command's `--json` prints it."""

    def save(self, path: StrPath) -> None:
        """Write the JSON.

        Args:
            path: A file that ends in `.json`. It appears whole or not at all. Example: `result.save("result.json")`.

        Raises:
            ConfigError: The name ends in something else.
        """
        if Path(path).suffix != ".json":
            page = ", to_html writes a page" if Path(path).suffix in (".html", ".htm") else ""
            raise ConfigError(f"{path}: save writes JSON, into a file that ends in .json{page}")
        _write_text(path, self.to_json())

    @abstractmethod
    def to_polars(self) -> pl.DataFrame:
        """Return all values as a polars table."""

    def to_pandas(self) -> pd.DataFrame:
        """Return all values as a pandas table; needs pandas."""
        return self.to_polars().to_pandas()


class ByRun(Generic[Item]):
    """Results by run: `result["run"]`."""

    if TYPE_CHECKING:  # the model declares it, in its own order

        @property
        def runs(self) -> dict[str, Item]:
            """What belongs to each run."""

    def __getitem__(self, run: str) -> Item:
        """Return the part of a run by its name, or by the end of it that no other has."""
        if run in self.runs:
            return self.runs[run]
        ends = [name for name in self.runs if name.rstrip("/").endswith(str(run))]
        if len(ends) == 1:
            return self.runs[ends[0]]
        raise KeyError(f"no run {run!r}: there are {', '.join(self.runs)}")


class RunViews(TextView):
    """One run: metrics by attribute, its summary, and steps as a table."""

    if TYPE_CHECKING:  # the model declares them, in its own order
        overall: Any
        groups: Any
        story: Any

    @property
    def steps(self) -> pl.DataFrame:
        """One row per training step: its label and the value of every metric."""
        import polars as pl

        metrics = {name: series.value for name, series in self.groups.metrics.items()}
        return pl.DataFrame({"step": self.groups.labels, **metrics}, strict=False)

    def plot(self, name: str = "k3") -> Figure:
        """Draw one figure of the report with matplotlib.

        Args:
            name: `k3`, `distribution`, `joint`, `k3_by_position`, `rejected`, `ess-after`, ... A wrong name gets the
                list of all. Example: `run.plot("k3_by_position")`.

        Raises:
            ConfigError: There is no such figure.
        """
        return get_renderer().figure(self, name)

    def _lines(self) -> list[str]:
        return [f"{answer.question}: {answer.text}" for answer in (self.story.answers if self.story else ())]

    def _table(self) -> TableText:
        metrics = self.overall.metrics
        names = _headline_metrics(metrics)
        return names, [[_format(metrics[name]) for name in names]]


class ResultViews(View):
    """Runs by name; with a single run, its metrics by attribute."""

    if TYPE_CHECKING:  # the model declares it, in its own order
        runs: dict[str, Any]

    @property
    def steps(self) -> pl.DataFrame:
        """One row per training step of the only run."""
        return self._single_run("steps").steps

    def plot(self, name: str = "k3") -> Figure:
        """Draw one figure of the report of the only run with matplotlib; see `plot` of a run.

        Args:
            name: `k3`, `distribution`, `k3_by_position`, ... A wrong name gets the list of all.
        """
        return self._single_run("plot").plot(name)

    def to_polars(self) -> pl.DataFrame:
        """Return every overall value as a row: run, correction (null: none), metric, value, se, low, high, status."""
        rows = [
            {"run": run, "correction": correction, "metric": name, "value": value.value, "se": value.se,
             **_bounds(value.interval), "status": value.status}
            for run, found in self.runs.items()
            for correction, values in ((None, found.overall.metrics), *found.overall.corrections.items())
            for name, value in values.items()
        ]  # fmt: skip
        return _make_frame(
            rows, ("String", "run correction metric"), ("Float64", "value se low high"), ("String", "status")
        )

    def _single_run(self, name: str) -> RunViews:
        if len(self.runs) != 1:
            raise KeyError(f"there are {len(self.runs)} runs: name one, as result[RUN].{name}")
        run: RunViews = next(iter(self.runs.values()))
        return run

    def _lines(self) -> list[str]:
        if len(self.runs) == 1:
            return self._single_run("summary")._lines()
        stories = ((run, found.story) for run, found in self.runs.items())
        return [f"{run}: {story.answers[0].text}" for run, story in stories if story is not None and story.answers]

    def _table(self) -> TableText:
        first: Mapping[str, Any] = next(iter(self.runs.values())).overall.metrics if self.runs else {}
        names = _headline_metrics(first)
        rows = [
            [run, *(_format(found.overall.metrics.get(name)) for name in names)] for run, found in self.runs.items()
        ]
        return ["run", *names], rows


class SweepViews(View):
    """A sweep as its points."""

    if TYPE_CHECKING:
        overall: pl.DataFrame
        summary: dict[str, list[str]]

        @property
        def axis_paths(self) -> list[str]:
            """The paths that are varied."""

    def to_polars(self) -> pl.DataFrame:
        """Return a row per run, correction and point: the value of each axis, every metric, `pareto`."""
        return self.overall

    def _lines(self) -> list[str]:
        count = f"{self.overall.height:,} points over {', '.join(self.axis_paths)}"
        return [count, *(f"{run}: {lines[0]}" for run, lines in self.summary.items() if lines)]

    def _table(self) -> TableText:
        kept = [
            name for name in ("run", "correction", *self.axis_paths, *SWEEP_COLUMNS) if name in self.overall.columns
        ]
        return kept, [[_format_cell(value) for value in row] for row in self.overall.select(kept).rows()]


class ComparisonViews(View):
    """A comparison as its changes."""

    if TYPE_CHECKING:
        sides: list[Any]
        contrasts: list[Any]

    def to_polars(self) -> pl.DataFrame:
        """Return a row per run (beside the first), correction (null: none) and metric: both values, the difference."""
        rows = [
            {"run": found.other, "correction": correction, "metric": name, "reference": change.reference.value,
             "other": change.other.value, "difference": change.difference, **_bounds(change.interval), "p": change.p,
             "significant": change.significant, "note": change.note, "status": change.status}
            for found in self.contrasts
            for correction, changes in ((None, found.changes), *found.corrections.items())
            for name, change in changes.items()
        ]  # fmt: skip
        return _make_frame(
            rows, ("String", "run correction metric"), ("Float64", "reference other difference low high p"),
            ("Boolean", "significant"), ("String", "note status"),
        )  # fmt: skip

    def _lines(self) -> list[str]:
        return [f"{found.other} compared with {self.sides[0].name}: {found.says[0]}" for found in self.contrasts]

    def _table(self) -> TableText:
        rows = [
            [found.other, name, _format(change.reference), _format(change.other), _format_cell(change.difference),
             "yes" if change.significant else "no"]
            for found in self.contrasts
            for name, change in found.changes.items()
            if name in HEADLINE_METRICS
        ]  # fmt: skip
        return ["run", "metric", "reference", "other", "difference", "significant"], rows


class VerdictViews(View):
    """A verdict as its checks; true if and only if it passed."""

    if TYPE_CHECKING:
        outcome: Any
        checks: list[Any]
        says: str

    @property
    def passed(self) -> bool:
        """Whether every check passed. An undecided verdict did not."""
        return bool(self.outcome == "passed")

    def __bool__(self) -> bool:
        return self.passed

    def to_polars(self) -> pl.DataFrame:
        """Return a row per check: rule, run, place, metric, outcome, reason, value, limit, baseline, p."""
        names = ("String", "rule run place metric outcome reason"), ("Float64", "value limit baseline p")
        return _make_frame(map(vars, self.checks), *names)

    def _lines(self) -> list[str]:
        return [self.says or f"{self.outcome}: {len(self.checks)} checks"]

    def _table(self) -> TableText:
        names = ["rule", "run", "place", "metric", "value", "limit", "outcome", "reason"]
        return names, [[_format_cell(getattr(check, name)) for name in names] for check in self.checks]


class RunAdviceViews(TextView):
    """The advice for a run as its ranking, best first."""

    if TYPE_CHECKING:
        fix_first: Any
        advice: list[Any]
        yours: list[Any]

    def _lines(self) -> list[str]:
        return [] if self.fix_first is None else [f"fix first: {self.fix_first.summary}"]

    def _table(self) -> TableText:
        names = ["name", "gain", "rejected_tokens", "ess", "why"]
        return names, [[_format_cell(getattr(own, name)) for name in names] for own in (*self.advice, *self.yours)]


class AdviceViews(View):
    """The advice for each run as one table."""

    if TYPE_CHECKING:
        runs: dict[str, Any]

    def to_polars(self) -> pl.DataFrame:
        """Return a row per run and correction, yours last: name, errors, gain, rejected shares, ESS, ties, why."""
        rows = [{"run": run, **vars(own)} for run, found in self.runs.items() for own in (*found.advice, *found.yours)]
        return _make_frame(
            rows, ("String", "run name"),
            ("Float64", "bias2 variance mse gain gain_se rejected_tokens rejected_sequences ess"),
            ("Boolean", "ties"), ("String", "why"),
        )  # fmt: skip

    def _lines(self) -> list[str]:
        several = len(self.runs) > 1
        return [f"{run}: {line}" if several else line for run, found in self.runs.items() for line in found._lines()]

    def _table(self) -> TableText:
        head: list[str] = []
        rows = []
        for run, found in self.runs.items():
            head, own = found._table()
            rows += [[run, *row] for row in own]
        return ["run", *head], rows


class FindingsViews(View):
    """Findings of runs, strongest first."""

    if TYPE_CHECKING:
        runs: dict[str, list[Any]]

    def to_polars(self) -> pl.DataFrame:
        """Return a row per finding: run, cause, confidence, share of the mismatch, summary, advice."""
        rows = ({"run": run, **vars(found)} for run, findings in self.runs.items() for found in findings)
        return _make_frame(rows, ("String", "run cause confidence"), ("Float64", "share"), ("String", "summary advice"))

    def _lines(self) -> list[str]:
        several = len(self.runs) > 1
        return [
            f"{f'{run}: ' if several else ''}{line}"
            for run, findings in self.runs.items()
            for line in [f"{one.title} ({one.confidence} confidence): {one.summary}" for one in findings]
            or ["nothing found"]
        ]

    def _table(self) -> TableText:
        return [], []


def _write_text(path: StrPath, text: str) -> None:
    from mismatchctl.io.files import write_atomically

    write_atomically(Path(path), text.encode())


def _headline_metrics(metrics: Mapping[str, Any]) -> list[str]:
    return [name for name in HEADLINE_METRICS if name in metrics] or list(metrics)[:5]


def _make_frame(rows: Iterable[Mapping[str, Any]], *columns: tuple[str, str]) -> pl.DataFrame:
    """Rows as a table of some of their columns: types of polars, each with the names that are of it."""
    import polars as pl

    kinds = {name: getattr(pl, kind) for kind, names in columns for name in names.split()}
    return pl.DataFrame([{name: row[name] for name in kinds} for row in rows], schema=kinds)


def _bounds(interval: tuple[float, float] | None) -> dict[str, float | None]:
    return dict(zip(("low", "high"), interval or (None, None), strict=True))


def _format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


def _truncate(text: str, width: int = MAX_CELL) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _format(value: Any) -> str:
    if value is None or value.value is None:
        return "-" if value is None else f"- ({value.status})"
    return _format_cell(value.value) + (f" \u00b1 {value.se:.2g}" if value.se is not None else "")
