"""The two sides have different weights: older, quantized, an adapter not merged, another checkpoint."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE, ENOUGH, UNRELATED, beside_the_bound
from mismatchctl.diagnose.causes.position_mismatch import rising
from mismatchctl.diagnose.measures import (
    TIED,
    calibration,
    coherence,
    fact,
    level,
    loudest,
    one_sided,
    percent,
    related,
    systematic,
)
from mismatchctl.result import Confidence

_CLEAR, _Z, _SURE_Z = 0.02, 5.0, 8.0
_FAR, _SLIGHT = 6.0, 0.01
_RISE, _ONE_WAY = 1.4, 0.5
_POSITIONS = "rope_theta, ALiBi slopes, window and position_ids of both sides"


def _test(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.noise < BFLOAT16_NOISE or related(case) < UNRELATED:
        return None
    shared, z = systematic(case)
    if shared < _CLEAR or z < _Z or level(case) or one_sided(case):
        return None
    excess, ratio_z, _, _ = calibration(case)
    sampled = abs(ratio_z) < _FAR or abs(excess) < _SLIGHT
    rise, rise_z, _ = rising(case)
    likely, _, unlikely, _ = coherence(case)
    rises = rise > _RISE and rise_z > 4
    turned = likely * unlikely < 0 and min(abs(likely), abs(unlikely)) > _ONE_WAY
    placed = shared < TIED or rises
    sure = z > _SURE_Z and sampled and len(case.x) >= ENOUGH and not placed and not turned
    slight = shared < TIED and beside_the_bound(case)  # bfloat16 rounds weights too, each token's in its own way
    confidence: Confidence = "high" if sure else "low" if rises or slight else "medium"
    return Detection(
        confidence,
        f"the two sides have different weights{', or positions' if placed else ''}: {percent(shared)} of the variance "
        "of the log ratio belongs to the token alone, wherever it stands, and the noise "
        f"({case.noise:.2g} in the logits) is {case.noise / BFLOAT16_NOISE:.2g} times the most that bfloat16 makes",
        evidence=(
            fact("systematic", shared, "share of the variance that is the same for a token everywhere: weights differ"),
            fact("z", z, "the same in standard errors"),
            fact("noise", case.noise, f"of the logits, robust; bfloat16 stays below {BFLOAT16_NOISE:g}"),
            fact(
                "ratio_mean_z",
                ratio_z,
                "E[ratio] - 1 in standard errors: 0 where the rollout column is what sampled",
                against=not sampled,
            ),
            fact("late_over_early", rise, "median difference late in responses over that at the start", against=rises),
            fact(
                "likely", likely, "coherence of log ratios of likely tokens: 0 for noise, +-1 one way", against=turned
            ),
        ),
        where={"tokens": "all"},
        examples=loudest(case, case.counts > 0, case.means(np.abs(case.scaled))),
        rivals=({"position_mismatch": _POSITIONS} if placed else {})
        | {
            "stale_policy": "rollout_version and train_version, as each side knows them; current_log_probs tell too",
            "quantized_rollout": "the engine's --quantization, and the dtype of the checkpoint that it loads",
            "other_model": "checkpoint names and adapters of both sides: checksums of the weights tell",
            "logit_bias": "the engine's logit_bias and penalties: are a few tokens all of it?",
        }
        | ({"logit_softcap": "temperature and softcap of both sides: likely tokens all go one way"} if turned else {}),
        everywhere=not rises,
    )


CAUSE = Cause(
    id="weights_differ",
    title="The two sides have different weights",
    shows="Beyond bfloat16's noise, a share of the variance belongs to the token of the vocabulary, in every context; "
    "older, quantized, adapted and other weights look alike without versions or current log-probs.",
    test=_test,
    advice="Compare checksums of the weights after a sync (SGLang /get_weights_by_name, vLLM collective_rpc). Did the "
    "last sync arrive? Is an adapter merged on one side only, a checkpoint quantized or another one? Record "
    "rollout_version and train_version, or current_log_probs: they tell these apart.",
    columns=("token_ids",),
    in_layers=True,
)
