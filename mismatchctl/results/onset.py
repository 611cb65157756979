"""Onset of a change: the step, its interval and the shape of the change, at the resolution of single steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
ChangeShape = Literal["jump", "ramp"]

SHORT_SERIES = 6
"""With fewer steps the scatter between neighbouring steps is not estimated."""
_MEDIAN_OF_CHI2 = 0.4549
_INTERVAL_RISE = 7.35
"""Increase of the weighted squares at the ends of a 95 % interval of a change point (Hansen 2000)."""
_POWERS = (0.0, 0.5, 1.0)
"""Ramps are straight in the logarithm, in the square root (the size of the noise) or in the metric itself."""
_MIN_VARIANCE, _MAX_RANGE = 1e-8, 100.0
_DURATION_RATIO, _MOST_STARTS, _MOST_ENDS = 1.15, 4096, 30
_WINDOW = 5
"""Steps on each side of a step for its running median."""
_OVERSHOOT = 0.5
"""Share of the change from which a bad step right before it belongs to it."""
_BAD_Z, _BAD_FACTOR, _BAD_SHARE = 6.0, 1.5, 0.1
"""A bad step is this many errors and this factor away from its neighbours. More than this share is no exception."""


@dataclass(frozen=True)
class OnsetFit:
    """The best level, change, level of a logarithmic series.

    Attributes:
        onset, end: indices of the first step away from the level before, and of the last step of the change.
        earliest, latest: ends of the 95 % interval of the onset.
        shape: jump (from one step to the next) or ramp.
        corners: positions of the start and the end of the change.
        power: the ramp is straight in this power of the metric, 0: in its logarithm.
        before: level before the change.
        change, error: difference between the levels and its standard error.
    """

    onset: int
    end: int
    earliest: int
    latest: int
    shape: ChangeShape
    corners: tuple[float, float]
    power: float
    before: float
    change: float
    error: float

    def at(self, where: Floats) -> Floats:
        """Return the fitted values at positions."""
        return self.before + self.change * _completed_part(where, *self.corners, self.power, self.change)


def extra_variance(height: Floats, error: Floats) -> float:
    """Return the variance between neighbouring steps in excess of their errors. The median ignores jumps."""
    steps = np.diff(height)
    if len(height) < SHORT_SERIES:
        return 0.0
    expected = float(np.median(error[1:] ** 2 + error[:-1] ** 2))
    return max(0.0, float(np.median(steps**2)) / _MEDIAN_OF_CHI2 - expected) / 2


def find_bad_steps(height: Floats, error: Floats) -> Bools:
    """Flag the few steps that are far off a running median and return to it. Steps at an end are never flagged."""
    return _flag_outliers(height - running_median(height), np.sqrt(extra_variance(height, error)))


def _flag_outliers(residual: Floats, scatter: float) -> Bools:
    """Flag short runs of steps with a large residual, or none if they are many."""
    count = len(residual)
    apart, none = np.abs(residual), np.zeros(count, np.bool_)
    if count < 2 * _WINDOW + 2:
        return none
    scatter = max(scatter, 1.4826 * float(np.median(apart)))
    bad = apart > max(_BAD_Z * scatter, math.log(_BAD_FACTOR))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], bad, [False]])))
    for first, end in edges.reshape(-1, 2):
        if first == 0 or end == count or end - first > _WINDOW:
            bad[first:end] = False
    return bad if bad.sum() <= max(1, _BAD_SHARE * count) else none


def running_median(height: Floats) -> Floats:
    """Return the median of each value and its neighbours, fewer of them at the ends."""
    padded = np.pad(height, _WINDOW, constant_values=np.nan)
    return np.asarray(np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * _WINDOW + 1), axis=1))


def fit_onset(where: Floats, height: Floats, error: Floats, bad: Bools) -> tuple[OnsetFit, Bools]:
    """Fit a jump and ramps that start and end at any of at least two steps [S] by weighted least squares.

    Bad steps are left out. They are flagged again by their distance from the first fit, which also knows the levels
    next to a change. Indices refer to all steps.
    """
    fit = _fit_good_steps(where, height, error, ~bad)
    again = _flag_outliers(height - fit.at(where), 0.0)
    if not np.array_equal(again, bad):
        bad, fit = again, _fit_good_steps(where, height, error, ~again)
    return _include_overshoot(fit, height, bad)


def _include_overshoot(fit: OnsetFit, height: Floats, bad: Bools) -> tuple[OnsetFit, Bools]:
    """Move the onset to the first of the bad steps before it that go the same way: the change overshot."""
    first, bad = fit.onset, bad.copy()
    while first > 0 and bad[first - 1] and (height[first - 1] - fit.before) / fit.change > _OVERSHOOT:
        first -= 1
        bad[first] = False
    end = first if fit.shape == "jump" else fit.end
    return replace(fit, onset=first, earliest=min(fit.earliest, first), end=end), bad


def _fit_good_steps(all_where: Floats, all_height: Floats, all_error: Floats, good: Bools) -> OnsetFit:
    where, height, error = all_where[good], all_height[good], all_error[good]
    count, places = len(height), np.flatnonzero(good)
    weight = 1 / np.maximum(error**2 + extra_variance(height, error), _MIN_VARIANCE)
    coarse = _list_candidates(count)
    best_ramp = int(np.argmin(_fit_all(where, height, weight, *coarse).min(axis=0)))
    nearby = _list_neighbours(int(coarse[0, best_ramp]), int(coarse[1, best_ramp]), count)
    start, end = np.unique(np.hstack([coarse, nearby]), axis=1)
    squares = _fit_all(where, height, weight, start, end)
    jump = end == start + 1
    best = np.unravel_index(int(np.argmin(squares)), squares.shape)
    scale = max(1.0, float(squares[best]) / max(count - 4, 1))
    power, chosen = _POWERS[best[0]], int(best[1])
    best_jump = int(np.flatnonzero(jump)[np.argmin(squares[:, jump].min(axis=0))])
    is_jump = bool(squares[:, best_jump].min() - squares[best] <= 2 * scale * math.log(count))
    if is_jump:
        power, chosen = 0.0, best_jump
    near = (squares <= squares[best] + _INTERVAL_RISE * scale).any(axis=0)
    near[chosen] = True
    first, last = int(start[chosen]), int(end[chosen])
    before, change, spread = _fit_levels(where, height, weight, first, last, power)
    # a ramp is still at the old level at its start, a jump may have come with any bad step right before it
    earliest = int((places[start] + jump)[near].min())
    latest, onset, until = (int(places[place]) for place in (int(start[near].max()) + 1, first + 1, last))
    corners = (float(all_where[onset - 1] if is_jump else where[first]), float(where[last]))
    shape: ChangeShape = "jump" if is_jump else "ramp"
    error_of_change = math.sqrt(scale / spread)
    return OnsetFit(onset, until, earliest, latest, shape, corners, power, before, change, error_of_change)


def _list_candidates(count: int) -> NDArray[np.int64]:
    """Return start and end of jumps and ramps [2, K], with durations in a geometric series up to the last step.

    In very long series, ramps of several steps only start at some of the steps.
    """
    powers = np.arange(0, math.log(count) / math.log(_DURATION_RATIO) + 1)
    durations = np.unique(np.rint(_DURATION_RATIO**powers).astype(np.int64))
    every = np.arange(count - 1)
    some = every[:: _stride(count)]
    start = np.repeat(some, len(durations))
    ramps = np.stack([start, np.minimum(start + np.tile(durations, len(some)), count - 1)])
    return np.unique(np.hstack([ramps, np.stack([every, every + 1])]), axis=1)


def _stride(count: int) -> int:
    return count // _MOST_STARTS + 1


def _list_neighbours(start: int, end: int, count: int) -> NDArray[np.int64]:
    """Return start and end of the ramps [2, K] between two candidates of the geometric series."""
    reach = math.ceil((end - start) * (_DURATION_RATIO - 1)) + _stride(count)
    starts = np.arange(max(start - reach, 0), min(start + reach + 1, count - 1))
    ends = np.arange(max(end - reach, 1), min(end + reach + 1, count), reach // _MOST_ENDS + 1)
    found = np.stack([np.repeat(starts, len(ends)), np.tile(ends, len(starts))])
    return np.asarray(found[:, found[0] < found[1]])


def _fit_all(where: Floats, height: Floats, weight: Floats, start: NDArray[np.int64], end: NDArray[np.int64]) -> Floats:
    """Return the weighted squares of every ramp in each scale [P, K]."""
    return np.array([_fit_squares(where, height, weight, start, end, power) for power in _POWERS])


def _fit_squares(
    where: Floats, height: Floats, weight: Floats, start: NDArray[np.int64], end: NDArray[np.int64], power: float
) -> Floats:
    """Return the weighted squares of the residuals of each ramp that is straight in a power of the metric.

    Sums over the steps of a ramp are differences of cumulative sums, so that each ramp takes constant time.
    """
    if power * np.ptp(height) > _MAX_RANGE:
        return np.full(len(start), np.inf)  # the squares would overflow
    if power:
        centred = height - float(np.median(height))
        value = np.exp(power * centred) / power
        weight = weight * np.exp(-2 * power * running_median(centred))
    else:
        value = height
    total = float(weight.sum())
    value = value - float((value * weight).sum()) / total
    place = where - where[0]
    rows = np.stack([weight, weight * place, weight * place**2, weight * value, weight * place * value])
    sums = np.concatenate([np.zeros((5, 1)), np.cumsum(rows, axis=1)], axis=1)
    inside, after = sums[:, end] - sums[:, start], sums[:, -1:] - sums[:, end]
    origin, length = place[start], place[end] - place[start]
    rise = (inside[1] - origin * inside[0]) / length + after[0]
    rise_squared = (inside[2] - 2 * origin * inside[1] + origin**2 * inside[0]) / length**2 + after[0]
    product = (inside[4] - origin * inside[3]) / length + after[3]
    spread = np.maximum(rise_squared - rise**2 / total, 1e-300)
    squares = float((value**2 * weight).sum()) - product**2 / spread
    return np.asarray(np.maximum(squares, 0.0))


def _fit_levels(
    where: Floats, height: Floats, weight: Floats, start: int, end: int, power: float
) -> tuple[float, float, float]:
    """Return the level before a change, the change, and the weighted spread of its completed part."""
    total = float(weight.sum())
    change = float(np.sign(height[end:].mean() - height[: start + 1].mean())) or 1.0
    middle = float((height * weight).sum()) / total
    for _ in range(8 if power else 1):
        risen = _completed_part(where, float(where[start]), float(where[end]), power, change)
        centred = risen - float((risen * weight).sum()) / total
        spread = float((centred**2 * weight).sum())
        change = float((centred * (height - middle) * weight).sum()) / spread
    return middle - change * float((risen * weight).sum()) / total, change, spread


def _completed_part(where: Floats, start: float, end: float, power: float, change: float) -> Floats:
    """Return the completed part of a change at positions, in [0, 1]."""
    part = np.clip((where - start) / (end - start), 0, 1)
    return np.asarray(np.log1p(np.expm1(power * change) * part) / (power * change) if power and change else part)
