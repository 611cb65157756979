"""What a gate measures and rejects; the statistic of a whole sequence touches no token again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Float64s, Segments, TokenBatch
from mismatchctl.correction.model import Clamp, Gate
from mismatchctl.correction.selection import Selection
from mismatchctl.correction.trim import Trim
from mismatchctl.ratios import STATISTICS, SUMS, Ratios, SingleRatios


@dataclass(frozen=True)
class GateOutcome:
    """What one gate rejects for being too low and too high."""

    gate: Gate
    low: Selection
    high: Selection

    @property
    def rejected(self) -> Bools:
        """Every token that it rejects [T]."""
        return self.low.expanded() | self.high.expanded()


def judge(gate: Gate, ratios: Ratios, batch: TokenBatch, seen: Selection) -> GateOutcome:
    """What `gate` rejects, aggregating over the tokens it has `seen`; empty sequences are never rejected."""
    segments = adjacent_runs(batch) if gate.over == "segment" else batch.segments
    view = seen if gate.over != "segment" else seen.over(segments)
    measured = measure(gate, ratios, view, batch)
    if gate.over == "batch":
        dropped = _trimmed(gate, np.asarray(measured), view, batch)
        low, high = (segments.from_host(flags) for flags in (np.zeros_like(dropped), dropped))
    else:
        low, high = _beyond(gate, measured, batch)
        if gate.statistic.startswith("binary_kl") or not np.isfinite(ratios.extent).all():
            undefined = np.isnan(measured) & (gate.nonfinite != "keep")
            low, high = (low | undefined, high) if gate.keep[1] is None else (low, high | undefined)
    return GateOutcome(gate, *(_rejected(gate, flags, segments, view, batch, ratios) for flags in (low, high)))


def measure(gate: Gate, ratios: Ratios, view: Selection, batch: TokenBatch) -> Float64s:
    """The statistic that a gate compares: of each token [T] where it judges those, else of each segment of the view."""
    if gate.statistic == "age":
        return _age(gate, batch)
    if gate.precision == "float32":
        ratios = SingleRatios(*ratios.given, ratios.segments)
    if gate.nonfinite == "one" and gate.statistic == "ratio":
        ratios = agreeing(ratios)
    ratios = clamped(ratios, gate.clamp, gate.limit)
    measured = _aggregate(gate, ratios, view)
    bounded = gate.statistic == "ratio" and gate.clamp == "aggregate"
    if gate.level == "token" and np.abs(ratios.extent).max() <= gate.limit:  # as most are
        return measured
    return np.clip(measured, -gate.limit, gate.limit) if bounded else measured


def _age(gate: Gate, batch: TokenBatch) -> Float64s:
    """The age of each sequence [S]; an unknown one is beyond a bound, unless the gate keeps what is undefined."""
    unknown = np.nan if gate.nonfinite == "keep" else np.inf if gate.keep[1] is not None else -np.inf
    return np.where(np.isnan(batch.age), unknown, batch.age)


def gate_bounds(gate: Gate) -> tuple[float, float]:
    """The interval in the space where the statistic is compared: the log of it for ratios."""
    low, high = gate.bounds
    if math.isnan(low) or math.isnan(high):  # some frameworks accept it: nothing lies within
        return math.inf, -math.inf
    if gate.statistic == "ratio":
        low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    return low, high


def clamped(ratios: Ratios, clamp: Clamp, limit: float) -> Ratios:
    """Ratios with log ratios clamped per token, where the rule says so and it would change any."""
    if clamp != "token" or np.abs(ratios.extent).max() <= limit:
        return ratios
    return _with_log_ratio(ratios, np.clip(ratios.log_ratio, -limit, limit))


def agreeing(ratios: Ratios) -> Ratios:
    """Ratios with those that are NaN or infinite made 1."""
    finite = np.isfinite(ratios.log_ratio)
    return _with_log_ratio(ratios, np.where(finite, ratios.log_ratio, 0.0)) if (~finite).any() else ratios


def adjacent_runs(batch: TokenBatch) -> Segments:
    """Each run of adjacent valid tokens as a segment of its own."""
    gaps = np.flatnonzero(np.diff(batch.positions) != 1) + 1
    return replace(batch.segments, offsets=np.union1d(gaps, batch.segments.offsets))


def _with_log_ratio(ratios: Ratios, log_ratio: NDArray[Any]) -> Ratios:
    kind = SingleRatios if isinstance(ratios, SingleRatios) else Ratios  # others make their terms without it
    changed = kind(*ratios.given, ratios.segments)
    changed.log_ratio = log_ratio
    return changed


def _aggregate(gate: Gate, ratios: Ratios, view: Selection) -> Float64s:
    """Aggregate over the view: `token` leaves values as they are, the rest give one value per segment, or prefix."""
    segments, level = view.segments, gate.level
    whole = view.tokens is None and segments is ratios.segments  # then what is at hand will do
    calm = gate.nonfinite != "keep" or not np.isnan(ratios.extent).any()  # else no NaN may decide for its sequence
    if whole and gate.statistic == "ratio" and level in ("min", "max") and gate.over == "sequence" and calm:
        return ratios.lowest if level == "min" else ratios.highest
    if gate.statistic == "ratio" and level == "mean":
        with np.errstate(divide="ignore"):  # ratios so small that their mean is 0
            return np.log1p(_mean_excess(gate, ratios, view))
    if whole and level not in ("token", "min", "max") and gate.statistic in SUMS and gate.over == "sequence":
        total = SUMS[gate.statistic](ratios)
    else:
        values = ratios.log_ratio if gate.statistic == "ratio" else STATISTICS[gate.statistic](ratios)
        if level == "token" or gate.over == "batch":
            return values
        if gate.over == "prefix":
            return _so_far(level, values, view)
        if level in ("min", "max"):
            reduce, neutral = (segments.min, np.inf) if level == "min" else (segments.max, -np.inf)
            values = values if calm else np.where(np.isnan(values), neutral, values)
            return reduce(values if view.tokens is None else np.where(view.tokens, values, neutral))
        total = view.sum_log_ratio(values) if gate.statistic == "ratio" else view.sum(values)
    return total / np.maximum(view.counts, 1) if level in ("mean", "geometric") else total


def _mean_excess(gate: Gate, ratios: Ratios, view: Selection) -> Float64s:
    """The mean ratio of each segment, or prefix, minus 1; each ratio within the usual bound unless none is clamped."""
    if gate.over == "sequence" and view.tokens is None and gate.clamp != "none":
        return ratios.excess_sum / np.maximum(view.counts, 1)
    excess = ratios.exp_minus_one if gate.clamp == "none" else ratios.excess
    return _so_far("mean", excess, view) if gate.over == "prefix" else view.sum(excess) / np.maximum(view.counts, 1)


def _so_far(level: str, values: NDArray[Any], view: Selection) -> Float64s:
    """The aggregate of each token's prefix, itself included [T]; tokens out of view count for nothing."""
    running, neutral = {"min": (np.minimum, np.inf), "max": (np.maximum, -np.inf)}.get(level, (np.add, 0.0))
    seen = np.asarray(view.expanded())
    shown = _parts(view.segments, np.where(seen, np.asarray(values), neutral))
    found: NDArray[Any] = np.concatenate([np.zeros(0), *map(running.accumulate, shown)])
    if level in ("mean", "geometric"):
        found /= np.maximum(np.concatenate([np.zeros(0), *map(np.cumsum, _parts(view.segments, seen))]), 1)
    return view.segments.from_host(found)


def _parts(segments: Segments, values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The values of each segment."""
    for start, stop in zip(segments.offsets[:-1].tolist(), segments.offsets[1:].tolist(), strict=True):
        yield values[start:stop]


def _beyond(gate: Gate, measured: Float64s, batch: TokenBatch) -> tuple[Bools, Bools]:
    """What lies below and above the interval."""
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
        upper = upper + _luck(gate, batch) if gate.statistic == "ratio" else upper * np.exp(_luck(gate, batch))
    low = measured < lower if gate.inclusive[0] else measured <= lower
    high = measured > upper if gate.inclusive[1] else measured >= upper
    return low, high


def _luck(gate: Gate, batch: TokenBatch) -> Float64s:
    """Minus the log of a uniform number per token or per sequence: of the seed, the row and the place alone."""
    rows = batch.rows if len(batch.rows) else np.arange(len(batch))
    key = rows.astype(np.uint64) << np.uint64(32)
    if len(batch.file):
        key = key + (batch.file.astype(np.uint64) << np.uint64(56))
    if gate.per_token:
        segments = Segments(batch.segments.offsets)
        key = segments.spread(key) + segments.places.astype(np.uint64)
    with np.errstate(over="ignore"):  # splitmix64
        key = (key + np.uint64(gate.seed or 0) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
        key ^= key >> np.uint64(31)
    luck: Float64s = -np.log(((key >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53)
    return batch.segments.from_host(luck) if gate.per_token else luck


def _trimmed(gate: Gate, values: NDArray[Any], view: Selection, batch: TokenBatch) -> Bools:
    """What is dropped of the batch: by the thresholds of its steps, where it holds parts of them, else by itself."""
    seen = np.asarray(view.expanded())
    if gate in batch.trims:
        reached = np.asarray(values) >= np.asarray(batch.segments.spread(batch.trims[gate]))
        return reached & seen
    known = np.where(np.isnan(values), np.inf, values)
    least, number, _ = Trim(gate).with_values(known[seen]).ends()
    dropped: Bools = seen & (known > least)
    dropped[np.flatnonzero(seen & (known == least))[:number]] = True  # of equal ones the first go
    return dropped


def _rejected(
    gate: Gate, flags: Bools, segments: Segments, view: Selection, batch: TokenBatch, ratios: Ratios
) -> Selection:
    """The tokens that `flags` (per token, or per segment) reject, as a selection over the batch's sequences."""
    if gate.per_token:
        tokens = flags & view.expanded() if gate.sees == "remaining" else flags
    elif gate.over == "segment":
        tokens = segments.spread(flags & (view.counts > 0))
    else:
        flags = flags & (view.counts > 0)
        if gate.when == "always":
            return Selection(batch.segments, flags)
        tokens = batch.segments.spread(flags)
    if gate.when != "always":
        tokens = tokens & _open_to(gate, batch, ratios)
    return Selection(batch.segments, batch.segments.sum(tokens) > 0, tokens)


def _open_to(gate: Gate, batch: TokenBatch, ratios: Ratios) -> Bools:
    """The tokens that the gate may reject [T]."""
    if batch.advantages is None:
        raise KeyError("advantages")
    if gate.when == "drifting":
        return np.sign(ratios.log_ratio) * batch.advantages > 0
    if gate.when == "positive_advantage":
        return batch.advantages > 0
    return batch.advantages <= 0 if gate.when == "nonpositive_advantage" else batch.advantages < 0
