"""Table helpers: headers linked to the metric glossary, and cells with units, errors and reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from mismatchctl.core.formatting import (
    DASH,
    escape_terminal,
    format_estimate,
    format_heavy_tail,
    format_label,
    format_number,
    shorten_for_cell,
)
from mismatchctl.corrections.model import Correction
from mismatchctl.measure.metrics.corrections import correction_metrics
from mismatchctl.measure.metrics.evaluation import other_metrics
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.metrics.mismatch import MISMATCH_METRICS
from mismatchctl.report.document import ColumnHeader, GlossaryEntry, Note, Table, TableCell
from mismatchctl.results.model import NOT_RECORDED, Groups, Value

SHORT_TITLES = {
    "k3": "K3", "abs_diff_mean": "mean |diff|", "abs_diff_max": "largest |diff|", "ratio_mean": "mean ratio",
    "ratio_mean_z": "z of ratio", "ess_token": "ESS tokens", "ess_sequence": "ESS sequences",
    "rejected_tokens": "rejected tokens", "rejected_sequences": "rejected sequences", "weight_mean": "mean weight",
    "weight_bias": "bias of the bound", "loss_scale": "loss scale", "k3_kept": "K3 kept",
    "routing_differs": "routed otherwise",
}  # fmt: skip
"""Titles of metrics for narrow columns."""
MAX_ROWS = 200
"""Maximum rows of a table with one row per group."""


MAX_RUNS, MAX_NOTES = 14, 4
"""Maximum runs and notes on a screen."""
SUMMARY_LENGTH, ADVICE_LENGTH, NOTE_LENGTH = 200, 130, 140
"""Maximum characters of sentences on a screen."""


def cut(text: str, length: int) -> str:
    """Cut a text after a whole word."""
    if len(text) <= length:
        return text
    return f"{text[:length].rsplit(' ', 1)[0].rstrip(',;:')} …"


def cut_notes(notes: Sequence[str], most: int = MAX_NOTES) -> Iterator[Note]:
    """Yield the first notes, with long ones shortened in the middle, and the number of the other notes."""
    for note in notes[: most if len(notes) <= most else most - 1]:
        start, end = note[: NOTE_LENGTH // 3], note[-(NOTE_LENGTH - NOTE_LENGTH // 3) :]
        yield Note(escape_terminal(note if len(note) <= NOTE_LENGTH else f"{start} … {end}"), "alarm")
    if len(notes) > most:
        yield Note(f"{len(notes) - most + 1} more notes: -v", "alarm")


def text_cell(text: str, kind: str = "text") -> TableCell:
    """Return a cell with text from a dump, escaped and shortened."""
    return TableCell(shorten_for_cell(text), kind=kind)


def number_cell(value: float, unit: str = "") -> TableCell:
    """Return a cell with a plain number."""
    return TableCell(format_number(value, unit), sort_key=f"{value:.6g}")


def value_cell(value: Value, unit: str, *, errors: bool = True) -> TableCell:
    """Return a cell with a value and its standard error. A missing value is a dash with the reason as footnote."""
    if value.value is None:
        return TableCell(DASH, value.status)
    text, brief = (format_estimate(value.value, se, unit) for se in (value.se if errors else None, None))
    reason = format_heavy_tail(value.covers) if errors and value.tail else ""
    return TableCell(text, reason, f"{value.value:.6g}", brief=brief)


def split_title(text: str) -> str:
    """Split a title into two lines of similar length."""
    words_of = text.split()
    halves = [(" ".join(words_of[:cut]), " ".join(words_of[cut:])) for cut in range(1, len(words_of))]
    return "\n".join(min(halves, key=lambda lines: max(map(len, lines)), default=(text,)))


@cache
def _mismatch_metrics() -> dict[str, Metric]:
    return {metric.key: metric for metric in (*MISMATCH_METRICS, *other_metrics())}


class MetricRegistry:
    """The metrics that a page can show. Scope `m` is the mismatch, scope `c` the corrections."""

    def __init__(self, corrections: Sequence[Correction] = ()) -> None:
        self.mismatch = _mismatch_metrics()
        self.corrections: dict[str, Metric] = {}
        for correction in corrections:
            for metric in correction_metrics(correction):
                self.corrections.setdefault(metric.key, _shared_metric(metric))
        self.used: dict[str, GlossaryEntry] = {}

    def metric(self, key: str, scope: str = "m") -> Metric:
        """Return the metric of a key and add it to the glossary. Unknown keys get a placeholder."""
        unknown = Metric(escape_terminal(key), escape_terminal(key), "", "not in this version's registry", "")
        metric = (self.mismatch if scope == "m" else self.corrections).get(key, unknown)
        self.used[f"{scope}-{key}"] = GlossaryEntry(f"{scope}-{key}", metric)
        return metric

    def head(self, key: str, scope: str = "m", text: str = "", drop: int | None = None) -> ColumnHeader:
        """Return the column header of a metric, linked to the glossary."""
        metric = self.metric(key, scope)
        unit = "" if metric.unit in ("-", metric.title, "fraction") else metric.unit
        return ColumnHeader(text or metric.title, unit, f"{metric.definition}. {metric.meaning}", f"{scope}-{key}",
                    drop=drop, short="" if text else split_title(SHORT_TITLES.get(key, "")))  # fmt: skip

    def columns(
        self,
        keys: Iterable[str] | Mapping[str, int | None],
        of: Callable[[Any], Mapping[str, Value]],
        scope: str = "m",
        texts: Mapping[str, str] | None = None,
        *,
        errors: bool = True,
    ) -> list[tuple[ColumnHeader, Callable[[Any], TableCell]]]:
        """Return one column per metric.

        `keys` may map keys to `ColumnHeader.drop`. `of` returns the values of an item. `texts` are other headings.
        """

        def cell(key: str) -> Callable[[Any], TableCell]:
            unit = self.metric(key, scope).unit
            return lambda item: value_cell(of(item).get(key, NOT_RECORDED), unit, errors=errors)

        drops, texts = keys if isinstance(keys, Mapping) else {}, texts or {}
        return [(self.head(key, scope, texts.get(key, ""), drops.get(key)), cell(key)) for key in keys]

    def series(
        self, groups: Groups, key: str, correction: str | None = None, *, drop: int | None = None, text: str = ""
    ) -> tuple[ColumnHeader, Callable[[Any], TableCell]]:
        """Return the column of one metric over groups. The items are group indices."""
        series, scope = groups.series(key, correction), "m" if correction is None else "c"
        return self.columns(
            {key: drop}, lambda index: {key: series.value_at(index)}, scope, {key: escape_terminal(text)}
        )[0]

    def entries(self, scope: str) -> list[GlossaryEntry]:
        """Return the glossary entries of the used metrics, in registry order."""
        order = list(self.mismatch if scope == "m" else self.corrections)
        chosen = [entry for anchor, entry in self.used.items() if anchor.startswith(f"{scope}-")]
        known = {key: index for index, key in enumerate(order)}
        return sorted(chosen, key=lambda entry: known.get(entry.metric.key, len(known)))


def _shared_metric(metric: Metric) -> Metric:
    """Return a gate's metric with a title that fits every correction."""
    gate = re.fullmatch(r"(gate\d+)_(\w+)_(\w+)", metric.key)
    return replace(metric, title=f"{gate[1].replace('gate', 'gate ')}: {gate[2]} too {gate[3]}") if gate else metric


def group_table(caption: str, first: str, groups: Groups, columns: Sequence[tuple[ColumnHeader, Any]]) -> Table:
    """Return a table with one row per group."""
    names = (
        ColumnHeader(escape_terminal(first), numeric=False),
        lambda index: text_cell(format_label(groups.labels[index]), "name"),
    )
    table = Table.of(caption, range(min(len(groups.labels), MAX_ROWS)), [names, *columns], sortable=True)
    if len(groups.labels) > MAX_ROWS:
        table.left_out = f"The first {MAX_ROWS} of {len(groups.labels):,} rows; the JSON result holds all of them."
    return table
