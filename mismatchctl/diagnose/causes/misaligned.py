"""One side shifted by some positions against the other."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.edited_response import broken
from mismatchctl.diagnose.measures import fact, listed, loudest, percent, share_of
from mismatchctl.numbers import counted

FARTHEST = 32
_NEARLY_ALL, _SURE_SHARE, _TRACE = 0.8, 0.1, 0.02
_BAD, _CAP, _ENOUGH = 0.25, 1.0, 12
_AS_CHANCE, _BETTER = 0.6, 0.65
_FEWEST, _MOST_OF, _CLEAR = 2, 0.5, 0.15
_LUCK = 2.1
"""The best of 64 means of n unrelated differences is about this over the root of n below their usual one."""


def shifts(case: Case, candidates: Ints, farthest: int = FARTHEST) -> tuple[Ints, Float64s]:
    """The shift of the rollout's log-probs at which each candidate sequence agrees best, and how well, [S] each.

    A shift k says that rollout[i + k] belongs to train[i]; 0 where none is clearly better. How well is the mean
    |difference| (capped at 1 nat a token) there over that at most other shifts, where unrelated tokens meet: a
    sequence is shifted if it agrees as badly as that where it stands, and better elsewhere than chance allows.
    """
    tokens = case.segments.members(candidates)
    r, t, lengths = case.r[tokens], case.t[tokens], case.counts[candidates]
    starts = np.cumsum(lengths) - lengths
    steps = [0, *(sign * k for k in range(1, min(farthest, len(tokens) - 1) + 1) for sign in (1, -1))]
    level = np.full((len(steps), case.size), np.nan)
    for row, k in enumerate(steps):
        pairs = lengths - abs(k)
        told = pairs >= _ENOUGH
        apart = np.abs(r[max(k, 0) : len(r) + min(k, 0)] - t[max(-k, 0) : len(t) - max(k, 0)])
        running = np.append(0.0, np.cumsum(np.minimum(apart, _CAP, out=apart)))
        first, number = starts[told], pairs[told]
        level[row, candidates[told]] = (running[first + number] - running[first]) / number
    number = np.isfinite(level).sum(axis=0)
    known = number > 2
    level[:, ~known], number[~known] = 1.0, len(steps)
    ordered, every = np.sort(level, axis=0), np.arange(case.size)  # NaN comes last
    chance = (ordered[(number - 1) // 2, every] + ordered[number // 2, every]) / 2
    best = np.where(np.isnan(level), np.inf, level).argmin(axis=0)
    agreement = level[best, every] / np.maximum(chance, 1e-9)
    limit = np.minimum(_BETTER, 1 - _LUCK / np.sqrt(np.maximum(case.counts, 1)))
    found = known & (level[0] > _AS_CHANCE * chance) & (agreement < limit)
    return np.where(found, np.array(steps)[best], 0), np.where(found, agreement, 1.0)


def _test(case: Case) -> Detection | None:
    bad = case.means(np.minimum(np.abs(case.x), _CAP)) > _BAD
    candidates = np.flatnonzero(bad & (case.counts > _ENOUGH))
    if not len(candidates):
        return None
    shift, agreement = shifts(case, candidates)
    found = shift != 0
    breaks = broken(case)
    if found.sum() < _FEWEST or (breaks is not None and (found & breaks[0]).sum() > _MOST_OF * found.sum()):
        return None  # hardly any; or they agree at first, and are shifted from a position on
    values, counts = np.unique(shift[found], return_counts=True)
    order = np.argsort(-counts)
    if counts.max() < max(_FEWEST, 0.5 * found.sum()):
        return None  # each by its own shift: chance, or something else
    share = float(found.sum() / (case.counts > _ENOUGH).sum())
    if counts.max() > _NEARLY_ALL * (case.counts > _ENOUGH).sum():  # then rows too short to tell are shifted too
        shift[~found], found = values[order[0]], case.counts > 0
    tokens = found[case.sequence]
    whole = "every sequence" if share > 0.95 else f"{percent(share)} of the sequences"
    common = int(values[order[0]])
    clear = counts.max() > 0.8 * found.sum() and float(np.median(agreement[found])) < _CLEAR
    return Detection(
        "high" if share > _SURE_SHARE or clear else "low" if share < _TRACE else "medium",
        f"in {whole} the rollout's log-probs fit the trainer's {counted(abs(common), 'position')} "
        f"{'earlier' if common > 0 else 'later'}: the difference is "
        f"{1 / max(float(np.median(agreement[found])), 1e-3):.3g} times smaller there",
        share=case.share(tokens),
        evidence=(
            fact("shift", common, "rollout[i + shift] belongs to train[i]"),
            fact("shifts", listed(f"{values[i]:+d}: {counts[i]}" for i in order), "sequences by shift"),
            fact("agreement", float(np.median(agreement[found])), "mean difference at that shift over that at none"),
            share_of(
                "sequences", found, case.counts > _ENOUGH, "share of sequences long enough to tell that are shifted"
            ),
        ),
        where={"sequences": "all" if share > 0.95 else percent(share)},
        examples=loudest(case, found),
        leaves=_aligned(case, shift),
    )


def _aligned(case: Case, shift: Ints) -> Case:
    """The case with the rollout's log-probs moved to where they belong."""
    moved = np.full(len(case.rollout), np.nan)
    target = case.index + 0
    source_place = case.place + case.each(shift)
    inside = (source_place >= 0) & (source_place < case.each(case.counts))
    moved[target[inside]] = case.rollout[case.index[(case.each(case.starts) + source_place)[inside]]]
    return case.repaired(rollout=moved)


CAUSE = Cause(
    id="misaligned",
    title="The two columns are shifted against each other",
    shows="The difference is several times smaller when one column is shifted within its row.",
    test=_test,
    advice="The log-prob of token i comes from the logits at i - 1: one side slices logits[:, :-1] and the "
    "other does not, "
    "or a leading token (BOS, the first sampled token) is dropped on one side. Compare lengths and slices where the "
    "engine's log-probs are joined to the response (SGLang output_token_logprobs, vLLM logprobs; left padding too).",
    pointless="every correction: ratios of different tokens",
)
