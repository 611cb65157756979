"""The exact extremes of a stream: its largest values, and its worst tokens and sequences with their place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s

TAIL_VALUES = 4097
"""Largest log ratios that are kept: a tail of 4,096 and the value that it is cut at."""
WORST = 50
"""Worst tokens and sequences that are kept with their place."""


def largest(values: Float64s, count: int = TAIL_VALUES) -> Float64s:
    """The `count` largest values, in no order."""
    return values if len(values) <= count else np.partition(values, len(values) - count)[-count:]


class LargestSoFar:
    """Collects the largest values of a stream of blocks, cutting back now and then.

    Attributes:
        threshold: a value below this cannot be among them.
    """

    def __init__(self) -> None:
        self._blocks: list[Float64s] = []
        self._held = 0
        self.threshold = -np.inf

    def add(self, values: Float64s) -> None:
        """Take note of a block."""
        above = values if self.threshold == -np.inf else values[values >= self.threshold]
        self._blocks.append(above.copy() if above is values else above)
        self._held += len(above)
        if self._held > 4 * TAIL_VALUES:
            kept = self.values()
            self._blocks, self._held, self.threshold = [kept], len(kept), float(kept.min())

    def values(self) -> Float64s:
        """The largest values so far."""
        return largest(np.concatenate(self._blocks)) if self._blocks else np.zeros(0)


@dataclass(frozen=True)
class Worst:
    """The `WORST` rows of largest score, with whatever describes them; ties go to the earlier place.

    Attributes:
        score: what they are ranked by [N], descending.
        place: file, row and position of each [N, 3].
        fields: what describes them, by name [N].
    """

    score: Float64s = field(default_factory=lambda: np.zeros(0))
    place: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    fields: dict[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, score: Float64s, place: NDArray[np.int64], fields: dict[str, NDArray[Any]]) -> Worst:
        """Rank rows given in any order; `place` is (file, row, position)."""
        order = np.lexsort((place[:, 2], place[:, 1], place[:, 0], -score))[:WORST]
        return cls(score[order], place[order], {name: values[order] for name, values in fields.items()})

    def __len__(self) -> int:
        return len(self.score)

    def __add__(self, other: Worst) -> Worst:
        if not len(self) or not len(other):
            return self if len(self) else other
        names = [*self.fields, *(name for name in other.fields if name not in self.fields)]
        fields = {name: np.concatenate([_field(self, name), _field(other, name)]) for name in names}
        return Worst.of(np.concatenate([self.score, other.score]), np.concatenate([self.place, other.place]), fields)

    def moved(self, by: int) -> Worst:
        """The same rows of files that lie so many places further on in the dump."""
        return Worst(self.score, self.place + np.array([by, 0, 0]), self.fields)

    @property
    def threshold(self) -> float:
        """A score below this cannot enter."""
        return float(self.score[-1]) if len(self) == WORST else 0.0


def _field(worst: Worst, name: str) -> NDArray[Any]:
    return worst.fields.get(name, np.full(len(worst), None, object))
