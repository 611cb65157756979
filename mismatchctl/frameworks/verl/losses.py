"""verl's policy losses, and the meanings of its logged names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Floats, Segments
from mismatchctl.core.losses import LossTerm, cispo_loss, exp, factor_loss, ppo_loss, sapo_loss
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.adapter import Dtype, LoggedMetric, Loss, Meaning
from mismatchctl.frameworks.step import Step
from mismatchctl.frameworks.verl.configuration import RS_OPTIONS, VerlPlan
from mismatchctl.frameworks.verl.metrics import (
    ANY_REJECTION,
    CHI2,
    DEBUG_MEANINGS,
    ICEPOP,
    NORMALIZATION,
    NORMALIZATION_2025_11,
    OFF_POLICY,
    REJECTION,
    VETO,
    WEIGHTS,
    WEIGHTS_2025_10,
    CorrectionOutcome,
    clamp_log_ratio,
    estimator_names,
    is_high,
    mean_in_dtype,
    weight_of_token,
)
from mismatchctl.frameworks.verl.versions import VerlVersion
from mismatchctl.measure.metrics.metric import BOUNDED_WEIGHTS, KEPT_TOKENS, VALID_SEQUENCES, VALID_TOKENS, Quantity

SequenceReduction = Literal["sum", "mean"]


@dataclass(frozen=True)
class LossOptions:
    """Options of a loss, under verl's names."""

    loss_mode: str | None = None  # a registered policy loss. None: the loss in `correction.loss`.
    # token-mean, token-sum (2026), seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm
    loss_agg_mode: str = "token-mean"
    clip_ratio: float = 0.2  # bound on the ratio, if the two below are None
    clip_ratio_low: float | None = None  # the ratio is clipped at 1 - this
    clip_ratio_high: float | None = None  # the ratio is clipped at 1 + this
    clip_ratio_c: float = 3.0  # dual clip, above 1
    tau_pos: float = 1.0  # SAPO's temperature for positive advantages
    tau_neg: float = 1.05  # SAPO's temperature for other advantages
    dro_beta: float = 0.1  # DRO's penalty
    dp_size: int = 1  # data-parallel ranks. Losses over global sizes are multiplied by it.
    batch_num_tokens: float | None = None  # tokens of the mini-batch over all ranks. None: the kept tokens.
    global_batch_size: float | None = None  # sequences of the mini-batch over all ranks. None: the kept sequences.
    loss_scale_factor: float | None = None  # divisor of seq-mean-token-sum-norm (2026). None: the padded length.
    padded_length: int | None = None  # width of the padded batch. None: the longest row.
    rollout_is: bool = True  # True if weights multiply the loss (a key of the first version)
    dtype: Dtype = "float64"  # dtype of the computation

    @classmethod
    def read(cls, given: Mapping[str, Any], version: VerlVersion) -> LossOptions:
        flat = dict(given)
        flat |= flat.pop("global_batch_info", None) or {}
        known = [field.name for field in fields(cls)]
        for name in flat:
            if name not in known:
                raise ConfigError(f"verl's losses: unknown option {name!r}{suggestion(name, known)}")
        options = cls(**flat)
        if options.clip_ratio_c <= 1:
            raise ConfigError(f"clip_ratio_c bounds the ratio from above: it must be > 1, got {options.clip_ratio_c}")
        if options.loss_agg_mode not in _SEQUENCE_REDUCTIONS or (
            options.loss_agg_mode == "token-sum" and version.agg_denominators != "scaled"
        ):
            raise ConfigError(f"Invalid loss_agg_mode: {options.loss_agg_mode}")
        return options

    @property
    def low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(frozen=True)
class LossTokens:
    """Inputs of a loss over the valid tokens [T]. `kept` is the mask after rejection."""

    advantages: Floats
    current: Floats
    anchor: Floats
    kept: Bools
    segments: Segments
    options: LossOptions

    @property
    def bounds(self) -> tuple[float, float]:
        return 1 - self.options.low, 1 + self.options.high

    @cached_property
    def log_ratio(self) -> Floats:
        return self.current - self.anchor

    @cached_property
    def x(self) -> Floats:
        return clamp_log_ratio(self.log_ratio)


TokenLosses = tuple[Floats, dict[str, float]]
"""A loss per token [T] before weights, and its logged metrics."""


LOSS_MEANINGS: tuple[Meaning, ...] = (
    Meaning(
        "actor/ppo_kl", "",
        "anchor minus current log-prob, clamped to +-20 by some losses; the anchor is train, in bypass mode rollout",
        KEPT_TOKENS, "mean", Quantity.K1, "current/train",
    ),
    Meaning("actor/pg_clipfrac", "", "whether the clip decides the token's loss", KEPT_TOKENS, "mean", Quantity.CLIPPED,
            "current/anchor"),
    Meaning("actor/pg_clipfrac_lower", "", "whether the dual clip decides the token's loss", KEPT_TOKENS, "mean"),
    Meaning("actor/pg_loss", "", "policy loss of the token, weighted", KEPT_TOKENS, "as loss_agg_mode says",
            Quantity.LOSS, "current/anchor"),
)  # fmt: skip
"""Meanings of the actor's loss metrics."""


def _compute_metrics(
    tokens: LossTokens, log_ratio: Floats, clipped: Any = None, clipped_lower: Any = None
) -> dict[str, float]:
    """Compute verl's three metrics as means over the kept tokens. Shares that the loss does not have are 0."""
    shares = {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": clipped_lower}
    return _ppo_kl(tokens, log_ratio) | {
        name: 0.0 if share is None else float(mean_in_dtype(share[tokens.kept])) for name, share in shares.items()
    }


def _ppo_kl(tokens: LossTokens, log_ratio: Floats) -> dict[str, float]:
    return {"actor/ppo_kl": float(mean_in_dtype(-log_ratio[tokens.kept]))}


def _measured(tokens: LossTokens, term: LossTerm, log_ratio: Floats | None = None) -> TokenLosses:
    x = tokens.x if log_ratio is None else log_ratio
    return term.losses, _compute_metrics(tokens, x, term.clipped, term.clipped_lower)


def _gspo_loss(tokens: LossTokens) -> TokenLosses:
    """Apply PPO to the geometric mean ratio of the sequence."""
    geometric = reduce_sequences(tokens.log_ratio, tokens.segments, tokens.kept, "mean").astype(tokens.log_ratio.dtype)
    term = ppo_loss(tokens.advantages, tokens.segments.spread(np.minimum(geometric, 10.0)), *tokens.bounds)
    return _measured(tokens, term, tokens.log_ratio)


def _dppo_loss(tokens: LossTokens, trusted: Bools) -> TokenLosses:
    """Apply REINFORCE weighted with the ratio to the tokens in a trust region."""
    ratios, bound = exp(tokens.x), tokens.options.clip_ratio_c
    losses = -tokens.advantages * np.minimum(ratios, bound) * tokens.current * trusted
    return losses, _compute_metrics(tokens, tokens.x, ~trusted, (ratios > bound) & trusted)


def _dppo_tv_loss(tokens: LossTokens) -> TokenLosses:
    moved = exp(tokens.current) - exp(tokens.anchor)
    return _dppo_loss(
        tokens, np.where(tokens.advantages > 0, moved <= tokens.options.high, moved >= -tokens.options.low)
    )


def _dppo_kl_loss(tokens: LossTokens) -> TokenLosses:
    """Restrict the binary KL between this token and all other tokens."""
    p, q = exp(tokens.current), exp(tokens.anchor)
    with np.errstate(divide="ignore"):  # a probability that rounding took above 1
        others = np.log(((1 - q + 1e-8) / (1 - p + 1e-8)).astype(np.float64)).astype(p.dtype)
    kl = q * (tokens.anchor - tokens.current) + (1 - q) * others
    rise, fall = (kl <= tokens.options.high) | (p <= q), (kl <= tokens.options.low) | (p >= q)
    return _dppo_loss(tokens, np.where(tokens.advantages > 0, rise, fall))


def _dro_loss(tokens: LossTokens) -> TokenLosses:
    """Apply REINFORCE with a quadratic penalty on the log ratio."""
    penalty = 0.5 * tokens.options.dro_beta * tokens.log_ratio**2
    return -(tokens.current * tokens.advantages - penalty), _ppo_kl(tokens, tokens.log_ratio)


def _reinforce_loss(tokens: LossTokens) -> Floats:
    return factor_loss(tokens.advantages, tokens.current, 1.0).losses


LOSSES: dict[str, Callable[[LossTokens], TokenLosses]] = {
    "vanilla": lambda t: _measured(t, ppo_loss(t.advantages, t.x, *t.bounds, dual=t.options.clip_ratio_c)),
    "gspo": _gspo_loss,
    "gpg": lambda t: (_reinforce_loss(t), {}),
    "sapo": lambda t: _measured(t, sapo_loss(t.advantages, t.x, t.options.tau_pos, t.options.tau_neg)),
    "cispo": lambda t: _measured(t, cispo_loss(t.advantages, t.x, t.current, *t.bounds)),
    "dppo_tv": _dppo_tv_loss,
    "dppo_kl": _dppo_kl_loss,
    "dro": _dro_loss,
    "rollout_correction": lambda t: (_reinforce_loss(t), _ppo_kl(t, t.log_ratio)),
}
"""Registered losses over tokens. geo_mean is defined on sequences, and the correction selects the bypass losses.
clip_cov and kl_cov are not supported, because they draw random tokens or rank the batch."""

_SEQUENCE_MEAN_LOSSES = ("gspo", "sapo")

_SEQUENCE_REDUCTIONS: dict[str, SequenceReduction] = {
    "token-mean": "sum",
    "token-sum": "sum",
    "seq-mean-token-sum": "sum",
    "seq-mean-token-mean": "mean",
    "seq-mean-token-sum-norm": "sum",
}


def compute_policy_loss(
    step: Step, computed: CorrectionOutcome, plan: VerlPlan, loss: str, options: LossOptions, version: VerlVersion
) -> Loss:
    """Compute the loss of one mini-batch that is the whole step, on one rank unless `options` sets global sizes."""
    pure = loss == "policy_gradient" and options.loss_mode in (None, "rollout_correction", "bypass_mode")
    mode = "rollout_correction" if pure else _aggregation_mode(options, loss)
    kept = computed.kept
    if (
        version.dialect == "ratio"
        and not version.names_loss
        and (loss == "ppo_bypass" or (pure and not plan.rejections))
    ):
        # PPO in bypass mode rejects nothing: rollout is compared with itself, if at all. The pure loss takes the mask
        # only when rollout_rs is set: a veto alone does nothing.
        kept = np.ones_like(kept)
    tokens = LossTokens(
        step.values("advantages"),
        step.values("current_log_probs"),
        step.values("train_log_probs" if loss == "ppo" else "rollout_log_probs"),
        kept,
        step.segments,
        options,
    )
    # In bypass mode PPO's ratio is the importance weight already: verl does not weight it again.
    weights = computed.weights if options.rollout_is and plan.applied and loss != "ppo_bypass" else None
    if mode == "geo_mean":
        return _geo_mean_loss(tokens, weights)
    losses, metrics = LOSSES[mode](tokens)
    losses = losses if weights is None else losses * weights
    by_sequence = mode in _SEQUENCE_MEAN_LOSSES and not (mode == "gspo" and version.gspo_follows)
    aggregation = "seq-mean-token-mean" if by_sequence else options.loss_agg_mode
    value = _aggregate(losses, tokens, aggregation, step, version)
    return Loss(value, metrics | _version_metrics(mode, loss, computed, version))


def _aggregation_mode(options: LossOptions, loss: str) -> str:
    mode = options.loss_mode or "vanilla"
    if mode == "bypass_mode" and loss == "ppo_bypass":
        return "vanilla"
    known = [*(name for name in LOSSES if name != "rollout_correction"), "geo_mean"]
    if mode not in known:
        raise ConfigError(f"unknown loss_mode {mode!r} with this correction{suggestion(mode, known)}")
    return mode


def _version_metrics(mode: str, loss: str, computed: CorrectionOutcome, version: VerlVersion) -> dict[str, float]:
    """Return metrics that a version logs in addition: zeros in the first version, rollout_corr/* for bypass losses."""
    added: dict[str, float] = {}
    if not version.normalizes and mode in ("gpg", "rollout_correction"):
        added = dict.fromkeys(("actor/pg_clipfrac", "actor/pg_clipfrac_lower"), 0.0)
        if mode == "gpg":
            added["actor/ppo_kl"] = 0.0
    if version.normalizes and (
        mode == "rollout_correction" or (loss == "ppo_bypass" and version.dialect == "estimator")
    ):
        added |= computed.logged
    return added


def _aggregate(losses: Floats, tokens: LossTokens, mode: str, step: Step, version: VerlVersion) -> float:
    """Aggregate losses with the version's denominators. Without tokens the result is 0, in later versions nan."""
    width = float(tokens.options.padded_length or step.rows.lengths.max())
    denominator = _denominator(tokens, mode, width, version)
    if not denominator:
        return 0.0 if version.agg_denominators == "mask" else float("nan")
    return float(reduce_sequences(losses, tokens.segments, tokens.kept, _SEQUENCE_REDUCTIONS[mode]).sum()) / denominator


def reduce_sequences(losses: Floats, segments: Segments, kept: Bools, within: SequenceReduction) -> Float64s:
    """Sum or average the losses of each sequence over its kept tokens [S], or return 0 for a dropped sequence."""
    totals = segments.sum(np.where(kept, losses, 0))
    return totals if within == "sum" else totals / np.maximum(segments.sum(kept), 1)


def _denominator(tokens: LossTokens, mode: str, width: float, version: VerlVersion) -> float:
    """Return the denominator: kept tokens, sequences or a width, or since 2025-11-25 the trainer's global counts."""
    options, scaled = tokens.options, version.agg_denominators == "scaled"
    norm = mode == "seq-mean-token-sum-norm"
    if norm and not scaled:
        return width
    if mode == "token-sum":
        return 1 / options.dp_size
    if mode == "token-mean":
        size, own, given = "(global) batch_num_tokens", tokens.kept.sum(), options.batch_num_tokens
    else:
        filled = tokens.segments.sum(tokens.kept) > 0
        size, own, given = "global_batch_size", filled.sum(), options.global_batch_size
    if scaled and given is None and options.dp_size > 1:
        raise ConfigError(f"{size} is required when dp_size > 1")
    if version.agg_denominators == "mask":
        return float(own)
    whole = float(own if given is None else given) / options.dp_size
    return whole * (options.loss_scale_factor or width) if norm else whole


def _geo_mean_loss(tokens: LossTokens, weights: Floats | None) -> Loss:
    """Compute GMPO: the geometric mean of the clipped ratios times the mean advantage, averaged over all rows."""
    segments, kept, options = tokens.segments, tokens.kept, tokens.options
    log_ratio = tokens.log_ratio
    clipped = np.clip(log_ratio, -options.low, options.high)
    sign = np.sign(tokens.advantages)
    bounded = sign * np.minimum(sign * log_ratio, sign * clipped)

    def row_mean(values: Floats) -> Floats:
        return reduce_sequences(values, segments, kept, "mean").astype(values.dtype)

    losses = -row_mean(tokens.advantages) * exp(row_mean(bounded))
    if weights is not None:
        logs = np.log((weights + 1e-10).astype(np.float64)).astype(weights.dtype)
        losses = losses * exp(row_mean(logs))
    outside = log_ratio != clipped
    rising, falling = outside & (tokens.advantages > 0), outside & (tokens.advantages < 0)
    return Loss(float(losses.mean(dtype=np.float64)), _compute_metrics(tokens, log_ratio, rising, falling))


_POPULATION_WORDS = {
    "tokens": VALID_TOKENS,
    "rows": "all sequences, those without a valid token too",
    "filled": VALID_SEQUENCES,
}
_REDUCTION_WORDS = {
    "mean - 1": "mean",
    "std": "standard deviation (n - 1)",
    "spread": "standard deviation (n)",
    "ess": "1 / mean of the squares of the values over their mean",
}


def list_meanings(version: VerlVersion) -> list[Meaning]:
    """List every name that a version can log, once per configuration with a different meaning."""
    corrected = [
        Meaning(
            prefix + row.name,
            when,
            f"{row.words}, less 1" if row.reduction == "mean - 1" else row.words,
            _POPULATION_WORDS[row.scope],
            _REDUCTION_WORDS.get(row.reduction, row.reduction),
            None if _describes_rejection(row, prefix) else row.like,
            _find_basis(row, version),
        )
        for table, prefix, when in _iterate_tables(version)
        for row in table
    ]
    losses = (replace(item, over=VALID_TOKENS) if version.zeroes_rejected else item for item in LOSS_MEANINGS)
    return [*corrected, *DEBUG_MEANINGS, *losses]


def _describes_rejection(row: LoggedMetric, prefix: str) -> bool:
    """Return True if the name describes the ratios that rejection compares, instead of weights."""
    return prefix.endswith("rollout_rs_") and not row.name.endswith("masked_fraction")


def _find_basis(row: LoggedMetric, version: VerlVersion) -> str:
    if row.quantity is is_high and version.dialect == "flat":
        return "ratios, which mask mode rejects by the same thresholds"
    return BOUNDED_WEIGHTS if row.quantity is weight_of_token and version.measures_applied else row.basis


def _iterate_tables(version: VerlVersion) -> Iterator[tuple[Iterable[LoggedMetric], str, str]]:
    """Iterate over the tables, with prefix and logging condition."""
    weights, rejection = f"{version.prefix}rollout_is_", f"{version.prefix}rollout_rs_"
    if version.dialect == "flat":
        yield OFF_POLICY, f"{version.prefix}mismatch_", ""
        for level, table in WEIGHTS_2025_10.items():
            yield table, weights, f"rollout_is_level: {level}"
        yield REJECTION, weights, "rollout_is_mode: mask"
    else:
        yield (*OFF_POLICY, *CHI2), version.prefix, ""
        for level in ("token", "sequence"):
            yield WEIGHTS[level], weights, f"rollout_is: {level}"
    if version.normalizes:
        names = NORMALIZATION_2025_11 if version.normalizes_empty else NORMALIZATION
        for level, name in names.items():
            yield (name,), weights, f"rollout_is: {level}, rollout_is_batch_normalize"
    if version.dialect == "ratio":
        for level, table in WEIGHTS.items():
            yield (*table, *REJECTION), rejection, f"rollout_rs: {level}"
    if version.dialect == "estimator":
        yield ICEPOP, weights, "rollout_is_threshold: lower_upper"
        for option, (statistic, level) in RS_OPTIONS.items():
            yield estimator_names(statistic, level), f"{rejection}{option}_", f"rollout_rs: {option}"
        yield ANY_REJECTION, rejection, "rollout_rs"
    else:
        yield VETO, version.prefix, ""
