"""Test whether a metric is worse than in the baseline by significantly more than the allowed change."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mismatchctl.core.batch import Float64s
from mismatchctl.core.bins import PROBABILITY_EDGES
from mismatchctl.core.formatting import INTERVAL_Z, ONE_SIDED_Z
from mismatchctl.core.validation import FiniteModel
from mismatchctl.io.yaml import parse_number
from mismatchctl.measure.metrics.metric import t_quantile
from mismatchctl.stats.resampling import SampleExchange, shares_above, smallest_p_values
from mismatchctl.stats.samples import ClusterSample, K3Layers, TableMetric, compute_influence, merge_bins

BULK_SHARE, SHOULDER_SHARE = 0.2, 0.01
"""A cap on K3 ends the bulk if at most 20% of the baseline's tokens exceed it, and the shoulder if at most 1% do."""
LEVEL_SHARES = {"bulk": 6.0, "shoulder": 3.0, "evened": 2.0, "lost": 14.0, "whole": 1.0}
"""Shares of the significance level for five tests. "bulk" and "shoulder" test K3 with a cap per token, "evened" tests
K3 with EVENED_WEIGHTS, "lost" counts tokens with a larger K3 than nearly all baseline tokens, "whole" tests K3.

Each test detects changes that the other tests miss. If too few clusters have tokens that "lost" counts, the other
tests get its share.
"""
EVENED_WEIGHTS = 1 / (1.01 - (np.array([0.0, *PROBABILITY_EDGES]) + np.array([*PROBABILITY_EDGES, 1.0])) / 2)
"""Weights of the probability bins: about 1 / (1 - p), because a logit error changes log p in proportion to 1 - p."""
_CLIPPED_BULK, _CLIPPED_SHOULDER = 1.5, 2.5  # limits of the excess per token, in median deviations from the median
_MIN_CLIPPED_CLUSTERS = 8  # with fewer baseline clusters, there is no limit: the median deviation is uncertain
# A token is lost if its K3 exceeds a cap that at most _MOST_LOST_SHARE of the baseline's tokens exceed. The cap is at
# least the K3 of |log ratio| = 2^_LOST_EXPONENT.
_LOST_EXPONENT, _MOST_LOST_SHARE = -2, 1e-4
# Lost tokens are tested if the chance that all clusters with lost tokens are new is at most _LOST_LEVELS * level.
_LOST_LEVELS = 3.0
_ROUNDING = 1e-6  # rounding error, relative to the sum of |excess| over clusters
_TIE_WEIGHT = 0.02  # weight of the bulk's excess in the test of lost tokens, to break ties
_MOST_BULK_WEIGHT = 0.4  # maximum of this part over all clusters, so that one lost token counts more


class Allowance(BaseModel):
    """The allowed change of a value: a share of the baseline's value plus an absolute amount."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    relative: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    absolute: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """Parse `20%`, `1e-4` or `20% + 1e-4`."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"absolute": value}
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in re.split(r"(?<![eE])\+", value)]
        found: dict[str, float] = {}
        for part in parts:
            name = "relative" if part.endswith("%") else "absolute"
            if name in found or not part:
                raise ValueError("write a share, an amount or both: 20%, 1e-4, 20% + 1e-4")
            found[name] = parse_number(part)
            if found[name] < 0:
                raise ValueError(f"the allowed change must not be negative, found {part}")
        return found

    def __str__(self) -> str:
        parts = [f"{100 * self.relative:g}%"] if self.relative or not self.absolute else []
        return "+".join([*parts, *([f"{self.absolute:g}"] if self.absolute else [])])


ROUNDING_TOLERANCE = 1e-4  # smaller relative changes can come from rounding in a saved Result


class K3Part(FiniteModel):
    """One part of K3. Two caps split the K3 of each token into bulk (lowest part), shoulder, and tail (highest part).

    `share` is this part's share of the baseline's K3. `rise` is the relative change of its mean from the baseline, with
    a 95% `interval`. For bulk and shoulder, `rise` compares tokens of equal rollout probability. `rose`: the rise
    is significant (one-sided test at 5%). A value is `None` if it is unknown, such as without K3 in the baseline.
    """

    name: Literal["bulk", "shoulder", "tail"]
    share: float | None = None
    rise: float | None = None
    interval: tuple[float, float] | None = None
    rose: bool = False


@dataclass(frozen=True)
class ExcessStatistic:
    """The excess of a metric over its limit, as one contribution per cluster.

    The sum of `new` is the excess of the new sample, times its size (usually in tokens). The sum of `old` is about 0,
    because the limit is computed from the baseline.
    """

    new: Float64s
    old: Float64s
    weight: float = 1.0  # share of the significance level, see LEVEL_SHARES

    @property
    def exceeds_limit(self) -> bool:
        """Return True if the new sample exceeds the limit by more than rounding errors."""
        rounding = np.abs(_ROUNDING * self.new).sum()
        return bool(self.new.sum() > min(rounding, sys.float_info.max))  # an infinite sum exceeds the limit


@dataclass
class BaselineComparison:
    """Outcome of a comparison with a baseline."""

    exchange: SampleExchange
    statistics: list[ExcessStatistic]
    p: float
    most_significant: str = ""  # key in LEVEL_SHARES, empty for a metric other than K3
    parts: list[K3Part] = field(default_factory=list)

    @property
    def affects_most_tokens(self) -> bool:
        return any(statistic.exceeds_limit for statistic in self.statistics[:2])


def compare_samples(
    sample: ClusterSample,
    baseline: ClusterSample,
    metric: TableMetric,
    allowance: Allowance,
    *,
    lower: bool = False,
    level: float = 0.05,
) -> BaselineComparison:
    exchange = SampleExchange(sample.keys, baseline.keys, level)
    layers = find_layers(sample, baseline, metric, lower=lower)
    if layers is None:
        statistics = [linear_statistic(sample, baseline, metric, allowance, lower=lower)]
    else:
        statistics = k3_statistics(*layers, allowance, level=level)
    new, old = (np.stack(values, axis=1) for values in zip(*((s.new, s.old) for s in statistics), strict=True))
    totals = exchange.totals(new, old)
    shares = shares_above(totals)
    weights = np.array([statistic.weight for statistic in statistics])
    smallest = smallest_p_values(shares, weights)
    tails = exchange.resolve_tails(new, old, shares[0]) / (weights / weights.sum())
    p = min(float(np.mean(smallest <= smallest[0] * (1 + 1e-9))), float(tails.min()))
    parts = [] if layers is None else k3_parts(exchange, *layers)
    surest = "" if layers is None else list(LEVEL_SHARES)[int(np.argmin(tails))]
    return BaselineComparison(exchange, statistics, p, surest, parts)


def is_layered(metric: TableMetric, *, lower: bool) -> bool:
    return metric.metric.key == "k3" and not metric.prefix and not lower


def find_layers(
    sample: ClusterSample, baseline: ClusterSample, metric: TableMetric, *, lower: bool
) -> tuple[K3Layers, K3Layers] | None:
    if not is_layered(metric, lower=lower):
        return None
    new, old = K3Layers.from_sample(sample), K3Layers.from_sample(baseline)
    return None if new is None or old is None else (new, old)


def k3_statistics(new: K3Layers, old: K3Layers, allowance: Allowance, *, level: float = 0.05) -> list[ExcessStatistic]:
    low, high = old.find_cap(BULK_SHARE), old.find_cap(SHOULDER_SHARE)
    sizes = new.tokens.sum(1), old.tokens.sum(1)
    risen = old.scale(1 + allowance.relative) if allowance.relative else old  # the caps do not grow
    limited = [new.capped, risen.capped + allowance.absolute * old.tokens[:, :, None]]
    bulk = _excess_within_bins(new, old, *(each[:, :, low] for each in limited))
    shoulder = _excess_within_bins(new, old, *(each[:, :, high] for each in limited))
    evened = _excess_within_bins(new, old, *(each[:, :, -1] * EVENED_WEIGHTS for each in limited))
    counts = count_lost_tokens(new, old)
    lost = _lost_statistic(new, old, counts, *bulk)
    if sum(np.count_nonzero(count) for count in counts) < decisive_cluster_count(len(new.k3), len(old.k3), level):
        lost = np.zeros(len(new.k3)), np.zeros(len(old.k3))
    whole = _excess_over_limit(new.k3, sizes[0], risen.k3 + allowance.absolute * sizes[1], sizes[1])
    bulk, shoulder = _clip(bulk, sizes, _CLIPPED_BULK), _clip(shoulder, sizes, _CLIPPED_SHOULDER)
    found = {"bulk": bulk, "shoulder": shoulder, "evened": evened, "lost": lost, "whole": whole}
    return [ExcessStatistic(*values, LEVEL_SHARES[name]) for name, values in found.items()]


def _excess_over_limit(
    new: Float64s, new_size: Float64s, allowed: Float64s, old_size: Float64s
) -> tuple[Float64s, Float64s]:
    limit = allowed.sum() / old_size.sum() if old_size.sum() else math.nan
    return new - limit * new_size, allowed - limit * old_size


def _excess_within_bins(new: K3Layers, old: K3Layers, sums: Float64s, allowed: Float64s) -> tuple[Float64s, Float64s]:
    """Return each cluster's excess over the limit of each bin of the rollout probability, added up over the bins."""
    found = np.zeros(len(sums)), np.zeros(len(allowed))
    for bins in merge_bins(old.tokens.sum(axis=0)):
        values = (each[:, bins].sum(1) for each in (sums, new.tokens, allowed, old.tokens))
        for total, part in zip(found, _excess_over_limit(*values), strict=True):
            total += part
    return found


def _clip(
    excess: tuple[Float64s, Float64s], sizes: tuple[Float64s, Float64s], deviations: float
) -> tuple[Float64s, Float64s]:
    new, old = (each / np.maximum(size, 1.0) for each, size in zip(excess, sizes, strict=True))
    middle = float(np.median(old))
    room = deviations * 1.4826 * float(np.median(np.abs(old - middle)))
    if len(old) < _MIN_CLIPPED_CLUSTERS or not room > 0:
        return excess
    kept = [np.clip(each, middle - room, middle + room) for each in (new, old)]
    mean = float(kept[1] @ sizes[1] / sizes[1].sum())
    return (kept[0] - mean) * sizes[0], (kept[1] - mean) * sizes[1]


def count_lost_tokens(new: K3Layers, old: K3Layers) -> tuple[Float64s, Float64s]:
    """Count each cluster's lost tokens (K3 above nearly all baseline tokens) in the new sample and in the baseline."""
    cap = old.find_cap(_MOST_LOST_SHARE, _LOST_EXPONENT)
    hardly = old.share_above[cap] <= _MOST_LOST_SHARE
    first, second = (np.rint(each.count_above(cap)) * hardly for each in (new, old))
    return first, second


def _lost_statistic(
    new: K3Layers, old: K3Layers, counts: tuple[Float64s, Float64s], bulk: Float64s, others: Float64s
) -> tuple[Float64s, Float64s]:
    """Return each cluster's excess of lost tokens. A small part of its excess in `bulk` or `others` breaks ties."""
    norm = math.sqrt(float(np.sum(others**2)) * (1 + len(new.k3) / max(len(old.k3), 1))) or 1.0
    most = _MOST_BULK_WEIGHT / max(len(new.k3), 1)
    lost = _excess_over_limit(counts[0], new.tokens.sum(1), counts[1], old.tokens.sum(1))
    first, second = (np.clip(_TIE_WEIGHT / norm * each, -most, most) for each in (bulk, others))
    return lost[0] + first, lost[1] + second


def decisive_cluster_count(new: int, old: int, level: float) -> float:
    """Return how many clusters with lost tokens (very large K3) a test of lost tokens needs, or infinity."""
    places = np.arange(new)
    all_new = np.cumprod((new - places) / (new + old - places))  # chance that all of 1, 2, ... clusters are new
    reached = np.flatnonzero(all_new <= _LOST_LEVELS * level)
    return float(reached[0]) + 1 if len(reached) else math.inf


def linear_statistic(
    sample: ClusterSample,
    baseline: ClusterSample,
    metric: TableMetric,
    allowance: Allowance,
    *,
    lower: bool = False,
    factor: float = 1.0,
) -> ExcessStatistic:
    """Return how much each cluster contributes to the excess of a metric over its limit. With `lower`, lower is worse.

    This is exact for a mean, and a linear approximation for other metrics. Slopes are computed at the value of each
    sample, so that a larger value always gives a larger excess. For importance weights, slopes are computed at the
    pooled value, because a few large weights would distort a single sample. `factor` multiplies the value of `sample`.
    """
    sign = -1.0 if lower else 1.0
    sides = [compute_influence(each, metric) for each in (sample, baseline)]
    room = allowance.relative * abs(sides[1][0]) + allowance.absolute
    beyond = sign * (sides[0][0] * factor - sides[1][0]) > room
    if metric.metric.scale.ess is not None:
        sides = _pooled_influence(sample, baseline, metric)
    (value, influence, size), (other, baseline_influence, baseline_size) = sides
    value, influence = value * factor, influence * factor
    slope = 1.0 + sign * allowance.relative * math.copysign(1.0, other)
    excess = value - (other + sign * (allowance.relative * abs(other) + allowance.absolute))
    excess = excess if beyond else sign * min(sign * excess, 0.0)
    new = sign * (influence * size.sum() + excess * size)
    return ExcessStatistic(new, sign * slope * baseline_influence * baseline_size.sum())


def excess_over_value(sample: ClusterSample, metric: TableMetric, limit: float, *, lower: bool = False) -> Float64s:
    """Split the excess of a metric over a fixed limit: return each cluster's part. The parts add up to the excess."""
    value, influence, size = compute_influence(sample, metric)
    excess: Float64s = influence + (value - limit) * size / size.sum()
    return -excess if lower else excess


def _pooled_influence(
    sample: ClusterSample, baseline: ClusterSample, metric: TableMetric
) -> list[tuple[float, Float64s, Float64s]]:
    names = tuple(name for name in sample.names if name in baseline.columns)
    sums = [each.sums[:, [each.columns[name] for name in names]] for each in (sample, baseline)]
    value, influence, size = compute_influence(
        ClusterSample(np.arange(len(sample) + len(baseline), dtype=np.uint64), names, np.concatenate(sums)), metric
    )
    found = []
    for own in (slice(len(sample)), slice(len(sample), None)):
        rise = influence[own].sum() * size.sum() / size[own].sum()
        moves = (influence[own] * size.sum() - rise * size[own]) / size[own].sum()
        found.append((value + float(rise), moves, size[own]))
    return found


def k3_parts(exchange: SampleExchange, new: K3Layers, old: K3Layers) -> list[K3Part]:
    low, high = old.find_cap(BULK_SHARE), old.find_cap(SHOULDER_SHARE)
    pieces: dict[Literal["bulk", "shoulder", "tail"], list[Float64s]] = {
        "bulk": [each.capped[:, :, low] for each in (new, old)],
        "shoulder": [each.capped[:, :, high] - each.capped[:, :, low] for each in (new, old)],
        "tail": [(each.k3 - each.capped[:, :, high].sum(1))[:, None] for each in (new, old)],
    }
    whole = float(old.k3.sum())
    found = []
    for name, (above, below) in pieces.items():
        tokens = [each.tokens if above.shape[1] > 1 else each.tokens.sum(1, keepdims=True) for each in (new, old)]
        rise, interval, rose = _relative_rise(exchange, above, tokens[0], below, tokens[1])
        share = float(below.sum()) / whole if whole > 0 else None
        found.append(K3Part(name=name, share=share, rise=rise, interval=interval, rose=rose))
    return found


def _relative_rise(
    exchange: SampleExchange, new: Float64s, new_tokens: Float64s, old: Float64s, old_tokens: Float64s
) -> tuple[float | None, tuple[float, float] | None, bool]:
    """Compare mean K3 at equal rollout probability. Return (relative rise, interval, is significant)."""
    expected, spread = np.zeros(len(new_tokens)), np.zeros(len(old))  # K3 expected from the baseline, and its error
    for bins in merge_bins(old_tokens.sum(axis=0)):
        size = float(old_tokens[:, bins].sum())
        mean = float(old[:, bins].sum()) / size if size else math.nan
        expected += mean * new_tokens[:, bins].sum(1)
        if size:
            spread += (old[:, bins].sum(1) - mean * old_tokens[:, bins].sum(1)) * new_tokens[:, bins].sum() / size
    total = float(expected.sum())
    if not (total > 0 and math.isfinite(total) and math.isfinite(float(new.sum()))):
        return None, None, False
    ratio = float(new.sum()) / total
    if ratio <= 0:
        return ratio - 1, None, False
    own, other = (new.sum(1) - ratio * expected) / (ratio * total), spread / total
    error, degrees = _difference_error(exchange, own, other)
    if error is None:
        return ratio - 1, None, False
    least, width = (t_quantile(z, degrees) * error for z in (ONE_SIDED_Z, INTERVAL_Z))
    rose = ratio * math.exp(-least) - 1 > ROUNDING_TOLERANCE
    return ratio - 1, (ratio * math.exp(-width) - 1, ratio * math.exp(width) - 1), rose


def _difference_error(exchange: SampleExchange, new: Float64s, old: Float64s) -> tuple[float | None, int]:
    """Return the standard error of sum(new) - sum(old) for one value per cluster, and its degrees of freedom."""
    n, m = len(new), len(old)
    if min(n, m) < 2:
        return None, 0
    new, old = new * math.sqrt(n / (n - 1)), old * math.sqrt(m / (m - 1))
    _, first, second = exchange.pairs
    both = float(np.sum(new[first] * old[second]))
    return math.sqrt(max(float(np.sum(new**2) + np.sum(old**2)) - 2 * both, 0.0)), min(n, m) - 1
