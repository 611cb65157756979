"""The local engine: units of work in threads, results in the order of the input."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from mismatchctl.dumps import Dump, Unit
from mismatchctl.engines.memory import fewer_threads, fitting
from mismatchctl.engines.work import MergeableT, Shard, Work

Item = TypeVar("Item")
Done = TypeVar("Done")


def default_threads() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Local:
    """Threads of this process.

    Attributes:
        threads: units read at once; None: all processors.
        memory: bytes that the process may take; fewer threads are used where units are large. None: any number.
    """

    threads: int | None = None
    memory: int | None = None

    def map(self, work: Work[MergeableT], dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, MergeableT]]:
        """The part of each shard; units of several shards are read at once.

        Raises:
            ConfigError: a single unit takes more memory than there may be.
        """
        threads = self.threads or default_threads()
        if self.memory is not None:
            threads = fewer_threads(threads, self.memory, dump)
        units = ((shard, unit, unit is own[-1]) for shard in shards for own in [self._units(shard)] for unit in own)
        merged: MergeableT | None = None
        for (shard, _, last), part in ordered_map(lambda item: work(dump, item[1]), units, threads):
            merged = part if merged is None else merged + part
            if last:
                yield shard, merged
                merged = None

    def _units(self, shard: Shard) -> Sequence[Unit]:
        """What is read at once of a shard."""
        return shard.units if self.memory is None else tuple(fitting(shard.units, self.memory))


def ordered_map(work: Callable[[Item], Done], units: Iterable[Item], threads: int) -> Iterator[tuple[Item, Done]]:
    """Do `work` on units in `threads` threads; yield (unit, result) in the order of the units.

    At most `threads + 1` results wait for their turn, so memory does not grow with the dump. The first
    exception in the order of the input is raised; later units are cancelled.
    """
    if threads <= 1:
        for unit in units:
            yield unit, work(unit)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[Item, Future[Done]]] = deque()
        try:
            for unit in units:
                waiting.append((unit, pool.submit(work, unit)))
                if len(waiting) > threads + 1:
                    first, done = waiting.popleft()
                    yield first, done.result()
            while waiting:
                first, done = waiting.popleft()
                yield first, done.result()
        finally:
            for _, future in waiting:
                future.cancel()
