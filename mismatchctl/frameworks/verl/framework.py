"""verl at one version: configurations, replay of a step, and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.corrections.model import BYPASS_SOURCE, Correction
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.adapter import (
    DEFAULT_REPLAY_OPTIONS,
    NOTHING_HIDDEN,
    Dtype,
    Framework,
    Hidden,
    Loss,
    Meaning,
    Replay,
    ReplayOptions,
    UnreadKey,
)
from mismatchctl.frameworks.lint import LintMessage
from mismatchctl.frameworks.verl.configuration import (
    ACTOR_BLOCK,
    VerlConfig,
    VerlPlan,
    find_path,
    find_unread_keys,
    is_shipped,
    make_plan,
    read_correction,
    with_rllm,
    write_keys,
)
from mismatchctl.frameworks.verl.lint import RULES, SURE_RULES
from mismatchctl.frameworks.verl.versions import VerlVersion

if TYPE_CHECKING:
    import pyarrow as pa

    from mismatchctl.frameworks.step import Step
    from mismatchctl.frameworks.verl.metrics import CorrectionOutcome
    from mismatchctl.frameworks.verl.statistics import PolicyPair


class Verl(Framework):
    """verl's rollout correction (volcengine/verl) at one of `VERSIONS`."""

    name = "verl"
    columns = {
        # In bypass mode verl fills it with a copy of the rollout's log-probs: all tokens are then bit-identical.
        "old_log_probs": "train_log_probs",
        "old_log_prob": "train_log_probs",
        "ref_log_prob": "ref_log_probs",
        # Since 2026 the mask as it was before rejection; response_mask, where both exist, is the one after it.
        "loss_mask": "response_mask",
        "uid": "prompt_id",  # one per prompt, repeated for each of its responses
        "global_step": "step",
        "global_steps": "step",
    }
    """Left out because they are ambiguous: `log_probs` (current policy, or recomputation in slime), `responses` (token
    ids or text), `score` (the reward here, a grader's score elsewhere)."""

    def __init__(self, version: VerlVersion) -> None:
        self.about = version
        self.version = version.name
        # The flat keys stand among others in their section.
        self.block = ("algorithm",) if version.dialect == "flat" else ("algorithm", "rollout_correction")

    @property
    def dated(self) -> str:
        note = f"; {self.about.note}" if self.about.note else ""
        return f"{self.title} ({self.about.date}{note})"

    def accepts_keys(self, native: Mapping[str, Any]) -> bool:
        """Return True if a key at the root is one of rollout correction, even if other frameworks have it too."""
        return not self.about.keys.keys().isdisjoint(native)

    def correction(self, native: Mapping[str, Any]) -> Correction:
        return read_correction(native, self.about)

    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        return write_keys(correction, self.about)

    def lint(self, native: Mapping[str, Any], hidden: Hidden = NOTHING_HIDDEN) -> list[LintMessage]:
        written = VerlConfig(native, self.about)
        return [finding for rule in (SURE_RULES if hidden else RULES) for finding in rule(written)]

    def is_default_file(self, name: str) -> bool:
        return is_shipped(name)

    def known_names(self, native: Mapping[str, Any]) -> dict[str, Any]:
        return with_rllm(native)

    def reads(self, place: tuple[str, ...], native: Mapping[str, Any]) -> bool:
        return place[:-1] in (find_path(native, self.about), ACTOR_BLOCK) and place[-1] in self.about.keys

    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        written = VerlConfig(native, self.about)
        return [written.gate_place(gate) for gate in correction.gates]

    def replay(
        self, table: pa.Table, correction: Correction, options: ReplayOptions = DEFAULT_REPLAY_OPTIONS
    ) -> Replay:
        """Compute what verl's helper computes for the rows of one training step.

        Bypass corrections compare current_log_probs with rollout_log_probs, all others train_log_probs. The others
        correct the whole batch. In bypass mode an actor (one rank here) corrects each micro-batch separately and logs
        means over them. The column `micro_batch` or `micro_batch_size` defines the micro-batches.
        """
        step, plan = self._step(table, options.dtype), self._plan(correction)
        if plan.source == BYPASS_SOURCE and len(batches := step.micro_batches(options.micro_batch_size)) > 1:
            return self._by_micro_batches(step, plan, batches)
        return self._replay(step, plan)

    def loss(self, table: pa.Table, correction: Correction, **options: Any) -> Loss:
        """Compute verl's policy loss. `losses.LossOptions` lists the options, which have verl's names.

        `correction.loss` selects the anchor and, without `loss_mode`, the loss.
        """
        from mismatchctl.frameworks.verl.losses import LossOptions, compute_policy_loss

        chosen = LossOptions.read(options, self.about)
        step = self._step(table, chosen.dtype)
        plan = self._plan(correction)
        with np.errstate(over="ignore", invalid="ignore"):
            return compute_policy_loss(step, self._compute(step, plan), plan, correction.loss, chosen, self.about)

    def meanings(self) -> list[Meaning]:
        from mismatchctl.frameworks.verl.losses import list_meanings

        return list_meanings(self.about)

    def unread(self, native: Mapping[str, Any]) -> list[UnreadKey]:
        return list(find_unread_keys(native, self.about))

    def debug_metrics(self, table: pa.Table, dtype: Dtype = "float64") -> dict[str, float]:
        """Compute `training/rollout_*`: metrics of rollout and train probabilities, before any rejection."""
        from mismatchctl.frameworks.verl.metrics import compute_debug_metrics

        step = self._step(table, dtype)
        if not step.segments.tokens and self.about.dialect != "estimator":
            raise DataError("response_mask must contain at least one valid token (1)", column="response_mask")
        return compute_debug_metrics(step.values("train_log_probs"), step.values("rollout_log_probs"))

    def logged_beside(self, table: pa.Table, correction: Correction, dtype: Dtype = "float64") -> dict[str, float]:
        """Compute the debug metrics. verl logs them if it recomputes log-probs, not in bypass mode."""
        return self.debug_metrics(table, dtype) if correction.loss == "ppo" else {}

    def actor_metrics(self, table: pa.Table, dtype: Dtype = "float64") -> dict[str, float]:
        """Compute off-policy metrics of current_log_probs. The actor of 2025-11 logs them in all modes."""
        from mismatchctl.frameworks.verl.metrics import compute_values, measure_off_policy

        sample = _make_sample(self._step(table, dtype), "current_log_probs")
        return compute_values(*measure_off_policy(sample, self.about))

    def _step(self, table: pa.Table, dtype: str) -> Step:
        from mismatchctl.frameworks.step import Step

        return Step.read(table, dtype, self.columns)

    def _replay(self, step: Step, plan: VerlPlan) -> Replay:
        computed = self._compute(step, plan)
        if computed.weights is None or not plan.applied:
            return Replay(computed.logged, None, step.by_row(computed.kept))
        kept = computed.kept & (computed.weights > 0) if self.about.zeroes_rejected else computed.kept
        return Replay(computed.logged, step.by_row(computed.weights), step.by_row(kept))

    def _by_micro_batches(self, step: Step, plan: VerlPlan, batches: Sequence[NDArray[np.int64]]) -> Replay:
        from mismatchctl.frameworks.verl.metrics import reduce_micro_batches

        parts = [self._replay(step.take(rows), plan) for rows in batches]
        places = np.argsort(np.concatenate(batches)).tolist()
        keep = [kept for part in parts for kept in part.keep]
        weights = [values for part in parts for values in part.weights or ()]
        return Replay(
            reduce_micro_batches([part.logged for part in parts], self.about),
            None if plan.weight is None else [weights[place] for place in places],
            [keep[place] for place in places],
        )

    def _plan(self, correction: Correction) -> VerlPlan:
        plan, problems = make_plan(correction, self.about)
        if problems:
            raise ConfigError(f"{correction.name}: {'; '.join(problems)}")
        return plan

    def _compute(self, step: Step, plan: VerlPlan) -> CorrectionOutcome:
        from mismatchctl.frameworks.verl.metrics import compute_correction

        policy = "train_log_probs" if plan.source == "train/rollout" else "current_log_probs"
        with np.errstate(over="ignore", invalid="ignore"):
            return compute_correction(_make_sample(step, policy), plan, self.about)


def _make_sample(step: Step, policy: str) -> PolicyPair:
    from mismatchctl.frameworks.verl.statistics import PolicyPair

    return PolicyPair(step.values(policy), step.values("rollout_log_probs"), step.segments)
