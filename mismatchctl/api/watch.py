"""Follow the dumps of a running job and report new data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mismatchctl.api.gate.gate import Baseline, judge, load_result
from mismatchctl.api.gate.rules import Rule
from mismatchctl.api.gate.verdict import Verdict
from mismatchctl.corrections.model import Correction
from mismatchctl.data.engines import IncrementalEngine, LocalEngine
from mismatchctl.data.paths import discover_files, skip_locations
from mismatchctl.errors import DataError
from mismatchctl.io.stores import find_store
from mismatchctl.results.model import Result
from mismatchctl.results.summary import get_summary, skipped_data_notes

DEFAULT_INTERVAL = 10.0
"""Seconds between two checks for new data."""
_MAX_FAILED_LOOKS = 2
"""`watch` ends if more checks in a row fail than this. One can fail because a file is replaced while it is read."""
_MAGIC_BYTES = {b"PAR1": b"PAR1", b"ARRO": b"ROW1"}
"""First and last four bytes of a complete Parquet file and of a complete Arrow file."""

StepKey = tuple[str, int]
"""A step of a run: (name of the run, index of the step in the run's `groups.labels`)."""


@dataclass(frozen=True)
class Snapshot:
    """Result of one check for new data."""

    result: Result
    steps: tuple[StepKey, ...]  # steps that are new or have more data
    again: frozenset[StepKey]  # entries of `steps` that an earlier Snapshot already contained
    answered: tuple[str, ...]  # runs for which an answer of the summary changed
    verdict: Verdict | None
    waiting: tuple[str, ...]  # files that are not completely written yet
    left_out: tuple[str, ...] = ()  # notes about skipped data that no earlier Snapshot contained


@dataclass
class DumpWatcher:
    """Watches the dumps of a running job."""

    paths: Sequence[str]
    corrections: Sequence[Correction] = ()
    rules: Sequence[Rule] = ()
    against: Baseline = field(default_factory=Baseline)
    rename: Mapping[str, str] = field(default_factory=dict)
    every: float = DEFAULT_INTERVAL
    until_idle: float | None = None
    threads: int | None = None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    unfinished: tuple[str, ...] = field(default=(), init=False)
    _files: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)  # (size, time) at the last check
    # contents of earlier Snapshots: metrics of each (run, step), answers of each run, notes about skipped data
    _steps: dict[tuple[str, object], tuple[object, ...]] = field(default_factory=dict, init=False)
    _answers: dict[str, object] = field(default_factory=dict, init=False)
    _left_out: set[str] = field(default_factory=set, init=False)

    def snapshots(self) -> Iterator[Snapshot | None]:
        """Yield a Snapshot after each check that found new data. If no file is complete yet, yield `None` once."""
        engine = IncrementalEngine(LocalEngine(self.threads))
        before, failures = None, list[DataError]()
        since, reported_empty = self.clock(), False
        while True:
            whole, waiting = self._find_complete_files()
            self.unfinished = tuple(waiting)
            if whole and whole != before:
                try:
                    with skip_locations(waiting):
                        result = load_result(
                            self.paths, self.rules, self.corrections, rename=self.rename, engine=engine, on_bad="skip"
                        )
                    look = self._compare(result)
                except DataError as error:
                    failures.append(error)
                    if len(failures) > _MAX_FAILED_LOOKS:
                        raise
                else:
                    before, since = whole, self.clock()
                    failures.clear()
                    if look.steps or look.left_out:
                        yield look
            elif not whole and not reported_empty:
                reported_empty = True
                yield None
            if self.until_idle is not None and self.clock() - since >= self.until_idle:
                if failures:
                    raise failures[-1]
                return
            self.sleep(self.every)

    def _compare(self, result: Result) -> Snapshot:
        """Return a Snapshot with the steps that are new or changed, and the runs whose answers changed."""
        steps, again, answered = [], set(), []
        for name, run in result.runs.items():
            for index, label in enumerate(run.groups.labels):
                values = tuple(series.value[index] for series in run.groups.metrics.values())
                if self._steps.get((name, label)) != values:
                    steps.append((name, index))
                    if (name, label) in self._steps:
                        again.add((name, index))
                self._steps[name, label] = values
            answers = [(answer.question, answer.key, answer.level) for answer in get_summary(run).answers]
            if self._answers.get(name) != answers:
                answered.append(name)
            self._answers[name] = answers
        verdict = judge(result, self.rules, self.against) if self.rules and steps else None
        left_out = tuple(note for note in skipped_data_notes(result.provenance.left_out) if note not in self._left_out)
        self._left_out.update(left_out)
        return Snapshot(result, tuple(steps), frozenset(again), tuple(answered), verdict, self.unfinished, left_out)

    def _find_complete_files(self) -> tuple[dict[str, tuple[int, int]], list[str]]:
        """Return complete and unfinished files. A file without a footer is complete once it stops changing."""
        try:
            found, _ = discover_files(self.paths)
        except DataError:
            return {}, []
        whole, waiting, seen = {}, [], {}
        for one in found:
            if find_store(one.location).remote:  # in an object store, all files are complete
                whole[one.location] = (0, 0)
                continue
            with suppress(OSError):
                status = os.stat(one.location)
                seen[one.location] = status.st_size, status.st_mtime_ns
                if _is_complete(one.location, seen[one.location] == self._files.get(one.location)):
                    whole[one.location] = seen[one.location]
                else:
                    waiting.append(one.location)
        self._files = seen
        return whole, waiting


def _is_complete(place: str, unchanged: bool) -> bool:
    with open(place, "rb") as file:
        first = file.read(4)
        if first not in _MAGIC_BYTES:
            return unchanged and bool(first)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4))
        return size > 8 and file.read() == _MAGIC_BYTES[first]
