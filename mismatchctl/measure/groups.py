"""Groups as they come in: some may still grow, others are complete and are closed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from mismatchctl.batch import Ints
from mismatchctl.measure.hashes import Value

Cell = TypeVar("Cell")
Close = Callable[[str, list[Value], list[dict[tuple[Value, ...], Cell]]], None]
"""Takes a run, the steps of some of its complete groups, and their cells."""


def by_value(cells: Sequence[tuple[Value, ...]], by: Sequence[str]) -> Iterator[tuple[str, Value, Ints]]:
    """Each value of each column to break down by, and which of the cells have it."""
    for place, column in enumerate(by):
        chosen: dict[Value, list[int]] = {}
        for number, values in enumerate(cells):
            chosen.setdefault(values[place], []).append(number)
        for value, numbers in chosen.items():
            yield column, value, np.array(numbers)


class Groups(Generic[Cell]):
    """The cells of open groups by run and step, and those of complete ones that wait until there are enough."""

    def __init__(self, size: Callable[[Cell], int], close: Close[Cell], at_once: int) -> None:
        """`size` says how many numbers are held of a cell, `at_once` how many of complete ones."""
        self._size, self._close, self._at_once = size, close, at_once
        self._open: dict[tuple[str, Value], dict[tuple[Value, ...], Cell]] = {}
        self._complete: dict[tuple[str, Value], dict[tuple[Value, ...], Cell]] = {}
        self._held = 0

    def cells(self, run: str, step: Value) -> dict[tuple[Value, ...], Cell]:
        """The cells of a group, which may grow again."""
        key = run, step
        if key not in self._open:
            self._open[key] = self._complete.pop(key, {})
            self._held -= self._size_of(self._open[key])
        return self._open[key]

    def close(self, may_grow: Callable[[str, Value], bool]) -> None:
        """Close groups that cannot grow any more, once there are enough of them."""
        for key in [key for key in self._open if not may_grow(*key)]:
            cells = self._open.pop(key)
            size = self._size_of(cells)
            if self._held + size > self._at_once:
                self._close_complete()
            self._complete[key] = cells
            self._held += size

    def finish(self) -> None:
        """Close all groups: nothing more comes."""
        self.close(lambda run, step: False)
        self._close_complete()

    def _close_complete(self) -> None:
        of_run: dict[str, dict[Value, dict[tuple[Value, ...], Cell]]] = {}
        for (run, step), cells in self._complete.items():
            of_run.setdefault(run, {})[step] = cells
        self._complete, self._held = {}, 0
        for run, steps in of_run.items():
            self._close(run, list(steps), list(steps.values()))

    def _size_of(self, cells: dict[tuple[Value, ...], Cell]) -> int:
        return sum(map(self._size, cells.values()))
