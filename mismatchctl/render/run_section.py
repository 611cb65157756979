"""The tables and sentences of one run, prepared for the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mismatchctl.correction import Correction
from mismatchctl.render.figures import RunFigures, run_figures
from mismatchctl.render.numbers import DASH, estimate, number
from mismatchctl.render.series import lists
from mismatchctl.render.tables import Cell, Head, Registry, Shown, Table, amount, group_table, known_keys, words
from mismatchctl.render.text import are_bytes, clean, label, token_text
from mismatchctl.render.trend import Z_LIMIT, Trend, standing, trend
from mismatchctl.result import Result, RunResult, Value, WorstSequence, WorstToken

TILES = (
    "abs_diff_mean", "abs_diff_max", "ess_token", "ess_sequence", "ratio_mean_z", "khat_token", "khat_sequence",
    "chi2_token", "chi2_sequence", "prob_corr", "k3_worst_share", "bitwise_share",
)  # fmt: skip
STEP_KEYS = (
    "tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_p99", "abs_diff_max", "ratio_mean", "ratio_mean_z", "chi2_token",
    "ess_token", "ess_sequence", "khat_token", "khat_sequence", "prob_corr", "bitwise_share", "drift_k3", "ois",
)  # fmt: skip
BY_KEYS = ("tokens", "sequences", "k3", "abs_diff_mean", "abs_diff_max", "ratio_mean", "ess_token", "ess_sequence")
CORRECTION_KEYS = (
    "weight_mean", "weight_std", "weight_bounded_low", "weight_bounded_high", "normalization_factor", "rejected_tokens",
    "rejected_sequences", "fully_rejected_sequences", "empty_prompts", "ess_token", "ess_sequence", "loss_scale", "k3_kept",
)  # fmt: skip
COMPARED_KEYS = tuple(f"{side}_{name}" for name in ("reward", "advantage", "length") for side in ("kept", "rejected"))
STEP_CORRECTION_KEYS = ("rejected_tokens", "ess_token", "loss_scale")
WORST_SHOWN = 20
"""Worst sequences and tokens on the page; the result holds fifty."""


@dataclass(frozen=True)
class Tile:
    """A number at the top of a run: what it is called, its value, what it means, and a judgement of it."""

    title: str
    anchor: str
    value: str
    meaning: str
    verdict: str = ""
    alarm: bool = False
    undefined: bool = False


@dataclass
class RunSection:
    """Everything that the page shows of one run."""

    index: int
    name: str
    standing: str
    trend: Trend
    k3: Value
    k3_meaning: str
    figures: RunFigures
    tiles: list[Tile] = field(default_factory=list)
    corrections: list[Table] = field(default_factory=list)
    selection: Table | None = None
    worst: list[Table] = field(default_factory=list)
    by: list[Table] = field(default_factory=list)
    steps: list[Table] = field(default_factory=list)
    metrics: list[Table] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The id of the section."""
        return f"run-{self.index}"


def run_section(result: Result, index: int, registry: Registry, *, brief: bool) -> RunSection:
    """Prepare one run; `brief` leaves some figures out."""
    name, run = list(result.runs.items())[index]
    values, errors = lists(run.groups, "k3")
    k3 = run.overall.metrics.get("k3", Value(value=None, status="not recorded"))
    section = RunSection(
        index=index,
        name=clean(name),
        standing=standing(k3.value, k3.se),
        trend=trend(run.groups.labels, values, errors),
        k3=k3,
        k3_meaning=registry.metric("k3").meaning,
        figures=run_figures(run, f"f{index}", brief=brief),
    )
    section.tiles = tiles(run, registry)
    if result.corrections:
        section.corrections = [corrections_table(run, registry), *_gates(result.corrections, run, registry)]
        section.selection = selection_table(result, run, registry)
    section.worst = [table for table in (worst_sequences(run.worst_sequences), worst_tokens(run.worst_tokens)) if table]
    section.by = by_tables(result.corrections, run, registry)
    section.steps = step_tables(run, registry) if len(run.groups.labels) > 1 else []
    section.metrics = metric_tables(run, registry)
    return section


def tiles(run: RunResult, registry: Registry) -> list[Tile]:
    """The numbers that are read first, with a judgement where there is a limit."""
    found = []
    for key in known_keys(TILES, run.overall.metrics):
        value, metric = run.overall.metrics[key], registry.metric(key)
        shown, undefined = estimate(value.value, value.se, metric.unit), value.value is None
        verdict, alarm = (value.status, False) if undefined else judgement(key, value, run)
        found.append(Tile(metric.title, f"m-{key}", shown, metric.meaning, verdict, alarm, undefined))
    return found


def judgement(key: str, value: Value, run: RunResult) -> tuple[str, bool]:
    """A few words on a number that has a limit, and whether it is beyond it."""
    if value.value is None:
        return "", False
    if key == "ratio_mean_z":
        beyond = abs(value.value) > Z_LIMIT
        return (f"beyond ±{Z_LIMIT:g}" if beyond else f"within ±{Z_LIMIT:g}"), beyond
    if key.startswith("khat_"):
        limit = run.overall.metrics.get(f"{key}_limit")
        if limit is not None and limit.value is not None:
            beyond = value.value > limit.value
            return f"{'above' if beyond else 'below'} its limit of {number(limit.value)}", beyond
    return "", False


def corrections_table(run: RunResult, registry: Registry) -> Table:
    """One row per correction."""
    table = Table(
        "What each correction would do to this run. Weights are those applied, rejected tokens included; shares are of "
        "valid tokens or of sequences.",
        [Head("correction", numeric=False), *(registry.head(key, "c") for key in CORRECTION_KEYS)],
        sortable=True,
    )
    for name, values in run.overall.corrections.items():
        cells = [table.value(_value(values, key), registry.metric(key, "c").unit) for key in CORRECTION_KEYS]
        table.rows.append([words(name, "name"), *cells])
    return table


def _gates(corrections: Sequence[Correction], run: RunResult, registry: Registry) -> list[Table]:
    keys = [f"{level}_{side}" for level in ("tokens", "sequences") for side in ("low", "high")]
    table = Table(
        "What each gate rejects, by side: too low and too high. A token rejected by two gates counts in both.",
        [Head("correction", numeric=False), Head("gate", numeric=False)],
    )
    for correction in corrections:
        values = run.overall.corrections.get(correction.name, {})
        for index, gate in enumerate(correction.gates):
            cells = [table.value(_value(values, f"gate{index}_{key}"), "fraction") for key in keys]
            for key in keys:
                registry.metric(f"gate{index}_{key}", "c")
            table.rows.append([words(correction.name, "name"), words(f"{index}: {gate.title}"), *cells])
    if not table.rows:
        return []
    table.heads += [registry.head(f"gate0_{key}", "c", key.replace("_", " too ")) for key in keys]
    return [table]


def selection_table(result: Result, run: RunResult, registry: Registry) -> Table | None:
    """Kept against rejected sequences; None where no correction rejects anything."""
    if not any(correction.gates for correction in result.corrections):
        return None
    table = Table(
        "Kept against rejected: each sequence counts by its share of kept or of rejected tokens.",
        [Head("correction", numeric=False), *(registry.head(key, "c", key.replace("_", " ")) for key in COMPARED_KEYS)],
    )
    for correction in result.corrections:
        values = run.overall.corrections.get(correction.name, {})
        if correction.gates:
            cells = [table.value(_value(values, key), registry.metric(key, "c").unit) for key in COMPARED_KEYS]
            table.rows.append([words(correction.name, "name"), *cells])
    return table


def worst_sequences(rows: Sequence[WorstSequence]) -> Table | None:
    """The sequences whose log ratios add up to most."""
    if not rows:
        return None
    known, rows = len(rows), rows[:WORST_SHOWN]
    as_bytes = are_bytes(row.token_ids for row in rows)
    texts = [
        *_place_heads(),
        Head("tokens", about="valid tokens"),
        Head("sum of log ratios", "nats", "Sum over tokens of train minus rollout; its exp is the sequence's ratio."),
        Head("K3", "nats/token", "mean of exp(x) - 1 - x over the sequence's tokens"),
        Head("mean |difference|", "nats", "mean of |x| over the sequence's tokens"),
    ]
    starts = any(row.token_ids for row in rows)
    if starts:
        texts.append(Head("starts with", numeric=False))
    table = Table(f"The {len(rows)} sequences with the largest |sum of log ratios|{_of(len(rows), known)}.", texts, sortable=True)
    for row in rows:
        cells = [*_place(row), amount(row.tokens, "tokens"), amount(row.log_ratio_sum), amount(row.k3), amount(row.abs_diff_mean)]
        table.rows.append([*cells, *([words(token_text(row.token_ids, as_bytes), "code")] if starts else [])])
    return table


def worst_tokens(rows: Sequence[WorstToken]) -> Table | None:
    """The tokens with the largest |log ratio|, in their context."""
    if not rows:
        return None
    known, rows = len(rows), rows[:WORST_SHOWN]
    as_bytes = are_bytes([*(row.context_ids for row in rows), [row.token_id for row in rows if row.token_id is not None]])
    ids = any(row.token_id is not None for row in rows)
    heads = [*_place_heads(), Head("position", about="counted from the sequence's first valid token")]
    if ids:
        heads += [Head("what came before", numeric=False), Head("token", numeric=False)]
    heads += [
        Head("rollout", "log-prob", "log-prob that the rollout engine recorded"),
        Head("train", "log-prob", "log-prob that the trainer computed"),
        Head("log ratio", "nats", "train minus rollout"),
    ]
    table = Table(f"The {len(rows)} tokens with the largest |log ratio|{_of(len(rows), known)}.", heads, sortable=True)
    for row in rows:
        cells = [*_place(row), amount(row.position, "tokens")]
        if ids:
            token = [] if row.token_id is None else [row.token_id]
            cells += [words(token_text(row.context_ids, as_bytes), "before"), words(token_text(token, as_bytes), "code")]
        cells += [amount(row.rollout_log_prob), amount(row.train_log_prob), amount(row.log_ratio)]
        table.rows.append(cells)
    return table


def _of(shown: int, known: int) -> str:
    return f" (of {known} in the JSON result)" if known > shown else ""


def _place_heads() -> list[Head]:
    return [Head(text, numeric=False) for text in ("step", "sequence", "prompt", "file: row")]


def _place(row: WorstSequence | WorstToken) -> list[Cell]:
    ids = (row.step, row.sequence_id, row.prompt_id)
    texts = [DASH if value is None else label(value) for value in ids]
    return [*(words(text) for text in texts), words(f"{row.file.rsplit('/', 1)[-1]}: {row.row}", "place")]


def by_tables(corrections: Sequence[Correction], run: RunResult, registry: Registry) -> list[Table]:
    """One table per `--by` column: the mismatch, and what each correction rejects there."""
    tables, gated = [], [correction.name for correction in corrections if correction.gates]
    for column, groups in run.by.items():
        shown = [Shown(key) for key in known_keys(BY_KEYS, groups.metrics)]
        shown += [Shown("rejected_tokens", f"rejected by {name}", name) for name in gated if name in groups.corrections]
        tables.append(group_table(f"By {clean(column)}", column, groups, shown, registry))
    return tables


def step_tables(run: RunResult, registry: Registry) -> list[Table]:
    """The main metrics of each step, and what each correction does there."""
    shown = [Shown(key) for key in known_keys(STEP_KEYS, run.groups.metrics)]
    tables = [group_table("The mismatch by step", "step", run.groups, shown, registry)]
    for key in STEP_CORRECTION_KEYS if run.groups.corrections else ():
        columns = [Shown(key, name, name) for name in run.groups.corrections]
        title = registry.metric(key, "c").title
        tables.append(group_table(f"{title[0].upper()}{title[1:]} by step", "step", run.groups, columns, registry))
    return tables


def metric_tables(run: RunResult, registry: Registry) -> list[Table]:
    """Every metric of the run with its meaning: the mismatch, then the second drift."""
    drift = [key for key in run.overall.metrics if key.startswith("drift_") or key in ("ois", "ois_z")]
    own = [key for key in run.overall.metrics if key not in drift]
    tables = [_metric_table("Every metric of the mismatch", own, run, registry)]
    if drift:
        tables.append(_metric_table("The second drift: from train to the current policy", drift, run, registry))
    return tables


def _metric_table(caption: str, keys: Sequence[str], run: RunResult, registry: Registry) -> Table:
    heads = [Head("metric", numeric=False), Head("value"), Head("90 % interval"), Head("unit", numeric=False)]
    table = Table(f"{caption}: ± is one standard error over clusters.", [*heads, Head("what it says", numeric=False)])
    for key in keys:
        value, metric = run.overall.metrics[key], registry.metric(key)
        interval = DASH if value.interval is None else " … ".join(number(end, metric.unit) for end in value.interval)
        name = Cell(metric.title, kind="name", anchor=f"m-{key}")
        cells = [table.value(value, metric.unit), words(interval, "number"), words(metric.unit), words(metric.meaning, "prose")]
        table.rows.append([name, *cells])
    return table


def _value(values: dict[str, Value], key: str) -> Value:
    return values.get(key, Value(value=None, status="not recorded"))
