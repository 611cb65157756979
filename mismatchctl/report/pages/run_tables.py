"""Tables of one run: metrics, corrections, breakdowns, worst tokens, run log and input files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mismatchctl.core.formatting import DASH, escape_terminal, format_bytes, format_label, format_number
from mismatchctl.corrections.labels import correction_label, gate_label
from mismatchctl.corrections.model import Correction
from mismatchctl.data.tokenizer import load_vocabulary
from mismatchctl.io.yaml import dump_yaml
from mismatchctl.measure.columns import PAIRS
from mismatchctl.measure.metrics.evaluation import pair_metrics
from mismatchctl.measure.metrics.facets import FACET_METRICS, FACET_SECTIONS, kl_key
from mismatchctl.measure.metrics.metric import AGGREGATION_SUFFIXES, AGGREGATIONS, Metric
from mismatchctl.report.document import (
    EVERYWHERE,
    PAGE_ONLY,
    TERMINAL_AND_PAGE,
    Code,
    ColumnHeader,
    DocumentPart,
    Facts,
    Note,
    Section,
    Table,
    TableCell,
    TableColumns,
)
from mismatchctl.report.tables import (
    SHORT_TITLES,
    MetricRegistry,
    group_table,
    number_cell,
    text_cell,
    value_cell,
)
from mismatchctl.results.model import (
    MASKED_TOKENS,
    NOT_RECORDED,
    FreshBatch,
    InputFile,
    LogComparison,
    MetricLogComparison,
    Provenance,
    Result,
    RunResult,
    SkippedData,
    Value,
    WorstSequence,
    WorstToken,
)
from mismatchctl.results.summary import names_not_compared

if TYPE_CHECKING:
    from mismatchctl.api.compare.comparison import MovedToken

STEP_KEYS = (
    "tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_p99", "abs_diff_max", "ratio_mean", "ratio_mean_z",
    "chi2_token", "ess_token", "ess_sequence", "khat_token", "khat_sequence", "prob_corr", "bitwise_share", "drift_k3",
    "ois", "total_k3", "rollout_reference_k3", "train_reference_k3", "ref_k3", "routing_differs",
)  # fmt: skip
BREAKDOWN_KEYS = {
    "tokens": 1, "sequences": 2, "k3": 0, "abs_diff_mean": 4, "abs_diff_max": None, "ratio_mean": 5, "ess_token": None,
    "ess_sequence": 3, "routing_differs": 6,
}  # fmt: skip
"""Metrics of a breakdown with their `ColumnHeader.drop`."""
MAX_GROUPS = 12
"""Values of a `--by` column in a terminal."""
STEP_CORRECTION_KEYS = ("rejected_tokens", "ess_token", "loss_scale")
_SEQUENCES_NOTE = "The log ratio is train minus rollout; K3 and |difference| are means over the sequence's tokens."
_TOKENS_NOTE = "The log ratio is train minus rollout; positions count from the sequence's first valid token."
MAX_LOGGED_STEPS = 8
"""Steps in the table of a framework's logged values, including the first and the last."""
MAX_SHARED_STEPS = 50
"""Steps in the table of K3 with a column per run."""
MAX_WORST_ROWS = 20
"""Worst sequences and tokens on the page. The Result contains fifty."""


def worst_sequences_table(rows: Sequence[WorstSequence], most: int | None = None) -> Table | None:
    """Return the sequences with the largest sum of log ratios."""
    shown = rows[: most or MAX_WORST_ROWS]
    vocabulary, starts = load_vocabulary(None, (row.token_ids for row in shown)), any(row.token_ids for row in shown)
    about = "Sum over tokens of train minus rollout; its exp is the sequence's ratio."
    columns: TableColumns[WorstSequence] = [
        *PLACE_COLUMNS,
        (ColumnHeader("tokens", description="valid tokens"), lambda row: number_cell(row.tokens, "tokens")),
        (ColumnHeader("sum of log ratios", "nats", about), lambda row: number_cell(row.log_ratio_sum)),
        (ColumnHeader("K3", "nats/token", "mean of exp(x) - 1 - x over the sequence's tokens"),
         lambda row: number_cell(row.k3)),
        (ColumnHeader("mean |difference|", "nats", "mean of |x| over its tokens"),
         lambda row: number_cell(row.abs_diff_mean)),
        *([("starts with", lambda row: text_cell(vocabulary.text(row.token_ids), "code"))] if starts else []),
    ]  # fmt: skip
    caption = (
        f"The {len(shown)} sequences with the largest |sum of log ratios|{_format_shown(len(shown), len(rows))}. "
        f"{_SEQUENCES_NOTE}"
    )
    return Table.of(caption, shown, columns, sortable=True) if shown else None


def worst_tokens_table(rows: Sequence[WorstToken], most: int | None = None) -> Table | None:
    """Return the tokens with the largest |log ratio| and their context."""
    shown = rows[: most or MAX_WORST_ROWS]
    columns: TableColumns[WorstToken] = [
        *PLACE_COLUMNS,
        *token_columns(shown),
        (ColumnHeader("rollout", "log-prob", "as the rollout engine recorded it"),
         lambda row: number_cell(row.rollout_log_prob)),
        (ColumnHeader("train", "log-prob", "as the trainer computed it"), lambda row: number_cell(row.train_log_prob)),
        (ColumnHeader("log ratio", "nats", "train minus rollout"), lambda row: number_cell(row.log_ratio)),
    ]  # fmt: skip
    caption = (
        f"The {len(shown)} tokens with the largest |log ratio|{_format_shown(len(shown), len(rows))}. {_TOKENS_NOTE}"
    )
    return Table.of(caption, shown, columns, sortable=True) if shown else None


def _format_shown(shown: int, known: int) -> str:
    return f" (of {known} in the JSON result)" if known > shown else ""


def _id_cell(value: str | int | float | bool | None) -> TableCell:
    return text_cell(DASH if value is None else format_label(value))


PLACE_COLUMNS: TableColumns[Any] = (
    ("step", lambda row: _id_cell(row.step)),
    ("sequence", lambda row: _id_cell(row.sequence_id)),
    ("prompt", lambda row: _id_cell(row.prompt_id)),
    ("file: row", lambda row: text_cell(f"{row.file.rsplit('/', 1)[-1]}: {row.row}", "place")),
)
"""Location of a token or a sequence."""


def token_columns(rows: Sequence[WorstToken | MovedToken]) -> TableColumns[Any]:
    """Return the columns of position, context and token. Context and token need token ids."""
    ids = [[row.token_id] for row in rows if row.token_id is not None]
    text = load_vocabulary(None, [*(row.context_ids for row in rows), *ids]).text
    place = ColumnHeader("position", description="counted from the sequence's first valid token")
    columns: list[Any] = [(place, lambda row: number_cell(row.position, "tokens"))]
    if ids:
        columns += [
            ("what came before", lambda row: text_cell(text(row.context_ids), "before")),
            ("token", lambda row: text_cell("" if row.token_id is None else text([row.token_id]), "code")),
        ]
    return columns


def by_column_tables(
    corrections: Sequence[Correction], run: RunResult, registry: MetricRegistry, name: str
) -> list[Table]:
    """Return a table per `--by` column with the mismatch and the rejected tokens."""
    tables, gated = [], [correction.name for correction in corrections if correction.gates]
    for column, groups in run.by.items():
        columns = [
            registry.series(groups, key, drop=drop) for key, drop in BREAKDOWN_KEYS.items() if key in groups.metrics
        ]
        for rule in (rule for rule in gated if rule in groups.corrections):
            columns.append(registry.series(groups, "rejected_tokens", rule, text=f"rejected by {rule}"))
        table = group_table(f"By {escape_terminal(column)}", column, groups, columns)
        table.title, table.reach, table.max_rows = f"{table.caption}{name}", TERMINAL_AND_PAGE, MAX_GROUPS
        tables.append(table)
    return tables


def step_tables(run: RunResult, registry: MetricRegistry) -> list[Table]:
    """Return the main metrics by step."""
    groups = run.groups
    own = [registry.series(groups, key) for key in STEP_KEYS if key in groups.metrics]
    tables = [group_table("The mismatch by step", "step", groups, own)]
    for key in STEP_CORRECTION_KEYS if groups.corrections else ():
        columns = [registry.series(groups, key, name, text=name) for name in groups.corrections]
        title = registry.metric(key, "c").title
        tables.append(group_table(f"{title[0].upper()}{title[1:]} by step", "step", groups, columns))
    return tables


def metric_tables(runs: Mapping[str, RunResult], registry: MetricRegistry, *, brief: bool) -> list[Table]:
    """Return every metric with a column per run: the mismatch, other pairs of policies, and facets.

    `brief` returns the mismatch alone, without errors.
    """
    own, tables = list(dict.fromkeys(key for run in runs.values() for key in run.overall.metrics)), []
    parts = {pair.section: pair_metrics(pair) for pair in PAIRS[1:]}
    parts |= {FACET_SECTIONS[name]: metrics for name, metrics in FACET_METRICS.items()}
    for title, metrics in parts.items():
        known = {metric.key for metric in metrics}
        keys = [key for key in own if key in known]
        if keys:
            tables.append(_build_metric_table(title, keys, runs, registry))
        own = [key for key in own if key not in known]
    main = _build_metric_table("Metrics of the mismatch", own, runs, registry, errors=not brief)
    main.left_out = "The JSON result has standard errors and the other metrics." if brief else ""
    return [main] if brief else [main, *tables]


def k3_steps_table(runs: Mapping[str, RunResult]) -> list[Table]:
    """Return K3 by step with a column per run, for pages with many runs."""
    series = {name: run.groups.series("k3").value for name, run in runs.items()}
    values = {
        name: dict(zip(map(format_label, run.groups.labels), series[name], strict=True)) for name, run in runs.items()
    }
    steps = list(dict.fromkeys(step for found in values.values() for step in found))
    shown = steps[:: math.ceil(len(steps) / MAX_SHARED_STEPS)]
    columns: list[Any] = [("step", lambda step: text_cell(step, "name"))]
    for name, found in values.items():
        columns.append((ColumnHeader(escape_terminal(name)), lambda step, found=found: format_number(found.get(step))))
    left_out = (
        f"{len(shown)} of {len(steps):,} steps. The JSON result has all of them." if len(shown) < len(steps) else ""
    )
    return [Table.of("K3 by step, in nats/token", shown, columns, left_out=left_out)]


def correction_metric_table(run: RunResult, registry: MetricRegistry) -> Table:
    """Return every metric of the corrections, with one column per correction."""
    known = dict.fromkeys(key for values in run.overall.corrections.values() for key in values)
    columns: list[Any] = [("metric", lambda one: TableCell(one.title, kind="name", anchor=f"c-{one.key}"))]
    absent = Value(value=None, status="this correction has none")
    for name, values in run.overall.corrections.items():
        columns.append(
            (
                ColumnHeader(escape_terminal(name)),
                lambda one, own=values: value_cell(own.get(one.key, absent), one.unit),
            )
        )
    columns.append(("unit", lambda one: one.unit))
    caption = "Every metric of the corrections: ± is one standard error over clusters."
    return Table.of(caption, [registry.metric(key, "c") for key in known], columns)


def logged_table(run: RunResult, framework: str) -> Table:
    """Return the values that a framework would log, with one column per step."""
    steps, last = len(run.groups.labels), len(run.groups.labels) - 1
    chosen = sorted({round(index * last / (MAX_LOGGED_STEPS - 1)) for index in range(MAX_LOGGED_STEPS)})
    status = "nothing finite is logged in this step"
    columns: list[Any] = [
        ("correction", lambda row: text_cell(row[0], "name")),
        ("name", lambda row: text_cell(row[1], "name")),
    ]
    for index in chosen:
        value = lambda row, index=index: value_cell(Value(value=row[2][index], status=status), "")  # noqa: E731
        columns.append((ColumnHeader(f"step {format_label(run.groups.labels[index])}"), value))
    caption = f"What {escape_terminal(framework)} would have logged: by its own names, as its own code computes them."
    rows = [(name, *item) for name, names in run.logged.items() for item in names.items()]
    left_out = f"{len(chosen)} of {steps:,} steps; the JSON result holds all of them." if len(chosen) < steps else ""
    return Table.of(caption, rows, columns, left_out=left_out)


def breakdown_tables(run: RunResult, registry: MetricRegistry) -> list[Table]:
    """Return the numbers behind the figures of K3 by position, probability and length."""
    tables = []
    for found in run.breakdowns.values():
        title, shown = _QUANTITIES.get(found.quantity, (escape_terminal(found.quantity), format_number))
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
            (title, lambda item, shown=shown: text_cell(shown(item[0]), "name")),
            (registry.head("tokens"), lambda item: number_cell(item[1], "tokens")),
            *registry.columns(rows[0] if rows else (), lambda item: item[2]),
        ]
        items = zip(found.low, found.tokens, rows, strict=True)
        tables.append(Table.of(f"By {title}: from each value up to the next", items, columns))
    return tables


_QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "position": ("position in the response", lambda low: f"{low:,.3g}"),
    "surprisal": ("rollout probability", lambda low: format_number(math.exp(-low), "probability")),
    "length": ("response length in tokens", lambda low: f"{low:,.6g}"),
}


def _build_metric_table(
    caption: str, keys: Sequence[str], runs: Mapping[str, RunResult], registry: MetricRegistry, *, errors: bool = True
) -> Table:
    def value(run: RunResult) -> Callable[[Metric], TableCell]:
        return lambda metric: value_cell(run.overall.metrics.get(metric.key, NOT_RECORDED), metric.unit, errors=errors)

    def interval(metric: Metric) -> TableCell:
        ends = next(iter(runs.values())).overall.metrics[metric.key].interval
        return TableCell(DASH if ends is None else " to ".join(format_number(end, metric.unit) for end in ends))

    columns: list[Any] = [("metric", lambda metric: TableCell(metric.title, kind="name", anchor=f"m-{metric.key}"))]
    for name, run in runs.items():
        columns.append((ColumnHeader("value" if len(runs) == 1 else escape_terminal(name)), value(run)))
    columns += [(ColumnHeader("90% interval"), interval)] if len(runs) == 1 else []
    columns.append(("unit", lambda metric: metric.unit))
    columns += [("meaning", lambda metric: text_cell(metric.meaning, "prose"))] if len(runs) == 1 else []
    caption = f"{caption}: ± is one standard error." if errors else caption
    return Table.of(caption, [registry.metric(key) for key in keys], columns)


def objectives_section(
    run: RunResult, name: str, anchor: str, kinds: Sequence[str], aggregations: Sequence[str]
) -> Section:
    """Build the table of KL and loss values, with one column per aggregation."""
    chosen = aggregations or AGGREGATIONS
    metrics, rows = run.overall.metrics, dict[str, list[Value]]()
    for kind in kinds:
        for unbiased in (False, True):
            values = [metrics[kl_key(kind, each, unbiased=unbiased)] for each in chosen]
            rows[f"KL to ref, {kind}{', unbiased' if unbiased else ''}"] = values
    for correction, found in run.overall.corrections.items():
        if aggregations and "loss" in found:
            rows[f"loss, {correction}"] = [found[f"loss{AGGREGATION_SUFFIXES[each]}"] for each in chosen]
    columns: list[Any] = [("objective", lambda item: text_cell(item[0], "name"))]
    for place, each in enumerate(chosen):
        columns.append(
            (ColumnHeader(each, drop=0, short=each), lambda item, place=place: value_cell(item[1][place], ""))
        )
    table = Table.of(f"What {name} would minimize", rows.items(), columns, reach=TERMINAL_AND_PAGE)
    return Section("What it would minimize", f"{anchor}-objectives").add(table)


def run_log_section(run: RunResult, name: str, anchor: str, provenance: Provenance) -> Section:
    """Build the comparison of the run's log with the dump, and the lags of K3."""
    section, log = Section("The run's log", f"{anchor}-log"), provenance.log
    for correction, found in run.against.items():
        section.add(
            *_agreement_parts(f"{log} against {provenance.framework} on {name}, correction {correction}", found)
        )
    metrics_log = run.against_metrics or MetricLogComparison()
    if metrics_log.names:
        labeled = {f"{logged} ({metrics_log.metrics[logged]})": found for logged, found in metrics_log.names.items()}
        section.add(*_agreement_parts(f"{log} against the metrics of {name}", LogComparison(names=labeled)))
    others = names_not_compared(run)
    section.add(
        Note(f"kept from the log, not compared: {', '.join(others)}", reach=TERMINAL_AND_PAGE) if others else None
    )
    section.add(Note(run.order, reach=EVERYWHERE) if run.order else None)
    lags = (f"{logged}: K3 {lag.text}" for logged, lag in run.lags.items() if lag.steps is not None)
    return section.add(*(Note(sentence, reach=TERMINAL_AND_PAGE) for sentence in lags))


def _agreement_parts(title: str, found: LogComparison) -> Iterator[DocumentPart]:
    title = f"{title}: {sum(name.agrees for name in found.names.values())} of {len(found.names)} names agree"
    if found.names:
        yield Table.of(title, found.names.items(), (
            ("name", lambda item: text_cell(item[0], "name")),
            (ColumnHeader("", numeric=False, drop=0), lambda item: "agrees" if item[1].agrees else "DIFFERS"),
            (ColumnHeader("largest difference", drop=0), lambda item: f"{item[1].difference:.1e}"),
            (ColumnHeader("allowed", drop=4), lambda item: f"{item[1].allowed:.1e}"),
            (ColumnHeader("at step", drop=3), lambda item: item[1].step),
            (ColumnHeader("dump", drop=1), lambda item: format_number(item[1].dump)),
            (ColumnHeader("log", drop=1), lambda item: format_number(item[1].log)),
            (ColumnHeader("steps", drop=2), lambda item: str(item[1].steps)),
        ), reach=TERMINAL_AND_PAGE)  # fmt: skip
    else:
        yield Note(title, reach=TERMINAL_AND_PAGE)
    if found.missing:
        yield Note(f"not in the log: {', '.join(found.missing)}", reach=TERMINAL_AND_PAGE)


LOSS_KEYS = ("loss", "loss_change", "loss_clip_fraction", "gradient_cosine", "gradient_norm")
SELECTION_KEYS = tuple(f"{side}_{name}" for name in ("reward", "advantage", "length") for side in ("kept", "rejected"))


def comparison_of_corrections(result: Result, registry: MetricRegistry) -> Table:
    """Return one row per run and correction: meaning, rejection, remaining K3, cost, and a fresh batch."""
    runs, several = result.runs, len(result.runs) > 1
    known = {correction.name: correction for correction in result.corrections}
    rows = [
        (place, run, correction, values)
        for place, (run, found) in enumerate(runs.items())
        for correction, values in found.overall.corrections.items()
    ]
    Row = tuple[int, str, str, Mapping[str, Value]]

    def meaning(row: Row) -> TableCell:
        correction = known.get(row[2])
        return text_cell("" if correction is None else correction_label(correction), "prose")

    def needed(row: Row) -> TableCell:
        ess = row[3].get("ess_token", NOT_RECORDED).value
        return TableCell(f"{1 / ess:.3g}x", sort_key=f"{1 / ess:.6g}") if ess else TableCell(DASH)

    def fresh(row: Row) -> TableCell:
        found = runs[row[1]].fresh_batches.get(row[2])
        return TableCell(DASH, "not predicted") if found is None else _fresh_batch_cell(found)

    def shown(drops: Mapping[str, int]) -> list[tuple[ColumnHeader, Callable[[Any], TableCell]]]:
        texts = {key: SHORT_TITLES[key] for key in drops}
        return registry.columns(drops, lambda row: row[3], "c", texts, errors=False)

    about, kind = "predicted share of tokens, with its 90% interval", "text" if several else "name"
    columns: list[Any] = [("run", lambda row: text_cell(row[1], "name"))] if several else []
    columns += [
        (ColumnHeader("correction", numeric=False, drop=0), lambda row: text_cell(row[2], kind)),
        (ColumnHeader("what it does", numeric=False, drop=5), meaning),
        *shown({"rejected_tokens": 0, "rejected_sequences": 6}),
        (ColumnHeader("fresh batch rejects", description=about, drop=4, short="fresh batch\nrejects"), fresh),
        *shown({"ess_token": 0, "ess_sequence": 3, "k3_kept": 1, "loss_scale": 2}),
        (ColumnHeader("data needed", description="for the effective sample size of no correction"), needed),
    ]  # fmt: skip
    caption = "Shares are of valid tokens or of sequences. A fresh batch has as many sequences as a step of the run."
    places = [row[0] for row in rows] if several else ()
    return Table.of(caption, rows, columns, sortable=True, title="Corrections", runs=places, reach=EVERYWHERE)


def _fresh_batch_cell(found: FreshBatch) -> TableCell:
    """Format a prediction with its interval. Its limitation becomes a footnote."""
    reason = "" if found.status == "ok" else escape_terminal(found.status)
    if found.value is None or found.interval is None:
        return TableCell(DASH, reason)
    low, high = (format_number(end, "fraction") for end in found.interval)
    return TableCell(
        f"{format_number(found.value, 'fraction')} ({low} to {high})", reason, f"{found.value:.6g}", kind="interval"
    )


def loss_table(run: RunResult, registry: MetricRegistry) -> Table | None:
    """Return the effect of each correction on the loss, if the dump has the columns for it."""
    if not any(values.get("loss", NOT_RECORDED).value is not None for values in run.overall.corrections.values()):
        return None
    caption = (
        "What each correction would do to the policy loss and to its gradient by token, against PPO without any "
        "correction."
    )
    return _correction_rows(caption, LOSS_KEYS, run, registry)


def _correction_rows(
    caption: str, keys: Iterable[str], run: RunResult, registry: MetricRegistry, rows: Collection[str] = (), **more: Any
) -> Table:
    """Return one row per correction, or per correction in `rows`."""
    shown = [item for item in run.overall.corrections.items() if not rows or item[0] in rows]
    name = "correction", lambda item: text_cell(item[0], "name")
    columns = registry.columns(keys, lambda item: item[1], "c", **more)
    return Table.of(caption, shown, [name, *columns], sortable=True)


def gates_table(corrections: Sequence[Correction], run: RunResult, registry: MetricRegistry) -> Table:
    """Return the shares that each gate rejects at its lower and upper bound."""
    keys = [f"{level}_{side}" for level in ("tokens", "sequences") for side in ("low", "high")]
    rows = []
    for correction in corrections:
        values = run.overall.corrections.get(correction.name, {})
        for index, gate in enumerate(correction.gates):
            own = {key: values.get(registry.metric(f"gate{index}_{key}", "c").key, NOT_RECORDED) for key in keys}
            rows.append((correction.name, f"{index}: {gate_label(gate)}", own))
    columns: list[Any] = [
        ("correction", lambda row: text_cell(row[0], "name")),
        ("gate", lambda row: text_cell(row[1])),
    ]
    for key in keys if rows else ():
        head = registry.head(f"gate0_{key}", "c", key.replace("_", " too "))
        columns.append((head, lambda row, key=key: value_cell(row[2][key], "fraction")))
    caption = "What each gate rejects, by side: too low and too high. A token rejected by two gates counts in both."
    return Table.of(caption, rows, columns)


def selection_table(result: Result, run: RunResult, registry: MetricRegistry) -> Table | None:
    """Return the means of kept and rejected sequences, if a correction has gates."""
    names = {correction.name for correction in result.corrections if correction.gates}
    caption = "Kept against rejected: each sequence counts by its share of kept or of rejected tokens."
    texts = {key: key.replace("_", " ") for key in SELECTION_KEYS}
    return _correction_rows(caption, SELECTION_KEYS, run, registry, names, texts=texts) if names else None


MAX_FILES = 500


def provenance_section(
    version: str, inputs: Sequence[InputFile], left_out: Sequence[SkippedData], corrections: Sequence[Correction]
) -> Section:
    """Build the last section of a page."""
    section = Section(
        "Data", "provenance", reach=PAGE_ONLY,
        note=f"{len(inputs)} files, mismatchctl {escape_terminal(version)}, configurations", folded=True,
    )  # fmt: skip
    skipped = left_out_table(left_out)
    section.add(skipped or Note("No row and no file was left out.", reach=PAGE_ONLY))
    files, kinds = files_table(inputs)
    section.add(
        Section("Files", "files", note=f"{len(files.rows)} shown", folded=True).add(
            files, Facts(kinds, reach=PAGE_ONLY)
        )
    )
    codes = [Code(escape_terminal(c.name), correction_yaml(c)) for c in corrections]
    note = f"{len(codes)} in YAML"
    return section.add(Section("Corrections, as one writes them", "as-written", note=note, folded=True).add(*codes))


def files_table(inputs: Sequence[InputFile]) -> tuple[Table, list[tuple[str, str]]]:
    """Return the table of input files, and the column types of each kind of file."""
    kinds: dict[str, str] = {}

    def kind(file: InputFile) -> str:
        types = ", ".join(f"{name}: {dtype}" for name, dtype in file.dtypes.items())
        return kinds.setdefault(types, f"kind {len(kinds) + 1}")

    table = Table.of("Files that were read. Kinds of columns are listed below.", inputs[:MAX_FILES], (
        ("file", lambda file: text_cell(file.path, "path")),
        ("run", lambda file: file.run),
        (ColumnHeader("size"), lambda file: format_bytes(file.size)),
        (ColumnHeader("rows"), lambda file: number_cell(file.rows, "rows")),
        (ColumnHeader("valid tokens"), lambda file: number_cell(file.tokens, "tokens")),
        ("layout", lambda file: file.layout),
        ("columns", kind),
    ))  # fmt: skip
    if len(inputs) > MAX_FILES:
        table.left_out = f"The first {MAX_FILES} of {len(inputs):,} files; the JSON result holds all of them."
    return table, [(kind, escape_terminal(types)) for types, kind in kinds.items()]


def left_out_table(rows: Sequence[SkippedData]) -> Table | None:
    """Return the table of skipped data, if data was skipped."""
    if not rows:
        return None
    total = Counter[str]()
    for row in rows:
        total[{"file": "files", MASKED_TOKENS: "tokens"}.get(row.reason, "rows")] += row.count
    caption = "Left out as bad data: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(total.items())) + "."
    return Table.of(caption, rows[:MAX_FILES], (
        ("file", lambda row: text_cell(row.file, "path")),
        ("reason", lambda row: row.reason),
        (ColumnHeader("count"), lambda row: number_cell(row.count, "rows")),
        ("first example", lambda row: text_cell(row.example, "prose")),
    ))  # fmt: skip


def correction_yaml(correction: Correction) -> str:
    """Return a correction as YAML, starting with its name."""
    ordered = {"name": correction.name} | correction.to_mapping()
    text = dump_yaml(ordered, inner=True)
    return "\n".join(escape_terminal(line) for line in text.splitlines())
