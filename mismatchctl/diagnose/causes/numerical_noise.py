"""Nothing beyond numerical noise."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case, once
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import calibration, fact, percent, systematic
from mismatchctl.ratios import DENSE_RANGE, MOE_RANGE
from mismatchctl.result import Confidence

FLOAT32_NOISE, BFLOAT16_NOISE = 1e-4, 0.022
"""Noise of the logits below which it is that of float32, or of bfloat16, arithmetic."""

_FEW = 200
"""Tokens below which other causes could not have shown."""
_SINGLE_SPREAD, _HALF_SPREAD = 1e-3, 0.05
"""The same of the noise that would make the K3, tails and all."""
_BEYOND, _LEAST = 12.0, 0.012
_LIGHT, ROUTED_TAIL, _ROUTED = 0.3, 0.7, 0.95
"""Share of the K3 beyond the tail of noise, in dense models, and with experts chosen differently: from, and to."""
_LARGER = 3.0
"""How much more than the small models of the bound a larger or surer one may make: no dump tells how large it is."""
_BESIDE = 1.25
"""How much more is beside the bound: one model of 17 made 1.14 times as much; caches in fp8, where their noise does not
grow, 1.27 at the least."""
_TRACE = 0.004
_ROUNDING = 1e-6
"""E[ratio] - 1 below which rounding to float32, which may lean to one side, is enough for it, however sure it is."""
UNRELATED = 0.6
"""Correlation of the columns below which they are not of the same text under any weights."""
ENOUGH = 3000
"""Tokens from which on structure in the noise would have shown, so that its absence tells something."""


@once
def tail(case: Case) -> tuple[float, float]:
    """Share of the K3, and of the tokens, beyond 12 times the noise, that of bfloat16 at least."""
    far = np.abs(case.scaled) > _BEYOND * max(case.noise, _LEAST)
    whole = float(case.k3.sum())
    return (float(case.k3[far].sum()) / whole if whole > 0 else 0.0), float(far.mean()) if len(far) else 0.0


def fits(case: Case) -> bool:
    """Whether size, tail and balance are those of float32 or bfloat16 arithmetic."""
    share, _ = tail(case)
    return _balanced(case) and case.noise < BFLOAT16_NOISE and case.spread < _HALF_SPREAD and share < _LIGHT


def may_be_larger(case: Case) -> bool:
    """Whether noise above the bound may be bfloat16's in a larger, surer model: little more, balanced, its K3 usual."""
    small = BFLOAT16_NOISE <= case.noise < _LARGER * BFLOAT16_NOISE
    return small and _balanced(case) and float(case.k3.mean()) < MOE_RANGE[1]


def beside_the_bound(case: Case) -> bool:
    """Whether noise is above the bound by so little that its size alone is no sign of a cause."""
    return BFLOAT16_NOISE <= case.noise < _BESIDE * BFLOAT16_NOISE


def _balanced(case: Case) -> bool:
    excess, z, _, _ = calibration(case)
    return abs(z) < 5 or abs(excess) < _ROUNDING


def _test(case: Case) -> Detection | None:
    if case.reshaped or case.filled or not len(case.x) or case.noise + case.spread == 0:
        return None
    k3, mean = float(case.k3.mean()), float(np.abs(case.x).mean())
    _, z, _, _ = calibration(case)
    share, far = tail(case)
    balanced, few = _balanced(case), len(case.x) < _FEW
    usual = case.noise < BFLOAT16_NOISE or (may_be_larger(case) and share >= ROUTED_TAIL)
    confidence: Confidence = "low"
    if fits(case) and not few:
        confidence = "high"
    elif usual and balanced and share < _ROUTED and k3 < MOE_RANGE[1] and not few:
        confidence = "medium"
    beyond = f", but {percent(far)} of the tokens hold {percent(share)} of the K3 beyond its tail"
    return Detection(
        confidence,
        f"{'nothing beyond noise' if confidence == 'high' else 'mostly noise'}: mean |log ratio| {mean:.2g} nats, "
        f"{_made_by(case)}; K3 {k3:.2g} is {_standing(k3)}"
        + (beyond if confidence == "medium" and share >= _LIGHT else "")
        + (_weights(case) if confidence != "low" else "")
        + (f". So few tokens ({len(case.x):,}) cannot tell more" if few else ""),
        evidence=(
            fact(
                "noise",
                case.noise,
                f"of the logits, robust; float32 stays below {FLOAT32_NOISE:g}, bfloat16 below {BFLOAT16_NOISE:g}",
            ),
            fact("spread", case.spread, "noise of the logits that would make this K3, tails and all"),
            fact("difference", mean, "mean |log ratio|, nats"),
            fact(
                "k3",
                k3,
                f"dense models: {DENSE_RANGE[0]:g} to {DENSE_RANGE[1]:g}, mixtures of experts: to {MOE_RANGE[1]:g}",
                against=k3 > MOE_RANGE[1],
            ),
            fact("tail_k3", share, "share of the K3 on tokens beyond 12 times the noise", against=share >= _LIGHT),
            fact(
                "ratio_mean_z", z, "E[ratio] - 1 in standard errors: both sides are distributions", against=not balanced
            ),
        ),
        rivals={"moe_routing": "is this a mixture of experts? Record rollout_experts and train_experts"}
        if share >= _LIGHT
        else {},
        everywhere=True,
    )


def _made_by(case: Case) -> str:
    if case.noise < FLOAT32_NOISE and case.spread < _SINGLE_SPREAD:
        return "as float32 arithmetic makes it"
    if case.noise < BFLOAT16_NOISE:
        return "as bfloat16 arithmetic makes it"
    if may_be_larger(case):
        return (
            "more than bfloat16 arithmetic makes in small models; in larger or surer ones, or with experts, it may "
            "make this, and so may a cache in low precision"
        )
    return "above what bfloat16 arithmetic makes"


def _weights(case: Case) -> str:
    """What a trace tied to tokens of the vocabulary means."""
    if case.noise < FLOAT32_NOISE:
        return ""
    shared, z = systematic(case)
    if shared < _TRACE or z < 4:
        return ". Weights or a cache in 8 bits can make as little: only the engine's settings tell"
    return (
        f". {percent(shared)} of the variance belongs to tokens of the vocabulary: the weights are rounded otherwise, "
        "in bfloat16 or in 8 bits; at this size they look the same"
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
    shows="Symmetric log ratios that scale with 1 - p, E[ratio] = 1, no structure by token, position, worker or step; "
    "size and tail are those of float32 or bfloat16.",
    test=_test,
    advice="Nothing is broken. Other kernels, batch sizes and precisions on both sides make this much; float32 for "
    "the last layer and the router lowers it (SGLang --enable-fp32-lm-head, batch-invariant kernels).",
)
