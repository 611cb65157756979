"""The longer tables of one run: the worst, the breakdowns, every number, what the run itself logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mismatchctl.correction import Correction
from mismatchctl.measure import PAIRS
from mismatchctl.measure.metrics import Metric, pair_metrics
from mismatchctl.measure.metrics.facets import FACET_METRICS, SECTIONS, kl_key
from mismatchctl.measure.metrics.metric import AGGREGATIONS, SUFFIXES
from mismatchctl.numbers import DASH, number
from mismatchctl.render.document import USUAL, Columns, Head, Note, Part, Section, Table, TableCell
from mismatchctl.render.tables import Registry, amount, group_table, measured, words
from mismatchctl.render.text import clean, label
from mismatchctl.result import AgainstLog, AgainstMetrics, Provenance, RunResult, Value, WorstSequence, WorstToken
from mismatchctl.vocabulary import vocabulary_of

if TYPE_CHECKING:  # comparing takes a tenth of a second to import
    from mismatchctl.compare.model import MovedToken

STEP_KEYS = (
    "tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_p99", "abs_diff_max", "ratio_mean", "ratio_mean_z",
    "chi2_token", "ess_token", "ess_sequence", "khat_token", "khat_sequence", "prob_corr", "bitwise_share", "drift_k3",
    "ois", "total_k3", "rollout_reference_k3", "train_reference_k3", "ref_k3", "routing_differs",
)  # fmt: skip
BY_KEYS = {
    "tokens": 1, "sequences": 2, "k3": 0, "abs_diff_mean": 4, "abs_diff_max": None, "ratio_mean": 5, "ess_token": None,
    "ess_sequence": 3, "routing_differs": 6,
}  # fmt: skip
"""Metrics by a column, and how early each goes where there is little room; None: it stands on the page alone."""
MOST_GROUPS = 12
"""Values of a `--by` column that a terminal shows."""
STEP_CORRECTION_KEYS = ("rejected_tokens", "ess_token", "loss_scale")
_SEQUENCES = "The log ratio is train minus rollout; K3 and |difference| are means over the sequence's tokens."
_TOKENS = "The log ratio is train minus rollout; positions count from the sequence's first valid token."
LOGGED_STEPS = 8
"""Steps of which a framework's values are shown, the first and the last among them."""
WORST_SHOWN = 20
"""Worst sequences and tokens on the page; the result holds fifty."""


def worst_sequences(rows: Sequence[WorstSequence]) -> Table | None:
    """The sequences whose log ratios add up to most."""
    shown = rows[:WORST_SHOWN]
    vocabulary, starts = vocabulary_of(None, (row.token_ids for row in shown)), any(row.token_ids for row in shown)
    about = "Sum over tokens of train minus rollout; its exp is the sequence's ratio."
    columns: Columns[WorstSequence] = [
        *PLACE,
        (Head("tokens", about="valid tokens"), lambda row: amount(row.tokens, "tokens")),
        (Head("sum of log ratios", "nats", about), lambda row: amount(row.log_ratio_sum)),
        (Head("K3", "nats/token", "mean of exp(x) - 1 - x over the sequence's tokens"), lambda row: amount(row.k3)),
        (Head("mean |difference|", "nats", "mean of |x| over its tokens"), lambda row: amount(row.abs_diff_mean)),
        *([("starts with", lambda row: words(vocabulary.text(row.token_ids), "code"))] if starts else []),
    ]  # fmt: skip
    caption = (
        f"The {len(shown)} sequences with the largest |sum of log ratios|{_of(len(shown), len(rows))}. {_SEQUENCES}"
    )
    return Table.of(caption, shown, columns, sortable=True) if shown else None


def worst_tokens(rows: Sequence[WorstToken]) -> Table | None:
    """The tokens with the largest |log ratio|, in their context."""
    shown = rows[:WORST_SHOWN]
    columns: Columns[WorstToken] = [
        *PLACE,
        *token_columns(shown),
        (Head("rollout", "log-prob", "as the rollout engine recorded it"), lambda row: amount(row.rollout_log_prob)),
        (Head("train", "log-prob", "as the trainer computed it"), lambda row: amount(row.train_log_prob)),
        (Head("log ratio", "nats", "train minus rollout"), lambda row: amount(row.log_ratio)),
    ]  # fmt: skip
    caption = f"The {len(shown)} tokens with the largest |log ratio|{_of(len(shown), len(rows))}. {_TOKENS}"
    return Table.of(caption, shown, columns, sortable=True) if shown else None


def _of(shown: int, known: int) -> str:
    return f" (of {known} in the JSON result)" if known > shown else ""


def _id(value: str | int | float | bool | None) -> TableCell:
    return words(DASH if value is None else label(value))


PLACE: Columns[Any] = (
    ("step", lambda row: _id(row.step)),
    ("sequence", lambda row: _id(row.sequence_id)),
    ("prompt", lambda row: _id(row.prompt_id)),
    ("file: row", lambda row: words(f"{row.file.rsplit('/', 1)[-1]}: {row.row}", "place")),
)
"""Where a token or a sequence is."""


def token_columns(rows: Sequence[WorstToken | MovedToken]) -> Columns[Any]:
    """Which token it is, and what came before it, where ids are known."""
    ids = [[row.token_id] for row in rows if row.token_id is not None]
    text = vocabulary_of(None, [*(row.context_ids for row in rows), *ids]).text
    place = Head("position", about="counted from the sequence's first valid token")
    columns: list[Any] = [(place, lambda row: amount(row.position, "tokens"))]
    if ids:
        columns += [
            ("what came before", lambda row: words(text(row.context_ids), "before")),
            ("token", lambda row: words("" if row.token_id is None else text([row.token_id]), "code")),
        ]
    return columns


def by_tables(corrections: Sequence[Correction], run: RunResult, registry: Registry, name: str) -> list[Table]:
    """One table per `--by` column: the mismatch, and what each correction rejects there."""
    tables, gated = [], [correction.name for correction in corrections if correction.gates]
    for column, groups in run.by.items():
        columns = [registry.series(groups, key, drop=drop) for key, drop in BY_KEYS.items() if key in groups.metrics]
        for rule in (rule for rule in gated if rule in groups.corrections):
            columns.append(registry.series(groups, "rejected_tokens", rule, text=f"rejected by {rule}"))
        table = group_table(f"By {clean(column)}", column, groups, columns)
        table.title, table.reach, table.most = f"{table.caption}{name}", USUAL, MOST_GROUPS
        tables.append(table)
    return tables


def step_tables(run: RunResult, registry: Registry) -> list[Table]:
    """The main metrics of each step, and what each correction does there."""
    groups = run.groups
    own = [registry.series(groups, key) for key in STEP_KEYS if key in groups.metrics]
    tables = [group_table("The mismatch by step", "step", groups, own)]
    for key in STEP_CORRECTION_KEYS if groups.corrections else ():
        columns = [registry.series(groups, key, name, text=name) for name in groups.corrections]
        title = registry.metric(key, "c").title
        tables.append(group_table(f"{title[0].upper()}{title[1:]} by step", "step", groups, columns))
    return tables


def metric_tables(run: RunResult, registry: Registry) -> list[Table]:
    """Every metric of the run with its meaning: the mismatch, then other pairs of policies, then facets."""
    own, tables = list(run.overall.metrics), []
    parts = {pair.section: pair_metrics(pair) for pair in PAIRS[1:]}
    parts |= {SECTIONS[name]: metrics for name, metrics in FACET_METRICS.items()}
    for title, metrics in parts.items():
        known = {metric.key for metric in metrics}
        keys = [key for key in own if key in known]
        if keys:
            tables.append(_metric_table(title, keys, run, registry))
        own = [key for key in own if key not in known]
    return [_metric_table("Every metric of the mismatch", own, run, registry), *tables]


def correction_metric_table(run: RunResult, registry: Registry) -> Table:
    """Every metric of every correction: one row per metric, one column per correction."""
    known = dict.fromkeys(key for values in run.overall.corrections.values() for key in values)
    columns: list[Any] = [("metric", lambda one: TableCell(one.title, kind="name", anchor=f"c-{one.key}"))]
    absent = Value(value=None, status="this correction has none")
    for name, values in run.overall.corrections.items():
        columns.append((Head(clean(name)), lambda one, own=values: measured(own.get(one.key, absent), one.unit)))
    columns.append(("unit", lambda one: one.unit))
    caption = "Every metric of the corrections: ± is one standard error over clusters."
    return Table.of(caption, [registry.metric(key, "c") for key in known], columns)


def logged_table(run: RunResult, framework: str) -> Table:
    """What a framework would have logged: one row per correction and name, one column per step."""
    steps, last = len(run.groups.labels), len(run.groups.labels) - 1
    chosen = sorted({round(index * last / (LOGGED_STEPS - 1)) for index in range(LOGGED_STEPS)})
    status = "nothing finite is logged in this step"
    columns: list[Any] = [
        ("correction", lambda row: words(row[0], "name")),
        ("name", lambda row: words(row[1], "name")),
    ]
    for index in chosen:
        value = lambda row, index=index: measured(Value(value=row[2][index], status=status), "")  # noqa: E731
        columns.append((Head(f"step {label(run.groups.labels[index])}"), value))
    caption = f"What {clean(framework)} would have logged: by its own names, as its own code computes them."
    rows = [(name, *item) for name, names in run.logged.items() for item in names.items()]
    left_out = f"{len(chosen)} of {steps:,} steps; the JSON result holds all of them." if len(chosen) < steps else ""
    return Table.of(caption, rows, columns, left_out=left_out)


def breakdown_tables(run: RunResult, registry: Registry) -> list[Table]:
    """The numbers behind the figures of K3 by position, probability and length."""
    tables = []
    for found in run.breakdowns.values():
        title, shown = _QUANTITIES.get(found.quantity, (clean(found.quantity), number))
        rows = [
            {"k3": Value(value=k3, se=k3_se), "abs_diff_mean": Value(value=difference, se=difference_se)}
            for k3, k3_se, difference, difference_se in zip(
                found.k3, found.k3_se, found.abs_diff, found.abs_diff_se, strict=True
            )
        ]
        if found.logit_shift is not None and found.logit_shift_se is not None:
            for row, shift, shift_se in zip(rows, found.logit_shift, found.logit_shift_se, strict=True):
                row["logit_shift"] = Value(value=shift, se=shift_se, status="every token is certain")
        columns: list[Any] = [
            (title, lambda item, shown=shown: words(shown(item[0]), "name")),
            (registry.head("tokens"), lambda item: amount(item[1], "tokens")),
            *registry.columns(rows[0] if rows else (), lambda item: item[2]),
        ]
        items = zip(found.low, found.tokens, rows, strict=True)
        tables.append(Table.of(f"By {title}: from each value up to the next", items, columns))
    return tables


_QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "position": ("position in the response", lambda low: f"{low:,.3g}"),
    "surprisal": ("rollout probability", lambda low: number(math.exp(-low), "probability")),
    "length": ("response length in tokens", lambda low: f"{low:,.6g}"),
}


def _metric_table(caption: str, keys: Sequence[str], run: RunResult, registry: Registry) -> Table:
    def interval(metric: Metric) -> TableCell:
        ends = run.overall.metrics[metric.key].interval
        return TableCell(DASH if ends is None else " … ".join(number(end, metric.unit) for end in ends))

    return Table.of(f"{caption}: ± is one standard error over clusters.", [registry.metric(key) for key in keys], (
        ("metric", lambda metric: TableCell(metric.title, kind="name", anchor=f"m-{metric.key}")),
        (Head("value"), lambda metric: measured(run.overall.metrics[metric.key], metric.unit)),
        (Head("90 % interval"), interval),
        ("unit", lambda metric: metric.unit),
        ("what it says", lambda metric: words(metric.meaning, "prose")),
    ))  # fmt: skip


def objectives(run: RunResult, name: str, anchor: str, kinds: Sequence[str], aggregations: Sequence[str]) -> Section:
    """One row per KL to the reference policy and per correction's loss, one column per aggregation, as asked for."""
    chosen = aggregations or AGGREGATIONS
    metrics, rows = run.overall.metrics, dict[str, list[Value]]()
    for kind in kinds:
        for unbiased in (False, True):
            values = [metrics[kl_key(kind, each, unbiased=unbiased)] for each in chosen]
            rows[f"KL to ref, {kind}{', unbiased' if unbiased else ''}"] = values
    for correction, found in run.overall.corrections.items():
        if aggregations and "loss" in found:
            rows[f"loss, {correction}"] = [found[f"loss{SUFFIXES[each]}"] for each in chosen]
    columns: list[Any] = [("objective", lambda item: words(item[0], "name"))]
    for place, each in enumerate(chosen):
        columns.append((Head(each, drop=0, short=each), lambda item, place=place: measured(item[1][place], "")))
    table = Table.of(f"What {name} would minimize", rows.items(), columns, reach=USUAL)
    return Section("What it would minimize", f"{anchor}-objectives").add(table)


def against(run: RunResult, name: str, anchor: str, provenance: Provenance) -> Section:
    """For each correction, where the run's log and the dump agree and where not; and how K3 lags it."""
    section, log = Section("The run's log", f"{anchor}-log"), provenance.log
    for correction, found in run.against.items():
        section.add(*_compared(f"{log} against {provenance.framework} on {name}, correction {correction}", found))
    told = run.against_metrics or AgainstMetrics()
    if told.names:
        called = {f"{logged} ({told.metrics[logged]})": found for logged, found in told.names.items()}
        section.add(*_compared(f"{log} against the metrics of {name}", AgainstLog(names=called)))
    compared = {name for found in run.against.values() for name in found.names} | {*told.names}
    others = [
        name for name in run.log
        if name not in compared and name.removeprefix("train/").removeprefix("actor/") not in compared
    ]  # fmt: skip
    section.add(Note(f"kept from the log, not compared: {', '.join(others)}", reach=USUAL) if others else None)
    lags = (f"{logged}: K3 {lag.text}" for logged, lag in run.lags.items() if lag.steps is not None)
    return section.add(*(Note(sentence, reach=USUAL) for sentence in lags))


def _compared(title: str, found: AgainstLog) -> Iterator[Part]:
    title = f"{title}: {sum(name.agrees for name in found.names.values())} of {len(found.names)} names agree"
    if found.names:
        yield Table.of(title, found.names.items(), (
            ("name", lambda item: words(item[0], "name")),
            (Head("", numeric=False, drop=0), lambda item: "agrees" if item[1].agrees else "DIFFERS"),
            (Head("largest difference", drop=0), lambda item: f"{item[1].difference:.1e}"),
            (Head("allowed", drop=4), lambda item: f"{item[1].allowed:.1e}"),
            (Head("at step", drop=3), lambda item: item[1].step),
            (Head("dump", drop=1), lambda item: number(item[1].dump)),
            (Head("log", drop=1), lambda item: number(item[1].log)),
            (Head("steps", drop=2), lambda item: str(item[1].steps)),
        ), reach=USUAL)  # fmt: skip
    else:
        yield Note(title, reach=USUAL)
    if found.missing:
        yield Note(f"not in the log: {', '.join(found.missing)}", reach=USUAL)
