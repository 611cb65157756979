"""A prefix cache that outlived a weight update: of some prompts, all responses differ at their start."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.batch import Bools
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import FLOAT32_NOISE
from mismatchctl.diagnose.measures import fact, listed, loudest, percent

_START, _PROMPTS, _TOKENS = 24, 8, 3
_LOUDER = math.log(1.4)
"""By how much the starts of those prompts are louder than what follows: alike starts have alike noise, which is not."""
_OTHER_WEIGHTS = 0.005
"""Median difference (in logits) at those starts that older weights make at the least; arithmetic may make less, as
where experts of the prompt are chosen differently."""
_EXCESS, _LATE, _Z = 0.04, 0.4, 4.5
"""Variance between prompts that chance does not make at the start, its part late in responses, and its z."""


def _test(case: Case) -> Detection | None:
    prompts = case.rows.columns.get("prompt_id")
    if prompts is None or case.reshaped or case.filled or case.noise < FLOAT32_NOISE:
        return None
    start = case.doubtful & (case.place < _START)
    rest = case.doubtful & ~start
    early, late = _between(case, start), _between(case, rest)
    if early is None or late is None:
        return None
    excess, z, levels = early
    if excess < _EXCESS or z < _Z or late[0] > _LATE * excess:
        return None
    known = np.isfinite(levels)
    high = known & (levels > np.median(levels[known]) + math.sqrt(excess))
    mine = high[case.clusters] & (case.counts > 0)
    first, then = (
        case.sums(case.loudness * part)[mine].sum() / max(case.sums(part)[mine].sum(), 1) for part in (start, rest)
    )
    size = float(np.median(np.abs(case.scaled[start & case.each(mine)])))
    if not first - then > _LOUDER or size < _OTHER_WEIGHTS:
        return None
    names = list(dict.fromkeys(prompts[mine].tolist()))
    return Detection(
        "medium",
        f"responses to the same prompt differ alike in their first {_START} tokens (by a factor of "
        f"{math.exp(math.sqrt(excess)):.3g} from prompt to prompt, chance taken out) and hardly in later ones: of some "
        "prompts the engine kept a cache of older weights, or the two sides have other prompts",
        share=0.0,
        evidence=(
            fact("between_prompts", excess, "variance of the level between prompts at the start, beyond chance"),
            fact("z", z, "the same in standard errors"),
            fact("size", size, "median difference (in logits) at the start of responses to those prompts"),
            fact("late", late[0], "the same of later tokens: older weights in all of the cache would stay"),
        ),
        where={
            "prompts": f"{listed(names, 4)} most ({percent(float(mine.mean()))} of the sequences)",
            "positions": "the start of responses",
        },
        examples=loudest(case, mine, case.sums(np.abs(case.x) * start)),
        rivals={"context_mismatch": "prompt token ids of these prompts on both sides: are some truncated?"},
    )


def _between(case: Case, part: Bools) -> tuple[float, float, np.ndarray] | None:
    """Variance of the level of some tokens [N] between prompts beyond that within, its z, and the levels by cluster.

    The z is of the levels' ranks: a few loud sequences, which have far tails where experts differ, prove nothing.
    """
    number = case.sums(part)
    told = number >= _TOKENS
    counts = np.bincount(case.clusters, told) if case.size else np.zeros(0)
    many = counts >= 2
    mine = told & many[case.clusters] if case.size else told
    groups, freedom = int(many.sum()) - 1, int(mine.sum() - many.sum())
    if groups < _PROMPTS - 1 or freedom < _PROMPTS:
        return None
    level = case.sums(case.loudness * part)[mine] / number[mine]
    ranks = np.argsort(np.argsort(level, kind="stable")).astype(np.float64)
    (between, chance, means), (ranked, by_chance, _) = (
        _spread(values, case.clusters[mine], counts, many, freedom) for values in (level, ranks)
    )
    if not (chance > 0 and by_chance > 0):
        return None
    z = math.log(max(ranked, 1e-300) / by_chance) / math.sqrt(2 / groups + 2 / freedom)  # of log F
    return between - chance, z, np.where(many, means, np.nan)


def _spread(
    values: np.ndarray, cluster: np.ndarray, counts: np.ndarray, many: Bools, freedom: int
) -> tuple[float, float, np.ndarray]:
    """Variance between the means of clusters, what chance makes of it, and the means."""
    means = np.bincount(cluster, values, len(counts)) / np.maximum(counts, 1)
    left = values - means[cluster]
    chance = float(left @ left) / freedom * float((1 / counts[many]).mean())
    return float(means[many].var(ddof=1)), chance, means


CAUSE = Cause(
    id="stale_prefix",
    title="A prefix cache was kept over a weight update",
    shows="Responses to the same prompt differ alike at their start, more from prompt to prompt than within, and "
    "hardly later on.",
    test=_test,
    advice="Flush the prefix cache with every weight update (vLLM reset_prefix_cache, SGLang /flush_cache) and count "
    "its hits right after one: there should be none. Then compare the prompts' token ids of both sides.",
    columns=("prompt_id",),
)
