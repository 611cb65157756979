"""Per-sequence columns that add: of a pair of policies, and of a correction.

Each function takes one block and gives one value per sequence and column, [S] each. Everything that a
metric needs is a sum, or the largest, of these over sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.correction import Applied, Correction, Selection, apply
from mismatchctl.correction.apply import Weights, reaching
from mismatchctl.measure.kernels.kernel import TOKEN_MAXIMA, TOKEN_SUMS
from mismatchctl.measure.losses import Columns, TokenLoss, loss_columns
from mismatchctl.ratios import LOG_RATIO_BOUND, Ratios, bounded_excess

_CANCELLED = 1e-4  # a mean of w^2 below it has lost digits as 1 + 2 (w - 1) + (w - 1)^2
COMPARED = ("reward", "advantage", "length")
"""What is compared between kept and rejected sequences."""


def base_columns(batch: TokenBatch) -> Columns:
    """Counts that do not depend on any log-prob."""
    nonempty = batch.segments.nonempty.astype(np.float64)
    return {
        "tokens": batch.segments.lengths.astype(np.float64),
        "sequences": nonempty,
        "empty_sequences": 1.0 - nonempty,
        "squared_length": batch.segments.lengths.astype(np.float64) ** 2,
    }


def pair_columns(ratios: Ratios, sums: Float64s, largest: Float64s) -> tuple[Columns, Columns]:
    """Sums of each sequence and functions of them, and the largest of each, given TOKEN_SUMS and TOKEN_MAXIMA.

    Smallest ones are the largest of the negative.
    """
    columns, maxima = dict(zip(TOKEN_SUMS, sums, strict=True)), dict(zip(TOKEN_MAXIMA, largest, strict=True))
    lengths = ratios.segments.lengths.astype(np.float64)
    columns["squared_ratio"] = _squares(
        lengths,
        columns["excess"],
        columns["squared_excess"],
        lambda: ratios.segments.sum((1.0 + ratios.excess) ** 2),
    )
    policy, reference = columns.pop("policy"), columns.pop("reference")
    columns |= _whole_sequences(columns["log_ratio"], policy, reference, lengths)
    mean = np.where(lengths > 0, columns["log_ppl_diff"], -np.inf)
    maxima |= {"log_ppl_diff": mean, "-log_ppl_diff": np.where(lengths > 0, -mean, -np.inf)}
    return columns, maxima


def _squares(
    number: NDArray[Any], excess: Float64s, squared_excess: Float64s, anew: Callable[[], Float64s]
) -> Float64s:
    """Sum of w^2 of each sequence from sums of w - 1; counted anew where the weights are so small that it cancels."""
    squares: Float64s = number + 2 * excess + squared_excess
    lost = squares < _CANCELLED * number
    if lost.any():
        np.copyto(squares, anew(), where=lost)
    return squares


def _whole_sequences(log_ratio: Float64s, policy: Float64s, reference: Float64s, length: Float64s) -> Columns:
    """Functions of each sequence's sums; all 0 for an empty sequence, which has no mean."""
    some = (length > 0).astype(np.float64)
    n = np.maximum(length, 1.0)
    difference = -log_ratio / n
    excess = bounded_excess(log_ratio) * some
    product = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)) * some
    with np.errstate(over="ignore"):
        return {
            "policy_log_ppl": -policy / n,
            "reference_log_ppl": -reference / n,
            "policy_ppl": np.exp(-policy / n) * some,
            "reference_ppl": np.exp(-reference / n) * some,
            "log_ppl_diff": difference,
            "log_ppl_abs_diff": np.abs(difference),
            "ppl_ratio": np.exp(difference) * some,
            "product": product,  # products may all be tiny, when nothing is left of 1 + excess
            "squared_product": product * product,
            "product_excess": excess,
            "squared_product_excess": excess * excess,
            "squared_log_ratio_sum": log_ratio * log_ratio,
            "log_ratio_sum_length": log_ratio * length,
        }


def correction_columns(
    correction: Correction,
    ratios: Mapping[str, Ratios],
    k3: Float64s,
    batch: TokenBatch,
    plain: TokenLoss | None = None,
    *,
    losses: bool = False,
) -> tuple[Columns, Columns]:
    """What a correction does to each sequence, before normalization: columns that add, and the largest of each.

    Only the tokens of sequences that reach a bound of a rule on tokens are looked at: sums over the others are known.

    Args:
        correction: the rules.
        ratios: one per source that the correction looks at.
        k3: sum of the mismatch's K3 over each sequence [S].
        batch: the block.
        plain: its loss without any correction, where it is known.
        losses: whether the dump has current log-probs, so that there are columns of losses.
    """
    if losses:
        return whole_columns(correction, ratios, k3, batch, plain, losses=True)
    reached = np.flatnonzero(reaching(correction, ratios))
    calm = apply(correction, ratios, batch, calm=len(reached) < len(batch))
    columns, maxima = _columns(correction, calm, ratios, k3, batch)
    if 0 < len(reached) < len(batch):
        part, own = batch.take(reached), {source: found.take(reached) for source, found in ratios.items()}
        found = _columns(correction, apply(correction, own, part), own, k3[reached], part)
        columns, maxima = _replaced(columns, reached, found[0]), _replaced(maxima, reached, found[1])
    return columns, maxima


def whole_columns(
    correction: Correction,
    ratios: Mapping[str, Ratios],
    k3: Float64s,
    batch: TokenBatch,
    plain: TokenLoss | None = None,
    *,
    losses: bool = False,
) -> tuple[Columns, Columns]:
    """As `correction_columns`, looking at every token."""
    applied = apply(correction, ratios, batch)
    columns, maxima = _columns(correction, applied, ratios, k3, batch)
    return (columns | loss_columns(correction, applied, plain, batch) if losses else columns), maxima


def _replaced(columns: Columns, where: Ints, values: Columns) -> Columns:
    replaced = {name: column.copy() for name, column in columns.items()}
    for name, column in replaced.items():
        column[where] = values[name]
    return replaced


def _columns(
    correction: Correction, applied: Applied, ratios: Mapping[str, Ratios], k3: Float64s, batch: TokenBatch
) -> tuple[Columns, Columns]:
    lengths = batch.segments.lengths.astype(np.float64)
    some, n = (lengths > 0).astype(np.float64), np.maximum(lengths, 1.0)
    kept, share = applied.kept.counts, applied.kept.counts / n
    columns = _weight_columns(applied, lengths)
    columns |= {
        "kept": kept,
        "counted": applied.counted.counts,
        "kept_k3": _kept(k3, ratios["train/rollout"], applied.kept),
        "share": share,
        "touched": (kept < lengths).astype(np.float64),
        "emptied": ((kept == 0) & (lengths > 0)).astype(np.float64),
    }
    columns["mean_excess"] = columns["weight_excess"] / n
    columns["sequence_weight"] = (kept + columns["kept_excess"]) / n
    columns["squared_sequence_weight"] = columns["sequence_weight"] ** 2
    columns["squared_kept_weight"] = _squares(
        kept,
        columns["kept_excess"],
        columns.pop("squared_kept_excess"),
        lambda: applied.weights.total(applied.weights.bounded**2, applied.kept) if applied.weights else kept,
    )
    for index, outcome in enumerate(applied.gates):
        for side, rejected in (("low", outcome.low), ("high", outcome.high)):
            columns[f"gate{index}_tokens_{side}"] = rejected.counts
            columns[f"gate{index}_sequences_{side}"] = ((rejected.counts > 0) & (lengths > 0)).astype(np.float64)
    columns |= _catastrophic(correction, ratios, batch)
    for name, values in compared(batch).items():
        known = ~np.isnan(values) & (lengths > 0)
        filled = np.where(known, values, 0.0)
        for side, part in (("kept", share), ("rejected", some - share)):
            columns[f"{side}_{name}"] = filled * part
            columns[f"{side}_{name}_known"] = known * part
    return columns, _weight_extremes(applied.weights, batch.segments)


def _weight_extremes(weights: Weights | None, segments: Segments) -> Columns:
    """Largest and smallest (negated) weight of each sequence, before and after the bound."""
    empty = ~segments.nonempty
    if weights is None:
        ones = np.where(empty, -np.inf, 1.0)
        lows = np.where(empty, -np.inf, -1.0)
        return {"raw_weight": ones, "-raw_weight": lows, "weight": ones, "-weight": lows}
    if not weights.per_token:
        high = low = weights.raw
    elif weights.are_ratios:
        clamp = (-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        high = np.exp(np.clip(weights.ratios.highest, *clamp))
        low = np.exp(np.clip(weights.ratios.lowest, *clamp))
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


def _weight_columns(applied: Applied, lengths: Float64s) -> Columns:
    """Sums of weights minus 1 and of their squares: before the bound, after it, and of kept tokens."""
    weights, kept = applied.weights, applied.kept
    names = ("raw_weight_excess", "weight_excess", "kept_excess", "weight_low", "weight_high")
    columns = {name: np.zeros_like(lengths) for name in names}
    columns |= {f"squared_{name}": np.zeros_like(lengths) for name in names[:3]}
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


def _kept(k3: Float64s, ratios: Ratios, kept: Selection) -> Float64s:
    """Sum of K3 over the kept tokens of each sequence, given that over all of them."""
    return np.where(kept.sequences, k3, 0.0) if kept.tokens is None else kept.sum(ratios.k3)


def _catastrophic(correction: Correction, ratios: Mapping[str, Ratios], batch: TokenBatch) -> Columns:
    """Tokens whose ratio is below the veto, and sequences that hold one; the first veto counts."""
    veto = next((gate for gate in correction.gates if gate.is_veto), None)
    if veto is None:
        return {}
    limit, looked_at = np.log(veto.keep[0] or 0.0), ratios[veto.source]
    tokens = np.zeros(len(batch))
    if looked_at.extent[0] < limit:
        tokens = looked_at.segments.sum(looked_at.log_ratio < limit)
    return {"catastrophic_tokens": tokens, "catastrophic_sequences": (tokens > 0).astype(np.float64)}


def compared(batch: TokenBatch) -> Columns:
    """Reward, mean advantage and length of each sequence; NaN where unknown."""
    unknown = np.full(len(batch), np.nan)
    reward = np.asarray(batch.columns.get("reward", unknown), np.float64)
    advantage = unknown if batch.advantages is None else batch.segments.mean(batch.advantages)
    return {"reward": reward, "advantage": advantage, "length": batch.segments.lengths.astype(np.float64)}
