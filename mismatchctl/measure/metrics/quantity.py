"""What a number is, said in parts, so that numbers of different origin can be told to be the same."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

TOKENS = "valid tokens"
KEPT = "tokens that rejection leaves"
SEQUENCES = "sequences with a valid token"

RAW_WEIGHTS, BOUNDED_WEIGHTS, FINAL_WEIGHTS = "weights before their bound", "weights after their bound", "final weights"
ALL_GATES = "all gates"


class Quantity(str, Enum):
    """What is measured on a token or a sequence; x is the log ratio of the pair that the basis names."""

    K1 = "-x"
    K3 = "exp(x) - 1 - x"
    ABS = "|x|"
    RATIO = "exp(x)"
    SQUARED_RATIO = "exp(x)^2 - 1"
    SQUARED_PRODUCT = "exp(sum of x)^2 - 1"
    TRAIN_LOG_PPL = "log-perplexity under train"
    TRAIN_PPL = "perplexity under train"
    ROLLOUT_LOG_PPL = "log-perplexity under rollout"
    ROLLOUT_PPL = "perplexity under rollout"
    LOG_PPL_DIFF = "log-perplexity under train minus under rollout"
    LOG_PPL_ABS_DIFF = "distance of the two log-perplexities"
    PPL_RATIO = "perplexity under train over under rollout"
    PROB_DIFF = "|exp(train) - exp(rollout)|"
    PROBS = "the two probabilities"
    WEIGHT = "weight"
    ABOVE = "whether the weight exceeds the upper bound"
    BELOW = "whether the weight is below the lower bound"
    REJECTED = "whether it is rejected"
    CATASTROPHIC = "whether the veto's bound is undercut"
    LOSS = "policy loss"
    CLIPPED = "whether PPO's clip decides the loss"


@dataclass(frozen=True)
class Measure:
    """Quantity, mask, reduction and basis of a number.

    Attributes:
        quantity: what is measured.
        over: which tokens or sequences it is taken over.
        reduction: how they become one number.
        basis: what it looks at: a pair of policies, or weights at a stage.
    """

    quantity: Quantity
    over: str = TOKENS
    reduction: str = "mean"
    basis: str = "train/rollout"

    def is_like(self, other: Measure) -> bool:
        """Whether both are the same kind of statistic (mean, max, ...) of the same quantity of the same policies."""
        policies = self.basis == other.basis or "/" not in self.basis + other.basis
        return policies and self.quantity is other.quantity and self._statistic == other._statistic

    def differences(self, other: Measure) -> list[str]:
        """In what this one differs from another: nothing, when both are the same number."""
        return [
            f"{field.name}: {getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]

    @property
    def _statistic(self) -> str:
        return self.reduction.split()[0]
