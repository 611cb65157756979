"""What every point of a family does to the sequences of a block: the columns of measure/columns.py, along a grid.

Arrays are [S, weights, gate variants ...] with length 1 along axes that do not matter, the axes those of
`Family.grid`. Gates on tokens are carried out in the arrays; gates on whole sequences stay flags, so that sums over
sequences are products of matrices: a sequence adds its `passing` value where it passes them all, else its `failing`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, TokenBatch
from mismatchctl.correction import Selection
from mismatchctl.correction.apply import Weights, measure
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.facts import Corrected, Side
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
        failing: those that are not 0 where it does not.
        fixed: columns that do not depend on it.
        summed: the same of columns that are not kept by cluster, summed over each part [parts, ...].
        maxima: the largest of each part [parts, weights, 1, ...].
    """

    parts: Parts
    flags: Float64s | None = None
    passing: Arrays = field(default_factory=dict)
    failing: Arrays = field(default_factory=dict)
    fixed: Arrays = field(default_factory=dict)
    summed: Arrays = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)

    def totals(self) -> Arrays:
        """Each column summed over the sequences of each part, [parts, weights, gate variants ...]."""
        return self.summed | self.by([*self.passing, *self.fixed], self.parts)

    def by(self, names: Collection[str], parts: Parts) -> Arrays:
        """Some columns summed over other parts, [parts, weights, gate variants ...]."""
        if self.flags is None or not (parts.count == 1 or parts.count * _FEW < len(parts.of)):
            return {name: parts.sum(self._of_sequences(name)) for name in names}
        found = {name: parts.sum(self.fixed[name]) for name in names if name in self.fixed}
        found |= _products(self.flags, {name: self.passing[name] for name in names if name not in found}, parts)
        rest = _products(1.0 - self.flags, {name: self.failing[name] for name in found if name in self.failing}, parts)
        for name, sums in rest.items():
            found[name] += sums
        return found

    def _of_sequences(self, name: str) -> NDArray[Any]:
        """One column of every sequence [S, weights, gate variants ...]."""
        values = self.fixed[name] if name in self.fixed else self.passing[name]
        if self.flags is None or name in self.fixed:
            return values
        with np.errstate(invalid="ignore"):
            found: NDArray[Any] = values * self.flags
        if not np.isfinite(found).all():  # 0 times an infinite K3 is nothing, not undefined
            found = np.where(self.flags == 0, 0.0, found)
        return found + self.failing[name] * (1.0 - self.flags) if name in self.failing else found


def _products(flags: Float64s, columns: Arrays, parts: Parts) -> Arrays:
    """Flags times columns, which vary along other axes, summed over the sequences of each part: those alike at once."""
    alike: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, values in columns.items():
        alike.setdefault((values.shape[1:], bool(np.isfinite(values).all())), []).append(name)
    found: Arrays = {}
    for (shape, is_finite), names in alike.items():
        along = np.broadcast_shapes(flags.shape[1:], shape)
        tall = np.stack([columns[name].reshape(len(flags), -1) for name in names], axis=1).reshape(len(flags), -1)
        sums = _product(flags.reshape(len(flags), -1), tall, parts, is_finite)
        found |= zip(names, sums.reshape(parts.count, len(names), *along).swapaxes(0, 1), strict=True)
    return found


def _product(flags: Float64s, values: Float64s, parts: Parts, is_finite: bool) -> Float64s:
    """Values [S, N], all of which may be finite, times flags [S, V]: sums over each part [parts, N, V]."""
    sums = np.empty((parts.count, values.shape[1], flags.shape[1]))
    for own, members in parts.alike:
        some, tall = (each[members].reshape(len(own), -1, each.shape[1]) for each in (flags, values))
        with np.errstate(invalid="ignore", over="ignore"):
            if is_finite:
                sums[own] = tall.swapaxes(1, 2) @ some
                continue
            for part, each, passes in zip(own, tall[..., None], some[:, :, None], strict=True):
                # 0 times an infinite K3 is nothing, not undefined.
                sums[part] = np.where(passes == 0, 0.0, each * passes).sum(axis=0)
    return sums


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
    if not family.is_binned:
        return _applied(family, ratios, batch, parts, plain, losses)
    binned = _Binned(family, ratios, batch, parts, plain, losses)
    passing, flags = binned.passing(), binned.flags
    made = BlockColumns(parts, flags, summed=binned.summed, maxima=binned.maxima)
    failing = binned.failing(passing)
    for column in family.columns(losses=losses):
        if column.merge == "largest" or column.name in made.summed:
            continue
        assert column.make is not None
        if column.along not in ("kept", "all"):
            made.fixed[column.name] = column.make(passing)
            continue
        made.passing[column.name] = column.make(passing)
        if flags is not None and (rest := column.make(failing)).any():
            made.failing[column.name] = rest
    return made


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
    """The points of a family read off bins.

    Attributes:
        flags: as of BlockColumns.
        rejected: tokens of each sequence that a gate rejects on one side, along the grid [S, ...].
        summed, maxima: as of BlockColumns.
    """

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
        self.length = self._wide(batch.segments.sizes)
        own = plain if self.correction.loss == "ppo" else token_loss(self.correction.loss, batch)
        self.loss = None if own is None or plain is None or not losses else (own, plain)
        gates = [self.correction.gates[gate] for gate in family.order]
        everything = Selection.everything(batch.segments)
        measured = [measure(gate, ratios[gate.source], everything, batch) for gate in gates]
        rules = list(zip(measured, family.thresholds, strict=True))
        self.on_tokens, self.on_sequences = rules[: family.token_gates], rules[family.token_gates :]
        self.rejected: dict[tuple[int, Side], NDArray[Any]] = {}
        self.summed: Arrays = {}
        self.maxima: Arrays = {}
        self.flags = self._sequence_gates()

    def passing(self) -> Corrected:
        """What the points do to sequences that pass the gates on whole sequences."""
        kept = self._kept_tokens()
        made = self._weights(kept)
        zeroes = any(gate.effect == "zero" for gate in self.correction.gates)
        counted = self.length if zeroes else kept["count"]
        if self.losses:
            zero, known = np.zeros_like(self.length), float(self.loss is not None)
            made |= {"loss_clipped": kept.get("clipped", zero), "loss_kept": kept["count"] * known}
            made |= {"loss_counted": counted * known, "loss_tokens": self.length * known}
        wide = {name: (self._wide(known), self._wide(values)) for name, (known, values) in self.batch.outcomes.items()}
        if self.parts.count == 1:
            self.summed["mean_excess"] = np.tensordot(1 / self.segments.sizes, made["weight_excess"], 1)[None]
        return Corrected(
            length=self.length,
            kept=kept["count"],
            counted=counted,
            kept_k3=kept["k3"],
            weight_sums=made,
            squared_kept_weight=made["squared_kept_weight"],
            extremes={},
            rejected=self.rejected,
            catastrophic=self._catastrophic(),
            outcomes=wide,
            loss_sums=made,
        )

    def failing(self, passing: Corrected) -> Corrected:
        """The same of sequences that do not: nothing is kept of them, and of their weights nothing else changes."""
        none = np.zeros_like(self.length)
        left, counted = dict.fromkeys(passing.weight_sums, none), none
        if passing.counted is self.length:
            left, counted = left | {"loss_counted": passing.loss_sums.get("loss_counted", none)}, self.length
        return replace(
            passing,
            kept=none,
            counted=counted,
            kept_k3=none,
            weight_sums=left,
            squared_kept_weight=none,
            loss_sums=left,
        )

    def _wide(self, values: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        """Values [S] or [S, V], V along one axis of the grid."""
        before, after = (1,) * axis, (1,) * (len(self.family.grid) - axis - 1)
        return values.reshape(len(values), *before, -1, *after)

    def _from_tokens(self, values: NDArray[Any], weights: bool) -> NDArray[Any]:
        """Values [S, (weights), variants of gates on tokens ...] along the grid."""
        missing = (1,) * len(self.on_sequences)
        return values.reshape(len(values), *(() if weights else (1,)), *values.shape[1:], *missing)

    def _sequence_gates(self) -> Float64s | None:
        """Flags; notes what each gate on whole sequences rejects by itself."""
        flags = None
        for axis, (measured, thresholds) in enumerate(self.on_sequences, 1 + len(self.on_tokens)):
            low, high = thresholds.sides(measured)
            passes = self._wide(~(low | high), axis)
            flags = passes if flags is None else flags & passes
            self._note(axis, low * self.segments.sizes[:, None], high * self.segments.sizes[:, None])
        return None if flags is None else flags.astype(np.float64)

    def _note(self, axis: int, low: NDArray[Any], high: NDArray[Any]) -> None:
        gate = self.family.order[axis - 1]
        self.rejected |= {(gate, "low"): self._wide(low, axis), (gate, "high"): self._wide(high, axis)}

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
            self._note(axis + 1, thresholds.below.sums(counts), thresholds.above.sums(counts))
        for axis, (_, thresholds) in enumerate(self.on_tokens):
            table = thresholds.inside.sums(table, axis=axis + 2)
        return {name: self._from_tokens(sums, False) for name, sums in zip(wanted, table, strict=True)}

    def _weights(self, kept: Arrays) -> Arrays:
        """Sums of weights, of all tokens and of kept ones, and of losses; notes their extremes."""
        rule, zero = self.correction.weight, np.zeros_like(self.length)
        if rule is None:
            names = ("raw_weight_excess", "weight_excess", "weight_low", "weight_high", "kept_excess")
            made: Arrays = dict.fromkeys((*names, "squared_raw_weight_excess", "squared_weight_excess"), zero)
            made |= {"squared_kept_weight": kept["count"], **{name: kept.get(name, zero) for name in self._linear}}
            one = self._along_weights(np.ones(self.parts.count))
            self.maxima = {"raw_weight": one, "-raw_weight": -one, "weight": one, "-weight": -one}
            return made
        weights = Weights(rule, self.ratios[rule.source])
        return self._token_weights(weights, zero) if rule.level == "token" else self._sequence_weights(weights, kept)

    @property
    def _linear(self) -> tuple[str, ...]:
        return ("loss", "gradient_product", "squared_gradient") if self.losses else ()

    def _along_weights(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values [parts] or [parts, W] along the grid."""
        return values.reshape(self.parts.count, -1, *(1,) * (len(self.family.grid) - 1))

    def _token_weights(self, weights: Weights, zero: NDArray[Any]) -> Arrays:
        """One weight per token: bins of the weight, and of gates on tokens."""
        bounds = self.family.bounds
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
        made = {"weight_excess": self._wide(every.sum("e", "count", origin=1.0))}
        self.summed |= {
            "raw_weight_excess": self._along_weights(whole.table["e"].sum(axis=1)),
            "squared_raw_weight_excess": self._along_weights(whole.table["ee"].sum(axis=1)),
            "squared_weight_excess": self._along_weights(whole.sum("ee", "count", power=2, origin=1.0)),
            "weight_low": self._along_weights(bounds.watched.sums(whole.table["count"])),
            "weight_high": self._along_weights(np.zeros(self.parts.count) if high is None else high),
        }
        left, made["kept_excess"] = every, made["weight_excess"]
        if self.on_tokens:
            left = BoundedSums(bounds, dict(zip(wanted, self._narrowed(table), strict=True)))
            made["kept_excess"] = self._kept(left.sum("e", "count", origin=1.0))
        made["squared_kept_weight"] = self._kept(left.sum("ww", "count", power=2))
        for name in self._linear:
            power = 2 if name == "squared_gradient" else 1
            known = self.loss is not None
            made[name] = self._kept(left.sum(f"{'w' * power} {name}", name, power=power)) if known else zero
        found = bounds.maxima(weights, self.segments, self.parts)
        self.maxima = {name: self._along_weights(values) for name, values in found.items()}
        return made

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

    def _sequence_weights(self, weights: Weights, kept: Arrays) -> Arrays:
        """One weight per sequence."""
        bounds, raw, lengths = self.family.bounds, weights.raw_excess[:, None], self.segments.sizes[:, None]
        low, high = bounds.thresholds.sides(weights.raw_excess + 1.0)
        watched = bounds.thresholds.bin(weights.raw_excess + 1.0)[:, None] < bounds.watched.stops
        excess = np.where(low, bounds.low - 1.0, np.where(high, bounds.high - 1.0, raw))
        product = np.exp(np.clip(weights.log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))[:, None]
        weight = np.where(low, bounds.low, np.where(high, bounds.high, product))
        made = {
            "raw_weight_excess": self._wide(raw * lengths),
            "squared_raw_weight_excess": self._wide(raw * raw * lengths),
            "weight_excess": self._wide(excess * lengths),
            "squared_weight_excess": self._wide(excess * excess * lengths),
            "weight_low": self._wide(watched * lengths),
            "weight_high": self._wide(high * lengths),
            "kept_excess": self._wide(excess) * kept["count"],
            "squared_kept_weight": self._wide(weight * weight) * kept["count"],
        }
        for name in self._linear:
            power = 2 if name == "squared_gradient" else 1
            made[name] = self._wide(weight**power) * kept.get(name, np.zeros_like(kept["count"]))
        found = {"raw_weight": product, "-raw_weight": -product, "weight": weight, "-weight": -weight}
        self.maxima = {name: self._along_weights(self.parts.largest(values)) for name, values in found.items()}
        return made

    def _catastrophic(self) -> NDArray[Any] | None:
        """Tokens below the first veto."""
        axis = self.family.veto
        if axis is None:
            return None
        gates = self.family.gates[self.family.order[axis]]
        limits = np.log([gate.keep[0] or 0.0 for gate in gates])
        ratios = self.ratios[gates[0].source]
        tokens = np.zeros((len(self.segments), len(gates)))
        if ratios.extent[0] < limits.max():
            found = np.flatnonzero(ratios.log_ratio < limits.max())
            edges, place = np.unique(limits, return_inverse=True)
            sequences = np.searchsorted(self.segments.offsets, found, side="right") - 1
            bins = sequences * len(edges) + np.searchsorted(edges, ratios.log_ratio[found], side="right")
            counts = np.bincount(bins, minlength=len(tokens) * len(edges)).reshape(len(tokens), -1)
            tokens = counts.cumsum(axis=1)[:, place].astype(np.float64)
        return self._wide(tokens, axis + 1)
