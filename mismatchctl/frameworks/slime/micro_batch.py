"""slime's loss on one micro-batch: weights, rejection and policy loss, in the dtype of the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Floats, Segments
from mismatchctl.core.losses import LossTerm, cispo_loss, exp, kl_estimate, low_variance_kl, off_policy_mask, ppo_loss
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.frameworks.slime.arguments import Arguments, SlimeVersion


def sum_segments(values: NDArray[Any], segments: Segments) -> Floats:
    """Sum over each segment [S], rounded to the dtype of `values`. Booleans are counted in float32, like in torch."""
    return segments.sum(values).astype(_sum_dtype(values.dtype))


def sum_stacked(values: Sequence[NDArray[Any]], segments: Segments) -> Floats:
    """Apply `sum_segments` to several arrays of the same dtype [M, S]."""
    if len(values) == 1:
        return sum_segments(values[0], segments)[None]
    stacked = np.stack(values, dtype=np.float64, casting="safe")
    return segments.sum(stacked).astype(_sum_dtype(values[0].dtype))


def sum_in_order(values: Floats) -> Any:
    """Sum `values` [..., S] in order and in their dtype, like Python's `sum` of tensors."""
    if not values.shape[-1]:
        return np.zeros(values.shape[:-1], values.dtype)
    return np.cumsum(values, axis=-1)[..., -1]


def _sum_dtype(dtype: np.dtype[Any]) -> Any:
    return np.float32 if dtype == np.bool_ else dtype


_MIN_MEAN_WEIGHT = 1e-8  # a mean weight up to this is not divided by


@dataclass(frozen=True)
class Policies:
    """Flat arrays over the valid tokens of the sequences [T]. None: the column is missing."""

    segments: Segments  # one segment per sequence
    rollout: Floats  # log-probs of the inference engine
    train: Floats | None = None  # the trainer's recomputation before the first update (slime's `log_probs`)
    current: Floats | None = None  # the policy being updated
    reference: Floats | None = None  # the reference policy of the KL loss
    advantages: Floats | None = None  # advantages per token
    # masked tokens of each sequence with a negative advantage [S], which OPSM counts
    masked_negative: NDArray[np.int64] | None = None

    def take(self, rows: NDArray[np.int64]) -> tuple[Policies, NDArray[np.int64]]:
        """Select sequences, and return them with the positions of their tokens."""
        tokens = self.segments.token_indices(rows)

        def cut(values: Floats | None) -> Floats | None:
            return None if values is None else values[tokens]

        negative = None if self.masked_negative is None else self.masked_negative[rows]
        taken = Policies(
            self.segments.take(rows),
            self.rollout[tokens],
            cut(self.train),
            cut(self.current),
            cut(self.reference),
            cut(self.advantages),
            negative,
        )
        return taken, tokens


class MicroBatchCorrection:
    """The correction of one micro-batch. Sequence-level values are repeated on each token, like in mis.py."""

    def __init__(self, policies: Policies, arguments: Arguments) -> None:
        self.policies, self.arguments = policies, arguments
        self.segments, self.rollout = policies.segments, policies.rollout
        self.dtype: np.dtype[Any] = self.rollout.dtype

    @property
    def train(self) -> Floats:
        assert self.policies.train is not None
        return self.policies.train

    @cached_property
    def counts(self) -> Floats:
        """Valid tokens of each sequence, at least 1 [S]."""
        return np.maximum(self.segments.lengths, 1).astype(self.dtype)

    def total(self, values: NDArray[Any]) -> Floats:
        return sum_segments(values, self.segments)

    def mean(self, values: NDArray[Any]) -> Floats:
        return self.total(values) / self.counts

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        return self.segments.spread(values)

    @cached_property
    def log_ratio(self) -> Floats:
        return self.train - self.rollout

    @cached_property
    def log_ratio_sum(self) -> Floats:
        return self.total(self.log_ratio)

    def ratio(self, level: str) -> Floats:
        """Compute exp of the log ratio at a level, clamped to ±20 after aggregation."""
        aggregated = self.log_ratio
        if level == "sequence":
            aggregated = self.spread(self.log_ratio_sum)
        elif level == "geometric":
            aggregated = self.spread(self.log_ratio_sum / self.counts)
        return exp(np.clip(aggregated, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))

    def rounded(self, bounds: tuple[float, float]) -> tuple[Any, Any]:
        return self.dtype.type(bounds[0]), self.dtype.type(bounds[1])

    @cached_property
    def raw_weights(self) -> Floats:
        """Weights before their bound. The built-in functions do not clamp the log ratio."""
        if self.arguments.function == "mis":
            return self.ratio(self.arguments.tis_level)
        return exp(self.log_ratio)

    @cached_property
    def weight_bounds(self) -> tuple[Any, Any]:
        """Bounds of the weights. `truncate` has no lower bound."""
        given = self.arguments
        if given.function != "mis":
            return self.rounded((given.tis_clip_low, given.tis_clip))
        low, high = given.tis_bounds
        return self.rounded((0.0 if given.tis_mode == "truncate" else low, high))

    @cached_property
    def bounded_weights(self) -> Floats:
        """Weights after their bound. Mask mode does not change them, and IcePop sets those outside to 0."""
        low, high = self.weight_bounds
        if self.arguments.function == "icepop":
            inside = (self.raw_weights >= low) & (self.raw_weights <= high)
            return np.where(inside, self.raw_weights, self.dtype.type(0))
        if self.arguments.function == "mis" and self.arguments.tis_mode == "mask":
            return self.raw_weights
        return np.clip(self.raw_weights, low, high)

    @property
    def train_rollout_abs_diff(self) -> Floats:
        return np.abs(self.train - self.rollout)

    @cached_property
    def factor(self) -> float:
        """Mean bounded weight before rejection, over the tokens or over the sequences' means."""
        if self.arguments.tis_level == "token":
            return float(sum_in_order(self.total(self.bounded_weights)) / self.dtype.type(max(self.segments.tokens, 1)))
        return float(sum_in_order(self.mean(self.bounded_weights)) / self.dtype.type(max(len(self.segments), 1)))

    @property
    def normalizes(self) -> bool:
        given = self.arguments
        return given.function == "mis" and given.tis_batch_normalize and self.factor > _MIN_MEAN_WEIGHT

    @cached_property
    def weights(self) -> Floats:
        return self.bounded_weights / self.dtype.type(self.factor) if self.normalizes else self.bounded_weights

    @cached_property
    def rejection_ratios(self) -> Floats:
        return self.ratio(self.arguments.rs_level)

    @cached_property
    def rejection_bounds(self) -> tuple[Any, Any]:
        return self.rounded(self.arguments.rs_bounds)

    @cached_property
    def catastrophic(self) -> Bools:
        """Tokens whose ratio is below the veto. Its logarithm is float32 regardless of the run's dtype."""
        with np.errstate(divide="ignore", invalid="ignore"):
            threshold = np.log(np.float32(self.arguments.rs_veto_threshold))
        return np.asarray(self.log_ratio < threshold, np.bool_)

    @cached_property
    def vetoed(self) -> Bools:
        return self.segments.sum(self.catastrophic) > 0

    @cached_property
    def kept(self) -> Bools:
        kept = np.ones(self.segments.tokens, np.bool_)
        given = self.arguments
        if given.weighs and given.function == "mis" and given.tis_mode == "mask":
            kept &= _lies_within(self.raw_weights, self.weight_bounds)
        if given.rejects:
            kept &= _lies_within(self.rejection_ratios, self.rejection_bounds)
        if given.vetoes:
            kept &= ~self.spread(self.vetoed)
        return kept

    @cached_property
    def kept_counts(self) -> Floats:
        return np.maximum(self.total(self.kept), 1)


def _lies_within(values: Floats, bounds: tuple[Any, Any]) -> Bools:
    return np.asarray((values >= bounds[0]) & (values <= bounds[1]), np.bool_)


_MIN_SUM_OF_SQUARES = 1e-8


class MicroBatchLoss(MicroBatchCorrection):
    """A micro-batch with current policy and advantages. Order: surrogate, OPSM, weights, kept mask."""

    def __init__(self, policies: Policies, arguments: Arguments, version: SlimeVersion) -> None:
        super().__init__(policies, arguments)
        self.version = version

    @property
    def current(self) -> Floats:
        assert self.policies.current is not None
        return self.policies.current

    @property
    def advantages(self) -> Floats:
        assert self.policies.advantages is not None
        return self._finite(self.policies.advantages)

    @property
    def old(self) -> Floats:
        """The anchor of the PPO ratio: the recomputation, or the rollout's log-probs."""
        return self.rollout if self.arguments.use_rollout_logprobs else self.train

    def _finite(self, values: Floats) -> Floats:
        """Replace NaN and infinities by 0 for Miles."""
        return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) if self.version.finite else values

    @cached_property
    def ppo_kl(self) -> Floats:
        """Old minus current log-prob. GSPO: its mean over the sequence."""
        difference = self.old - self.current
        if self.arguments.advantage_estimator == "gspo":
            difference = self.spread(self.mean(difference))
        return self._finite(difference)

    @cached_property
    def surrogate(self) -> LossTerm:
        """Clipped loss per token. Miles uses a float32 ratio within exp(±20)."""
        given = self.arguments
        low, high = 1 - given.eps_clip, 1 + (given.eps_clip if given.eps_clip_high is None else given.eps_clip_high)
        x = -self.ppo_kl
        if self.version.finite:
            x = np.clip(x.astype(np.float32), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        if given.advantage_estimator == "cispo" and self.version.cispo:
            return cispo_loss(self.advantages, x, self.current, low, high)
        return ppo_loss(self.advantages, x, low, high, dual=given.eps_clip_c if self.version.dual_clip else None)

    @cached_property
    def drift(self) -> Floats:
        """Mean of old minus current log-prob of each sequence, for OPSM [S]."""
        return self.mean(self.old - self.current)

    @cached_property
    def pg_loss(self) -> Floats:
        losses = self.surrogate.losses
        if self.arguments.use_opsm:
            losses = np.where(self._masked_by_opsm, 0, losses).astype(losses.dtype)
        return losses * self.weights if self.arguments.weighs else losses

    @cached_property
    def _masked_by_opsm(self) -> Bools:
        return off_policy_mask(self.advantages, self.drift, self.segments, self.arguments.opsm_delta)

    @property
    def opsm_clipfrac(self) -> Floats:
        """Tokens of each sequence that OPSM masks, including invalid ones, divided by its valid tokens [S]."""
        assert self.policies.masked_negative is not None
        drifted: Bools = self.drift > self.dtype.type(self.arguments.opsm_delta)
        masked = self.total(self._masked_by_opsm) + self.policies.masked_negative * drifted
        return (masked / self.counts).astype(np.float32)

    @property
    def train_rollout_abs_diff(self) -> Floats:
        """Absolute difference of rollout and anchor. slime of 2026-08 uses current log-probs in a bypass."""
        bypassed = self.arguments.use_rollout_logprobs and self.version.bypass_compares_current
        return self._finite(np.abs((self.current if bypassed else self.old) - self.rollout))

    @property
    def train_rollout_kl(self) -> Floats:
        return self._kl(self.rollout, self.old, "low_var_kl")

    @property
    def kl_loss(self) -> Floats:
        """KL of current and reference, in float32. Unbiased: times current/old before the bound."""
        assert self.policies.reference is not None
        importance = exp(self.current - self.old) if self.arguments.use_unbiased_kl else None
        return self._kl(self.current, self.policies.reference, self.arguments.kl_loss_type, importance)

    def _kl(self, policy: Floats, base: Floats, kind: str, importance: Floats | None = None) -> Floats:
        log_ratio = policy.astype(np.float32) - base.astype(np.float32)
        if kind != "low_var_kl":
            estimate = kl_estimate(log_ratio, kind)
            return estimate if importance is None else np.multiply(importance, estimate)
        if self.version.finite:
            log_ratio = np.clip(self._finite(log_ratio), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return low_variance_kl(log_ratio, importance)

    @property
    def ess_ratio(self) -> Floats:
        ratio = exp(np.clip((-self.ppo_kl).astype(np.float32), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        squares = np.maximum(self.total(ratio * ratio), np.float32(_MIN_SUM_OF_SQUARES))
        return self.total(ratio) ** 2 / (self.counts.astype(np.float32) * squares)
