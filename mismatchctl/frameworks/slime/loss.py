"""slime's policy loss of one micro-batch, per token, and what Miles does otherwise."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mismatchctl.batch import Bools, Floats
from mismatchctl.frameworks.slime.arguments import Arguments
from mismatchctl.frameworks.slime.call import MicroBatchCorrection, Policies
from mismatchctl.frameworks.slime.versions import SlimeVersion
from mismatchctl.ratios import LOG_RATIO_BOUND
from mismatchctl.surrogates import Term, cispo, exp, kl_estimate, low_variance_kl, off_policy_masked, ppo

_SMALLEST_SQUARES = 1e-8


class LossCall(MicroBatchCorrection):
    """A call with the current policy and advantages. Order: surrogate, OPSM, weights, and then the kept mask."""

    def __init__(self, policies: Policies, arguments: Arguments, version: SlimeVersion) -> None:
        super().__init__(policies, arguments)
        self.version = version

    @property
    def current(self) -> Floats:
        """Log-probs of the policy being updated."""
        assert self.policies.current is not None
        return self.policies.current

    @property
    def advantages(self) -> Floats:
        """Advantage of each token."""
        assert self.policies.advantages is not None
        return self._finite(self.policies.advantages)

    @property
    def old(self) -> Floats:
        """The anchor of the PPO ratio: the recomputation, or the rollout's own log-probs."""
        return self.rollout if self.arguments.use_rollout_logprobs else self.train

    def _finite(self, values: Floats) -> Floats:
        """Miles makes NaN and infinities 0."""
        return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) if self.version.finite else values

    @cached_property
    def ppo_kl(self) -> Floats:
        """Old minus current log-prob; GSPO: its mean over the sequence."""
        difference = self.old - self.current
        if self.arguments.advantage_estimator == "gspo":
            difference = self.spread(self.mean(difference))
        return self._finite(difference)

    @cached_property
    def surrogate(self) -> Term:
        """Clipped loss per token; Miles takes the ratio in float32, within exp(+-20)."""
        given = self.arguments
        low, high = 1 - given.eps_clip, 1 + (given.eps_clip if given.eps_clip_high is None else given.eps_clip_high)
        x = -self.ppo_kl
        if self.version.finite:
            x = np.clip(x.astype(np.float32), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        if given.advantage_estimator == "cispo" and self.version.cispo:
            return cispo(self.advantages, x, self.current, low, high)
        return ppo(self.advantages, x, low, high, dual=given.eps_clip_c if self.version.dual_clip else None)

    @cached_property
    def drift(self) -> Floats:
        """Mean of old minus current of each sequence, which OPSM looks at [S]."""
        return self.mean(self.old - self.current)

    @cached_property
    def pg_loss(self) -> Floats:
        """Surrogate after OPSM and times the weights."""
        losses = self.surrogate.losses
        if self.arguments.use_opsm:
            losses = np.where(self._masked_by_opsm, 0, losses).astype(losses.dtype)
        return losses * self.weights if self.arguments.weighs else losses

    @cached_property
    def _masked_by_opsm(self) -> Bools:
        return off_policy_masked(self.advantages, self.drift, self.segments, self.arguments.opsm_delta)

    @property
    def opsm_clipfrac(self) -> Floats:
        """Tokens of each sequence that OPSM masks, invalid ones too, over its valid tokens [S]."""
        assert self.policies.masked_negative is not None
        drifted: Bools = self.drift > self.dtype.type(self.arguments.opsm_delta)
        masked = self.total(self._masked_by_opsm) + self.policies.masked_negative * drifted
        return (masked / self.counts).astype(np.float32)

    @property
    def train_rollout_abs_diff(self) -> Floats:
        """How far the rollout's log-probs are from the anchor's; slime of 2026-08 looks at current ones in a bypass."""
        bypassed = self.arguments.use_rollout_logprobs and self.version.bypass_compares_current
        return self._finite(np.abs((self.current if bypassed else self.old) - self.rollout))

    @property
    def train_rollout_kl(self) -> Floats:
        """Miles: K3 of rollout against anchor, in float32, within +-10."""
        return self._kl(self.rollout, self.old, "low_var_kl")

    @property
    def kl_loss(self) -> Floats:
        """KL of current against reference, in float32; unbiased: times current/old before the bound."""
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
        """Miles: effective sample size over tokens of each sequence, of the PPO ratio [S]."""
        ratio = exp(np.clip((-self.ppo_kl).astype(np.float32), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        squares = np.maximum(self.total(ratio * ratio), np.float32(_SMALLEST_SQUARES))
        return self.total(ratio) ** 2 / (self.counts.astype(np.float32) * squares)
