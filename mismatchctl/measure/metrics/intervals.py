"""Intervals of smooth metrics, and whether a few clusters or rare weights leave them without the coverage they claim.

On a scale on which errors are about symmetric, Student's t with as many degrees of freedom as clusters count in effect,
less one: (sum of u^2)^2 / sum of u^4, u what a cluster moves the metric by. A few clusters that move it most make that
number small and the interval wide. How often such intervals hold the truth: docs/gate.md, Intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatchctl.batch import Float64s

_NORMAL = 1.6448536  # quantile of the normal distribution at 95 %
_FEW, _SHARE = 4.0, 0.25  # clusters that count in effect, and as a share of all: fewer are too few
_ERROR = 0.1  # squared relative error of a mean square of weights, were they log-normal


@dataclass(frozen=True)
class IntervalScale:
    """Where an interval is symmetric.

    Attributes:
        to: there from a value.
        slope: by how much a value moves it.
        back: a value from there.
        ess: of metrics of weights, the effective share of them that a value stands for.
        covers: what intervals with the status `heavy_tail` were seen to cover, on dumps that the rule was not made on.
    """

    to: Callable[[Any], Any]
    slope: Callable[[Any], Any]
    back: Callable[[Any], Any]
    ess: Callable[[Any], Any] | None = None
    covers: float = 0.85


def _odds(value: Any) -> Any:
    return np.log(value) - np.log1p(-value)


def _odds_slope(value: Any) -> Any:
    return 1 / (value * (1 - value))


def _from_odds(place: Any) -> Any:
    return 1 / (1 + np.exp(-place))


LINEAR = IntervalScale(lambda v: v, lambda v: np.ones_like(v), lambda y: y)
LOG = IntervalScale(np.log, lambda v: 1 / v, np.exp)
"""Of positive means."""
ODDS = IntervalScale(_odds, _odds_slope, _from_odds)
"""Of shares."""
ESS = IntervalScale(_odds, _odds_slope, _from_odds, ess=lambda v: v, covers=0.7)
CHI2 = IntervalScale(np.log1p, lambda v: 1 / (1 + v), np.expm1, ess=lambda v: 1 / (1 + np.maximum(v, 0)), covers=0.7)


def intervals(
    scale: IntervalScale, value: Float64s, se: Float64s, effective: Float64s, clusters: Float64s
) -> tuple[Float64s, Float64s]:
    """The 90 % intervals [G, 2] of values with their standard errors [G], and what those of a heavy tail cover [G].

    Args:
        scale: of the metric.
        value: NaN where undefined.
        se: over clusters; where it is 0 or unknown, there is no interval (NaN).
        effective: how many clusters count in effect.
        clusters: how many there are.
    """
    with np.errstate(all="ignore"):
        known = (se > 0) & (clusters >= 2)
        width = t_quantile(_NORMAL, np.maximum(effective - 1, 1)) * se * np.abs(scale.slope(value))
        centre = scale.to(value)
        ends = np.stack([scale.back(centre - width), scale.back(centre + width)], axis=-1)
        heavy = rests_on_few(effective, clusters)
        if scale.ess is not None:
            heavy |= (scale.ess(value) ** -4.0 - 1) / clusters > _ERROR
    ends[~known | ~np.isfinite(ends).all(axis=-1)] = np.nan
    return ends, np.where(known & heavy, scale.covers, np.nan)


def rests_on_few(effective: Any, clusters: Any) -> Any:
    """Whether so few clusters count in effect, of so many, that no interval covers what it claims."""
    return effective < np.minimum(_FEW, _SHARE * clusters)


def t_quantile(normal: float, degrees: Any) -> Any:
    """The quantile of Student's t where the normal distribution has `normal` (Cornish and Fisher 1937)."""
    cube, fifth = normal**3, normal**5
    with np.errstate(divide="ignore"):
        inverse = 1 / np.maximum(degrees, 0.0)
    return (
        normal
        + inverse * (cube + normal) / 4
        + inverse**2 * (5 * fifth + 16 * cube + 3 * normal) / 96
        + inverse**3 * (3 * normal**7 + 19 * fifth + 17 * cube - 15 * normal) / 384
    )
