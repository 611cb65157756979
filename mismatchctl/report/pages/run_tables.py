"""Tables of one run: metrics, corrections, breakdowns, worst tokens, run log and input files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mismatchctl.core.formatting import DASH, escape_terminal, format_bytes, format_label, format_number
from mismatchctl.corrections.labels import correction_label
from mismatchctl.corrections.model import Correction
from mismatchctl.data.tokenizer import load_vocabulary
from mismatchctl.io.yaml import dump_yaml
from mismatchctl.measure.metrics.facets import kl_key
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
from mismatchctl.report.tables import SHORT_TITLES, MetricRegistry, group_table, number_cell, text_cell, value_cell
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
MAX_GROUPS, MAX_LOGGED_STEPS, MAX_WORST_ROWS, MAX_FILES = 12, 8, 20, 500
"""Maximum values of a `--by` column in a terminal, steps of logged values, worst sequences and tokens, and files."""


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
        f"The {len(shown)} sequences with the largest |sum of log ratios|. The log ratio is train minus rollout; "
        "K3 and |difference| are means over the sequence's tokens."
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
        f"The {len(shown)} tokens with the largest |log ratio|. The log ratio is train minus rollout; positions count "
        "from the sequence's first valid token."
    )
    return Table.of(caption, shown, columns, sortable=True) if shown else None


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
        keys = {key: drop for key, drop in BREAKDOWN_KEYS.items() if key in groups.metrics}
        columns = [registry.series(groups, key, drop=drop) for key, drop in keys.items()]
        for rule in (rule for rule in gated if rule in groups.corrections):
            columns.append(registry.series(groups, "rejected_tokens", rule, text=f"rejected by {rule}"))
        table = group_table(f"By {escape_terminal(column)}", column, groups, columns)
        table.title, table.reach, table.max_rows = f"{table.caption}{name}", TERMINAL_AND_PAGE, MAX_GROUPS
        tables.append(table)
    return tables


def step_table(run: RunResult, registry: MetricRegistry) -> Table:
    """Return the main metrics by step."""
    own = [registry.series(run.groups, key) for key in STEP_KEYS if key in run.groups.metrics]
    return group_table("The mismatch by step", "step", run.groups, own)


def metric_table(runs: Mapping[str, RunResult], registry: MetricRegistry, *, brief: bool) -> Table:
    """Return every metric with a column per run. `brief` leaves out errors."""

    def value(run: RunResult) -> Callable[[Metric], TableCell]:
        return lambda one: value_cell(run.overall.metrics.get(one.key, NOT_RECORDED), one.unit, errors=not brief)

    def interval(metric: Metric) -> TableCell:
        ends = next(iter(runs.values())).overall.metrics[metric.key].interval
        return TableCell(DASH if ends is None else " to ".join(format_number(end, metric.unit) for end in ends))

    columns: list[Any] = [("metric", lambda metric: TableCell(metric.title, kind="name", anchor=f"m-{metric.key}"))]
    for name, run in runs.items():
        columns.append((ColumnHeader("value" if len(runs) == 1 else escape_terminal(name)), value(run)))
    columns += [(ColumnHeader("90% interval"), interval)] if len(runs) == 1 else []
    columns.append(("unit", lambda metric: metric.unit))
    keys = dict.fromkeys(key for run in runs.values() for key in run.overall.metrics)
    caption = "Metrics of the mismatch" if brief else "Metrics of the mismatch: ± is one standard error."
    return Table.of(caption, [registry.metric(key) for key in keys], columns)


def correction_metric_table(run: RunResult, registry: MetricRegistry) -> Table:
    """Return every metric of the corrections, with one column per correction."""
    known = dict.fromkeys(key for values in run.overall.corrections.values() for key in values)
    absent = Value(value=None, status="this correction does not have it")

    def value(own: Mapping[str, Value]) -> Callable[[Metric], TableCell]:
        return lambda one: value_cell(own.get(one.key, absent), one.unit)

    columns: list[Any] = [("metric", lambda one: TableCell(one.title, kind="name", anchor=f"c-{one.key}"))]
    columns += [(ColumnHeader(escape_terminal(name)), value(own)) for name, own in run.overall.corrections.items()]
    columns.append(("unit", lambda one: one.unit))
    caption = "Every metric of the corrections: ± is one standard error over clusters."
    return Table.of(caption, [registry.metric(key, "c") for key in known], columns)


def logged_table(run: RunResult, framework: str) -> Table:
    """Return the values that a framework would log, with one column per step."""
    steps, last = len(run.groups.labels), len(run.groups.labels) - 1
    chosen = sorted({round(index * last / (MAX_LOGGED_STEPS - 1)) for index in range(MAX_LOGGED_STEPS)})

    def value(index: int) -> Callable[[Any], TableCell]:
        return lambda row: value_cell(
            Value(value=row[2][index], status="this step logs only NaN or infinite values"), ""
        )

    columns: list[Any] = [
        ("correction", lambda row: text_cell(row[0], "name")),
        ("name", lambda row: text_cell(row[1], "name")),
        *((ColumnHeader(f"step {format_label(run.groups.labels[index])}"), value(index)) for index in chosen),
    ]
    caption = f"What {escape_terminal(framework)} would have logged: by its own names, as its own code computes them."
    rows = [(name, *item) for name, names in run.logged.items() for item in names.items()]
    left_out = f"{len(chosen)} of {steps:,} steps; the JSON result holds all of them." if len(chosen) < steps else ""
    return Table.of(caption, rows, columns, left_out=left_out)


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

    def value(place: int) -> Callable[[tuple[str, list[Value]]], TableCell]:
        return lambda item: value_cell(item[1][place], "")

    columns: list[Any] = [("objective", lambda item: text_cell(item[0], "name"))]
    columns += [(ColumnHeader(each, drop=0, short=each), value(place)) for place, each in enumerate(chosen)]
    table = Table.of(f"What {name} would minimize", rows.items(), columns, reach=TERMINAL_AND_PAGE)
    return Section("Minimized objective", f"{anchor}-objectives", folded=True).add(table)


def run_log_section(run: RunResult, name: str, anchor: str, provenance: Provenance) -> Section:
    """Build the comparison of the run's log with the dump, and the lags of K3."""
    section, log = Section("The run's log", f"{anchor}-log", folded=True), provenance.log
    for correction, found in run.against.items():
        title = f"{log} against {provenance.framework} on {name}, correction {correction}"
        section.add(*_agreement_parts(title, found))
    metrics_log = run.against_metrics or MetricLogComparison()
    if metrics_log.names:
        labeled = {f"{logged} ({metrics_log.metrics[logged]})": found for logged, found in metrics_log.names.items()}
        section.add(*_agreement_parts(f"{log} against the metrics of {name}", LogComparison(names=labeled)))
    if others := names_not_compared(run):
        section.add(Note(f"kept from the log, not compared: {', '.join(others)}", reach=TERMINAL_AND_PAGE))
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


def comparison_of_corrections(result: Result, registry: MetricRegistry) -> Table:
    """Return one row per run and correction: meaning, rejection, remaining K3, cost, and a fresh batch."""
    runs, several = result.runs, len(result.runs) > 1
    labels = {correction.name: correction_label(correction) for correction in result.corrections}
    Row = tuple[int, str, str, Mapping[str, Value]]
    rows: list[Row] = [
        (place, run, correction, values)
        for place, (run, found) in enumerate(runs.items())
        for correction, values in found.overall.corrections.items()
    ]

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
        (ColumnHeader("what it does", numeric=False, drop=5), lambda row: text_cell(labels.get(row[2], ""), "prose")),
        *shown({"rejected_tokens": 0, "rejected_sequences": 6}),
        (ColumnHeader("fresh batch rejects", description=about, drop=4, short="fresh batch\nrejects"), fresh),
        *shown({"ess_token": 0, "ess_sequence": 3, "k3_kept": 1, "loss_scale": 2}),
        (ColumnHeader("data needed", description="for the effective sample size of no correction"), needed),
    ]  # fmt: skip
    caption = "Shares are of valid tokens or of sequences. A fresh batch has the number of sequences of a step."
    places = [row[0] for row in rows] if several else ()
    return Table.of(caption, rows, columns, sortable=True, title="Corrections", runs=places, reach=EVERYWHERE)


def _fresh_batch_cell(found: FreshBatch) -> TableCell:
    """Format a prediction with its interval. Its limitation becomes a footnote."""
    reason = "" if found.status == "ok" else escape_terminal(found.status)
    if found.value is None or found.interval is None:
        return TableCell(DASH, reason)
    low, high = (format_number(end, "fraction") for end in found.interval)
    text = f"{format_number(found.value, 'fraction')} ({low} to {high})"
    return TableCell(text, reason, f"{found.value:.6g}", kind="interval")


def provenance_section(
    version: str, inputs: Sequence[InputFile], left_out: Sequence[SkippedData], corrections: Sequence[Correction]
) -> Section:
    """Build the last section of a page: skipped data, files, and the corrections as YAML."""
    section = Section("Data", "provenance", reach=PAGE_ONLY, folded=True)
    section.note = f"{len(inputs)} files, mismatchctl {escape_terminal(version)}, configurations"
    section.add(_left_out_table(left_out) or Note("No row and no file was left out.", reach=PAGE_ONLY))
    kinds: dict[str, str] = {}

    def kind(file: InputFile) -> str:
        types = ", ".join(f"{name}: {dtype}" for name, dtype in file.dtypes.items())
        return kinds.setdefault(types, f"kind {len(kinds) + 1}")

    files = Table.of("Files that were read. Kinds of columns are listed below.", inputs[:MAX_FILES], (
        ("file", lambda file: text_cell(file.path, "path")),
        ("run", lambda file: file.run),
        (ColumnHeader("size"), lambda file: format_bytes(file.size)),
        (ColumnHeader("rows"), lambda file: number_cell(file.rows, "rows")),
        (ColumnHeader("valid tokens"), lambda file: number_cell(file.tokens, "tokens")),
        ("layout", lambda file: file.layout),
        ("columns", kind),
    ))  # fmt: skip
    if len(inputs) > MAX_FILES:
        files.left_out = f"The first {MAX_FILES} of {len(inputs):,} files; the JSON result holds all of them."
    types = Facts([(name, escape_terminal(text)) for text, name in kinds.items()], reach=PAGE_ONLY)
    codes = [Code(escape_terminal(one.name), _correction_yaml(one)) for one in corrections]
    return section.add(
        Section("Files", "files", note=f"{len(files.rows)} shown", folded=True).add(files, types),
        Section("Corrections, as one writes them", "as-written", note=f"{len(codes)} in YAML", folded=True).add(*codes),
    )


def _left_out_table(rows: Sequence[SkippedData]) -> Table | None:
    """Return the table of skipped data, if data was skipped."""
    total = Counter[str]()
    for row in rows:
        total[{"file": "files", MASKED_TOKENS: "tokens"}.get(row.reason, "rows")] += row.count
    caption = "Left out as bad data: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(total.items())) + "."
    table = Table.of(caption, rows[:MAX_FILES], (
        ("file", lambda row: text_cell(row.file, "path")),
        ("reason", lambda row: row.reason),
        (ColumnHeader("count"), lambda row: number_cell(row.count, "rows")),
        ("first example", lambda row: text_cell(row.example, "prose")),
    ))  # fmt: skip
    return table if rows else None


def _correction_yaml(correction: Correction) -> str:
    text = dump_yaml({"name": correction.name} | correction.to_mapping(), inner=True)
    return "\n".join(escape_terminal(line) for line in text.splitlines())
