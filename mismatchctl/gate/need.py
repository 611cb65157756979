"""How large a dump must be to find a given rise, from the same draws that say what one could have found."""

from __future__ import annotations

import math
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from mismatchctl.gate.power import POWER, Population, Sizes, planted, power
from mismatchctl.gate.rules import Allowance
from mismatchctl.resample import ClusterSample, TableMetric, influence_of

_MOST_CLUSTERS = 1 << 20


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


def needed(
    run: str,
    metric: TableMetric,
    sample: ClusterSample,
    baseline: ClusterSample | None,
    regression: float,
    allowance: Allowance,
    level: float,
) -> Need:
    """How many clusters and sequences it takes to find a relative regression beyond what is allowed.

    Without a baseline of the same clusters, both dumps are taken to have as many of their own.

    Args:
        run: whose noise is looked at.
        metric: what is to be found to have risen.
        sample: a dump.
        baseline: what it is compared with, if anything.
        regression: the rise, relative.
        allowance: how much it may rise.
        level: of the check.
    """
    paired = baseline is not None and sample.shared(baseline) == len(sample) == len(baseline)

    def found(size: int) -> bool:
        sizes = Sizes(size, size, size if paired else 0)
        population = Population.of(sample, baseline if paired else None, sizes.fold(len(sample)))
        made = planted(population, metric, allowance) if sizes.least_p <= level else None
        return made is not None and power(made(1.0 + regression), population, sizes, level) >= POWER

    value = influence_of(baseline if baseline is not None and paired else sample, metric)[0]
    is_beyond = regression * value > allowance.relative * value + allowance.absolute
    clusters = _least(found) if len(sample) > 1 and is_beyond else None
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


def _least(found: Callable[[int], bool]) -> int | None:
    """The least number that something holds for, and with it for all that are larger."""
    high = 2
    while not found(high):
        high *= 2
        if high > _MOST_CLUSTERS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high
