"""Measure a dump in one pass and return its Result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatchctl.api.analyze.builder import build_result, build_rows, write_sequences
from mismatchctl.api.analyze.run_log import (
    REPLAY_COLUMNS,
    LoggedSteps,
    RunLog,
    StepTables,
    align_steps,
    build_replay_table,
    compare_metrics,
    compare_replay,
    describe_order,
    estimate_lag,
    match_metrics,
    require_shared_steps,
    step_label,
)
from mismatchctl.api.scan import DumpReading, ReadOptions, UnitBatches
from mismatchctl.core.batch import Float64s, TokenBatch
from mismatchctl.core.schema import PARTIAL_COLUMNS, TURN_COLUMN
from mismatchctl.corrections.model import Correction, parse_loss
from mismatchctl.data.engines import Engine, IncrementalEngine, LocalEngine
from mismatchctl.data.paths import DumpSource
from mismatchctl.diagnosis.diagnosis import DIAGNOSIS_COLUMNS, EvidenceCollector, make_collector
from mismatchctl.errors import ConfigError, DataError, option
from mismatchctl.frameworks.adapter import Dtype, Framework, ReplayOptions
from mismatchctl.measure.cluster_table import merge_parts
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.kernels import Device, choose_kernel
from mismatchctl.measure.kernels.kernel import Kernel
from mismatchctl.measure.metrics.evaluation import Accumulator
from mismatchctl.measure.reduction import MeasurePlan, Sums, correction_ratios, reduce_batch, split_runs, split_steps
from mismatchctl.results.model import PresetPoint, Result
from mismatchctl.results.summary import fit_run_growth, summarize_runs

if TYPE_CHECKING:
    import polars as pl
    from typing_extensions import Unpack

GateSums = dict[str, Float64s]
"""Kept tokens and their sum of K3 of each preset [P, 2], by run."""


def _measure_gates(batch: TokenBatch, run: str, presets: MeasurePlan) -> GateSums:
    found: GateSums = {}
    for name, part in split_runs(batch, run):
        found[name] = np.zeros((len(presets.corrections), 2))
        for _, block in part.blocks():
            ratios = correction_ratios(block, presets)
            k3 = ratios["train/rollout"].k3_sum
            for sums, preset in zip(found[name], presets.corrections, strict=True):
                columns, _ = correction_columns(
                    preset, ratios, k3, block, all_tokens=presets.kernel.evaluates_all_tokens
                )
                sums += columns["kept"].sum(), columns["kept_k3"].sum()
    return found


@dataclass(frozen=True)
class _AnalysisPart:
    causes: EvidenceCollector
    sums: Sums
    parts: StepTables
    rows: list[pl.DataFrame]  # of sequences
    gates: GateSums

    def __add__(self, other: _AnalysisPart) -> _AnalysisPart:
        sums, parts, rows = self.sums + other.sums, self.parts + other.parts, self.rows + other.rows
        return _AnalysisPart(self.causes + other.causes, sums, parts, rows, merge_parts(self.gates, other.gates))


@dataclass(frozen=True)
class _AnalysisPass:
    plan: MeasurePlan
    causes: EvidenceCollector
    watches: bool
    replays: bool
    presets: MeasurePlan

    def __call__(self, batches: UnitBatches, run: str) -> _AnalysisPart:
        causes, sums, parts = self.causes.empty(), Sums(), StepTables()
        rows: list[pl.DataFrame] = []
        gates: GateSums = {}
        for batch in batches.read(causes.watch) if self.watches else batches:
            reduced = reduce_batch(batch, run, self.plan)
            if self.plan.sequences:
                rows.append(build_rows(reduced.sequences, batches.path, self.plan))
            sums = sums + replace(reduced, sequences=())
            if self.presets.corrections:
                gates = merge_parts(gates, _measure_gates(batch, run, self.presets))
            if self.replays:
                parts += [((name, step), build_replay_table(part)) for name, (step, _), part in split_steps(batch, run)]
        return _AnalysisPart(causes, sums, parts, rows, gates)


def _combine_with_losses(corrections: Sequence[Correction], losses: Sequence[str]) -> Sequence[Correction]:
    try:
        for loss in losses:
            parse_loss(loss)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if len(losses) < 2:
        return [one.model_copy(update={"loss": loss}) for one in corrections for loss in losses] or corrections
    return [
        one.model_copy(update={"name": f"{one.name} [{loss}]", "loss": loss}) for one in corrections for loss in losses
    ]


def _choose_kernel(tokens: int, device: Device, engine: Engine) -> Kernel:
    """Choose the kernel by device and engine. Only the local engine can use a GPU."""
    if isinstance(engine, (LocalEngine, IncrementalEngine)):
        return choose_kernel(tokens, device)
    if device == "cuda":
        raise ConfigError(
            f"{option('device', 'cuda')} does not work with {option('engine', 'ray')}; leave one of them out"
        )
    return choose_kernel(tokens, "cpu")


def analyze(
    paths: Sequence[DumpSource],
    corrections: Sequence[Correction] = (),  # to compare, with unique names
    *,
    by: Sequence[str] = (),  # columns to break metrics down by
    sequences: str | Path | None = None,  # write one row per sequence to this Parquet file
    framework: Framework | None = None,  # replay each step with each correction. Memory grows by one step.
    log: RunLog | None = None,
    every_cluster: bool = False,  # complete cluster tables, also of drift and corrections, of any size
    findings: bool = True,
    device: Device = "auto",
    baseline: tuple[str, Result] | None = None,  # name of an accepted Result, and the Result
    # measure every correction with these losses, instead of its own. Several give corrections called `NAME [LOSS]`. A
    # replayed framework has its own loss.
    losses: Sequence[str] = (),
    # corrections of which only the rejected share and the remaining K3 are measured, for a figure. Those that need
    # other columns or a whole step are left out.
    presets: Sequence[Correction] = (),
    **options: Unpack[ReadOptions],
) -> Result:
    """Measure the mismatch of a dump and the effect of each correction, in one pass. See `mm.analyze`."""
    replayed, corrections = corrections, _combine_with_losses(corrections, losses)
    extra = () if framework is None else REPLAY_COLUMNS
    watched = (
        *(column for column in PARTIAL_COLUMNS if column != TURN_COLUMN),
        *(DIAGNOSIS_COLUMNS if findings else ()),
    )
    reading = DumpReading.open(paths, corrections, by, extra=extra, watched=watched, **options)
    dump = reading.dump
    for column in ("current_log_probs", "advantages") if losses else ():
        if not dump.has(column):
            problem = f"the loss {losses[0]} needs this column, which is missing"
            raise DataError(
                problem, file=dump.files[0].path, column=column, remedy="record this column, or leave the loss out"
            )
    plan = MeasurePlan(
        tuple(corrections),
        tuple(by),
        reading.has,
        sequences is not None,
        _choose_kernel(reading.expected_tokens, device, reading.engine),
        every_cluster,
        dump.has("prompt_id"),
    )
    accumulator = Accumulator(plan)
    # with a log, a replay in float32 measures rounding
    dtypes: list[Dtype] = ["float64"] if log is None else ["float64", "float32"]
    replays = [
        LoggedSteps(framework, replayed, ReplayOptions(options.get("micro_batch_size"), dtype))
        for dtype in dtypes if framework is not None
    ]  # fmt: skip
    kept: list[tuple[Any, str]] = [(accumulator, "sums"), *((logged, "parts") for logged in replays)]
    causes = make_collector(dump, plan.by)
    drawn = [
        preset for preset in presets if all(gate.over != "batch" for gate in preset.gates)
        and all(column in (*file.columns, *file.partition) for column in preset.needed_columns for file in dump.files)
    ]  # fmt: skip
    rules = {preset.gates: Correction(name=preset.name, gates=preset.gates) for preset in drawn}
    gates: GateSums = {}
    work = _AnalysisPass(
        plan, causes.empty(), findings, framework is not None, replace(plan, corrections=(*rules.values(),))
    )
    rows: list[pl.DataFrame] = []
    for done, may_grow in reading.parts(work):
        for groups, what in kept:
            groups.add(getattr(done, what))
            groups.close(may_grow)
        rows += done.rows
        gates = merge_parts(gates, done.gates)
        causes.add(done.causes)
    reading.require_tokens()
    for groups, _ in kept:
        groups.finish()
    result = build_result(reading, plan, accumulator)
    for name, run in result.runs.items():
        growth = partial(fit_run_growth, run)
        files = dump.paths
        run.findings, run.sides = causes.findings(name, files, growth)
        run.content = causes.content(name, files, run.findings)
        points = dict(zip(rules, gates.get(name, ()), strict=False))
        tokens = run.overall.metrics["tokens"].value or 0
        run.presets = {
            preset.name: PresetPoint.from_sums(tokens, *points[preset.gates].tolist()) for preset in drawn if tokens
        }
    summarize_runs(result, baseline)
    result.warnings += reading.warnings
    if framework is not None:
        _add_replays(result, framework, replays)
    if log is not None:
        _add_run_log(result, log, replays)
    if sequences is not None:
        write_sequences(sequences, rows, plan, accumulator.factors)
    return result


def _add_replays(result: Result, framework: Framework, replays: Sequence[LoggedSteps]) -> None:
    logged = replays[0]
    result.provenance.framework = framework.title
    result.provenance.replay = logged.options.given
    result.warnings += [f"{framework.title} does not replay {name}: {why}" for name, why in logged.refused.items()]
    result.warnings += [
        f"{framework.title} logs {name}, which is not computed: it needs {needed}"
        for name, needed in logged.unavailable.items()
    ]
    for name, run in result.runs.items():
        run.logged = logged.of_run(name, run.groups.labels)


def _add_run_log(result: Result, log: RunLog, replays: Sequence[LoggedSteps]) -> None:
    result.provenance.log = log.path
    if replays and (offset := replays[0].framework.log_step_offset):
        runs = [(run.groups.labels, values) for run in result.runs.values() for values in run.logged.values()]
        aligned = align_steps(log, runs, offset)
        if aligned is not log:
            result.warnings.append(
                f"{result.provenance.framework} logs a batch {offset} step later than it is generated: "
                f"{log.path} is read {offset} step earlier"
            )
        log = aligned
    require_shared_steps(log, [label for run in result.runs.values() for label in run.groups.labels])
    for name, run in result.runs.items():
        labels, k3 = run.groups.labels, run.groups.metrics.get("k3")
        run.log = log.series([step_label(label) for label in labels])
        run.order = describe_order(labels, fit_run_growth(run), run.log)
        run.lags = {} if k3 is None else {key: estimate_lag(k3.value, values) for key, values in run.log.items()}
        rounded = replays[-1].of_run(name, labels) if replays else {}
        run.against = {
            correction: compare_replay(log, labels, values, rounded.get(correction, {}))
            for correction, values in run.logged.items()
        }
        called = match_metrics(log, {each for values in run.logged.values() for each in values})
        series = {key: run.groups.metrics[key].value for key in called.values() if key in run.groups.metrics}
        run.against_metrics = compare_metrics(log, labels, series, called)
