"""What every point of a family does to the sequences of a block: the columns of measure/columns.py, along a grid.

Arrays are [S, weights, gate variants ...] with length 1 along axes that do not matter, the axes those of
`Family.grid`. Gates on tokens are carried out in the arrays; gates on whole sequences stay flags, so that sums over
sequences are products of matrices: a sequence adds its `passing` value where it passes them all, else its `failing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints, TokenBatch
from mismatchctl.correction import Selection
from mismatchctl.correction.apply import Weights, measure
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.grid.family import Family
from mismatchctl.measure.grid.parts import Arrays, Parts
from mismatchctl.measure.grid.thresholds import BoundedSums, token_table, token_weights
from mismatchctl.measure.losses import TokenLoss, token_loss
from mismatchctl.ratios import LOG_RATIO_BOUND, Ratios

_FEW = 4
"""Sequences of a part from which products of matrices are faster than sums over each of them."""


@dataclass
class BlockColumns:
    """Columns of one block.

    Attributes:
        parts: the micro-batches of its cells.
        flags: which sequences pass the gates on whole sequences [S, 1, ..., variants]; None: all do.
        passing: columns by name where the sequence passes.
        shared: of those, columns that are a factor per sequence [S, 1, ...] times another passing column, by name.
        failing: those that are not 0 where it does not.
        fixed: columns that do not depend on it.
        summed: the same of columns that are not kept by cluster, summed over each part [parts, ...].
        maxima: the largest of each part [parts, weights, 1, ...].
    """

    parts: Parts
    flags: Float64s | None = None
    passing: Arrays = field(default_factory=dict)
    shared: dict[str, tuple[NDArray[Any], str]] = field(default_factory=dict)
    failing: Arrays = field(default_factory=dict)
    fixed: Arrays = field(default_factory=dict)
    summed: Arrays = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)

    def totals(self) -> Arrays:
        """Each column summed over the sequences of each part, [parts, weights, gate variants ...]."""
        of_all = [*self.passing, *self.shared]
        if self.parts.count == 1 or self.parts.count * _FEW < len(self.parts.of):
            each = [self._products(own) for own in self.parts.members]
            sums: Arrays = {name: np.stack([made[name] for made in each]) for name in of_all}
        else:
            sums = {name: self.parts.sum(self._of_sequences(name)) for name in of_all}
        return sums | self.summed | {name: self.parts.sum(values) for name, values in self.fixed.items()}

    def _products(self, own: slice | Ints) -> Arrays:
        """What depends on the flags, summed over the sequences of a part: products of matrices."""
        flags = np.ones_like(self.fixed["tokens"][own]) if self.flags is None else self.flags[own]
        sums: Arrays = {name: _product(flags, values[own]) for name, values in self.passing.items()}
        for name, (factor, other) in self.shared.items():
            sums[name] = _product(flags, self.passing[other][own], factor[own])
        if self.flags is not None:
            for name, values in self.failing.items():
                sums[name] = sums[name] + _product(1.0 - flags, values[own])
        return sums

    def by(self, names: Iterable[str], parts: Parts) -> Arrays:
        """Some columns summed over other parts, [parts, weights, gate variants ...]."""
        return {name: parts.sum(self.fixed[name] if name in self.fixed else self._of_sequences(name)) for name in names}

    def _of_sequences(self, name: str) -> NDArray[Any]:
        """One column of every sequence, of those that depend on the flags [S, weights, gate variants ...]."""
        if name in self.passing:
            values = self.passing[name]
        else:
            factor, other = self.shared[name]
            values = self.passing[other] * factor
        if self.flags is None:
            return values
        with np.errstate(invalid="ignore"):
            found: NDArray[Any] = values * self.flags
        if not np.isfinite(found).all():  # 0 times an infinite K3 is nothing, not undefined
            found = np.where(self.flags == 0, 0.0, found)
        return found + self.failing[name] * (1.0 - self.flags) if name in self.failing else found


def _product(flags: Float64s, values: NDArray[Any], factor: NDArray[Any] | float = 1.0) -> NDArray[Any]:
    """Sum over sequences of flags times values, times a factor per sequence; the two vary along different axes."""
    shape = np.broadcast_shapes(flags.shape[1:], values.shape[1:])
    with np.errstate(invalid="ignore", over="ignore"):
        if isinstance(factor, np.ndarray):
            flags, values = (flags * factor, values) if flags.size < values.size else (flags, values * factor)
        product: NDArray[Any] = values.reshape(len(values), -1).T @ flags.reshape(len(flags), -1)
    if not np.isfinite(product).all():  # 0 times an infinite K3 is nothing, not undefined
        with np.errstate(invalid="ignore", over="ignore"):
            product = np.where(flags == 0, 0.0, values * flags).sum(axis=0)
    return product.reshape(shape)


def block_columns(
    family: Family,
    ratios: Mapping[str, Ratios],
    batch: TokenBatch,
    parts: Parts,
    plain: TokenLoss | None,
    *,
    losses: bool,
) -> BlockColumns:
    """The columns of a block.

    Args:
        family: the points.
        ratios: one per source that a correction looks at.
        batch: the block.
        parts: what its sequences are told apart by.
        plain: its loss without any correction, where it is known.
        losses: whether the dump has current log-probs, so that there are columns of losses.
    """
    if family.is_binned:
        return _Binned(family, ratios, batch, parts, plain, losses).columns()
    return _applied(family, ratios, batch, parts, plain, losses)


def _applied(
    family: Family,
    ratios: Mapping[str, Ratios],
    batch: TokenBatch,
    parts: Parts,
    plain: TokenLoss | None,
    losses: bool,
) -> BlockColumns:
    """The one point of a family as `analyze` applies it."""
    correction, trivial = family.correction, (1,) * len(family.grid)
    k3 = ratios["train/rollout"].k3_sum
    columns, maxima = correction_columns(correction, ratios, k3, batch, plain, losses=losses)
    return BlockColumns(
        parts,
        fixed={name: values.reshape(-1, *trivial) for name, values in columns.items()},
        maxima={name: parts.largest(values).reshape(-1, *trivial) for name, values in maxima.items()},
    )


class _Binned:
    """The points of a family read off bins."""

    def __init__(
        self,
        family: Family,
        ratios: Mapping[str, Ratios],
        batch: TokenBatch,
        parts: Parts,
        plain: TokenLoss | None,
        losses: bool,
    ) -> None:
        self.family, self.ratios, self.batch, self.parts, self.losses = family, ratios, batch, parts, losses
        self.correction = family.correction
        self.segments = batch.segments
        self.lengths = batch.segments.lengths.astype(np.float64)
        self.n = np.maximum(self.lengths, 1.0)
        own = plain if self.correction.loss == "ppo" else token_loss(self.correction.loss, batch)
        self.loss = None if own is None or plain is None or not losses else (own, plain)
        gates = [self.correction.gates[gate] for gate in family.order]
        everything = Selection.everything(batch.segments)
        measured = [measure(gate, ratios[gate.source], everything, batch) for gate in gates]
        rules = list(zip(measured, family.thresholds, strict=True))
        self.on_tokens, self.on_sequences = rules[: family.token_gates], rules[family.token_gates :]
        self.made = BlockColumns(parts)

    def columns(self) -> BlockColumns:
        made = self.made
        self._sequence_gates()
        kept = self._kept_tokens()
        self._weights(kept)
        made.fixed |= self._catastrophic()
        self._compare(kept["count"])
        return made

    def _wide(self, values: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        """Values [S] or [S, V], V along one axis of the grid."""
        before, after = (1,) * axis, (1,) * (len(self.family.grid) - axis - 1)
        return values.reshape(len(values), *before, -1, *after)

    def _from_tokens(self, values: NDArray[Any], weights: bool) -> NDArray[Any]:
        """Values [S, (weights), variants of gates on tokens ...] along the grid."""
        missing = (1,) * len(self.on_sequences)
        return values.reshape(len(values), *(() if weights else (1,)), *values.shape[1:], *missing)

    def _sequence_gates(self) -> None:
        """Flags, and what each gate on whole sequences rejects by itself."""
        some, flags = self.segments.nonempty[:, None], None
        for number, (measured, thresholds) in enumerate(self.on_sequences):
            axis = 1 + len(self.on_tokens) + number
            low, high = (side & some for side in thresholds.sides(measured))
            passes = self._wide(~(low | high), axis)
            flags = passes if flags is None else flags & passes
            gate = self.family.order[axis - 1]
            for side, rejected in (("low", low), ("high", high)):
                self._note(gate, side, axis, rejected * self.lengths[:, None], rejected)
        self.made.flags = None if flags is None else flags.astype(np.float64)

    def _note(self, gate: int, side: str, axis: int, tokens: NDArray[Any], sequences: NDArray[Any]) -> None:
        fixed = self.made.fixed
        fixed[f"gate{gate}_tokens_{side}"] = self._wide(tokens, axis)
        fixed[f"gate{gate}_sequences_{side}"] = self._wide(sequences.astype(np.float64), axis)

    def _kept_tokens(self) -> Arrays:
        """Sums over the tokens that gates on tokens keep, weights aside; [S, variants of gates on tokens ...]."""
        wanted: dict[str, NDArray[Any] | None] = {"count": None, "k3": self.ratios["train/rollout"].k3}
        if self.loss is not None:
            own, plain = self.loss
            wanted["clipped"] = own.clipped
            if self.correction.weight is None or self.correction.weight.level != "token":
                wanted |= {"loss": own.losses, "gradient_product": own.gradient * plain.gradient}
                wanted["squared_gradient"] = own.gradient**2
        table = token_table(self.on_tokens, list(wanted.values()), self.segments)
        for axis, (_, thresholds) in enumerate(self.on_tokens):
            others = tuple(1 + other for other in range(len(self.on_tokens)) if other != axis)
            counts = table[0].sum(axis=others)
            for side, bins in (("low", thresholds.below), ("high", thresholds.above)):
                rejected = bins.sums(counts)
                self._note(self.family.order[axis], side, axis + 1, rejected, rejected > 0)
        for axis, (_, thresholds) in enumerate(self.on_tokens):
            table = thresholds.inside.sums(table, axis=axis + 2)
        kept: Arrays = {name: self._from_tokens(sums, False) for name, sums in zip(wanted, table, strict=True)}
        self._count(kept)
        return kept

    def _count(self, kept: Arrays) -> None:
        """Columns of how many tokens are kept."""
        made, count = self.made, kept["count"]
        length, some = self._wide(self.lengths), self._wide(self.segments.nonempty.astype(np.float64))
        zeroes = any(gate.effect == "zero" for gate in self.correction.gates)
        made.passing |= {
            "kept": count,
            "kept_k3": kept["k3"],
            "touched": (count < length).astype(np.float64),
            "emptied": (count == 0) * some,
        }
        made.failing |= {"touched": some, "emptied": some}
        (made.fixed if zeroes else made.passing)["counted"] = length if zeroes else count
        if self.losses:
            known = float(self.loss is not None)
            (made.fixed if zeroes else made.passing)["loss_counted"] = (length if zeroes else count) * known
            made.passing["loss_kept"] = count * known
            made.fixed["loss_tokens"] = length * known
            made.passing["loss_clipped"] = kept.get("clipped", np.zeros_like(length))

    def _weights(self, kept: Arrays) -> None:
        """Columns of weights, of all tokens and of kept ones."""
        rule, made, zero = self.correction.weight, self.made, np.zeros_like(self._wide(self.lengths))
        if rule is None:
            names = ("raw_weight_excess", "weight_excess", "weight_low", "weight_high")
            made.fixed |= dict.fromkeys((*names, "squared_raw_weight_excess", "squared_weight_excess"), zero)
            made.passing |= {"kept_excess": zero, "squared_kept_weight": kept["count"]}
            made.passing |= {name: kept.get(name, zero) for name in self._linear}
            made.maxima = dict.fromkeys(("raw_weight", "weight"), self._along_weights(np.ones(self.parts.count)))
            made.maxima |= {name: -made.maxima[name[1:]] for name in ("-raw_weight", "-weight")}
        elif rule.level == "token":
            self._token_weights(Weights(rule, self.ratios[rule.source]), zero)
        else:
            self._sequence_weights(Weights(rule, self.ratios[rule.source]), kept)
        n = self._wide(self.n)
        excess = made.fixed["weight_excess"]
        if self.parts.count == 1:
            made.summed["mean_excess"] = np.tensordot(1 / self.n, excess, 1)[None]
        else:
            made.fixed["mean_excess"] = excess / n
        made.passing["sequence_weight"] = (kept["count"] + made.passing["kept_excess"]) / n
        made.passing["squared_sequence_weight"] = made.passing["sequence_weight"] ** 2

    @property
    def _linear(self) -> tuple[str, ...]:
        return ("loss", "gradient_product", "squared_gradient") if self.losses else ()

    def _along_weights(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values [parts] or [parts, W] along the grid."""
        return values.reshape(self.parts.count, -1, *(1,) * (len(self.family.grid) - 1))

    def _token_weights(self, weights: Weights, zero: NDArray[Any]) -> None:
        """One weight per token: bins of the weight, and of gates on tokens."""
        made, bounds = self.made, self.family.bounds
        excess, ratio, weight = weights.raw_excess, weights.raw_excess + 1.0, token_weights(weights)
        wanted: dict[str, NDArray[Any] | None] = {"count": None, "e": excess, "ee": excess * excess, "ww": weight**2}
        if self.loss is not None:
            own, plain = self.loss
            product, square = own.gradient * plain.gradient, own.gradient**2
            wanted |= {"loss": own.losses, "w loss": weight * own.losses}
            wanted |= {"gradient_product": product, "w gradient_product": weight * product}
            wanted |= {"squared_gradient": square, "ww squared_gradient": weight**2 * square}
        table = token_table([(ratio, bounds.thresholds), *self.on_tokens], list(wanted.values()), self.segments)
        of_each = dict(zip(wanted, table, strict=True))
        of_all = of_each
        if self.on_tokens:
            of_all = {name: of_each[name].sum(axis=tuple(range(2, table.ndim - 1))) for name in wanted}
        every = BoundedSums(bounds, of_all)
        whole = BoundedSums(bounds, {name: self.parts.sum(sums) for name, sums in of_all.items()})
        high = whole.sum_beyond("above", "count")
        made.fixed["weight_excess"] = self._wide(every.sum("e", "count", origin=1.0))
        made.summed |= {
            "raw_weight_excess": self._along_weights(whole.table["e"].sum(axis=1)),
            "squared_raw_weight_excess": self._along_weights(whole.table["ee"].sum(axis=1)),
            "squared_weight_excess": self._along_weights(whole.sum("ee", "count", power=2, origin=1.0)),
            "weight_low": self._along_weights(bounds.watched.sums(whole.table["count"])),
            "weight_high": self._along_weights(np.zeros(self.parts.count) if high is None else high),
        }
        left, excess_left = every, made.fixed["weight_excess"]
        if self.on_tokens:
            left = BoundedSums(bounds, dict(zip(wanted, self._narrowed(table), strict=True)))
            excess_left = self._kept(left.sum("e", "count", origin=1.0))
        made.passing["kept_excess"] = excess_left
        made.passing["squared_kept_weight"] = self._kept(left.sum("ww", "count", power=2))
        for name in self._linear:
            power = 2 if name == "squared_gradient" else 1
            known = self.loss is not None
            made.passing[name] = self._kept(left.sum(f"{'w' * power} {name}", name, power=power)) if known else zero
        found = bounds.maxima(weights, self.segments, self.parts)
        made.maxima = {name: self._along_weights(values) for name, values in found.items()}

    def _narrowed(self, table: NDArray[Any]) -> NDArray[Any]:
        """A table [columns, S, bins of the weight, bins of gates ...] over what gates keep that do not vary."""
        for axis, (_, thresholds) in enumerate(self.on_tokens):
            table = thresholds.inside.sums(table, axis=axis + 3) if thresholds.variants == 1 else table
        return table

    def _kept(self, sums: NDArray[Any]) -> NDArray[Any]:
        """Sums [S, weights, bins of gates on tokens ...] over what each variant of the other gates keeps."""
        for axis, (_, thresholds) in enumerate(self.on_tokens):
            sums = thresholds.inside.sums(sums, axis=axis + 2) if thresholds.variants > 1 else sums
        return self._from_tokens(sums, True)

    def _sequence_weights(self, weights: Weights, kept: Arrays) -> None:
        """One weight per sequence."""
        made, bounds = self.made, self.family.bounds
        raw, lengths, some = weights.raw_excess[:, None], self.lengths[:, None], self.segments.nonempty[:, None]
        low, high = bounds.thresholds.sides(weights.raw_excess + 1.0)
        watched = bounds.thresholds.bin(weights.raw_excess + 1.0)[:, None] < bounds.watched.stops
        excess = np.where(some, np.where(low, bounds.low - 1.0, np.where(high, bounds.high - 1.0, raw)), 0.0)
        product = np.exp(np.clip(weights.log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))[:, None]
        weight = np.where(low, bounds.low, np.where(high, bounds.high, product))
        made.fixed |= {
            "raw_weight_excess": self._wide(raw * lengths),
            "squared_raw_weight_excess": self._wide(raw * raw * lengths),
            "weight_excess": self._wide(excess * lengths),
            "squared_weight_excess": self._wide(excess * excess * lengths),
            "weight_low": self._wide(watched * lengths),
            "weight_high": self._wide(high * lengths),
        }
        made.passing["kept_excess"] = self._wide(excess) * kept["count"]
        made.passing["squared_kept_weight"] = self._wide(weight * weight) * kept["count"]
        for name in self._linear:
            power = 2 if name == "squared_gradient" else 1
            made.passing[name] = self._wide(weight**power) * kept.get(name, np.zeros_like(kept["count"]))
        of_all = np.where(some, 0.0, -np.inf)
        found = {"raw_weight": product, "-raw_weight": -product, "weight": weight, "-weight": -weight}
        made.maxima = {name: self._along_weights(self.parts.largest(values + of_all)) for name, values in found.items()}

    def _catastrophic(self) -> Arrays:
        """Tokens below the first veto, and sequences that hold one."""
        axis = self.family.veto
        if axis is None:
            return {}
        gates = self.family.gates[self.family.order[axis]]
        limits = np.log([gate.keep[0] or 0.0 for gate in gates])
        ratios = self.ratios[gates[0].source]
        tokens = np.zeros((len(self.n), len(gates)))
        if ratios.extent[0] < limits.max():
            found = np.flatnonzero(ratios.log_ratio < limits.max())
            edges, place = np.unique(limits, return_inverse=True)
            sequences = np.searchsorted(self.segments.offsets, found, side="right") - 1
            bins = sequences * len(edges) + np.searchsorted(edges, ratios.log_ratio[found], side="right")
            counts = np.bincount(bins, minlength=len(tokens) * len(edges)).reshape(len(tokens), -1)
            tokens = counts.cumsum(axis=1)[:, place].astype(np.float64)
        return {
            "catastrophic_tokens": self._wide(tokens, axis + 1),
            "catastrophic_sequences": self._wide((tokens > 0).astype(np.float64), axis + 1),
        }

    def _compare(self, count: NDArray[Any]) -> None:
        """Reward, advantage and length, by the share of tokens kept and rejected."""
        made, n = self.made, self._wide(self.n)
        made.passing |= {"kept_share": count / n, "rejected_share": (self._wide(self.lengths) - count) / n}
        for name, (known, values) in self.batch.outcomes.items():
            for key, column in ((name, values), (f"{name}_known", known)):
                made.shared |= {f"{side}_{key}": (self._wide(column), f"{side}_share") for side in ("kept", "rejected")}
                made.failing[f"rejected_{key}"] = self._wide(column)
