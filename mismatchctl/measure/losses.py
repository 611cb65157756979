"""Columns of the policy loss: with each correction, and compared with the uncorrected loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mismatchctl.core import losses
from mismatchctl.core.batch import Bools, Float64s, Floats, TokenBatch
from mismatchctl.core.losses import LossTerm
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.application import CorrectedBlock, Selection
from mismatchctl.corrections.model import OWN_RATIO_LOSSES, SEQUENCE_LOSSES, Correction, parse_loss

Columns = dict[str, Float64s]
"""Values per sequence [S], by name."""
LOSS_NAMES = (
    "loss", "loss_mean", "gradient_product", "squared_gradient", "loss_clipped", "loss_kept", "loss_counted",
    "loss_sequences", "loss_tokens",
)  # fmt: skip
"""Of the loss with a correction."""
PLAIN_LOSS_NAMES = ("plain_loss", "squared_plain_gradient")
"""Of the loss without any."""


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token [T] and its derivative by the current log-prob.

    Attributes:
        losses: of each token [T].
        gradient: derivative of each by its own log ratio, which is its current log-prob's unless `term` is given [T].
        clipped: whether a clip, a bound or a gate of the loss decided it [T].
        term: what gives the gradient of weighted losses, where it passes to other tokens; None: it does not.
    """

    losses: Floats
    gradient: Floats
    clipped: Bools
    term: LossTerm | None = None

    def weighted_gradient(self, weights: Float64s | float, kept: Selection) -> Floats:
        """Derivative by the current log-probs of the kept tokens' losses times constant weights [T].

        Where no gradient passes to other tokens, that of tokens which are not kept is left in.
        """
        if self.term is None:
            return weights * self.gradient
        return self.term.gradient(np.where(kept.expanded(), weights, 0.0))


def compute_token_loss(text: str, batch: TokenBatch) -> TokenLoss | None:
    """The loss of each token of a block before weights; None without current log-probs or advantages."""
    if batch.current is None or batch.advantages is None:
        return None
    advantages, current = batch.advantages.astype(np.float64), batch.current.astype(np.float64)
    kind, numbers = parse_loss(text)
    anchor = batch.rollout if kind in OWN_RATIO_LOSSES else batch.train
    x = np.clip(current - anchor, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tokens = _LossInputs(advantages, x, current, batch, numbers.get("low", 0.0), numbers.get("high", np.inf))
    term, clipped = _surrogate_term(kind, numbers, tokens)
    return TokenLoss(term.losses, term.slope, clipped, term if kind in SEQUENCE_LOSSES else None)


@dataclass(frozen=True)
class _LossInputs:
    """What a surrogate is made of: advantages, log ratios and current log-probs [T], and bounds."""

    advantages: Float64s
    x: Float64s
    current: Float64s
    batch: TokenBatch
    low: float
    high: float

    @property
    def mean(self) -> Float64s:
        """The mean log ratio of each token's sequence [T]."""
        return self.batch.segments.spread(self.batch.segments.mean(self.x))

    @property
    def outside(self) -> Bools:
        """Where the ratio is out of bounds [T]."""
        ratio = np.exp(self.x)
        return (ratio < self.low) | (ratio > self.high)

    @property
    def moved(self) -> Float64s:
        """How far the probability moved from the sampler's [T]."""
        return np.exp(self.current) - np.exp(self.batch.rollout.astype(np.float64))


def _surrogate_term(kind: str, numbers: Mapping[str, float], t: _LossInputs) -> tuple[LossTerm, Bools]:
    """The surrogate, and the tokens of which a clip, a bound or a gate of it decides the loss."""
    segments = t.batch.segments
    if kind in ("ppo", "ppo_bypass", "dual_clip", "two_sided", "gspo", "gspo_token"):
        of_sequence = kind in ("gspo", "gspo_token")
        x = t.mean if of_sequence else t.x
        bounds = {"cap": numbers.get("cap"), "dual": numbers.get("dual")}
        over = segments if kind == "gspo" else None
        term = losses.ppo_loss(t.advantages, x, t.low, t.high, mean_over=over, **bounds)
        return term, (term.slope == 0) & (t.advantages != 0)
    if kind in ("cispo", "cispo_bypass"):
        return losses.cispo_loss(t.advantages, t.x, t.current, t.low, t.high), t.outside
    if kind == "topr":
        return losses.topr_loss(t.advantages, t.x, t.current, t.low, t.high), t.outside & (t.advantages < 0)
    none = np.zeros_like(t.x, np.bool_)
    if kind == "gmpo":
        made = losses.gmpo_loss(t.advantages, t.x, t.low, t.high, segments)
        return made, none if made.through is None else ~made.through
    if kind == "policy_gradient":
        return losses.factor_loss(t.advantages, t.current, 1.0), none
    if kind == "sapo":
        return losses.sapo_loss(t.advantages, t.x, numbers["positive"], numbers["negative"]), none
    if kind == "vespo":
        weight = np.clip(segments.sum(t.x), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        up, down = (
            segments.spread(losses.vespo_gate(weight, numbers[f"k_{side}"], numbers[f"rate_{side}"]))
            for side in ("positive", "negative")
        )
        return losses.factor_loss(t.advantages, t.current, np.where(t.advantages >= 0, up, down)), none
    plain = losses.weighted_loss(t.advantages, t.x)
    if kind == "dppo":
        dropped = np.where(t.advantages > 0, t.moved > t.high, t.moved < -t.low)
        return losses.drop_tokens(plain, dropped), dropped
    if kind == "ipo":
        dropped = np.abs(t.moved) > numbers["eps"]
        return losses.drop_tokens(plain, dropped), dropped
    penalty = losses.quadratic_penalty(t.x, numbers.get("tau", 0.0))
    return replace(plain, losses=plain.losses + penalty.losses, slope=plain.slope + penalty.slope), none


def plain_loss_columns(plain: TokenLoss | None, batch: TokenBatch) -> Columns:
    """The loss without any correction; zeros where it is unknown."""
    if plain is None:
        return {name: np.zeros(len(batch)) for name in PLAIN_LOSS_NAMES}
    total = batch.segments.sum
    return dict(zip(PLAIN_LOSS_NAMES, (total(plain.losses), total(plain.gradient**2)), strict=True))


def loss_columns(
    correction: Correction, applied: CorrectedBlock, plain: TokenLoss | None, batch: TokenBatch
) -> Columns:
    """The loss with a correction, before normalization; zeros where it is unknown."""
    own = plain if correction.loss == "ppo" else compute_token_loss(correction.loss, batch)
    if own is None or plain is None:
        return {name: np.zeros(len(batch)) for name in LOSS_NAMES}
    weights: Float64s | float = applied.token_weights() if correction.weights_loss else 1.0
    gradient = own.weighted_gradient(weights, applied.kept)
    kept, counted = applied.kept, applied.counted.counts
    losses = kept.sum(weights * own.losses)
    columns = (
        losses,
        losses / np.maximum(counted, 1),
        kept.sum(gradient * plain.gradient),
        kept.sum(gradient * gradient),
        kept.sum(own.clipped.astype(np.float64)),
        kept.counts,
        counted,
        (counted > 0).astype(np.float64),
        batch.segments.lengths.astype(np.float64),
    )
    return dict(zip(LOSS_NAMES, columns, strict=True))
