"""The Ray engine: one task per shard on a cluster, merged in input order."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mismatchctl.data.engines.engine import MergeableT, Shard, Work, compute_shard
from mismatchctl.data.reader import Dump
from mismatchctl.errors import ConfigError, DataError, MismatchctlError, interface, messages_for
from mismatchctl.io import __version__

RETRIES = 5
"""Number of times a shard is retried if its worker or node was lost."""
_SHARDS_AHEAD = 3
"""Shards in flight per processor of the cluster, including finished shards that wait for their turn."""


_CONNECT_SECONDS = 10.0
"""Seconds to wait for the cluster."""


@dataclass(frozen=True)
class RayEngine:
    """Runs work as tasks on a Ray cluster. Every worker must find the dump under the same path."""

    address: str | None = None

    def map(self, work: Work[MergeableT], dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, MergeableT]]:
        """Yield the part of each shard, in the given order."""
        with _connect(self.address) as ray:
            task = ray.remote(num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD")(compute_on_worker)
            given, here = ray.put(work), (tool_version(), interface())
            ahead = _SHARDS_AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
            waiting: deque[tuple[Shard, Any]] = deque()
            try:
                for shard in shards:
                    waiting.append((shard, task.remote(given, dump.select(shard.units), here)))
                    if len(waiting) > ahead:
                        yield _next_result(ray, waiting)
                while waiting:
                    yield _next_result(ray, waiting)
            finally:
                for _, reference in waiting:
                    ray.cancel(reference)


@contextlib.contextmanager
def _connect(address: str | None) -> Iterator[Any]:
    """Connect to Ray unless the program is connected already.

    Ray reports lost workers on stdout, which is reserved for results, so stdout is redirected to stderr.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("--engine ray needs Ray: pip install 'mismatchctl[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    with contextlib.redirect_stdout(sys.stderr):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster started by this process
        try:
            _check_address(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises a plain Exception if a node dies while it starts
            where = "" if address is None else f" at {address}"
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            remedy = "start one, or name its --address"
            raise ConfigError(f"no Ray cluster found{where} ({reason}): {remedy}") from None
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raise an OSError if no process listens at host:port. Ray itself would retry for many minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()


def compute_on_worker(work: Work[MergeableT], dump: Dump, caller: tuple[str, str]) -> MergeableT | MismatchctlError:
    """Compute a shard on a worker. Errors are returned, so that the caller raises them in input order."""
    node, (version, reader) = os.uname().nodename, caller
    if tool_version() != version:
        return DataError(
            f"the Ray worker on {node} runs another version of mismatchctl, or of numpy or pyarrow",
            remedy="install the same on every node, or send it along as docs/guides/scaling.md shows",
        )
    unseen = (file for file in dump.files if file.location and "://" not in file.location)
    if (file := next((file for file in unseen if not os.path.exists(file.location)), None)) is not None:
        return DataError(
            f"the Ray worker on {node} does not see this file",
            file=file.path,
            remedy="put the dump on storage that all nodes share under one path, or on an object store",
        )
    try:
        with messages_for(reader):
            return compute_shard(work, dump, Shard(dump.merged_units))
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
        problem = f"no Ray worker finished it ({type(error).__name__}, tried {RETRIES + 1} times)"
        remedy = "see the logs of the cluster: workers that are killed often lack memory"
        raise DataError(problem, file=shard.file.path, remedy=remedy) from None
    if isinstance(part, MismatchctlError):
        raise part
    return shard, part


@cache
def tool_version() -> str:
    """Return the version of the code, numpy and pyarrow."""
    root = Path(__file__).parents[2]
    sources = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sources.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{__version__} {sources.hexdigest()} numpy {np.__version__} pyarrow {pa.__version__}"
