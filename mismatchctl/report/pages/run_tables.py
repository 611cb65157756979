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
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.report import document as doc
from mismatchctl.report.tables import SHORT_TITLES, MetricRegistry, group_table, number_cell, text_cell, value_cell
from mismatchctl.results import model
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


def worst_sequences_table(rows: Sequence[model.WorstSequence], most: int | None = None) -> doc.Table | None:
    """Return the sequences with the largest sum of log ratios."""
    shown = rows[: most or MAX_WORST_ROWS]
    vocabulary, starts = load_vocabulary(None, (row.token_ids for row in shown)), any(row.token_ids for row in shown)
    about = "Sum over tokens of train minus rollout; its exp is the sequence's ratio."
    columns: doc.TableColumns[model.WorstSequence] = [
        *PLACE_COLUMNS,
        (doc.ColumnHeader("tokens", description="valid tokens"), lambda row: number_cell(row.tokens, "tokens")),
        (doc.ColumnHeader("sum of log ratios", "nats", about), lambda row: number_cell(row.log_ratio_sum)),
        (doc.ColumnHeader("K3", "nats/token", "mean of exp(x) - 1 - x over the sequence's tokens"),
         lambda row: number_cell(row.k3)),
        (doc.ColumnHeader("mean |difference|", "nats", "mean of |x| over its tokens"),
         lambda row: number_cell(row.abs_diff_mean)),
        *([("starts with", lambda row: text_cell(vocabulary.text(row.token_ids), "code"))] if starts else []),
    ]  # fmt: skip
    caption = (
        f"The {len(shown)} sequences with the largest |sum of log ratios|. The log ratio is train minus rollout; "
        "K3 and |difference| are means over the sequence's tokens."
    )
    return doc.Table.of(caption, shown, columns, sortable=True) if shown else None


def worst_tokens_table(rows: Sequence[model.WorstToken], most: int | None = None) -> doc.Table | None:
    """Return the tokens with the largest |log ratio| and their context."""
    shown = rows[: most or MAX_WORST_ROWS]
    columns: doc.TableColumns[model.WorstToken] = [
        *PLACE_COLUMNS,
        *token_columns(shown),
        (doc.ColumnHeader("rollout", "log-prob", "as the rollout engine recorded it"),
         lambda row: number_cell(row.rollout_log_prob)),
        (doc.ColumnHeader("train", "log-prob", "as the trainer computed it"),
         lambda row: number_cell(row.train_log_prob)),
        (doc.ColumnHeader("log ratio", "nats", "train minus rollout"), lambda row: number_cell(row.log_ratio)),
    ]  # fmt: skip
    caption = (
        f"The {len(shown)} tokens with the largest |log ratio|. The log ratio is train minus rollout; positions count "
        "from the sequence's first valid token."
    )
    return doc.Table.of(caption, shown, columns, sortable=True) if shown else None


def _id_cell(value: str | int | float | bool | None) -> doc.TableCell:
    return text_cell(DASH if value is None else format_label(value))


PLACE_COLUMNS: doc.TableColumns[Any] = (
    ("step", lambda row: _id_cell(row.step)),
    ("sequence", lambda row: _id_cell(row.sequence_id)),
    ("prompt", lambda row: _id_cell(row.prompt_id)),
    ("file: row", lambda row: text_cell(f"{row.file.rsplit('/', 1)[-1]}: {row.row}", "place")),
)
"""Location of a token or a sequence."""


def token_columns(rows: Sequence[model.WorstToken | MovedToken]) -> doc.TableColumns[Any]:
    """Return the columns of position, context and token. Context and token need token ids."""
    ids = [[row.token_id] for row in rows if row.token_id is not None]
    text = load_vocabulary(None, [*(row.context_ids for row in rows), *ids]).text
    place = doc.ColumnHeader("position", description="counted from the sequence's first valid token")
    columns: list[Any] = [(place, lambda row: number_cell(row.position, "tokens"))]
    if ids:
        columns += [
            ("what came before", lambda row: text_cell(text(row.context_ids), "before")),
            ("token", lambda row: text_cell("" if row.token_id is None else text([row.token_id]), "code")),
        ]
    return columns


def by_column_tables(
    corrections: Sequence[Correction], run: model.RunResult, registry: MetricRegistry, name: str
) -> list[doc.Table]:
    """Return a table per `--by` column with the mismatch and the rejected tokens."""
    tables, gated = [], [correction.name for correction in corrections if correction.gates]
    for column, groups in run.by.items():
        keys = {key: drop for key, drop in BREAKDOWN_KEYS.items() if key in groups.metrics}
        columns = [registry.series(groups, key, drop=drop) for key, drop in keys.items()]
        for rule in (rule for rule in gated if rule in groups.corrections):
            columns.append(registry.series(groups, "rejected_tokens", rule, text=f"rejected by {rule}"))
        table = group_table(f"By {escape_terminal(column)}", column, groups, columns)
        table.title, table.reach, table.max_rows = f"{table.caption}{name}", doc.TERMINAL_AND_PAGE, MAX_GROUPS
        tables.append(table)
    return tables


def step_table(run: model.RunResult, registry: MetricRegistry) -> doc.Table:
    """Return the main metrics by step."""
    own = [registry.series(run.groups, key) for key in STEP_KEYS if key in run.groups.metrics]
    return group_table("The mismatch by step", "step", run.groups, own)


def metric_table(runs: Mapping[str, model.RunResult], registry: MetricRegistry, *, brief: bool) -> doc.Table:
    """Return every metric with a column per run. `brief` leaves out errors."""

    def value(run: model.RunResult) -> Callable[[Metric], doc.TableCell]:
        return lambda one: value_cell(run.overall.metrics.get(one.key, model.NOT_RECORDED), one.unit, errors=not brief)

    def interval(metric: Metric) -> doc.TableCell:
        ends = next(iter(runs.values())).overall.metrics[metric.key].interval
        return doc.TableCell(DASH if ends is None else " to ".join(format_number(end, metric.unit) for end in ends))

    columns: list[Any] = [("metric", lambda metric: doc.TableCell(metric.title, kind="name", anchor=f"m-{metric.key}"))]
    for name, run in runs.items():
        columns.append((doc.ColumnHeader("value" if len(runs) == 1 else escape_terminal(name)), value(run)))
    columns += [(doc.ColumnHeader("95% interval"), interval)] if len(runs) == 1 else []
    columns.append(("unit", lambda metric: metric.unit))
    keys = dict.fromkeys(key for run in runs.values() for key in run.overall.metrics)
    caption = "Metrics of the mismatch" if brief else "Metrics of the mismatch: ± is one standard error."
    return doc.Table.of(caption, [registry.metric(key) for key in keys], columns)


def correction_metric_table(run: model.RunResult, registry: MetricRegistry) -> doc.Table:
    """Return every metric of the corrections, with one column per correction."""
    known = dict.fromkeys(key for values in run.overall.corrections.values() for key in values)
    absent = model.Value(value=None, status="this correction does not have it")

    def value(own: Mapping[str, model.Value]) -> Callable[[Metric], doc.TableCell]:
        return lambda one: value_cell(own.get(one.key, absent), one.unit)

    columns: list[Any] = [("metric", lambda one: doc.TableCell(one.title, kind="name", anchor=f"c-{one.key}"))]
    columns += [(doc.ColumnHeader(escape_terminal(name)), value(own)) for name, own in run.overall.corrections.items()]
    columns.append(("unit", lambda one: one.unit))
    caption = "Every metric of the corrections: ± is one standard error over clusters."
    return doc.Table.of(caption, [registry.metric(key, "c") for key in known], columns)


def logged_table(run: model.RunResult, framework: str) -> doc.Table:
    """Return the values that a framework would log, with one column per step."""
    steps, last = len(run.groups.labels), len(run.groups.labels) - 1
    chosen = sorted({round(index * last / (MAX_LOGGED_STEPS - 1)) for index in range(MAX_LOGGED_STEPS)})

    def value(index: int) -> Callable[[Any], doc.TableCell]:
        return lambda row: value_cell(
            model.Value(value=row[2][index], status="this step logs only NaN or infinite values"), ""
        )

    columns: list[Any] = [
        ("correction", lambda row: text_cell(row[0], "name")),
        ("name", lambda row: text_cell(row[1], "name")),
        *((doc.ColumnHeader(f"step {format_label(run.groups.labels[index])}"), value(index)) for index in chosen),
    ]
    caption = f"What {escape_terminal(framework)} would have logged: by its own names, as its own code computes them."
    rows = [(name, *item) for name, names in run.logged.items() for item in names.items()]
    left_out = f"{len(chosen)} of {steps:,} steps; the JSON result holds all of them." if len(chosen) < steps else ""
    return doc.Table.of(caption, rows, columns, left_out=left_out)


def run_log_section(run: model.RunResult, name: str, anchor: str, provenance: model.Provenance) -> doc.Section:
    """Build the comparison of the run's log with the dump, and the lags of K3."""
    section, log = doc.Section("The run's log", f"{anchor}-log", folded=True), provenance.log
    for correction, found in run.against.items():
        title = f"{log} against {provenance.framework} on {name}, correction {correction}"
        section.add(*_agreement_parts(title, found))
    metrics_log = run.against_metrics or model.MetricLogComparison()
    if metrics_log.names:
        labeled = {f"{logged} ({metrics_log.metrics[logged]})": found for logged, found in metrics_log.names.items()}
        section.add(*_agreement_parts(f"{log} against the metrics of {name}", model.LogComparison(names=labeled)))
    if others := names_not_compared(run):
        section.add(doc.Note(f"kept from the log, not compared: {', '.join(others)}", reach=doc.TERMINAL_AND_PAGE))
    section.add(doc.Note(run.order, reach=doc.EVERYWHERE) if run.order else None)
    lags = (f"{logged}: K3 {lag.text}" for logged, lag in run.lags.items() if lag.steps is not None)
    return section.add(*(doc.Note(sentence, reach=doc.TERMINAL_AND_PAGE) for sentence in lags))


def _agreement_parts(title: str, found: model.LogComparison) -> Iterator[doc.DocumentPart]:
    title = f"{title}: {sum(name.agrees for name in found.names.values())} of {len(found.names)} names agree"
    if found.names:
        yield doc.Table.of(title, found.names.items(), (
            ("name", lambda item: text_cell(item[0], "name")),
            (doc.ColumnHeader("", numeric=False, drop=0), lambda item: "agrees" if item[1].agrees else "DIFFERS"),
            (doc.ColumnHeader("largest difference", drop=0), lambda item: f"{item[1].difference:.1e}"),
            (doc.ColumnHeader("allowed", drop=4), lambda item: f"{item[1].allowed:.1e}"),
            (doc.ColumnHeader("at step", drop=3), lambda item: item[1].step),
            (doc.ColumnHeader("dump", drop=1), lambda item: format_number(item[1].dump)),
            (doc.ColumnHeader("log", drop=1), lambda item: format_number(item[1].log)),
            (doc.ColumnHeader("steps", drop=2), lambda item: str(item[1].steps)),
        ), reach=doc.TERMINAL_AND_PAGE)  # fmt: skip
    else:
        yield doc.Note(title, reach=doc.TERMINAL_AND_PAGE)
    if found.missing:
        yield doc.Note(f"not in the log: {', '.join(found.missing)}", reach=doc.TERMINAL_AND_PAGE)


def comparison_of_corrections(result: model.Result, registry: MetricRegistry) -> doc.Table:
    """Return one row per run and correction: meaning, rejection, remaining K3, cost, and a fresh batch."""
    runs, several = result.runs, len(result.runs) > 1
    labels = {correction.name: correction_label(correction) for correction in result.corrections}
    Row = tuple[int, str, str, Mapping[str, model.Value]]
    rows: list[Row] = [
        (place, run, correction, values)
        for place, (run, found) in enumerate(runs.items())
        for correction, values in found.overall.corrections.items()
    ]

    def needed(row: Row) -> doc.TableCell:
        ess = row[3].get("ess_token", model.NOT_RECORDED).value
        return doc.TableCell(f"{1 / ess:.3g}x", sort_key=f"{1 / ess:.6g}") if ess else doc.TableCell(DASH)

    def fresh(row: Row) -> doc.TableCell:
        found = runs[row[1]].fresh_batches.get(row[2])
        return doc.TableCell(DASH, "not predicted") if found is None else _fresh_batch_cell(found)

    def shown(drops: Mapping[str, int]) -> list[tuple[doc.ColumnHeader, Callable[[Any], doc.TableCell]]]:
        texts = {key: SHORT_TITLES[key] for key in drops}
        return registry.columns(drops, lambda row: row[3], "c", texts, errors=False)

    about, kind = "predicted share of rejected tokens, with its 95% interval", "text" if several else "name"
    columns: list[Any] = [("run", lambda row: text_cell(row[1], "name"))] if several else []
    columns += [
        (doc.ColumnHeader("correction", numeric=False, drop=0), lambda row: text_cell(row[2], kind)),
        (doc.ColumnHeader("what it does", numeric=False, drop=5),
         lambda row: text_cell(labels.get(row[2], ""), "prose")),
        *shown({"rejected_tokens": 0}),
        (doc.ColumnHeader("fresh batch rejects", description=about, drop=4, short="fresh batch\nrejects"), fresh),
        *shown({"ess_token": 0, "k3_kept": 1, "loss_scale": 2}),
        (doc.ColumnHeader("data needed", description="to reach the effective sample size without correction"), needed),
    ]  # fmt: skip
    caption = "Shares are of valid tokens or of sequences. A fresh batch has the number of sequences of a step."
    places = [row[0] for row in rows] if several else ()
    return doc.Table.of(caption, rows, columns, sortable=True, title="Corrections", runs=places, reach=doc.EVERYWHERE)


def _fresh_batch_cell(found: model.FreshBatch) -> doc.TableCell:
    """Format a prediction with its interval. Its limitation becomes a footnote."""
    reason = "" if found.status == "ok" else escape_terminal(found.status)
    if found.value is None or found.interval is None:
        return doc.TableCell(DASH, reason)
    low, high = (format_number(end, "fraction") for end in found.interval)
    text = f"{format_number(found.value, 'fraction')} ({low} to {high})"
    return doc.TableCell(text, reason, f"{found.value:.6g}", kind="interval")


def provenance_section(
    version: str,
    inputs: Sequence[model.InputFile],
    left_out: Sequence[model.SkippedData],
    corrections: Sequence[Correction],
) -> doc.Section:
    """Build the last section of a page: skipped data, files, and the corrections as YAML."""
    section = doc.Section("Data", "provenance", reach=doc.PAGE_ONLY, folded=True)
    section.note = f"{len(inputs)} files, mismatchctl {escape_terminal(version)}, configurations"
    section.add(_left_out_table(left_out) or doc.Note("No row and no file was left out.", reach=doc.PAGE_ONLY))
    kinds: dict[str, str] = {}

    def kind(file: model.InputFile) -> str:
        types = ", ".join(f"{name}: {dtype}" for name, dtype in file.dtypes.items())
        return kinds.setdefault(types, f"kind {len(kinds) + 1}")

    files = doc.Table.of("Files that were read. Kinds of columns are listed below.", inputs[:MAX_FILES], (
        ("file", lambda file: text_cell(file.path, "path")),
        ("run", lambda file: file.run),
        (doc.ColumnHeader("size"), lambda file: format_bytes(file.size)),
        (doc.ColumnHeader("rows"), lambda file: number_cell(file.rows, "rows")),
        (doc.ColumnHeader("valid tokens"), lambda file: number_cell(file.tokens, "tokens")),
        ("layout", lambda file: file.layout),
        ("columns", kind),
    ))  # fmt: skip
    if len(inputs) > MAX_FILES:
        files.left_out = f"The first {MAX_FILES} of {len(inputs):,} files; the JSON result holds all of them."
    types = doc.Facts([(name, escape_terminal(text)) for text, name in kinds.items()], reach=doc.PAGE_ONLY)
    codes = [doc.Code(escape_terminal(one.name), _correction_yaml(one)) for one in corrections]
    return section.add(
        doc.Section("Files", "files", note=f"{len(files.rows)} shown", folded=True).add(files, types),
        doc.Section("Corrections as YAML", "as-written", note=f"{len(codes)} shown", folded=True).add(*codes),
    )


def _left_out_table(rows: Sequence[model.SkippedData]) -> doc.Table | None:
    total = Counter[str]()
    for row in rows:
        total[{"file": "files", model.MASKED_TOKENS: "tokens"}.get(row.reason, "rows")] += row.count
    caption = "Left out as bad data: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(total.items())) + "."
    table = doc.Table.of(caption, rows[:MAX_FILES], (
        ("file", lambda row: text_cell(row.file, "path")),
        ("reason", lambda row: row.reason),
        (doc.ColumnHeader("count"), lambda row: number_cell(row.count, "rows")),
        ("first example", lambda row: text_cell(row.example, "prose")),
    ))  # fmt: skip
    return table if rows else None


def _correction_yaml(correction: Correction) -> str:
    text = dump_yaml({"name": correction.name} | correction.to_mapping(), inner=True)
    return "\n".join(escape_terminal(line) for line in text.splitlines())
