"""The verb `sweep`: every point of every study in one pass over a dump."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from mismatchctl.analyze.build import input_files, left_out
from mismatchctl.analyze.micro_batches import numbered, taken_for_steps
from mismatchctl.analyze.reading import DumpReading, check_names
from mismatchctl.batch import TokenBatch
from mismatchctl.correction import Correction
from mismatchctl.dumps import DumpFile, DumpSource
from mismatchctl.engines import Engine, Local
from mismatchctl.errors import ConfigError
from mismatchctl.measure import MeasurePlan, kernel_for
from mismatchctl.measure.grid.family import families
from mismatchctl.measure.grid.sums import CellsOfBatch, SweepPlan, reduce_families
from mismatchctl.measure.metrics import Metric, correction_metrics
from mismatchctl.predict import SequenceSample
from mismatchctl.predict import collect as collect_sample
from mismatchctl.predict.sample import empty_sample
from mismatchctl.sweep.accumulate import SweepAccumulator
from mismatchctl.sweep.front import with_front
from mismatchctl.sweep.model import Sweep
from mismatchctl.sweep.outlook import NOTHING_ASKED, ForecastRequest, corrections_of, forecasts
from mismatchctl.sweep.study import USUAL, Study, ThresholdAxis, studies
from mismatchctl.sweep.targets import BracketData, Search, Wish, brackets, studies_of

MUCH_MEMORY = 1_000_000_000
"""Bytes that a sweep may take for its points before it says so."""


@dataclass(frozen=True)
class _SweepPart:
    """What comes of one unit."""

    sums: CellsOfBatch
    sequences: SequenceSample

    def __add__(self, other: _SweepPart) -> _SweepPart:
        return _SweepPart(self.sums + other.sums, self.sequences + other.sequences)

    def moved(self, by: int) -> _SweepPart:
        return self


@dataclass(frozen=True)
class _SweepPass:
    """What is done on each unit; `predicted` are the corrections whose sequences are sampled, if `samples`."""

    plan: SweepPlan
    predicted: tuple[Correction, ...]
    samples: bool

    makes: ClassVar[type] = _SweepPart

    def __call__(self, batches: Iterable[TokenBatch], run: str) -> _SweepPart:
        sums, sequences = CellsOfBatch(), empty_sample(len(self.predicted))
        for batch in batches:
            sums = sums + reduce_families(batch, run, self.plan)
            if self.samples:
                sequences = sequences + collect_sample(batch, run, self.predicted)
        return _SweepPart(sums, sequences)

    def asked(self, file: DumpFile) -> Iterator[_SweepPass]:
        yield self


def _metric(correction: Correction, key: str) -> Metric:
    return next(metric for metric in correction_metrics(correction) if metric.key == key)


__all__ = ["USUAL", "ForecastRequest", "Study", "Sweep", "ThresholdAxis", "studies", "sweep"]


def sweep(
    paths: Sequence[DumpSource],
    chosen: Sequence[Study] = USUAL,
    *,
    rename: Mapping[str, str] | None = None,
    by: Sequence[str] = (),
    on_bad: Literal["error", "skip"] = "error",
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    notice: Callable[[str], None] | None = None,
    wishes: Sequence[Wish] = (),
    outlook: ForecastRequest = NOTHING_ASKED,
    engine: Engine | None = None,
    micro_batch_size: int | None = None,
) -> Sweep:
    """Measure what every point of every study would do, in one pass, as `analyze` does for one correction.

    Args:
        paths: files, folders, globs; each is a run unless a `run` column says otherwise.
        chosen: corrections with their axes; their names must differ.
        rename: canonical column -> name in the files.
        by: columns to break down by.
        on_bad: whether bad rows and files stop the sweep or are left out and counted.
        threads: units read at once in this process, which is where they are read unless an `engine` is given.
        progress: called with (tokens read, tokens expected).
        notice: called with what should be known before the dump is read: that it will take much memory.
        wishes: what thresholds are to be solved for; takes a second pass.
        outlook: what is to be predicted at some points of each study.
        engine: where units are read; the sweep does not depend on it.
        micro_batch_size: rows of a step in each micro-batch that weights are normalized within, where no column
            `micro_batch` names them; the dump is read once more then. None: the whole step is one, with a warning.

    Raises:
        DataError: a dump that cannot be read or used.
        ConfigError: settings that do not fit each other or the dump.
    """
    if not chosen:
        raise ConfigError("a sweep needs a study, beside what thresholds are solved for too")
    check_names([study.correction for study in chosen])
    solving = studies_of(wishes)
    every = (*chosen, *(study for study, _ in solving))
    parts = [(number, family) for number, study in enumerate(every) for family in families(study.grid)]
    kinds = [
        family.correction.model_copy(update={"name": f"{every[study].name} at point {family.points[0]}"})
        for study, family in parts
    ]
    reading = DumpReading.open(paths, kinds, rename or {}, by, on_bad)
    plan = SweepPlan(
        MeasurePlan(
            tuple(kinds),
            tuple(by),
            reading.has,
            kernel=kernel_for(reading.expected),
            by_prompt=reading.dump.has("prompt_id"),
        ),
        tuple(family for number, family in parts if number < len(chosen)),
        tuple(
            (family, _metric(family.correction, solving[number - len(chosen)][1]))
            for number, family in parts
            if number >= len(chosen)
        ),
    )
    needed = plan.most_bytes(sum(unit.sequences for unit in reading.dump.units))
    if notice is not None and needed > MUCH_MEMORY:
        notice(
            f"{sum(math.prod(study.shape) for study in every):,} points may take {needed / 1e9:.1f} GB of memory "
            "beside what reading takes, as sums of each are kept by cluster: with fewer values of an axis it is less"
        )
    accumulator = SweepAccumulator(plan, every, [number for number, _ in parts])

    predicted = corrections_of(chosen) if outlook.needs_sequences else []
    sample = empty_sample(len(predicted))

    work = _SweepPass(plan, tuple(predicted), outlook.needs_sequences)
    engine = engine or Local(threads)
    unnamed = plan.base.scoped and not reading.dump.has("micro_batch")
    micro_batches = numbered(reading.dump, micro_batch_size) if unnamed and micro_batch_size else None
    for done, may_grow in reading.parts(work, engine, progress, micro_batches):
        accumulator.add(done.sums)
        accumulator.close(may_grow)
        sample = sample + done.sequences
    reading.require_tokens()
    accumulator.finish()
    overall = accumulator.overall()
    open_wishes, targets = brackets(overall, wishes)
    if open_wishes:
        again = DumpReading.open(paths, (), rename or {}, (), on_bad)
        found = BracketData()
        for more, _ in again.parts(Search(tuple(open_wishes)), engine, progress):
            found = found + more
        targets += [bracket.solved(found.between[number]) for number, bracket in enumerate(open_wishes)]
    overall = overall.filter(overall["correction"].is_in([study.name for study in chosen]))
    order = list(wishes)
    metrics = {metric.key: metric for known in accumulator.metrics for metric in known}
    groups = accumulator.table.frames()
    runs = list(overall["run"].unique(maintain_order=True))
    return Sweep(
        studies=tuple(chosen),
        metrics=metrics,
        overall=with_front(overall, chosen),
        groups=groups,
        inputs=input_files(reading.dump, reading.tokens, reading.problems),
        left_out=left_out(reading.problems),
        warnings=[*reading.dump.warnings, *([taken_for_steps(kinds)] if unnamed and micro_batches is None else [])],
        targets=tuple(sorted(targets, key=lambda target: order.index((target.wish, target.wanted)))),
        forecasts=forecasts(outlook, chosen, runs, sample, groups) if outlook != NOTHING_ASKED else (),
        by=tuple(by),
        folder=accumulator.table.folder,
    )
