"""Where K3 stands, and whether a metric changed over the steps: words that hold up against the errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s
from mismatchctl.measure.metrics.ranges import DENSE_RANGE, MOE_RANGE
from mismatchctl.render.numbers import number
from mismatchctl.render.text import label

Z_LIMIT = 4.0
"""A change, or a mean ratio off 1, counts from this many standard errors on."""
_SHORT, _SHORT_Z_LIMIT = 6, 5.0
"""Over fewer steps the scatter between steps is hardly known: a change must stand out more."""
SMALLEST_CHANGE = 1.2
"""A smaller factor is called steady, however significant."""
_BLOCKS = 48
_MEDIAN_OF_CHI2 = 0.4549

Label = str | int | float | bool | None


@dataclass(frozen=True)
class Trend:
    """A change of `factor` (with its 95 % interval) between two steps; factor None: no change beyond the errors."""

    words: str
    factor: float | None = None
    interval: tuple[float, float] | None = None
    between: tuple[Label, Label] | None = None

    @property
    def brief(self) -> str:
        """The same in a table cell."""
        if self.factor is None or self.between is None:
            return self.words.split(" over ")[0]
        arrow, size = ("▲", self.factor) if self.factor > 1 else ("▼", 1 / self.factor)
        return f"{arrow} {number(size)}-fold, step {label(self.between[0])} to {label(self.between[1])}"

    @property
    def direction(self) -> str:
        """`up`, `down` or `flat`."""
        return "flat" if self.factor is None else "up" if self.factor > 1 else "down"


def standing(k3: float | None, se: float | None = None) -> str:
    """Where a K3 lies against the ranges that models usually show."""
    if k3 is None:
        return "undefined"
    if k3 == 0:
        return "exactly 0: the log-probs agree to the bit"
    low, middle, high = DENSE_RANGE[0], DENSE_RANGE[1], MOE_RANGE[1]
    if k3 < low:
        words = "below what dense models usually show"
    elif k3 < middle:
        words = "within what dense models usually show"
    elif k3 < high:
        words = "above what dense models usually show, within the range of mixtures of experts"
    else:
        words = "above what even mixtures of experts usually show"
    unsure = se is not None and any(abs(k3 - edge) < 2 * se for edge in (low, middle, high))
    return f"{words}; its error reaches across the border" if unsure else words


def trend(labels: Sequence[Label], values: Sequence[float | None], errors: Sequence[float | None]) -> Trend:
    """Find the one ramp that describes a positive series best, and say it if it stands out from the errors.

    Works on logarithms. Each step weighs by its standard error and by the scatter from step to step that the
    errors do not explain.
    """
    known = [i for i, value in enumerate(values) if value is not None]
    positive = [i for i in known if (values[i] or 0.0) > 0]
    if len(known) < 2:
        return Trend("one step only" if known else "undefined at every step")
    if not positive:
        return Trend(f"0 at all {len(known)} steps")
    if len(positive) < len(known):
        return Trend(
            f"0 at {len(known) - len(positive)} of {len(known)} steps, up to {number(_largest(values))} at others"
        )
    value = np.array([values[i] for i in known], np.float64)
    relative = np.array([(errors[i] or 0.0) / (values[i] or 1.0) for i in known])
    blocks = _blocks(len(known))
    height = np.array([np.log(value[part]).mean() for part in blocks])
    error = np.array([math.sqrt(float((relative[part] ** 2).sum())) / len(part) for part in blocks])
    names = [(labels[known[int(part[0])]], labels[known[int(part[-1])]]) for part in blocks]
    return _describe(names, _best_ramp(height, error), value, _uneven(height, error))


def _largest(values: Sequence[float | None]) -> float:
    return max(value for value in values if value is not None)


def _blocks(count: int) -> list[NDArray[np.int64]]:
    """Long series in blocks of adjacent steps, so that the search stays short."""
    return [part.astype(np.int64) for part in np.array_split(np.arange(count), min(count, _BLOCKS))]


@dataclass(frozen=True)
class _Ramp:
    start: int
    end: int
    change: float
    error: float


def _best_ramp(height: Float64s, error: Float64s) -> _Ramp:
    """Level, straight line, level: least weighted squares over all pairs of corners."""
    variance = error**2 + _extra_variance(height, error)
    variance = np.maximum(variance, 1e-12)
    weight, where = 1 / variance, np.arange(len(height), dtype=np.float64)
    best, lowest = _Ramp(0, len(height) - 1, 0.0, math.inf), math.inf
    for start in range(len(height) - 1):
        ends = np.arange(start + 1, len(height))
        rise = np.clip((where[None, :] - start) / (ends - start)[:, None], 0, 1)
        mean_rise = (rise * weight).sum(axis=1, keepdims=True) / weight.sum()
        mean_height = (height * weight).sum() / weight.sum()
        spread = ((rise - mean_rise) ** 2 * weight).sum(axis=1)
        change = ((rise - mean_rise) * (height - mean_height) * weight).sum(axis=1) / spread
        left = height - mean_height - change[:, None] * (rise - mean_rise)
        squares = (left**2 * weight).sum(axis=1)
        found = int(np.argmin(squares))
        if squares[found] < lowest:
            lowest = float(squares[found])
            freedom = max(len(height) - 4, 1)
            scale = max(1.0, lowest / freedom)
            best = _Ramp(start, int(ends[found]), float(change[found]), math.sqrt(scale / float(spread[found])))
    return best


def _extra_variance(height: Float64s, error: Float64s) -> float:
    """Scatter between neighbouring steps beyond their errors, by the median so that a jump does not count."""
    steps = np.diff(height)
    if len(height) < _SHORT:
        return 0.0
    expected = float(np.median(error[1:] ** 2 + error[:-1] ** 2))
    return max(0.0, float(np.median(steps**2)) / _MEDIAN_OF_CHI2 - expected) / 2


def _uneven(height: Float64s, error: Float64s) -> bool:
    """Whether the values differ by more than their errors explain, whatever the pattern."""
    variance = np.maximum(error**2, 1e-12)
    mean = (height / variance).sum() / (1 / variance).sum()
    freedom = len(height) - 1
    return float(((height - mean) ** 2 / variance).sum()) > freedom + Z_LIMIT * math.sqrt(2 * freedom)


def _describe(names: Sequence[tuple[Label, Label]], ramp: _Ramp, values: Float64s, uneven: bool) -> Trend:
    factor = math.exp(ramp.change)
    limit = Z_LIMIT if len(values) >= _SHORT else _SHORT_Z_LIMIT
    if abs(ramp.change) < limit * ramp.error or max(factor, 1 / factor) < SMALLEST_CHANGE:
        spread = f"between {number(values.min())} and {number(values.max())}"
        if uneven:
            return Trend(f"goes up and down over {len(values)} steps by more than its errors, {spread}")
        return Trend(f"no change over {len(values)} steps beyond the errors ({spread})")
    interval = math.exp(ramp.change - 2 * ramp.error), math.exp(ramp.change + 2 * ramp.error)
    first, last = names[ramp.start][0], names[ramp.end][1]
    verb, shown, bounds = "grew", factor, interval
    if factor < 1:
        verb, shown, bounds = "fell", 1 / factor, (1 / interval[1], 1 / interval[0])
    size = f"{number(shown)}-fold ({number(bounds[0])} to {number(bounds[1])})"
    return Trend(f"{verb} {size} between step {label(first)} and {label(last)}", factor, interval, (first, last))
