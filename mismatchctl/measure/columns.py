"""Compute the columns of the cluster table: sums and maxima per sequence, later merged per cluster (a prompt)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core import losses
from mismatchctl.core.batch import Bools, Float64s, Floats, Segments, TokenBatch
from mismatchctl.core.losses import LossTerm
from mismatchctl.core.ratios import LOG_RATIO_BOUND, Ratios
from mismatchctl.corrections.application import (
    CorrectedBlock,
    Selection,
    Weights,
    apply_correction,
    sequences_near_bounds,
)
from mismatchctl.corrections.model import MISMATCH_SOURCE, OWN_RATIO_LOSSES, Correction, parse_loss

Columns = dict[str, Float64s]  # maps the name of a column to its values, one per sequence
LOSS_NAMES = (
    "loss", "loss_mean", "gradient_product", "squared_gradient", "loss_clipped", "loss_kept", "loss_counted",
    "loss_sequences", "loss_tokens",
)  # fmt: skip
PLAIN_LOSS_NAMES = ("plain_loss", "squared_plain_gradient")


def compute_token_loss(text: str, batch: TokenBatch) -> LossTerm | None:
    """Return the policy loss `text` (such as "ppo") per token, or `None` without current log-probs or advantages."""
    if batch.current is None or batch.advantages is None:
        return None
    kind, numbers = parse_loss(text)
    term, clipped = _surrogate_term(kind, numbers, batch, batch.advantages.astype(np.float64), batch.current)
    return replace(term, clipped=clipped)


def _surrogate_term(
    kind: str, numbers: Mapping[str, float], batch: TokenBatch, advantages: Float64s, log_probs: Floats
) -> tuple[LossTerm, Bools]:
    """Return the policy loss per token, and a flag per token: True if the loss clips or masks the token."""
    segments, current = batch.segments, log_probs.astype(np.float64)
    low, high = numbers.get("low", 0.0), numbers.get("high", np.inf)
    anchor = batch.rollout if kind in OWN_RATIO_LOSSES else batch.train
    x = np.clip(current - anchor, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    none = np.zeros_like(x, np.bool_)
    if kind in ("ppo", "ppo_bypass", "dual_clip", "two_sided", "gspo", "gspo_token"):
        own = segments.spread(segments.mean(x)) if kind in ("gspo", "gspo_token") else x
        bounds = {"cap": numbers.get("cap"), "dual": numbers.get("dual")}
        term = losses.ppo_loss(advantages, own, low, high, mean_over=segments if kind == "gspo" else None, **bounds)
        return term, (term.slope == 0) & (advantages != 0)
    if kind in ("cispo", "cispo_bypass", "topr"):
        outside = (np.exp(x) < low) | (np.exp(x) > high)
        if kind == "topr":
            return losses.topr_loss(advantages, x, current, low, high), outside & (advantages < 0)
        return losses.cispo_loss(advantages, x, current, low, high), outside
    if kind == "gmpo":
        made = losses.gmpo_loss(advantages, x, low, high, segments)
        return made, none if made.gradient_tokens is None else ~made.gradient_tokens
    if kind == "policy_gradient":
        return losses.factor_loss(advantages, current, 1.0), none
    if kind == "sapo":
        return losses.sapo_loss(advantages, x, numbers["positive"], numbers["negative"]), none
    if kind == "vespo":
        weight = np.clip(segments.sum(x), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        up, down = (
            segments.spread(losses.vespo_gate(weight, numbers[f"k_{side}"], numbers[f"rate_{side}"]))
            for side in ("positive", "negative")
        )
        return losses.factor_loss(advantages, current, np.where(advantages >= 0, up, down)), none
    plain = losses.weighted_loss(advantages, x)
    if kind in ("dppo", "ipo"):  # these losses drop tokens whose probability changed much since sampling
        moved = np.exp(current) - np.exp(batch.rollout.astype(np.float64))
        if kind == "ipo":
            dropped = np.abs(moved) > numbers["eps"]
        else:
            dropped = np.where(advantages > 0, moved > high, moved < -low)
        own, slope = (np.where(dropped, 0.0, values) for values in (plain.losses, plain.slope))
        return replace(plain, losses=own, slope=slope), dropped
    penalty = losses.quadratic_penalty(x, numbers.get("tau", 0.0))
    return replace(plain, losses=plain.losses + penalty.losses, slope=plain.slope + penalty.slope), none


def plain_loss_columns(plain: LossTerm | None, batch: TokenBatch) -> Columns:
    if plain is None:
        return {name: np.zeros(len(batch)) for name in PLAIN_LOSS_NAMES}
    total = batch.segments.sum
    return dict(zip(PLAIN_LOSS_NAMES, (total(plain.losses), total(plain.slope**2)), strict=True))


def loss_columns(correction: Correction, block: CorrectedBlock, plain: LossTerm | None, batch: TokenBatch) -> Columns:
    """Return the columns LOSS_NAMES for the loss with a correction, or zeros if it cannot be computed."""
    own = plain if correction.loss == "ppo" else compute_token_loss(correction.loss, batch)
    if own is None or own.clipped is None or plain is None:
        return {name: np.zeros(len(batch)) for name in LOSS_NAMES}
    weights: Float64s | float = block.token_weights() if correction.weights_loss else 1.0
    kept, counted = block.kept, block.counted.counts
    gradient = own.gradient(np.where(kept.expand(), weights, 0.0))
    losses = kept.sum(weights * own.losses)
    columns = (
        losses, losses / np.maximum(counted, 1), kept.sum(gradient * plain.slope), kept.sum(gradient * gradient),
        kept.sum(own.clipped.astype(np.float64)), kept.counts, counted, (counted > 0).astype(np.float64),
        batch.segments.lengths.astype(np.float64),
    )  # fmt: skip
    return dict(zip(LOSS_NAMES, columns, strict=True))


_CANCELLATION_LIMIT = 1e-4  # if the mean of w^2 is smaller, w^2 = 1 + 2 (w - 1) + (w - 1)^2 loses digits
Side = Literal["low", "high"]
SIDES: tuple[Side, Side] = ("low", "high")
COMPARED_COLUMNS = ("reward", "advantage", "length")
"""For these columns, metrics compare the mean of kept sequences with the mean of rejected sequences."""


def _squared_sums(
    number: NDArray[Any], excess: Float64s, squared_excess: Float64s, recompute: Callable[[], Float64s]
) -> Float64s:
    """Compute the sum of w^2 per sequence from sums of w - 1 and (w - 1)^2. If this is inexact, use `recompute()`."""
    found: Float64s = number + 2 * excess + squared_excess
    lost = found < _CANCELLATION_LIMIT * number
    if lost.any():
        np.copyto(found, recompute(), where=lost)
    return found


class PairFacts:
    """Quantities per sequence for a pair of policies, such as the mean log ratio, computed from sums over tokens."""

    def __init__(self, ratios: Ratios, sums: Columns) -> None:
        self.ratios, self.sums = ratios, sums
        log_ratio = sums["log_ratio"]
        self.length: Float64s = ratios.segments.sizes
        self.n: Float64s = np.maximum(self.length, 1.0)
        self.some: Float64s = (self.length > 0).astype(np.float64)
        self.mean: Float64s = -log_ratio / self.n
        bounded = np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        self.product: Float64s = np.exp(bounded) * self.some  # 1 + product_excess would lose digits if it is small
        self.product_excess: Float64s = np.expm1(bounded) * self.some

    def exp(self, values: Float64s) -> Float64s:
        with np.errstate(over="ignore"):
            found: Float64s = np.exp(values) * self.some
        return found

    def squared_ratio(self) -> Float64s:
        ratios = self.ratios
        return _squared_sums(
            self.length,
            self.sums["excess"],
            self.sums["squared_excess"],
            lambda: ratios.segments.sum((1.0 + ratios.excess) ** 2),
        )


@dataclass(frozen=True)
class CorrectionFacts:
    """Kept tokens, sums of weights and other facts per sequence of a block, before a correction normalizes weights."""

    length: Float64s  # tokens per sequence [S]
    kept: Float64s  # tokens per sequence that the correction keeps [S]
    counted: Float64s  # tokens per sequence in the denominator of the mean loss [S]
    kept_k3: Float64s  # sum of K3 over the kept tokens [S]
    # sums of (weight - 1) and of (weight - 1)^2 over the tokens of a sequence: for raw weights, for bounded weights,
    # and for bounded weights of kept tokens only
    weight_sums: Columns
    squared_kept_weight: Float64s  # sum of the squared weights of kept tokens [S]
    extremes: Columns  # largest and negated smallest weight per sequence, raw and bounded
    rejected: Mapping[tuple[int, Side], Float64s]  # (gate, side) -> rejected tokens [S]
    catastrophic: Float64s | None  # tokens with a ratio below the first veto's bound, None without a veto
    checked: Float64s  # tokens that a veto checks [S]: `length` plus tokens with probability 0 in the trainer
    # "reward", "advantage" and "length" -> (1 if the sequence has a value, else 0; the value or 0) [S]
    outcomes: Mapping[str, tuple[Float64s, Float64s]]
    loss_sums: Columns  # the LOSS_NAMES columns, or empty if losses are not requested

    @cached_property
    def token_divisor(self) -> Float64s:
        return np.maximum(self.length, 1.0)

    @cached_property
    def sequence_weight(self) -> Float64s:
        return (self.kept + self.weight_sums["kept_excess"]) / self.token_divisor

    @cached_property
    def share(self) -> Columns:
        kept = self.kept / self.token_divisor
        return {"kept": kept, "rejected": (self.length > 0) - kept}


def weight_sums(weights: Weights | None, kept: Selection) -> Columns:
    names = ("raw_weight_excess", "weight_excess", "kept_excess")
    columns = dict.fromkeys(
        (*names, *(f"squared_{name}" for name in names), "weight_low", "weight_high"), np.zeros(len(kept.segments))
    )
    if weights is None:
        return columns
    everything = Selection.everything(kept.segments)
    if weights.are_ratios:
        columns["raw_weight_excess"] = weights.ratios.excess_sum
        columns["squared_raw_weight_excess"] = weights.ratios.squared_excess_sum
    else:
        columns["raw_weight_excess"] = weights.total(weights.raw_excess, everything)
        columns["squared_raw_weight_excess"] = weights.total(weights.raw_excess**2, everything)
    if weights.per_token and weights.all_inside:
        for name in ("weight_excess", "squared_weight_excess"):
            columns[name] = columns[name.replace("weight", "raw_weight")]
    else:
        columns["weight_excess"] = weights.total(weights.excess, everything)
        columns["squared_weight_excess"] = weights.total(weights.excess**2, everything)
        for name, flags in (("weight_low", weights.low), ("weight_high", weights.high)):
            if flags.any():
                columns[name] = weights.total(flags, everything)
    if kept.tokens is None:  # a kept sequence keeps all tokens, so the sums above apply to it
        columns["kept_excess"] = np.where(kept.sequences, columns["weight_excess"], 0.0)
        columns["squared_kept_excess"] = np.where(kept.sequences, columns["squared_weight_excess"], 0.0)
    else:
        columns["kept_excess"] = weights.total(weights.excess, kept)
        columns["squared_kept_excess"] = weights.total(weights.excess * weights.excess, kept)
    return columns


def _weight_extremes(weights: Weights | None, segments: Segments) -> Columns:
    """Return the largest and the negated smallest weight per sequence, before and after weights are bounded."""
    if weights is None:
        low = high = least = most = np.ones(len(segments))
    elif not weights.per_token:
        low = high = weights.raw
        least = most = weights.bounded
    else:
        are_ratios = weights.are_ratios
        low, high = weights.ratios.ratio_range if are_ratios else (segments.min(weights.raw), segments.max(weights.raw))
        if are_ratios and (weights.rule.zero is None or weights.all_inside):
            least, most = (np.clip(end, *weights.rule.bounds) for end in (low, high))
        else:
            least, most = segments.min(weights.bounded), segments.max(weights.bounded)
    found = {"raw_weight": high, "-raw_weight": -low, "weight": most, "-weight": -least}
    return {name: np.where(segments.nonempty, values, -np.inf) for name, values in found.items()}


def _count_catastrophic(correction: Correction, ratios: Mapping[str, Ratios], batch: TokenBatch) -> Float64s | None:
    veto = next((gate for gate in correction.gates if gate.is_veto), None)
    if veto is None:
        return None
    limit, looked_at = np.log(veto.keep[0] or 0.0), ratios[veto.source]
    below = impossible_tokens(batch) if veto.source == MISMATCH_SOURCE else np.zeros(len(batch))
    return below + looked_at.segments.sum(looked_at.log_ratio < limit) if looked_at.extent[0] < limit else below


def impossible_tokens(batch: TokenBatch) -> Float64s:
    """Count each sequence's tokens with train probability 0. If all of its tokens are such tokens, return 0 for it."""
    if batch.impossible is None:
        return np.zeros(len(batch))
    return np.where(batch.segments.nonempty, batch.impossible, 0).astype(np.float64)


MISMATCH_NAME = "mismatch"  # name of the main pair of policies, trainer and rollout
FactsT = TypeVar("FactsT")
ColumnFunction = Callable[[FactsT], Float64s]
GridAxis = Literal["none", "weights", "kept", "all", "veto"] | int


@dataclass(frozen=True)
class SumColumn(Generic[FactsT]):
    """A column of the cluster table: the sum or the maximum of a value over the sequences of each cluster."""

    name: str  # unique within its pair of policies or correction
    # computes the values [S] from PairFacts or CorrectionFacts. None if a kernel computes the column.
    compute: ColumnFunction[FactsT] | None = None
    scope: Literal["token", "sequence"] = "sequence"  # one value per token (summed by a kernel), or per sequence
    # how to merge the values of several sequences. For a minimum, the largest negated value is stored.
    merge: Literal["sum", "largest"] = "sum"
    stored: bool = True  # False if the column is only an input of other columns
    # the bounds that change the column: none, the bounds of weights, the bounds of all gates (they decide which tokens
    # are kept), all bounds, the bound of the veto, or (if a number) the bounds of the gate with this index
    depends_on: GridAxis = "kept"


def _token_columns(*names: str) -> tuple[SumColumn[PairFacts], ...]:
    return tuple(SumColumn(name, scope="token") for name in names)


PAIR_COLUMNS: tuple[SumColumn[PairFacts], ...] = (
    SumColumn("tokens", lambda s: s.length),
    SumColumn("sequences", lambda s: s.some),
    SumColumn("empty_sequences", lambda s: 1.0 - s.some),
    SumColumn("squared_length", lambda s: s.length**2),
    *_token_columns("log_ratio", "abs", "square", "k3", "excess", "squared_excess", "identical"),
    *_token_columns("prob_diff", "squared_prob_diff", "policy_prob", "squared_policy_prob"),
    *_token_columns("reference_prob", "squared_reference_prob"),
    SumColumn("policy", scope="token", stored=False),
    SumColumn("reference", scope="token", stored=False),
    # Neighbours are two valid tokens of one sequence whose positions differ by 1.
    *_token_columns("neighbours", "neighbour_product", "neighbour_sum"),
    SumColumn("squared_ratio", PairFacts.squared_ratio),
    SumColumn("policy_log_ppl", lambda s: -s.sums["policy"] / s.n),
    SumColumn("reference_log_ppl", lambda s: -s.sums["reference"] / s.n),
    SumColumn("policy_ppl", lambda s: s.exp(-s.sums["policy"] / s.n)),
    SumColumn("reference_ppl", lambda s: s.exp(-s.sums["reference"] / s.n)),
    SumColumn("log_ppl_diff", lambda s: s.mean),
    SumColumn("log_ppl_abs_diff", lambda s: np.abs(s.mean)),
    SumColumn("ppl_ratio", lambda s: s.exp(s.mean)),
    SumColumn("product", lambda s: s.product),
    SumColumn("squared_product", lambda s: s.product * s.product),
    SumColumn("product_excess", lambda s: s.product_excess),
    SumColumn("squared_product_excess", lambda s: s.product_excess * s.product_excess),
    SumColumn("squared_log_ratio_sum", lambda s: s.sums["log_ratio"] * s.sums["log_ratio"]),
    SumColumn("log_ratio_sum_length", lambda s: s.sums["log_ratio"] * s.length),
    SumColumn("log_ratio", scope="token", merge="largest"),
    SumColumn("-log_ratio", scope="token", merge="largest"),
    SumColumn("prob_diff", scope="token", merge="largest"),
    SumColumn("log_ppl_diff", lambda s: np.where(s.length > 0, s.mean, -np.inf), merge="largest"),
    SumColumn("-log_ppl_diff", lambda s: np.where(s.length > 0, -s.mean, -np.inf), merge="largest"),
)


def _token_names(merge: str) -> tuple[str, ...]:
    return tuple(column.name for column in PAIR_COLUMNS if (column.scope, column.merge) == ("token", merge))


TOKEN_SUMS, TOKEN_MAXIMA = _token_names("sum"), _token_names("largest")
"""Names of the sums and of the maxima that kernels compute over the tokens of each sequence, in this order."""


def _read_fact(of: str, name: str) -> ColumnFunction[CorrectionFacts]:
    return lambda c: getattr(c, of)[name]


_WEIGHT_AXES: dict[str, GridAxis] = {
    "raw_weight_excess": "none",
    "weight_excess": "weights",
    "kept_excess": "all",
    "weight_low": "weights",
    "weight_high": "weights",
    "squared_raw_weight_excess": "none",
    "squared_weight_excess": "weights",
}
_EXTREME_AXES: dict[str, GridAxis] = {
    "raw_weight": "none", "-raw_weight": "none", "weight": "weights", "-weight": "weights",
}  # fmt: skip
_WEIGHT_COLUMNS: tuple[SumColumn[CorrectionFacts], ...] = (
    *(SumColumn(name, _read_fact("weight_sums", name), depends_on=along) for name, along in _WEIGHT_AXES.items()),
    SumColumn("kept", lambda c: c.kept),
    SumColumn("counted", lambda c: c.counted),
    SumColumn("kept_k3", lambda c: c.kept_k3),
    SumColumn("touched", lambda c: (c.kept < c.length).astype(np.float64)),
    SumColumn("emptied", lambda c: ((c.kept == 0) & (c.length > 0)).astype(np.float64)),
    SumColumn("mean_excess", lambda c: c.weight_sums["weight_excess"] / c.token_divisor, depends_on="weights"),
    SumColumn("sequence_weight", lambda c: c.sequence_weight, depends_on="all"),
    SumColumn("squared_sequence_weight", lambda c: c.sequence_weight**2, depends_on="all"),
    SumColumn("squared_kept_weight", lambda c: c.squared_kept_weight, depends_on="all"),
)
_EXTREME_COLUMNS = tuple(
    SumColumn(name, _read_fact("extremes", name), merge="largest", depends_on=along)
    for name, along in _EXTREME_AXES.items()
)
_VETO_COLUMNS: tuple[SumColumn[CorrectionFacts], ...] = (
    SumColumn("catastrophic_tokens", lambda c: np.asarray(c.catastrophic), depends_on="veto"),
    SumColumn("veto_tokens", lambda c: c.checked, depends_on="none"),
    SumColumn(
        "catastrophic_sequences", lambda c: (np.asarray(c.catastrophic) > 0).astype(np.float64), depends_on="veto"
    ),
)
_LOSS_COLUMNS = tuple(SumColumn(name, _read_fact("loss_sums", name)) for name in LOSS_NAMES)


def _gate_columns(index: int, side: Side) -> tuple[SumColumn[CorrectionFacts], ...]:
    return (
        SumColumn(f"gate{index}_tokens_{side}", lambda c: c.rejected[index, side], depends_on=index),
        SumColumn(
            f"gate{index}_sequences_{side}",
            lambda c: (c.rejected[index, side] > 0).astype(np.float64),
            depends_on=index,
        ),
    )


def _comparison_columns(name: str, side: Literal["kept", "rejected"]) -> tuple[SumColumn[CorrectionFacts], ...]:
    return (
        SumColumn(f"{side}_{name}", lambda c: c.outcomes[name][1] * c.share[side]),
        SumColumn(f"{side}_{name}_known", lambda c: c.outcomes[name][0] * c.share[side]),
    )


@cache
def list_columns(correction: Correction, *, losses: bool) -> tuple[SumColumn[CorrectionFacts], ...]:
    gates = (_gate_columns(index, side) for index in range(len(correction.gates)) for side in SIDES)
    comparisons = (_comparison_columns(name, side) for name in COMPARED_COLUMNS for side in ("kept", "rejected"))
    return (
        *_WEIGHT_COLUMNS,
        *(column for gate in gates for column in gate),
        *(_VETO_COLUMNS if any(gate.is_veto for gate in correction.gates) else ()),
        *(column for pair in comparisons for column in pair),
        *(_LOSS_COLUMNS if losses else ()),
        *_EXTREME_COLUMNS,
    )


def column_names(columns: Iterable[SumColumn[FactsT]], merge: str) -> tuple[str, ...]:
    return tuple(column.name for column in columns if column.stored and column.merge == merge)


def pair_columns(ratios: Ratios, sums: Float64s, largest: Float64s) -> tuple[Columns, Columns]:
    facts = PairFacts(ratios, dict(zip(TOKEN_SUMS, sums, strict=True)))
    of_tokens = {"sum": facts.sums, "largest": dict(zip(TOKEN_MAXIMA, largest, strict=True))}
    found: dict[str, Columns] = {"sum": {}, "largest": {}}
    for column in PAIR_COLUMNS:
        if column.stored:
            own = of_tokens[column.merge][column.name] if column.compute is None else column.compute(facts)
            found[column.merge][column.name] = own
    return found["sum"], found["largest"]


def correction_columns(
    correction: Correction,
    ratios: Mapping[str, Ratios],  # for each pair of policies that the correction uses, such as "train/rollout"
    k3: Float64s,  # sum of the mismatch's K3 per sequence [S]
    batch: TokenBatch,
    plain: LossTerm | None = None,  # the uncorrected loss, None if it cannot be computed
    *,
    losses: bool = False,  # True to include LOSS_NAMES, which need current log-probs and advantages
    all_tokens: bool = False,  # True to read every token. Losses always do this.
) -> tuple[Columns, Columns]:
    """Return the columns of a correction. To save time, read tokens only if their sequence could exceed a bound."""
    near = np.ones(len(batch), np.bool_) if all_tokens or losses else sequences_near_bounds(correction, ratios)
    reached, few = np.flatnonzero(near), not near.all()
    found = _evaluate_columns(correction, ratios, k3, batch, plain, losses, all_inside=few)
    if few and len(reached):
        part, own = batch.take(reached), {source: each.take(reached) for source, each in ratios.items()}
        for columns, anew in zip(
            found, _evaluate_columns(correction, own, k3[reached], part, None, losses), strict=True
        ):
            for name, values in anew.items():
                columns[name] = columns[name].copy()
                columns[name][reached] = values
    return found


def _evaluate_columns(
    correction: Correction,
    ratios: Mapping[str, Ratios],
    k3: Float64s,
    batch: TokenBatch,
    plain: LossTerm | None,
    losses: bool,
    all_inside: bool = False,  # True to assume that no token is outside the bounds of a rule on tokens
) -> tuple[Columns, Columns]:
    applied = apply_correction(correction, ratios, batch, all_inside=all_inside)
    weights, kept = applied.weights, applied.kept
    sums = weight_sums(weights, kept)
    facts = CorrectionFacts(
        length=batch.segments.sizes,
        kept=kept.counts,
        counted=applied.counted.counts,
        kept_k3=np.where(kept.sequences, k3, 0.0) if kept.tokens is None else kept.sum(ratios["train/rollout"].k3),
        weight_sums=sums,
        squared_kept_weight=_squared_sums(
            kept.counts,
            sums["kept_excess"],
            sums["squared_kept_excess"],
            lambda: weights.total(weights.bounded**2, kept) if weights else kept.counts,
        ),
        extremes=_weight_extremes(weights, batch.segments),
        rejected={
            (gate, side): getattr(outcome, side).counts for gate, outcome in enumerate(applied.gates) for side in SIDES
        },
        catastrophic=_count_catastrophic(correction, ratios, batch),
        checked=batch.segments.sizes + impossible_tokens(batch),
        outcomes=batch.outcomes,
        loss_sums=loss_columns(correction, applied, plain, batch) if losses else {},
    )
    found: dict[str, Columns] = {"sum": {}, "largest": {}}
    for column in list_columns(correction, losses=losses):
        assert column.compute is not None
        found[column.merge][column.name] = column.compute(facts)
    return found["sum"], found["largest"]


@dataclass(frozen=True)
class Pair:
    """Two policies to compare. The log ratio x is the log-prob of `policy` minus the log-prob of `reference`."""

    name: str  # prefix of the pair's columns and metrics. Names of the mismatch have no prefix.
    policy: str
    reference: str
    title: str  # short label
    meaning: str  # the comparison to which the metrics of the pair belong, as a phrase after "part of"
    section: str  # heading of the pair's section on a page

    @property
    def source(self) -> str:
        return f"{self.policy}/{self.reference}"

    @property
    def policies(self) -> tuple[str, str]:
        return self.policy, self.reference

    @property
    def prefix(self) -> str:
        return "" if self.name == "mismatch" else f"{self.name}_"

    def key(self, key: str) -> str:
        return _METRIC_NAMES.get((self.name, key), self.prefix + key)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset(f"{policy}_log_probs" for policy in self.policies) - _MISMATCH_COLUMNS


_MISMATCH_COLUMNS = {"rollout_log_probs", "train_log_probs"}
POLICY_NAMES = {"train": "trainer", "rollout": "rollout", "current": "current policy", "reference": "precise reference"}
_METRIC_NAMES = {("drift", "ratio_mean"): "ois", ("drift", "ratio_mean_z"): "ois_z"}  # keys that are not prefix + key

MISMATCH = Pair("mismatch", "train", "rollout", "mismatch", "the comparison of trainer and rollout", "The mismatch")
DRIFT = Pair(
    "drift", "current", "train", "policy drift", "the comparison of the current policy with the trainer",
    "Policy drift, from train to current",
)  # fmt: skip
TOTAL = Pair(
    "total", "current", "rollout", "mismatch + drift", "the comparison of the current policy with the rollout policy",
    "Mismatch and policy drift together, from rollout to current",
)  # fmt: skip
ROLLOUT_ERROR = Pair(
    "rollout_reference", "rollout", "reference", "rollout's error",
    "the comparison of the rollout with a high-precision reference", "The rollout's error, from reference to rollout",
)  # fmt: skip
TRAIN_ERROR = Pair(
    "train_reference", "train", "reference", "trainer's error",
    "the comparison of the trainer with a high-precision reference", "The trainer's error, from reference to train",
)  # fmt: skip
PAIRS = (MISMATCH, DRIFT, TOTAL, ROLLOUT_ERROR, TRAIN_ERROR)
"""All pairs of policies. A pair is measured if the dump contains the log-probs of its two policies."""
WHOLE_COLUMNS = ("log_ratio", "square", "k3")
"""Mismatch columns that are also summed for each other pair, only over sequences that have the pair's log-probs."""


def whole_column_names(pair: Pair) -> tuple[str, ...]:
    return () if pair is MISMATCH else tuple(f"mismatch_{name}" for name in WHOLE_COLUMNS)
