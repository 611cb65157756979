"""Memory that is lent again once nothing refers to it: the first use of new memory takes as long as to decode."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from sys import getrefcount

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def _references(arrays: Sequence[Bytes]) -> list[int]:
    """References to each; views of an array, and whatever is made of these, refer to it."""
    return [getrefcount(array) for array in arrays]


_LARGEST = 1 << 25
"""Bytes that are kept for another time, of a column of a unit or less."""
_UNUSED = _references([np.empty(0, np.uint8)])[0]  # those that counting itself makes, in this version of Python


class Memory(threading.local):
    """What this thread has made to decode into."""

    def __init__(self) -> None:
        self._made: list[Bytes] = []

    def lend(self, size: int) -> Bytes:
        """So many bytes, which hold anything."""
        if size > _LARGEST:
            return np.empty(size, np.uint8)
        free = [at for at, count in enumerate(_references(self._made)) if count == _UNUSED]
        fitting = [at for at in free if len(self._made[at]) >= size]
        if fitting:
            return self._made[min(fitting, key=lambda at: len(self._made[at]))][:size]
        self._made = [array for at, array in enumerate(self._made) if at not in free]  # the others are too small
        self._made.append(np.empty(size + size // 8, np.uint8))  # the next one may want a little more
        return self._made[-1][:size]


MEMORY = Memory()
