"""A KV cache (or activations) in low precision: noise above bfloat16's that is tied to no token and grows along."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE, ENOUGH, ROUTED_TAIL, beside_the_bound, tail
from mismatchctl.diagnose.kinds import kinds
from mismatchctl.diagnose.measures import calibration, fact, level, loudest, systematic
from mismatchctl.result import Confidence

_LONG, _Z, _SURE, _FAR = 36, 2.5, 6.0, 5.0
_SYSTEMATIC = 0.02
_ROUNDED = 2.0
"""Times bfloat16's noise that it may seem to be where sure tokens were rounded."""
_USUAL, _COARSEST = 0.07, 0.2
"""Noise of the logits that caches in 8 bits make, and beyond which none goes that still answers questions."""


def _test(case: Case) -> Detection | None:
    if case.reshaped or case.filled or not BFLOAT16_NOISE < case.noise < _COARSEST or len(case.x) < 200:
        return None
    shared, shared_z = systematic(case)
    if (shared > _SYSTEMATIC and shared_z > 4) or level(case):
        return None
    if kinds(case) is not None:
        return None
    growth, z = _growth(case)
    grows = z > _Z and growth > 0.05
    _, ratio_z, _, _ = calibration(case)
    balanced = abs(ratio_z) < _FAR
    share, _ = tail(case)  # a cache moves every token: where few hold most of the K3, experts were chosen differently
    size = case.noise < _COARSEST if grows else case.noise < _USUAL and not beside_the_bound(case)
    plausible = size and len(case.x) >= ENOUGH and share < ROUTED_TAIL
    rounded = "low_precision_logging" in case.explained and case.noise < _ROUNDED * BFLOAT16_NOISE
    confidence: Confidence = "low"
    if balanced and plausible and not rounded:
        confidence = "high" if grows and z > _SURE and case.noise < _USUAL else "medium"
    return Detection(
        confidence,
        f"noise of {case.noise:.2g} in the logits, {case.noise / BFLOAT16_NOISE:.2g} times the most that bfloat16 "
        "makes, not tied to tokens of the vocabulary"
        + (f" and {np.exp(growth):.3g} times larger late in the response than in its middle" if grows else ""),
        evidence=(
            fact("noise", case.noise, f"of the logits, robust; bfloat16 stays below {BFLOAT16_NOISE:g}"),
            fact(
                "late_over_middle",
                float(np.exp(growth)),
                "noise in the last third of a response over that in its middle third",
                against=not grows,
            ),
            fact("z", z, "the same in standard errors", against=not grows),
            fact(
                "systematic",
                shared,
                "share of the variance that is the same for a token everywhere: small, so the weights agree",
            ),
            fact(
                "tail_k3",
                share,
                "share of the K3 on tokens beyond 12 times the noise: a cache leaves most of it below",
                against=share >= ROUTED_TAIL,
            ),
            fact(
                "ratio_mean_z",
                ratio_z,
                "E[ratio] - 1 in standard errors: noise leaves it at 0",
                against=not balanced,
            ),
        ),
        where={"positions": "late in the response" if grows else "everywhere"},
        examples=loudest(case, case.counts >= _LONG, case.means(np.abs(case.scaled))),
        rivals={
            "numerical_noise": "the same prompts with the cache in bfloat16 (kv_cache_dtype=auto): is the noise "
            "smaller?",
            "random_noise": "score a batch twice with the trainer: equal? Dropout is not",
            "weights_differ": "checksums of the weights on both sides",
        }
        | ({"low_precision_logging": "the same log-probs with all their digits"} if rounded else {}),
        everywhere=True,
    )


def _growth(case: Case) -> tuple[float, float]:
    """Mean loudness of the last third of each response minus that of its middle third, over responses, and its z."""
    long = case.counts >= _LONG
    share = case.place / np.maximum(case.each(case.counts), 1)
    thirds = [case.doubtful & (share >= low) & (share < high) for low, high in ((1 / 3, 2 / 3), (2 / 3, 1.0))]
    middle, late = (case.sums(case.loudness * third) / np.maximum(case.sums(third), 1) for third in thirds)
    rises = (late - middle)[long]
    if len(rises) < 10:
        return 0.0, 0.0
    return float(rises.mean()), float(rises.mean() / (rises.std() / np.sqrt(len(rises)) + 1e-12))


CAUSE = Cause(
    id="cache_quantization",
    title="The KV cache is quantized",
    shows="Noise above bfloat16's that belongs to no token; it may grow with the position.",
    test=_test,
    advice="Set the cache's dtype to that of the model: vLLM kv_cache_dtype=auto, SGLang --kv-cache-dtype auto; if "
    "fp8 is wanted, calibrate its scales (k_scale, v_scale). fp8 attention kernels and activations look the same.",
    columns=("token_ids",),
    in_layers=True,
)
