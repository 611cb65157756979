"""Series of a Result as arrays that are drawn, with their bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.result import Series

SURE = 2.0
"""Bands and bars reach this many standard errors: about 95 %."""


@dataclass(frozen=True)
class DenseSeries:
    """A series spread out over its groups: NaN where undefined or unknown."""

    values: Float64s
    low: Float64s
    high: Float64s

    def about(self, centre: float) -> DenseSeries:
        """The same, less `centre`."""
        return DenseSeries(self.values - centre, self.low - centre, self.high - centre)

    @property
    def known(self) -> bool:
        """Whether any group has a value."""
        return bool(np.isfinite(self.values).any())

    @property
    def has_band(self) -> bool:
        """Whether some value is uncertain by more than nothing."""
        return bool((self.high > self.low).any())


def column(series: Mapping[str, Series], key: str, count: int) -> DenseSeries:
    """A metric over `count` groups with its band: the interval where there is one, else twice the error."""
    chosen = series.get(key) or Series(value=[None] * count)
    values, errors = floats(chosen.value), np.nan_to_num(floats(chosen.se or [None] * count))
    low, high = values - SURE * errors, values + SURE * errors
    for index, interval in enumerate(chosen.interval or ()):
        if interval is not None:
            low[index], high[index] = interval
    return DenseSeries(values, low, high)


def floats(values: Sequence[float | None]) -> Float64s:
    """Values as an array, NaN where there is none."""
    return np.array([np.nan if value is None else value for value in values], np.float64)
