"""Tables of one run: metrics, corrections, breakdowns, worst tokens, log and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mismatchctl.core.formatting import DASH, format_bytes, format_count, format_label, format_number
from mismatchctl.corrections.labels import correction_label
from mismatchctl.corrections.model import Correction
from mismatchctl.data.tokenizer import load_vocabulary
from mismatchctl.io.yaml import dump_yaml
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.report import document as doc
from mismatchctl.report.tables import MAX_ROWS, SHORT_TITLES, find_metric, metric_columns, value_cell
from mismatchctl.results import model
from mismatchctl.results.summary import names_not_compared

STEP_KEYS = (
    "tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_p99", "abs_diff_max", "ratio_mean", "ratio_mean_z",
    "chi2_token", "ess_token", "ess_sequence", "khat_token", "khat_sequence", "prob_corr", "bitwise_share", "drift_k3",
    "ois", "total_k3", "rollout_reference_k3", "train_reference_k3", "ref_k3", "routing_differs",
)  # fmt: skip
BREAKDOWN_KEYS = {
    "tokens": 1, "sequences": 2, "k3": 0, "abs_diff_mean": 4, "abs_diff_max": None, "ratio_mean": 5, "ess_token": None,
    "ess_sequence": 3, "routing_differs": 6,
}  # fmt: skip
MAX_GROUPS, MAX_LOGGED_STEPS, MAX_WORST_ROWS, MAX_FILES = 12, 8, 20, 500  # maximum rows of tables


def worst_sequences_table(rows: Sequence[model.WorstSequence], most: int | None = None) -> doc.Table | None:
    shown = rows[: most or MAX_WORST_ROWS]
    vocabulary, starts = load_vocabulary(None, (row.token_ids for row in shown)), any(row.token_ids for row in shown)
    columns = [
        *PLACE_COLUMNS,
        doc.Column("tokens", "tokens", description="valid tokens"),
        doc.Column("sum of log ratios", "log_ratio_sum", unit="nats",
                   description="Sum of the log ratios of the tokens. exp(sum) is the ratio of the sequence."),
        doc.Column("K3", "k3", unit="nats/token", description="mean of exp(x) - 1 - x over the tokens, x = log ratio"),
        doc.Column("mean |difference|", "abs_diff_mean", unit="nats",
                   description="mean of |log ratio| over the tokens"),
        *([doc.Column("starts with", lambda row: vocabulary.text(row.token_ids), "code")] if starts else []),
    ]  # fmt: skip
    caption = f"The {len(shown)} sequences with the largest |sum of log ratios|"
    return doc.Table.of(caption, shown, columns, sortable=True) if shown else None


def worst_tokens_table(rows: Sequence[model.WorstToken], most: int | None = None) -> doc.Table | None:
    shown = rows[: most or MAX_WORST_ROWS]
    ids = [[row.token_id] for row in shown if row.token_id is not None]
    text = load_vocabulary(None, [*(row.context_ids for row in shown), *ids]).text
    before = doc.Column("what came before", lambda row: text(row.context_ids), "before")
    token = doc.Column("token", lambda row: "" if row.token_id is None else text([row.token_id]), "code")
    columns = [
        *PLACE_COLUMNS,
        doc.Column("position", "position", description="position 0 is the first valid token of the sequence"),
        *((before, token) if ids else ()),
        doc.Column("rollout", "rollout_log_prob", unit="log-prob",
                   description="log-prob that the rollout engine recorded"),
        doc.Column("train", "train_log_prob", unit="log-prob", description="log-prob that the trainer computed"),
        doc.Column("log ratio", "log_ratio", unit="nats", description="train minus rollout"),
    ]  # fmt: skip
    caption = f"The {len(shown)} tokens with the largest |log ratio|"
    return doc.Table.of(caption, shown, columns, sortable=True) if shown else None


PLACE_COLUMNS = [
    doc.Column("step", "step", "text"), doc.Column("sequence", "sequence_id", "text"),
    doc.Column("prompt", "prompt_id", "text"),
    doc.Column("file: row", lambda row: f"{row.file.rsplit('/', 1)[-1]}: {row.row}", "place"),
]  # fmt: skip


def by_column_tables(corrections: Sequence[Correction], run: model.RunResult, name: str) -> list[doc.Table]:
    tables, gated = [], [correction.name for correction in corrections if correction.gates]
    for column, groups in run.by.items():
        keys = {key: drop for key, drop in BREAKDOWN_KEYS.items() if key in groups.metrics}
        table = _group_table(
            f"By {column}", column, groups, keys, [rule for rule in gated if rule in groups.corrections]
        )
        tables.append(replace(table, title=f"By {column}{name}", reach=doc.TERMINAL_AND_PAGE, max_rows=MAX_GROUPS))
    return tables


def step_table(run: model.RunResult) -> doc.Table | None:
    keys = [key for key in STEP_KEYS if key in run.groups.metrics]
    return _group_table("The mismatch by step", "step", run.groups, keys) if len(run.groups.labels) > 1 else None


def _group_table(
    caption: str, first: str, groups: model.Groups, keys: Iterable[str] | Mapping[str, int | None],
    rules: Sequence[str] = (),
) -> doc.Table:  # fmt: skip

    def value(rule: str | None, index: int, key: str) -> model.Value:
        return groups.series(key, rule).value_at(index)

    names = doc.Column(first, lambda index: format_label(groups.labels[index]), "name")
    columns = [names, *metric_columns(keys, partial(value, None))]
    for rule in rules:
        title = {"rejected_tokens": f"rejected by {rule}"}
        columns += metric_columns(title.keys(), partial(value, rule), "c", title)
    table = doc.Table.of(caption, range(min(len(groups.labels), MAX_ROWS)), columns, sortable=True)
    if len(groups.labels) > MAX_ROWS:
        table.left_out = f"The first {MAX_ROWS} of {len(groups.labels):,} rows; the JSON result contains all of them."
    return table


def metric_table(
    caption: str, scope: str, keys: Iterable[str], columns: Mapping[str, Mapping[str, model.Value]],
    *, errors: bool = True,
) -> doc.Table:  # fmt: skip
    """Return a row per metric, and a column per run or correction. A table of one run also shows 95% intervals."""
    has_intervals = (scope, len(columns)) == ("m", 1)
    absent = model.NOT_RECORDED if scope == "m" else model.Value(value=None, status="not a metric of this correction")

    def value(own: Mapping[str, model.Value], one: Metric) -> doc.TableCell:
        return value_cell(own.get(one.key, absent), one.unit, errors=errors and not has_intervals)

    def interval(one: Metric) -> str:
        ends = next(iter(columns.values()))[one.key].interval
        return DASH if ends is None else " to ".join(format_number(end, one.unit) for end in ends)

    title = doc.Column("metric", lambda one: doc.TableCell(one.title, anchor=f"{scope}-{one.key}"), "name")
    values = [doc.Column(name, partial(value, own), drop=0) for name, own in columns.items()]
    values += [doc.Column("95% interval", interval, drop=2)] if has_intervals else []
    metrics = [find_metric(key, scope) for key in keys]
    return doc.Table.of(caption, metrics, [title, *values, doc.Column("unit", "unit", "text", 1)])


def logged_table(run: model.RunResult, framework: str) -> doc.Table | None:
    if not run.logged:
        return None
    steps, last = len(run.groups.labels), len(run.groups.labels) - 1
    chosen = sorted({round(index * last / (MAX_LOGGED_STEPS - 1)) for index in range(MAX_LOGGED_STEPS)})

    def value(index: int, row: tuple[str, str, Sequence[float | None]]) -> doc.TableCell:
        return value_cell(model.Value(value=row[2][index], status="this step logs only NaN or infinite values"), "")

    columns = [doc.Column("correction", lambda row: row[0], "name"), doc.Column("name", lambda row: row[1], "name")]
    columns += [doc.Column(f"step {format_label(run.groups.labels[index])}", partial(value, index)) for index in chosen]
    caption = f"The values that {framework} would have logged, computed with its own formulas."
    rows = [(name, *item) for name, names in run.logged.items() for item in names.items()]
    left_out = f"{len(chosen)} of {steps:,} steps; the JSON result contains all of them." if len(chosen) < steps else ""
    return doc.Table.of(caption, rows, columns, left_out=left_out)


def describe_log(run: model.RunResult, most: int | None = None) -> Iterator[str]:
    """Describe how well the dump agrees with the run's log. Lists contain at most `most` metrics."""
    for found in [*run.against.values(), *([run.against_metrics] if run.against_metrics else [])]:
        wrong = [name for name, agreement in found.names.items() if not agreement.agrees]
        verb = "agrees" if len(found.names) == 1 else "agree"
        right, every = len(found.names) - len(wrong), format_count(len(found.names), "metric")
        text = f"{right} of {every} {verb} with the run's log"
        text += f"; different: {', '.join(wrong[:most])}" if wrong else ""
        yield f"{text}; not in the log: {', '.join(found.missing[:most])}" if found.missing else text
    if others := names_not_compared(run):
        more = f" and {len(others) - most} more" if most is not None and len(others) > most else ""
        yield f"in the log, but not compared: {', '.join(others[:most])}{more}"
    if run.order:
        yield run.order


def run_log_section(run: model.RunResult, name: str, anchor: str, provenance: model.Provenance) -> doc.Section:
    section, log = doc.Section("The run's log", f"{anchor}-log", folded=True), provenance.log
    lags = (f"{logged}: K3 {lag.text}" for logged, lag in run.lags.items() if lag.steps is not None)
    section.add(*(doc.Note(text, reach=doc.TERMINAL_AND_PAGE) for text in (*describe_log(run), *lags)))
    for correction, found in run.against.items():
        title = f"{log}, compared with {provenance.framework}'s metrics of the dump {name} with {correction}"
        section.add(_agreement_table(title, found.names))
    if (other := run.against_metrics) is not None:
        names = {f"{logged} ({other.metrics[logged]})": agreement for logged, agreement in other.names.items()}
        section.add(_agreement_table(f"{log}, compared with the metrics of {name}", names))
    return section


def _agreement_table(title: str, names: Mapping[str, model.Agreement]) -> doc.Table:
    return doc.Table.of(title, names.items(), [
        doc.Column("name", lambda item: item[0], "name"),
        doc.Column("", lambda item: "agrees" if item[1].agrees else "DIFFERS", "text", 0),
        doc.Column("largest difference", lambda item: f"{item[1].difference:.1e}", drop=0),
        doc.Column("allowed", lambda item: f"{item[1].allowed:.1e}", drop=4),
        doc.Column("at step", lambda item: item[1].step, drop=3),
        doc.Column("dump", lambda item: format_number(item[1].dump), drop=1),
        doc.Column("log", lambda item: format_number(item[1].log), drop=1),
        doc.Column("steps", lambda item: str(item[1].steps), drop=2),
    ], reach=doc.TERMINAL_AND_PAGE)  # fmt: skip


def comparison_of_corrections(result: model.Result) -> doc.Table:
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
        return doc.number_cell(1 / ess, form=lambda factor: f"{factor:.3g}x") if ess else doc.TableCell(DASH)

    def shown(drops: Mapping[str, int]) -> list[doc.Column]:
        texts = {key: SHORT_TITLES[key] for key in drops}
        return metric_columns(drops, lambda row, key: row[3].get(key, model.NOT_RECORDED), "c", texts, errors=False)

    columns = [
        *([doc.Column("run", lambda row: row[1], "name")] if several else []),
        doc.Column("correction", lambda row: row[2], "text" if several else "name", 0),
        doc.Column("what it does", lambda row: labels.get(row[2], ""), "prose", 5),
        *shown({"rejected_tokens": 0}),
        doc.Column("fresh batch rejects", lambda row: _fresh_batch_cell(runs[row[1]].fresh_batches.get(row[2])), drop=4,
                   description="predicted share of rejected tokens in a new batch, with its 95% interval"),
        *shown({"ess_token": 0, "k3_kept": 1, "loss_scale": 2}),
        doc.Column("data needed", needed, description="2x: twice the data gives the ESS without a correction"),
    ]  # fmt: skip
    caption = "Shares of tokens are shares of all valid tokens. A fresh batch is a predicted batch of one step."
    places = [row[0] for row in rows] if several else ()
    return doc.Table.of(caption, rows, columns, sortable=True, title="Corrections", runs=places, reach=doc.EVERYWHERE)


def _fresh_batch_cell(found: model.FreshBatch | None) -> doc.TableCell:
    if found is None or found.value is None or found.interval is None:
        return doc.TableCell(DASH, "not predicted" if found is None else found.status)
    share, low, high = (format_number(each, "fraction") for each in (found.value, *found.interval))
    reason = "" if found.status == "ok" else found.status
    return doc.TableCell(f"{share} ({low} to {high})", reason, f"{found.value:.6g}", kind="interval")


def provenance_section(
    version: str, inputs: Sequence[model.InputFile], left_out: Sequence[model.SkippedData],
    corrections: Sequence[Correction],
) -> doc.Section:  # fmt: skip
    section = doc.Section("Data", "provenance", reach=doc.PAGE_ONLY, folded=True)
    section.note = f"{len(inputs)} files, mismatchctl {version}, YAML of the corrections"
    section.add(_left_out_table(left_out) or doc.Note("All rows and files were used.", reach=doc.PAGE_ONLY))
    files = doc.Table.of("Files read", inputs[:MAX_FILES], [
        doc.Column("file", "path", "path"), doc.Column("run", "run", "text"),
        doc.Column("size", lambda file: format_bytes(file.size)), doc.Column("rows", "rows"),
        doc.Column("valid tokens", "tokens"), doc.Column("layout", "layout", "text"),
        doc.Column("columns", lambda file: ", ".join(map(": ".join, file.dtypes.items())), "prose"),
    ])  # fmt: skip
    if len(inputs) > MAX_FILES:
        files.left_out = f"The first {MAX_FILES} of {len(inputs):,} files; the JSON result contains all of them."
    codes = [
        doc.Code(one.name, dump_yaml({"name": one.name} | one.to_mapping(), inner=True).rstrip("\n"))
        for one in corrections
    ]
    return section.add(
        doc.Section("Files", "files", note=f"{len(files.rows)} shown", folded=True).add(files),
        doc.Section("Corrections as YAML", "as-written", note=f"{len(codes)} shown", folded=True).add(*codes),
    )


def _left_out_table(rows: Sequence[model.SkippedData]) -> doc.Table | None:
    total = Counter[str]()
    for row in rows:
        total[{"file": "files", model.MASKED_TOKENS: "tokens"}.get(row.reason, "rows")] += row.count
    caption = "Left out as bad data: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(total.items())) + "."
    columns = [
        doc.Column("file", "file", "path"), doc.Column("reason", "reason", "text"), doc.Column("count", "count"),
        doc.Column("first example", "example", "prose"),
    ]  # fmt: skip
    return doc.Table.of(caption, rows[:MAX_FILES], columns) if rows else None
