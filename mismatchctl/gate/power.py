"""What a dump could have found, and how large one must be to find a given regression."""

from __future__ import annotations

import math

import numpy as np
from pydantic import BaseModel, ConfigDict

from mismatchctl.resample import Draws, Sample, TableMetric, resample

LEAST_CLUSTERS = 5
"""Of fewer clusters, no random half can say anything at the usual level."""
POWER = 0.8
"""A regression counts as found when so many of such dumps would have failed."""


_HOPELESS = math.log(1e6)  # a factor that nobody would call a regression to be found


class Need(BaseModel):
    """What it takes to find a regression.

    Attributes:
        run: whose noise was looked at.
        metric: its key.
        regression: how much larger the metric is made, relatively.
        clusters: needed in each of the two dumps; None where no number is enough, or the metric is no positive mean.
        sequences: the same in sequences of this dump's clusters.
        paired: whether both dumps are to hold the same clusters, as these do.
        have: clusters of this dump.
    """

    model_config = ConfigDict(extra="forbid")

    run: str
    metric: str
    regression: float
    clusters: int | None
    sequences: int | None
    paired: bool
    have: int


def detectable(limit: float, noise: Draws, tail: float) -> float | None:
    """The smallest value that would have failed in four of five such dumps.

    Args:
        limit: what the value may reach; positive, or there is no answer.
        noise: the value, over what it is compared with if anything.
        tail: share of replicates that must not exceed the limit.
    """
    width = _width(noise, tail)
    return limit * math.exp(width) if limit > 0 and width is not None else None


def _width(draws: Draws, tail: float) -> float | None:
    """The distance, as a log of a factor, from a value to a limit that it is found above with that power."""
    noise = draws.resampled
    known = noise[np.isfinite(noise) & (noise > 0)]
    if len(known) < len(noise) / 2:
        return None
    low, unlucky, middle = np.quantile(known, [max(tail, 1 / len(known)), 1 - POWER, 0.5])
    width = 2 * math.log(middle) - math.log(low) - math.log(unlucky)
    return width if width < _HOPELESS else None


def needed(
    run: str,
    metric: TableMetric,
    sample: Sample,
    baseline: Sample | None,
    regression: float,
    tolerance: float,
    level: float,
) -> Need:
    """How many clusters and sequences it takes to find a relative regression beyond a relative tolerance.

    Noise shrinks with the root of the number of clusters; without a baseline of the same clusters, both dumps are taken
    to have as many of their own.
    """
    paired = baseline is not None and sample.shared(baseline) == len(sample) == len(baseline)
    (own,) = resample([sample], [metric])[0]
    noise, doubled = own, 2.0
    if paired and baseline is not None:
        (other,) = resample([baseline], [metric])[0]
        noise, doubled = own / other, 1.0
    width, room = _width(noise, level), math.log1p(regression) - math.log1p(tolerance)
    clusters = None
    if width is not None and room > 0:
        clusters = max(math.ceil(len(sample) * doubled * (width / room) ** 2), LEAST_CLUSTERS)
    each = float(sample.column("sequences").sum()) / max(len(sample), 1)
    return Need(
        run=run,
        metric=metric.metric.key,
        regression=regression,
        clusters=clusters,
        sequences=None if clusters is None else math.ceil(clusters * each),
        paired=paired,
        have=len(sample),
    )
