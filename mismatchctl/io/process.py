"""Signal handlers, threads, and memory of this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import FrameType
from typing import TypeVar

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_received_signals: list[int] = []
_ends_at_once = False
_cleanups: list[Callable[[], None]] = []


def install_handlers() -> None:
    """Raise KeyboardInterrupt on a SIGINT, SIGTERM or SIGHUP that is not ignored. A second signal ends the process."""
    for number in _SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, _handle_signal):
            signal.signal(number, _handle_signal)
    sys.unraisablehook = _handle_unraisable  # does not print KeyboardInterrupt. `raise_if_received` raises it again


def _handle_signal(number: int, frame: FrameType | None) -> None:
    _received_signals.append(number)
    if len(_received_signals) > 1 or _ends_at_once:
        for say in _cleanups:
            say()
        os._exit(128 + number)
    raise KeyboardInterrupt


def _handle_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def end_on_signal() -> None:
    global _ends_at_once
    _ends_at_once = True
    exec("")  # without this, `python -m` ends with SIGINT instead of our exit code if code was interrupted


def signal_exit_code() -> int | None:
    return 128 + _received_signals[0] if _received_signals else None


def raise_if_received() -> None:
    """Raise KeyboardInterrupt if a signal was received. A library may have suppressed the first KeyboardInterrupt."""
    if _received_signals:
        raise KeyboardInterrupt


def register_cleanup(tidy: Callable[[], None]) -> None:
    _cleanups.append(tidy)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def ordered_map(
    work: Callable[[ItemT], ResultT], items: Iterable[ItemT], threads: int
) -> Iterator[tuple[ItemT, ResultT]]:
    """Apply `work` in threads and yield (item, result) in input order. Start at most `threads + 1` items ahead."""
    if threads <= 1:
        yield from ((item, work(item)) for item in items)
        return
    from concurrent.futures import Future, ThreadPoolExecutor  # importing it takes longer than reading a small file

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[ItemT, Future[ResultT]]] = deque()
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) > threads + 1:
                    first, done = waiting.popleft()
                    yield first, done.result()
            while waiting:
                first, done = waiting.popleft()
                yield first, done.result()
        finally:
            for _, future in waiting:
                future.cancel()


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def system_bytes(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def container_bytes() -> int | None:
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            limit = int(file.read())
            return limit if limit < (system_bytes("SC_PHYS_PAGES") or 1 << 62) else None
    return None


_NUMPY_MODULES = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")
_FUNCTION_NAMES = tuple(
    f"{prefix}openblas_{{}}_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "_64", "")
)
_lock = threading.Lock()
_previous_threads: list[int] = []  # number of threads to restore after each active call of `limit_to_one_thread`


@contextlib.contextmanager
def limit_to_one_thread() -> Iterator[None]:
    """Limit numpy's OpenBLAS to one thread in this block. Do not limit any other BLAS library."""
    found = _find_openblas()
    if found is None:
        yield
        return
    get, put = found
    with _lock:
        _previous_threads.append(_previous_threads[0] if _previous_threads else get())
        put(1)
    try:
        yield
    finally:
        with _lock:
            before = _previous_threads.pop()
            if not _previous_threads:
                put(before)


@cache
def _find_openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    module = next((sys.modules[name] for name in _NUMPY_MODULES if name in sys.modules), None)
    path = getattr(module, "__file__", None)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    for name in _FUNCTION_NAMES:
        if hasattr(library, name.format("set")):
            return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None


def release_memory() -> None:
    import pyarrow as pa

    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc
        library.malloc_trim(0)
    pa.default_memory_pool().release_unused()
