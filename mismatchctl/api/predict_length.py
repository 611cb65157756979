"""Predict rejection and effective sample size at response lengths that the dump does not contain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist

import numpy as np

from mismatchctl.api.predict import (
    LENGTH_GRID,
    BackTest,
    Prediction,
    SequenceSample,
    central_interval,
    cluster_generator,
    unknown_prediction,
)
from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.formatting import INTERVAL_LEVEL
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.application import gate_bounds
from mismatchctl.corrections.labels import gate_label
from mismatchctl.corrections.model import Correction, Gate, Weight

_MAX_K3 = 1.0  # above it, the drift is the mean log ratio, because the mean ratio is not reliable
_ZERO_BIAS_SHARE = 0.01  # share of replicates without a growing bias above which the dump is assumed to have none

NOISE_COMPONENT, GROWING_NOISE_COMPONENT, BIAS_COMPONENT, GROWING_BIAS_COMPONENT = range(4)


def log_ratio_sums(sample: SequenceSample, length: int, weights: Float64s) -> Float64s:
    """Predict each sequence's sum of log ratios over `length` tokens, in each replicate [R, S]."""
    log_ratio, k3, excess = np.moveaxis(sample.sums[:, -1], 1, 0)
    tokens = sample.tokens.astype(np.float64)
    small = k3.sum() < _MAX_K3 * tokens.sum()
    trusted = -k3 if small else log_ratio
    bias = _shrink_mean(sample, (excess, tokens), weights) if small else 0.0
    drift = (_mean_per_step(sample, trusted, weights) + bias) * length
    drift += _drift_change(sample, 1 if small else 0, weights, length)
    own = log_ratio - _mean_per_step(sample, log_ratio, weights) * sample.tokens
    parts = variance_components(sample, weights)
    return np.asarray(
        drift + own * np.sqrt(_deviation_variance(parts, np.array([length])) / _deviation_variance(parts, tokens))
    )


def variance_components(sample: SequenceSample, weights: Float64s) -> Float64s:
    """Estimate the variance components of deviations from the drift, in each replicate [R, 4], at least 0.

    By index: variance of the noise per token, its growth with the position, variance of the bias of a sequence,
    variance of the bias's growth with the position. Least squares over the products of deviations of parts of a
    response (Rao's MINQUE with the weights of plain noise).
    """
    found = _fit_components(
        sample, weights, (NOISE_COMPONENT, GROWING_NOISE_COMPONENT, BIAS_COMPONENT, GROWING_BIAS_COMPONENT)
    )
    if (
        found[:, GROWING_BIAS_COMPONENT] == 0
    ).mean() >= _ZERO_BIAS_SHARE:  # it grows fastest and must not be fitted to noise
        found = _fit_components(sample, weights, (NOISE_COMPONENT, GROWING_NOISE_COMPONENT, BIAS_COMPONENT))
    return found


def _deviation_variance(parts: Float64s, tokens: Float64s) -> Float64s:
    """Return the variance of the deviation over a number of tokens, in each replicate [R, S]."""
    grown = np.stack([tokens, tokens**2 / 2, tokens**2, tokens**4 / 4])
    return np.maximum(parts @ grown, np.finfo(np.float64).tiny)


def _fit_components(sample: SequenceSample, weights: Float64s, chosen: tuple[int, ...]) -> Float64s:
    """Fit nonnegative least squares over all pairs of parts, trying all subsets of components."""
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
            gain = (solved * inner[:, subset]).sum(axis=1)  # reduction of the sum of squares
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
    """Return observed and expected products of pairs of parts, for each sequence.

    They are the products of deviations [S, P], their expectation per unit of each component [S, P, 4], and the scale
    that makes all pairs equally uncertain under plain noise [P].
    """
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
    """Return the mean of `values` [S] per token in each sequence's step, in each replicate [R, S]."""
    steps, where = np.unique(sample.step, return_inverse=True)
    one_hot = np.eye(len(steps))[where]
    return (((weights * values) @ one_hot) / ((weights * sample.tokens) @ one_hot))[:, where]


ClusterMean = tuple[Float64s, Float64s]
"""Numerator and denominator of each sequence [S]."""


def _shrink_mean(
    sample: SequenceSample, mean: ClusterMean, weights: Float64s, less: ClusterMean | None = None
) -> Float64s:
    """Return a mean (minus `less`), shrunk towards 0 by its noise over clusters (James and Stein, 1961) [R, 1]."""
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
    """Return the mean in each replicate [R], and the influence of each sequence [S]."""
    top, bottom = parts
    return (weights @ top) / (weights @ bottom), (top - top.sum() / bottom.sum() * bottom) / bottom.sum()


def _drift_change(sample: SequenceSample, column: int, weights: Float64s, length: int) -> Float64s:
    """Return the effect of a change of the drift with the position, over `length` tokens [R, S].

    If K3 grows with the position, it continues to grow in proportion to it. If K3 falls, it keeps its value for later
    tokens at lengths above the dump's. Later tokens are those after the last length of the grid within the
    sequence: half of it or less.
    """
    tokens = sample.tokens.astype(np.float64)
    before = (LENGTH_GRID[: sample.sums.shape[1]] < sample.tokens[:, None]).sum(axis=1) - 1
    seen = np.where(before >= 0, LENGTH_GRID[before], tokens)
    first = sample.sums[np.arange(len(sample)), before, column]  # -1 (the whole) for sequences shorter than the grid
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
_POWERS = (1.0, 0.7, 1.5, 2.0, 3.0)
_MIN_LIKELIHOOD_GAIN = 2.0
"""Log likelihood that another power than 1 must gain. A free parameter gains this by chance in one case of twenty."""


def survival_probability(sample: SequenceSample, beyond: Bools, length: int, weights: Float64s) -> Float64s:
    """Return the probability that no token of `length` exceeds the bounds of a gate, in each replicate [R].

    `beyond` are flags of sequences whose extreme exceeds the bounds, by LENGTH_GRID [S, OCTAVES].
    """
    start, end, has_ended = _first_exceedance(sample, beyond)
    likelihood, alive = np.full(len(weights), -np.inf), np.ones(len(weights))
    for power in _POWERS:
        found, value = _fit_survival(start, end, has_ended, length, power, weights)
        found -= _MIN_LIKELIHOOD_GAIN * (power != 1.0) * weights.mean(axis=1)
        alive, likelihood = np.where(found > likelihood, value, alive), np.maximum(found, likelihood)
    return alive


def _fit_survival(
    start: Float64s, end: Float64s, has_ended: Bools, length: int, power: float, weights: Float64s
) -> tuple[Float64s, Float64s]:
    """Return the best log likelihood in each replicate [R], and its survival probability [R]."""
    frailty, rate = (grid.ravel() for grid in np.meshgrid(_FRAILTIES, _RATES, indexing="ij"))
    scale = float(LENGTH_GRID[0]) ** (1 - power)

    def alive(tokens: Float64s) -> Float64s:
        time = scale * tokens[..., None] ** power
        return np.asarray(np.exp(-np.log1p(frailty * rate * time) / frailty))

    with np.errstate(divide="ignore"):
        ended = np.log(np.maximum(alive(start) - alive(end), 1e-300))
        chances = weights @ np.where(has_ended[:, None], ended, np.log(np.maximum(alive(end), 1e-300)))
    best = chances.argmax(axis=1)
    return chances[np.arange(len(weights)), best], alive(np.array([float(length)]))[0][best]


def _first_exceedance(sample: SequenceSample, beyond: Bools) -> tuple[Float64s, Float64s, Bools]:
    """Return the lengths between which each sequence first exceeds the bounds, and whether it does [S]."""
    first = beyond.argmax(axis=1)
    grid = np.minimum(LENGTH_GRID[: beyond.shape[1]], sample.tokens[:, None])
    rows, has_ended = np.arange(len(sample)), beyond[:, -1]
    start = np.where(first > 0, grid[rows, first - 1], 0)
    end = np.where(has_ended, grid[rows, first], sample.tokens)
    return start.astype(np.float64), end.astype(np.float64), has_ended


LENGTH_REPLICATES = 200
MIN_CHECK_SEQUENCES = 24
"""Minimum number of sequences of a length for a validation."""
_LENGTH_MODEL = (
    "a sequence's log ratio drifts by minus K3 (plus bias beyond noise) per token. Its deviation is noise, "
    "which grows with the square root of the length, and a bias, which grows with the length. Tokens beyond "
    "a bound have a rate per sequence. The interval is for the dump's number of responses"
)
MIN_MISS, MIN_MISS_OF_EXTREMES = 0.15, 0.35
"""Minimum assumed model error per doubling of the length in standard normal units, for gates on a whole sequence and
for gates on its smallest or largest ratio.
"""
MAX_INTERVAL_WIDTH = 0.9
"""Maximum width of a 90% interval, above which the prediction is refused. The 95% interval is shown."""
_LARGE_MISS = 0.10
_STANDARD_NORMAL = NormalDist()


def predict_at_length(sample: SequenceSample, correction: Correction, length: int) -> list[Prediction]:
    """Predict `rejected_sequences`, and `ess_sequence` for sequence weights, at a response length.

    Token gates do not reject sequences and are ignored. The value is missing if a gate or weight is not modelled.
    """
    question = f"{length:,} tokens a response"
    gates = [gate for gate in correction.gates if gate.level != "token"]
    refused = next((why for gate in gates if (why := _reason_refused(gate))), "")
    wanted = ["rejected_sequences", *(["ess_sequence"] if _weighs_sequences(correction.weight) else [])]
    if refused or len(sample) < MIN_CHECK_SEQUENCES:
        why = refused or f"{len(sample)} sequences: too few"
        return [unknown_prediction(question, quantity, why, _LENGTH_MODEL) for quantity in wanted]
    check = _check_model(sample, gates) if gates else None
    extremes = any(gate.level not in _SUMMED_LEVELS for gate in gates)
    weights = _bootstrap_weights(sample)
    results = []
    if gates:
        rates = rejection_at_length(sample, gates, length, weights)
        results.append(_build_prediction(question, "rejected_sequences", rates, check, sample, length, extremes))
    else:
        none = Prediction(question, "rejected_sequences", 0.0, (0.0, 0.0), "no gate rejects sequences", _LENGTH_MODEL)
        results.append(none)
    if _weighs_sequences(correction.weight):
        assert correction.weight is not None
        draws = ess_at_length(sample, correction.weight, gates, length, weights)
        results.append(_build_prediction(question, "ess_sequence", draws, check, sample, length, extremes))
    return results


def _reason_refused(gate: Gate) -> str:
    plain = gate.source == "train/rollout" and gate.is_usual and gate.sees == "original"
    if gate.statistic == "ratio" and gate.level != "mean" and plain:
        return ""
    return f"not modelled: {gate_label(gate)}"


def _weighs_sequences(weight: Weight | None) -> bool:
    return weight is not None and weight.level != "token" and weight.source == "train/rollout" and weight.is_usual


def _build_prediction(
    question: str,
    quantity: str,
    draws: Float64s,
    check: BackTest | None,
    sample: SequenceSample,
    length: int,
    extremes: bool,
) -> Prediction:
    """Build a prediction from the value (first draw) and its replicates, adding model error and randomness."""
    value, shown = float(draws[0]), _longest_supported(sample)
    doublings = max(math.log2(length / shown), 0.0)
    smallest = MIN_MISS_OF_EXTREMES if extremes else MIN_MISS
    miss = max(smallest, check.miss if check is not None else 0.0) * max(doublings, 0.5)
    (low, high), (least, most) = (
        _widen_interval(value, central_interval(draws[1:], level), miss, len(sample), level)
        for level in (INTERVAL_LEVEL, 0.90)
    )
    if most - least > MAX_INTERVAL_WIDTH:
        why = f"{length:,} tokens are {doublings:.0f} doublings beyond the dump's {shown:,}"
        if check is not None:
            why += f", and its own longer responses are missed by {check.error:.0%}"
        return unknown_prediction(
            question, quantity, f"refused: anything from {low:.0%} to {high:.0%} fits; {why}", _LENGTH_MODEL, check
        )
    status = "ok" if check is not None else "not checked: no response is twice as long as enough others"
    if check is not None and check.excess > _LARGE_MISS:
        status = (
            f"the model misses: by {check.excess:.0%} on this dump's own longer responses, which the interval holds"
        )
    if not sample.is_complete:
        status = f"{status}; from a subsample of the prompts"
    return Prediction(question, quantity, value, (low, high), status, _LENGTH_MODEL, check)


def _longest_supported(sample: SequenceSample) -> int:
    """Return the longest grid length that enough responses reach, else the longest response."""
    reached = [int(tokens) for tokens in LENGTH_GRID if (sample.tokens >= tokens).sum() >= MIN_CHECK_SEQUENCES]
    return max(reached) if reached else int(sample.tokens.max())


def _widen_interval(
    value: float, drawn: tuple[float, float], miss: float, sequences: int, level: float
) -> tuple[float, float]:
    """Widen the interval of a fraction by `miss` standard deviations on the normal scale."""
    least = 0.5 / sequences  # an unobserved event is not impossible
    value, low, high = (min(max(fraction, least), 1 - least) for fraction in (value, *drawn))
    centre = _STANDARD_NORMAL.inv_cdf(value)
    luck = math.sqrt(value * (1 - value) / sequences) / _STANDARD_NORMAL.pdf(centre)
    spread = _STANDARD_NORMAL.inv_cdf((1 + level) / 2) * math.hypot(miss, luck)
    ends = (
        _STANDARD_NORMAL.cdf(centre - math.hypot(centre - _STANDARD_NORMAL.inv_cdf(low), spread)),
        _STANDARD_NORMAL.cdf(centre + math.hypot(_STANDARD_NORMAL.inv_cdf(high) - centre, spread)),
    )
    return 0.0 if ends[0] < least else ends[0], 1.0 if ends[1] > 1 - least else ends[1]


def _bootstrap_weights(sample: SequenceSample) -> Float64s:
    """Return weights of sequences [1 + LENGTH_REPLICATES, S]: ones, then the Bayesian bootstrap."""
    clusters, where = np.unique(sample.cluster, return_inverse=True)
    drawn = cluster_generator(clusters, "length").standard_gamma(1.0, (LENGTH_REPLICATES, len(clusters)))
    return np.concatenate([np.ones((1, len(sample))), drawn[:, where]])


def rejection_at_length(sample: SequenceSample, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """Return the fraction of sequences of `length` tokens that the gates reject, in each replicate [R]."""
    kept = _kept_probability(sample, gates, length, weights)
    return np.asarray(1 - (weights * kept).sum(axis=1) / weights.sum(axis=1))


def ess_at_length(
    sample: SequenceSample, weight: Weight, gates: Sequence[Gate], length: int, weights: Float64s
) -> Float64s:
    """Return the ESS of sequence weights at `length` tokens as a fraction of sequences, in each replicate [R]."""
    log_ratio = log_ratio_sums(sample, length, weights) / (length if weight.level == "geometric" else 1)
    ratio = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    lower, upper = weight.bounds
    bounded = np.where((ratio < lower) | (ratio > upper), 0.0, ratio) if weight.zero else np.clip(ratio, lower, upper)
    kept = weights * _kept_probability(sample, gates, length, weights)
    squares = (kept * bounded**2).sum(axis=1) * weights.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nan_to_num((kept * bounded).sum(axis=1) ** 2 / squares))


def _kept_probability(sample: SequenceSample, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """Return the probability that each sequence is kept at `length` tokens, in each replicate [R, S]."""
    kept = np.ones((len(weights), len(sample)))
    totals = log_ratio_sums(sample, length, weights) if any(gate.level in _SUMMED_LEVELS for gate in gates) else kept
    for gate in gates:
        if gate.level in _SUMMED_LEVELS:
            kept = kept * _is_kept(gate, totals / (length if gate.level == "geometric" else 1))
        else:
            extreme = sample.lowest if gate.level == "min" else sample.highest
            kept = kept * survival_probability(sample, ~_is_kept(gate, extreme), length, weights)[:, None]
    return kept


_SUMMED_LEVELS = ("sequence", "geometric")


def _is_kept(gate: Gate, log_ratio: Float64s) -> Bools:
    low, high = gate_bounds(gate)
    above = log_ratio >= low if gate.inclusive[0] else log_ratio > low
    below = log_ratio <= high if gate.inclusive[1] else log_ratio < high
    return above & below


def _check_model(sample: SequenceSample, gates: Sequence[Gate]) -> BackTest | None:
    """Check predictions for two and four times the number of first tokens used, if enough sequences are this long."""
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
    """Return (length, predicted, observed, sequences, noise) for gates with bounds at quantiles of observed values."""
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


CHECK_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Quantiles that the validation uses as bounds."""
