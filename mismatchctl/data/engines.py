"""Engines that process the parts of a dump: threads of this process, or a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import add
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from mismatchctl.core.formatting import format_bytes
from mismatchctl.data.blocks import BATCH_TOKENS
from mismatchctl.data.catalog import ReadUnit
from mismatchctl.data.formats import MemoryTable
from mismatchctl.data.reader import Dump
from mismatchctl.errors import ConfigError, DataError, MismatchctlError, interface, messages_for
from mismatchctl.io import __version__
from mismatchctl.io.process import container_bytes, ordered_map, system_bytes

SHARD_TOKENS = 1 << 24
"""Large files are divided into shards of about this number of tokens, so that few steps are in memory at a time."""
TOKENS_PER_SEQUENCE = 16  # the sums of one sequence take about the memory of this number of tokens

Work = Callable[[Dump, ReadUnit], Any]
"""A picklable function that processes one part of a dump. The results are merged in the order of the parts."""
Shard = tuple[ReadUnit, ...]  # adjacent parts of one file, which are processed together


class Engine(Protocol):
    """Runs a computation on the shards of a dump."""

    def map(self, work: Work, dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Any]]:
        """Yield the result of each shard in the given order."""


def list_shards(dump: Dump) -> Iterator[Shard]:
    """Group the parts of each file into shards. A shard never contains parts of two files."""
    for _, own in groupby(dump.units, key=lambda unit: unit.file.index):
        units: list[ReadUnit] = []
        total = 0
        for unit in own:
            total += (size := max(unit.tokens, unit.sequences * TOKENS_PER_SEQUENCE))
            if units and total > SHARD_TOKENS:
                yield tuple(units)
                units, total = [], size
            units.append(unit)
        yield tuple(units)


PROCESS_BYTES = 450_000_000
"""Memory that is needed in addition to the parts being read: interpreter, libraries, and sums of unfinished steps."""
BYTES_PER_TOKEN = 90  # peak memory per token while a part of the dump is read, in bytes
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|k|m|g|t)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--memory-limit {text}: write a size such as 2GB or 800MB")
    return int(float(found[1]) * 1000 ** ["", "k", "m", "g", "t"].index(found[2].lower()))


def estimate_unit_bytes(unit: ReadUnit) -> int:
    """Estimate the memory for reading a part. Large parts are decoded in pieces, so the estimate has an upper limit."""
    return min(unit.tokens, BATCH_TOKENS * 3 // 2) * BYTES_PER_TOKEN


def _limit_threads(threads: int, memory: int, dump: Dump) -> int:
    largest = max(dump.units, key=estimate_unit_bytes, default=None)
    if largest is None:  # the dump has no parts
        return threads
    each = estimate_unit_bytes(largest)
    possible = (memory - PROCESS_BYTES) // max(each, 1)
    if possible < 1:
        part = f"{largest.file.contents.group_name} {largest.row_group}"
        smaller = f", or {largest.file.contents.split_remedy}" if memory > PROCESS_BYTES else ""
        least = -(-(PROCESS_BYTES + each) // 1_000_000)
        raise ConfigError(
            f"--memory-limit {format_bytes(memory)} is too little to read {part} of {largest.file.path} "
            f"({largest.tokens:,} tokens); raise the limit to {least:,}MB{smaller}"
        )
    return min(threads, possible)


def default_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class LocalEngine:
    """Runs work in threads of this process."""

    threads: int | None = None  # parts read at the same time, by default one per processor
    memory: int | None = None  # limit in bytes, by default half of the memory. It can reduce `threads`

    def map(self, work: Work, dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Any]]:
        memory = self.memory
        if memory is None:
            sizes = [size for size in (system_bytes("SC_PHYS_PAGES"), container_bytes()) if size]
            memory = max(min(sizes, default=1 << 63) // 2, PROCESS_BYTES + BATCH_TOKENS * 3 // 2 * BYTES_PER_TOKEN)
        threads = _limit_threads(self.threads or default_threads(), memory, dump)
        units = ((shard, unit, unit is shard[-1]) for shard in shards for unit in shard)
        merged: Any = None
        for (shard, _, last), part in ordered_map(lambda item: work(dump, item[1]), units, threads):
            merged = part if merged is None else merged + part
            if last:
                yield shard, merged
                merged = None


@dataclass
class IncrementalEngine:
    """Processes a growing dump repeatedly. Results are kept in memory, so that only new and changed parts are read."""

    engine: Engine
    _parts: dict[bytes, bytes] = field(default_factory=dict)

    def map(self, work: Work, dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Any]]:
        keys = []
        for shard in shards:
            file, rows = shard[0].file, (shard[0].start, shard[-1].start + shard[-1].rows)
            version = file.location, file.size, file.version
            keys.append((shard, pickle.dumps((version, rows, dump.settings(file), work))))
        made = self.engine.map(work, dump, [shard for shard, key in keys if key not in self._parts])
        kept: dict[bytes, bytes] = {}
        for shard, key in keys:
            kept[key] = self._parts[key] if key in self._parts else pickle.dumps(next(made)[1])
            yield shard, pickle.loads(kept[key])  # a copy, since merging may change it
        self._parts = kept


def count_threads(engine: Engine) -> int | None:
    """Return the number of threads of this process that the engine uses, or None if it uses other processes."""
    local = engine.engine if isinstance(engine, IncrementalEngine) else engine
    return (local.threads or default_threads()) if isinstance(local, LocalEngine) else None


RETRIES = 5  # number of times a shard is retried if its worker or node was lost
_SHARDS_AHEAD = 3  # maximum number of shards per processor that are submitted but not merged yet

_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class RayEngine:
    """Runs work as tasks on a Ray cluster. The dump must have the same path on every worker."""

    address: str | None = None

    def map(self, work: Work, dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, Any]]:
        with _connect(self.address) as ray:
            task = ray.remote(num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD")(compute_on_worker)
            given, here = ray.put(work), (tool_version(), interface())
            ahead = _SHARDS_AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
            waiting: deque[tuple[Shard, Any]] = deque()
            try:
                for shard in shards:
                    waiting.append((shard, task.remote(given, dump.select(shard), here)))
                    if len(waiting) > ahead:
                        yield _next_result(ray, waiting)
                while waiting:
                    yield _next_result(ray, waiting)
            finally:
                for _, reference in waiting:
                    ray.cancel(reference)


@contextlib.contextmanager
def _connect(address: str | None) -> Iterator[Any]:
    """Connect to Ray unless this process is already connected. Redirect Ray's messages from stdout to stderr."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--engine ray needs Ray: pip install 'mismatchctl[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    with contextlib.redirect_stdout(sys.stderr):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no statistics from a cluster that this process starts
        try:
            host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
            if colon and port.isdecimal():  # if no process listens at the address, Ray retries for many minutes
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises a plain Exception if a node dies while it starts
            where = "" if address is None else f" at {address}"
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            remedy = "start a cluster, or pass its address with --address"
            raise ConfigError(f"no Ray cluster found{where} ({reason}); {remedy}") from None
        try:
            yield ray
        finally:
            ray.shutdown()


def compute_on_worker(work: Work, dump: Dump, caller: tuple[str, str]) -> Any:
    node, (version, reader) = os.uname().nodename, caller
    if tool_version() != version:
        return DataError(
            f"the Ray worker on {node} runs another version of mismatchctl, or of numpy or pyarrow",
            remedy="install the same versions on every node, or send the packages with the job "
            "(docs/guides/scaling.md)",
        )
    stored = (file for file in dump.files if not isinstance(file.contents, MemoryTable) and "://" not in file.location)
    if (file := next((file for file in stored if not os.path.exists(file.location)), None)) is not None:
        return DataError(
            f"the Ray worker on {node} cannot find this file",
            file=file.path,
            remedy="put the dump in an object store, or in a folder that has the same path on every node",
        )
    try:
        with messages_for(reader):
            return reduce(add, (work(dump, unit) for unit in dump.units))
    except MismatchctlError as error:
        return error


def _next_result(ray: Any, waiting: deque[tuple[Shard, Any]]) -> tuple[Shard, Any]:
    shard, reference = waiting.popleft()
    try:
        part = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if "No module named" in str(error):
            remedy = "install it on every node, or send it along as docs/guides/scaling.md shows"
            raise DataError("mismatchctl is not installed on a Ray worker", remedy=remedy) from None
        raise
    except ray.exceptions.RayError as error:
        problem = f"no Ray worker could read this file ({type(error).__name__}, tried {RETRIES + 1} times)"
        remedy = "see the logs of the cluster. Ray often kills workers that need too much memory"
        raise DataError(problem, file=shard[0].file.path, remedy=remedy) from None
    if isinstance(part, MismatchctlError):
        raise part
    return shard, part


def tool_version() -> str:
    return f"{__version__} numpy {np.__version__} pyarrow {pa.__version__}"
