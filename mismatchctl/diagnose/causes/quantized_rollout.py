"""The engine's weights are quantized: each token of the vocabulary is off in its own way."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE
from mismatchctl.diagnose.evidence import LAG
from mismatchctl.diagnose.measures import along_drift, fact, loudest, systematic
from mismatchctl.result import Confidence

_SOME, _CLEAR, _LARGE, _Z = 0.012, 0.03, 0.08, 6.0
_REAL = 1e-3


def _test(case: Case) -> Diagnosis | None:
    done = {"context_mismatch", "stale_policy", "growing_mismatch", "low_precision_logging"} & {*case.explained}
    if case.reshaped or done or case.noise < _REAL:
        return None
    shared, z = systematic(case)
    if shared < _SOME or z < _Z:
        return None
    along, along_z = along_drift(case)
    versions = {value for name, _, value in case.evidence.cells if name == LAG}
    excluded = bool(along_z) and along < 0.3
    confidence: Confidence = (
        "high"
        if shared > _LARGE and excluded
        else "medium"
        if shared > _CLEAR or case.noise > BFLOAT16_NOISE
        else "low"
    )
    evidence = [
        fact("systematic", shared, "share of the variance that is the same for a token everywhere: weights differ"),
        fact("z", z, "the same in standard errors"),
        fact("noise", case.noise, "of the logits, robust"),
    ]
    if along_z:
        evidence.append(
            fact(
                "along_learning",
                along,
                "correlation with where the weights move next: near 0 for quantization",
                against=not excluded,
            )
        )
    level = (
        "the noise is at bfloat16's level, and a quantized rollout is possible"
        if confidence == "low"
        else "the engine's weights are not the trainer's"
    )
    rivals = {
        "stale_policy": "rollout_version and train_version"
        if versions <= {None}
        else "the weights' checksums: are the versions true?"
    }
    if confidence == "low":
        rivals["numerical_noise"] = "the engine's quantization setting; bfloat16 weights show a trace of this too"
    return Diagnosis(
        confidence,
        f"{100 * shared:.2g} % of the variance of the log ratio belongs to the token alone, wherever it stands: "
        f"{level}",
        evidence=tuple(evidence),
        examples=loudest(case, case.counts > 0, case.means(np.abs(case.scaled))),
        rivals=rivals,
    )


CAUSE = Cause(
    id="quantized_rollout",
    title="The engine's weights are quantized",
    shows="A share of the variance belongs to the token of the vocabulary, in every context, and not along the "
    "direction of learning.",
    test=_test,
    advice="If it is wanted (fp8 or int8 rollout), this is its price: truncated importance weights, or "
    "quantization-aware "
    "training. If not, look at the engine's --quantization, at the dtype of the checkpoint that it loads, and "
    "at LoRA adapters "
    "that one side has not merged.",
    pointless="",
    columns=("token_ids", "current_log_probs"),
)
