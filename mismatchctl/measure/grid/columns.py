"""Columns of each point of a family of corrections, for the sequences of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s, TokenBatch
from mismatchctl.core.ratios import LOG_RATIO_BOUND, Ratios
from mismatchctl.corrections.application import Selection, Weights, measure_gate
from mismatchctl.corrections.model import MISMATCH_SOURCE
from mismatchctl.measure.columns import (
    CorrectionFacts,
    Side,
    correction_columns,
    impossible_tokens,
    list_columns,
    weight_sums,
)
from mismatchctl.measure.grid.thresholds import (
    SMALL_WEIGHT,
    Arrays,
    BlockColumns,
    BlockParts,
    BoundedWeightSums,
    CorrectionFamily,
    sum_products,
    sum_token_table,
)


def block_columns(
    family: CorrectionFamily, ratios: Mapping[str, Ratios], batch: TokenBatch, parts: BlockParts
) -> BlockColumns:
    if not family.is_binned:  # a single point, as in `analyze`
        columns, maxima = correction_columns(family.correction, ratios, ratios["train/rollout"].k3_sum, batch)
        trivial = (-1, *(1,) * len(family.grid))
        return BlockColumns(
            parts,
            fixed={name: values.reshape(trivial) for name, values in columns.items()},
            maxima={name: parts.largest(values).reshape(trivial) for name, values in maxima.items()},
        )
    binned = _BinnedPoints(family, ratios, batch, parts)
    passing, flags = binned.passing(), binned.flags
    made = BlockColumns(parts, flags, summed=binned.summed, maxima=binned.maxima)
    failing = binned.failing(passing)
    for column in list_columns(family.correction, losses=False):
        if column.merge == "largest" or column.name in made.summed:
            continue
        assert column.compute is not None
        if column.depends_on not in ("kept", "all"):
            made.fixed[column.name] = column.compute(passing)
            continue
        made.passing[column.name] = column.compute(passing)
        if flags is not None and (rest := column.compute(failing)).any():
            made.failing[column.name] = rest
    return made


class _BinnedPoints:
    """Evaluates the points of a family of corrections with bins. `rejected` has the axes of the grid [S, ...]."""

    def __init__(
        self, family: CorrectionFamily, ratios: Mapping[str, Ratios], batch: TokenBatch, parts: BlockParts
    ) -> None:
        self.family, self.ratios, self.batch, self.parts = family, ratios, batch, parts
        self.correction = family.correction
        self.segments = batch.segments
        self.length = self._wide(batch.segments.sizes)
        self.zeroes = any(gate.effect == "zero" for gate in self.correction.gates)
        gates = [self.correction.gates[gate] for gate in family.order]
        everything = Selection.everything(batch.segments)
        measured = [measure_gate(gate, ratios[gate.source], everything, batch) for gate in gates]
        rules = list(zip(measured, family.thresholds, strict=True))
        self.on_tokens, self.on_sequences = rules[: family.token_gates], rules[family.token_gates :]
        self.rejected: dict[tuple[int, Side], NDArray[Any]] = {}
        self.summed: Arrays = {}
        self.maxima: Arrays = {}
        self.flags = self._sequence_gates()
        rule = self.correction.weight
        self.weights = None if rule is None else Weights(rule, ratios[rule.source], impossible=batch.impossible)

    def passing(self) -> CorrectionFacts:
        kept = self._kept_tokens()
        made = self._weights(kept)
        counted = self.length if self.zeroes else kept["count"]
        wide = {name: (self._wide(known), self._wide(values)) for name, (known, values) in self.batch.outcomes.items()}
        if self.parts.count == 1:
            self.summed["mean_excess"] = np.tensordot(1 / self.segments.sizes, made["weight_excess"], 1)[None]
        facts = CorrectionFacts(
            length=self.length,
            kept=kept["count"],
            counted=counted,
            kept_k3=kept["k3"],
            weight_sums=made,
            squared_kept_weight=made["squared_kept_weight"],
            extremes={},
            rejected=self.rejected,
            catastrophic=self._catastrophic(),
            checked=self.length + self._wide(impossible_tokens(self.batch)),
            outcomes=wide,
            loss_sums={},
        )
        flags = 1.0 if self.flags is None else self.flags
        for side, share in facts.share.items():
            values = {f"{side}_{name}": known for name, (_, known) in wide.items()}
            values |= {f"{side}_{name}_known": known for name, (known, _) in wide.items()}
            whole = share * flags + (1.0 - flags if side == "rejected" else 0.0)
            self.summed |= sum_products(whole, values, self.parts)
        return facts

    def failing(self, passing: CorrectionFacts) -> CorrectionFacts:
        """Return the columns of sequences that a gate rejects completely."""
        none = np.zeros_like(self.length)
        return replace(
            passing,
            kept=none,
            counted=self.length if self.zeroes else none,
            kept_k3=none,
            weight_sums=dict.fromkeys(passing.weight_sums, none),
            squared_kept_weight=none,
        )

    def _wide(self, values: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        """Reshape values [S] or [S, V] to the grid, with V along one axis."""
        before, after = (1,) * axis, (1,) * (len(self.family.grid) - axis - 1)
        return values.reshape(len(values), *before, -1, *after)

    def _from_tokens(self, values: NDArray[Any], weights: bool) -> NDArray[Any]:
        """Reshape values [S, (weights), variants of token gates ...] to the grid."""
        missing = (1,) * len(self.on_sequences)
        return values.reshape(len(values), *(() if weights else (1,)), *values.shape[1:], *missing)

    def _sequence_gates(self) -> Float64s | None:
        """Return flags of sequences that pass all gates on whole sequences, or None. Record the rejections."""
        flags = None
        for axis, (measured, thresholds) in enumerate(self.on_sequences, 1 + len(self.on_tokens)):
            low, high = thresholds.sides(measured)
            passes = self._wide(~(low | high), axis)
            flags = passes if flags is None else flags & passes
            self._note(axis, low * self.segments.sizes[:, None], high * self.segments.sizes[:, None])
        return None if flags is None or flags.all() else flags.astype(np.float64)

    def _note(self, axis: int, low: NDArray[Any], high: NDArray[Any]) -> None:
        gate = self.family.order[axis - 1]
        self.rejected |= {(gate, "low"): self._wide(low, axis), (gate, "high"): self._wide(high, axis)}

    def _kept_tokens(self) -> Arrays:
        """Sum over the tokens that gates on tokens keep, with a single weight [S, variants of gates on tokens ...]."""
        if not self.on_tokens:
            return {"count": self.length, "k3": self._wide(self.ratios["train/rollout"].k3_sum)}
        wanted: dict[str, NDArray[Any] | None] = {"count": None, "k3": self.ratios["train/rollout"].k3}
        if self.weights is not None and self.weights.per_token and len(self.family.weights) == 1:
            small = self.weights.ratios.extent[0] < SMALL_WEIGHT
            wanted |= {"excess": self.weights.excess}
            wanted |= {"square": (self.weights.bounded if small else self.weights.excess + 1.0) ** 2}
        table = sum_token_table(self.on_tokens, list(wanted.values()), self.segments)
        for axis, (_, thresholds) in enumerate(self.on_tokens):
            others = tuple(1 + other for other in range(len(self.on_tokens)) if other != axis)
            counts = table[0].sum(axis=others)
            self._note(axis + 1, thresholds.below.sums(counts), thresholds.above.sums(counts))
        for axis, (_, thresholds) in enumerate(self.on_tokens):
            table = thresholds.inside.sums(table, axis=axis + 2)
        return {name: self._from_tokens(sums, False) for name, sums in zip(wanted, table, strict=True)}

    def _weights(self, kept: Arrays) -> Arrays:
        zero = np.zeros_like(self.length)
        if self.weights is None:
            names = ("raw_weight_excess", "weight_excess", "weight_low", "weight_high", "kept_excess")
            made: Arrays = dict.fromkeys((*names, "squared_raw_weight_excess", "squared_weight_excess"), zero)
            made["squared_kept_weight"] = kept["count"]
            one = self._along_weights(np.ones(self.parts.count))
            self.maxima = {"raw_weight": one, "-raw_weight": -one, "weight": one, "-weight": -one}
            return made
        if not self.weights.per_token:
            return self._sequence_weights(self.weights, kept)
        found = self.family.bounds.maxima(self.weights, self.segments, self.parts)
        self.maxima = {name: self._along_weights(values) for name, values in found.items()}
        if "excess" not in kept:
            return self._token_weights(self.weights)
        sums = weight_sums(self.weights, Selection.everything(self.segments))
        sums |= {"kept_excess": kept["excess"], "squared_kept_weight": kept["square"]}
        return {name: self._wide(values) if values.ndim == 1 else values for name, values in sums.items()}

    def _along_weights(self, values: NDArray[Any]) -> NDArray[Any]:
        """Reshape values [parts] or [parts, weights] to the grid."""
        return values.reshape(self.parts.count, -1, *(1,) * (len(self.family.grid) - 1))

    def _token_weights(self, weights: Weights) -> Arrays:
        """Sum the weights per token, with bins for the weight and for token gates."""
        bounds = self.family.bounds
        excess, ratio = weights.raw_excess, weights.raw_excess + 1.0
        weight = weights.raw if weights.ratios.extent[0] < SMALL_WEIGHT else ratio
        wanted: dict[str, NDArray[Any] | None] = {"count": None, "e": excess, "ee": excess * excess, "ww": weight**2}
        table = sum_token_table([(ratio, bounds.thresholds), *self.on_tokens], list(wanted.values()), self.segments)
        of_each = dict(zip(wanted, table, strict=True))
        of_all = of_each
        if self.on_tokens:
            of_all = {name: of_each[name].sum(axis=tuple(range(2, table.ndim - 1))) for name in wanted}
        every = BoundedWeightSums(bounds, of_all)
        whole = BoundedWeightSums(bounds, {name: self.parts.sum(sums) for name, sums in of_all.items()})
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
            left = BoundedWeightSums(bounds, dict(zip(wanted, self._narrowed(table), strict=True)))
            made["kept_excess"] = self._kept(left.sum("e", "count", origin=1.0))
        made["squared_kept_weight"] = self._kept(left.sum("ww", "count", power=2))
        return made

    def _narrowed(self, table: NDArray[Any]) -> NDArray[Any]:
        """Apply gates without variants to a table of bins."""
        for axis, (_, thresholds) in enumerate(self.on_tokens):
            table = thresholds.inside.sums(table, axis=axis + 3) if thresholds.variants == 1 else table
        return table

    def _kept(self, sums: NDArray[Any]) -> NDArray[Any]:
        """Apply the other gates to sums [S, weights, bins of token gates ...]."""
        for axis, (_, thresholds) in enumerate(self.on_tokens):
            sums = thresholds.inside.sums(sums, axis=axis + 2) if thresholds.variants > 1 else sums
        return self._from_tokens(sums, True)

    def _sequence_weights(self, weights: Weights, kept: Arrays) -> Arrays:
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
        found = {"raw_weight": product, "-raw_weight": -product, "weight": weight, "-weight": -weight}
        self.maxima = {name: self._along_weights(self.parts.largest(values)) for name, values in found.items()}
        return made

    def _catastrophic(self) -> NDArray[Any] | None:
        axis = self.family.veto
        if axis is None:
            return None
        gates = self.family.gates[self.family.order[axis]]
        limits = np.log([gate.keep[0] or 0.0 for gate in gates])
        ratios = self.ratios[gates[0].source]
        tokens = np.zeros((len(self.segments), len(gates)))
        if gates[0].source == MISMATCH_SOURCE:
            tokens += impossible_tokens(self.batch)[:, None]
        if ratios.extent[0] < limits.max():
            found = np.flatnonzero(ratios.log_ratio < limits.max())
            edges, place = np.unique(limits, return_inverse=True)
            sequences = np.searchsorted(self.segments.offsets, found, side="right") - 1
            bins = sequences * len(edges) + np.searchsorted(edges, ratios.log_ratio[found], side="right")
            counts = np.bincount(bins, minlength=len(tokens) * len(edges)).reshape(len(tokens), -1)
            tokens = tokens + counts.cumsum(axis=1)[:, place]
        return self._wide(tokens, axis + 1)
