"""One side shifted by some positions against the other."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.measures import fact, listed, loudest, percent

FARTHEST = 32
_NEARLY_ALL = 0.9
_BAD, _CAP, _BETTER, _ENOUGH = 0.25, 1.0, 0.4, 12


def shifts(case: Case, candidates: Ints, farthest: int = FARTHEST) -> tuple[Ints, Float64s]:
    """The shift of the rollout's log-probs at which each candidate sequence agrees best, and how well, [S] each.

    A shift k says that rollout[i + k] belongs to train[i]; 0 where nothing is clearly better. How well is the mean
    |difference| (capped at 1 nat a token) there over that at shift 0.
    """
    chosen = np.isin(case.where, candidates)
    where = case.where[chosen]
    size = np.minimum(np.abs(case.x[chosen]), _CAP)
    level = np.bincount(where, size, case.size) / np.maximum(np.bincount(where, minlength=case.size), 1)
    best, shift = np.ones(case.size), np.zeros(case.size, np.int64)
    r, t, n = case.r[chosen], case.t[chosen], len(where)
    for k in (sign * step for step in range(1, min(farthest, n - 1) + 1) for sign in (1, -1)):
        a, b = (slice(k, None), slice(None, -k)) if k > 0 else (slice(None, k), slice(-k, None))
        same = where[a] == where[b]
        size = np.minimum(np.abs(r[a] - t[b]), _CAP) * same
        count = np.bincount(where[b], same, case.size)
        agreement = np.bincount(where[b], size, case.size) / np.maximum(count, 1) / np.maximum(level, 1e-9)
        wins = (count >= _ENOUGH) & (agreement < best - 1e-9)
        best[wins], shift[wins] = agreement[wins], k
    shift[best > _BETTER] = 0
    return shift, best


def _test(case: Case) -> Diagnosis | None:
    bad = case.means(np.minimum(np.abs(case.x), _CAP)) > _BAD
    candidates = np.flatnonzero(bad & (case.counts > _ENOUGH))
    if len(candidates) < 2:
        return None
    shift, agreement = shifts(case, candidates)
    found = shift != 0
    if found.sum() < 2:
        return None
    values, counts = np.unique(shift[found], return_counts=True)
    order = np.argsort(-counts)
    share = float(found.sum() / (case.counts > _ENOUGH).sum())
    if counts.max() > _NEARLY_ALL * (case.counts > _ENOUGH).sum():  # then rows too short to tell are shifted too
        shift[~found], found = values[order[0]], case.counts > 0
    tokens = found[case.sequence]
    whole = "every sequence" if share > 0.95 else f"{percent(share)} of the sequences"
    common = int(values[order[0]])
    return Diagnosis(
        "high",
        f"in {whole} the rollout's log-probs fit the trainer's {abs(common)} position{'s' * (abs(common) != 1)} "
        f"{'earlier' if common > 0 else 'later'}: the difference is "
        f"{1 / max(float(np.median(agreement[found])), 1e-3):.3g} times smaller there",
        share=case.share(tokens),
        evidence=(
            fact("shift", common, "rollout[i + shift] belongs to train[i]"),
            fact("shifts", listed(f"{values[i]:+d}: {counts[i]}" for i in order), "sequences by shift"),
            fact("agreement", float(np.median(agreement[found])), "mean difference at that shift over that at none"),
            fact("sequences", share, "share of sequences long enough to tell that are shifted"),
        ),
        where={"sequences": whole},
        examples=loudest(case, found, case.means(np.abs(case.x))),
        leaves=_aligned(case, shift),
    )


def _aligned(case: Case, shift: Ints) -> Case:
    """The case with the rollout's log-probs moved to where they belong."""
    moved = np.full(len(case.rollout), np.nan)
    target = case.index + 0
    source_place = case.place + shift[case.where]
    inside = (source_place >= 0) & (source_place < case.counts[case.where])
    starts = np.cumsum(case.counts) - case.counts
    moved[target[inside]] = case.rollout[case.index[(starts[case.where] + source_place)[inside]]]
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
