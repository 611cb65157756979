"""Views of a Result: text, tables and HTML for notebooks."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mismatchctl.core.formatting import escape_terminal

if TYPE_CHECKING:
    import polars as pl

HEADLINE = ("k3", "abs_diff_mean", "ess_token", "ess_sequence", "tokens", "sequences")
"""Metrics that text shows, where they are there; the first ones of a run otherwise."""


Headlines = tuple[list[str], list[list[str]]]
"""Headings, and rows of cells."""
SWEPT = ("rejected_tokens", "ess_token", "loss_scale", "pareto")
"""Metrics of a sweep's points that text shows."""
MOST = 20
"""Rows that text shows at most."""


class TableViews(ABC):
    """What shows itself as a few sentences and a table: in text, and as HTML."""

    def _lead(self) -> list[str]:
        """Sentences that come first."""
        return []

    @abstractmethod
    def _headlines(self) -> Headlines:
        """The headline table."""

    def _harmless(self) -> tuple[list[str], Headlines]:
        """Both, with nothing in them that a terminal or a reader would be misled by."""
        head, rows = self._headlines()
        return [escape_terminal(text) for text in self._lead()], (
            [escape_terminal(cell) for cell in head],
            [[escape_terminal(cell) for cell in row] for row in rows],
        )

    def __str__(self) -> str:
        lead, (head, rows) = self._harmless()
        widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        return "\n".join([*lead, *(line.rstrip() for line in lines)])

    def _repr_html_(self) -> str:
        lead, (head, rows) = self._harmless()
        cells = [("th", head), *(("td", row) for row in rows)]
        made = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in cells)
        said = "".join(f"<p>{html.escape(text)}</p>" for text in lead)
        return said + "<table>" + "".join(f"<tr>{row}</tr>" for row in made) + "</table>"


class RunViews(TableViews):
    """One run as metrics by attribute, its answers, and steps as a table."""

    if TYPE_CHECKING:  # the model declares them, in its own order
        overall: Any
        groups: Any
        story: Any

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
        return import_module("mismatchctl.report.figures.matplotlib_backend").figure_of(self, name)

    def _lead(self) -> list[str]:
        return [f"{answer.question}: {answer.text}" for answer in (self.story.answers if self.story else ())]

    def _headlines(self) -> Headlines:
        metrics = self.overall.metrics
        names = _headline_of(metrics)
        return names, [[_shown(metrics[name]) for name in names]]


def _headline_of(metrics: Mapping[str, Any]) -> list[str]:
    return [name for name in HEADLINE if name in metrics] or list(metrics)[:5]


class ResultViews(TableViews):
    """Runs by name, and all their values as rows."""

    if TYPE_CHECKING:  # the model declares it, in its own order
        runs: dict[str, Any]

    def __getitem__(self, run: str) -> Any:
        """A run by its name, or by the end of it that no other has."""
        if run in self.runs:
            return self.runs[run]
        ends = [name for name in self.runs if name.rstrip("/").endswith(str(run))]
        if len(ends) == 1:
            return self.runs[ends[0]]
        raise KeyError(f"no run {run!r}: there are {', '.join(self.runs)}")

    def figure(self, name: str) -> Any:
        """A figure of its only run: `k3_by_position`, ...; of several, each has its own: `result[RUN].figure(name)`."""
        if len(self.runs) != 1:
            raise KeyError(f"there are {len(self.runs)} runs: name one, as result[RUN].figure({name!r})")
        (run,) = self.runs.values()
        return run.figure(name)

    def to_frame(self) -> pl.DataFrame:
        """Every value overall as a row: run, correction (null: of none), metric, value, se, low, high, status."""
        rows = [
            {"run": run, "correction": correction, "metric": name, "value": value.value, "se": value.se,
             **_ends(value.interval), "status": value.status}
            for run, found in self.runs.items()
            for correction, values in ((None, found.overall.metrics), *found.overall.corrections.items())
            for name, value in values.items()
        ]  # fmt: skip
        return _frame(rows, ("String", "run correction metric"), ("Float64", "value se low high"), ("String", "status"))

    def _lead(self) -> list[str]:
        stories = ((run, found.story) for run, found in self.runs.items())
        return [f"{run}: {story.answers[0].text}" for run, story in stories if story is not None and story.answers]

    def _headlines(self) -> Headlines:
        first: Mapping[str, Any] = next(iter(self.runs.values())).overall.metrics if self.runs else {}
        names = _headline_of(first)
        rows = [[run, *(_shown(found.overall.metrics.get(name)) for name in names)] for run, found in self.runs.items()]
        return ["run", *names], rows


class SweepViews(TableViews):
    """A sweep as its points."""

    if TYPE_CHECKING:
        overall: pl.DataFrame

        @property
        def axis_paths(self) -> list[str]:
            """The paths that are varied."""

    def to_frame(self) -> pl.DataFrame:
        """A row per run, correction and point: the value of each axis, every metric, `pareto`."""
        return self.overall

    def _lead(self) -> list[str]:
        return [f"{self.overall.height:,} points over {', '.join(self.axis_paths)}"]

    def _headlines(self) -> Headlines:
        kept = [name for name in ("run", "correction", *self.axis_paths, *SWEPT) if name in self.overall.columns]
        return kept, [[_cell(value) for value in row] for row in self.overall.select(kept).head(MOST).rows()]


class ComparisonViews(TableViews):
    """A comparison as its changes."""

    if TYPE_CHECKING:
        sides: list[Any]
        contrasts: list[Any]

    def to_frame(self) -> pl.DataFrame:
        """A row per run held against the first, correction (null: of none) and metric: both values, the difference."""
        rows = [
            {"run": found.other, "correction": correction, "metric": name, "reference": change.reference.value,
             "other": change.other.value, "difference": change.difference, **_ends(change.interval), "p": change.p,
             "significant": change.significant, "status": change.status}
            for found in self.contrasts
            for correction, changes in ((None, found.changes), *found.corrections.items())
            for name, change in changes.items()
        ]  # fmt: skip
        return _frame(
            rows, ("String", "run correction metric"), ("Float64", "reference other difference low high p"),
            ("Boolean", "significant"), ("String", "status"),
        )  # fmt: skip

    def _lead(self) -> list[str]:
        counts = (
            (found.other, sum(change.significant for change in found.changes.values())) for found in self.contrasts
        )
        return [f"{other} against {self.sides[0].name}: {count} metrics differ" for other, count in counts]

    def _headlines(self) -> Headlines:
        rows = [
            [found.other, name, _shown(change.reference), _shown(change.other), _cell(change.difference),
             "yes" if change.significant else "no"]
            for found in self.contrasts
            for name, change in found.changes.items()
            if name in HEADLINE
        ]  # fmt: skip
        return ["run", "metric", "reference", "other", "difference", "significant"], rows


class VerdictViews(TableViews):
    """A verdict as its checks."""

    if TYPE_CHECKING:
        outcome: str
        checks: list[Any]

    def to_frame(self) -> pl.DataFrame:
        """A row per check: rule, run, place, metric, outcome, reason, value, limit, baseline, p."""
        names = ("String", "rule run place metric outcome reason"), ("Float64", "value limit baseline p")
        return _frame(map(vars, self.checks), *names)

    def _lead(self) -> list[str]:
        return [f"{self.outcome}: {len(self.checks)} checks"]

    def _headlines(self) -> Headlines:
        names = ["rule", "run", "place", "metric", "value", "limit", "outcome", "reason"]
        return names, [[_cell(getattr(check, name)) for name in names] for check in self.checks[:MOST]]


class AdviceViews(TableViews):
    """Advice as its ranking, best first."""

    if TYPE_CHECKING:
        fix_first: Any
        advice: list[Any]
        yours: list[Any]

    def to_frame(self) -> pl.DataFrame:
        """A row per correction, yours last: name, errors, gain, rejected shares, ESS, ties, why."""
        return _frame(
            map(vars, (*self.advice, *self.yours)), ("String", "name"),
            ("Float64", "bias2 variance mse gain gain_se rejected_tokens rejected_sequences ess"),
            ("Boolean", "ties"), ("String", "why"),
        )  # fmt: skip

    def _lead(self) -> list[str]:
        return [] if self.fix_first is None else [f"fix first: {self.fix_first.summary}"]

    def _headlines(self) -> Headlines:
        names = ["name", "gain", "rejected_tokens", "ess", "why"]
        return names, [[_cell(getattr(own, name)) for name in names] for own in (*self.advice, *self.yours)]


class FindingsViews(TableViews):
    """Findings of runs, strongest first."""

    if TYPE_CHECKING:
        runs: dict[str, list[Any]]

    def to_frame(self) -> pl.DataFrame:
        """A row per finding: run, cause, confidence, share of the mismatch, summary, advice."""
        rows = ({"run": run, **vars(found)} for run, findings in self.runs.items() for found in findings)
        return _frame(rows, ("String", "run cause confidence"), ("Float64", "share"), ("String", "summary advice"))

    def _lead(self) -> list[str]:
        return [f"{run}: nothing found" for run, findings in self.runs.items() if not findings]

    def _headlines(self) -> Headlines:
        names = ["cause", "confidence", "summary"]
        rows = [
            [run, *(_cell(getattr(found, name)) for name in names)]
            for run, findings in self.runs.items()
            for found in findings
        ]
        return ["run", *names], rows


def _frame(rows: Iterable[Mapping[str, Any]], *columns: tuple[str, str]) -> pl.DataFrame:
    """Rows as a table of some of their columns: types of polars, each with the names that are of it."""
    import polars as pl

    kinds = {name: getattr(pl, kind) for kind, names in columns for name in names.split()}
    return pl.DataFrame([{name: row[name] for name in kinds} for row in rows], schema=kinds)


def _ends(interval: tuple[float, float] | None) -> dict[str, float | None]:
    return dict(zip(("low", "high"), interval or (None, None), strict=True))


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _shown(value: Any) -> str:
    if value is None or value.value is None:
        return "-" if value is None else f"- ({value.status})"
    return f"{value.value:.4g}" + (f" \u00b1 {value.se:.2g}" if value.se is not None else "")
