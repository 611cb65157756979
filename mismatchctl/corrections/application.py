"""Apply a correction to ratios: compute weights, evaluate gates, and find the kept tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, Segments, TokenBatch
from mismatchctl.core.ratios import LOG_RATIO_BOUND, STATISTIC_SUMS, STATISTICS, Float32Ratios, Ratios, bounded_excess
from mismatchctl.corrections.model import MISMATCH_SOURCE, ClampLevel, Correction, Gate, Weight


@dataclass(frozen=True)
class Selection:
    """Tokens that are True in `tokens` [T] (default: all) and whose sequence is True in `sequences` [S]."""

    segments: Segments
    sequences: Bools
    tokens: Bools | None = None

    @classmethod
    def everything(cls, segments: Segments) -> Selection:
        return cls(segments, np.ones(len(segments), np.bool_))

    @cached_property
    def counts(self) -> Float64s:
        within = self.segments.sizes if self.tokens is None else self.segments.sum(self.tokens)
        return within * self.sequences

    def sum(self, values: NDArray[Any]) -> Float64s:
        masked = values if self.tokens is None else np.where(self.tokens, values, 0.0)
        return np.where(self.sequences, self.segments.sum(masked), 0.0)

    def sum_log_ratio(self, log_ratio: NDArray[Any]) -> Float64s:
        """Multiply log ratios by the mask and sum them. An infinite log ratio times 0 is NaN, as in trainers."""
        masked = log_ratio if self.tokens is None else log_ratio * self.tokens
        return self.segments.sum(masked) * self.sequences

    def expand(self) -> Bools:
        spread = self.segments.spread(self.sequences)
        return spread if self.tokens is None else spread & self.tokens

    def divide(self, segments: Segments) -> Selection:
        return Selection(segments, np.ones(len(segments), np.bool_), self.expand())

    def exclude(self, rejected: Selection) -> Selection:
        if rejected.tokens is None:
            return Selection(self.segments, self.sequences & ~rejected.sequences, self.tokens)
        left = ~rejected.expand()
        return Selection(self.segments, self.sequences, left if self.tokens is None else self.tokens & left)


@dataclass(frozen=True)
class Trim:
    """The values of a step. A gate with `over: batch` drops the largest until the others' mean is within its bound."""

    gate: Gate
    count: int = 0  # number of values within the upper bound
    total: float = 0.0  # sum of the values within the upper bound
    outside_values: tuple[Float64s, ...] = ()  # the values above the upper bound

    def add_values(self, values: NDArray[Any]) -> Trim:
        """Return a copy that also contains `values`. A NaN counts as infinity, so it is dropped first."""
        known = np.where(np.isnan(values), np.inf, values.astype(np.float64))
        inside = self._inside(known)
        count, total = self.count + int(inside.sum()), self.total + float(known[inside].sum())
        return replace(self, count=count, total=total, outside_values=(*self.outside_values, known[~inside]))

    def _inside(self, values: Float64s) -> NDArray[np.bool_]:
        high = self.gate.bounds[1]
        return values <= high if self.gate.inclusive[1] else values < high

    def find_cut(self) -> tuple[float, int, bool]:
        """Return the smallest dropped value (or inf), how often it is dropped, and True if a smaller value stays."""
        ascending = np.sort(np.concatenate([np.zeros(0), *self.outside_values]))
        means = (self.total + np.cumsum(ascending)) / (self.count + np.arange(1, len(ascending) + 1))
        stays = max(int(self._inside(means).sum()), int(self.count == 0))  # at least one token always stays
        if stays >= len(ascending):
            return math.inf, 0, True
        least = float(ascending[stays])
        return least, int((ascending[stays:] == least).sum()), self.count > 0 or bool(ascending[0] < least)

    def threshold(self) -> float:
        """Return the threshold: the gate drops values at or above it. Equal values are all dropped or all kept."""
        least, _, less_stays = self.find_cut()
        return least if less_stays else math.nextafter(least, math.inf)


@dataclass(frozen=True)
class GateOutcome:
    """The tokens that one gate rejects, separately for too low and too high values."""

    gate: Gate
    low: Selection
    high: Selection

    @property
    def rejected(self) -> Bools:
        return self.low.expand() | self.high.expand()


def apply_gate(gate: Gate, ratios: Ratios, batch: TokenBatch, selection: Selection) -> GateOutcome:
    """Apply a gate. Compute its statistic (such as the mean K1) only from the tokens in `selection`."""
    segments = adjacent_segments(batch) if gate.over == "segment" else batch.segments
    view = selection if gate.over != "segment" else selection.divide(segments)
    measured = measure_gate(gate, ratios, view, batch)
    if gate.over == "batch":
        dropped = _trim_batch(gate, np.asarray(measured), view, batch)
        low, high = (segments.from_host(flags) for flags in (np.zeros_like(dropped), dropped))
    else:
        low, high = _outside_interval(gate, measured, batch)
        if gate.statistic.startswith("binary_kl") or not np.isfinite(ratios.extent).all():
            undefined = np.isnan(measured) & (gate.nonfinite != "keep")
            low, high = (low | undefined, high) if gate.keep[1] is None else (low, high | undefined)
    return GateOutcome(gate, *(_select_rejected(gate, flags, segments, view, batch, ratios) for flags in (low, high)))


def measure_gate(gate: Gate, ratios: Ratios, view: Selection, batch: TokenBatch) -> Float64s:
    """Return the values that a gate compares with its bounds (ratios as logs), per token [T], sequence or turn."""
    if gate.statistic == "age":
        unknown = np.nan if gate.nonfinite == "keep" else np.inf if gate.keep[1] is not None else -np.inf
        return np.where(np.isnan(batch.age), unknown, batch.age)
    if gate.precision == "float32":
        ratios = Float32Ratios(*ratios.log_probs, ratios.segments)
    if gate.nonfinite == "one" and gate.statistic == "ratio":
        ratios = replace_nonfinite_ratios(ratios)
    ratios = clamp_ratios(ratios, gate.clamp, gate.limit)
    measured = _aggregate(gate, ratios, view)
    if batch.impossible is not None and gate.source == MISMATCH_SOURCE:
        measured = _add_impossible_tokens(gate, measured, view, batch)
    bounded = gate.statistic == "ratio" and gate.clamp == "aggregate"
    if (
        gate.level == "token" and np.abs(ratios.extent).max() <= gate.limit
    ):  # the clamp would not change these log ratios
        return measured
    return np.clip(measured, -gate.limit, gate.limit) if bounded else measured


_PROBABILITY_STATISTICS = ("prob_diff", "abs_prob_diff", "train_prob", "rollout_prob", "binary_kl", "binary_kl_max")
"""Statistics that need probabilities, not only ratios. Tokens with train probability 0 do not affect them."""


def _add_impossible_tokens(gate: Gate, measured: Float64s, view: Selection, batch: TokenBatch) -> Float64s:
    """Add tokens of train probability 0 (log ratio -inf) to the values `measured` of each segment or prefix."""
    impossible = _count_impossible_tokens(gate.over, view.segments, batch)
    if impossible is None or gate.level == "token" or gate.statistic in _PROBABILITY_STATISTICS:
        return measured
    counts = view.counts if gate.over != "prefix" else _running_counts(view)
    log_ratio = 0.0 if gate.nonfinite == "one" and gate.statistic == "ratio" else -np.inf
    log_ratio = max(log_ratio, -gate.limit) if gate.clamp == "token" else log_ratio
    value = log_ratio
    if gate.statistic != "ratio":
        one = Ratios(np.full(1, log_ratio), np.zeros(1), Segments.from_lengths([1]))
        value = abs(float(STATISTICS[gate.statistic](one)[0])) if math.isfinite(log_ratio) else np.inf
        value = 1.0 if gate.statistic == "ratio_gap" and not math.isfinite(log_ratio) else value
    where = np.flatnonzero(impossible > 0)
    number, known, old = impossible[where], counts[where], measured[where]
    with np.errstate(divide="ignore"):
        if gate.level in ("min", "max"):
            new = (np.minimum if gate.level == "min" else np.maximum)(old, value)
        elif gate.level in ("sum", "sequence"):
            new = old + number * value
        elif gate.statistic == "ratio" and gate.level == "mean":
            new = np.log((np.exp(old) * known + number * math.exp(value)) / (known + number))
        else:
            new = (old * known + number * value) / (known + number)
    result = measured.copy()
    result[where] = new
    return result


def _count_impossible_tokens(over: str, segments: Segments, batch: TokenBatch) -> Ints | None:
    """Count the tokens with train probability 0 in each segment, or before each token if `over` is `prefix`."""
    near = batch.impossible_near
    if over == "sequence":
        return batch.impossible
    if near is None or not len(near) or over == "batch":
        return None
    return near[:, 2] if over == "prefix" else near[segments.offsets[:-1], 1]


def _running_counts(view: Selection) -> Float64s:
    seen = _segment_values(view.segments, np.asarray(view.expand()))
    return np.concatenate([np.zeros(0), *map(np.cumsum, seen)])


def gate_bounds(gate: Gate) -> tuple[float, float]:
    """Return the lower and upper bound of a gate. For the statistic `ratio`, they are bounds of the log ratio."""
    low, high = gate.bounds
    if math.isnan(low) or math.isnan(high):  # some frameworks accept NaN bounds and reject all tokens
        return math.inf, -math.inf
    if gate.statistic == "ratio":
        low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    return low, high


def clamp_ratios(ratios: Ratios, clamp: ClampLevel, limit: float) -> Ratios:
    if clamp != "token" or np.abs(ratios.extent).max() <= limit:
        return ratios
    return _replace_log_ratio(ratios, np.clip(ratios.log_ratio, -limit, limit))


def replace_nonfinite_ratios(ratios: Ratios) -> Ratios:
    finite = np.isfinite(ratios.log_ratio)
    return _replace_log_ratio(ratios, np.where(finite, ratios.log_ratio, 0.0)) if (~finite).any() else ratios


def adjacent_segments(batch: TokenBatch) -> Segments:
    """Split sequences at masked tokens. `batch` also lacks tokens with train probability 0, but do not split there."""
    near = batch.impossible_near
    gaps = np.flatnonzero(np.diff(batch.positions) != 1 if near is None else near[1:, 0]) + 1
    return replace(batch.segments, offsets=np.union1d(gaps, batch.segments.offsets))


def _replace_log_ratio(ratios: Ratios, log_ratio: NDArray[Any]) -> Ratios:
    # Other subclasses of Ratios do not use `log_ratio`, so setting it would have no effect.
    kind = Float32Ratios if isinstance(ratios, Float32Ratios) else Ratios
    changed = kind(*ratios.log_probs, ratios.segments)
    changed.log_ratio = log_ratio
    return changed


def _aggregate(gate: Gate, ratios: Ratios, view: Selection) -> Float64s:
    segments, level = view.segments, gate.level
    whole = view.tokens is None and segments is ratios.segments  # True if the sums per sequence in `ratios` can be used
    defined = gate.nonfinite != "keep" or not np.isnan(ratios.extent).any()  # with `keep`, min and max ignore NaN
    if whole and gate.statistic == "ratio" and level in ("min", "max") and gate.over == "sequence" and defined:
        return ratios.min_log_ratio if level == "min" else ratios.max_log_ratio
    if gate.statistic == "ratio" and level == "mean":
        with np.errstate(divide="ignore"):  # the mean ratio may underflow to 0
            return np.log1p(_mean_excess(gate, ratios, view))
    if whole and level not in ("token", "min", "max") and gate.statistic in STATISTIC_SUMS and gate.over == "sequence":
        total = STATISTIC_SUMS[gate.statistic](ratios)
    else:
        values = ratios.log_ratio if gate.statistic == "ratio" else STATISTICS[gate.statistic](ratios)
        if level == "token" or gate.over == "batch":
            return values
        if gate.over == "prefix":
            return _prefix_aggregate(level, values, view)
        if level in ("min", "max"):
            reduce, neutral = (segments.min, np.inf) if level == "min" else (segments.max, -np.inf)
            values = values if defined else np.where(np.isnan(values), neutral, values)
            return reduce(values if view.tokens is None else np.where(view.tokens, values, neutral))
        total = view.sum_log_ratio(values) if gate.statistic == "ratio" else view.sum(values)
    return total / np.maximum(view.counts, 1) if level in ("mean", "geometric") else total


def _mean_excess(gate: Gate, ratios: Ratios, view: Selection) -> Float64s:
    """Return the mean ratio minus 1 of each segment or prefix, with high precision near 0."""
    if gate.over == "sequence" and view.tokens is None and gate.clamp != "none":
        return ratios.excess_sum / np.maximum(view.counts, 1)
    excess = ratios.exp_minus_one if gate.clamp == "none" else ratios.excess
    return (
        _prefix_aggregate("mean", excess, view)
        if gate.over == "prefix"
        else view.sum(excess) / np.maximum(view.counts, 1)
    )


def _prefix_aggregate(level: str, values: NDArray[Any], view: Selection) -> Float64s:
    """For each token [T], return the sum, mean, min or max (`level`) of the values in `view` up to this token."""
    running, neutral = {"min": (np.minimum, np.inf), "max": (np.maximum, -np.inf)}.get(level, (np.add, 0.0))
    seen = np.asarray(view.expand())
    shown = _segment_values(view.segments, np.where(seen, np.asarray(values), neutral))
    found: NDArray[Any] = np.concatenate([np.zeros(0), *map(running.accumulate, shown)])
    if level in ("mean", "geometric"):
        found /= np.maximum(_running_counts(view), 1)
    return view.segments.from_host(found)


def _segment_values(segments: Segments, values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for start, stop in zip(segments.offsets[:-1].tolist(), segments.offsets[1:].tolist(), strict=True):
        yield values[start:stop]


def _outside_interval(gate: Gate, measured: Float64s, batch: TokenBatch) -> tuple[Bools, Bools]:
    lower: Any
    upper: Any
    lower, upper = gate_bounds(gate)
    if gate.precision == "float32":
        if gate.statistic == "ratio":
            with np.errstate(over="ignore"):
                measured = np.exp(measured.astype(np.float64))
            lower, upper = gate.keep[0] or 0.0, gate.bounds[1]
        measured, lower, upper = measured.astype(np.float32), np.float32(lower), np.float32(upper)
    if gate.widen:
        factor = (batch.segments.places + 1.0) ** gate.widen
        lower, upper = (bound * factor if math.isfinite(bound) else bound for bound in (lower, upper))
    if gate.seed is not None and gate.keep[1] is not None:
        upper = (
            upper + _random_thresholds(gate, batch)
            if gate.statistic == "ratio"
            else upper * np.exp(_random_thresholds(gate, batch))
        )
    low = measured < lower if gate.inclusive[0] else measured <= lower
    high = measured > upper if gate.inclusive[1] else measured >= upper
    return low, high


def _random_thresholds(gate: Gate, batch: TokenBatch) -> Float64s:
    """Return log(random factor) >= 0 for each upper bound. The same seed, file, row and place give the same factor."""
    rows = batch.rows if len(batch.rows) else np.arange(len(batch))
    key = rows.astype(np.uint64) << np.uint64(32)
    if len(batch.file):
        key = key + (batch.file.astype(np.uint64) << np.uint64(56))
    if gate.per_token:
        segments = Segments(batch.segments.offsets)
        key = segments.spread(key) + segments.places.astype(np.uint64)
    with np.errstate(over="ignore"):  # the random function splitmix64
        key = (key + np.uint64(gate.seed or 0) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
        key ^= key >> np.uint64(31)
    luck: Float64s = -np.log(((key >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53)
    return batch.segments.from_host(luck) if gate.per_token else luck


def _trim_batch(gate: Gate, values: NDArray[Any], view: Selection, batch: TokenBatch) -> Bools:
    seen = np.asarray(view.expand())
    if gate in batch.trims:
        reached = np.asarray(values) >= np.asarray(batch.segments.spread(batch.trims[gate]))
        return reached & seen
    known = np.where(np.isnan(values), np.inf, values)
    least, number, _ = Trim(gate).add_values(known[seen]).find_cut()
    dropped: Bools = seen & (known > least)
    dropped[np.flatnonzero(seen & (known == least))[:number]] = True  # among equal values, the first values are dropped
    return dropped


def _select_rejected(
    gate: Gate, flags: Bools, segments: Segments, view: Selection, batch: TokenBatch, ratios: Ratios
) -> Selection:
    if gate.per_token:
        tokens = flags & view.expand() if gate.sees == "remaining" else flags
    elif gate.over == "segment":
        tokens = segments.spread(flags & (view.counts > 0))
    else:
        flags = flags & (view.counts > 0)
        if gate.when == "always":
            return Selection(batch.segments, flags)
        tokens = batch.segments.spread(flags)
    if gate.when != "always":
        tokens = tokens & _eligible_tokens(gate, batch, ratios)
    return Selection(batch.segments, batch.segments.sum(tokens) > 0, tokens)


def _eligible_tokens(gate: Gate, batch: TokenBatch, ratios: Ratios) -> Bools:
    if batch.advantages is None:
        raise KeyError("advantages")
    if gate.when == "drifting":
        return np.sign(ratios.log_ratio) * batch.advantages > 0
    if gate.when == "positive_advantage":
        return batch.advantages > 0
    return batch.advantages <= 0 if gate.when == "nonpositive_advantage" else batch.advantages < 0


_SMALLEST_MEAN = 1e-8


@dataclass(frozen=True)
class Weights:
    """Importance weights per token [T] or per sequence [S], before they are normalized."""

    rule: Weight
    ratios: Ratios  # the ratios that the rule uses
    all_inside: bool = False  # True if the caller knows that every token is within all bounds
    selection: Selection | None = None  # tokens to aggregate over. Default: all.
    turns: Segments | None = None  # ranges of adjacent valid tokens, for a rule with `over: segment`
    bounded_at: Bools | None = None  # sequences whose weights are bounded [S]. Default: all.
    impossible: Ints | None = None  # number of tokens with train probability 0, per sequence [S] or per turn

    @property
    def per_token(self) -> bool:
        return self.rule.per_token

    @property
    def are_ratios(self) -> bool:
        """Return True if each token's weight is the ratio of this token before the bounds are applied."""
        return self.rule.level == "token" and self.rule.is_usual

    @cached_property
    def log_ratio(self) -> Float64s:
        """Return the logarithm of each weight before `limit` and the bounds are applied."""
        rule, ratios = self.rule, self.ratios
        if rule.level == "token":
            return ratios.log_ratio
        view, means = self.selection or Selection.everything(ratios.segments), rule.level == "geometric"
        if self.turns is not None:
            view, means = view.divide(self.turns), True
        whole = self.turns is None and self.selection is None
        total = ratios.log_ratio_sum if whole else view.sum_log_ratio(ratios.log_ratio)
        counts = view.counts
        if self.impossible is not None and rule.source == MISMATCH_SOURCE and rule.nonfinite != "one":
            lowest = -rule.limit if rule.clamp == "token" else -np.inf
            total = np.where(self.impossible > 0, total + np.maximum(self.impossible, 1) * lowest, total)
            counts = counts + self.impossible
        found = total / np.maximum(counts, 1) if means else total
        return found if self.turns is None else self.turns.spread(found)

    @cached_property
    def _limit(self) -> float:
        return self.rule.limit if self.rule.clamp == "aggregate" else np.inf

    @cached_property
    def raw_excess(self) -> Float64s:
        """Return weight - 1 before bounds are applied. For weights near 1, this is more exact than `raw` - 1."""
        if self.are_ratios:
            return self.ratios.excess
        if self._limit == LOG_RATIO_BOUND:
            return self._sanitize(bounded_excess(self.log_ratio), 1.0)
        with np.errstate(over="ignore"):
            return self._sanitize(np.expm1(np.clip(self.log_ratio, -self._limit, self._limit)), 1.0)

    @cached_property
    def raw(self) -> Float64s:
        with np.errstate(over="ignore"):
            return self._sanitize(np.exp(np.clip(self.log_ratio, -self._limit, self._limit)), 0.0)

    @cached_property
    def low(self) -> Bools:
        """Return True for each weight below `watch_low`, or below the lower bound if `watch_low` is not set."""
        return self.raw_excess + 1.0 < (self.rule.watch_low or self.rule.bounds[0])

    @cached_property
    def high(self) -> Bools:
        return self.raw_excess + 1.0 > self.rule.bounds[1]

    @cached_property
    def excess(self) -> Float64s:
        return self._bound(self.raw_excess, 1.0)

    @cached_property
    def bounded(self) -> Float64s:
        return self._bound(self.raw, 0.0)

    def _bound(self, values: Float64s, origin: float) -> Float64s:
        """Clip weights to the bounds, or set weights outside of them to 0. `values` (and result): weight - `origin`."""
        if self.rule.zero is not None:
            bounded: Float64s = np.where(self.low | self.high, -origin, values)
        else:
            lower, upper = self.rule.bounds
            bounded = np.clip(values, lower - origin, upper - origin)
        if self.bounded_at is None:
            return bounded
        where = self.ratios.segments.spread(self.bounded_at) if self.per_token else self.bounded_at
        return np.where(where, bounded, values)

    def _sanitize(self, values: Float64s, origin: float) -> Float64s:
        return np.where(np.isfinite(values), values, -origin) if self.rule.nonfinite == "zero" else values

    def total(self, values: NDArray[Any], over: Selection) -> Float64s:
        """Sum `values` over selected tokens, per sequence [S]. A value per sequence counts once per selected token."""
        if self.per_token:
            return over.sum(values)
        return np.where(over.counts > 0, values, 0.0) * over.counts


def normalization_divisor(mean: Float64s) -> Float64s:
    """Return the mean weight, or 1 if the mean is almost 0, as trainers do."""
    return np.where(mean > _SMALLEST_MEAN, mean, 1.0)


@dataclass(frozen=True)
class CorrectedBlock:
    """Result of a correction for a block of sequences."""

    weights: Weights | None  # None if the correction has no weight rule (every weight is 1)
    gates: tuple[GateOutcome, ...]  # one outcome per gate, in order
    kept: Selection  # tokens that contribute to the loss
    counted: Selection  # tokens in the loss's denominator: `kept` plus the tokens rejected by gates with effect `zero`

    def token_weights(self) -> Float64s:
        """Return each token's weight [T] with bounds applied, but not normalized. Rejected tokens have weights too."""
        if self.weights is None:
            return self.kept.segments.spread(np.ones(len(self.kept.segments)))
        bounded = self.weights.bounded
        return bounded if self.weights.per_token else self.kept.segments.spread(bounded)


def apply_correction(
    correction: Correction, ratios: Mapping[str, Ratios], batch: TokenBatch, *, all_inside: bool = False
) -> CorrectedBlock:
    everything = Selection.everything(batch.segments)
    nothing = Selection(batch.segments, np.zeros(len(batch), np.bool_))
    kept = counted = everything
    outcomes = []
    for gate in correction.gates:
        if all_inside and gate.per_token:
            outcome = GateOutcome(gate, nothing, nothing)
        else:
            outcome = apply_gate(gate, ratios[gate.source], batch, kept if gate.sees == "remaining" else everything)
        outcomes.append(outcome)
        kept = kept.exclude(outcome.low).exclude(outcome.high)
        if gate.effect == "mask":
            counted = counted.exclude(outcome.low).exclude(outcome.high)
    rule = correction.weight
    weights = None if rule is None else _compute_weights(rule, ratios, batch, kept, all_inside)
    return CorrectedBlock(weights, tuple(outcomes), kept, counted)


def _compute_weights(
    rule: Weight, ratios: Mapping[str, Ratios], batch: TokenBatch, kept: Selection, all_inside: bool
) -> Weights:
    own = ratios[rule.source]
    if rule.is_usual:
        return Weights(rule, own, all_inside, impossible=batch.impossible)
    if rule.nonfinite == "one":
        own = replace_nonfinite_ratios(own)
    own = clamp_ratios(own, rule.clamp, rule.limit)
    where = None
    if rule.bound_where is not None:
        seen = kept if rule.bound_where.sees == "remaining" else Selection.everything(batch.segments)
        found = apply_gate(rule.bound_where, ratios[rule.bound_where.source], batch, seen)
        where = found.low.sequences | found.high.sequences
    runs = adjacent_segments(batch) if rule.over == "segment" else None
    selection = kept if rule.sees == "remaining" else None
    impossible = batch.impossible if runs is None else _count_impossible_tokens("segment", runs, batch)
    return Weights(rule, own, all_inside, selection, runs, where, impossible)


_BOUND_TOLERANCE = 1e-9
"""A log ratio that is inside of a bound by less than this counts as outside, because it may be rounded."""


def sequences_near_bounds(correction: Correction, ratios: Mapping[str, Ratios]) -> Bools:
    """Flag sequences [S] if a per-token rule may reject a token, or give a token a weight other than its ratio."""
    segments = next(iter(ratios.values())).segments
    found = np.zeros(len(segments), np.bool_)
    rule = correction.weight
    if rule is not None and rule.per_token and not rule.is_usual:
        found |= True
    elif rule is not None and rule.level == "token":
        found |= _sequences_outside(ratios[rule.source], rule.watch_low or rule.bounds[0], rule.bounds[1])
    for gate in correction.gates:
        if gate.level == "token" and gate.statistic == "ratio" and gate.is_usual:
            low, high = gate.keep
            found |= _sequences_outside(ratios[gate.source], low or 0.0, math.inf if high is None else high)
        elif gate.level == "token" or gate.over != "sequence" or gate.when != "always":
            found |= True
    return found


def _sequences_outside(ratios: Ratios, low: float, high: float) -> Bools:
    lower, upper = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    if not (lower <= LOG_RATIO_BOUND and upper >= -LOG_RATIO_BOUND):  # NaN bounds, or bounds outside of the clamp
        return np.ones(len(ratios.segments), np.bool_)
    reached: Bools = (ratios.min_log_ratio <= lower + _BOUND_TOLERANCE) | (
        ratios.max_log_ratio >= upper - _BOUND_TOLERANCE
    )
    return reached & ratios.segments.nonempty
