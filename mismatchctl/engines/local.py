"""The local engine: units of work in threads, as many as memory allows, results in the order of the input."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from mismatchctl.dumps import Dump, Unit
from mismatchctl.dumps.wide import BATCH_TOKENS
from mismatchctl.engines.work import MergeableT, Shard, Work
from mismatchctl.errors import ConfigError

PROCESS_BYTES = 450_000_000
"""What the process takes beside the units in flight: the interpreter, its libraries, the sums of open groups."""
BYTES_PER_TOKEN = 90
"""What a token of a unit in flight takes on its way from the file to its sums, measured at its peak."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|k|m|g|t)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size as 2GB, 1.5g or 800 MB (powers of 1000).

    Raises:
        ConfigError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--memory-limit {text}: write a size such as 2GB or 800MB")
    return int(float(found[1]) * 1000 ** ["", "k", "m", "g", "t"].index(found[2].lower()))


def unit_bytes(unit: Unit) -> int:
    """What a unit takes while it is read, about: a large one is decoded in pieces."""
    return min(unit.tokens, BATCH_TOKENS * 3 // 2) * BYTES_PER_TOKEN


def fitting(units: Iterable[Unit], memory: int) -> Iterator[Unit]:
    """The units; small files that cannot be read together within `memory` bytes are read one by one."""
    for unit in units:
        if unit.along and PROCESS_BYTES + unit_bytes(unit) > memory:
            yield from unit.along
        else:
            yield unit


def fewer_threads(threads: int, memory: int, dump: Dump) -> int:
    """At most `threads`, as many as keep the process within `memory` bytes, about.

    Raises:
        ConfigError: one is too many.
    """
    largest = max(fitting(dump.readings, memory), key=unit_bytes, default=None)
    if largest is None:  # nothing to read
        return threads
    each = unit_bytes(largest)
    possible = (memory - PROCESS_BYTES) // max(each, 1)
    if possible < 1:
        group = f"row group {largest.row_group} of {largest.file.path}, {largest.tokens:,} tokens"
        least = -(-(PROCESS_BYTES + each) // 1_000_000)
        raise ConfigError(
            f"--memory-limit {-(-memory // 1_000_000):,}MB is too little for {group}; allow {least:,}MB, or "
            "write smaller row groups"
        )
    return min(threads, possible)


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
