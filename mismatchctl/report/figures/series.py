"""Series of a Result as arrays with intervals, and step axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import format_label, shorten
from mismatchctl.report.figures.figure import Axis, Marks
from mismatchctl.results.model import Series

INTERVAL_Z = 1.6448536269514722
"""Half width of bands and error bars in standard errors: every interval in a figure is a 90% interval."""
StepLabel = str | int | float | bool | None


@dataclass(frozen=True)
class DenseSeries:
    """One value per group with the ends of its interval. NaN is undefined or unknown."""

    values: Float64s
    low: Float64s
    high: Float64s

    @property
    def known(self) -> bool:
        """True if any group has a value."""
        return bool(np.isfinite(self.values).any())

    def positive(self) -> DenseSeries:
        """Return the series for a log axis: values up to 0 are undefined, and bands end within a factor of 10."""
        values = np.where(self.values > 0, self.values, np.nan)
        return DenseSeries(values, np.maximum(self.low, values / 10), np.minimum(self.high, values * 10))

    def marks(self, name: str, steps: StepAxis, color: int = 0, *, band: bool = True, run: int | None = None) -> Marks:
        """Return a line over the steps with its band, if it has one."""
        banded = band and bool((self.high > self.low).any())
        low, high = (self.low.tolist(), self.high.tolist()) if banded else ((), ())
        return Marks("line", name, steps.places, self.values.tolist(), low, high, color=color, run=run)


def read_column(series: Mapping[str, Series], key: str, count: int) -> DenseSeries:
    """Return a metric over `count` groups with its 90% interval."""
    chosen = series.get(key) or Series(value=[None] * count)
    values, errors = to_floats(chosen.value), np.nan_to_num(to_floats(chosen.se or [None] * count))
    low, high = values - INTERVAL_Z * errors, values + INTERVAL_Z * errors
    for index, interval in enumerate(chosen.interval or ()):
        if interval is not None:
            low[index], high[index] = interval
    return DenseSeries(values, low, high)


def to_floats(values: Sequence[float | None]) -> Float64s:
    """Return values as an array. Missing values become NaN."""
    return np.array([math.nan if value is None else value for value in values], np.float64)


class StepAxis:
    """The step axis. Numeric steps are drawn to scale, other labels at equal distances."""

    def __init__(self, labels: Sequence[StepLabel]) -> None:
        numbers = [x for x in labels if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)]
        self.numeric = len(numbers) == len(labels) and all(a < b for a, b in pairwise(numbers))
        self.places: list[float | int] = list(numbers) if self.numeric else list(range(len(labels)))
        self.names = [shorten(format_label(value), 14) for value in labels]
        self._index = dict(zip(map(format_label, labels), self.places, strict=True))

    @property
    def axis(self) -> Axis:
        """The axis from the first to the last step."""
        ticks = () if self.numeric else tuple((float(place), name) for place, name in enumerate(self.names))
        low, high = self.places[0], self.places[-1]
        limits = (float(low), float(high)) if high > low else (low - 0.5, high + 0.5)
        return Axis("step", limits=limits, ticks=ticks, named=not self.numeric)

    def place(self, label: StepLabel) -> float | None:
        """Return the position of a step, if the axis has it."""
        found = self._index.get(format_label(label))
        return None if found is None else float(found)
