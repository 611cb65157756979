"""The tables and sentences of one run, prepared for the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mismatchctl.correction import Correction
from mismatchctl.numbers import estimate, number
from mismatchctl.render.figures import RunFigures, run_figures
from mismatchctl.render.notes import run_notes
from mismatchctl.render.run_tables import (
    breakdown_tables,
    by_tables,
    correction_metric_table,
    logged_table,
    metric_tables,
    step_tables,
    worst_sequences,
    worst_tokens,
)
from mismatchctl.render.tables import Head, Registry, Table, known_keys, words
from mismatchctl.render.text import clean
from mismatchctl.result import Finding, Growth, Result, RunResult, Value, story_of
from mismatchctl.result.growth import Z_LIMIT

TILES = (
    "abs_diff_mean", "abs_diff_max", "ess_token", "ess_sequence", "ratio_mean_z", "khat_token", "khat_sequence",
    "chi2_token", "chi2_sequence", "prob_corr", "k3_worst_share", "bitwise_share",
)  # fmt: skip
CORRECTION_KEYS = (
    "weight_mean",
    "weight_std",
    "weight_bounded_low",
    "weight_bounded_high",
    "normalization_factor",
    "rejected_tokens",
    "rejected_sequences",
    "fully_rejected_sequences",
    "empty_prompts",
    "ess_token",
    "ess_sequence",
    "loss_scale",
    "k3_kept",
)
LOSS_KEYS = ("loss", "loss_change", "loss_clip_fraction", "gradient_cosine", "gradient_norm")
NOT_RECORDED = Value(value=None, status="not recorded")
COMPARED_KEYS = tuple(f"{side}_{name}" for name in ("reward", "advantage", "length") for side in ("kept", "rejected"))


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
    facts: str
    notes: list[str]
    standing: str
    trend: Growth
    k3: Value
    k3_meaning: str
    figures: RunFigures
    tiles: list[Tile] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
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
    k3 = run.overall.metrics.get("k3", Value(value=None, status="not recorded"))
    section = RunSection(
        index=index,
        name=clean(name),
        facts=_facts(run),
        notes=[clean(note) for note in run_notes(run)],
        standing=story_of(run).standing.text,
        trend=story_of(run).growth,
        k3=k3,
        k3_meaning=registry.metric("k3").meaning,
        figures=run_figures(run, f"f{index}", brief=brief),
        findings=run.findings,
    )
    section.tiles = tiles(run, registry)
    if result.corrections:
        tables = (corrections_table(run, registry), loss_table(run, registry))
        section.corrections = [*filter(None, tables), *_gates(result.corrections, run, registry)]
        section.selection = selection_table(result, run, registry)
    section.worst = [table for table in (worst_sequences(run.worst_sequences), worst_tokens(run.worst_tokens)) if table]
    section.by = by_tables(result.corrections, run, registry)
    section.steps = step_tables(run, registry) if len(run.groups.labels) > 1 else []
    section.metrics = metric_tables(run, registry)
    if result.corrections:
        section.metrics.append(correction_metric_table(run, registry))
    if run.logged:
        section.metrics.append(logged_table(run, result.provenance.framework or "the framework"))
    if not brief:
        section.metrics += breakdown_tables(run, registry)
    return section


def _facts(run: RunResult) -> str:
    """The size of a run."""
    counts = [
        (key, run.overall.metrics.get(key, Value(value=None)).value) for key in ("tokens", "sequences", "prompts")
    ]
    texts = [f"{number(value, 'tokens')} {key}" for key, value in counts if value is not None]
    steps = len(run.groups.labels)
    return ", ".join([*texts, f"{steps:,} step{'s' * (steps != 1)}"])


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
    caption = (
        "What each correction would do to this run. Weights are those applied, rejected tokens included; shares are of "
        "valid tokens or of sequences."
    )
    return _by_correction(caption, CORRECTION_KEYS, run, registry)


def loss_table(run: RunResult, registry: Registry) -> Table | None:
    """What each correction does to the loss, where the dump tells."""
    if not any(values.get("loss", NOT_RECORDED).value is not None for values in run.overall.corrections.values()):
        return None
    caption = (
        "What each correction would do to the policy loss and to its gradient by token, against PPO without any "
        "correction."
    )
    return _by_correction(caption, LOSS_KEYS, run, registry)


def _by_correction(caption: str, keys: Sequence[str], run: RunResult, registry: Registry) -> Table:
    heads = [Head("correction", numeric=False), *(registry.head(key, "c") for key in keys)]
    table = Table(caption, heads, sortable=True)
    for name, values in run.overall.corrections.items():
        cells = [table.value(_value(values, key), registry.metric(key, "c").unit) for key in keys]
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


def _value(values: dict[str, Value], key: str) -> Value:
    return values.get(key, NOT_RECORDED)
