"""Series of a Result as arrays with error bands, and their descriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import escape_terminal, format_number, shorten
from mismatchctl.results.model import Series

BAND_STANDARD_ERRORS = 2.0
"""Half width of bands and error bars in standard errors, about 95 %."""


@dataclass(frozen=True)
class DenseSeries:
    """One value per group with its band. NaN is undefined or unknown."""

    values: Float64s
    low: Float64s
    high: Float64s

    def minus(self, reference: float) -> DenseSeries:
        """Subtract a reference value."""
        return DenseSeries(self.values - reference, self.low - reference, self.high - reference)

    @property
    def known(self) -> bool:
        """True if any group has a value."""
        return bool(np.isfinite(self.values).any())

    @property
    def has_band(self) -> bool:
        """True if any value has an error."""
        return bool((self.high > self.low).any())


def read_column(series: Mapping[str, Series], key: str, count: int) -> DenseSeries:
    """Return a metric over `count` groups. The band is the interval, or 2 standard errors without one."""
    chosen = series.get(key) or Series(value=[None] * count)
    values, errors = to_floats(chosen.value), np.nan_to_num(to_floats(chosen.se or [None] * count))
    low, high = values - BAND_STANDARD_ERRORS * errors, values + BAND_STANDARD_ERRORS * errors
    for index, interval in enumerate(chosen.interval or ()):
        if interval is not None:
            low[index], high[index] = interval
    return DenseSeries(values, low, high)


def to_floats(values: Sequence[float | None]) -> Float64s:
    """Return values as an array. Missing values become NaN."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


MAX_DESCRIBED_LINES = 12
"""Maximum lines that an alternative text describes."""


def describe_extremes(
    label: str, values: Float64s, names: Sequence[str], *, lowest: bool = False, share: bool = False
) -> str:
    """Describe the largest and the smallest value. `lowest` puts the smallest first."""
    unit = "fraction" if share else ""
    known = np.flatnonzero(np.isfinite(values))
    low, high = known[np.argmin(values[known])], known[np.argmax(values[known])]
    if values[low] == values[high]:
        return f"{label} is {format_number(float(values[low]), unit)} throughout"
    place, other = (low, high) if lowest else (high, low)
    word, rest = ("falls to", "highest") if lowest else ("reaches", "lowest")
    return (
        f"{label} {word} {format_number(float(values[place]), unit)} at step {names[place]} "
        f"({rest} {format_number(float(values[other]), unit)} at step {names[other]})"
    )


def describe_band_misses(label: str, values: Float64s, low: Float64s, high: Float64s, names: Sequence[str]) -> str:
    """Describe at how many steps the band excludes 0."""
    known = np.isfinite(values)
    off = known & ((low > 0) | (high < 0))
    if not off.any():
        return f"{label}: 0 within its error at all of {int(known.sum())} steps"
    far = int(np.nanargmax(np.where(known, np.abs(values), np.nan)))
    return (
        f"{label} beyond its error at {int(off.sum())} of {int(known.sum())} steps, "
        f"farthest {format_number(float(values[far]))} at step {names[far]}"
    )


def describe_lines(axis: str, names: Sequence[str], lines: Mapping[str, Float64s], along: str = "step") -> str:
    """Describe each line by its first, last, smallest and largest value."""
    courses = [
        _describe_course(shorten(name, 40), names, values) for name, values in list(lines.items())[:MAX_DESCRIBED_LINES]
    ]
    more = f" And {len(lines) - MAX_DESCRIBED_LINES} lines more." if len(lines) > MAX_DESCRIBED_LINES else ""
    return escape_terminal(f"Lines of {axis} by {along}, {names[0]} to {names[-1]}. {' '.join(courses)}{more}")


def _describe_course(name: str, names: Sequence[str], values: Float64s) -> str:
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return f"{name}: not known."
    low, high = known[np.argmin(values[known])], known[np.argmax(values[known])]
    first, last, least, most = (format_number(float(values[index])) for index in (known[0], known[-1], low, high))
    return f"{name}: {first} first, {last} last, smallest {least} at {names[low]}, largest {most} at {names[high]}."
