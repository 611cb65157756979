"""Rejection and effective sample size at response lengths that the dump does not have.

Whole sequences are scaled (`growth`): sequence-level rejection grows with the length, geometric rejection shrinks
towards what drift and the biases of sequences alone do. For gates on a sequence's smallest or largest ratio, tokens
beyond the bound come at a rate of each sequence's own (`survival`). The model is tried on the dump: it is shown the
first tokens and predicts the rest. What it misses there, by doubling of the length, widens the interval as far as the
length asked for lies beyond the dump's; where that leaves nothing to say, nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.correction.apply import gate_bounds
from mismatchctl.predict.growth import sums_at
from mismatchctl.predict.prediction import BackTest, Prediction, generator, middle, unknown
from mismatchctl.predict.sample import GRID, SequenceSample
from mismatchctl.predict.survival import survival
from mismatchctl.ratios import LOG_RATIO_BOUND

REPLICATES = 200
FEWEST = 24
"""Sequences of a length that a check needs."""
_MODEL = (
    "a sequence's log ratio drifts by minus K3 (plus bias beyond noise) a token; what it deviates from that is noise, "
    "which grows with the square root of the length, and a bias of its own, which grows with the length; tokens beyond "
    "a bound come at a rate of each sequence's own. The interval is that of as many responses as the dump has"
)
LEAST_MISS, LEAST_MISS_OF_EXTREMES = 0.15, 0.35
"""What the model is taken to miss by a doubling of the length where the check shows less, in standard normal units:
of gates on a whole sequence, and of those on its smallest or largest ratio."""
WIDEST = 0.9
"""An interval wider than this says nothing: the prediction is refused."""
_BAD_MISS = 0.10
_NORMAL = NormalDist()


def at_length(sample: SequenceSample, correction: Correction, length: int) -> list[Prediction]:
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
    extremes = any(gate.level not in _SUMMED for gate in gates)
    weights = _resampled(sample)
    results = []
    if gates:
        rates = rejected_at(sample, gates, length, weights)
        results.append(_prediction(question, "rejected_sequences", rates, check, sample, length, extremes))
    else:
        none = Prediction(question, "rejected_sequences", 0.0, (0.0, 0.0), "no gate rejects sequences", _MODEL)
        results.append(none)
    if _weighs_sequences(correction.weight):
        assert correction.weight is not None
        draws = ess_at(sample, correction.weight, gates, length, weights)
        results.append(_prediction(question, "ess_sequence", draws, check, sample, length, extremes))
    return results


def _refused(gate: Gate) -> str:
    plain = gate.source == "train/rollout" and gate.is_usual and gate.sees == "original"
    if gate.statistic == "ratio" and gate.level != "mean" and plain:
        return ""
    return f"not modelled: {gate.title}"


def _weighs_sequences(weight: Weight | None) -> bool:
    return weight is not None and weight.level != "token" and weight.source == "train/rollout" and weight.is_usual


def _prediction(
    question: str,
    quantity: str,
    draws: Float64s,
    check: BackTest | None,
    sample: SequenceSample,
    length: int,
    extremes: bool,
) -> Prediction:
    """From the value (first) and its replicates, widened by what the model is known to miss, and by luck."""
    value, shown = float(draws[0]), _shown(sample)
    doublings = max(math.log2(length / shown), 0.0)
    least = LEAST_MISS_OF_EXTREMES if extremes else LEAST_MISS
    miss = max(least, check.miss if check is not None else 0.0) * max(doublings, 0.5)
    low, high = _widened(value, middle(draws[1:]), miss, len(sample))
    if high - low > WIDEST:
        why = f"{length:,} tokens are {doublings:.0f} doublings beyond the dump's {shown:,}"
        if check is not None:
            why += f", and its own longer responses are missed by {check.error:.0%}"
        return unknown(question, quantity, f"refused: anything from {low:.0%} to {high:.0%} fits; {why}", _MODEL, check)
    status = "ok" if check is not None else "not checked: no response is twice as long as enough others"
    if check is not None and check.excess > _BAD_MISS:
        status = (
            f"the model misses: by {check.excess:.0%} on this dump's own longer responses, which the interval holds"
        )
    if not sample.is_complete:
        status = f"{status}; from a subsample of the prompts"
    return Prediction(question, quantity, value, (low, high), status, _MODEL, check)


def _shown(sample: SequenceSample) -> int:
    """The longest of GRID that enough responses reach; else the longest response."""
    reached = [int(tokens) for tokens in GRID if (sample.tokens >= tokens).sum() >= FEWEST]
    return max(reached) if reached else int(sample.tokens.max())


def _widened(value: float, drawn: tuple[float, float], miss: float, sequences: int) -> tuple[float, float]:
    """The interval of a fraction of so many sequences, `miss` standard deviations wider on the normal's scale."""
    least = 0.5 / sequences  # nothing is as impossible as never seen
    value, low, high = (min(max(fraction, least), 1 - least) for fraction in (value, *drawn))
    centre = _NORMAL.inv_cdf(value)
    luck = math.sqrt(value * (1 - value) / sequences) / _NORMAL.pdf(centre)
    spread = 1.645 * math.hypot(miss, luck)
    ends = (
        _NORMAL.cdf(centre - math.hypot(centre - _NORMAL.inv_cdf(low), spread)),
        _NORMAL.cdf(centre + math.hypot(_NORMAL.inv_cdf(high) - centre, spread)),
    )
    return 0.0 if ends[0] < least else ends[0], 1.0 if ends[1] > 1 - least else ends[1]


def _resampled(sample: SequenceSample) -> Float64s:
    """Weights of sequences in replicates [1 + REPLICATES, S]: the dump itself first, then the Bayesian bootstrap."""
    clusters, where = np.unique(sample.cluster, return_inverse=True)
    drawn = generator(clusters, "length").standard_gamma(1.0, (REPLICATES, len(clusters)))
    return np.concatenate([np.ones((1, len(sample))), drawn[:, where]])


def rejected_at(sample: SequenceSample, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """Fraction of sequences of `length` tokens that the gates reject, in each replicate [R]."""
    kept = _kept_at(sample, gates, length, weights)
    return np.asarray(1 - (weights * kept).sum(axis=1) / weights.sum(axis=1))


def ess_at(sample: SequenceSample, weight: Weight, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """ESS of sequence weights at `length` tokens, as a fraction of sequences, in each replicate [R]."""
    log_ratio = sums_at(sample, length, weights) / (length if weight.level == "geometric" else 1)
    ratio = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    lower, upper = weight.bounds
    bounded = np.where((ratio < lower) | (ratio > upper), 0.0, ratio) if weight.zero else np.clip(ratio, lower, upper)
    kept = weights * _kept_at(sample, gates, length, weights)
    squares = (kept * bounded**2).sum(axis=1) * weights.sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nan_to_num((kept * bounded).sum(axis=1) ** 2 / squares))


def _kept_at(sample: SequenceSample, gates: Sequence[Gate], length: int, weights: Float64s) -> Float64s:
    """Chance that each sequence is kept at `length` tokens, in each replicate [R, S]."""
    kept = np.ones((len(weights), len(sample)))
    totals = sums_at(sample, length, weights) if any(gate.level in _SUMMED for gate in gates) else kept
    for gate in gates:
        if gate.level in _SUMMED:
            kept = kept * _is_kept(gate, totals / (length if gate.level == "geometric" else 1))
        else:
            extreme = sample.lowest if gate.level == "min" else sample.highest
            kept = kept * survival(sample, ~_is_kept(gate, extreme), length, weights)[:, None]
    return kept


_SUMMED = ("sequence", "geometric")


def _is_kept(gate: Gate, log_ratio: Float64s) -> Bools:
    """Whether a gate keeps sequences of such log ratios."""
    low, high = gate_bounds(gate)
    above = log_ratio >= low if gate.inclusive[0] else log_ratio > low
    below = log_ratio <= high if gate.inclusive[1] else log_ratio < high
    return above & below


def _check(sample: SequenceSample, gates: Sequence[Gate]) -> BackTest | None:
    """Predict rejection at two and four times the first tokens from these; None where too few sequences are so long."""
    octaves = [octave for octave in range(len(GRID) - 1) if (sample.tokens >= GRID[octave + 1]).sum() >= FEWEST]
    if not octaves:
        return None
    doubled = [octave for octave in octaves if octave + 1 in octaves]
    start = doubled[-1] if doubled else octaves[-1]
    points = [point for octave in (start + 1, start + 2) for point in _check_points(sample, gates, start, octave)]
    lengths, predicted, observed, sequences, noise = zip(*points, strict=True)
    return BackTest(int(GRID[start]), lengths, predicted, observed, sequences, noise)


def _check_points(
    sample: SequenceSample, gates: Sequence[Gate], start: int, octave: int
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
