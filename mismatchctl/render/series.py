"""Reading series of a Result: one value per group, whatever the compact form says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.result import Groups, Series, Value

_ABSENT = Series(value=None)
SURE = 2.0
"""Bands and bars reach this many standard errors: about 95 %."""


@dataclass(frozen=True)
class Column:
    """A series spread out over its groups: NaN where undefined or unknown."""

    values: Float64s
    low: Float64s
    high: Float64s

    def about(self, centre: float) -> Column:
        """The same, less `centre`."""
        return Column(self.values - centre, self.low - centre, self.high - centre)

    @property
    def known(self) -> bool:
        """Whether any group has a value."""
        return bool(np.isfinite(self.values).any())


def value_at(series: Series | None, index: int) -> Value:
    """The value of one group."""
    series = series or Series(value=None)
    interval = None if series.interval is None else series.interval[index]
    value, se = _at(series.value, index), _at(series.se, index)
    status = series.status.get(index, "ok" if value is not None else "not recorded")
    return Value(value=value, se=se, interval=interval, status=status)


def column(series: Mapping[str, Series], key: str, count: int) -> Column:
    """A metric over `count` groups with its band: the interval where there is one, else twice the error."""
    chosen = series.get(key, _ABSENT)
    values, errors = _spread(chosen.value, count), np.nan_to_num(_spread(chosen.se, count))
    low, high = values - SURE * errors, values + SURE * errors
    for index, interval in enumerate(chosen.interval or ()):
        if interval is not None:
            low[index], high[index] = interval
    return Column(values, low, high)


def lists(groups: Groups, key: str) -> tuple[list[float | None], list[float | None]]:
    """Values and standard errors of a metric, group by group."""
    found = [value_at(groups.metrics.get(key), index) for index in range(len(groups.labels))]
    return [value.value for value in found], [value.se for value in found]


def _at(values: list[float | None] | float | None, index: int) -> float | None:
    return values[index] if isinstance(values, list) else values


def _spread(values: list[float | None] | float | None, count: int) -> Float64s:
    row = values if isinstance(values, list) else [values] * count
    return np.array([np.nan if value is None else value for value in row], np.float64)
