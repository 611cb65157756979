"""Compute a step as slime or Miles does: weights, rejection, loss and logged metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Floats
from mismatchctl.core.losses import LossTerm, cispo_loss, exp, kl_estimate, low_variance_kl, off_policy_mask, ppo_loss
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.adapter import LoggedMetric, Replay, read_metrics
from mismatchctl.frameworks.lint import read_table
from mismatchctl.frameworks.slime.arguments import VERSIONS, Arguments, SlimeVersion
from mismatchctl.frameworks.step import ConfiguredStep, Step
from mismatchctl.measure.metrics.metric import KEPT_TOKENS, VALID_TOKENS

_MIN_MEAN_WEIGHT = 1e-8  # slime does not divide weights by a mean of this size or smaller


class MicroBatch(ConfiguredStep):
    """slime's loss on one micro-batch. As in mis.py, a value per sequence is repeated for each of its tokens."""

    def __init__(self, step: Step, arguments: Arguments, version: SlimeVersion) -> None:
        super().__init__(step, {}, Correction())
        self.arguments, self.version, self.dtype = arguments, version, step.dtype

    @cached_property
    def advantages(self) -> Floats:
        return self.finite(self.step.values("advantages"))

    @cached_property
    def log_ratio_sum(self) -> Floats:
        return self.row_sum(self.d)

    def ratio(self, level: str) -> Floats:
        """Return the ratio at a level (token, sequence or geometric). Its logarithm is clamped to ±20."""
        aggregated = self.d
        if level == "sequence":
            aggregated = self.segments.spread(self.log_ratio_sum)
        elif level == "geometric":
            aggregated = self.segments.spread(self.log_ratio_sum / self.counts)
        return exp(np.clip(aggregated, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))

    @cached_property
    def log_ppl_diff(self) -> Floats:
        return self.segments.spread(self.row_mean(self.rollout) - self.row_mean(self.train))

    def rounded(self, bounds: tuple[float, float]) -> tuple[Any, Any]:
        return self.dtype.type(bounds[0]), self.dtype.type(bounds[1])

    @cached_property
    def raw_weights(self) -> Floats:
        """Return the weights before truncation. Only mis.py clamps log ratios before they become weights."""
        if self.arguments.function == "mis":
            return self.ratio(self.arguments.tis_level)
        return exp(self.d)

    @cached_property
    def weight_bounds(self) -> tuple[Any, Any]:
        given = self.arguments
        if given.function != "mis":
            return self.rounded((given.tis_clip_low, given.tis_clip))
        low, high = given.tis_bounds
        return self.rounded((0.0 if given.tis_mode == "truncate" else low, high))

    @cached_property
    def bounded_weights(self) -> Floats:
        low, high = self.weight_bounds
        if self.arguments.function == "icepop":
            inside = (self.raw_weights >= low) & (self.raw_weights <= high)
            return np.where(inside, self.raw_weights, self.dtype.type(0))
        if self.arguments.function == "mis" and self.arguments.tis_mode == "mask":
            return self.raw_weights
        return np.clip(self.raw_weights, low, high)

    @cached_property
    def mean_weight(self) -> float:
        """Return the mean weight before rejection, over tokens if `tis_level` is "token", else over sequences."""
        values, count = self.row_mean(self.bounded_weights), len(self.segments)
        if self.arguments.tis_level == "token":
            values, count = self.row_sum(self.bounded_weights), self.tokens
        return float(_sum_in_order(values) / self.dtype.type(max(count, 1)))

    @property
    def normalizes(self) -> bool:
        given = self.arguments
        return given.function == "mis" and given.tis_batch_normalize and self.mean_weight > _MIN_MEAN_WEIGHT

    @cached_property
    def weights(self) -> Floats:
        return self.bounded_weights / self.dtype.type(self.mean_weight) if self.normalizes else self.bounded_weights

    @cached_property
    def catastrophic(self) -> Bools:
        """Return True for each token whose ratio is below the veto threshold."""
        with np.errstate(divide="ignore", invalid="ignore"):
            threshold = np.log(np.float32(self.arguments.rs_veto_threshold))
        return np.asarray(self.d < threshold, np.bool_)

    @cached_property
    def vetoed(self) -> Bools:
        return self.segments.sum(self.catastrophic) > 0

    @cached_property
    def kept(self) -> Bools:
        kept = np.ones(self.segments.tokens, np.bool_)
        given = self.arguments
        if given.weighs and given.function == "mis" and given.tis_mode == "mask":
            kept &= _within(self.raw_weights, self.weight_bounds)
        if given.rejects:
            kept &= _within(self.ratio(given.rs_level), self.rounded(given.rs_bounds))
        if given.vetoes:
            kept &= ~self.segments.spread(self.vetoed)
        return kept

    @property
    def old(self) -> Floats:
        """Return the log-probs of PPO's old policy: `rollout` with `use_rollout_logprobs`, else `train`."""
        return self.rollout if self.arguments.use_rollout_logprobs else self.train

    def finite(self, values: Floats) -> Floats:
        """For Miles, replace NaN and infinities by 0. For slime, return the values unchanged."""
        return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) if self.version.finite else values

    @cached_property
    def ppo_kl(self) -> Floats:
        """Return old minus current log-prob per token. For GSPO, return the mean over the token's sequence."""
        difference = self.old - self.current
        if self.arguments.advantage_estimator == "gspo":
            difference = self.segments.spread(self.row_mean(difference))
        return self.finite(difference)

    @cached_property
    def surrogate(self) -> LossTerm:
        """Return the clipped loss per token. Miles computes the ratio in float32, and limits it to exp(±20)."""
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
        """Return the mean of old - current log-prob per sequence [S], which OPSM limits."""
        return self.row_mean(self.old - self.current)

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
        """Return tokens that OPSM masks (as in slime, also invalid ones) divided by valid tokens, per sequence [S]."""
        drifted: Bools = self.drift > self.dtype.type(self.arguments.opsm_delta)
        invalid = (self.step.all_values("advantages") < 0) & ~self.step.mask
        masked = self.row_sum(self._masked_by_opsm) + self.step.rows.sum(invalid).astype(np.int64) * drifted
        return (masked / self.counts).astype(np.float32)

    @property
    def kl_loss(self) -> Floats:
        """Return the KL per token to the reference policy, or to rollout if `ref_log_probs` is missing."""
        reference = self.step.values("ref_log_probs") if self.step.has("ref_log_probs") else self.rollout
        importance = exp(self.current - self.old) if self.arguments.use_unbiased_kl else None
        return self.kl(self.current, reference, self.arguments.kl_loss_type, importance)

    def kl(self, policy: Floats, base: Floats, kind: str, importance: Floats | None = None) -> Floats:
        log_ratio = policy.astype(np.float32) - base.astype(np.float32)
        if kind != "low_var_kl":
            estimate = kl_estimate(log_ratio, kind)
            return estimate if importance is None else np.multiply(importance, estimate)
        if self.version.finite:
            log_ratio = np.clip(self.finite(log_ratio), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return low_variance_kl(log_ratio, importance)

    @property
    def ess_ratio(self) -> Floats:
        ratio = exp(np.clip((-self.ppo_kl).astype(np.float32), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        squares = np.maximum(self.row_sum(ratio * ratio), np.float32(1e-8))
        return self.row_sum(ratio) ** 2 / (self.counts.astype(np.float32) * squares)


def _within(values: Floats, bounds: tuple[Any, Any]) -> Bools:
    return np.asarray((values >= bounds[0]) & (values <= bounds[1]), np.bool_)


def _sum_in_order(values: Floats) -> Any:
    """Sum `values` [S] one after another in their dtype, as Python's `sum` does."""
    return np.cumsum(values)[-1] if len(values) else values.dtype.type(0)


VALUES: dict[str, Callable[[MicroBatch], Any]] = {
    "train_log_ppl": lambda c: c.segments.spread(-c.row_mean(c.train)),
    "train_ppl": lambda c: c.segments.spread(exp(-c.row_mean(c.train))),
    "rollout_log_ppl": lambda c: c.segments.spread(-c.row_mean(c.rollout)),
    "rollout_ppl": lambda c: c.segments.spread(exp(-c.row_mean(c.rollout))),
    "k1": lambda c: c.rollout - c.train,
    # Unlike compute_k3, do not use a series near 0, to get the same rounding errors as slime.
    "k3": lambda c: exp(c.d) - c.d - c.dtype.type(1),
    "log_ppl_abs_diff": lambda c: np.abs(c.log_ppl_diff),
    "ppl_ratio": lambda c: exp(c.log_ppl_diff),
    "squared_ratio": lambda c: c.segments.spread(c.row_mean(c.ratio("token") * c.ratio("token")) - c.dtype.type(1)),
    "squared_product": lambda c: c.segments.spread(
        exp(2 * np.clip(c.log_ratio_sum, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - c.dtype.type(1)
    ),
    "weights_low": lambda c: c.raw_weights < c.weight_bounds[0],
    "weights_high": lambda c: c.raw_weights > c.weight_bounds[1],
    "ratios_low": lambda c: c.ratio(c.arguments.rs_level) < c.rounded(c.arguments.rs_bounds)[0],
    "ratios_high": lambda c: c.ratio(c.arguments.rs_level) > c.rounded(c.arguments.rs_bounds)[1],
    "vetoed": lambda c: c.segments.spread(c.vetoed),
    "factor": lambda c: np.full(c.segments.tokens, c.mean_weight if c.normalizes else 1.0, c.dtype),
    "mean_weight": lambda c: c.segments.spread(c.row_mean(c.weights)),
    "min_weight": lambda c: c.segments.spread(c.segments.min(c.weights).astype(c.dtype)),
    "max_weight": lambda c: c.segments.spread(c.segments.max(c.weights).astype(c.dtype)),
    "weight_distance": lambda c: np.abs(c.raw_weights - 1),
    "changed": lambda c: c.weights != c.raw_weights,
    "clipped": lambda c: c.surrogate.clipped,
    "update_ratio": lambda c: exp(-c.ppo_kl),
    # With use_rollout_logprobs, `old` is `rollout`, so slime of 2026-08 compares `current` with `rollout`.
    "train_rollout_abs_diff": lambda c: c.finite(
        np.abs(
            (c.current if c.arguments.use_rollout_logprobs and c.version.bypass_compares_current else c.old) - c.rollout
        )
    ),
    "train_rollout_kl": lambda c: c.kl(c.rollout, c.old, "low_var_kl"),
    # In slime of October 2025, `tis_mode: mask` sets weights outside of their bounds to 0.
    "zeroed_weights": lambda c: np.where(
        _within(c.raw_weights, c.weight_bounds) | (c.arguments.tis_mode != "mask"), c.bounded_weights, 0
    ).astype(c.dtype),
    "kept_weights": lambda c: (c.bounded_weights * c.kept).astype(c.dtype),
}
"""Value named in names.yaml -> function that computes it. Values without a function are attributes of MicroBatch."""

CONDITIONS: dict[str, Callable[[Arguments], bool]] = {
    "": lambda a: True,
    "mis.py, with use_tis or get_mismatch_metrics": lambda a: a.function == "mis",
    "mis.py, use_tis": lambda a: a.function == "mis" and a.use_tis,
    "mis.py, use_tis, tis_mode: truncate": lambda a: a.function == "mis" and a.use_tis and a.tis_mode == "truncate",
    "mis.py, use_tis, tis_mode: clip": lambda a: a.function == "mis" and a.use_tis and a.tis_mode == "clip",
    "mis.py, use_tis, tis_mode: mask": lambda a: a.function == "mis" and a.use_tis and a.tis_mode == "mask",
    "mis.py, use_tis, use_rs": lambda a: a.rejects,
    "mis.py, use_tis, use_rs, rs_veto_threshold": lambda a: a.vetoes,
    "mis.py, use_tis, tis_batch_normalize": lambda a: a.function == "mis" and a.use_tis and a.tis_batch_normalize,
    "use_tis, built-in function or IcePop": lambda a: a.function in ("vanilla", "icepop"),
    "use_tis or get_mismatch_metrics": lambda a: a.function != "none",
    "use_kl_loss": lambda a: a.use_kl_loss,
    "use_opsm": lambda a: a.use_opsm,
}
"""Condition for logging a metric in slime (see names.yaml) -> function that returns True if it is met."""

_TABLES = read_metrics(__file__)
METRICS = (*_TABLES["mis"], *_TABLES["loss"], *_TABLES["miles"])
"""All metrics except `loss`: a replay adds pg_loss and kl_loss_coef * kl_loss, because dumps lack the entropy term."""
_LOSS_VALUES = {metric.values for metric in (*_TABLES["loss"], *_TABLES["miles"])}


def list_metrics(version: SlimeVersion) -> list[LoggedMetric]:
    known = METRICS if version.finite else (*_TABLES["mis"], *_TABLES["loss"])
    logged = [item for metric in known if (item := _in_version(metric, version)) is not None]
    if not version.zeroes_rejected:
        return logged
    zeroed, vetoed = _TABLES["2025-10"]
    return [*(zeroed if metric.name == zeroed.name else metric for metric in logged), vetoed]


def _in_version(metric: LoggedMetric, version: SlimeVersion) -> LoggedMetric | None:
    name = version.names.get(metric.name, metric.name)
    if name is None:
        return None
    over = metric.over
    if version.one_mask and over == "original":
        over = "kept"
    elif version.zeroes_rejected and over == "kept" and metric.name != "pg_loss":
        over = "original"
    return replace(metric, name=name, over=over)


DOCUMENTED_NAMES: dict[str, str] = read_table(__file__, "options.yaml")["documented_names"]
"""Name of a metric in slime's documentation -> name that slime's code logs for this metric."""

_POPULATION_WORDS = {"original": VALID_TOKENS, "kept": KEPT_TOKENS, "none": "sequences"}


def list_meanings(version: SlimeVersion) -> list[LoggedMetric]:
    """List all names that a version can log, and documented names that it does not log."""
    metrics = list_metrics(version)
    whole = LoggedMetric(
        "train/loss", "", "pg_loss + kl_loss_coef * kl_loss", KEPT_TOKENS, "as for pg_loss and kl_loss"
    )
    others = DOCUMENTED_NAMES.keys() - {item.name for item in metrics}
    unlogged = [_describe_unlogged(name, version) for name in DOCUMENTED_NAMES if name in others]
    return [*(_describe(item, version) for item in metrics), whole, *unlogged]


def _describe_unlogged(name: str, version: SlimeVersion) -> LoggedMetric:
    item = next(item for item in METRICS if item.name == DOCUMENTED_NAMES[name])
    until = next((item.name for item in reversed(VERSIONS) if name in item.names.values()), "")
    when = f"{f'until {until}' if until else 'never: only documented'}, the code logs train/{item.name}"
    described = _describe(replace(item, name=name, when=when), version)
    return replace(described, logged_as=f"train/{item.name}", until=until)


def _describe(item: LoggedMetric, version: SlimeVersion) -> LoggedMetric:
    over, reduction = _POPULATION_WORDS[item.over], _describe_reduction(item, version)
    return replace(item, name=f"train/{item.name}", over=over, reduction=reduction)


def _describe_reduction(item: LoggedMetric, version: SlimeVersion) -> str:
    counted = "rollouts" if version.rollout_denominators else "sequences"
    if item.over == "none":
        return f"sum over sequences / {counted}"
    if version.rollout_denominators:
        return f"{item.reduction} within each rollout (sum / number of tokens before rejection), then over all rollouts"
    return f"{item.reduction} within each sequence (0 if no token is kept), then over all sequences"


@np.errstate(over="ignore", invalid="ignore")
def replay_step(step: Step, given: Arguments, version: SlimeVersion, micro_batch_size: int | None) -> Replay:
    lengths, anchored = step.segments.lengths, not given.use_rollout_logprobs
    divisor, tokens = len(lengths), None  # `tokens` [S]: number of valid tokens in the rollout of each sequence
    if given.calculate_per_token_loss:  # count rejected tokens, and one token per empty sequence
        divisor = int(np.maximum(lengths, 1).sum())
    elif version.rollout_denominators:
        names, index = np.unique(_rollouts(step), return_inverse=True)
        tokens = np.bincount(index, weights=lengths, minlength=len(names)).astype(np.int64)[index]
        divisor = len(names)
    has_loss = MicroBatch(step, given, version).has_loss
    chosen = [
        each
        for each in list_metrics(version)
        if CONDITIONS[each.when](given)
        and (has_loss or each.values not in _LOSS_VALUES or (each.values == "train_rollout_abs_diff" and anchored))
    ]
    logged = {each.name: 0.0 for each in chosen}
    weights: dict[int, NDArray[Any]] = {}
    kept: dict[int, NDArray[Any]] = {}
    for rows in step.micro_batches(micro_batch_size):
        batch = MicroBatch(step.take(rows), given, version)
        for each in chosen:
            logged[each.name] += _sum_metric(each, batch, None if tokens is None else tokens[rows])
        kept |= zip(rows.tolist(), batch.step.by_row(batch.kept), strict=True)
        if given.weighs:
            weights |= zip(rows.tolist(), batch.step.by_row(batch.weights), strict=True)
    logged = {name: total / divisor for name, total in logged.items()}
    if has_loss:
        logged["loss"] = logged["pg_loss"] + given.kl_loss_coef * logged.get("kl_loss", 0.0)
    order = range(len(step))
    return Replay(logged, [weights[row] for row in order] if given.weighs else None, [kept[row] for row in order])


def _sum_metric(metric: LoggedMetric, batch: MicroBatch, rollout_tokens: NDArray[np.int64] | None) -> float:
    values = VALUES[metric.values](batch) if metric.values in VALUES else getattr(batch, metric.values)
    per_token = batch.arguments.calculate_per_token_loss
    if metric.over == "none":
        weight = batch.counts if per_token and metric.name == "ess_ratio" else 1
        return float(_sum_in_order((values * weight).astype(values.dtype)))
    whole = metric.over == "original"
    sums = batch.row_sum(values if whole else values * batch.kept)
    if per_token:
        return float(_sum_in_order(sums))
    counts = batch.counts
    if rollout_tokens is not None:
        counts = np.maximum(rollout_tokens, 1).astype(batch.dtype)
    elif not (whole or batch.version.zeroes_rejected):
        counts = np.maximum(batch.row_sum(batch.kept), 1)
    return float(_sum_in_order(sums / counts.astype(sums.dtype)))


def _rollouts(step: Step) -> NDArray[Any]:
    for column in ("rollout_ids", "rollout_id"):
        if step.has(column):
            names = step.table[column].to_pylist()
            return np.array([f"row {row}" if name is None else f"= {name}" for row, name in enumerate(names)])
    return np.arange(len(step))
