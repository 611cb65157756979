"""slime or Miles at one version: configurations, replay of a step, and losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, option, suggestion
from mismatchctl.frameworks.adapter import (
    DEFAULT_REPLAY_OPTIONS,
    NOTHING_HIDDEN,
    Dtype,
    Framework,
    Hidden,
    LoggedMetric,
    Loss,
    Meaning,
    Replay,
    ReplayOptions,
    UnreadKey,
)
from mismatchctl.frameworks.lint import LintMessage
from mismatchctl.frameworks.slime.arguments import (
    Arguments,
    Effect,
    SlimeVersion,
    find_unread_keys,
    include_custom_config,
    is_read,
    make_arguments,
    make_correction,
    read_arguments,
    write_old_keys,
)
from mismatchctl.frameworks.slime.lint import RULES, SURE_RULES, SlimeConfig, published_outcome

if TYPE_CHECKING:
    import pyarrow as pa

    from mismatchctl.core.batch import Floats
    from mismatchctl.frameworks.slime.micro_batch import MicroBatchCorrection, Policies

_MAX_STACKED_VALUES = 1 << 20
"""Maximum number of values that are summed at once. With few tokens, calls take most of the time."""


@dataclass(frozen=True)
class StepReducer:
    """Reduction of one step to logged numbers."""

    # `--calculate-per-token-loss`: sequences are not averaged, and the total is divided by all valid tokens (an empty
    # sequence counts as one token, and rejection does not change the count)
    per_token: bool
    # valid tokens of each sequence's rollout [S], if the version divides by them. None: divide by the tokens of the
    # metric's mask.
    rollout_tokens: NDArray[np.int64] | None
    divisor: int  # divisor of the step's total
    keeps_counts: bool = False  # True if rejected tokens stay in the denominators of their sequence

    @classmethod
    def of(
        cls, version: SlimeVersion, lengths: NDArray[np.int64], rollouts: NDArray[Any], per_token: bool
    ) -> StepReducer:
        if per_token:
            return cls(True, None, int(np.maximum(lengths, 1).sum()))
        if not version.rollout_denominators:
            return cls(False, None, len(lengths), version.zeroes_rejected)
        names, index = np.unique(rollouts, return_inverse=True)
        tokens = np.bincount(index, weights=lengths, minlength=len(names)).astype(np.int64)
        return cls(False, tokens[index], len(names))

    def contributions(
        self, metrics: Sequence[LoggedMetric], call: MicroBatchCorrection, rows: NDArray[np.int64]
    ) -> Iterator[tuple[str, float]]:
        from mismatchctl.frameworks.slime.micro_batch import sum_in_order

        alike: dict[Any, list[LoggedMetric]] = defaultdict(list)
        values: dict[Any, list[NDArray[Any]]] = defaultdict(list)
        most = max(1, _MAX_STACKED_VALUES // max(call.segments.tokens, 1))
        for metric in metrics:
            made = metric.quantity(call)
            if metric.scope == "none":
                weight = call.counts if self.per_token and metric.name == "ess_ratio" else 1
                yield metric.name, float(sum_in_order((made * weight).astype(made.dtype)))
                continue
            made = made if metric.scope == "original" else made * call.kept
            of_a_kind = made.dtype, metric.scope
            alike[of_a_kind].append(metric)
            values[of_a_kind].append(made)
            if len(values[of_a_kind]) == most:
                yield from self._summed(alike.pop(of_a_kind), values.pop(of_a_kind), call, rows)
        for of_a_kind, last in alike.items():
            yield from self._summed(last, values[of_a_kind], call, rows)

    def _summed(
        self,
        alike: Sequence[LoggedMetric],
        values: Sequence[NDArray[Any]],
        call: MicroBatchCorrection,
        rows: NDArray[np.int64],
    ) -> Iterator[tuple[str, float]]:
        """Sum metrics with the same mask and dtype in one call, since a step's arrays are small."""
        from mismatchctl.frameworks.slime.micro_batch import sum_in_order, sum_stacked

        sums = sum_stacked(values, call.segments)
        if not self.per_token:
            sums = sums / self._denominators(alike[0], call, rows).astype(sums.dtype)
        totals = sum_in_order(sums)
        return zip((metric.name for metric in alike), totals.tolist(), strict=True)

    def _denominators(self, metric: LoggedMetric, call: MicroBatchCorrection, rows: NDArray[np.int64]) -> Floats:
        if self.rollout_tokens is not None:
            return np.maximum(self.rollout_tokens[rows], 1).astype(call.dtype)
        if self.keeps_counts:
            return call.counts
        return call.counts if metric.scope == "original" else call.kept_counts


_ROLLOUT_COLUMNS = ("rollout_ids", "rollout_id")
_OWN_COLUMNS = {"log_probs": "train_log_probs"}  # in a table that is known to be slime's


class Slime(Framework):
    """slime or Miles at one version."""

    columns = {
        "loss_masks": "response_mask",
        "loss_mask": "response_mask",
        "group_index": "prompt_id",
        "raw_reward": "reward",
    }
    """Left out because they are ambiguous: `log_probs` (recomputation or current policy), `rewards` (normalized within
    the group), `rollout_id` (step of a file or group of a sample), and `tokens` and `rollout_routed_experts` (include
    the prompt). Miles' policy_loss_debug uses `train_log_probs`, the schema's name for the recomputation, for the
    current policy. Such a file needs `--column`."""
    reads_yaml_1_1 = True

    def __init__(self, version: SlimeVersion) -> None:
        self.name, self.version, self.about = version.framework, version.label, version

    @property
    def dated(self) -> str:
        return f"{self.title} ({self.about.commit[:8]})"

    @property
    def _effect(self) -> Effect:
        """Effect of rejection, veto and mask mode, which share a mask. It depends on the version's denominators."""
        return "zero" if self.about.rollout_denominators or self.about.zeroes_rejected else "mask"

    def correction(self, native: Mapping[str, Any]) -> Correction:
        return make_correction(self._checked(read_arguments(native, self.about)), self.name, self._effect)

    def native(self, correction: Correction) -> tuple[dict[str, Any], list[str]]:
        said, unsaid, otherwise = make_arguments(correction, self._effect)
        if self.about.old_keys:
            keys, beyond = write_old_keys(said)
            return keys, [*unsaid, *beyond, *otherwise]
        return said.native(), [*unsaid, *otherwise]

    def lint(self, native: Mapping[str, Any], hidden: Hidden = NOTHING_HIDDEN) -> list[LintMessage]:
        written = SlimeConfig(native, self.about)
        return [finding for rule in (SURE_RULES if hidden else RULES) for finding in rule(written)]

    def with_included(self, native: dict[str, Any], folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
        return include_custom_config(native, folder)

    def reads(self, place: tuple[str, ...], native: Mapping[str, Any]) -> bool:
        return len(place) == 1 and is_read(place[0])

    def published_outcome(self, correction: Correction) -> str:
        return published_outcome(correction)

    def remarks(self, correction: Correction) -> list[str]:
        """Rejected tokens stay in the denominators since 2026: presets of the articles take them out."""
        if not (self.about.rollout_denominators and correction.gates):
            return []
        return [
            f"{self.title} keeps rejected tokens in the denominators, so the loss shrinks by their share; presets take "
            f"them out ({option('framework')} {self.name}@2026-01 too)"
        ]

    def unread(self, native: Mapping[str, Any]) -> list[UnreadKey]:
        return list(find_unread_keys(native, self.about))

    def gate_places(self, native: Mapping[str, Any], correction: Correction) -> list[str]:
        written = SlimeConfig(native, self.about)
        return [written.gate_place(gate) for gate in correction.gates]

    def replay(
        self, table: pa.Table, correction: Correction, options: ReplayOptions = DEFAULT_REPLAY_OPTIONS
    ) -> Replay:
        """Replay a step. Newer versions divide by rollouts: `rollout_ids` identifies them, else each row is one.

        The reducer `token_mean` is --calculate-per-token-loss.
        """
        given = self._arguments(correction, options.reducer)
        return _ReplayedStep(self.about, given, table, options.dtype, options.micro_batch_size).replay()

    def loss(self, table: pa.Table, correction: Correction, **options: Any) -> Loss:
        dtype = options.pop("dtype", "float64")
        size = options.pop("micro_batch_size", None)
        given = self._arguments(correction, options.pop("reducer", None))
        known = [field.name for field in fields(Arguments)]
        unknown = sorted(set(options) - {*known, "entropy_coef"})
        if unknown:
            raise ConfigError(f"slime: unknown option {unknown[0]!r}{suggestion(unknown[0], known)}")
        chosen = self._checked(replace(read_arguments({**given.native(), **options}), vetoes_alone=given.vetoes_alone))
        logged = _ReplayedStep(self.about, chosen, table, dtype, size).replay().logged
        if "loss" not in logged:
            raise ConfigError("the loss needs the columns current_log_probs and advantages")
        return Loss(logged["loss"], logged)

    def unavailable_names(self, correction: Correction, columns: Collection[str]) -> dict[str, str]:
        """Return names that need more data. The KL loss reads a reference policy, and OPSM counts masked tokens too."""
        given = self._arguments(correction, None)
        lacks_reference = given.use_kl_loss and "ref_log_probs" not in columns
        found = dict.fromkeys(("kl_loss", "loss"), "ref_log_probs in every row") if lacks_reference else {}
        return found | ({"opsm_clipfrac": "masked tokens"} if given.use_opsm else {})

    def meanings(self) -> list[Meaning]:
        from mismatchctl.frameworks.slime.metrics import list_meanings

        return list_meanings(self.about)

    def logged_key(self, name: str) -> str:
        return name.removeprefix("train/")

    def _checked(self, given: Arguments) -> Arguments:
        if given.advantage_estimator == "cispo" and not self.about.cispo:
            raise ConfigError(f"{self.name} of {self.version} does not support advantage_estimator cispo")
        return given

    def _arguments(self, correction: Correction, reducer: str | None) -> Arguments:
        if reducer not in (None, "sample_mean", "token_mean"):
            raise ConfigError(f"unknown reducer {reducer!r}; use sample_mean or token_mean")
        said, unsaid, _ = make_arguments(correction, self._effect)
        if unsaid:
            raise ConfigError(f"{self.name} cannot do this: {'; '.join(unsaid)}")
        said = self._checked(said)
        return said if reducer is None else replace(said, calculate_per_token_loss=reducer == "token_mean")


class _ReplayedStep:
    """One step under one configuration."""

    def __init__(
        self, version: SlimeVersion, given: Arguments, table: pa.Table, dtype: Dtype, micro_batch_size: int | None
    ) -> None:
        from mismatchctl.frameworks.step import Step

        self.version, self.arguments = version, given
        self.step = Step.read(table, dtype, Slime.columns | _OWN_COLUMNS)
        self.size = micro_batch_size
        self.has_loss = self.step.has("current_log_probs") and self.step.has("advantages")
        lengths = self.step.segments.lengths
        self.reducer = StepReducer.of(version, lengths, self._rollouts(), given.calculate_per_token_loss)

    @np.errstate(over="ignore", invalid="ignore")
    def replay(self) -> Replay:
        from mismatchctl.frameworks.slime.metrics import list_metrics
        from mismatchctl.frameworks.slime.micro_batch import MicroBatchCorrection, MicroBatchLoss

        policies = self._policies()
        anchored = not self.arguments.use_rollout_logprobs
        chosen = [
            each
            for each in list_metrics(self.version)
            if each.condition.is_met(self.arguments)
            and (self.has_loss or not each.needs or (each.needs == "anchor" and anchored))
        ]
        totals: dict[str, float] = defaultdict(float)
        weights = np.zeros(self.step.segments.tokens, self.step.dtype)
        kept = np.zeros(self.step.segments.tokens, np.bool_)
        for rows in self.step.micro_batches(self.size):
            taken, tokens = policies.take(rows)
            call = (
                MicroBatchLoss(taken, self.arguments, self.version)
                if self.has_loss
                else MicroBatchCorrection(taken, self.arguments)
            )
            for name, total in self.reducer.contributions(chosen, call, rows):
                totals[name] += total
            kept[tokens] = call.kept
            if self.arguments.weighs:
                weights[tokens] = call.weights
        logged = {each.name: totals[each.name] / self.reducer.divisor for each in chosen if each.name in totals}
        if self.has_loss:
            logged["loss"] = logged["pg_loss"] + self.arguments.kl_loss_coef * logged.get("kl_loss", 0.0)
        return Replay(
            logged,
            self.step.by_row(weights) if self.arguments.weighs else None,
            [flags.astype(np.bool_) for flags in self.step.by_row(kept)],
        )

    def _policies(self) -> Policies:
        from mismatchctl.frameworks.slime.micro_batch import Policies

        step, given = self.step, self.arguments
        bypass_only = given.use_rollout_logprobs and given.function == "none"
        train = None if bypass_only else step.values("train_log_probs")
        rollout = step.values("rollout_log_probs")
        if not self.has_loss:
            return Policies(step.segments, rollout, train)
        reference = "ref_log_probs" if step.has("ref_log_probs") else "rollout_log_probs"
        return Policies(
            step.segments,
            rollout,
            train,
            step.values("current_log_probs"),
            step.values(reference) if given.use_kl_loss else None,
            step.values("advantages"),
            self._masked_negative() if given.use_opsm else None,
        )

    def _masked_negative(self) -> NDArray[np.int64]:
        """Masked tokens of each row with a negative advantage."""
        negative = self.step.all_values("advantages") < 0
        return self.step.rows.sum(negative & ~self.step.mask).astype(np.int64)

    def _rollouts(self) -> NDArray[Any]:
        for column in _ROLLOUT_COLUMNS:
            if self.step.has(column):
                names = self.step.table[column].to_pylist()
                return np.array([f"row {row}" if name is None else f"= {name}" for row, name in enumerate(names)])
        return np.arange(len(self.step))
