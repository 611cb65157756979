"""The verb `analyze`: one pass over a dump, one Result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mismatchctl.analyze.build import build_result
from mismatchctl.analyze.logged import NAMES, LoggedSteps, Parts, step_tables
from mismatchctl.analyze.micro_batches import numbered, warn_of_steps
from mismatchctl.analyze.reading import Batches, DumpReading
from mismatchctl.analyze.sequences import SequenceFile
from mismatchctl.analyze.turns import are_within, by_turns
from mismatchctl.contract import PARTIAL, TURN
from mismatchctl.correction import Correction
from mismatchctl.correction.losses import loss_numbers
from mismatchctl.diagnose import COLUMNS, Collector, collector_for
from mismatchctl.dumps import DumpFile, DumpSource
from mismatchctl.engines import Engine, Local
from mismatchctl.engines.cache import Cached
from mismatchctl.errors import ConfigError, DataError, option
from mismatchctl.frameworks import Framework
from mismatchctl.frameworks.framework import AS_USUAL, Dtype, ReplayOptions
from mismatchctl.measure import Device, Kernel, MeasurePlan, Sums, kernel_for, reduce_batch
from mismatchctl.measure.accumulate import Accumulator
from mismatchctl.result import Result, tell_all
from mismatchctl.result.story import growth_of_run

if TYPE_CHECKING:
    from mismatchctl.analyze.against import RunLog


@dataclass(frozen=True)
class _Done:
    """What comes of one unit."""

    causes: Collector
    sums: Sums
    turns: Sums
    parts: Parts

    def __add__(self, other: _Done) -> _Done:
        sums, turns = self.sums + other.sums, self.turns + other.turns
        return _Done(self.causes + other.causes, sums, turns, self.parts + other.parts)

    def moved(self, by: int) -> _Done:
        return _Done(self.causes.moved(by), self.sums.moved(by), self.turns.moved(by), self.parts)


@dataclass(frozen=True)
class _Pass:
    """What is done on each unit."""

    plan: MeasurePlan
    turns: MeasurePlan | None
    causes: Collector
    watches: bool
    replays: bool

    makes: ClassVar[type] = _Done

    def __call__(self, batches: Batches, run: str) -> _Done:
        causes, sums, turns, parts = self.causes.empty(), Sums(), Sums(), Parts()
        for batch in batches.watched_by(causes.watch) if self.watches else batches:
            sums = sums + reduce_batch(batch, run, self.plan)
            if self.turns is not None:
                turns = turns + reduce_batch(by_turns(batch), run, self.turns)
            if self.replays:
                parts += step_tables(batch, run)
        return _Done(causes, sums, turns, parts)

    def asked(self, file: DumpFile) -> Iterator[_Pass]:
        return (replace(self, causes=causes) for causes in self.causes.asked(file))


def _with_losses(corrections: Sequence[Correction], losses: Sequence[str]) -> Sequence[Correction]:
    """Every correction with each of the losses.

    Raises:
        ConfigError: there is no such loss.
    """
    try:
        for loss in losses:
            loss_numbers(loss)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if len(losses) < 2:
        return [one.model_copy(update={"loss": loss}) for one in corrections for loss in losses] or corrections
    return [
        one.model_copy(update={"name": f"{one.name} [{loss}]", "loss": loss}) for one in corrections for loss in losses
    ]


def _kernel(tokens: int, device: Device, engine: Engine | None) -> Kernel:
    """What does the arithmetic: a device is of this process, other engines have the CPUs of theirs."""
    inner = engine.engine if isinstance(engine, Cached) else engine
    if inner is None or isinstance(inner, Local):
        return kernel_for(tokens, device)
    if device == "cuda":
        raise ConfigError(f"{option('device', 'cuda')} is of this process: leave it out with {option('engine', 'ray')}")
    return kernel_for(tokens, "cpu")


def analyze(
    paths: Sequence[DumpSource],
    corrections: Sequence[Correction] = (),
    *,
    rename: Mapping[str, str] | None = None,
    by: Sequence[str] = (),
    on_bad: Literal["error", "skip"] = "error",
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    sequences: str | Path | None = None,
    join: str | Path | None = None,
    framework: Framework | None = None,
    replay: ReplayOptions = AS_USUAL,
    log: RunLog | None = None,
    micro_batch_size: int | None = None,
    every_cluster: bool = False,
    findings: bool = True,
    device: Device = "auto",
    engine: Engine | None = None,
    baseline: tuple[str, Result] | None = None,
    losses: Sequence[str] = (),
) -> Result:
    """Measure the mismatch of a dump and what each correction would do, in one pass.

    Args:
        paths: files, folders, globs, tables in memory; each is a run unless a `run` column says otherwise.
        corrections: compared side by side; their names must differ.
        rename: canonical column -> name in the files.
        by: columns to break metrics down by; `turn` takes each turn of a response for a sequence, and no correction.
        on_bad: whether bad rows and files stop the analysis or are left out and counted.
        threads: units read at once in this process, which is where they are read unless an `engine` is given.
        progress: called with (tokens read, tokens expected).
        sequences: write one row per sequence to this Parquet file.
        join: bring the columns of this Parquet file along there.
        framework: replay each step with each correction that it can do; memory grows by one step.
        replay: how that framework's steps are replayed, where not as it does by default, in float64.
        log: what the run itself logged; it is kept, and laid beside what the framework would have logged.
        micro_batch_size: rows of a step in each micro-batch that weights are normalized within, where no column
            `micro_batch` names them; the dump is read twice then. None: the whole step is one, and a warning says so.
        every_cluster: keep cluster tables whole, with the columns of the drift and of corrections: what can be judged
            from such a Result is not limited, but neither is its size.
        findings: look for causes of the mismatch, too.
        device: what does the arithmetic over tokens; auto: an accelerator of this process, where there is one and the
            dump is so large that it pays.
        engine: where units are read; the result does not depend on it.
        baseline: name of a Result that was accepted, and itself: the answer says how K3 stands to it.
        losses: surrogates that every correction is measured with in place of its own (see `correction.losses`);
            several make as many of each, called `NAME [LOSS]`. A framework that is replayed has its own.

    Raises:
        DataError: a dump that cannot be read or used.
        ConfigError: settings that do not fit each other or the dump.
    """
    if framework is not None and isinstance(engine, Cached):
        raise ConfigError(f"a cache keeps sums, but {framework.title} replays every token: leave one of them out")
    if micro_batch_size is not None and isinstance(engine, Cached):
        raise ConfigError("a cache keeps sums over whole steps: leave it out, or the size of micro-batches")
    replayed, corrections = corrections, _with_losses(corrections, losses)
    extra = () if framework is None else NAMES
    columns = tuple(column for column in by if column != TURN)
    extra = (*extra, TURN) if TURN in by else extra
    watched = (*(column for column in PARTIAL if column != TURN), *(COLUMNS if findings else ()))
    reading = DumpReading.open(paths, corrections, rename or {}, columns, on_bad, extra=extra, watched=watched)
    dump = reading.dump
    within = TURN in by and are_within(dump)
    for column in ("current_log_probs", "advantages") if losses else ():
        if not dump.has(column):
            problem = f"the loss {losses[0]} needs this column, which is missing"
            raise DataError(problem, file=dump.files[0].path, column=column, remedy="record it, or leave the loss out")
    plan = MeasurePlan(
        tuple(corrections),
        columns if within else tuple(by),
        reading.has,
        sequences is not None,
        _kernel(reading.expected, device, engine),
        every_cluster,
        dump.has("prompt_id"),
    )
    unnamed = plan.scoped and not dump.has("micro_batch")
    micro_batches = numbered(dump, micro_batch_size) if unnamed and micro_batch_size else None
    turns = replace(plan, corrections=(), by=(TURN,), sequences=False) if within else None
    accumulator, by_turn = Accumulator(plan), None if turns is None else Accumulator(turns)
    replays = [] if framework is None else _replays(framework, replayed, replay, log)
    kept: list[tuple[Any, str]] = [(accumulator, "sums"), *((logged, "parts") for logged in replays)]
    kept += [] if by_turn is None else [(by_turn, "turns")]
    causes = collector_for(dump, plan.by)
    work = _Pass(plan, turns, causes.empty(), findings, framework is not None)
    with SequenceFile(sequences, join, plan, dump.files) as rows:
        for done, may_grow in reading.parts(work, engine or Local(threads), progress, micro_batches):
            for groups, what in kept:
                groups.add(getattr(done, what))
                groups.close(may_grow)
            rows.write(done.sums.sequences)
            causes.add(done.causes)
        reading.require_tokens()
        for groups, _ in kept:
            groups.finish()
        result = build_result(dump, plan, accumulator, reading.tokens, reading.problems, by_turn)
        for name, run in result.runs.items():
            run.findings, run.sides = causes.findings(name, [file.path for file in dump.files], growth_of_run(run))
        tell_all(result, baseline)
        if unnamed and micro_batches is None:
            warn_of_steps(result, corrections)
        if framework is not None:
            _add_logged(result, framework, replays)
        if log is not None:
            _add_log(result, log, replays)
        rows.finish(accumulator.factors)
    return result


def _replays(
    framework: Framework, corrections: Sequence[Correction], options: ReplayOptions, log: RunLog | None
) -> list[LoggedSteps]:
    """The replay that was asked for, and beside a log the one at the other precision: how far they are apart counts."""
    other: Dtype = "float32" if options.dtype == "float64" else "float64"
    wanted = [options] if log is None else [options, replace(options, dtype=other)]
    return [LoggedSteps(framework, corrections, each) for each in wanted]


def _add_logged(result: Result, framework: Framework, replays: Sequence[LoggedSteps]) -> None:
    logged = replays[0]
    result.provenance.framework = framework.title
    result.provenance.replay = logged.options.given
    result.warnings += [f"{framework.title} does not replay {name}: {why}" for name, why in logged.refused.items()]
    for name, run in result.runs.items():
        run.logged = logged.of_run(name, run.groups.labels)


def _add_log(result: Result, log: RunLog, replays: Sequence[LoggedSteps]) -> None:
    """Keep what the run logged, how K3 follows it, and how what a framework would have logged agrees with it."""
    from mismatchctl.analyze.against import agreement, beside_metrics, carried, metrics_of, require_shared_steps
    from mismatchctl.analyze.lags import lag_of

    result.provenance.log = log.path
    require_shared_steps(log, [label for run in result.runs.values() for label in run.groups.labels])
    for name, run in result.runs.items():
        labels, k3 = run.groups.labels, run.groups.metrics.get("k3")
        run.log = carried(log, labels)
        run.lags = {} if k3 is None else {key: lag_of(k3.value, values) for key, values in run.log.items()}
        rounded = replays[-1].of_run(name, labels) if replays else {}
        run.against = {
            correction: agreement(log, labels, values, rounded.get(correction, {}))
            for correction, values in run.logged.items()
        }
        called = metrics_of(log, {each for values in run.logged.values() for each in values})
        series = {key: run.groups.metrics[key].value for key in called.values() if key in run.groups.metrics}
        run.against_metrics = beside_metrics(log, labels, series, called)


__all__ = ["ReplayOptions", "analyze"]
