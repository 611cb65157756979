"""Table helpers: headers linked to the metric glossary, and cells with units, errors and reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
)
from mismatchctl.corrections.model import Correction
from mismatchctl.measure.metrics.corrections import correction_metrics
from mismatchctl.measure.metrics.evaluation import other_metrics
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.metrics.mismatch import MISMATCH_METRICS
from mismatchctl.report.document import ColumnHeader, GlossaryEntry, Table, TableCell
from mismatchctl.report.text import shorten_for_cell
from mismatchctl.results.model import NOT_RECORDED, Groups, Value

SHORT_TITLES = {
    "k3": "K3", "abs_diff_mean": "mean |diff|", "abs_diff_max": "largest |diff|", "ratio_mean": "mean ratio",
    "ratio_mean_z": "z of ratio", "ess_token": "ESS tokens", "ess_sequence": "ESS sequences",
    "rejected_tokens": "rejected tokens", "rejected_sequences": "rejected sequences", "weight_mean": "mean weight",
    "weight_bias": "bias of the bound", "loss_scale": "loss scale", "k3_kept": "K3 kept",
    "routing_differs": "routed otherwise",
}  # fmt: skip
"""What a metric is called where there is no room for its title."""
MAX_ROWS = 200
"""Rows of a table with one row per group; longer ones say how many they leave out."""


def text_cell(text: str, kind: str = "text") -> TableCell:
    """A cell of text from outside."""
    return TableCell(shorten_for_cell(text), kind=kind)


def number_cell(value: float, unit: str = "") -> TableCell:
    """A cell for a bare number."""
    return TableCell(format_number(value, unit), order=f"{value:.6g}")


def value_cell(value: Value, unit: str, *, errors: bool = True) -> TableCell:
    """A cell for a value: with ± where known and a note where that is too little, or a dash with its reason."""
    if value.value is None:
        return TableCell(DASH, value.status)
    reason, brief = (
        format_heavy_tail(value.covers) if errors and value.tail else "",
        format_estimate(value.value, None, unit),
    )
    return TableCell(
        format_estimate(value.value, value.se if errors else None, unit), reason, f"{value.value:.6g}", brief=brief
    )


def split_title(text: str) -> str:
    """A short title over two lines, as alike as its words allow."""
    words_of = text.split()
    halves = [(" ".join(words_of[:cut]), " ".join(words_of[cut:])) for cut in range(1, len(words_of))]
    return "\n".join(min(halves, key=lambda lines: max(map(len, lines)), default=(text,)))


@cache
def _mismatch_metrics() -> dict[str, Metric]:
    return {metric.key: metric for metric in (*MISMATCH_METRICS, *other_metrics())}


class MetricRegistry:
    """The metrics that a page can show, by scope: `m` the mismatch and drift, `c` corrections."""

    def __init__(self, corrections: Sequence[Correction] = ()) -> None:
        self.mismatch = _mismatch_metrics()
        self.corrections: dict[str, Metric] = {}
        for correction in corrections:
            for metric in correction_metrics(correction):
                self.corrections.setdefault(metric.key, _shared_metric(metric))
        self.used: dict[str, GlossaryEntry] = {}

    def metric(self, key: str, scope: str = "m") -> Metric:
        """The definition of a key; a key of another version stands for itself."""
        unknown = Metric(escape_terminal(key), escape_terminal(key), "", "not in this version's registry", "")
        metric = (self.mismatch if scope == "m" else self.corrections).get(key, unknown)
        self.used[f"{scope}-{key}"] = GlossaryEntry(f"{scope}-{key}", metric)
        return metric

    def head(self, key: str, scope: str = "m", text: str = "", drop: int | None = None) -> ColumnHeader:
        """The header of a column of one metric; `drop` as of a Head."""
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
    ) -> list[tuple[ColumnHeader, Callable[[Any], TableCell]]]:
        """A column per metric: `of` gives an item's values; keys may say `drop` of a head, `texts` says its text."""

        def cell(key: str) -> Callable[[Any], TableCell]:
            unit = self.metric(key, scope).unit
            return lambda item: value_cell(of(item).get(key, NOT_RECORDED), unit)

        drops, texts = keys if isinstance(keys, Mapping) else {}, texts or {}
        return [(self.head(key, scope, texts.get(key, ""), drops.get(key)), cell(key)) for key in keys]

    def series(
        self, groups: Groups, key: str, correction: str | None = None, *, drop: int | None = None, text: str = ""
    ) -> tuple[ColumnHeader, Callable[[Any], TableCell]]:
        """The column of one metric of groups, of the mismatch or of one correction; items are places of groups."""
        series, scope = groups.series(key, correction), "m" if correction is None else "c"
        return self.columns({key: drop}, lambda index: {key: series.at(index)}, scope, {key: escape_terminal(text)})[0]

    def entries(self, scope: str) -> list[GlossaryEntry]:
        """What was shown, in the order of the registry."""
        order = list(self.mismatch if scope == "m" else self.corrections)
        chosen = [entry for anchor, entry in self.used.items() if anchor.startswith(f"{scope}-")]
        known = {key: index for index, key in enumerate(order)}
        return sorted(chosen, key=lambda entry: known.get(entry.metric.key, len(known)))


def _shared_metric(metric: Metric) -> Metric:
    """A gate's metric without the words of the one correction that it came with."""
    gate = re.fullmatch(r"(gate\d+)_(\w+)_(\w+)", metric.key)
    return replace(metric, title=f"{gate[1].replace('gate', 'gate ')}: {gate[2]} too {gate[3]}") if gate else metric


def group_table(caption: str, first: str, groups: Groups, columns: Sequence[tuple[ColumnHeader, Any]]) -> Table:
    """One row per group; `columns` are those of its series."""
    names = (
        ColumnHeader(escape_terminal(first), numeric=False),
        lambda index: text_cell(format_label(groups.labels[index]), "name"),
    )
    table = Table.of(caption, range(min(len(groups.labels), MAX_ROWS)), [names, *columns], sortable=True)
    if len(groups.labels) > MAX_ROWS:
        table.left_out = f"The first {MAX_ROWS} of {len(groups.labels):,} rows; the JSON result holds all of them."
    return table
