"""The verb `analyze`: one pass over a dump, one Result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mismatchctl.analyze.accumulate import Accumulator
from mismatchctl.analyze.build import build_result
from mismatchctl.analyze.logged import NAMES, LoggedSteps, Parts, ReplayOptions, step_tables
from mismatchctl.analyze.reading import Batches, Reading
from mismatchctl.analyze.sequences import SequenceFile
from mismatchctl.correction import Correction
from mismatchctl.diagnose import COLUMNS, Collector, expected_tokens
from mismatchctl.frameworks import Framework
from mismatchctl.result import Result
from mismatchctl.sums import Device, Plan, Sums, kernel_for, reduce_batch


@dataclass
class _Done:
    """What comes of one unit."""

    causes: Collector
    sums: Sums = field(default_factory=Sums)
    parts: Parts = field(default_factory=list)


def analyze(
    paths: Sequence[str],
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
    replay: ReplayOptions | None = None,
    every_cluster: bool = False,
    device: Device = "auto",
) -> Result:
    """Measure the mismatch of a dump and what each correction would do, in one pass.

    Args:
        paths: files, folders, globs; each is a run unless a `run` column says otherwise.
        corrections: compared side by side; their names must differ.
        rename: canonical column -> name in the files.
        by: columns to break metrics down by.
        on_bad: whether bad rows and files stop the analysis or are left out and counted.
        threads: units read at once; the result does not depend on it.
        progress: called with (tokens read, tokens expected).
        sequences: write one row per sequence to this Parquet file.
        join: bring the columns of this Parquet file along there.
        framework: replay each step with each correction that it can do; memory grows by one step.
        replay: how that framework's steps are replayed, where not as it does by default, in float64.
        every_cluster: keep cluster tables whole, with the columns of the drift and of corrections: what can be judged
            from such a Result is not limited, but neither is its size.
        device: what does the arithmetic over tokens; auto: an accelerator, where there is one and the dump is so large
            that it pays.

    Raises:
        DataError: a dump that cannot be read or used.
        ConfigError: settings that do not fit each other or the dump.
    """
    extra = () if framework is None else NAMES
    reading = Reading(paths, corrections, rename or {}, by, on_bad, extra=extra, watched=COLUMNS)
    dump = reading.dump
    plan = Plan(
        tuple(corrections),
        tuple(by),
        dump.has("current_log_probs"),
        sequences is not None,
        kernel_for(reading.expected, device),
        every_cluster,
    )
    accumulator = Accumulator(plan)
    logged = None if framework is None else LoggedSteps(framework, corrections, replay or ReplayOptions())
    tokens = expected_tokens(dump)
    causes = Collector(by, tokens)

    def work(batches: Batches, run: str) -> _Done:
        done = _Done(Collector(by, tokens))
        for batch in batches.watched_by(done.causes.watch):
            done.sums = done.sums + reduce_batch(batch, run, plan)
            if logged is not None:
                done.parts += step_tables(batch, run)
        return done

    with SequenceFile(sequences, join, plan, dump.files) as rows:
        for done, may_grow in reading.units(work, threads, progress):
            accumulator.add(done.sums)
            rows.write(done.sums.sequences)
            accumulator.close(may_grow)
            if logged is not None:
                logged.add(done.parts)
                logged.close(may_grow)
            causes.add(done.causes)
        accumulator.close()
        if logged is not None:
            logged.close()
        result = build_result(dump, plan, accumulator, reading.tokens, reading.problems)
        for name, run in result.runs.items():
            run.findings = causes.findings(name, [file.path for file in dump.files])
        if framework is not None and logged is not None:
            _add_logged(result, framework, logged)
        rows.finish(accumulator.factors)
    return result


def _add_logged(result: Result, framework: Framework, logged: LoggedSteps) -> None:
    result.provenance.framework = framework.title
    result.provenance.replay = logged.options.given
    for name, run in result.runs.items():
        run.logged = logged.of_run(name, run.groups.labels)
    result.warnings += [f"{framework.title} does not replay {name}: {why}" for name, why in logged.refused.items()]


__all__ = ["ReplayOptions", "analyze"]
