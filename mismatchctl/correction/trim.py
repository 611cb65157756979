"""The trim of a batch: its largest values are dropped until the mean of the rest is inside a bound (M2PO)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s
from mismatchctl.correction.model import Gate


@dataclass(frozen=True)
class Trim:
    """The values of a batch as its trim sees them, in parts: what lies inside the bound stays, whatever else comes.

    Attributes:
        gate: over: batch.
        count, total: number and sum of the values inside.
        beyond: the others.
    """

    gate: Gate
    count: int = 0
    total: float = 0.0
    beyond: tuple[Float64s, ...] = ()

    def with_values(self, values: NDArray[Any]) -> Trim:
        """The same with more of the batch; NaN is larger than anything."""
        known = np.where(np.isnan(values), np.inf, values.astype(np.float64))
        inside = self._inside(known)
        count, total = self.count + int(inside.sum()), self.total + float(known[inside].sum())
        return replace(self, count=count, total=total, beyond=(*self.beyond, known[~inside]))

    def _inside(self, values: Float64s) -> NDArray[np.bool_]:
        high = self.gate.bounds[1]
        return values <= high if self.gate.inclusive[1] else values < high

    def ends(self) -> tuple[float, int, bool]:
        """The smallest value that is dropped (infinity: none is), how many of it are, and whether less of it stays."""
        ascending = np.sort(np.concatenate([np.zeros(0), *self.beyond]))
        means = (self.total + np.cumsum(ascending)) / (self.count + np.arange(1, len(ascending) + 1))
        stays = max(int(self._inside(means).sum()), int(self.count == 0))  # one token always stays
        if stays >= len(ascending):
            return math.inf, 0, True
        least = float(ascending[stays])
        return least, int((ascending[stays:] == least).sum()), self.count > 0 or bool(ascending[0] < least)

    def threshold(self) -> float:
        """From which value on a token is dropped, where equal ones go together; all of the smallest stay."""
        least, _, less_stays = self.ends()
        return least if less_stays else math.nextafter(least, math.inf)
