"""Responses that were edited after sampling: agreement up to a position, none after it."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Bools, Float64s, Ints
from mismatchctl.diagnose.case import Case, once
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE
from mismatchctl.diagnose.measures import fact, listed, loudest, percent, share_of
from mismatchctl.result import Confidence

_LEAST_SIDE = 4
_T, _JUMP, _FAR, _FEW, _PERSISTENT = 6.0, 2.3, 0.4, 0.2, 0.4
_GROSS, _RATE, _CAP = 1.0, 0.3, 5.0
_SURE_SHARE, _LEAST_VARIANCE = 0.03, 0.03
_NOISY = 0.12
"""Noise of the logits elsewhere beyond which a rise within a row needs no edit."""


@once
def broken(case: Case) -> tuple[Bools, Ints] | None:
    """Sequences that agree up to a place and not after it, and those places, [S] each; None: hardly any."""
    if not len(case.x) or case.noise == 0:
        return None
    size = np.minimum(np.abs(case.x), _CAP)
    if not _may_break(case, size):
        return None
    found, split = np.zeros(case.size, np.bool_), np.zeros(case.size, np.int64)
    # By loudness, which needs no scale; and by gross differences, which temperature and truncation leave rare.
    for values, jump in ((case.loudness, _JUMP), ((size > _GROSS).astype(np.float64), _RATE)):
        at, score, difference = _changes(case, values)
        new = (score > _T) & (difference > jump) & _breaks(case, size, at) & ~found
        found, split = found | new, np.where(new, at, split)
    if found.sum() < (2 if case.noise < BFLOAT16_NOISE else 3):
        return None
    return found, split


def _test(case: Case) -> Detection | None:
    breaks = broken(case)
    if breaks is None:
        return None
    found, split = breaks
    after = case.place >= case.each(split)
    size = np.minimum(np.abs(case.x), _CAP)
    level = case.sums(size * after) / np.maximum(case.sums(after), 1)
    tokens = case.marked(after & case.each(found))
    share = float(found.sum() / max((case.counts >= 2 * _LEAST_SIDE).sum(), 1))
    examples = loudest(case, found, level)
    at = case.rows.position[case.index[np.minimum(case.starts + split, len(case.index) - 1)]]
    left = (case.counts - split)[found]
    agrees = float(np.median(np.abs(case.x[~after & case.each(found)]))) if found.any() else 0.0
    evidence = [
        share_of(
            "sequences",
            found,
            case.counts >= 2 * _LEAST_SIDE,
            "share of sequences that agree up to a position and not after it",
        ),
        fact("difference_before", agrees, "median |log ratio| before that position, nats"),
        fact("difference_after", float(level[found].mean()), "mean |log ratio| after it, nats"),
        fact("tokens_after", float(np.median(left)), "tokens from there to the end, median"),
    ]
    rest = case.without(tokens)
    noisy = rest.spread > _NOISY and "truncated_sampling" not in case.explained
    evidence.append(fact("spread_of_the_rest", rest.spread, "noise of the logits elsewhere", against=noisy))
    confidence: Confidence = "high" if share > _SURE_SHARE else "medium"
    if noisy:
        confidence = "medium" if share > 3 * _SURE_SHARE and level[found].mean() > 1 else "low"
    return Detection(
        confidence,
        f"{percent(share)} of the sequences agree up to a position (median difference {agrees:.2g} nats) and not "
        f"after it ({level[found].mean():.2g} nats): the response was changed after it was sampled",
        share=case.share(tokens),
        evidence=tuple(evidence),
        where={"sequences": percent(share), "positions": f"from {listed(at[examples], 3)} on in the examples"},
        examples=examples,
        positions=at[examples],
        rivals={
            "unsampled_tokens": "text that another model appended looks the same: look at token_ids from that "
            "position on"
        },
        leaves=None if confidence == "low" else rest,
    )


def _may_break(case: Case, size: Float64s) -> bool:
    """Whether any sequence ends on a stretch that is as far apart as `_breaks` demands."""
    running = np.append(0.0, np.cumsum(size - _FAR))
    ends = case.each(case.segments.offsets[1:])
    left = ends - np.arange(len(size))
    return bool(np.any((running[ends] - running[:-1] > -1e-6) & (left >= _LEAST_SIDE)))


def _breaks(case: Case, size: Float64s, split: Ints) -> Bools:
    """Sequences [S] that agree before their split, do not after it, and do not come back."""
    after = case.place >= case.each(split)
    half = case.place >= case.each((case.counts + split) // 2)
    level, later = (case.sums(size * part) / np.maximum(case.sums(part), 1) for part in (after, half))
    stray = case.sums((size > 0.5 * case.each(level)) * ~after) / np.maximum(case.sums(~after), 1)
    position = case.rows.position[case.index]
    apart = np.append(False, np.diff(position) != 1) & (case.place == case.each(split))  # explained tokens before it
    found: Bools = (level > _FAR) & (stray < _FEW) & (later > _PERSISTENT * level) & (case.sums(apart) == 0)
    return found


def _changes(case: Case, values: Float64s) -> tuple[Ints, Float64s, Float64s]:
    """The best split of each sequence by `values` [N]: where, its t statistic, and the jump, [S] each."""
    floor = max(0.3 * float(values.var()), _LEAST_VARIANCE)
    n = case.each(case.counts).astype(np.float64)
    starts = case.each(case.starts)
    running = np.append(0.0, np.cumsum(values))
    before = running[np.arange(len(n))] - running[starts]
    total = case.each(case.sums(values))
    k = case.place.astype(np.float64)
    inside = (k >= _LEAST_SIDE) & (n - k >= _LEAST_SIDE)
    with np.errstate(invalid="ignore", divide="ignore"):
        jump = (total - before) / (n - k) - before / k
        gain = jump * np.sqrt(k * (n - k) / n)
    gain = np.where(inside, gain, -np.inf)
    best = case.segments.max(gain)
    chosen = np.flatnonzero(np.isfinite(gain) & (gain == case.each(best)))[::-1]
    split, difference = np.zeros(case.size, np.int64), np.zeros(case.size)
    split[case.where[chosen]], difference[case.where[chosen]] = case.place[chosen], jump[chosen]
    mean = case.means(values)
    spread = case.means((values - case.each(mean)) ** 2) * case.counts
    left = np.maximum(spread - np.where(np.isfinite(best), best, 0.0) ** 2, 1e-9) / np.maximum(case.counts - 2, 1)
    return split, np.where(np.isfinite(best), best, 0.0) / np.sqrt(np.maximum(left, floor)), difference


CAUSE = Cause(
    id="edited_response",
    title="Responses were changed after sampling",
    shows="Agreement at the level of noise up to a position, gross differences from there to the end.",
    test=_test,
    advice="Train on the token ids that the engine returned. Decoding to text and tokenizing again, stripping "
    "white space, cutting at a stop string or repairing JSON changes tokens; vLLM return_token_ids and "
    "SGLang output_ids give them{settings}.",
    pointless="importance weights and vetoes: they act on tokens that were never sampled",
)
