"""Rejection and effective sample size at response lengths that the dump does not have.

Whole sequences are scaled: what a sequence's log ratio adds up to beyond its expected drift grows with the square
root of its length, the drift with the length itself. Sequence-level rejection therefore grows, geometric rejection
shrinks towards what the drift alone does. The drift of a step is minus its K3 (as it must be where the rollout's
log-probs are those that sampled, and far less noisy than the mean log ratio) plus the part of the mean ratio's
deviation from 1 that is no noise; what comes after the dump's lengths follows its later tokens as far as these differ
beyond noise. For gates on a sequence's smallest or largest ratio, each sequence has a rate of its own at which
tokens go beyond the bound: rates are gamma distributed, fitted to when that first happens (Lomax's law).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.correction.apply import gate_bounds
from mismatchctl.predict.prediction import Check, Prediction, generator, middle, unknown
from mismatchctl.predict.sample import GRID, Sample
from mismatchctl.ratios import LOG_RATIO_BOUND

REPLICATES = 200
FEWEST = 24
"""Sequences of a length that a check needs."""
_MODEL = (
    "a sequence's log ratio drifts by minus K3 (plus bias beyond noise) a token and spreads with the square root of "
    "its length; tokens beyond a bound come at a rate of each sequence's own"
)
_LARGEST_K3 = 1.0  # beyond it the mean ratio says nothing, and the drift is the mean log ratio


def at_length(sample: Sample, correction: Correction, length: int) -> list[Prediction]:
    """`rejected_sequences`, and `ess_sequence` where the correction weighs whole sequences, at a response length.

    Args:
        sample: of one run.
        correction: its gates and weight; token gates reject no sequence and are left out.
        length: valid tokens per response.

    Returns:
        Predictions with the check of the model on the dump; without a value where a gate or weight is not modelled.
    """
    question = f"{length:,} tokens a response"
    gates = [gate for gate in correction.gates if gate.level != "token"]
    refused = next((why for gate in gates if (why := _refused(gate))), "")
    wanted = ["rejected_sequences", *(["ess_sequence"] if _weighs_sequences(correction.weight) else [])]
    if refused or len(sample) < FEWEST:
        why = refused or f"{len(sample)} sequences: too few"
        return [unknown(question, quantity, why, _MODEL) for quantity in wanted]
    check = _check(sample, gates) if gates else None
    weights = _resampled(sample)
    results = []
    if gates:
        rates = rejected_at(sample, gates, length, weights)
        results.append(_prediction(question, "rejected_sequences", rates, check, sample))
    else:
        none = Prediction(question, "rejected_sequences", 0.0, (0.0, 0.0), "no gate rejects sequences", _MODEL)
        results.append(none)
    if _weighs_sequences(correction.weight):
        assert correction.weight is not None
        draws = ess_at(sample, correction.weight, gates, length, weights)
        results.append(_prediction(question, "ess_sequence", draws, check, sample))
    return results


def _refused(gate: Gate) -> str:
    plain = gate.source == "train/rollout" and gate.is_usual and gate.sees == "original"
    if gate.statistic == "ratio" and plain:
        return ""
    return f"not modelled: {gate.title}"


def _weighs_sequences(weight: Weight | None) -> bool:
    return weight is not None and weight.level != "token" and weight.source == "train/rollout" and weight.is_usual


def _prediction(question: str, quantity: str, draws: Float64s, check: Check | None, sample: Sample) -> Prediction:
    """From the value (first) and its replicates; the interval is widened by what the check shows the model to miss."""
    value, (low, high) = float(draws[0]), middle(draws[1:])
    miss = check.excess if check is not None else 0.0
    spread = 1.645 * miss
    low, high = (max(0.0, value - math.hypot(value - low, spread)), min(1.0, value + math.hypot(high - value, spread)))
    status = "ok" if check is not None else "not checked: no response is twice as long as enough others"
    if check is not None and miss > _BAD_MISS:
        status = f"the model misses: by {miss:.0%} on this dump's own longer responses"
    if not sample.is_complete:
        status = f"{status}; from a subsample of the prompts"
    return Prediction(question, quantity, value, (low, high), status, _MODEL, check)


_BAD_MISS = 0.10


def _resampled(sample: Sample) -> Float64s:
    """Weights of sequences in replicates [1 + REPLICATES, S]: the dump itself first, then the Bayesian bootstrap."""
    clusters, where = np.unique(sample.cluster, return_inverse=True)
    drawn = generator(clusters, "length").standard_gamma(1.0, (REPLICATES, len(clusters)))
    return np.concatenate([np.ones((1, len(sample))), drawn[:, where]])


def rejected_at(sample: Sample, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """Fraction of sequences of `length` tokens that the gates reject, in each replicate [R]."""
    kept = _kept_at(sample, gates, length, weights)
    return np.asarray(1 - (weights * kept).sum(axis=1) / weights.sum(axis=1))


def ess_at(sample: Sample, weight: Weight, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """ESS of sequence weights at `length` tokens, as a fraction of sequences, in each replicate [R]."""
    log_ratio = sums_at(sample, length, weights) / (length if weight.level == "geometric" else 1)
    ratio = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    lower, upper = weight.bounds
    bounded = np.where((ratio < lower) | (ratio > upper), 0.0, ratio) if weight.zero else np.clip(ratio, lower, upper)
    kept = weights * _kept_at(sample, gates, length, weights)
    squares = (kept * bounded**2).sum(axis=1) * weights.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nan_to_num((kept * bounded).sum(axis=1) ** 2 / squares))


def _kept_at(sample: Sample, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """Chance that each sequence is kept at `length` tokens, in each replicate [R, S]."""
    kept = np.ones((len(weights), len(sample)))
    totals = sums_at(sample, length, weights) if any(gate.level in _SUMMED for gate in gates) else kept
    for gate in gates:
        if gate.level in _SUMMED:
            kept = kept * _is_kept(gate, totals / (length if gate.level == "geometric" else 1))
        else:
            kept = kept * survival(sample, gate, length, weights)[:, None]
    return kept


_SUMMED = ("sequence", "geometric")


def _is_kept(gate: Gate, log_ratio: Float64s) -> Bools:
    """Whether a gate keeps sequences of such log ratios."""
    low, high = gate_bounds(gate)
    above = log_ratio >= low if gate.inclusive[0] else log_ratio > low
    below = log_ratio <= high if gate.inclusive[1] else log_ratio < high
    return above & below


def _step_means(sample: Sample, values: Float64s, weights: Float64s) -> Float64s:
    """Mean of `values` [S] a token in each sequence's step, in each replicate [R, S]."""
    steps, where = np.unique(sample.step, return_inverse=True)
    one_hot = np.eye(len(steps))[where]
    return (((weights * values) @ one_hot) / ((weights * sample.tokens) @ one_hot))[:, where]


def sums_at(sample: Sample, length: int, weights: Float64s) -> Float64s:
    """What each sequence's log ratio would add up to over `length` tokens, in each replicate [R, S]."""
    log_ratio, k3, excess = np.moveaxis(sample.sums[:, -1], 1, 0)
    tokens = sample.tokens.astype(np.float64)
    small = k3.sum() < _LARGEST_K3 * tokens.sum()
    trusted = -k3 if small else log_ratio
    bias = _beyond_noise(sample, (excess, tokens), weights) if small else 0.0
    drift = (_step_means(sample, trusted, weights) + bias) * length
    drift += _later(sample, 1 if small else 0, weights) * np.maximum(length - sample.tokens, 0)
    luck = log_ratio - _step_means(sample, log_ratio, weights) * sample.tokens
    return np.asarray(drift + luck * np.sqrt(length / tokens))


Mean = tuple[Float64s, Float64s]
"""A numerator and a denominator of each sequence [S]."""


def _beyond_noise(sample: Sample, mean: Mean, weights: Float64s, less: Mean | None = None) -> Float64s:
    """A mean (less another one), shrunk towards 0 by its noise over clusters (James and Stein, 1961) [R, 1]."""
    value, influence = _mean(mean, weights)
    if less is not None:
        other, other_influence = _mean(less, weights)
        value, influence = value - other, influence - other_influence
    _, where = np.unique(sample.cluster, return_inverse=True)
    error = np.sqrt((np.bincount(where, influence) ** 2).sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.maximum(0.0, 1 - (error / value) ** 2)
    return np.where(value != 0, value * share, 0.0)[:, None]


def _mean(parts: Mean, weights: Float64s) -> tuple[Float64s, Float64s]:
    """The mean in each replicate [R], and what each sequence moves it by [S]."""
    top, bottom = parts
    return (weights @ top) / (weights @ bottom), (top - top.sum() / bottom.sum() * bottom) / bottom.sum()


def _later(sample: Sample, column: int, weights: Float64s) -> Float64s:
    """What tokens after the dump's lengths add to the drift: how far later tokens differ from all [R, 1].

    Later tokens are those beyond the last length of GRID that lies within the sequence: half of it, or less.
    """
    before = (GRID[: sample.sums.shape[1]] < sample.tokens[:, None]).sum(axis=1) - 1
    seen = np.where(before >= 0, GRID[before], sample.tokens)
    first = sample.sums[np.arange(len(sample)), before, column]  # -1, the whole, where it is shorter than the grid
    whole, sign = sample.sums[:, -1, column], -1.0 if column else 1.0
    late = sign * (whole - first), (sample.tokens - seen).astype(np.float64)
    if not late[1].any():
        return np.zeros((len(weights), 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(_beyond_noise(sample, late, weights, (sign * whole, sample.tokens.astype(np.float64))))


_FRAILTIES = np.array([1e-6, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
_RATES = np.geomspace(1e-7, 1.0, 120)


def survival(sample: Sample, gate: Gate, length: int, weights: Float64s) -> Float64s:
    """Chance that no token of `length` goes beyond the bounds of a min or max gate, in each replicate [R]."""
    start, end, has_ended = _first_beyond(sample, gate)
    frailty, rate = (grid.ravel() for grid in np.meshgrid(_FRAILTIES, _RATES, indexing="ij"))

    def alive(tokens: Float64s) -> Float64s:
        return np.asarray(np.exp(-np.log1p(frailty * rate * tokens[..., None]) / frailty))

    with np.errstate(divide="ignore"):
        ended = np.log(np.maximum(alive(start) - alive(end), 1e-300))
        chances = np.where(has_ended[:, None], ended, np.log(alive(sample.tokens.astype(np.float64))))
    best = (weights @ chances).argmax(axis=1)
    return np.asarray(alive(np.array([float(length)]))[0][best])


def _first_beyond(sample: Sample, gate: Gate) -> tuple[Float64s, Float64s, Bools]:
    """Between which lengths each sequence first goes beyond the bounds, and whether it does [S]."""
    extreme = sample.lowest if gate.level == "min" else sample.highest
    beyond = ~_is_kept(gate, extreme)
    first = beyond.argmax(axis=1)
    grid = np.minimum(GRID[: beyond.shape[1]], sample.tokens[:, None])
    rows = np.arange(len(sample))
    start = np.where(first > 0, grid[rows, first - 1], 0)
    return start.astype(np.float64), grid[rows, first].astype(np.float64), beyond[:, -1]


def _check(sample: Sample, gates: Sequence[Gate]) -> Check | None:
    """Predict rejection at two and four times the first tokens from these; None where too few sequences are so long."""
    octaves = [octave for octave in range(len(GRID) - 1) if (sample.tokens >= GRID[octave + 1]).sum() >= FEWEST]
    if not octaves:
        return None
    doubled = [octave for octave in octaves if octave + 1 in octaves]
    start = doubled[-1] if doubled else octaves[-1]
    points = [point for octave in (start + 1, start + 2) for point in _check_points(sample, gates, start, octave)]
    lengths, predicted, observed, sequences, noise = zip(*points, strict=True)
    return Check(int(GRID[start]), lengths, predicted, observed, sequences, noise)


def _check_points(
    sample: Sample, gates: Sequence[Gate], start: int, octave: int
) -> list[tuple[int, float, float, int, float]]:
    """(length, predicted, observed, sequences, noise) of gates with bounds at quantiles of what is to be predicted."""
    if octave >= len(GRID) or (sample.tokens >= GRID[octave]).sum() < FEWEST:
        return []
    shown, long, length = sample.first(start), sample.first(octave), int(GRID[octave])
    points = []
    for gate in gates:
        reached = {
            "sequence": long.sums[:, -1, 0], "geometric": long.sums[:, -1, 0] / length,
            "min": long.lowest[:, -1], "max": long.highest[:, -1],
        }[gate.level]  # fmt: skip
        for bound in np.unique(np.quantile(reached, QUANTILES, method="inverted_cdf")):
            tried = gate.model_copy(update={"keep": (float(np.exp(bound)), None), "inclusive": (True, True)})
            if gate.level == "max" or gate.keep[0] is None:
                tried = gate.model_copy(update={"keep": (None, float(np.exp(bound))), "inclusive": (True, True)})
            observed = float((~_is_kept(tried, reached)).mean())
            predicted = float(rejected_at(shown, [tried], length, np.ones((1, len(shown))))[0])
            points.append((length, predicted, observed, len(long), math.sqrt(observed * (1 - observed) / len(long))))
    return points


QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Where the check puts the bounds: rejection that is to be predicted."""
