"""Groups as they come in: some may still grow, others are complete and are closed together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

import numpy as np

from mismatchctl.batch import Ints
from mismatchctl.measure.hashes import Value
from mismatchctl.measure.reduce import BreakdownValues, require_few

Cell = TypeVar("Cell")
Cells = dict[tuple[Value, ...], Cell]
"""The parts of a group, by one value per `--by` column."""


def by_value(cells: Sequence[tuple[Value, ...]], by: Sequence[str]) -> Iterator[tuple[str, Value, Ints]]:
    """Each value of each column to break down by, and which of the cells have it."""
    for place, column in enumerate(by):
        chosen: dict[Value, list[int]] = {}
        for number, values in enumerate(cells):
            chosen.setdefault(values[place], []).append(number)
        for value, numbers in chosen.items():
            yield column, value, np.array(numbers)


class GroupMerger(ABC, Generic[Cell]):
    """Adds up the cells of groups in the order of the input; memory is that of open groups, and of some complete ones.

    A subclass says what a cell is.

    Attributes:
        at_once: sums that are closed at once, about: their formulas are evaluated together.
    """

    at_once: ClassVar[int] = 1 << 22

    def __init__(self, by: Sequence[str]) -> None:
        """Nothing yet, to be broken down by some columns."""
        self._by, self._breakdown = by, BreakdownValues(by)
        self._open: dict[tuple[str, Value], Cells[Cell]] = {}
        self._complete: dict[tuple[str, Value], Cells[Cell]] = {}
        self._held = 0

    @abstractmethod
    def _size(self, cell: Cell) -> int:
        """How many numbers a cell holds, about."""

    @abstractmethod
    def _both(self, cell: Cell, more: Cell) -> Cell:
        """Two parts of a cell as one."""

    @abstractmethod
    def _close_groups(self, run: str, steps: list[Value], groups: Sequence[Cells[Cell]]) -> None:
        """Take a run, the steps of some of its complete groups, and their cells, ordered by their values as text."""

    def merge(self, run: str, step: Value, values: tuple[Value, ...], cell: Cell) -> None:
        """Add to a cell of a group, which grows again if it was complete.

        Raises:
            ConfigError: the columns to break down by have too many values.
        """
        key = run, step
        if key not in self._open:
            self._open[key] = self._complete.pop(key, {})
            self._held -= self._size_of(self._open[key])
        cells = self._open[key]
        cells[values] = self._both(cells[values], cell) if values in cells else cell
        require_few(self._by, len(cells))
        self._breakdown.add(run, values)

    def close(self, may_grow: Callable[[str, Value], bool]) -> None:
        """Close groups that cannot grow any more, once there are enough of them."""
        for key in [key for key in self._open if not may_grow(*key)]:
            cells = self._open.pop(key)
            size = self._size_of(cells)
            if self._held + size > self.at_once:
                self._close_complete()
            self._complete[key] = cells
            self._held += size

    def finish(self) -> None:
        """Close all groups: nothing more comes."""
        self.close(lambda run, step: False)
        self._close_complete()

    def _close_complete(self) -> None:
        of_run: dict[str, dict[Value, Cells[Cell]]] = {}
        for (run, step), cells in self._complete.items():
            of_run.setdefault(run, {})[step] = {values: cells[values] for values in sorted(cells, key=str)}
        self._complete, self._held = {}, 0
        for run, steps in of_run.items():
            self._close_groups(run, list(steps), list(steps.values()))

    def _size_of(self, cells: Cells[Cell]) -> int:
        return sum(map(self._size, cells.values()))
