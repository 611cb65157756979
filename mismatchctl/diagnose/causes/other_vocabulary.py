"""One softmax runs over more tokens than the other: padding of the vocabulary, or banned tokens."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE
from mismatchctl.diagnose.kinds import kinds
from mismatchctl.diagnose.measures import calibration, fact, greedy, percent

_Z, _LEAST, _MOST = 6.0, 2e-4, 0.3
_NOISY, _INNER = 1.5 * BFLOAT16_NOISE, 12.0


def _test(case: Case) -> Detection | None:
    if case.reshaped or case.filled or len(case.x) < 500 or case.noise > _NOISY or greedy(case):
        return None
    if kinds(case) is not None:
        return None  # another vocabulary is one in every row
    inner = np.abs(case.standard) < _INNER
    bounded = np.where(inner, np.expm1(np.where(inner, case.x, 0.0)), 0.0)
    lost, z = float(bounded.mean()), case.clustered_z(bounded)
    excess, ratio_z, _, _ = calibration(case)
    if abs(z) < _Z or not _LEAST < abs(lost) < _MOST or lost * excess < 0:
        return None
    fewer, more = ("rollout", "trainer") if lost < 0 else ("trainer", "rollout")
    return Detection(
        "medium",
        f"the ratios do not average to 1 (E[ratio] - 1 = {lost:.2g}, {abs(z):.2g} standard errors): "
        f"{percent(abs(lost))} of the {more}'s probability lies on tokens that the {fewer} does not have",
        evidence=(
            fact("ratio_mean_minus_one", lost, "E[ratio] - 1, of tokens within the noise: 0 for equal vocabularies"),
            fact("z", z, "the same in standard errors"),
            fact("ratio_mean_z", ratio_z, "of all ratios as they are", against=abs(ratio_z) < _Z),
        ),
        rivals={
            "truncated_sampling": "the engine's top_k, top_p and min_p: a light truncation looks the same",
            "logit_bias": "bad_words, allowed tokens and masks of structured output on the engine",
        },
        everywhere=True,
    )


CAUSE = Cause(
    id="other_vocabulary",
    title="One side's softmax has more tokens",
    shows="E[ratio] differs from 1 by a small amount, with no truncation to be seen: mass on tokens of one side alone.",
    test=_test,
    advice="Compare the sizes of both logits: a vocabulary padded to a multiple of 64 whose padding is not masked "
    "(Megatron --make-vocab-size-divisible-by), banned tokens (bad_words, min_tokens, structured output) that only the "
    "engine masks.",
)
