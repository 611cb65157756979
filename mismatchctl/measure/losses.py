"""Columns that add of the policy loss: with each correction, and against the loss without any.

The loss is PPO's clipped surrogate anchored on the trainer's log-probs (on the rollout's for `ppo_bypass`), or
weighted REINFORCE for `policy_gradient`; clips at 0.8 and 1.2, the usual default. The gradient
is that of each token's loss by its current log-prob, weights held fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Bools, Float64s, Floats, TokenBatch
from mismatchctl.correction import Applied, Correction
from mismatchctl.losses import ppo, reinforce

Columns = dict[str, Float64s]
"""Values per sequence [S], by name."""
_NAMES = ("loss", "gradient_product", "squared_gradient", "loss_clipped", "loss_kept", "loss_counted", "loss_tokens")


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token [T], its derivative by the current log-prob, and whether the clip decided it."""

    losses: Floats
    gradient: Floats
    clipped: Bools


def token_loss(kind: str, batch: TokenBatch) -> TokenLoss | None:
    """The loss of each token of a block before weights; None without current log-probs or advantages."""
    if batch.current is None or batch.advantages is None:
        return None
    advantages, current = batch.advantages.astype(np.float64), batch.current.astype(np.float64)
    if kind == "policy_gradient":
        return TokenLoss(reinforce(advantages, current), -advantages, np.zeros_like(current, np.bool_))
    anchor: Floats = batch.rollout if kind == "ppo_bypass" else batch.train
    surrogate = ppo(advantages, current, anchor.astype(np.float64))
    slope = -advantages * np.exp(surrogate.log_ratio)
    return TokenLoss(surrogate.losses, np.where(surrogate.clipped, 0.0, slope), surrogate.clipped)


def plain_loss_columns(plain: TokenLoss | None, batch: TokenBatch) -> Columns:
    """The loss without any correction; zeros where it is unknown."""
    if plain is None:
        return {name: np.zeros(len(batch)) for name in ("plain_loss", "squared_plain_gradient")}
    total = batch.segments.sum
    return {"plain_loss": total(plain.losses), "squared_plain_gradient": total(plain.gradient**2)}


def loss_columns(correction: Correction, applied: Applied, plain: TokenLoss | None, batch: TokenBatch) -> Columns:
    """The loss with a correction, before normalization; zeros where it is unknown."""
    own = plain if correction.loss == "ppo" else token_loss(correction.loss, batch)
    if own is None or plain is None:
        return {name: np.zeros(len(batch)) for name in _NAMES}
    weights: Float64s | float = applied.token_weights() if correction.weights_loss else 1.0
    gradient = weights * own.gradient
    kept = applied.kept
    columns = (
        kept.sum(weights * own.losses),
        kept.sum(gradient * plain.gradient),
        kept.sum(gradient * gradient),
        kept.sum(own.clipped.astype(np.float64)),
        kept.counts,
        applied.counted.counts,
        batch.segments.lengths.astype(np.float64),
    )
    return dict(zip(_NAMES, columns, strict=True))
