"""verl's policy losses, with the options, defaults and denominators of each version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from mismatchctl.batch import Bools, Float64s, Floats, Segments
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.framework import Dtype, Loss, Meaning
from mismatchctl.frameworks.run import Step
from mismatchctl.frameworks.verl.helper import Computed
from mismatchctl.frameworks.verl.plan import VerlPlan
from mismatchctl.frameworks.verl.sample import clamp, mean
from mismatchctl.frameworks.verl.versions import VerlVersion
from mismatchctl.measure.metrics.quantity import KEPT, Quantity
from mismatchctl.surrogates import cispo, exp, factor, ppo

Within = Literal["sum", "mean"]


@dataclass(frozen=True)
class Options:
    """verl's own names for what a loss depends on.

    Attributes:
        loss_mode: a registered policy loss; None: what the correction's `loss` asks for.
        loss_agg_mode: token-mean, token-sum (2026), seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm.
        clip_ratio: bound on the ratio, where the two below are None.
        clip_ratio_low: the ratio is clipped at 1 - this.
        clip_ratio_high: the ratio is clipped at 1 + this.
        clip_ratio_c: dual clip, above 1.
        tau_pos: SAPO's temperature where advantages are positive.
        tau_neg: SAPO's temperature elsewhere.
        dro_beta: DRO's penalty.
        dp_size: data-parallel ranks, by which losses over global sizes are multiplied.
        batch_num_tokens: tokens of the mini-batch over all ranks; None: those kept here.
        global_batch_size: sequences of the mini-batch over all ranks; None: those kept here.
        loss_scale_factor: divisor of seq-mean-token-sum-norm (2026); None: the padded length.
        padded_length: width of the padded batch; None: the longest row.
        rollout_is: whether weights enter the loss (a key of the first version's configuration).
        dtype: what is computed in.
    """

    loss_mode: str | None = None
    loss_agg_mode: str = "token-mean"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    dro_beta: float = 0.1
    dp_size: int = 1
    batch_num_tokens: float | None = None
    global_batch_size: float | None = None
    loss_scale_factor: float | None = None
    padded_length: int | None = None
    rollout_is: bool = True
    dtype: Dtype = "float64"

    @classmethod
    def read(cls, given: Mapping[str, Any], version: VerlVersion) -> Options:
        """Options by name; `global_batch_info` may hold some of them, as in verl.

        Raises:
            ConfigError: an unknown option, or a value that verl rejects.
        """
        flat = dict(given)
        flat |= flat.pop("global_batch_info", None) or {}
        known = [field.name for field in fields(cls)]
        for name in flat:
            if name not in known:
                raise ConfigError(f"verl's losses have no option {name!r}{suggestion(name, known)}")
        options = cls(**flat)
        if options.clip_ratio_c <= 1:
            raise ConfigError(f"clip_ratio_c bounds the ratio from above: it must be > 1, got {options.clip_ratio_c}")
        if options.loss_agg_mode not in _WITHIN or (
            options.loss_agg_mode == "token-sum" and version.agg_denominators != "scaled"
        ):
            raise ConfigError(f"Invalid loss_agg_mode: {options.loss_agg_mode}")
        return options

    @property
    def low(self) -> float:
        """How far below 1 the ratio may fall."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def high(self) -> float:
        """How far above 1 the ratio may rise."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


@dataclass(frozen=True)
class LossTokens:
    """What a loss sees, over the valid tokens [T]: `kept` is the mask after rejection."""

    advantages: Floats
    current: Floats
    anchor: Floats
    kept: Bools
    segments: Segments
    options: Options

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval that the ratio is clipped to."""
        return 1 - self.options.low, 1 + self.options.high


@dataclass(frozen=True)
class PerToken:
    """A loss per token [T] before weights, and what verl logs beside it."""

    losses: Floats
    metrics: dict[str, float]


LOSS: tuple[Meaning, ...] = (
    Meaning(
        "actor/ppo_kl", "",
        "anchor minus current log-prob, clamped to +-20 by some losses; the anchor is train, in bypass mode rollout",
        KEPT, "mean", Quantity.K1, "current/train",
    ),
    Meaning("actor/pg_clipfrac", "", "whether the clip decides the token's loss", KEPT, "mean", Quantity.CLIPPED,
            "current/anchor"),
    Meaning("actor/pg_clipfrac_lower", "", "whether the dual clip decides the token's loss", KEPT, "mean"),
    Meaning("actor/pg_loss", "", "policy loss of the token, weighted", KEPT, "as loss_agg_mode says", Quantity.LOSS,
            "current/anchor"),
)  # fmt: skip
"""What the actor logs of its loss."""


def _metrics(tokens: LossTokens, log_ratio: Floats, clipped: Any = None, clipped_lower: Any = None) -> dict[str, float]:
    """verl's three, as means over the kept tokens; a share that the loss does not have is 0."""
    shares = {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": clipped_lower}
    return _ppo_kl(tokens, log_ratio) | {
        name: 0.0 if share is None else float(mean(share[tokens.kept])) for name, share in shares.items()
    }


def _update(tokens: LossTokens) -> Floats:
    """The log ratio of the update, clamped."""
    return clamp(tokens.current - tokens.anchor)


def _ppo_kl(tokens: LossTokens, log_ratio: Floats) -> dict[str, float]:
    return {"actor/ppo_kl": float(mean(-log_ratio[tokens.kept]))}


def _vanilla(tokens: LossTokens) -> PerToken:
    options, x = tokens.options, _update(tokens)
    term = ppo(tokens.advantages, x, *tokens.bounds, dual=options.clip_ratio_c)
    return PerToken(term.losses, _metrics(tokens, x, term.clipped, term.clipped_lower))


def _gspo(tokens: LossTokens) -> PerToken:
    """PPO on the geometric mean ratio of the sequence."""
    log_ratio = tokens.current - tokens.anchor
    geometric = per_sequence(log_ratio, tokens.segments, tokens.kept, "mean").astype(log_ratio.dtype)
    term = ppo(tokens.advantages, tokens.segments.spread(np.minimum(geometric, 10.0)), *tokens.bounds)
    return PerToken(term.losses, _metrics(tokens, log_ratio, term.clipped))


def _sapo(tokens: LossTokens) -> PerToken:
    """A sigmoid gate on the ratio in place of the clip."""
    log_ratio = _update(tokens)
    dtype = log_ratio.dtype
    tau = np.where(tokens.advantages > 0, tokens.options.tau_pos, tokens.options.tau_neg).astype(dtype)
    gates = (1 / (1 + exp(-tau * (exp(log_ratio) - 1)))) * (4 / tau)
    return PerToken(-gates * tokens.advantages, _metrics(tokens, log_ratio))


def _cispo(tokens: LossTokens) -> PerToken:
    """REINFORCE weighted with the clipped ratio."""
    x = _update(tokens)
    term = cispo(tokens.advantages, x, tokens.current, *tokens.bounds)
    return PerToken(term.losses, _metrics(tokens, x, term.clipped))


def _dppo(tokens: LossTokens, trusted: Bools) -> PerToken:
    """REINFORCE weighted with the ratio, on the tokens within a trust region."""
    log_ratio = _update(tokens)
    ratios, bound = exp(log_ratio), tokens.options.clip_ratio_c
    losses = -tokens.advantages * np.minimum(ratios, bound) * tokens.current * trusted
    return PerToken(losses, _metrics(tokens, log_ratio, ~trusted, (ratios > bound) & trusted))


def _dppo_tv(tokens: LossTokens) -> PerToken:
    """The region: how far the probability of the token moved."""
    moved = exp(tokens.current) - exp(tokens.anchor)
    trusted = np.where(tokens.advantages > 0, moved <= tokens.options.high, moved >= -tokens.options.low)
    return _dppo(tokens, trusted)


def _dppo_kl(tokens: LossTokens) -> PerToken:
    """The region: KL of the two-way choice between this token and any other."""
    p, q = exp(tokens.current), exp(tokens.anchor)
    with np.errstate(divide="ignore"):  # a probability that rounding took above 1
        others = np.log(((1 - q + 1e-8) / (1 - p + 1e-8)).astype(np.float64)).astype(p.dtype)
    kl = q * (tokens.anchor - tokens.current) + (1 - q) * others
    rise = (kl <= tokens.options.high) | (p <= q)
    fall = (kl <= tokens.options.low) | (p >= q)
    return _dppo(tokens, np.where(tokens.advantages > 0, rise, fall))


def _dro(tokens: LossTokens) -> PerToken:
    """REINFORCE with a quadratic penalty on the log ratio."""
    log_ratio = tokens.current - tokens.anchor
    losses = -(tokens.current * tokens.advantages - 0.5 * tokens.options.dro_beta * log_ratio**2)
    return PerToken(losses, _ppo_kl(tokens, log_ratio))


def _reinforce(tokens: LossTokens) -> Floats:
    return factor(tokens.advantages, tokens.current, 1.0).losses


def _pure(tokens: LossTokens) -> PerToken:
    """REINFORCE on rollouts: ppo_kl is rollout minus current, not clamped."""
    return PerToken(_reinforce(tokens), _ppo_kl(tokens, tokens.current - tokens.anchor))


LOSSES: dict[str, Callable[[LossTokens], PerToken]] = {
    "vanilla": _vanilla,
    "gspo": _gspo,
    "gpg": lambda tokens: PerToken(_reinforce(tokens), {}),
    "sapo": _sapo,
    "cispo": _cispo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "dro": _dro,
}
"""Registered losses that are made of tokens. geo_mean, of sequences, stands apart; the bypass losses are chosen by
the correction; clip_cov and kl_cov, which draw tokens at random or rank the batch, are left out."""

_ALWAYS_PER_SEQUENCE = ("gspo", "sapo")

_WITHIN: dict[str, Within] = {
    "token-mean": "sum",
    "token-sum": "sum",
    "seq-mean-token-sum": "sum",
    "seq-mean-token-mean": "mean",
    "seq-mean-token-sum-norm": "sum",
}


def policy_loss(
    step: Step, computed: Computed, plan: VerlPlan, loss: str, options: Options, version: VerlVersion
) -> Loss:
    """The loss of one mini-batch that is the whole step, on one rank unless `options` says otherwise."""
    pure = loss == "policy_gradient" and options.loss_mode in (None, "rollout_correction", "bypass_mode")
    mode = "rollout_correction" if pure else _token_mode(options, loss)
    kept = computed.kept
    if version.dialect == "ratio" and (loss == "ppo_bypass" or (pure and not plan.rejections)):
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
        return _geo_mean(tokens, weights)
    made = _pure(tokens) if pure else LOSSES[mode](tokens)
    losses = made.losses if weights is None else made.losses * weights
    aggregation = "seq-mean-token-mean" if mode in _ALWAYS_PER_SEQUENCE else options.loss_agg_mode
    value = _aggregate(losses, tokens, aggregation, step, version)
    return Loss(value, made.metrics | _added_by_version(mode, loss, computed, version))


def _token_mode(options: Options, loss: str) -> str:
    mode = options.loss_mode or "vanilla"
    if mode == "bypass_mode" and loss == "ppo_bypass":
        return "vanilla"
    if mode not in LOSSES and mode != "geo_mean":
        known = [*LOSSES, "geo_mean"]
        raise ConfigError(f"there is no loss_mode {mode!r} with this correction{suggestion(mode, known)}")
    return mode


def _added_by_version(mode: str, loss: str, computed: Computed, version: VerlVersion) -> dict[str, float]:
    """Names that a version logs beside a loss's own: zeros in its first form, rollout_corr/* of bypass losses."""
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
    """The total over the sequences, divided by what this version divides by; nothing left: 0, later nan."""
    width = float(tokens.options.padded_length or step.rows.lengths.max())
    denominator = _denominator(tokens, mode, width, version)
    if not denominator:
        return 0.0 if version.agg_denominators == "mask" else float("nan")
    return float(per_sequence(losses, tokens.segments, tokens.kept, _WITHIN[mode]).sum()) / denominator


def per_sequence(losses: Floats, segments: Segments, kept: Bools, within: Within) -> Float64s:
    """Sum, or mean over the kept tokens, of the losses of each sequence [S]; 0 where nothing is kept."""
    totals = segments.sum(np.where(kept, losses, 0))
    return totals if within == "sum" else totals / np.maximum(segments.sum(kept), 1)


def _denominator(tokens: LossTokens, mode: str, width: float, version: VerlVersion) -> float:
    """Tokens, sequences or a width: those kept here, or since 2025-11-25 those that the trainer counts globally."""
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


def _geo_mean(tokens: LossTokens, weights: Floats | None) -> Loss:
    """GMPO: the geometric mean of the clipped ratios, times the mean advantage; a mean over all rows."""
    segments, kept, options = tokens.segments, tokens.kept, tokens.options
    log_ratio = tokens.current - tokens.anchor
    clipped = np.clip(log_ratio, -options.low, options.high)
    sign = np.sign(tokens.advantages)
    bounded = sign * np.minimum(sign * log_ratio, sign * clipped)

    def row_mean(values: Floats) -> Floats:
        return per_sequence(values, segments, kept, "mean").astype(values.dtype)

    losses = -row_mean(tokens.advantages) * exp(row_mean(bounded))
    if weights is not None:
        logs = np.log((weights + 1e-10).astype(np.float64)).astype(weights.dtype)
        losses = losses * exp(row_mean(logs))
    outside = log_ratio != clipped
    rising, falling = outside & (tokens.advantages > 0), outside & (tokens.advantages < 0)
    return Loss(float(losses.mean(dtype=np.float64)), _metrics(tokens, log_ratio, rising, falling))
