"""What carries a change of K3: contributions by bin, step or value, split into change of mix and change of level.

Kitagawa 1955, symmetric and centred. With token shares s and mean K3 m of each part, before and after:
level = mean(s) (m' - m), mix = (s' - s) (mean(m) - M), M the mean of both overall K3. Both add up to the change of K3,
since shares add up to 1 on either side. A part that one side lacks has the other's level there: it is all mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.compare.model import Carrier, Contribution, Decomposition, Label
from mismatchctl.errors import DataError
from mismatchctl.finite import finite
from mismatchctl.resample import ClusterSample, find_metric, resample, sample_of_step, sample_of_value
from mismatchctl.result import Breakdown, Groups, RunResult

MOST = 0.75
"""A carrier holds at least this share of the change."""
STANDS_OUT = 1.5
"""... and at least so many times its share of the reference's K3: a proportional change has no carrier."""
SURE = 3.0
"""... and so many standard errors: it was looked for among many."""
_REPLICATES = 2048
"""For standard errors; p-values are not read from these."""


@dataclass(frozen=True)
class PartMeans:
    """Tokens and mean K3 of each part on one side, [..., B]; K3 is NaN where there is no token."""

    tokens: Float64s
    k3: Float64s


def contributions(reference: PartMeans, other: PartMeans) -> tuple[Float64s, Float64s]:
    """(mix, level) of each part [..., B]; they add up to the difference of the means."""
    with np.errstate(all="ignore"):
        before, after = (side.tokens / side.tokens.sum(axis=-1, keepdims=True) for side in (reference, other))
    has_before, has_after = reference.tokens > 0, other.tokens > 0
    k3_before = np.where(has_before, reference.k3, np.where(has_after, other.k3, 0.0))
    k3_after = np.where(has_after, other.k3, k3_before)
    means = [(share * k3).sum(axis=-1, keepdims=True) for share, k3 in ((before, k3_before), (after, k3_after))]
    mix = (after - before) * ((k3_before + k3_after) / 2 - (means[0] + means[1]) / 2)
    level = (before + after) / 2 * (k3_after - k3_before)
    return mix, level


def by_bin(reference: Breakdown, other: Breakdown) -> Decomposition | None:
    """By the bins of a breakdown; its standard errors are those of the level, without what pairing would save."""
    lows = sorted({*reference.low, *other.low})
    highs = dict(zip([*reference.low, *other.low], [*reference.high, *other.high], strict=True))
    sides, errors = [], []
    for side in (reference, other):
        where = {low: index for index, low in enumerate(side.low)}
        rows = [where.get(low) for low in lows]
        sides.append(
            PartMeans(_picked([float(count) for count in side.tokens], rows, 0.0), _picked(side.k3, rows, np.nan))
        )
        errors.append(_picked(side.k3_se, rows, np.nan))
    mix, level = contributions(*sides)
    se = _level_errors(sides, errors)
    bounds = [{"low": low, "high": highs[low]} for low in lows]
    return _decomposition(reference.quantity, True, bounds, sides, (mix, level), se)


def by_steps(reference: RunResult, other: RunResult) -> Decomposition | None:
    """By training step, where the two have steps in common and more than one."""
    return _by_label("step", True, (reference, other), (reference.groups, other.groups), sample_of_step)


def by_values(column: str, reference: RunResult, other: RunResult) -> Decomposition | None:
    """By the values of a `--by` column that both were broken down by."""

    def sample(run: RunResult, index: int) -> ClusterSample:
        return sample_of_value(run, column, index)

    return _by_label(column, False, (reference, other), (reference.by[column], other.by[column]), sample)


def _level_errors(sides: Sequence[PartMeans], errors: Sequence[Float64s]) -> Float64s:
    """Standard error of each level, from those of K3 on either side, as if nothing were paired."""
    shares = [side.tokens / max(side.tokens.sum(), 1) for side in sides]
    found: Float64s = (shares[0] + shares[1]) / 2 * np.hypot(*errors)
    return found


SampleOf = Callable[[RunResult, int], ClusterSample]
"""The clusters of one step or value of a run, by its index."""


def _by_label(
    quantity: str,
    ordered: bool,
    runs: tuple[RunResult, RunResult],
    groups: tuple[Groups, Groups],
    sample: SampleOf,
) -> Decomposition | None:
    first, second = groups
    labels = [*first.labels, *(label for label in second.labels if label not in first.labels)]
    if all(isinstance(label, (int, float)) for label in labels):
        labels.sort(key=lambda label: float(label or 0))
    if len(labels) < 2 or not any(label in second.labels for label in first.labels):
        return None
    rows = [[side.labels.index(name) if name in side.labels else None for name in labels] for side in groups]
    sides = [_of_groups(side, own) for side, own in zip(groups, rows, strict=True)]
    mix, level = contributions(*sides)
    se = _resampled_errors(runs, rows, sample)
    if se is None:
        errors = [side.metrics["k3"].se or [None] * len(side.labels) for side in groups]
        se = _level_errors(sides, [_picked(own, places, np.nan) for own, places in zip(errors, rows, strict=True)])
    return _decomposition(quantity, ordered, [{"label": label} for label in labels], sides, (mix, level), se)


def _of_groups(side: Groups, rows: Sequence[int | None]) -> PartMeans:
    tokens, k3 = (side.metrics[key].value for key in ("tokens", "k3"))
    return PartMeans(_picked(tokens, rows, 0.0), _picked(k3, rows, np.nan))


def _resampled_errors(
    runs: tuple[RunResult, RunResult], rows: Sequence[Sequence[int | None]], sample: SampleOf
) -> Float64s | None:
    """Standard error of each contribution, paired where the two share clusters; None where tables do not tell."""
    count = len(rows[0])
    metrics = [find_metric("tokens"), find_metric("k3")]
    places = [(side, part, index) for side in (0, 1) for part, index in enumerate(rows[side]) if index is not None]
    try:
        samples = [sample(runs[side], index) for side, _, index in places]
    except DataError:
        return None
    shape = _REPLICATES, count
    drawn = [PartMeans(np.zeros(shape), np.full(shape, np.nan)) for _ in runs]
    for (side, part, _), (tokens, k3) in zip(places, resample(samples, metrics, _REPLICATES), strict=True):
        drawn[side].tokens[:, part], drawn[side].k3[:, part] = tokens.resampled, k3.resampled
    with np.errstate(all="ignore"):
        mix, level = contributions(*drawn)
        each, errors = mix + level, np.full(count, np.nan)
        known = np.count_nonzero(~np.isnan(each), axis=0) > 1
        errors[known] = np.nanstd(each[:, known], axis=0, ddof=1)
    return errors


def _decomposition(
    quantity: str,
    ordered: bool,
    places: Sequence[Mapping[str, Label]],
    sides: Sequence[PartMeans],
    found: tuple[Float64s, Float64s],
    se: Float64s,
) -> Decomposition | None:
    """None where K3 overflows: nothing adds up to that."""
    mix, level = found
    if not (np.isfinite(mix).all() and np.isfinite(level).all()):
        return None
    shares = [side.tokens / max(side.tokens.sum(), 1) for side in sides]
    parts = [
        Contribution.model_validate(
            {
                **place,
                "tokens": (float(shares[0][index]), float(shares[1][index])),
                "k3": tuple(finite(float(side.k3[index])) for side in sides),
                "mix": float(mix[index]),
                "level": float(level[index]),
                "se": finite(float(se[index])),
            }
        )
        for index, place in enumerate(places)
    ]
    return Decomposition(
        quantity=quantity,
        ordered=ordered,
        difference=float(mix.sum() + level.sum()),
        mix=float(mix.sum()),
        level=float(level.sum()),
        parts=sorted(parts, key=lambda part: -abs(part.total)),
        carrier=_carrier(parts, ordered),
    )


def _carrier(parts: Sequence[Contribution], ordered: bool) -> Carrier | None:
    """What carries more of the change than its share of K3, if that is most of the change and stands out."""
    total = np.array([part.total for part in parts])
    if not np.isfinite(total).all() or total.sum() == 0:
        return None
    tokens = np.array([part.tokens for part in parts])
    k3 = np.array([part.k3[0] or 0.0 for part in parts]) * tokens[:, 0]
    weight = k3 / k3.sum() if k3.sum() > 0 else tokens[:, 1]
    carried = total / total.sum()
    chosen = _stretch(carried, weight) if ordered else carried > weight
    errors = [part.se for part, is_in in zip(parts, chosen, strict=True) if is_in and part.se is not None]
    sure = bool(errors) and abs(total[chosen].sum()) > SURE * math.hypot(*errors)
    share, own = float(carried[chosen].sum()), float(weight[chosen].sum())
    if not sure or chosen.all() or share < max(MOST, STANDS_OUT * own):
        return None
    picked = [part for part, is_in in zip(parts, chosen, strict=True) if is_in]
    return Carrier(
        low=picked[0].low,
        high=picked[-1].high,
        labels=[part.label for part in picked] if picked[0].low is None else [],
        carried=share,
        weight=own,
        tokens=float(tokens[chosen, 1].sum()),
    )


def _stretch(carried: Float64s, weight: Float64s) -> Bools:
    """The neighbours that carry most beyond their weight."""
    excess = np.concatenate([[0.0], np.cumsum(carried - weight)])
    start, stop = np.unravel_index(int(np.triu(excess[None, :] - excess[:, None], 1).argmax()), (len(excess),) * 2)
    chosen = np.zeros(len(carried), np.bool_)
    chosen[start:stop] = True
    return chosen


def _picked(values: Sequence[float | None], rows: Sequence[int | None], empty: float) -> Float64s:
    return np.array([empty if row is None or (found := values[row]) is None else found for row in rows], np.float64)
