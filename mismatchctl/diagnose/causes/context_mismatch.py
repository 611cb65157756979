"""The trainer saw another context than the engine: largest at the start (or after a turn), fading."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import calibration, fact, loudest, percent
from mismatchctl.result import Confidence

_LONG, _Z, _SLOPE, _SURE = 24, -7.0, -0.1, -0.15
_REAL = 1e-3
_TIMES, _SURE_TIMES = 1.7, 2.0
"""The first tokens over late ones: quantized weights make up to 1.4, one lost token of the prompt 2 and more."""


def _test(case: Case) -> Detection | None:
    if case.reshaped or case.noise < _REAL:
        return None
    for boundary, place in (("response", case.place), ("turn", _since_turn(case))):
        if place is None:
            continue
        slope, z, halves = fading(case, place)
        if z < _Z and slope < _SLOPE and halves[1] < halves[0] - 0.1:
            return _diagnosis(case, boundary, place, slope, z)
    return None


def _since_turn(case: Case) -> Ints | None:
    """Tokens since the last gap in the positions [N], -1 before the first one; None where there is no gap."""
    position = case.rows.position[case.index]
    gap = np.zeros(len(position), np.bool_)
    gap[1:] = (np.diff(position) > 1) & (case.where[1:] == case.where[:-1])
    if gap.sum() < 10:
        return None
    order = np.arange(len(position))
    last = np.maximum.accumulate(np.where(gap | (case.place == 0), order, 0))
    return np.where(gap[last], order - last, -1)


def fading(case: Case, place: Ints) -> tuple[float, float, tuple[float, float]]:
    """Slope of the loudness by log2(1 + place) within sequences and its z; mean loudness of both halves."""
    used = (place >= 0) & case.doubtful & (case.each(case.counts) >= _LONG)
    if used.sum() < 500:
        return 0.0, 0.0, (0.0, 0.0)
    octaves = np.log2(1.0 + np.arange(place.max() + 1))  # of few places, more tokens are at each
    octave = np.where(used, octaves[np.maximum(place, 0)], 0.0)
    number = np.maximum(case.sums(used), 1)
    across: Float64s = (octave - case.each(case.sums(octave) / number)) * used
    up: Float64s = (case.loudness - case.each(case.sums(case.loudness * used) / number)) * used
    product, square = case.sums(across * up), case.sums(across * across)
    slope = float(product.sum() / max(square.sum(), 1e-12))
    error = float(np.sqrt(((product - slope * square) ** 2).sum())) / max(float(square.sum()), 1e-12)
    middle = np.median(place[used])
    halves = tuple(float(case.loudness[used & side].mean()) for side in (place <= middle, place > middle))
    return slope, slope / error if error > 0 else 0.0, (halves[0], halves[1])


def _diagnosis(case: Case, boundary: str, place: Ints, slope: float, z: float) -> Detection:
    size, told = np.abs(case.scaled), (place >= 0) & case.doubtful
    early, late = told & (place < 8), told & (place >= np.quantile(place, 0.75))
    first, rest = float(np.median(size[early])), float(np.median(size[late]))
    times = first / max(rest, 1e-12)
    clear = times >= _TIMES
    confidence: Confidence = "low"
    if clear:
        confidence = "high" if slope < _SURE and times >= _SURE_TIMES else "medium"
    excess, excess_z, _, _ = calibration(case)
    start = case.means(np.where(early, np.abs(case.x), 0.0))
    where = "the first tokens of the response" if boundary == "response" else "the first tokens after a turn boundary"
    return Detection(
        confidence,
        f"the difference is largest at {where} and fades: {times:.3g} times larger there than late in the response. "
        + ("The two sides saw different contexts" if clear else "Other weights, quantized ones say, show as much"),
        evidence=(
            fact("slope", slope, "of log |difference| by octave of the distance, within sequences; below 0: it fades"),
            fact("z", z, "the same in standard errors"),
            fact(
                "early_over_late",
                times,
                f"median difference (in logits) there over that of the last quarter; other contexts: {_SURE_TIMES:g} "
                "and more",
                against=not clear,
            ),
            fact(
                "ratio_mean_minus_one",
                excess,
                "E[ratio] - 1: 0 where both sides are distributions",
                against=abs(excess_z) > 5,
            ),
        ),
        where={"positions": where, "sequences": percent(float((start > np.median(np.abs(case.x))).mean()))},
        examples=loudest(case, case.counts >= _LONG, start),
        rivals={
            "edited_response": "prompt token ids of both sides, compared token by token",
            "stale_prefix": "the engine's prefix cache: is it flushed with every weight update?",
        }
        | ({} if clear else {"weights_differ": "checksums of the weights; the engine's --quantization"}),
        everywhere=clear,
    )


CAUSE = Cause(
    id="context_mismatch",
    title="The trainer saw another context",
    shows="Within a response the difference falls with the distance from its start, or from a gap between turns.",
    test=_test,
    advice="Compare the prompt's token ids of both sides: chat template applied twice or not at all, a system "
    "prompt or BOS missing, truncated prompts{settings}, thinking stripped from earlier turns, images "
    "left out, position ids that count padding.",
    pointless="importance weights: they would train a policy under a context that nobody samples from",
)
