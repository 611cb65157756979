"""The verb `watch`: look at dumps again and again while a run writes them, and say what is new."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from mismatchctl.correction import Correction
from mismatchctl.dumps.paths import discover, passing_over
from mismatchctl.engines import Local
from mismatchctl.engines.cache import Cached
from mismatchctl.errors import DataError
from mismatchctl.files import scratch
from mismatchctl.gate import Rule, Verdict, judge, open_result
from mismatchctl.gate.judge import AcceptedResults
from mismatchctl.result import Result
from mismatchctl.result.notes import left_out_notes
from mismatchctl.result.story import story_of
from mismatchctl.stores import store_of

EVERY = 10.0
"""Seconds between two looks."""
_SPARED = 2
"""So many looks in a row may fail, since a file may go, or be replaced, while it is read."""
_MAGIC = {b"PAR1": b"PAR1", b"ARRO": b"ROW1"}
"""First and last four bytes of files that end in an index: whole files have both."""

Key = tuple[str, int]
"""(run, place of the step)."""


@dataclass(frozen=True)
class Snapshot:
    """What one look found.

    Attributes:
        result: of all whole files.
        steps: that are new or have more data than before.
        again: those of them that were there before.
        answered: runs whose answer changed.
        verdict: by the rules; None without any.
        waiting: files that are still being written.
        left_out: bad rows and files that are new, a sentence each.
    """

    result: Result
    steps: tuple[Key, ...]
    again: frozenset[Key]
    answered: tuple[str, ...]
    verdict: Verdict | None
    waiting: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@dataclass
class Watch:
    """Dumps under watch.

    Attributes:
        paths: as of `analyze`; they need not be there yet.
        rules: as of `gate`; none: nothing is judged.
        every: seconds between looks.
        until_idle: seconds without anything new after which it ends; None: never.
        cache: where the parts of files are kept; None: in a temporary folder.
        sleep: how to wait.
        clock: seconds, rising.
        unfinished: files that the last look found still being written.
    """

    paths: Sequence[str]
    corrections: Sequence[Correction] = ()
    rules: Sequence[Rule] = ()
    against: AcceptedResults = field(default_factory=AcceptedResults)
    rename: Mapping[str, str] = field(default_factory=dict)
    every: float = EVERY
    until_idle: float | None = None
    cache: Path | None = None
    threads: int | None = None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    unfinished: tuple[str, ...] = field(default=(), init=False)

    def looks(self) -> Iterator[Snapshot | None]:
        """Each look that found something new; None when there is nothing to read yet, once."""
        with nullcontext(self.cache) if self.cache is not None else scratch() as folder:
            yield from self._looks(Cached(Local(self.threads), folder))

    def _looks(self, engine: Cached) -> Iterator[Snapshot | None]:
        files, memory, before = _Files(), _Memory(), None
        failures: list[DataError] = []
        since, told = self.clock(), False
        while True:
            whole, waiting = files.look(self.paths)
            self.unfinished = tuple(waiting)
            if whole and whole != before:
                try:
                    look = memory.look(self._result(engine, waiting), waiting, self)
                except DataError as error:
                    failures.append(error)
                    if len(failures) > _SPARED:
                        raise
                else:
                    before, since = whole, self.clock()
                    failures.clear()
                    if look.steps or look.left_out:
                        yield look
            elif not whole and not told:
                told = True
                yield None
            if self.until_idle is not None and self.clock() - since >= self.until_idle:
                if failures:
                    raise failures[-1]
                return
            self.sleep(self.every)

    def _result(self, engine: Cached, waiting: Sequence[str]) -> Result:
        with passing_over(waiting):
            return open_result(
                self.paths, self.rules, self.corrections, rename=self.rename, engine=engine, on_bad="skip"
            )


class _Memory:
    """What was said before, so that only what is new is said again."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, object], tuple[object, ...]] = {}
        self._answers: dict[str, object] = {}
        self._left_out: set[str] = set()

    def look(self, result: Result, waiting: Sequence[str], watch: Watch) -> Snapshot:
        steps, again, answered = [], set(), []
        for name, run in result.runs.items():
            for index, label in enumerate(run.groups.labels):
                held = tuple(series.value[index] for series in run.groups.metrics.values())
                if self._steps.get((name, label)) != held:
                    steps.append((name, index))
                    if (name, label) in self._steps:
                        again.add((name, index))
                self._steps[name, label] = held
            said = [(answer.question, answer.key, answer.level) for answer in story_of(run).answers]
            if self._answers.get(name) != said:
                answered.append(name)
            self._answers[name] = said
        verdict = judge(result, watch.rules, watch.against) if watch.rules and steps else None
        left_out = tuple(note for note in left_out_notes(result.provenance.left_out) if note not in self._left_out)
        self._left_out.update(left_out)
        return Snapshot(result, tuple(steps), frozenset(again), tuple(answered), verdict, tuple(waiting), left_out)


class _Files:
    """Which files are whole: those whose index stands at their end; others once they have not changed between looks."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self, paths: Sequence[str]) -> tuple[dict[str, tuple[int, int]], list[str]]:
        """Whole files with their status, and those that are still being written; neither where nothing is there yet."""
        try:
            found, _ = discover(paths)
        except DataError:
            return {}, []
        whole, waiting, seen = {}, [], {}
        for one in found:
            if store_of(one.location).remote:  # objects appear whole
                whole[one.location] = (0, 0)
                continue
            try:
                status = os.stat(one.location)
                seen[one.location] = status.st_size, status.st_mtime_ns
                ready = _is_ended(one.location, seen[one.location] == self._seen.get(one.location))
            except OSError:
                continue
            if ready:
                whole[one.location] = seen[one.location]
            else:
                waiting.append(one.location)
        self._seen = seen
        return whole, waiting


def _is_ended(place: str, unchanged: bool) -> bool:
    with open(place, "rb") as file:
        first = file.read(4)
        if first not in _MAGIC:
            return unchanged and bool(first)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4))
        return size > 8 and file.read() == _MAGIC[first]
