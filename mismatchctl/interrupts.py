"""SIGINT, SIGTERM and SIGHUP: all of them stop the process in the same way, and none is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_received: list[int] = []
_is_over = False
_last_words: list[Callable[[], None]] = []


def install() -> None:
    """Turn the signals into KeyboardInterrupt, where nobody chose to ignore them (nohup); the second ends at once."""
    for number in _SIGNALS:
        if signal.getsignal(number) not in (signal.SIG_IGN, _stop):
            signal.signal(number, _stop)
    sys.unraisablehook = _unraisable  # a callback cannot raise: `check` does so later


def _stop(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if len(_received) > 1 or _is_over:
        for say in _last_words:
            say()
        os._exit(128 + number)
    raise KeyboardInterrupt


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def over() -> None:
    """From here on a signal ends the process at once: nothing is left that would hear of it."""
    global _is_over
    _is_over = True
    exec("")  # where the last text executed was interrupted, `python -m` ends by SIGINT, whatever exit code is given


def exit_code() -> int | None:
    """How a process ends that was told to: 128 and the number of the signal; None if it was not."""
    return 128 + _received[0] if _received else None


def check() -> None:
    """Stop if a signal came, though a library's callback has dropped it.

    Raises:
        KeyboardInterrupt: it did.
    """
    if _received:
        raise KeyboardInterrupt


def at_once(tidy: Callable[[], None]) -> None:
    """Call this before an end that waits for nothing."""
    _last_words.append(tidy)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let signals wait for the end of a few steps that belong together."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
