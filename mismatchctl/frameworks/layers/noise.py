"""How far apart the logits are that a dump's log ratios ask for, held against how far a report's layers are apart.

Noise of standard deviation s on every logit, independent, moves the log-prob of the sampled token y by
e_y (1 - p_y) - sum over j of p_j e_j, whose variance is s^2 [(1 - p_y)^2 + sum of the other p_j^2]. The last sum lies
between 0 and (1 - p_y)^2 whatever the other tokens are, so the dump gives s within a factor sqrt(2).
"""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict

from mismatchctl.batch import Float64s
from mismatchctl.frameworks.layers.model import LayerReport

USUAL_SPREAD = (0.3, 30.0)
"""Standard deviations of a token's logits, nats, between which language models lie with room to spare."""


class LogitNoise(BaseModel):
    """What the log ratios of one run ask of the logits: their rms, and the noise on each logit, nats (low, high)."""

    model_config = ConfigDict(extra="forbid")

    log_ratio_rms: float
    logit_noise: tuple[float, float]


def logit_noise(rollout: Float64s, train: Float64s) -> LogitNoise | None:
    """The noise on each logit that explains a dump's log ratios; None where there is no doubtful token.

    Args:
        rollout: log-probs of valid tokens [T], nats, finite.
        train: the same tokens by the trainer [T].
    """
    with np.errstate(over="ignore"):
        squares = float(np.square(train - rollout).sum())
    doubt = float(np.square(-np.expm1(np.minimum(rollout, 0.0))).sum())
    if not rollout.size or doubt <= 0 or not np.isfinite(squares):
        return None
    high = float(np.sqrt(squares / doubt))
    return LogitNoise(log_ratio_rms=float(np.sqrt(squares / rollout.size)), logit_noise=(high / np.sqrt(2), high))


def held_against(report: LayerReport, noise: LogitNoise) -> str:
    """Whether layers that far apart explain log ratios that large, in a sentence."""
    low, high = noise.logit_noise
    asked = f"log ratios of {noise.log_ratio_rms:.2g} (rms) ask for noise of {low:.2g} to {high:.2g} on each logit"
    last = next((value for _, value in reversed(report.growth) if value is not None), None)
    if "elative" not in report.measure or last is None:
        return f"{asked}; this report's values are not relative, so it cannot say whether its layers give that"
    if last == 0:
        same = "which equal layers cannot give: look behind them (logits, sampling parameters, masks, weights)"
        return asked if high == 0 else f"{asked}, {same}"
    needed = high / last
    said = f"{asked}; layers {last:.2g} apart at the end give that where a token's logits spread by {needed:.2g}"
    if needed > USUAL_SPREAD[1]:
        return f"{said}, more than models have: the layers explain too little of it, look for another cause beside"
    if needed < USUAL_SPREAD[0]:
        return f"{said}, less than models have: the compared runs are further apart than the dump"
    return f"{said}, as models have: the layers explain the dump"
