"""Limit the threads of the BLAS library that numpy loads."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache

_NUMPY_MODULES = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")
_FUNCTION_NAMES = tuple(
    f"{prefix}openblas_{{}}_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "_64", "")
)
_lock = threading.Lock()
_previous_threads: list[int] = []
"""How many threads there were when each of those who hold them to one began."""


@contextlib.contextmanager
def limit_to_one_thread() -> Iterator[None]:
    """Hold an OpenBLAS to one thread, as the command does by its environment; another BLAS stays as it is."""
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
    """What tells and sets how many threads numpy's OpenBLAS has."""
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
