"""The verb `analyze`: one pass over a dump, one Result."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mismatchctl.analyze.accumulate import Accumulator
from mismatchctl.analyze.build import build_result
from mismatchctl.analyze.logged import LoggedSteps, Parts, step_tables
from mismatchctl.analyze.sequences import SequenceFile
from mismatchctl.correction import Correction
from mismatchctl.diagnose import COLUMNS, Collector
from mismatchctl.dumps import Dump, DumpFile, Problems, Unit, open_dump
from mismatchctl.engines.local import default_threads, ordered_map
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks import Framework, column_aliases
from mismatchctl.result import Result
from mismatchctl.sums import Plan, Sums, reduce_batch
from mismatchctl.sums.reduce import Value

WANTED = ("current_log_probs", "advantages", "reward", "prompt_id", "sequence_id", "step", "run")
"""Optional columns that the pass makes use of."""


@dataclass
class _UnitDone:
    causes: Collector
    sums: Sums = field(default_factory=Sums)
    tokens: int = 0
    problems: Problems = field(default_factory=Problems)
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
    micro_batch_size: int | None = None,
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
        micro_batch_size: rows per micro-batch in that replay, where the dump does not name micro-batches.

    Raises:
        DataError: a dump that cannot be read or used.
        ConfigError: settings that do not fit each other or the dump.
    """
    _check_names(corrections)
    scoped = framework is not None or any(correction.normalizes_micro_batches for correction in corrections)
    needed = [*WANTED, *(["micro_batch"] if scoped else [])]
    names = column_aliases()
    dump = open_dump(paths, rename=rename, aliases=names, by=by, wanted=needed, watched=COLUMNS, on_bad=on_bad)
    _check_columns(corrections, dump)
    plan = Plan(tuple(corrections), tuple(by), dump.has("current_log_probs"), sequences is not None)
    accumulator = Accumulator(plan)
    logged = None if framework is None else LoggedSteps(framework, corrections, micro_batch_size)
    tokens = dict.fromkeys((file.index for file in dump.files), 0)
    problems, expected = dump.problems, sum(unit.tokens for unit in dump.units)
    causes = Collector(by, expected)
    later = _Later(dump.units)

    def work(unit: Unit) -> _UnitDone:
        return _reduce_unit(dump, unit, plan, Collector(by, expected), with_rows=logged is not None)

    with SequenceFile(sequences, join, plan, dump.files) as rows:
        for unit, done in ordered_map(work, dump.units, threads or default_threads()):
            accumulator.add(done.sums)
            rows.write(done.sums.sequences)
            accumulator.close(later.after(unit))
            if logged is not None:
                logged.add(done.parts)
                logged.close(later.after(unit))
            causes.add(done.causes)
            problems = problems + done.problems
            tokens[unit.file.index] += done.tokens
            if progress is not None:
                progress(sum(tokens.values()), expected)
        accumulator.close()
        if logged is not None:
            logged.close()
        dump.require_tokens(sum(tokens.values()))
        result = build_result(dump, plan, accumulator, tokens, problems)
        for name, run in result.runs.items():
            run.findings = causes.findings(name, [file.path for file in dump.files])
        if framework is not None and logged is not None:
            _add_logged(result, framework, logged)
        rows.finish(accumulator.factors)
    return result


def _add_logged(result: Result, framework: Framework, logged: LoggedSteps) -> None:
    result.provenance.framework = framework.title
    for name, run in result.runs.items():
        run.logged = logged.of_run(name, run.groups.labels)
    result.warnings += [f"{framework.title} does not replay {name}: {why}" for name, why in logged.refused.items()]


def _reduce_unit(dump: Dump, unit: Unit, plan: Plan, causes: Collector, *, with_rows: bool) -> _UnitDone:
    done = _UnitDone(causes)
    for batch in dump.read(unit, done.problems, done.causes.watch):
        done.sums = done.sums + reduce_batch(batch, unit.file.run, plan)
        done.tokens += batch.tokens
        if with_rows:
            done.parts += step_tables(batch, unit.file.run)
    return done


class _Later:
    """Which groups can still come in units after a given one, as far as file footers tell.

    For every run: the indices of its units, and the range of steps in each of them and all after it.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._named = any("run" in unit.file.columns or "run" in unit.file.partition for unit in units)
        self._indices: dict[str, list[int]] = {}
        self._ranges: dict[str, list[tuple[float, float]]] = {}
        for unit in reversed(units):
            run = "" if self._named else unit.file.run
            ranges = self._ranges.setdefault(run, [])
            low, high = unit.step_range or (-math.inf, math.inf)
            ranges.append((min(low, ranges[-1][0]), max(high, ranges[-1][1])) if ranges else (low, high))
            self._indices.setdefault(run, []).append(-unit.index)  # ascending, to be searched

    def after(self, unit: Unit) -> Callable[[str, Value], bool]:
        """A test whether more of (run, step) may come after `unit`."""

        def may_come(run: str, step: Value) -> bool:
            key = "" if self._named else run
            later = bisect_left(self._indices[key], -unit.index)
            if later == 0:
                return False
            low, high = self._ranges[key][later - 1]
            return step is None or isinstance(step, str) or low <= step <= high

        return may_come


def _check_names(corrections: Iterable[Correction]) -> None:
    seen: set[str] = set()
    for correction in corrections:
        if correction.name in seen:
            raise ConfigError(f"two corrections are called {correction.name!r}: give one of them another name")
        seen.add(correction.name)


def _check_columns(corrections: Iterable[Correction], dump: Dump) -> None:
    """Refuse corrections that look at columns which some file lacks."""
    for correction in corrections:
        needs = {"current_log_probs"} if correction.sources - {"train/rollout"} else set()
        needs |= {"advantages"} if correction.needs_advantages else set()
        for column in sorted(needs):
            lacking = next((file for file in dump.files if not _has(file, column)), None)
            if lacking is not None:
                problem = f"correction {correction.name} needs this column, which is missing"
                remedy = "leave the correction out, or record the column"
                raise DataError(problem, file=lacking.path, column=column, remedy=remedy)


def _has(file: DumpFile, column: str) -> bool:
    return column in file.columns or column in file.partition


__all__ = ["analyze"]
