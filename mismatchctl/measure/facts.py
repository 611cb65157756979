"""Facts of the sequences of a block that columns are made of: of a pair of policies, and of a correction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Segments, TokenBatch
from mismatchctl.correction import Correction, Selection, apply
from mismatchctl.correction.apply import Weights
from mismatchctl.measure.losses import Columns, TokenLoss, loss_columns
from mismatchctl.ratios import LOG_RATIO_BOUND, Ratios

_CANCELLED = 1e-4  # a mean of w^2 below it has lost digits as 1 + 2 (w - 1) + (w - 1)^2
Side = Literal["low", "high"]
SIDES: tuple[Side, Side] = ("low", "high")
COMPARED = ("reward", "advantage", "length")
"""What is compared between kept and rejected sequences: outcomes of a batch."""


def _squares(
    number: NDArray[Any], excess: Float64s, squared_excess: Float64s, anew: Callable[[], Float64s]
) -> Float64s:
    """Sum of w^2 of each sequence from sums of w - 1; counted anew where the weights are so small that it cancels."""
    found: Float64s = number + 2 * excess + squared_excess
    lost = found < _CANCELLED * number
    if lost.any():
        np.copyto(found, anew(), where=lost)
    return found


class PairFacts:
    """What is known of the sequences of a block as a pair of policies has them.

    Attributes:
        ratios: of the pair.
        sums: the columns of scope "token" that add, by name [S].
        length: tokens of each sequence [S].
        n: the same, 1 where there is none.
        some: 1 where there is one, else 0.
        mean: minus the mean log ratio [S]; 0 where there is no token.
        product, product_excess: the ratio of the whole sequence, and the same minus 1 [S]; 0 where there is no token.
    """

    def __init__(self, ratios: Ratios, sums: Columns) -> None:
        self.ratios, self.sums = ratios, sums
        log_ratio = sums["log_ratio"]
        self.length: Float64s = ratios.segments.sizes
        self.n: Float64s = np.maximum(self.length, 1.0)
        self.some: Float64s = (self.length > 0).astype(np.float64)
        self.mean: Float64s = -log_ratio / self.n
        bounded = np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        self.product: Float64s = np.exp(bounded) * self.some  # may be so tiny that nothing of it is left in 1 + excess
        self.product_excess: Float64s = np.expm1(bounded) * self.some

    def exp(self, values: Float64s) -> Float64s:
        """Exponentials where there is a token, else 0."""
        with np.errstate(over="ignore"):
            found: Float64s = np.exp(values) * self.some
        return found

    def squared_ratio(self) -> Float64s:
        """Sum of the squared ratio."""
        ratios = self.ratios
        return _squares(
            self.length,
            self.sums["excess"],
            self.sums["squared_excess"],
            lambda: ratios.segments.sum((1.0 + ratios.excess) ** 2),
        )


@dataclass(frozen=True)
class Corrected:
    """What a correction does to the sequences of a block, before its weights are normalized.

    Or many that differ in bounds: then arrays are [S, ...], the further axes those of a grid.

    Attributes:
        length: tokens of each sequence [S].
        kept: tokens that are left of each [S].
        counted: those that stay in the loss's denominator [S].
        kept_k3: sum of K3 over the kept tokens [S].
        weight_sums: of weights minus 1 and of their squares: before the bound, after it, and of kept tokens.
        squared_kept_weight: sum of the squared weights of kept tokens [S].
        extremes: largest and smallest (negated) weight of each sequence, before and after the bound.
        rejected: tokens of each sequence that a gate rejects on one side.
        catastrophic: those whose ratio is below the first veto; None where there is no veto.
        outcomes: reward, advantage and length: where they are known, and what they are [S].
        loss_sums: the loss with the correction, and its gradient, where they are asked for.
    """

    length: Float64s
    kept: Float64s
    counted: Float64s
    kept_k3: Float64s
    weight_sums: Columns
    squared_kept_weight: Float64s
    extremes: Columns
    rejected: Mapping[tuple[int, Side], Float64s]
    catastrophic: Float64s | None
    outcomes: Mapping[str, tuple[Float64s, Float64s]]
    loss_sums: Columns

    @cached_property
    def n(self) -> Float64s:
        """Tokens of each sequence, 1 where there is none."""
        return np.maximum(self.length, 1.0)

    @cached_property
    def sequence_weight(self) -> Float64s:
        """Sum of the weights of kept tokens over the length."""
        return (self.kept + self.weight_sums["kept_excess"]) / self.n

    @cached_property
    def share(self) -> Columns:
        """Share of each sequence's tokens that is kept, and rejected; 0 of an empty one."""
        kept = self.kept / self.n
        return {"kept": kept, "rejected": (self.length > 0) - kept}


def corrected(
    correction: Correction,
    ratios: Mapping[str, Ratios],
    k3: Float64s,
    batch: TokenBatch,
    plain: TokenLoss | None = None,
    *,
    losses: bool = False,
    calm: bool = False,
) -> Corrected:
    """What one correction does to a block.

    Args:
        correction: the rules.
        ratios: one per source that the correction looks at.
        k3: sum of the mismatch's K3 over each sequence [S].
        batch: the block.
        plain: its loss without any correction, where it is known.
        losses: whether the loss with it is asked for.
        calm: as if no token reached a bound of a rule on tokens.
    """
    applied = apply(correction, ratios, batch, calm=calm)
    weights, kept = applied.weights, applied.kept
    sums = _weight_sums(weights, kept)
    squares = _squares(
        kept.counts,
        sums["kept_excess"],
        sums["squared_kept_excess"],
        lambda: weights.total(weights.bounded**2, kept) if weights else kept.counts,
    )
    return Corrected(
        length=batch.segments.sizes,
        kept=kept.counts,
        counted=applied.counted.counts,
        kept_k3=kept_k3(kept, ratios, k3),
        weight_sums=sums,
        squared_kept_weight=squares,
        extremes=_extremes(weights, batch.segments),
        rejected={
            (gate, side): getattr(outcome, side).counts for gate, outcome in enumerate(applied.gates) for side in SIDES
        },
        catastrophic=_catastrophic(correction, ratios),
        outcomes=batch.outcomes,
        loss_sums=loss_columns(correction, applied, plain, batch) if losses else {},
    )


def kept_k3(kept: Selection, ratios: Mapping[str, Ratios], k3: Float64s) -> Float64s:
    """Sum of K3 over the kept tokens of each sequence, given those over all of them [S]."""
    return np.where(kept.sequences, k3, 0.0) if kept.tokens is None else kept.sum(ratios["train/rollout"].k3)


def _weight_sums(weights: Weights | None, kept: Selection) -> Columns:
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
    if weights.per_token and weights.calm:
        for name in ("weight_excess", "squared_weight_excess"):
            columns[name] = columns[name.replace("weight", "raw_weight")]
    else:
        columns["weight_excess"] = weights.total(weights.excess, everything)
        columns["squared_weight_excess"] = weights.total(weights.excess**2, everything)
        for name, flags in (("weight_low", weights.low), ("weight_high", weights.high)):
            if flags.any():
                columns[name] = weights.total(flags, everything)
    if kept.tokens is None:  # whole sequences: the sums above hold wherever the sequence is kept
        columns["kept_excess"] = np.where(kept.sequences, columns["weight_excess"], 0.0)
        columns["squared_kept_excess"] = np.where(kept.sequences, columns["squared_weight_excess"], 0.0)
    else:
        columns["kept_excess"] = weights.total(weights.excess, kept)
        columns["squared_kept_excess"] = weights.total(weights.excess * weights.excess, kept)
    return columns


def _extremes(weights: Weights | None, segments: Segments) -> Columns:
    empty = ~segments.nonempty
    if weights is None:
        ones = np.where(empty, -np.inf, 1.0)
        lows = np.where(empty, -np.inf, -1.0)
        return {"raw_weight": ones, "-raw_weight": lows, "weight": ones, "-weight": lows}
    if not weights.per_token:
        high = low = weights.raw
    elif weights.are_ratios:
        low, high = weights.ratios.range
    else:
        high, low = segments.max(weights.raw), segments.min(weights.raw)
    result = {"raw_weight": high, "-raw_weight": -low}
    if not weights.per_token:
        result |= {"weight": weights.bounded, "-weight": -weights.bounded}
    elif weights.are_ratios and (weights.rule.zero is None or weights.calm):
        bounds = weights.rule.bounds
        result |= {"weight": np.clip(high, *bounds), "-weight": -np.clip(low, *bounds)}
    else:
        result |= {"weight": segments.max(weights.bounded), "-weight": -segments.min(weights.bounded)}
    return {name: np.where(empty, -np.inf, values) for name, values in result.items()}


def _catastrophic(correction: Correction, ratios: Mapping[str, Ratios]) -> Float64s | None:
    veto = next((gate for gate in correction.gates if gate.is_veto), None)
    if veto is None:
        return None
    limit, looked_at = np.log(veto.keep[0] or 0.0), ratios[veto.source]
    if not looked_at.extent[0] < limit:
        return np.zeros(len(looked_at.segments))
    return looked_at.segments.sum(looked_at.log_ratio < limit)
