"""Table helpers: columns of metrics linked to the glossary, cells with errors and reasons, and tables of runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from mismatchctl.core.formatting import DASH, format_count, format_estimate, format_heavy_tail, format_number
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.measure.metrics.evaluation import other_metrics
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.metrics.registry import COST_METRICS, MISMATCH_METRICS, correction_metrics
from mismatchctl.report.document import EVERYWHERE, Column, Headline, Note, Table, TableCell
from mismatchctl.results.model import Value
from mismatchctl.results.summary import STATUSES, RunStatus

SHORT_TITLES = {
    "k3": "K3", "abs_diff_mean": "mean |diff|", "abs_diff_max": "largest |diff|", "ratio_mean": "mean ratio",
    "ratio_mean_z": "z of mean ratio", "ess_token": "ESS tokens", "ess_sequence": "ESS sequences",
    "rejected_tokens": "rejected tokens", "rejected_sequences": "rejected sequences", "weight_mean": "mean weight",
    "weight_bias": "bias of the bound", "loss_scale": "loss scale", "k3_kept": "K3 left",
    "routing_differs": "other experts",
}  # fmt: skip
ERRORS = "± is half the width of the 95% interval. If the interval is skewed, its ends are in brackets"
MAX_ROWS = 200
MAX_RUNS = 14
SUMMARY_LENGTH, NOTE_LENGTH = 200, 140


def value_cell(value: Value, unit: str, *, errors: bool = True) -> TableCell:
    """Show a missing value as a dash, and its reason as a footnote."""
    if value.value is None:
        return TableCell(DASH, value.status)
    brief = format_number(value.value, unit)
    text = format_estimate(value.value, value.se, unit, value.interval) if errors else brief
    reason = format_heavy_tail(value.covers) if errors and value.tail else ""
    return TableCell(text, reason, f"{value.value:.6g}", brief=brief)


def by_severity(judged: Mapping[str, RunStatus]) -> list[str]:
    return sorted(judged, key=lambda name: STATUSES.index(judged[name].status))


def runs_headline(judged: Mapping[str, RunStatus], calm: str, subtitle: str = "") -> Headline:
    """Build a headline: "2 of 5 runs need attention" or `calm` (0 of 5), or the status text of a single run."""
    worst, bad = by_severity(judged)[0], sum(one.status != "OK" for one in judged.values())
    title = f"{bad} of {len(judged)} runs need{'s' * (bad == 1)} attention" if bad else calm
    title = f"{worst}: {judged[worst].text}" if len(judged) == 1 else title
    return Headline(title, subtitle=subtitle, status=judged[worst].status)


def runs_table(
    judged: Mapping[str, RunStatus], head: str, *more: Column, title: str = "", most: int = MAX_RUNS
) -> Iterator[Table | Note]:
    """Yield a table of the runs with the worst status, and a note that counts the other runs."""
    order = by_severity(judged)
    shown = order[: most + (len(order) == most + 1)]
    answer = Column(head, lambda name: judged[name].text, "text", 1, flexible=True)
    columns = [Column("run", kind="name"), Column("status", lambda name: judged[name].status, "text", 0), *more, answer]
    yield Table.of("", shown, columns, title=title, reach=EVERYWHERE)
    if rest := order[len(shown) :]:
        counts = Counter(judged[name].status for name in rest)
        left = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
        yield Note(f"{format_count(len(rest), 'more run')}: {left}")


@cache
def _known_metrics() -> dict[tuple[str, str], Metric]:
    example = Correction(name="example", gates=(Gate(level="min", keep=(1e-4, None)),))
    mismatch, corrections = (*MISMATCH_METRICS, *other_metrics()), (*correction_metrics(example), *COST_METRICS)
    return {(scope, one.key): one for scope, found in (("m", mismatch), ("c", corrections)) for one in found}


def find_metric(key: str, scope: str = "m") -> Metric:
    """Find a metric of the mismatch (scope `m`) or of corrections (`c`). Return a placeholder for an unknown key."""
    gate = re.fullmatch(r"gate(\d+)_(\w+)_(\w+)", key)
    if gate and (found := _known_metrics().get((scope, f"gate0_{gate[2]}_{gate[3]}"))):
        title, about = (text.replace("gate 0", f"gate {gate[1]}") for text in (found.title, found.definition))
        return replace(found, key=key, title=re.sub(r" \(.*\)", "", title), definition=about)
    return _known_metrics().get((scope, key)) or Metric(key, key, "", "not in this version's registry", "")


def metric_columns(
    keys: Iterable[str] | Mapping[str, int | None], value: Callable[[Any, str], Value],
    scope: str = "m", titles: Mapping[str, str] | None = None, *, errors: bool = True,
) -> list[Column]:  # fmt: skip
    """Return a column per metric, whose cells show `value(item, key)`. A number in `keys` sets `Column.drop`."""

    def column(key: str) -> Column:
        metric, text = find_metric(key, scope), (titles or {}).get(key, "")
        return Column(
            text or metric.title,
            lambda item: value_cell(value(item, key), metric.unit, errors=errors),
            drop=keys[key] if isinstance(keys, Mapping) else None,
            unit="" if metric.unit in ("-", metric.title, "fraction") else metric.unit,
            description=f"{metric.definition}. {metric.meaning}", anchor=f"{scope}-{key}",
            short="" if text else SHORT_TITLES.get(key, ""),
        )  # fmt: skip

    return [column(key) for key in keys]
