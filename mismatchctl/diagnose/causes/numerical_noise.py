"""Nothing beyond numerical noise."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.measures import calibration, fact, loudest
from mismatchctl.measure.metrics.ranges import DENSE_RANGE, MOE_RANGE
from mismatchctl.ratios import k3_of
from mismatchctl.result import Confidence

FLOAT32_NOISE, BFLOAT16_NOISE = 1e-4, 0.022
"""Noise of the logits below which it is that of float32, or of bfloat16, arithmetic."""

_FEW = 200
"""Tokens below which other causes could not have shown."""


def _test(case: Case) -> Diagnosis | None:
    if case.reshaped or not len(case.x) or case.noise == 0:
        return None
    k3, mean = float(k3_of(np.clip(case.x, -20, 20)).mean()), float(np.abs(case.x).mean())
    _, z, _, _ = calibration(case)
    balanced, few = abs(z) < 5, len(case.x) < _FEW
    kind = "float32" if case.noise < FLOAT32_NOISE else "bfloat16" if case.noise < BFLOAT16_NOISE else ""
    confidence: Confidence = "low" if few or not balanced else "high" if kind else "medium"
    standing = (
        f"as {kind} arithmetic makes it"
        if kind
        else "above what bfloat16 arithmetic makes: a quantized rollout is possible"
    )
    return Diagnosis(
        confidence,
        f"nothing beyond noise: mean |log ratio| {mean:.2g} nats, {standing}; K3 {k3:.2g} is {_standing(k3)}"
        + (f". So few tokens ({len(case.x):,}) cannot tell more" if few else ""),
        evidence=(
            fact(
                "noise",
                case.noise,
                f"of the logits, robust; float32 stays below {FLOAT32_NOISE:g}, bfloat16 below {BFLOAT16_NOISE:g}",
            ),
            fact("difference", mean, "mean |log ratio|, nats"),
            fact(
                "k3",
                k3,
                f"dense models: {DENSE_RANGE[0]:g} to {DENSE_RANGE[1]:g}, mixtures of experts: to {MOE_RANGE[1]:g}",
            ),
            fact(
                "ratio_mean_z", z, "E[ratio] - 1 in standard errors: both sides are distributions", against=not balanced
            ),
        ),
        where={"tokens": "all"},
        examples=loudest(case, case.counts > 0, case.means(np.abs(case.x))),
        rivals={}
        if kind
        else {"quantized_rollout": "the engine's quantization settings", "cache_quantization": "kv_cache_dtype"},
    )


def _standing(k3: float) -> str:
    if k3 < DENSE_RANGE[0]:
        return "below what dense models usually show"
    if k3 < DENSE_RANGE[1]:
        return "within what dense models usually show"
    return f"{'within' if k3 < MOE_RANGE[1] else 'above'} what mixtures of experts usually show"


CAUSE = Cause(
    id="numerical_noise",
    title="Numerical noise",
    shows="Symmetric log ratios that scale with 1 - p, E[ratio] = 1, no structure by token, position, worker or step.",
    test=_test,
    advice="Nothing is broken. Other kernels, batch sizes and precisions on both sides make this much; float32 "
    "for the last "
    "layer and the router lowers it (SGLang --enable-fp32-lm-head, batch-invariant kernels).",
    pointless="",
)
