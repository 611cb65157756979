"""Predict rejection and ESS of corrections for data that the dump lacks: new batches, later steps, long responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, TokenBatch
from mismatchctl.core.formatting import INTERVAL_LEVEL, format_label
from mismatchctl.core.ratios import LOG_RATIO_BOUND, compute_ratios
from mismatchctl.corrections.application import apply_correction, gate_bounds
from mismatchctl.corrections.labels import gate_label
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.measure.reduction import split_steps
from mismatchctl.measure.sums import Hashes, cluster_hashes, hash_values, mix_hashes
from mismatchctl.results.growth import NEAR_RISE, Ramps, step_blocks
from mismatchctl.results.model import FreshBatch

_STANDARD_NORMAL = NormalDist()


@dataclass(frozen=True)
class BackTest:
    """Compares predicted fractions of rejected responses with the fractions in the dump, at K response lengths."""

    start: int  # the prediction only uses the first `start` tokens of each response
    lengths: tuple[int, ...]  # response length of each comparison, in tokens [K]
    predicted: tuple[float, ...]  # predicted fraction of rejected responses [K]
    observed: tuple[float, ...]  # fraction of rejected responses in the dump [K]
    sequences: tuple[int, ...]  # number of responses with at least this length [K]
    noise: tuple[float, ...]  # standard error of `observed` [K]

    @property
    def error(self) -> float:
        return float(np.abs(np.subtract(self.predicted, self.observed)).mean())

    @property
    def excess(self) -> float:
        """Return the root mean square of `predicted` - `observed`, without the part that `noise` explains."""
        squares = np.subtract(self.predicted, self.observed) ** 2 - np.square(self.noise)
        return float(np.sqrt(max(squares.mean(), 0.0)))

    @property
    def miss(self) -> float:
        """Return the prediction error per doubling of the length, in normal quantiles (probits) of the fractions."""
        predicted, observed, noise = (np.asarray(values) for values in (self.predicted, self.observed, self.noise))
        least = 0.5 / np.asarray(self.sequences)
        quantile = np.vectorize(_STANDARD_NORMAL.inv_cdf)
        scores = [quantile(np.clip(values, least, 1 - least)) for values in (predicted, observed)]
        error = noise / np.vectorize(_STANDARD_NORMAL.pdf)(scores[1])
        doublings = np.log2(np.asarray(self.lengths) / self.start)
        squares = ((scores[0] - scores[1]) ** 2 - error**2) / doublings**2
        return float(np.sqrt(max(squares.mean(), 0.0)))


@dataclass(frozen=True)
class Prediction:
    """A predicted metric, such as the rejected share of a new batch."""

    question: str  # data that the prediction is for, such as "a batch of 64 sequences"
    quantity: str  # key of the metric, such as `rejected_sequences`
    value: float | None
    interval: tuple[float, float] | None  # central 95% interval
    status: str  # "ok", a limitation of the prediction, or the reason why `value` is `None`
    model: str  # the assumptions of the prediction, in words
    check: BackTest | None = None


def central_interval(draws: Float64s, level: float = INTERVAL_LEVEL) -> tuple[float, float]:
    """Return the central interval that contains the share `level` of the draws. Each end is one of the draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return float(low), float(high)


def cluster_generator(keys: Hashes, purpose: str) -> np.random.Generator:
    """Return a random generator that is seeded with `purpose` and `keys`. The order of `keys` does not matter."""
    return np.random.default_rng([int(np.bitwise_xor.reduce(np.unique(keys))), *purpose.encode()])


FIRST_OCTAVE, OCTAVES = 4, 17
LENGTH_GRID: Ints = 1 << np.arange(FIRST_OCTAVE, FIRST_OCTAVE + OCTAVES, dtype=np.int64)
"""16, 32, ... 2^20 tokens. A SequenceSample contains sums over the first 16, 32, ... tokens of each sequence."""
MAX_SEQUENCES = 1 << 15
"""If a run has more sequences, a sample only contains the clusters with the smallest hashes."""


@dataclass(frozen=True)
class SequenceSample:
    """A sample of S sequences of a dump."""

    run: NDArray[Any]
    step: Hashes  # hash of the step of each sequence [S]
    cluster: Hashes  # hash of (step, prompt), or of (step, sequence) if the dump lacks prompts
    tokens: Ints  # number of valid tokens of each sequence
    kept: Float64s  # per sequence, the number of tokens that each correction keeps [S, corrections]
    # sums of log ratio, K3 and ratio minus 1 over the first 16, 32, ... tokens (LENGTH_GRID) of each sequence
    # [S, OCTAVES, 3]. Where a sequence is shorter, the sums are over all its tokens.
    sums: Float64s
    lowest: Float64s  # smallest log ratio of the first 16, 32, ... tokens [S, OCTAVES]
    highest: Float64s  # largest log ratio of the first 16, 32, ... tokens [S, OCTAVES]
    is_complete: bool = True  # False if sequences were left out because of MAX_SEQUENCES

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def concatenate(cls, parts: Sequence[SequenceSample]) -> SequenceSample:
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAY_FIELDS}
        return cls(**joined, is_complete=all(part.is_complete for part in parts))._limit_size()

    def __add__(self, other: SequenceSample) -> SequenceSample:
        return SequenceSample.concatenate([self, other])

    def of_run(self, run: str) -> SequenceSample:
        """Return the nonempty sequences of a run, sorted so that the order of rows in the dump does not matter."""
        chosen = self._select((self.run == run) & (self.tokens > 0))
        order = np.lexsort((chosen.sums[:, -1, 0], chosen.tokens, chosen.cluster))
        return chosen._select(order)

    def truncate(self, octave: int) -> SequenceSample:
        """Return the sequences with at least LENGTH_GRID[octave] tokens, each cut to this length."""
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

    def _limit_size(self) -> SequenceSample:
        """If a run has more than MAX_SEQUENCES sequences, keep only the clusters with the smallest hashes."""
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
    """Return the nonempty sequences of a batch as a sample. Sequences without a run name belong to `run`."""
    some, parts = batch.segments.nonempty, [empty_sample(len(corrections))]
    for name, (step, _), part in split_steps(batch if some.all() else batch.take(np.flatnonzero(some)), run):
        salt = hash_values(np.array([str(step)]))[0]
        blocks = [_block_statistics(block, corrections) for _, block in part.blocks()]
        kept, sums, lowest, highest = (np.concatenate(each) for each in zip(*blocks, strict=True))
        runs, steps = np.full(len(part), name, object), np.full(len(part), salt)
        clusters = mix_hashes(cluster_hashes(part), salt)
        parts.append(
            SequenceSample(runs, steps, clusters, part.segments.lengths, kept, sums, lowest, highest)._limit_size()
        )
    return SequenceSample.concatenate(parts)


def empty_sample(corrections: int) -> SequenceSample:
    none, flat = np.zeros(0, np.uint64), np.zeros((0, OCTAVES))
    sums, kept = np.zeros((0, OCTAVES, 3)), np.zeros((0, corrections))
    return SequenceSample(np.zeros(0, object), none, none, np.zeros(0, np.int64), kept, sums, flat, flat)


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
    """For each sequence, return the sum, minimum or maximum of its values before each index in `ends` [S, OCTAVES]."""
    starts = np.concatenate([offsets[:-1, None], ends[:, :-1]], axis=1)
    filled = starts < ends
    found = np.full(ends.shape, neutral)
    if filled.any():
        found[filled] = reduction.reduceat(values, starts[filled])
    return reduction.accumulate(found, axis=1)


RejectionUnit = Literal["tokens", "sequences"]
BATCH_DRAWS = 2000
STEP_PERMUTATIONS, _PERMUTATIONS_AT_ONCE = 999, 37
STEP_SIGNIFICANCE = 0.05
_BATCH_MODEL = (
    "batches are drawn from the dump's prompts with random weights (Bayesian bootstrap), after half a rejected and "
    "half a kept sequence are added to the dump. Without prompt ids, this is the beta-binomial distribution"
)


def predict_batch_rejection(
    sample: SequenceSample, correction: int, sequences: int, unit: RejectionUnit = "sequences"
) -> Prediction:
    """Predict which fraction of the tokens or sequences of a new batch a correction will reject.

    A sequence counts as rejected if all of its tokens are rejected. The interval covers two sources of chance: which
    prompts the dump contains, and which sequences the batch contains. If the rejected fraction differs significantly
    between steps, each simulated batch only contains sequences of one step, and `status` contains a warning.
    """
    quantity, question = f"rejected_{unit}", f"a batch of {sequences:,} sequences"
    kept = sample.kept[:, correction]
    size = sample.tokens.astype(np.float64) if unit == "tokens" else np.ones(len(sample))
    rejected = size - kept if unit == "tokens" else (kept == 0).astype(np.float64)
    clusters, first, where = np.unique(sample.cluster, return_index=True, return_inverse=True)
    if len(clusters) < 2:
        return Prediction(question, quantity, None, None, "fewer than 2 prompts", _BATCH_MODEL)
    table = np.stack([np.bincount(where, values) for values in (rejected, size)], axis=1).astype(np.float64)
    steps = np.unique(sample.step[first], return_inverse=True)[1]
    purpose, per_cluster = f"{quantity} {sequences}", len(sample) / len(clusters)
    value, interval, differ = _predict_batch(table, clusters, steps, per_cluster, sequences, purpose)
    status = "ok" if sample.is_complete else "from a subsample of the prompts"
    if differ:
        status = "not stationary: steps reject different shares, so the next step may differ from this prediction"
    return Prediction(question, quantity, value, interval, status, _BATCH_MODEL)


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
    """Predict which share of tokens a correction will reject in a new batch. The batch is as large as an average step.

    `shares` contains the rejected share of each step, and the prediction continues its trend. Batches of prompts are
    simulated instead with fewer than MIN_TREND_STEPS steps, or if all shares are 0 or all are 1, unless `is_folded`.
    `table`: rejected and valid tokens of each cluster [clusters, 2]. If `is_folded`, some clusters are merged.
    """
    size = max(round(sequences / max(len(labels), 1)), 1)
    known = [share for share in shares if share is not None]
    constant = all(share == 0 for share in known) or all(share == 1 for share in known)
    ahead = predict_at_step("rejected_tokens", labels, shares, 1.0)
    usable = ahead.value is not None and (not constant or is_folded)
    if usable or is_folded or len(clusters) < 2:
        status = "ok" if ahead.status.startswith("no trend") else ahead.status
        return FreshBatch(sequences=size, value=ahead.value, interval=ahead.interval, status=status)
    steps, per_cluster = np.zeros_like(steps) if constant else steps, sequences / len(clusters)
    value, interval, differ = _predict_batch(table, clusters, steps, per_cluster, size, f"fresh batch {size}")
    status = "some steps reject significantly more than others, so the next step may too" if differ else "ok"
    return FreshBatch(sequences=size, value=value, interval=interval, status=status)


def _predict_batch(
    table: Float64s, clusters: Hashes, steps: Ints, per_cluster: float, sequences: int, purpose: str
) -> tuple[float, tuple[float, float], bool]:
    """Return the predicted rejected fraction of a batch, its interval, and True if steps differ significantly."""
    differ = steps_differ(table, steps, cluster_generator(clusters, "permutation"))
    own = steps if differ else np.zeros_like(steps)
    draws = _draw_batches(table, own, per_cluster, sequences, cluster_generator(clusters, purpose))
    return float(table[:, 0].sum() / table[:, 1].sum()), central_interval(draws), differ


def _draw_batches(
    table: Float64s, steps: Ints, per_cluster: float, sequences: int, random: np.random.Generator
) -> Float64s:
    """Simulate BATCH_DRAWS batches, each from the clusters of one step. Return the rejected share of each batch."""
    prompts = min(max(round(sequences / per_cluster), 1), 1 << 62)  # multinomial() takes at most 2^63 - 1
    groups = [np.flatnonzero(steps == step) for step in np.unique(steps)]
    which = random.integers(0, len(groups), BATCH_DRAWS)
    fractions = np.empty(BATCH_DRAWS)
    for number, members in enumerate(groups):
        own = np.flatnonzero(which == number)
        if not len(own):
            continue
        rejected, size, prior = _add_prior(table[members], per_cluster)
        if prompts <= len(members):
            picks = _draw_from_urn(len(members), prior, (prompts, len(own)), random)
            fractions[own] = rejected[picks].sum(axis=0) / size[picks].sum(axis=0)
        else:
            weights = random.standard_gamma(np.append(np.ones(len(members)), [prior, prior]), (len(own), len(size)))
            counts = random.multinomial(prompts, weights / weights.sum(axis=1, keepdims=True))
            fractions[own] = (counts @ rejected) / (counts @ size)
    return fractions


def _draw_from_urn(clusters: int, prior: float, shape: tuple[int, int], random: np.random.Generator) -> Ints:
    """Draw a cluster for each prompt of each batch [prompts, batches] (Polya's urn, like random Dirichlet weights)."""
    start = clusters + 2 * prior
    picks = random.random(shape) * (start + np.arange(shape[0]))[:, None]
    for pick in picks:
        again = np.flatnonzero(pick >= start)
        pick[again] = picks[(pick[again] - start).astype(np.int64), again]
    return np.where(picks < clusters, picks, clusters + (picks >= clusters + prior)).astype(np.int64)


def _add_prior(table: Float64s, per_cluster: float) -> tuple[Float64s, Float64s, float]:
    """Append two clusters to `table`: rejected and kept. Return the two columns, and the weight of a new cluster."""
    rejected, size = table.T
    mean, n = size.mean(), len(table)
    fraction = rejected.sum() / size.sum()
    scatter = ((rejected - fraction * size) ** 2).sum() / size.sum() * n / max(n - 1, 1)
    alone = fraction * (1 - fraction) * mean / per_cluster  # scatter if sequences were independent
    together = float(np.clip(scatter / alone, 1.0, per_cluster)) if alone > 0 else 1.0
    ends = np.array([mean, 0.0])
    return np.append(rejected, ends), np.append(size, [mean, mean]), 0.5 * together / per_cluster


def steps_differ(table: Float64s, steps: Ints, random: np.random.Generator) -> bool:
    """Return True if the rejected share differs significantly between steps (permutation test over clusters)."""
    count = int(steps.max(initial=0)) + 1
    if count < 2:
        return False
    residual = table[:, 0] - table[:, 0].sum() / table[:, 1].sum() * table[:, 1]
    if not residual.any():
        return False
    one_hot = np.eye(count)[steps]

    def between(values: Float64s) -> Float64s:
        return np.asarray(((values @ one_hot) ** 2 / one_hot.sum(axis=0)).sum(axis=-1))

    limit, as_large = between(residual) * (1 - 1e-12), 1
    for _ in range(0, STEP_PERMUTATIONS, _PERMUTATIONS_AT_ONCE):  # stops early if the p-value is clearly too large
        orders = np.stack([random.permutation(len(steps)) for _ in range(_PERMUTATIONS_AT_ONCE)])
        as_large += int((between(residual[orders]) >= limit).sum())
        if as_large >= STEP_SIGNIFICANCE * (STEP_PERMUTATIONS + 1):
            return False
    return True


MIN_TREND_STEPS = 8
"""Minimum number of steps to predict a trend."""
_TREND_MODEL = (
    "the log odds of the share are constant, then change along a straight line, and then are constant again. The "
    "interval covers all lines that fit, and the scatter of the steps, corrected for correlated neighboring steps"
)


def predict_at_step(quantity: str, steps: Sequence[object], shares: Sequence[float | None], ahead: float) -> Prediction:
    """Predict the metric `quantity` for a step that comes `ahead` steps after the last step of the dump.

    If the metric still grows or falls at the last step, the prediction continues this trend. Otherwise, the prediction
    is the level after the last change, or the mean over all steps if the metric never changed.
    """
    question = f"{ahead:+g} steps"
    pairs = [
        (float(step), float(share))
        for step, share in zip(steps, shares, strict=True)
        if isinstance(step, (int, float)) and not isinstance(step, bool) and share is not None
    ]
    different = len({step for step, _ in pairs})
    if different < MIN_TREND_STEPS:
        why = f"{different} numbered steps are too few for a trend"
        return Prediction(question, quantity, None, None, why, _TREND_MODEL)
    x, y = np.array(sorted(pairs)).T
    if (y == y[0]).all() and y[0] in (0.0, 1.0):  # 0 and 1 have no finite log odds
        return Prediction(question, quantity, float(y[0]), (float(y[0]), float(y[0])), "no trend", _TREND_MODEL)
    inner = y[(y > 0) & (y < 1)]  # move 0 and 1 inwards by half of the smallest distance of other shares from them
    edge = float(np.minimum(inner, 1 - inner).min(initial=0.5)) / 2
    inner = np.clip(y, edge, 1 - edge)
    place, spread, status = _extrapolate(x, np.log(inner) - np.log1p(-inner), float(x[-1]) + ahead)
    value, low, high = (1 / (1 + np.exp(-np.array([place, place - spread, place + spread])))).tolist()
    if ahead > x[-1] - x[0] and status == "ok":
        status = f"unreliable, because the dump spans only {x[-1] - x[0]:g} steps"
    return Prediction(question, quantity, value, (low, high), status, _TREND_MODEL)


def _extrapolate(x: Float64s, y: Float64s, where: float) -> tuple[float, float, str]:
    """Fit a trend to y(x). Return the predicted y at x = `where`, half the width of its interval, and a status."""
    ramps = Ramps.fit(x, y)
    if not ramps.has_change(len(y)):
        effective = effective_residuals(y - y.mean(), len(y))
        variance = float(((y - y.mean()) ** 2).sum()) / max(effective - 1, 1)
        t = student_quantile((1 + INTERVAL_LEVEL) / 2, effective - 1)
        return float(y.mean()), t * math.sqrt(variance * (1 + 1 / effective)), "no trend"
    left = y - ramps.evaluate(x)[ramps.best]
    effective = effective_residuals(left, len(left))
    variance = float((left**2).sum()) / (max(effective - 4, 1))
    scale = ramps.scale * len(y) / effective
    on, worse = ramps.end == len(ramps.where) - 1, (ramps.squares - ramps.squares.min()) / scale
    goes_on = bool((worse <= NEAR_RISE)[on].any())
    likely = np.exp(-worse / 2) * (on == goes_on)
    likely /= likely.sum()
    values = ramps.evaluate(np.array([where]))[:, 0]
    value = float(likely @ values)
    errors = scale * (1 / ramps.weight + (ramps.progress(np.array([where]))[:, 0] - ramps.rise) ** 2 / ramps.spread)
    width = math.sqrt(variance + float(likely @ (errors + (values - value) ** 2)))
    last = x[step_blocks(len(x))[ramps.end[ramps.best]][-1]]
    status = "ok" if goes_on else f"no trend since step {format_label(float(last))}"
    return value, student_quantile((1 + INTERVAL_LEVEL) / 2, max(effective - 4, 1)) * width, status


def effective_residuals(residual: Float64s, n: int) -> float:
    """Return how many independent values `n` residuals are worth (at least 4), if neighbors are correlated."""
    total = float((residual**2).sum())
    rho = float((residual[1:] * residual[:-1]).sum()) / total if total > 0 else 0.0
    rho = min(max(rho + (1 + 3 * rho) / n, 0.0), 0.9)  # correct the bias of `rho` in small samples
    return max(n * (1 - rho) / (1 + rho), 4.0)


def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t with `freedom` degrees of freedom, for a probability above 1/2."""
    angles = np.linspace(0, math.pi / 2, 1 << 14)
    density = np.cos(angles).clip(0) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * probability - 1, area / area[-1], angles)))


_MAX_K3 = 1.0  # if the mean K3 is larger, mean ratios are not reliable, and the drift is the mean log ratio
_ZERO_BIAS_SHARE = 0.01  # if the bias does not grow in this share of the replicates, it is assumed not to grow


def log_ratio_sums(sample: SequenceSample, length: int, weights: Float64s) -> Float64s:
    """For each bootstrap replicate, predict each sequence's sum of log ratios if it had `length` tokens [R, S]."""
    log_ratio, k3, excess = np.moveaxis(sample.sums[:, -1], 1, 0)
    tokens = sample.tokens.astype(np.float64)
    small = k3.sum() < _MAX_K3 * tokens.sum()
    trusted = -k3 if small else log_ratio
    bias = _shrink_mean(sample, (excess, tokens), weights) if small else 0.0
    drift = (_mean_per_step(sample, trusted, weights) + bias) * length
    drift += _drift_change(sample, 1 if small else 0, weights, length)
    own = log_ratio - _mean_per_step(sample, log_ratio, weights) * sample.tokens
    parts = variance_components(sample, weights)
    grown = _deviation_variance(parts, np.array([length])) / _deviation_variance(parts, tokens)
    return np.asarray(drift + own * np.sqrt(grown))


def variance_components(sample: SequenceSample, weights: Float64s) -> Float64s:
    """Estimate why sums of log ratios vary between responses: four variance components per bootstrap replicate [R, 4].

    The components are independent noise of each token, the growth of this noise with the position, a bias shared by
    all tokens of a response, and the growth of this bias. They fit covariances of response parts (Rao's MINQUE).
    """
    found = _fit_components(sample, weights, (0, 1, 2, 3))
    if (found[:, 3] == 0).mean() >= _ZERO_BIAS_SHARE:  # otherwise the growth of the bias would be fitted to noise
        found = _fit_components(sample, weights, (0, 1, 2))
    return found


def _deviation_variance(parts: Float64s, tokens: Float64s) -> Float64s:
    """Return the variance of a response's summed log ratio at each length, from `variance_components` [R, lengths]."""
    grown = np.stack([tokens, tokens**2 / 2, tokens**2, tokens**4 / 4])
    return np.maximum(parts @ grown, np.finfo(np.float64).tiny)


def _fit_components(sample: SequenceSample, weights: Float64s, chosen: tuple[int, ...]) -> Float64s:
    """Fit the `chosen` variance components (at least 0) by least squares, and set the other components to 0 [R, 4]."""
    products, expected, scale = _part_moments(sample)
    observed = (weights @ products) * scale
    design = np.tensordot(weights, expected[:, :, chosen], 1) * scale[:, None]
    size = np.sqrt((design[0] ** 2).sum(axis=0))
    design /= np.where(size > 0, size, 1.0)
    gram, inner = np.einsum("rpk,rpl->rkl", design, design), np.einsum("rpk,rp->rk", design, observed)
    best, gained = np.zeros((len(weights), len(chosen))), np.zeros(len(weights))
    for count in range(1, len(chosen) + 1):
        for subset in combinations(range(len(chosen)), count):
            own = gram[:, subset][:, :, subset] + _RIDGE * np.eye(count)
            solved = np.linalg.solve(own, inner[:, subset][:, :, None])[:, :, 0]
            gain = (solved * inner[:, subset]).sum(axis=1)  # how much the fit reduces the sum of squares
            better = (solved >= 0).all(axis=1) & (gain > gained)
            gained = np.where(better, gain, gained)
            filled = np.zeros_like(best)
            filled[:, subset] = solved
            best = np.where(better[:, None], filled, best)
    found = np.zeros((len(weights), 4))
    found[:, chosen] = best / np.where(size > 0, size, 1.0)
    return found


_RIDGE = 1e-9


def _part_moments(sample: SequenceSample) -> tuple[Float64s, Float64s, Float64s]:
    """Return a regression's target [S, P], design matrix [S, P, 4] and weights [P] for P pairs of response parts."""
    ends = np.minimum(LENGTH_GRID[: sample.sums.shape[1]], sample.tokens[:, None]).astype(np.float64)
    ends[:, -1] = sample.tokens
    starts = np.concatenate([np.zeros((len(sample), 1)), ends[:, :-1]], axis=1)
    filled = (ends > starts).any(axis=0)
    starts, ends = starts[:, filled], ends[:, filled]
    tokens, places = ends - starts, (ends**2 - starts**2) / 2
    log_ratio = np.diff(sample.sums[:, :, 0], axis=1, prepend=0.0)[:, filled]
    mean = _mean_per_step(sample, sample.sums[:, -1, 0], np.ones((1, len(sample))))[0]
    deviation = log_ratio - mean[:, None] * tokens
    deviation -= deviation.sum(axis=0) / tokens.sum(axis=0) * tokens
    first, second = np.triu_indices(tokens.shape[1])
    product, same = tokens[:, first] * tokens[:, second], first == second
    adds = [tokens[:, first] * same, places[:, first] * same, product, places[:, first] * places[:, second]]
    scale = 1 / np.sqrt(np.maximum(product.sum(axis=0) * (1 + same), 1.0))
    return deviation[:, first] * deviation[:, second], np.stack(adds, axis=2), scale


def _mean_per_step(sample: SequenceSample, values: Float64s, weights: Float64s) -> Float64s:
    """For each replicate, return the mean per token in the step of each sequence [R, S], from sums `values` [S]."""
    steps, where = np.unique(sample.step, return_inverse=True)
    one_hot = np.eye(len(steps))[where]
    return (((weights * values) @ one_hot) / ((weights * sample.tokens) @ one_hot))[:, where]


ClusterMean = tuple[Float64s, Float64s]
"""(numerators [S], denominators [S]): a mean is the sum of numerators over the sum of denominators."""


def _shrink_mean(
    sample: SequenceSample, mean: ClusterMean, weights: Float64s, less: ClusterMean | None = None
) -> Float64s:
    """Return `mean` minus `less` per replicate [R, 1], shrunk towards 0 if it is noisy (James and Stein, 1961)."""
    value, influence = _replicate_means(mean, weights)
    if less is not None:
        other, other_influence = _replicate_means(less, weights)
        value, influence = value - other, influence - other_influence
    _, where = np.unique(sample.cluster, return_inverse=True)
    error = np.sqrt((np.bincount(where, influence) ** 2).sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.maximum(0.0, 1 - (error / value) ** 2)
    return np.where(value != 0, value * share, 0.0)[:, None]


def _replicate_means(parts: ClusterMean, weights: Float64s) -> tuple[Float64s, Float64s]:
    """Return the mean in each bootstrap replicate [R], and how much each sequence shifts the mean [S]."""
    top, bottom = parts
    return (weights @ top) / (weights @ bottom), (top - top.sum() / bottom.sum() * bottom) / bottom.sum()


def _drift_change(sample: SequenceSample, column: int, weights: Float64s, length: int) -> Float64s:
    """Return the change [R, S] of the predicted sum of log ratios if the mean log ratio depends on the position.

    `column`: 0 for log ratio, 1 for K3. At longer lengths, a rising K3 rises further, and other means stay constant.
    """
    tokens = sample.tokens.astype(np.float64)
    before = (LENGTH_GRID[: sample.sums.shape[1]] < sample.tokens[:, None]).sum(axis=1) - 1
    seen = np.where(before >= 0, LENGTH_GRID[before], tokens)
    first = sample.sums[np.arange(len(sample)), before, column]  # up to 16 tokens: index -1, the sum over all tokens
    whole, sign = sample.sums[:, -1, column], -1.0 if column else 1.0
    late = sign * (whole - first), tokens - seen
    if not late[1].any():
        return np.zeros((len(weights), 1))
    place = _replicate_means((tokens**2 / 2, tokens), weights)[0][:, None]
    apart = _replicate_means(((tokens**2 - seen**2) / 2, late[1]), weights)[0][:, None] - place
    with np.errstate(invalid="ignore", divide="ignore"):
        differ = np.nan_to_num(_shrink_mean(sample, late, weights, (sign * whole, tokens)))
        growing = differ / apart * (length**2 / 2 - place * length)
    grows = (differ < 0) & bool(column) & (apart > 0)
    return np.where(grows, growing, differ * np.maximum(length - tokens, 0))


_FRAILTIES = np.array([1e-6, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
_RATES = np.geomspace(1e-7, 1.0, 100)


def survival_probability(sample: SequenceSample, beyond: Bools, length: int, weights: Float64s) -> Float64s:
    """Return the probability that all `length` tokens of a response are inside a gate's bounds, per replicate [R].

    `beyond[s, i]` is True if a token outside the bounds is among the first LENGTH_GRID[i] (16, 32, ...) tokens of s.
    """
    # the first token outside the bounds of a sequence is between its positions `start` and `end`
    first, has_ended, rows = beyond.argmax(axis=1), beyond[:, -1], np.arange(len(sample))
    grid = np.minimum(LENGTH_GRID[: beyond.shape[1]], sample.tokens[:, None])
    start = np.where(first > 0, grid[rows, first - 1], 0).astype(np.float64)
    end = np.where(has_ended, grid[rows, first], sample.tokens).astype(np.float64)
    frailty, rate = (grid.ravel() for grid in np.meshgrid(_FRAILTIES, _RATES, indexing="ij"))

    def alive(tokens: Float64s) -> Float64s:  # probability of no such token, if their rate has a gamma distribution
        return np.asarray(np.exp(-np.log1p(frailty * rate * tokens[..., None]) / frailty))

    with np.errstate(divide="ignore"):
        ended = np.log(np.maximum(alive(start) - alive(end), 1e-300))
        likelihood = weights @ np.where(has_ended[:, None], ended, np.log(np.maximum(alive(end), 1e-300)))
    return np.asarray(alive(np.array([float(length)]))[0][likelihood.argmax(axis=1)])


LENGTH_REPLICATES = 200
MIN_CHECK_SEQUENCES = 24
"""Minimum number of sequences for a prediction, and of sequences with N or more tokens for a check at N tokens."""
_LENGTH_MODEL = (
    "the log ratio of a sequence has three parts: a drift that all sequences share (about minus K3 per token), a bias "
    "of the sequence that grows with the length, and noise that grows with the square root of the length. For a veto, "
    "each sequence has its own rate of tokens outside the bound. The interval is for the dump's number of responses"
)
MIN_MISS, MIN_MISS_OF_EXTREMES = 0.15, 0.35
"""Minimum error of a prediction in probits per doubling of the length: for most gates, and for gates on min or max."""
MAX_INTERVAL_WIDTH = 0.9
"""Maximum width of a prediction's 90% interval. A prediction with a wider interval is not shown."""
_LARGE_MISS = 0.10
CHECK_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Predictions are checked for gates that have these quantiles of the observed ratios as bounds."""
_SUMMED_LEVELS = ("sequence", "geometric")


def predict_at_length(sample: SequenceSample, correction: Correction, length: int) -> list[Prediction]:
    """Predict `rejected_sequences` for responses of `length` tokens. For sequence weights, also predict `ess_sequence`.

    Gates on single tokens are ignored, because they do not reject sequences. `status` explains a missing value.
    """
    question = f"{length:,} tokens per response"
    gates, rule = [gate for gate in correction.gates if gate.level != "token"], correction.weight
    weighs = rule is not None and rule.level != "token" and rule.source == "train/rollout" and rule.is_usual
    plain = [gate for gate in gates if gate.source == "train/rollout" and gate.is_usual and gate.sees == "original"]
    modelled = [gate for gate in plain if gate.statistic == "ratio" and gate.level != "mean"]
    refused = next((gate for gate in gates if gate not in modelled), None)
    wanted = ["rejected_sequences", *(["ess_sequence"] if weighs else [])]
    if refused is not None or len(sample) < MIN_CHECK_SEQUENCES:
        why = f"{len(sample)} sequences are too few" if refused is None else f"no prediction for {gate_label(refused)}"
        return [Prediction(question, quantity, None, None, why, _LENGTH_MODEL) for quantity in wanted]
    check = _check_model(sample, gates) if gates else None
    extremes = any(gate.level not in _SUMMED_LEVELS for gate in gates)
    clusters, where = np.unique(sample.cluster, return_inverse=True)
    drawn = cluster_generator(clusters, "length").standard_gamma(1.0, (LENGTH_REPLICATES, len(clusters)))
    weights = np.concatenate([np.ones((1, len(sample))), drawn[:, where]])  # row 0: the sample, others: replicates
    results = [Prediction(question, wanted[0], 0.0, (0.0, 0.0), "no gate rejects sequences", _LENGTH_MODEL)]
    if gates:
        draws = rejection_at_length(sample, gates, length, weights)
        results = [_build_prediction(question, wanted[0], draws, check, sample, length, extremes)]
    if rule is not None and weighs:
        draws = ess_at_length(sample, rule, gates, length, weights)
        results.append(_build_prediction(question, wanted[1], draws, check, sample, length, extremes))
    return results


def _build_prediction(
    question: str, quantity: str, draws: Float64s, check: BackTest | None, sample: SequenceSample, length: int,
    extremes: bool,
) -> Prediction:  # fmt: skip
    """Build a prediction. `draws[0]` is the predicted value, the other values come from bootstrap samples."""
    reached = [int(tokens) for tokens in LENGTH_GRID if (sample.tokens >= tokens).sum() >= MIN_CHECK_SEQUENCES]
    value, shown = float(draws[0]), max(reached) if reached else int(sample.tokens.max())
    doublings = max(math.log2(length / shown), 0.0)
    smallest = MIN_MISS_OF_EXTREMES if extremes else MIN_MISS
    miss = max(smallest, check.miss if check is not None else 0.0) * max(doublings, 0.5)
    (low, high), (least, most) = (
        _widen_interval(value, central_interval(draws[1:], level), miss, len(sample), level)
        for level in (INTERVAL_LEVEL, 0.90)
    )
    if most - least > MAX_INTERVAL_WIDTH:
        why = f"{length:,} tokens are {doublings:.0f} doublings above the {shown:,} tokens that the dump reaches"
        if check is not None:
            why += f", and the prediction has an error of {check.error:.0%} on the longer responses of the dump"
        why = f"not predicted, because the interval would be {low:.0%} to {high:.0%}: {why}"
        return Prediction(question, quantity, None, None, why, _LENGTH_MODEL, check)
    status = "ok" if check is not None else "not checked, because too few responses are long enough for the check"
    if check is not None and check.excess > _LARGE_MISS:
        status = (
            f"the prediction has an error of {check.excess:.0%} on the longer responses of the dump (included "
            "in the interval)"
        )
    if not sample.is_complete:
        status = f"{status} (from a subsample of the prompts)"
    return Prediction(question, quantity, value, (low, high), status, _LENGTH_MODEL, check)


def _widen_interval(
    value: float, drawn: tuple[float, float], miss: float, sequences: int, level: float
) -> tuple[float, float]:
    """Widen the interval `drawn` of a fraction: add the noise of `sequences` responses and the model error `miss`."""
    least = 0.5 / sequences  # an event that was never observed may still happen
    value, low, high = (min(max(fraction, least), 1 - least) for fraction in (value, *drawn))
    centre = _STANDARD_NORMAL.inv_cdf(value)
    luck = math.sqrt(value * (1 - value) / sequences) / _STANDARD_NORMAL.pdf(centre)
    spread = _STANDARD_NORMAL.inv_cdf((1 + level) / 2) * math.hypot(miss, luck)
    ends = (
        _STANDARD_NORMAL.cdf(centre - math.hypot(centre - _STANDARD_NORMAL.inv_cdf(low), spread)),
        _STANDARD_NORMAL.cdf(centre + math.hypot(_STANDARD_NORMAL.inv_cdf(high) - centre, spread)),
    )
    return 0.0 if ends[0] < least else ends[0], 1.0 if ends[1] > 1 - least else ends[1]


def rejection_at_length(sample: SequenceSample, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """Predict the rejected fraction of sequences with `length` tokens, for each row of bootstrap `weights` [R]."""
    kept = _kept_probability(sample, gates, length, weights)
    return np.asarray(1 - (weights * kept).sum(axis=1) / weights.sum(axis=1))


def ess_at_length(
    sample: SequenceSample, weight: Weight, gates: Sequence[Gate], length: int, weights: Float64s
) -> Float64s:
    """Predict the ESS (0 to 1) of sequence weights if all sequences had `length` tokens, per replicate [R]."""
    log_ratio = log_ratio_sums(sample, length, weights) / (length if weight.level == "geometric" else 1)
    ratio = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    lower, upper = weight.bounds
    bounded = np.where((ratio < lower) | (ratio > upper), 0.0, ratio) if weight.zero else np.clip(ratio, lower, upper)
    kept = weights * _kept_probability(sample, gates, length, weights)
    squares = (kept * bounded**2).sum(axis=1) * weights.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nan_to_num((kept * bounded).sum(axis=1) ** 2 / squares))


def _kept_probability(sample: SequenceSample, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """Return the probability that the gates keep a sequence of `length` tokens, per replicate and sequence [R, S]."""
    kept = np.ones((len(weights), len(sample)))
    totals = log_ratio_sums(sample, length, weights) if any(gate.level in _SUMMED_LEVELS for gate in gates) else kept
    for gate in gates:
        if gate.level in _SUMMED_LEVELS:
            kept = kept * _is_kept(gate, totals / (length if gate.level == "geometric" else 1))
        else:
            extreme = sample.lowest if gate.level == "min" else sample.highest
            kept = kept * survival_probability(sample, ~_is_kept(gate, extreme), length, weights)[:, None]
    return kept


def _is_kept(gate: Gate, log_ratio: Float64s) -> Bools:
    low, high = gate_bounds(gate)
    above = log_ratio >= low if gate.inclusive[0] else log_ratio > low
    below = log_ratio <= high if gate.inclusive[1] else log_ratio < high
    return above & below


def _check_model(sample: SequenceSample, gates: Sequence[Gate]) -> BackTest | None:
    """Check predictions for long responses, made from their first half or quarter (`None` if too few are long)."""
    octaves = [
        octave
        for octave in range(len(LENGTH_GRID) - 1)
        if (sample.tokens >= LENGTH_GRID[octave + 1]).sum() >= MIN_CHECK_SEQUENCES
    ]
    if not octaves:
        return None
    doubled = [octave for octave in octaves if octave + 1 in octaves]
    start = doubled[-1] if doubled else octaves[-1]
    points = [point for octave in (start + 1, start + 2) for point in _check_points(sample, gates, start, octave)]
    lengths, predicted, observed, sequences, noise = zip(*points, strict=True)
    return BackTest(int(LENGTH_GRID[start]), lengths, predicted, observed, sequences, noise)


def _check_points(
    sample: SequenceSample, gates: Sequence[Gate], start: int, octave: int
) -> list[tuple[int, float, float, int, float]]:
    """Check predictions for several bounds per gate: (length, predicted, observed rejection, sequences, error)."""
    if octave >= len(LENGTH_GRID) or (sample.tokens >= LENGTH_GRID[octave]).sum() < MIN_CHECK_SEQUENCES:
        return []
    shown, long, length = sample.truncate(start), sample.truncate(octave), int(LENGTH_GRID[octave])
    points = []
    for gate in gates:
        reached = {
            "sequence": long.sums[:, -1, 0], "geometric": long.sums[:, -1, 0] / length,
            "min": long.lowest[:, -1], "max": long.highest[:, -1],
        }[gate.level]  # fmt: skip
        for bound in np.unique(np.quantile(reached, CHECK_QUANTILES, method="inverted_cdf")):
            tried = gate.model_copy(update={"keep": (float(np.exp(bound)), None), "inclusive": (True, True)})
            if gate.level == "max" or gate.keep[0] is None:
                tried = gate.model_copy(update={"keep": (None, float(np.exp(bound))), "inclusive": (True, True)})
            observed = float((~_is_kept(tried, reached)).mean())
            predicted = float(rejection_at_length(shown, [tried], length, np.ones((1, len(shown))))[0])
            points.append((length, predicted, observed, len(long), math.sqrt(observed * (1 - observed) / len(long))))
    return points
