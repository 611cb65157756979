"""Test for a change over a series of accepted Results."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.measure.metrics.metric import normal_z
from mismatchctl.stats.comparison import (
    BULK_SHARE,
    LEVEL_SHARES,
    SHOULDER_SHARE,
    Allowance,
    K3Part,
    is_layered,
    rise_within_bins,
)
from mismatchctl.stats.samples import ClusterSample, K3Layers, TableMetric

MIN_NIGHTS = 3
"""Minimum number of accepted Results to estimate the spread between Results."""
_NULL_DRAWS = 1 << 15
_MIN_ABOVE = 5  # minimum number of draws in a tail
_SEED = 20251122  # fixed, so that equal Results give equal answers
_K3_PARTS: tuple[Literal["shoulder", "bulk"], ...] = ("shoulder", "bulk")


@dataclass(frozen=True)
class LevelChange:
    """Result of the test for a change over time."""

    p: float  # p-value of a change beyond the allowance at any time
    p_last: float  # p-value of an excess of the last Result, given the spread of the other Results
    first: int  # index of the first result after the change, 0 for a linear trend
    part: K3Part | None  # part of K3 with the change
    rise: float  # change of the metric: after minus before, or along the line
    room: float  # allowed change


def detect_change(
    samples: Sequence[ClusterSample], metric: TableMetric, allowance: Allowance, *, lower: bool = False
) -> LevelChange:
    """Test for a change over time. The p-value is NaN if a value is not finite."""
    values = np.array([metric.of(sample) for sample in samples])
    if not np.isfinite(values).all():
        return LevelChange(math.nan, math.nan, 0, None, math.nan, math.nan)
    every = [(values, allowance)]
    if is_layered(metric, lower=lower) and values[0] > 0:
        every += _layered_series(samples, 1 + allowance.relative + allowance.absolute / float(values[0]))
    weights = [LEVEL_SHARES[name] for name in ("whole", *_K3_PARTS)] if len(every) > 1 else [1.0]
    found = [_change_statistics(series, allowed, lower=lower) for series, allowed in every]
    nights = len(samples)
    nulls = _null_distribution(nights)
    shares = np.array([
        (_tail_probability(nulls[0], each.max(), nights, len(each)), _tail_probability(nulls[1], each[-2], nights))
        for each in found
    ])  # fmt: skip
    adjusted = shares * sum(weights) / np.array(weights)[:, None]
    best = int(adjusted[:, 0].argmin())
    place = int(found[best].argmax())
    first = place + 1 if place < nights - 1 else 0
    part = K3Part(name=_K3_PARTS[best - 1], rise=_estimate_rise(every[best][0], first, relative=True)) if best else None
    p, p_last = np.minimum(adjusted.min(axis=0), 1.0).tolist()
    before = float(values[: first or len(values)].mean())
    room = (allowance.relative * abs(before) + allowance.absolute) * (-1 if lower else 1)
    return LevelChange(p, p_last, first, part, _estimate_rise(values, first), room)


def _layered_series(samples: Sequence[ClusterSample], factor: float) -> list[tuple[Float64s, Allowance]]:
    """Return shoulder and bulk relative to the oldest Result, and their rise if K3 of every token rises by `factor`."""
    layers = [K3Layers.from_sample(sample) for sample in samples]
    known = [each for each in layers if each is not None]
    if len(known) < len(layers):
        return []
    allowed, found = known[0].scale(factor), []
    for cap in (known[0].find_cap(share) for share in (SHOULDER_SHARE, BULK_SHARE)):
        series = np.array([rise_within_bins(each, known[0], cap) for each in known])
        rise = rise_within_bins(allowed, known[0], cap) - 1
        if not np.isfinite([*series, rise]).all():
            return []
        found.append((series, Allowance(relative=max(rise, 0.0))))
    return found


def _change_statistics(values: Float64s, allowance: Allowance, *, lower: bool) -> Float64s:
    """Return Student's t of a change after each Result and of a line [N]. Relative changes use logarithms."""
    sign = -1.0 if lower else 1.0
    if (values > 0).all() and not allowance.absolute:
        series = sign * np.log(values)
        factor = 1 + sign * allowance.relative
        room: float | Float64s = sign * math.log(factor) if factor > 0 else math.inf
    else:
        series = sign * values
        before = np.cumsum(values)[:-1] / np.arange(1, len(values))
        levels = np.append(before, values.mean())
        room = allowance.relative * np.abs(levels) + allowance.absolute
    found: Float64s = _t_statistics(series[None, :], room)[0]
    return found


def _t_statistics(series: Float64s, room: float | Float64s = 0.0) -> Float64s:
    nights = series.shape[1]
    series = series - series.mean(axis=1, keepdims=True)  # centering reduces rounding errors
    before = np.arange(1, nights)
    sums = np.cumsum(series, axis=1)[:, :-1]
    means = sums / before, -sums / (nights - before)
    whole: Float64s = np.sum(series**2, axis=1, keepdims=True)
    left = whole - before * means[0] ** 2 - (nights - before) * means[1] ** 2
    places = np.arange(nights) - (nights - 1) / 2
    spread = float(np.sum(places**2))
    slope = (series @ places / spread)[:, None]
    rises = np.concatenate([means[1] - means[0], slope * (nights - 1)], axis=1) - room
    left = np.concatenate([left, whole - slope**2 * spread], axis=1)
    scale: Float64s = np.append(1 / before + 1 / (nights - before), (nights - 1) ** 2 / spread)
    floor = 1e-18 * whole + 1e-300  # rounding error of equal values
    t: Float64s = rises / np.sqrt(np.maximum(left, floor) / (nights - 2) * scale)
    return t


@cache
def _null_distribution(nights: int) -> tuple[Float64s, Float64s]:
    """Return the distributions of the largest and of the last statistic without a change, in ascending order."""
    normal = np.random.default_rng(_SEED).standard_normal((_NULL_DRAWS, nights))
    found = _t_statistics(normal)
    return np.sort(found.max(axis=1)), np.sort(found[:, -2])


def _tail_probability(null: Float64s, value: float, nights: int, tests: int = 1) -> float:
    """Return the probability of a value at least this large. If there are too few draws, Student's t is used."""
    above = int(len(null) - np.searchsorted(null, value)) + 1
    drawn = above / (len(null) + 1)
    if above >= _MIN_ABOVE:
        return drawn
    z = normal_z(value, nights - 2)
    return min(drawn, max(tests * math.erfc(z / math.sqrt(2)) / 2, sys.float_info.min))


def _estimate_rise(values: Float64s, first: int, *, relative: bool = False) -> float:
    """Return the size of the change at an index, or along the least-squares line."""
    if first:
        before, after = float(values[:first].mean()), float(values[first:].mean())
    else:
        slope, middle = np.polyfit(np.arange(len(values)) - (len(values) - 1) / 2, values, 1).tolist()
        before, after = (middle + sign * slope * (len(values) - 1) / 2 for sign in (-1, 1))
    return after / before - 1 if relative and before else after - before
