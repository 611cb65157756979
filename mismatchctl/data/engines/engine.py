"""The engine interface, work and shards, and the local engine, which runs units in threads."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Protocol, TypeVar

from mismatchctl.data.files import DumpFile, ReadUnit
from mismatchctl.data.layouts import BATCH_TOKENS
from mismatchctl.data.reader import Dump
from mismatchctl.data.units import unit_files
from mismatchctl.errors import ConfigError

SHARD_TOKENS = 1 << 24
"""Tokens of a shard, about; a larger file is several shards, so that what is open of a file stays bounded."""


class MergeablePart(Protocol):
    """What comes of a unit. `+` merges, in the order of the input."""

    def __add__(self, other: Any, /) -> Any:
        """Both."""

    def moved(self, by: int) -> Any:
        """The same of files that lie so many places further on in the dump."""


MergeableT = TypeVar("MergeableT", bound=MergeablePart)
PartT = TypeVar("PartT", bound=MergeablePart, covariant=True)


class Work(Protocol[PartT]):
    """What is done on each unit: a dataclass that says all that its parts depend on, and can be pickled."""

    @property
    def makes(self) -> Any:
        """The type of its parts."""

    def __call__(self, dump: Dump, unit: ReadUnit, /) -> PartT:
        """The part of one unit."""

    def asked(self, file: DumpFile, /) -> Iterator[Any]:
        """This work as far as it depends on one file, and then other works whose parts serve as well."""


@dataclass(frozen=True)
class Shard:
    """Units of one file that follow each other, or small files that are read together."""

    units: tuple[ReadUnit, ...]

    @property
    def file(self) -> DumpFile:
        """The file, or the first of them."""
        return self.units[0].file

    @property
    def files(self) -> tuple[DumpFile, ...]:
        """All of them."""
        return unit_files(self.units)

    @property
    def paths(self) -> tuple[str, ...]:
        """Where they lie, as shown to users."""
        return tuple(file.path for file in self.files)

    @property
    def tokens(self) -> int:
        """Roughly how many tokens it holds."""
        return sum(unit.tokens for unit in self.units)


class Engine(Protocol):
    """Where shards are made."""

    def map(self, work: Work[MergeableT], dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, MergeableT]]:
        """The part of each shard, in the order given.

        Raises:
            MismatchctlError: what the work raises on the first unit, in that order, on which it raises.
        """


def list_shards(dump: Dump) -> Iterator[Shard]:
    """All units of a dump as shards; where they are cut depends on each file alone."""
    units: list[ReadUnit] = []
    tokens = 0
    for unit in dump.readings:
        if units and (unit.file is not units[0].file or tokens + unit.tokens > SHARD_TOKENS):
            yield Shard(tuple(units))
            units, tokens = [], 0
        units.append(unit)
        tokens += unit.tokens
    if units:
        yield Shard(tuple(units))


def compute_shard(work: Work[MergeableT], dump: Dump, shard: Shard) -> MergeableT:
    """The part of a shard, one unit after the other."""
    parts: Iterator[MergeableT] = (work(dump, unit) for unit in shard.units)
    return reduce(add, parts)


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


def estimate_unit_bytes(unit: ReadUnit) -> int:
    """What a unit takes while it is read, about: a large one is decoded in pieces."""
    return min(unit.tokens, BATCH_TOKENS * 3 // 2) * BYTES_PER_TOKEN


def split_large_units(units: Iterable[ReadUnit], memory: int) -> Iterator[ReadUnit]:
    """The units; small files that cannot be read together within `memory` bytes are read one by one."""
    for unit in units:
        if unit.along and PROCESS_BYTES + estimate_unit_bytes(unit) > memory:
            yield from unit.along
        else:
            yield unit


def limit_threads(threads: int, memory: int, dump: Dump) -> int:
    """At most `threads`, as many as keep the process within `memory` bytes, about.

    Raises:
        ConfigError: one is too many.
    """
    largest = max(split_large_units(dump.readings, memory), key=estimate_unit_bytes, default=None)
    if largest is None:  # nothing to read
        return threads
    each = estimate_unit_bytes(largest)
    possible = (memory - PROCESS_BYTES) // max(each, 1)
    if possible < 1:
        group = f"row group {largest.row_group} of {largest.file.path}, {largest.tokens:,} tokens"
        least = -(-(PROCESS_BYTES + each) // 1_000_000)
        raise ConfigError(
            f"--memory-limit {-(-memory // 1_000_000):,}MB is too little for {group}; allow {least:,}MB, or "
            "write smaller row groups"
        )
    return min(threads, possible)


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def default_threads() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LocalEngine:
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
            threads = limit_threads(threads, self.memory, dump)
        units = ((shard, unit, unit is own[-1]) for shard in shards for own in [self._units(shard)] for unit in own)
        merged: MergeableT | None = None
        for (shard, _, last), part in ordered_map(lambda item: work(dump, item[1]), units, threads):
            merged = part if merged is None else merged + part
            if last:
                yield shard, merged
                merged = None

    def _units(self, shard: Shard) -> Sequence[ReadUnit]:
        """What is read at once of a shard."""
        return shard.units if self.memory is None else tuple(split_large_units(shard.units, self.memory))


def ordered_map(
    work: Callable[[ItemT], ResultT], units: Iterable[ItemT], threads: int
) -> Iterator[tuple[ItemT, ResultT]]:
    """Do `work` on units in `threads` threads; yield (unit, result) in the order of the units.

    At most `threads + 1` results wait for their turn, so memory does not grow with the dump. The first
    exception in the order of the input is raised; later units are cancelled.
    """
    if threads <= 1:
        for unit in units:
            yield unit, work(unit)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[ItemT, Future[ResultT]]] = deque()
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
