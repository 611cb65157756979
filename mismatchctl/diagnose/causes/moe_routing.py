"""Experts chosen differently on both sides: rare large differences over small noise."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import fact, loudest, percent
from mismatchctl.ratios import k3_of
from mismatchctl.result import Confidence

_NOISE = (1e-3, 0.05)
_FAR, _FARTHER = (12.0, 1.2e-3), (20.0, 3e-4)
_MOST_K = 8


def _test(case: Case) -> Detection | None:
    sides = [case.rows.tokens.get(name) for name in ("rollout_experts", "train_experts")]
    if sides[0] is not None and sides[1] is not None and sides[0].shape == sides[1].shape and sides[0].ndim == 2:
        return _from_experts(case, sides[0], sides[1])
    return _from_tails(case)


def _from_experts(case: Case, rollout: np.ndarray, train: np.ndarray) -> Detection | None:
    """Where the chosen sets differ, and how much of the K3 comes from there."""
    a, b = rollout[case.index], train[case.index]
    if np.isnan(a.sum() + b.sum()):
        return None  # of some sequences the experts are not known
    width = _experts_per_layer(a)
    layers = a.shape[1] // width
    sets = [np.sort(side.reshape(len(a), layers, width), axis=2) for side in (a, b)]
    by_layer = (sets[0] != sets[1]).any(axis=2)
    flipped = by_layer.any(axis=1)
    if not flipped.any():
        return None
    k3: Float64s = k3_of(np.clip(case.x, -20, 20))
    inside, outside = float(k3[flipped].mean()), float(k3[~flipped].mean()) if (~flipped).any() else 0.0
    share, rate = float(k3[flipped].sum() / max(k3.sum(), 1e-300)), float(flipped.mean())
    z = case.clustered_z(np.where(flipped, k3 - outside, 0.0))
    confidence: Confidence = (
        "high" if share > 0.3 and inside > 3 * outside and not case.explained else "medium" if share > 0.1 else "low"
    )
    layer_rates = by_layer.mean(axis=0)
    tokens = case.marked(flipped)
    return Detection(
        confidence,
        f"both sides chose different experts for {percent(rate)} of the tokens, which hold {percent(share)} of the K3 "
        f"({inside:.2g} there, {outside:.2g} elsewhere)",
        share=case.share(tokens),
        k3=share * max(0.0, 1 - outside / inside) if inside > 0 else 0.0,
        evidence=(
            fact("disagreement", rate, "share of tokens with another set of experts in some layer"),
            fact("k3_where_they_differ", inside, "mean K3 there"),
            fact("k3_where_they_agree", outside, "mean K3 elsewhere"),
            fact("k3_share", share, "share of the K3 that comes from there"),
            fact("z", z, "K3 there beyond that elsewhere, in standard errors"),
            fact(
                "by_layer",
                ", ".join(f"{100 * value:.2g} %" for value in layer_rates[:64]),
                "tokens with another set, by layer",
            ),
        ),
        where={
            "layers": f"most in layer {int(np.argmax(layer_rates))} of {layers}, counted from 0",
            "tokens": percent(rate),
        },
        examples=loudest(case, case.counts > 0, case.sums(flipped * k3)),
    )


def _experts_per_layer(experts: np.ndarray) -> int:
    """Experts chosen in each layer: the widest grouping in which no token repeats an expert within a group."""
    some = experts[:: max(1, len(experts) // 512)]
    best = 1
    for width in range(2, _MOST_K + 1):
        if experts.shape[1] % width == 0:
            groups = np.sort(some.reshape(-1, width), axis=1)
            if (np.diff(groups, axis=1) != 0).all():
                best = width
    return best


def _from_tails(case: Case) -> Detection | None:
    """Without the experts, only the shape speaks: far more large differences than the small noise explains."""
    if (
        case.reshaped
        or "context_mismatch" in case.explained
        or not _NOISE[0] < case.noise < _NOISE[1]
        or len(case.x) < 2000
    ):
        return None
    size = np.abs(case.standard)
    far, farther = float((size > _FAR[0]).mean()), float((size > _FARTHER[0]).mean())
    if far < _FAR[1] or farther < _FARTHER[1]:
        return None
    k3 = case.k3
    share = float(k3[size > _FAR[0]].sum() / max(k3.sum(), 1e-300))
    tokens = case.marked(size > _FAR[0])
    return Detection(
        "low",
        f"{percent(far)} of the tokens differ by more than 12 times the usual noise and hold {percent(share)} of the "
        "K3, as they do where experts are chosen differently",
        share=case.share(tokens),
        evidence=(
            fact(
                "beyond_12", far, "share of tokens beyond 12 times the noise; dense models at this noise: below 0.0005"
            ),
            fact("beyond_20", farther, "share beyond 20 times the noise"),
            fact("k3_share", share, "share of the K3 on the former"),
        ),
        where={"tokens": percent(far)},
        examples=loudest(case, case.counts > 0, case.sums((size > _FAR[0]) * k3)),
        rivals={"numerical_noise": "rollout_experts and train_experts: do these tokens meet other experts?"},
    )


CAUSE = Cause(
    id="moe_routing",
    title="Experts are chosen differently",
    shows="With both sides' experts recorded: K3 where they differ against K3 where they agree. Without: far "
    "tails over small noise.",
    test=_test,
    advice="Replay the engine's routing in the trainer{settings}; compute the router in float32 on both sides. "
    "Record rollout_experts and train_experts to measure it.",
    columns=("rollout_experts", "train_experts"),
    in_layers=True,
)
