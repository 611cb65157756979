"""Predict rejection for the next batch and metrics at later steps, from a bounded sample of sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, TokenBatch
from mismatchctl.core.formatting import INTERVAL_LEVEL, format_label
from mismatchctl.core.ratios import compute_ratios
from mismatchctl.corrections.application import apply_correction
from mismatchctl.corrections.model import Correction
from mismatchctl.measure.cluster_table import Hashes, cluster_hashes, hash_values, mix_hashes
from mismatchctl.measure.reduction import split_steps
from mismatchctl.results.growth import NEAR_RISE, RampFits, step_blocks
from mismatchctl.results.model import FreshBatch

"""Level of all central intervals."""


@dataclass(frozen=True)
class BackTest:
    """Validation of the model on the dump: the rest of long responses is predicted from their first tokens.

    Attributes:
        start: number of first tokens used.
        lengths, predicted, observed: predicted lengths, and predicted and observed rejected fractions [K].
        sequences: number of responses of each length [K].
        noise: standard error of `observed` from this number [K].
    """

    start: int
    lengths: tuple[int, ...]
    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    sequences: tuple[int, ...]
    noise: tuple[float, ...]

    @property
    def error(self) -> float:
        return float(np.abs(np.subtract(self.predicted, self.observed)).mean())

    @property
    def excess(self) -> float:
        """Root mean squared difference of predicted and observed fractions beyond the noise of the observations."""
        squares = np.subtract(self.predicted, self.observed) ** 2 - np.square(self.noise)
        return float(np.sqrt(max(squares.mean(), 0.0)))

    @property
    def miss(self) -> float:
        """Typical error of the model beyond noise, on the standard normal scale, per doubling of the length."""
        predicted, observed, noise = (np.asarray(values) for values in (self.predicted, self.observed, self.noise))
        least = 0.5 / np.asarray(self.sequences)
        scores = [_normal_score(np.clip(values, least, 1 - least)) for values in (predicted, observed)]
        error = noise / _normal_density(scores[1])
        doublings = np.log2(np.asarray(self.lengths) / self.start)
        squares = ((scores[0] - scores[1]) ** 2 - error**2) / doublings**2
        return float(np.sqrt(max(squares.mean(), 0.0)))


def _normal_score(fractions: Float64s) -> Float64s:
    return np.array([NormalDist().inv_cdf(fraction) for fraction in fractions.tolist()])


def _normal_density(scores: Float64s) -> Float64s:
    return np.asarray(np.exp(-(scores**2) / 2) / np.sqrt(2 * np.pi))


@dataclass(frozen=True)
class Prediction:
    """One predicted number.

    Attributes:
        question: the case that is predicted, such as "a batch of 64 sequences".
        quantity: registry key of the metric, such as `rejected_sequences`.
        value: predicted value. If it is unknown, `status` has the reason.
        interval: central 95% interval.
        status: "ok", or a limitation.
        model: assumptions of the model.
        check: validation of the model on the dump, if possible.
    """

    question: str
    quantity: str
    value: float | None
    interval: tuple[float, float] | None
    status: str
    model: str
    check: BackTest | None = None


def unknown_prediction(
    question: str, quantity: str, status: str, model: str, check: BackTest | None = None
) -> Prediction:
    return Prediction(question, quantity, None, None, status, model, check)


def central_interval(draws: Float64s, level: float = INTERVAL_LEVEL) -> tuple[float, float]:
    """Return the central interval of draws. Its ends are drawn values."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return float(low), float(high)


def cluster_generator(keys: Hashes, purpose: str) -> np.random.Generator:
    """Return a random generator that depends on the set of clusters, not on their order."""
    return np.random.default_rng([int(np.bitwise_xor.reduce(np.unique(keys))), *purpose.encode()])


FIRST_OCTAVE, OCTAVES = 4, 17
LENGTH_GRID: Ints = 1 << np.arange(FIRST_OCTAVE, FIRST_OCTAVE + OCTAVES, dtype=np.int64)
"""Measured lengths: 16, 32, ... 2^20 tokens."""
MAX_SEQUENCES = 1 << 15
"""Maximum sequences per run. Larger runs keep the clusters with the smallest hashes."""


@dataclass(frozen=True)
class SequenceSample:
    """Sequences [S] in any order.

    Attributes:
        step: hash of the group of each.
        cluster: hash of the prompt (else of the sequence) and the group of each.
        tokens: valid tokens of each.
        kept: tokens that each correction keeps [S, corrections].
        sums: sums of log ratio, K3 and ratio minus 1 over the first tokens, by `LENGTH_GRID` [S, OCTAVES, 3]. Shorter
            sequences have the sums of all their tokens.
        lowest, highest: extremes of the log ratio over the first tokens [S, OCTAVES].
        is_complete: True if no sequence was left out because of the cap.
    """

    run: NDArray[Any]
    step: Hashes
    cluster: Hashes
    tokens: Ints
    kept: Float64s
    sums: Float64s
    lowest: Float64s
    highest: Float64s
    is_complete: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def concatenate(cls, parts: Sequence[SequenceSample]) -> SequenceSample:
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAY_FIELDS}
        return cls(**joined, is_complete=all(part.is_complete for part in parts))._cap()

    def __add__(self, other: SequenceSample) -> SequenceSample:
        return SequenceSample.concatenate([self, other])

    def of_run(self, run: str) -> SequenceSample:
        """Return the nonempty sequences of one run in a defined order."""
        chosen = self._select((self.run == run) & (self.tokens > 0))
        order = np.lexsort((chosen.sums[:, -1, 0], chosen.tokens, chosen.cluster))
        return chosen._select(order)

    def truncate(self, octave: int) -> SequenceSample:
        """Cut the sequences of at least LENGTH_GRID[octave] tokens to this length."""
        long = self._select(self.tokens >= LENGTH_GRID[octave])
        return replace(
            long,
            tokens=np.full(len(long), LENGTH_GRID[octave]),
            sums=long.sums[:, : octave + 1],
            lowest=long.lowest[:, : octave + 1],
            highest=long.highest[:, : octave + 1],
        )

    def _select(self, which: Bools | Ints) -> SequenceSample:
        return replace(self, **{name: getattr(self, name)[which] for name in _ARRAY_FIELDS})

    def _cap(self) -> SequenceSample:
        """Keep at most `MAX_SEQUENCES` of each run: whole clusters, by hash order."""
        if len(self) <= MAX_SEQUENCES:
            return self
        keep = np.zeros(len(self), np.bool_)
        for run in np.unique(self.run.astype(str)):
            own = np.flatnonzero(self.run == run)
            ranked = np.sort(self.cluster[own])
            keep[own] = self.cluster[own] <= ranked[min(MAX_SEQUENCES, len(own)) - 1]
        return replace(self._select(keep), is_complete=self.is_complete and bool(keep.all()))


_ARRAY_FIELDS = tuple(field.name for field in fields(SequenceSample) if field.name != "is_complete")


def collect_batch(batch: TokenBatch, run: str, corrections: Sequence[Correction]) -> SequenceSample:
    """Sample one batch. Rows without a run belong to `run`."""
    some = batch.segments.nonempty  # empty sequences are not predicted
    held = batch if some.all() else batch.take(np.flatnonzero(some))
    parts = [_sample_step(part, name, step, corrections) for name, (step, _), part in split_steps(held, run)]
    return SequenceSample.concatenate([empty_sample(len(corrections)), *parts])


def empty_sample(corrections: int) -> SequenceSample:
    none, flat = np.zeros(0, np.uint64), np.zeros((0, OCTAVES))
    kept = np.zeros((0, corrections))
    return SequenceSample(
        np.zeros(0, object), none, none, np.zeros(0, np.int64), kept, np.zeros((0, OCTAVES, 3)), flat, flat
    )


def _sample_step(batch: TokenBatch, run: str, step: Any, corrections: Sequence[Correction]) -> SequenceSample:
    salt = hash_values(np.array([str(step)]))[0]
    parts = [_block_statistics(block, corrections) for _, block in batch.blocks()]
    kept, sums, lowest, highest = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return SequenceSample(
        np.full(len(batch), run, object),
        np.full(len(batch), salt),
        mix_hashes(cluster_hashes(batch), salt),
        batch.segments.lengths,
        kept,
        sums,
        lowest,
        highest,
    )._cap()


def _block_statistics(
    block: TokenBatch, corrections: Sequence[Correction]
) -> tuple[Float64s, Float64s, Float64s, Float64s]:
    ratios = compute_ratios(block, {"train/rollout"}.union(*(correction.sources for correction in corrections)))
    kept = [apply_correction(correction, ratios, block).kept.counts for correction in corrections]
    own, offsets = ratios["train/rollout"], block.segments.offsets
    ends = offsets[:-1, None] + np.minimum(LENGTH_GRID, block.segments.lengths[:, None])
    sums = [_running_reduction(np.add, 0.0, values, offsets, ends) for values in (own.log_ratio, own.k3, own.excess)]
    lowest = _running_reduction(np.minimum, np.inf, own.log_ratio, offsets, ends)
    highest = _running_reduction(np.maximum, -np.inf, own.log_ratio, offsets, ends)
    return np.reshape(kept, (len(kept), len(block))).T, np.stack(sums, axis=2), lowest, highest


def _running_reduction(reduction: np.ufunc, neutral: float, values: Float64s, offsets: Ints, ends: Ints) -> Float64s:
    """Return the running sum or extreme of each sequence at `ends` [S, OCTAVES]."""
    starts = np.concatenate([offsets[:-1, None], ends[:, :-1]], axis=1)
    filled = starts < ends
    found = np.full(ends.shape, neutral)
    if filled.any():
        found[filled] = reduction.reduceat(values, starts[filled])
    return reduction.accumulate(found, axis=1)


RejectionUnit = Literal["tokens", "sequences"]
_MAX_PROMPTS = 1 << 62
"""Maximum number of prompts drawn for a batch. More prompts no longer change the draws."""
BATCH_DRAWS = 2000
STEP_PERMUTATIONS = 999
STEP_SIGNIFICANCE = 0.05
_BATCH_MODEL = (
    "a batch of sequences of the dump's prompts, each prompt with an unknown weight (Bayesian bootstrap), "
    "with half a rejected and half a kept sequence added. Without prompts this is the beta-binomial distribution"
)


def predict_batch_rejection(
    sample: SequenceSample, correction: int, sequences: int, unit: RejectionUnit = "sequences"
) -> Prediction:
    """Predict the fraction of a batch that a correction rejects. A sequence is rejected if all its tokens are.

    The interval is for the batch's own fraction: it includes the uncertainty about the population and the randomness of
    the batch. If steps differ significantly, the batch is drawn as another such step, and the status mentions it.
    """
    quantity, question = f"rejected_{unit}", f"a batch of {sequences:,} sequences"
    kept = sample.kept[:, correction]
    size = sample.tokens.astype(np.float64) if unit == "tokens" else np.ones(len(sample))
    rejected = size - kept if unit == "tokens" else (kept == 0).astype(np.float64)
    clusters, steps, table = _sum_by_cluster(sample, np.stack([rejected, size], axis=1))
    if len(clusters) < 2:
        return unknown_prediction(question, quantity, "fewer than 2 prompts", _BATCH_MODEL)
    random = cluster_generator(clusters, f"{quantity} {sequences}")
    differ = steps_differ(table, steps, cluster_generator(clusters, "permutation"))
    per_cluster = len(sample) / len(clusters)
    draws = _draw_batches(table, steps if differ else np.zeros_like(steps), per_cluster, sequences, random)
    value = float(table[:, 0].sum() / table[:, 1].sum())
    status = "ok" if sample.is_complete else "from a subsample of the prompts"
    if differ:
        status = "not stationary: the steps differ, and the next one may differ again"
    return Prediction(question, quantity, value, central_interval(draws), status, _BATCH_MODEL)


def predict_fresh_batch(
    table: Float64s,
    clusters: Hashes,
    steps: Ints,
    sequences: int,
    labels: Sequence[object],
    shares: Sequence[float | None],
    *,
    is_folded: bool,
) -> FreshBatch:
    """Predict the rejected share of tokens in a batch as large as the steps of a run.

    With enough steps, it is the share at the next step. Otherwise, a batch is drawn from the prompts.

    Args:
        table: rejected and valid tokens by cluster and step [N, 2].
        clusters: hash of each cluster [N].
        steps: index of each row's step [N].
        sequences: sequences of the run.
        labels: label of each step.
        shares: rejected share of tokens at each step.
        is_folded: True if a row may contain several clusters.
    """
    size = max(round(sequences / max(len(labels), 1)), 1)
    known = [share for share in shares if share is not None]
    constant = all(share == 0 for share in known) or all(share == 1 for share in known)
    ahead = predict_at_step("rejected_tokens", labels, shares, 1.0, is_fraction=True)
    usable = ahead.value is not None and (not constant or is_folded)
    if usable or is_folded or len(clusters) < 2:
        status = "ok" if ahead.status.startswith("no trend") else ahead.status
        return FreshBatch(sequences=size, value=ahead.value, interval=ahead.interval, status=status)
    random = cluster_generator(clusters, f"fresh batch {size}")
    differ = not constant and steps_differ(table, steps, cluster_generator(clusters, "permutation"))
    draws = _draw_batches(table, steps if differ else np.zeros_like(steps), sequences / len(clusters), size, random)
    status = "the steps differ, and the next one may differ again" if differ else "ok"
    value = float(table[:, 0].sum() / table[:, 1].sum())
    return FreshBatch(sequences=size, value=value, interval=central_interval(draws), status=status)


def _sum_by_cluster(sample: SequenceSample, columns: Float64s) -> tuple[Hashes, Ints, Float64s]:
    """Return clusters, the index of each one's step, and sums of columns by cluster."""
    clusters, first, where = np.unique(sample.cluster, return_index=True, return_inverse=True)
    table = np.zeros((len(clusters), columns.shape[1]))
    np.add.at(table, where, columns)
    return clusters, np.unique(sample.step[first], return_inverse=True)[1], table


def _draw_batches(
    table: Float64s, steps: Ints, per_cluster: float, sequences: int, random: np.random.Generator
) -> Float64s:
    """Draw the fractions of random batches, each from one step with random cluster weights."""
    prompts = min(max(round(sequences / per_cluster), 1), _MAX_PROMPTS)
    groups = [np.flatnonzero(steps == step) for step in np.unique(steps)]
    which = random.integers(0, len(groups), BATCH_DRAWS)
    fractions = np.empty(BATCH_DRAWS)
    for number, members in enumerate(groups):
        own = np.flatnonzero(which == number)
        if not len(own):
            continue
        rejected, size, prior = _add_prior(table[members], per_cluster)
        shape = np.concatenate([np.ones(len(members)), prior])
        weights = random.standard_gamma(shape, (len(own), len(shape)))
        counts = random.multinomial(prompts, weights / weights.sum(axis=1, keepdims=True))
        fractions[own] = (counts @ rejected) / (counts @ size)
    return fractions


def _add_prior(table: Float64s, per_cluster: float) -> tuple[Float64s, Float64s, Float64s]:
    """Append a rejected and a kept cluster, and return their weight.

    Each counts as half an independent sequence: a larger share of a cluster if sequences of a prompt are correlated.
    """
    rejected, size = table.T
    mean, n = size.mean(), len(table)
    fraction = rejected.sum() / size.sum()
    scatter = ((rejected - fraction * size) ** 2).sum() / size.sum() * n / max(n - 1, 1)
    alone = fraction * (1 - fraction) * mean / per_cluster  # expected spread of independent sequences
    together = float(np.clip(scatter / alone, 1.0, per_cluster)) if alone > 0 else 1.0
    ends = np.array([mean, 0.0])
    return np.append(rejected, ends), np.append(size, [mean, mean]), np.full(2, 0.5 * together / per_cluster)


def steps_differ(table: Float64s, steps: Ints, random: np.random.Generator) -> bool:
    """Test by permutation whether rejected / size [N, 2] differs between the steps of the clusters [N]."""
    count = int(steps.max(initial=0)) + 1
    if count < 2:
        return False
    residual = table[:, 0] - table[:, 0].sum() / table[:, 1].sum() * table[:, 1]
    if not residual.any():
        return False
    orders = np.stack([np.arange(len(steps)), *(random.permutation(len(steps)) for _ in range(STEP_PERMUTATIONS))])
    shuffled = residual[orders]
    one_hot = np.eye(count)[steps]
    between = ((shuffled @ one_hot) ** 2 / one_hot.sum(axis=0)).sum(axis=1)
    return bool((between >= between[0] * (1 - 1e-12)).mean() < STEP_SIGNIFICANCE)


MIN_TREND_STEPS = 8
"""Minimum number of steps for a trend."""
_TREND_MODEL = (
    "the growth model of the run: a level, a straight line and a level, of {scale}. The interval is over the "
    "lines that fit, with the scatter of the steps, which count less if neighbouring steps are correlated"
)


def predict_at_step(
    quantity: str, steps: Sequence[object], values: Sequence[float | None], ahead: float, *, is_fraction: bool = False
) -> Prediction:
    """Extrapolate a metric to `ahead` steps after the last label, if its growth continues.

    Without a change over the steps, the value is their mean and the status is "no trend". After a finished change, it
    is the level after it. Steps with labels that are not numbers are left out.
    """
    question = f"{ahead:+g} steps"
    scale = "log odds" if is_fraction else "the logarithm"
    pairs = [
        (float(step), float(value))
        for step, value in zip(steps, values, strict=True)
        if isinstance(step, (int, float)) and not isinstance(step, bool) and value is not None
    ]
    different = len({step for step, _ in pairs})
    if different < MIN_TREND_STEPS:
        return unknown_prediction(
            question,
            quantity,
            f"{different} steps with a number: too few for a trend",
            _TREND_MODEL.format(scale=scale),
        )
    x, y = np.array(sorted(pairs)).T
    if is_fraction and (y == y[0]).all() and y[0] in (0.0, 1.0):  # log odds are not finite
        model = _TREND_MODEL.format(scale=scale)
        return Prediction(question, quantity, float(y[0]), (float(y[0]), float(y[0])), "no trend", model)
    straight = _TrendScale(y, is_fraction)
    model = _TREND_MODEL.format(scale=straight.words)
    place, spread, status = _extrapolate(x, straight.transform(y), float(x[-1]) + ahead)
    low, high = (float(straight.inverse(np.array(place + side * spread))) for side in (-1, 1))
    if ahead > x[-1] - x[0] and status == "ok":
        status = f"too far: the dump spans {x[-1] - x[0]:g} steps"
    return Prediction(question, quantity, float(straight.inverse(np.array(place))), (low, high), status, model)


def _extrapolate(x: Float64s, y: Float64s, where: float) -> tuple[float, float, str]:
    """Return the value of a series at `where`, half the width of its interval, and its status."""
    ramps = RampFits.fit(x, y, np.zeros_like(y))
    best = ramps.best
    if not best.is_significant(len(y)):
        return float(y.mean()), _flat_interval_width(y), "no trend"
    left = y - ramps.evaluate(x)[int(ramps.squares.argmin())]
    effective = effective_residuals(left, len(left))
    variance = float((left**2).sum()) / (max(effective - 4, 1))
    scale = ramps.scale * len(y) / effective
    on, worse = ramps.end == len(ramps.height) - 1, (ramps.squares - ramps.squares.min()) / scale
    goes_on = bool((worse <= NEAR_RISE)[on].any())
    likely = np.exp(-worse / 2) * (on == goes_on)
    likely /= likely.sum()
    values = ramps.evaluate(np.array([where]))[:, 0]
    value = float(likely @ values)
    errors = scale * (1 / ramps.weight + (ramps.progress(np.array([where]))[:, 0] - ramps.rise) ** 2 / ramps.spread)
    width = math.sqrt(variance + float(likely @ (errors + (values - value) ** 2)))
    status = "ok" if goes_on else f"no trend since step {format_label(float(x[step_blocks(len(x))[best.end][-1]]))}"
    return value, student_quantile((1 + INTERVAL_LEVEL) / 2, max(effective - 4, 1)) * width, status


class _TrendScale:
    """Scale of a trend: log odds of fractions, the logarithm of positive values, otherwise linear."""

    def __init__(self, values: Float64s, is_fraction: bool) -> None:
        self.is_fraction = is_fraction
        self.is_log = not is_fraction and bool((values > 0).all())
        inner = values[(values > 0) & (values < 1)] if is_fraction else values
        self.edge = float(np.minimum(inner, 1 - inner).min(initial=0.5)) / 2 if is_fraction else 0.0
        self.words = "log odds" if is_fraction else "the logarithm" if self.is_log else "the value"

    def transform(self, values: Float64s) -> Float64s:
        if self.is_fraction:  # 0 and 1 are moved inside by half of the smallest observed distance
            inner = np.clip(values, self.edge, 1 - self.edge)
            return np.asarray(np.log(inner) - np.log1p(-inner))
        return np.asarray(np.log(values)) if self.is_log else values

    def inverse(self, values: Float64s) -> Float64s:
        if self.is_fraction:
            return np.asarray(1 / (1 + np.exp(-values)))
        return np.asarray(np.exp(values)) if self.is_log else values


def _flat_interval_width(y: Float64s) -> float:
    """Return half the width of the interval of one more value, without a trend."""
    effective = effective_residuals(y - y.mean(), len(y))
    variance = float(((y - y.mean()) ** 2).sum()) / max(effective - 1, 1)
    return student_quantile((1 + INTERVAL_LEVEL) / 2, effective - 1) * math.sqrt(variance * (1 + 1 / effective))


def effective_residuals(residual: Float64s, n: int) -> float:
    """Return the effective number of independent residuals, at least 4."""
    total = float((residual**2).sum())
    rho = float((residual[1:] * residual[:-1]).sum()) / total if total > 0 else 0.0
    rho = min(max(rho + (1 + 3 * rho) / n, 0.0), 0.9)  # correct the small-sample bias
    return max(n * (1 - rho) / (1 + rho), 4.0)


def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t above 1/2. With t = sqrt(freedom) tan(angle) the density is a power."""
    angles = np.linspace(0, math.pi / 2, 1 << 14)
    density = np.cos(angles).clip(0) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * probability - 1, area / area[-1], angles)))
