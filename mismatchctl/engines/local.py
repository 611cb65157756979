"""The local engine: units of work in threads, results in the order of the input."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Unit = TypeVar("Unit")
Done = TypeVar("Done")


def default_threads() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(work: Callable[[Unit], Done], units: Iterable[Unit], threads: int) -> Iterator[tuple[Unit, Done]]:
    """Do `work` on units in `threads` threads; yield (unit, result) in the order of the units.

    At most `threads + 1` results wait for their turn, so memory does not grow with the dump. The first
    exception in the order of the input is raised; later units are cancelled.
    """
    if threads <= 1:
        for unit in units:
            yield unit, work(unit)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[Unit, Future[Done]]] = deque()
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
