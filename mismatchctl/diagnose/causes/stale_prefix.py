"""A prefix cache that outlived a weight update: of some prompts, all responses differ at their start."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.batch import Bools
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.causes.numerical_noise import FLOAT32_NOISE
from mismatchctl.diagnose.measures import fact, listed, loudest, percent

_START, _PROMPTS, _TOKENS = 24, 8, 3
_EXCESS, _LATE, _Z = 0.04, 0.4, 4.5
"""Variance between prompts that chance does not make at the start, its part late in responses, and its z."""


def _test(case: Case) -> Diagnosis | None:
    prompts = case.rows.columns.get("prompt_id")
    if prompts is None or case.reshaped or case.filled or case.noise < FLOAT32_NOISE:
        return None
    start = case.doubtful & (case.place < _START)
    early, late = _between(case, start), _between(case, case.doubtful & ~start)
    if early is None or late is None:
        return None
    excess, z, levels = early
    if excess < _EXCESS or z < _Z or late[0] > _LATE * excess:
        return None
    known = np.isfinite(levels)
    high = known & (levels > np.median(levels[known]) + math.sqrt(excess))
    mine = high[case.clusters] & (case.counts > 0)
    names = list(dict.fromkeys(prompts[mine].tolist()))
    return Diagnosis(
        "medium",
        f"responses to the same prompt differ alike in their first {_START} tokens (by a factor of "
        f"{math.exp(math.sqrt(excess)):.3g} from prompt to prompt, chance taken out) and hardly in later ones: of some "
        "prompts the engine kept a cache of older weights, or the two sides have other prompts",
        share=0.0,
        evidence=(
            fact("between_prompts", excess, "variance of the level between prompts at the start, beyond chance"),
            fact("z", z, "the same in standard errors"),
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
    """Variance of the level of some tokens [N] between prompts beyond that within, its z, and the levels by cluster."""
    number = case.sums(part)
    told = number >= _TOKENS
    level = case.sums(case.loudness * part) / np.maximum(number, 1)
    size = int(case.clusters.max()) + 1 if case.size else 0
    counts = np.bincount(case.clusters, told, size)
    means = np.bincount(case.clusters, level * told, size) / np.maximum(counts, 1)
    many = counts >= 2
    freedom = float((counts[many] - 1).sum())
    if many.sum() < _PROMPTS or freedom < _PROMPTS:
        return None
    left = (level - means[case.clusters]) * (told & many[case.clusters])
    within = float(left @ left) / freedom
    chance = within * float((1 / counts[many]).mean())
    between = float(means[many].var(ddof=1))
    if not chance > 0:
        return None
    groups = int(many.sum()) - 1
    z = math.log(max(between, 1e-300) / chance) / math.sqrt(2 / groups + 2 / freedom)  # of log F
    return between - chance, z, np.where(many, means, np.nan)


CAUSE = Cause(
    id="stale_prefix",
    title="A prefix cache was kept over a weight update",
    shows="Responses to the same prompt differ alike at their start, more from prompt to prompt than within, and "
    "hardly later on.",
    test=_test,
    advice="Flush the prefix cache with every weight update (vLLM reset_prefix_cache, SGLang /flush_cache) and count "
    "its hits right after one: there should be none. Then compare the prompts' token ids of both sides.",
    pointless="",
    columns=("prompt_id",),
)
