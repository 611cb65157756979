"""Threads of the BLAS that numpy brings: products here are small, and those who share them mostly wait."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache

_MODULES = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")
_NAMES = tuple(
    f"{prefix}openblas_{{}}_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "_64", "")
)
_lock = threading.Lock()
_before: list[int] = []
"""How many threads there were when each of those who hold them to one began."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Hold an OpenBLAS to one thread, as the command does by its environment; another BLAS stays as it is."""
    found = _openblas()
    if found is None:
        yield
        return
    get, put = found
    with _lock:
        _before.append(_before[0] if _before else get())
        put(1)
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                put(before)


@cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """What tells and sets how many threads numpy's OpenBLAS has."""
    module = next((sys.modules[name] for name in _MODULES if name in sys.modules), None)
    path = getattr(module, "__file__", None)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    for name in _NAMES:
        if hasattr(library, name.format("set")):
            return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None
