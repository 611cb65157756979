"""Engine interface, work and shards, and the local engine, which runs units in threads."""

from __future__ import annotations

import os
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from mismatchctl.data.catalog import unit_files
from mismatchctl.data.files import DumpFile, ReadUnit
from mismatchctl.data.layouts import BATCH_TOKENS
from mismatchctl.data.reader import Dump
from mismatchctl.errors import ConfigError
from mismatchctl.io.process import container_bytes, system_bytes

SHARD_TOKENS = 1 << 24
"""Approximate tokens per shard. Large files become several shards, so that few groups are open at a time."""


class MergeablePart(Protocol):
    """Result of a unit. `+` merges parts in input order."""

    def __add__(self, other: Any, /) -> Any:
        """Merge two parts."""

    def moved(self, by: int) -> Any:
        """Return the part with file indices increased by `by`."""


MergeableT = TypeVar("MergeableT", bound=MergeablePart)
PartT = TypeVar("PartT", bound=MergeablePart, covariant=True)


class Work(Protocol[PartT]):
    """Work on a unit: a picklable dataclass whose fields determine the result."""

    def __call__(self, dump: Dump, unit: ReadUnit, /) -> PartT:
        """Compute the part of one unit."""

    def asked(self, file: DumpFile, /) -> Iterator[Any]:
        """Yield the work restricted to one file, then other works whose parts can be used instead."""


@dataclass(frozen=True)
class Shard:
    """Consecutive units of one file, or small files that are read together."""

    units: tuple[ReadUnit, ...]

    @property
    def file(self) -> DumpFile:
        """The first file."""
        return self.units[0].file

    @property
    def files(self) -> tuple[DumpFile, ...]:
        """All files."""
        return unit_files(self.units)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the files as shown to users."""
        return tuple(file.path for file in self.files)

    @property
    def tokens(self) -> int:
        """Approximate number of tokens."""
        return sum(unit.tokens for unit in self.units)


class Engine(Protocol):
    """Runs work on shards."""

    def map(self, work: Work[MergeableT], dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, MergeableT]]:
        """Yield the part of each shard, in the given order."""


def list_shards(dump: Dump) -> Iterator[Shard]:
    """Group the units of a dump into shards. The cuts only depend on each file."""
    units: list[ReadUnit] = []
    tokens = 0
    for unit in dump.merged_units:
        if units and (unit.file is not units[0].file or tokens + unit.tokens > SHARD_TOKENS):
            yield Shard(tuple(units))
            units, tokens = [], 0
        units.append(unit)
        tokens += unit.tokens
    if units:
        yield Shard(tuple(units))


def compute_shard(work: Work[MergeableT], dump: Dump, shard: Shard) -> MergeableT:
    """Compute the part of a shard, one unit after the other."""
    parts: Iterator[MergeableT] = (work(dump, unit) for unit in shard.units)
    return reduce(add, parts)


PROCESS_BYTES = 450_000_000
"""Memory of the process without units: the interpreter, libraries, and sums of open groups."""
BYTES_PER_TOKEN = 90
"""Peak memory per token of a unit that is being read."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|k|m|g|t)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size such as 2GB, 1.5g or 800 MB to bytes (powers of 1000)."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--memory-limit {text}: write a size such as 2GB or 800MB")
    return int(float(found[1]) * 1000 ** ["", "k", "m", "g", "t"].index(found[2].lower()))


def estimate_unit_bytes(unit: ReadUnit) -> int:
    """Estimate the memory for reading a unit. Large units are decoded in pieces."""
    return min(unit.tokens, BATCH_TOKENS * 3 // 2) * BYTES_PER_TOKEN


def default_memory() -> int:
    """Return half of the memory of the machine or the container, but at least enough for one thread."""
    sizes = [size for size in (system_bytes("SC_PHYS_PAGES"), container_bytes()) if size]
    least = PROCESS_BYTES + BATCH_TOKENS * 3 // 2 * BYTES_PER_TOKEN
    return max(min(sizes) // 2, least) if sizes else 1 << 62


def split_large_units(units: Iterable[ReadUnit], memory: int) -> Iterator[ReadUnit]:
    """Yield the units. Small files are read one by one if `memory` bytes are not enough for all of them."""
    for unit in units:
        if unit.members and PROCESS_BYTES + estimate_unit_bytes(unit) > memory:
            yield from unit.members
        else:
            yield unit


def limit_threads(threads: int, memory: int, dump: Dump) -> int:
    """Return the number of threads, at most `threads`, that stays within about `memory` bytes."""
    largest = max(split_large_units(dump.merged_units, memory), key=estimate_unit_bytes, default=None)
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
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LocalEngine:
    """Runs work in threads of this process.

    Attributes:
        threads: number of units read at the same time, by default one per processor.
        memory: memory limit in bytes, by default half of the machine. It may reduce the number of threads.
    """

    threads: int | None = None
    memory: int | None = None

    def map(self, work: Work[MergeableT], dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, MergeableT]]:
        """Yield the part of each shard. Units of several shards are read at the same time."""
        threads = self.threads or default_threads()
        threads = limit_threads(threads, default_memory() if self.memory is None else self.memory, dump)
        units = ((shard, unit, unit is own[-1]) for shard in shards for own in [self._units(shard)] for unit in own)
        merged: MergeableT | None = None
        for (shard, _, last), part in ordered_map(lambda item: work(dump, item[1]), units, threads):
            merged = part if merged is None else merged + part
            if last:
                yield shard, merged
                merged = None

    def _units(self, shard: Shard) -> Sequence[ReadUnit]:
        """Return the units of a shard, split if the memory limit requires it."""
        return shard.units if self.memory is None else tuple(split_large_units(shard.units, self.memory))


def ordered_map(
    work: Callable[[ItemT], ResultT], units: Iterable[ItemT], threads: int
) -> Iterator[tuple[ItemT, ResultT]]:
    """Apply `work` to units in `threads` threads and yield (unit, result) in input order.

    At most `threads + 1` results are pending, so memory does not grow with the dump. The first exception in
    input order is raised, and later units are cancelled.
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


@dataclass
class IncrementalEngine:
    """Engine for repeated passes over a growing dump: it keeps the parts of unchanged files in memory."""

    engine: Engine
    _parts: dict[bytes, pa.Buffer] = field(default_factory=dict)

    def map(self, work: Work[MergeableT], dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, MergeableT]]:
        """Yield the part of each shard, in the given order."""
        shards = list(shards)
        keys = [_part_keys(work, dump, shard) for shard in shards]
        known = [next((key for key in found if key in self._parts), None) for found in keys]
        made = self.engine.map(work, dump, [shard for shard, key in zip(shards, known, strict=True) if key is None])
        kept: dict[bytes, pa.Buffer] = {}
        for shard, found, key in zip(shards, keys, known, strict=True):
            if key is None:
                _, part = next(made)
                kept[found[0]] = _pack(part.moved(-shard.file.index))
            else:
                kept[key] = self._parts[key]
                part = _unpack(kept[key]).moved(shard.file.index)
            yield shard, part
        self._parts = kept


def _part_keys(work: Work[Any], dump: Dump, shard: Shard) -> list[bytes]:
    """Return keys of equal parts of a shard. New parts are kept under the first."""
    files = [
        (file.index - shard.file.index, file.path, file.location, file.stored, file.version) for file in shard.files
    ]
    rows = shard.units[0].start, shard.units[-1].start + shard.units[-1].rows
    about = files, rows, dump.cache_key(shard.file)
    return [pickle.dumps((about, equivalent)) for equivalent in work.asked(shard.file)]


def _pack(part: Any) -> pa.Buffer:
    """Compress a part. Merging may change parts in place, so each pass gets its own copy."""
    content = pickle.dumps(part, protocol=pickle.HIGHEST_PROTOCOL)
    return pa.py_buffer(len(content).to_bytes(8, "little") + pa.compress(content, "zstd", asbytes=True))


def _unpack(packed: pa.Buffer) -> Any:
    size = int.from_bytes(packed[:8].to_pybytes(), "little")
    return pickle.loads(pa.decompress(packed[8:], size, "zstd", asbytes=True))
