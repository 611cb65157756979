"""The columns that measuring adds up, each declared once: its scope, its name, how it is made, how it merges.

A column of scope "token" is summed over the tokens of each sequence by the kernels, which have a line for it each. One
of scope "sequence" is made of a sequence's facts, and one of scope "cluster" of those of its cluster when a group is
closed. Everything that a metric needs is a sum, or the largest, of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Generic, Literal, TypeVar

import numpy as np

from mismatchctl.batch import Float64s, Ints, TokenBatch
from mismatchctl.correction import Correction
from mismatchctl.correction.apply import reaching
from mismatchctl.measure.facts import COMPARED, SIDES, Corrected, PairFacts, Side, corrected
from mismatchctl.measure.losses import LOSS_NAMES, Columns, TokenLoss
from mismatchctl.ratios import Ratios

MISMATCH = "mismatch"
"""The pair of policies that the tool is about."""
Facts = TypeVar("Facts")
Made = Callable[[Facts], Float64s]
Along = Literal["none", "weights", "kept", "all", "veto"] | int


@dataclass(frozen=True)
class SumColumn(Generic[Facts]):
    """A column.

    Attributes:
        name: within the pair of policies or the correction that it is of.
        make: its values [S] from what is known of the sequences of a block; None where the kernels write it, or
            closing a group.
        scope: what a value is a sum over, or a function of.
        merge: how values of sequences become that of a cluster; a smallest value is the largest of the negative.
        kept: whether tables hold it; else other columns alone are made of it.
        along: of which bounds of a correction it depends on: none, those of its weights, those that decide what is
            kept, all, or those of its veto or of the gate of that number.
    """

    name: str
    make: Made[Facts] | None = None
    scope: Literal["token", "sequence", "cluster"] = "sequence"
    merge: Literal["sum", "largest"] = "sum"
    kept: bool = True
    along: Along = "kept"


def _token(*names: str) -> tuple[SumColumn[PairFacts], ...]:
    return tuple(SumColumn(name, scope="token") for name in names)


PAIR: tuple[SumColumn[PairFacts], ...] = (
    SumColumn("tokens", lambda s: s.length),
    SumColumn("sequences", lambda s: s.some),
    SumColumn("empty_sequences", lambda s: 1.0 - s.some),
    SumColumn("squared_length", lambda s: s.length**2),
    *_token("log_ratio", "abs", "square", "k3", "excess", "squared_excess", "identical"),
    *_token("prob_diff", "squared_prob_diff", "policy_prob", "squared_policy_prob"),
    *_token("reference_prob", "squared_reference_prob"),
    SumColumn("policy", scope="token", kept=False),
    SumColumn("reference", scope="token", kept=False),
    # Neighbours are adjacent tokens of one sequence, one position apart.
    *_token("neighbours", "neighbour_product", "neighbour_sum"),
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
"""Of each pair of policies."""


def _token_names(merge: str) -> tuple[str, ...]:
    return tuple(column.name for column in PAIR if (column.scope, column.merge) == ("token", merge))


TOKEN_SUMS, TOKEN_MAXIMA = _token_names("sum"), _token_names("largest")
"""Sums over the tokens of each sequence, and the largest over them, in the order in which the kernels give them."""


def _weight(name: str, along: Along) -> SumColumn[Corrected]:
    return SumColumn(name, lambda c: c.weight_sums[name], along=along)


_WEIGHTS: tuple[SumColumn[Corrected], ...] = (
    _weight("raw_weight_excess", "none"),
    _weight("weight_excess", "weights"),
    _weight("kept_excess", "all"),
    _weight("weight_low", "weights"),
    _weight("weight_high", "weights"),
    _weight("squared_raw_weight_excess", "none"),
    _weight("squared_weight_excess", "weights"),
    SumColumn("kept", lambda c: c.kept),
    SumColumn("counted", lambda c: c.counted),
    SumColumn("kept_k3", lambda c: c.kept_k3),
    SumColumn("touched", lambda c: (c.kept < c.length).astype(np.float64)),
    SumColumn("emptied", lambda c: ((c.kept == 0) & (c.length > 0)).astype(np.float64)),
    SumColumn("mean_excess", lambda c: c.weight_sums["weight_excess"] / c.n, along="weights"),
    SumColumn("sequence_weight", lambda c: c.sequence_weight, along="all"),
    SumColumn("squared_sequence_weight", lambda c: c.sequence_weight**2, along="all"),
    SumColumn("squared_kept_weight", lambda c: c.squared_kept_weight, along="all"),
)


def _extreme(name: str, along: Along) -> SumColumn[Corrected]:
    return SumColumn(name, lambda c: c.extremes[name], merge="largest", along=along)


_EXTREMES: tuple[SumColumn[Corrected], ...] = (
    _extreme("raw_weight", "none"),
    _extreme("-raw_weight", "none"),
    _extreme("weight", "weights"),
    _extreme("-weight", "weights"),
)
_VETO: tuple[SumColumn[Corrected], ...] = (
    SumColumn("catastrophic_tokens", lambda c: np.asarray(c.catastrophic), along="veto"),
    SumColumn("catastrophic_sequences", lambda c: (np.asarray(c.catastrophic) > 0).astype(np.float64), along="veto"),
)
_OF_LOSS: dict[str, Along] = {
    "loss_tokens": "none",
    "loss_clipped": "kept",
    "loss_kept": "kept",
    "loss_counted": "kept",
}
_LOSS: tuple[SumColumn[Corrected], ...] = tuple(
    SumColumn(name, lambda c, name=name: c.loss_sums[name], along=_OF_LOSS.get(name, "all"))  # type: ignore[misc]
    for name in LOSS_NAMES
)


def _gate(index: int, side: Side) -> tuple[SumColumn[Corrected], ...]:
    return (
        SumColumn(f"gate{index}_tokens_{side}", lambda c: c.rejected[index, side], along=index),
        SumColumn(
            f"gate{index}_sequences_{side}",
            lambda c: (c.rejected[index, side] > 0).astype(np.float64),
            along=index,
        ),
    )


def _comparison(name: str, side: Literal["kept", "rejected"]) -> tuple[SumColumn[Corrected], ...]:
    return (
        SumColumn(f"{side}_{name}", lambda c: c.outcomes[name][1] * c.share[side]),
        SumColumn(f"{side}_{name}_known", lambda c: c.outcomes[name][0] * c.share[side]),
    )


@cache
def columns_of(correction: Correction, *, losses: bool) -> tuple[SumColumn[Corrected], ...]:
    """The columns of a correction, before its weights are normalized; `losses`: with those of its loss."""
    gates = (_gate(index, side) for index in range(len(correction.gates)) for side in SIDES)
    comparisons = (_comparison(name, side) for name in COMPARED for side in ("kept", "rejected"))
    return (
        *_WEIGHTS,
        *(column for gate in gates for column in gate),
        *(_VETO if any(gate.is_veto for gate in correction.gates) else ()),
        *(column for pair in comparisons for column in pair),
        *(_LOSS if losses else ()),
        *_EXTREMES,
    )


FACTOR = SumColumn[Corrected]("factor", scope="cluster")
"""Tokens times what the weights were divided by, of each correction."""
CLUSTERS = SumColumn[PairFacts]("clusters", scope="cluster")
"""Clusters with a token, where they are told apart."""
EMPTY_CLUSTER = SumColumn[Corrected]("empty_cluster", scope="cluster")
"""Of those, such of which a correction leaves nothing."""


def names_of(columns: Iterable[SumColumn[Facts]], merge: str) -> tuple[str, ...]:
    """The names of those that tables keep and that merge so, in order."""
    return tuple(column.name for column in columns if column.kept and column.merge == merge)


def pair_columns(ratios: Ratios, sums: Float64s, largest: Float64s) -> tuple[Columns, Columns]:
    """The columns of a pair that add, and those of which the largest counts, given TOKEN_SUMS and TOKEN_MAXIMA."""
    facts = PairFacts(ratios, dict(zip(TOKEN_SUMS, sums, strict=True)))
    of_tokens = {"sum": facts.sums, "largest": dict(zip(TOKEN_MAXIMA, largest, strict=True))}
    found: dict[str, Columns] = {"sum": {}, "largest": {}}
    for column in PAIR:
        if column.kept:
            own = of_tokens[column.merge][column.name] if column.make is None else column.make(facts)
            found[column.merge][column.name] = own
    return found["sum"], found["largest"]


def correction_columns(
    correction: Correction,
    ratios: Mapping[str, Ratios],
    k3: Float64s,
    batch: TokenBatch,
    plain: TokenLoss | None = None,
    *,
    losses: bool = False,
    whole: bool = False,
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
        whole: whether every token is looked at, as it is for losses.
    """
    reached = np.arange(len(batch)) if whole or losses else np.flatnonzero(reaching(correction, ratios))
    few = len(reached) < len(batch)
    found = _columns(correction, corrected(correction, ratios, k3, batch, plain, losses=losses, calm=few), losses)
    if few and len(reached):
        part, own = batch.take(reached), {source: each.take(reached) for source, each in ratios.items()}
        anew = _columns(correction, corrected(correction, own, k3[reached], part), losses)
        found = _replaced(found[0], reached, anew[0]), _replaced(found[1], reached, anew[1])
    return found


def _columns(correction: Correction, facts: Corrected, losses: bool) -> tuple[Columns, Columns]:
    found: dict[str, Columns] = {"sum": {}, "largest": {}}
    for column in columns_of(correction, losses=losses):
        assert column.make is not None
        found[column.merge][column.name] = column.make(facts)
    return found["sum"], found["largest"]


def _replaced(columns: Columns, where: Ints, values: Columns) -> Columns:
    replaced = {name: column.copy() for name, column in columns.items()}
    for name, column in replaced.items():
        column[where] = values[name]
    return replaced
