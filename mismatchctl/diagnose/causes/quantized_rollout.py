"""The engine's weights are quantized: each token of the vocabulary is off in its own way, and learning goes another."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE, ENOUGH
from mismatchctl.diagnose.measures import (
    TIED,
    along_drift,
    calibration,
    fact,
    level,
    loudest,
    one_sided,
    percent,
    systematic,
)

_CLEAR, _TRACE, _Z, _FAR, _SLIGHT = 0.012, 0.04, 6.0, 6.0, 0.03
_ALONG = 0.6
_COARSEST = 0.4
"""Noise of the logits beyond which no quantization that anybody serves with goes: 4 bits make less."""


def _test(case: Case) -> Detection | None:
    if case.reshaped or case.filled or not BFLOAT16_NOISE / 2 < case.noise < _COARSEST or len(case.x) < ENOUGH:
        return None
    if level(case) or one_sided(case):
        return None
    shared, z = systematic(case)
    along, along_z = along_drift(case)
    if shared < _CLEAR or z < _Z or not along_z or _reach(along, along_z) > _ALONG:
        return None  # only where learning is excluded is it told from other weights
    excess, ratio_z, _, _ = calibration(case)
    if (abs(ratio_z) > _FAR and abs(excess) > _SLIGHT) or (case.noise < BFLOAT16_NOISE and shared < _TRACE):
        return None
    return Detection(
        "high" if shared > TIED and case.noise < _COARSEST / 4 else "medium",
        f"{percent(shared)} of the variance of the log ratio belongs to the token alone, wherever it stands, and not "
        "along the direction in which the policy is learning: the engine's weights are not the trainer's",
        evidence=(
            fact("systematic", shared, "share of the variance that is the same for a token everywhere: weights differ"),
            fact("z", z, "the same in standard errors"),
            fact("noise", case.noise, "of the logits, robust"),
            fact("along_learning", along, "correlation with where the weights move next: near 0 for quantization"),
        ),
        examples=loudest(case, case.counts > 0, case.means(np.abs(case.scaled))),
        rivals={"weights_differ": "checksums of the weights; an adapter that one side has not merged looks the same"}
        | (
            {}
            if shared > TIED
            else {"position_mismatch": "rope_theta, ALiBi slopes, window and position_ids of both sides"}
        ),
        everywhere=True,
    )


def _reach(along: float, z: float) -> float:
    """How large the correlation with learning may be yet, two standard errors away."""
    error = np.arctanh(np.clip(along, -0.999, 0.999)) / z
    return float(np.tanh(np.arctanh(np.clip(along, -0.999, 0.999)) + 2 * error))


CAUSE = Cause(
    id="quantized_rollout",
    title="The engine's weights are quantized",
    shows="A share of the variance belongs to the token of the vocabulary, in every context, and not along the "
    "direction of learning, which current_log_probs show; no more noise than 4 bits make.",
    test=_test,
    advice="If it is wanted (fp8 or int8 rollout), this is its price: truncated importance weights, or "
    "quantization-aware training. If not, look at the engine's --quantization, at the dtype of the checkpoint that it "
    "loads, and at LoRA adapters that one side has not merged.",
    columns=("token_ids", "current_log_probs"),
    in_layers=True,
)
