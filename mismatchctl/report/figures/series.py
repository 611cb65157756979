"""Series of a Result as arrays with error bands, and sentences that describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import escape_terminal, format_number
from mismatchctl.report.text import shorten
from mismatchctl.results.model import Series

BAND_STANDARD_ERRORS = 2.0
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


def read_column(series: Mapping[str, Series], key: str, count: int) -> DenseSeries:
    """A metric over `count` groups with its band: the interval where there is one, else twice the error."""
    chosen = series.get(key) or Series(value=[None] * count)
    values, errors = to_floats(chosen.value), np.nan_to_num(to_floats(chosen.se or [None] * count))
    low, high = values - BAND_STANDARD_ERRORS * errors, values + BAND_STANDARD_ERRORS * errors
    for index, interval in enumerate(chosen.interval or ()):
        if interval is not None:
            low[index], high[index] = interval
    return DenseSeries(values, low, high)


def to_floats(values: Sequence[float | None]) -> Float64s:
    """Values as an array, NaN where there is none."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


MAX_DESCRIBED_LINES = 12
"""Lines that a description goes through one by one."""


def describe_extremes(
    called: str, values: Float64s, names: Sequence[str], *, lowest: bool = False, share: bool = False
) -> str:
    """Between what a series runs and where it is largest, or lowest."""
    unit = "fraction" if share else ""
    known = np.flatnonzero(np.isfinite(values))
    low, high = known[np.argmin(values[known])], known[np.argmax(values[known])]
    if values[low] == values[high]:
        return f"{called} is {format_number(float(values[low]), unit)} throughout"
    place, other = (low, high) if lowest else (high, low)
    word, rest = ("falls to", "highest") if lowest else ("reaches", "lowest")
    return (
        f"{called} {word} {format_number(float(values[place]), unit)} at step {names[place]} "
        f"({rest} {format_number(float(values[other]), unit)} at step {names[other]})"
    )


def describe_band_misses(called: str, values: Float64s, low: Float64s, high: Float64s, names: Sequence[str]) -> str:
    """How often 0 lies outside a series' band."""
    known = np.isfinite(values)
    off = known & ((low > 0) | (high < 0))
    if not off.any():
        return f"{called}: 0 within its error at all of {int(known.sum())} steps"
    far = int(np.nanargmax(np.where(known, np.abs(values), np.nan)))
    return (
        f"{called} beyond its error at {int(off.sum())} of {int(known.sum())} steps, "
        f"farthest {format_number(float(values[far]))} at step {names[far]}"
    )


def describe_lines(axis: str, names: Sequence[str], lines: Mapping[str, Float64s], along: str = "step") -> str:
    """Each line from its first to its last value, with its ends."""
    said = [
        _describe_course(shorten(name, 40), names, values) for name, values in list(lines.items())[:MAX_DESCRIBED_LINES]
    ]
    more = f" And {len(lines) - MAX_DESCRIBED_LINES} lines more." if len(lines) > MAX_DESCRIBED_LINES else ""
    return escape_terminal(f"Lines of {axis} by {along}, {names[0]} to {names[-1]}. {' '.join(said)}{more}")


def _describe_course(name: str, names: Sequence[str], values: Float64s) -> str:
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return f"{name}: not known."
    low, high = known[np.argmin(values[known])], known[np.argmax(values[known])]
    first, last, least, most = (format_number(float(values[index])) for index in (known[0], known[-1], low, high))
    return f"{name}: {first} first, {last} last, smallest {least} at {names[low]}, largest {most} at {names[high]}."
