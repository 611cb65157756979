"""Sums and metrics of families. The corrections of a family have the same rules but different bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, TokenBatch
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
    EMPTY_COLUMN,
    SMALL_WEIGHT,
    Arrays,
    BinIntervals,
    BlockColumns,
    BlockParts,
    CorrectionFamily,
    GridLayout,
    Term,
    TokenBins,
    as_slice,
    sum_products,
    sum_token_table,
)
from mismatchctl.measure.metrics.evaluation import (
    ScopeFactors,
    evaluate_metric,
    formula_slopes,
    normalization_factors,
    normalize_columns,
)
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.reduction import CellKey, MeasurePlan, correction_ratios, gather_cells, scope_hashes
from mismatchctl.measure.sums import (
    GROUP_CAP,
    OVERALL_CAP,
    BatchRows,
    ClusterTable,
    PromptCounter,
    cluster_hashes,
    merge_parts,
    mix_hashes,
)

BLOCK_TOKENS, BLOCK_VALUES = 1 << 18, 1 << 17
"""Usual maximum size of a block, so that it fits the CPU cache: number of tokens, and of values in one column."""
FEW_SEQUENCES, MOST_VALUES = 1024, 1 << 20
"""A block may have FEW_SEQUENCES even if a column then exceeds BLOCK_VALUES, but not MOST_VALUES (8 MiB)."""


def block_columns(
    family: CorrectionFamily, ratios: Mapping[str, Ratios], batch: TokenBatch, parts: BlockParts
) -> BlockColumns:
    if not family.is_binned:  # its single point is evaluated as in `analyze`
        columns, maxima = correction_columns(family.correction, ratios, ratios["train/rollout"].k3_sum, batch)
        trivial = (-1, *(1,) * len(family.grid))
        return BlockColumns(
            parts,
            fixed={name: values.reshape(trivial) for name, values in columns.items()},
            maxima={name: parts.largest(values).reshape(trivial) for name, values in maxima.items()},
        )
    binned = _BinnedPoints(family, ratios, batch, parts)
    passing, made, flags = binned.passing(), binned.made, binned.made.flags
    if flags is not None:  # correct because `batch` contains no empty sequences
        one = np.ones_like(binned.length)
        made.failing = {"touched": one, "emptied": one} | ({"counted": binned.length} if binned.zeroes else {})
    for column in list_columns(family.correction, losses=False):
        if column.merge == "largest" or column.name in (made.summed | made.terms):
            continue
        assert column.compute is not None
        where = made.passing if column.depends_on in ("kept", "all") else made.fixed
        where[column.name] = column.compute(passing)
    return made


def _sum_others(table: NDArray[Any], axis: int) -> NDArray[Any]:
    """Keep axis 0 and `axis` of the table, and sum over all other axes."""
    return table if table.ndim == 2 else table.sum(axis=tuple(set(range(1, table.ndim)) - {axis}))


class _BinnedPoints:
    """Computes the columns of all corrections of a family together, from sums over the bins between thresholds."""

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
        tokens = family.token_gates
        bins = [TokenBins.find(*rule).narrow() for rule in zip(measured[:tokens], family.thresholds, strict=False)]
        of_sequences = [
            rule.narrow(rule.bin(values))[:2]
            for values, rule in zip(measured[tokens:], family.thresholds[tokens:], strict=True)
        ]
        self.on_tokens = [rule for rule, _ in bins]
        self.on_sequences = [(values, rule) for values, (rule, _) in zip(measured[tokens:], of_sequences, strict=True)]
        self.made = BlockColumns(parts, variants=(None, *(of for _, of in (*bins, *of_sequences))))
        self.rejected: dict[tuple[int, Side], NDArray[Any]] = {}
        self.made.flags = self._sequence_gates()
        rule = self.correction.weight
        self.weights = None if rule is None else Weights(rule, ratios[rule.source], impossible=batch.impossible)

    def passing(self) -> CorrectionFacts:
        kept = self._kept_tokens()
        made = self._weights(kept)
        counted = self.length if self.zeroes else kept["count"]
        wide = {name: (self._wide(known), self._wide(values)) for name, (known, values) in self.batch.outcomes.items()}
        if self.parts.count == 1 and "weight_excess" in made:
            self.made.summed["mean_excess"] = np.tensordot(1 / self.segments.sizes, made["weight_excess"], 1)[None]
        facts = CorrectionFacts(
            length=self.length, kept=kept["count"], counted=counted, kept_k3=kept["k3"], weight_sums=made,
            squared_kept_weight=made["squared_kept_weight"], extremes={}, rejected=self.rejected,
            catastrophic=self._catastrophic(), checked=self.length + self._wide(impossible_tokens(self.batch)),
            outcomes=wide, loss_sums={},
        )  # fmt: skip
        flags = 1.0 if self.made.flags is None else self.made.flags
        for side, share in facts.share.items():
            values = {f"{side}_{name}": known for name, (_, known) in wide.items()}
            values |= {f"{side}_{name}_known": known for name, (known, _) in wide.items()}
            whole = share * flags + (1.0 - flags if side == "rejected" else 0.0)
            self.made.summed |= sum_products(whole, values, self.parts)
        return facts

    def _wide(self, values: NDArray[Any], axis: int = 0) -> NDArray[Any]:
        before, after = (1,) * axis, (1,) * (len(self.family.grid) - axis - 1)
        return values.reshape(len(values), *before, -1, *after)

    def _from_tokens(self, values: NDArray[Any], weights: bool) -> NDArray[Any]:
        missing = (1,) * len(self.on_sequences)
        return values.reshape(len(values), *(() if weights else (1,)), *values.shape[1:], *missing)

    def _sequence_gates(self) -> Float64s | None:
        """Return 1.0 for sequences that all sequence gates keep, else 0.0 (`None`: all are kept). Set `rejected`."""
        flags = None
        for axis, (measured, thresholds) in enumerate(self.on_sequences, 1 + len(self.on_tokens)):
            low, high = thresholds.sides(measured)
            passes = self._wide(~(low | high), axis)
            flags = passes if flags is None else flags & passes
            gate, sizes = self.family.order[axis - 1], self.segments.sizes[:, None]
            self.rejected |= {
                (gate, "low"): self._wide(low * sizes, axis),
                (gate, "high"): self._wide(high * sizes, axis),
            }
        return None if flags is None or flags.all() else flags.astype(np.float64)

    def _kept_tokens(self) -> Arrays:
        if not self.on_tokens:
            return {"count": self.length, "k3": self._wide(self.ratios["train/rollout"].k3_sum)}
        wanted: dict[str, NDArray[Any] | None] = {"count": None, "k3": self.ratios["train/rollout"].k3}
        if self.weights is not None and self.weights.per_token and len(self.family.weights) == 1:
            small = self.weights.ratios.extent[0] < SMALL_WEIGHT
            wanted |= {"excess": self.weights.excess}
            wanted |= {"square": (self.weights.bounded if small else self.weights.excess + 1.0) ** 2}
        made = dict(zip(wanted, sum_token_table(self.on_tokens, list(wanted.values()), self.segments), strict=True))
        axis, last = len(self.on_tokens), self.on_tokens[-1].thresholds.inside
        for gate in range(axis):
            self._note_tokens(gate, _sum_others(made["count"], 1 + gate))
        for gate, rule in enumerate(self.on_tokens[:-1], 1):
            made = {name: rule.thresholds.inside.sums(sums, axis=gate) for name, sums in made.items()}
        made = {name: self._from_tokens(sums, False) for name, sums in made.items()}
        for name, column in (("k3", "kept_k3"), ("square", "squared_kept_weight")):
            if name in made:
                self.made.passing[name] = made[name]
                self.made.terms[column] = [Term(name, last, axis + 1)]
        return made | {name: last.sums(made[name], axis=axis + 1) for name in ("count", "excess") if name in made}

    def _note_tokens(self, axis: int, counts: NDArray[Any]) -> None:
        gate, thresholds, some = self.family.order[axis], self.on_tokens[axis].thresholds, counts > 0
        rows = self.parts.index * thresholds.bins
        ends = {"low": some.argmax(axis=1), "high": thresholds.bins - 1 - some[:, ::-1].argmax(axis=1)}
        tokens = self.parts.sum(counts)
        for side, runs in (("low", thresholds.below), ("high", thresholds.above)):
            extremes = np.bincount(rows + ends[side], minlength=tokens.size).reshape(tokens.shape)
            for name, values in (("tokens", tokens), ("sequences", extremes)):
                column, term = f"gate{gate}_{name}_{side}", f"gate{gate} {name} {side}"
                self.made.summed[term] = self._wide(values, axis + 1)
                self.made.terms[column] = [Term(term, runs, axis + 2)]

    def _weights(self, kept: Arrays) -> Arrays:
        zero = np.zeros_like(self.length)
        if self.weights is None:
            names = ("raw_weight_excess", "weight_excess", "weight_low", "weight_high", "kept_excess")
            made: Arrays = dict.fromkeys((*names, "squared_raw_weight_excess", "squared_weight_excess"), zero)
            made["squared_kept_weight"] = kept["count"]
            one = self._along_weights(np.ones(self.parts.count))
            self.made.maxima = {"raw_weight": one, "-raw_weight": -one, "weight": one, "-weight": -one}
            return made
        if not self.weights.per_token:
            return self._sequence_weights(self.weights, kept)
        found = self.family.bounds.maxima(self.weights, self.segments, self.parts)
        self.made.maxima = {name: self._along_weights(values) for name, values in found.items()}
        if "excess" not in kept:
            return self._token_weights(self.weights)
        sums = weight_sums(self.weights, Selection.everything(self.segments))
        sums |= {"kept_excess": kept["excess"], "squared_kept_weight": kept["square"]}
        return {name: self._wide(values) if values.ndim == 1 else values for name, values in sums.items()}

    def _along_weights(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.reshape(self.parts.count, -1, *(1,) * (len(self.family.grid) - 1))

    def _token_weights(self, weights: Weights) -> Arrays:
        bounds = self.family.bounds
        excess, ratio = weights.raw_excess, weights.raw_excess + 1.0
        wanted: dict[str, NDArray[Any] | None] = {"count": None, "e": excess, "ee": excess * excess}
        if weights.ratios.extent[0] < SMALL_WEIGHT:  # 1 + 2 (w - 1) + (w - 1)^2 would lose digits
            wanted["ww"] = weights.raw**2
        rule, of = TokenBins.find(ratio, bounds.thresholds).narrow()
        self.made.variants = of, *self.made.variants[1:]
        tables = sum_token_table([rule, *self.on_tokens], list(wanted.values()), self.segments)
        kept: Arrays = dict(zip(wanted, tables, strict=True))
        every = {name: self._wide(_sum_others(sums, 1)) for name, sums in kept.items()}
        for axis, gate in enumerate(self.on_tokens, 2):
            kept = {name: gate.thresholds.inside.sums(sums, axis=axis) for name, sums in kept.items()}
        kept = {name: self._from_tokens(sums, True) for name, sums in kept.items()}
        if "ww" not in kept:
            kept["ww"] = kept["count"] + 2 * kept["e"] + kept["ee"]
        kept["mean"], kept["share"] = (kept["count"] + kept["e"]) / self.length, kept["count"] / self.length
        self.made.passing |= {f"kept {name}": values for name, values in kept.items()}
        self.made.fixed = {name: every[name] for name in ("count", "e")}
        self.made.summed["ee"] = self.parts.sum(every["ee"])
        self.made.summed["mean"], self.made.summed["share"] = (
            self.parts.sum(every[name] / self.length) for name in ("e", "count")
        )
        sides = {(1, 0): rule.thresholds.below, (0, 1): rule.thresholds.above}
        sides = {powers: runs for powers, runs in sides.items() if (runs.starts < runs.stops).any()}
        for name, inside, outside, power, origin in (
            ("weight_excess", "e", "count", 1, 1.0),
            ("mean_excess", "mean", "share", 1, 1.0),
            ("squared_weight_excess", "ee", "count", 2, 1.0),
            ("kept_excess", "kept e", "kept count", 1, 1.0),
            ("squared_kept_weight", "kept ww", "kept count", 2, 0.0),
            ("sequence_weight", "kept mean", "kept share", 1, 0.0),
        ):
            self._add_term(name, inside, rule.thresholds.inside, (0, 0))
            for (low, high), runs in sides.items():
                self._add_term(name, outside, runs, (power * low, power * high), origin)
        means = {(0, 0): rule.thresholds.inside.sums(kept["mean"], axis=1)}
        means |= {powers: runs.sums(kept["share"], axis=1) for powers, runs in sides.items()}
        for ((a, b), x), ((c, d), y) in combinations_with_replacement(means.items(), 2):
            term = f"kept mean {(a, b)} times {(c, d)}"
            self.made.passing[term] = x * y if x is y else 2 * x * y
            self._add_term("squared_sequence_weight", term, None, (a + c, b + d))
        self._add_term("weight_high", "count", rule.thresholds.above, (0, 0))
        (watched,) = sum_token_table([TokenBins.find(ratio, bounds.watched)], [None], self.segments)
        self.made.summed |= {
            "raw_weight_excess": self.parts.sum(every["e"].sum(axis=1, keepdims=True)),
            "squared_raw_weight_excess": self.made.summed["ee"].sum(axis=1, keepdims=True),
            "weight_low": self._along_weights(bounds.watched.below.sums(self.parts.sum(watched))),
        }
        return {"squared_kept_weight": self.length}  # a placeholder: this column is computed from `terms`

    def _add_term(
        self, name: str, term: str, runs: BinIntervals | None, powers: tuple[int, int], origin: float = 0.0
    ) -> None:
        """Add a Term to sum `name`: column `term` over bins `runs`, times `WeightBounds.factor(*powers, origin)`."""
        factor = None
        if any(powers):
            factor = self.family.bounds.factor(*powers, origin).reshape(-1, *(1,) * (len(self.family.grid) - 1))
        self.made.terms.setdefault(name, []).append(Term(term, runs, factor=factor))

    def _sequence_weights(self, weights: Weights, kept: Arrays) -> Arrays:
        bounds, raw, lengths = self.family.bounds, weights.raw_excess[:, None], self.segments.sizes[:, None]
        low, high = bounds.thresholds.sides(weights.raw_excess + 1.0)
        watched, _ = bounds.watched.sides(weights.raw_excess + 1.0)
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
        self.made.maxima = {name: self._along_weights(self.parts.largest(values)) for name, values in found.items()}
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


def evaluate_metrics(
    metrics: Iterable[Metric], totals: Arrays, maxima: Arrays, grid: tuple[int, ...]
) -> dict[str, Float64s]:
    """Return an array [groups, points of the grid] for each metric key. An undefined value is NaN."""
    cells = len(totals["tokens"])
    with np.errstate(all="ignore"):
        return {
            metric.key: evaluate_metric(metric, totals, maxima, (cells, *grid)).reshape(cells, -1) for metric in metrics
        }


def standard_errors(
    metrics: Iterable[Metric], totals: Arrays, rows: Arrays, grid: tuple[int, ...]
) -> dict[str, Float64s]:
    """Compute standard errors by the delta method. `rows` are sums per cluster, `totals` are sums over all clusters."""
    clusters, found = int(np.count_nonzero(rows["tokens"])), {}
    factor = clusters / (clusters - 1) if clusters > 1 else np.nan
    with np.errstate(all="ignore"):
        for metric in metrics:
            influence: Any = sum(rows[name] * slope for name, slope in formula_slopes(metric, totals.__getitem__))
            found[metric.key] = np.broadcast_to(np.sqrt((influence**2).sum(axis=0) * factor), grid).ravel()
    return found


@dataclass(frozen=True)
class FamilySums:
    """Sums for a family of corrections, over one group of sequences with the same step and `--by` values."""

    totals: ClusterTable  # all columns: one row, or a row per micro-batch if weights are normalized over it
    rows: tuple[ClusterTable, ...]  # columns by cluster, in tables that `merged` adds up

    @property
    def merged(self) -> ClusterTable:
        return self.rows[0] if len(self.rows) == 1 else merge_tables(self.rows, GROUP_CAP)

    @property
    def size(self) -> int:
        return self.totals.sums.size + sum(table.sums.size for table in self.rows)

    def __add__(self, other: FamilySums) -> FamilySums:
        """Add the sums of two batches. To save time, `rows` are not merged until there are many new rows."""
        first, *more = rows = self.rows + other.rows
        if 2 * sum(map(len, more)) > len(first):
            rows = (merge_tables(rows, GROUP_CAP),)
        return FamilySums(self.totals + other.totals, rows)


def merge_tables(tables: Sequence[ClusterTable], cap: int) -> ClusterTable:
    """Add up tables in the given order. If there are over `cap` clusters, merge clusters with equal hash % `cap`."""
    clusters, scopes = (np.concatenate([getattr(table, name) for table in tables]) for name in ("clusters", "scopes"))
    is_folded = any(table.is_folded for table in tables) or len(np.unique(clusters)) > cap
    if is_folded:
        clusters = clusters % np.uint64(cap)
    found = BatchRows(np.zeros(len(clusters), np.int64), clusters, scopes, cap)
    sums = np.zeros((len(found), tables[0].sums.shape[1]))
    for row, values in zip(found.rows.tolist(), chain.from_iterable(table.sums for table in tables), strict=True):
        sums[row] += values
    (made,) = found.split(1, sums, np.zeros((len(found), 0)))
    return replace(made, is_folded=is_folded)


FamilyCells = dict[tuple[str, CellKey], list[FamilySums]]


def add_families(some: Sequence[FamilySums], more: Sequence[FamilySums]) -> list[FamilySums]:
    return [a + b for a, b in zip(some, more, strict=True)]


def reduce_families(
    batch: TokenBatch, run: str, plan: MeasurePlan, families: Sequence[CorrectionFamily]
) -> FamilyCells:
    """Compute the sums of each family for each group in a batch. Empty sequences only add to `empty_sequences`."""
    batch, names, bounds = gather_cells(batch, run, plan.by)
    cells, scopes = np.repeat(np.arange(len(names)), np.diff(bounds)), scope_hashes(batch, plan)
    of_all, some = BatchRows(cells, np.zeros_like(scopes), scopes), batch.segments.nonempty
    empty, all_rows = np.bincount(of_all.rows[~some], minlength=len(of_all)), of_all.rows[some]
    if not some.all():
        batch, cells, scopes = batch.take(np.flatnonzero(some)), cells[some], scopes[some]
    of_clusters = BatchRows(cells, cluster_hashes(batch), scopes)
    tables = [
        (_FamilyTable(of_all, layouts.totals, layouts.maxima), _FamilyTable(of_clusters, layouts.rows))
        for layouts in (family.layouts for family in families)
    ]
    width = max((64, *(family.width for family in families)))
    sequences = max(BLOCK_VALUES // width, min(FEW_SEQUENCES, MOST_VALUES // width), 1)
    for start, block in batch.blocks(BLOCK_TOKENS, sequences):
        ratios = correction_ratios(block, plan)
        parts, rows = BlockParts.from_rows(all_rows[start : start + len(block)])
        clusters, of = BlockParts.from_rows(of_clusters.rows[start : start + len(block)])
        within = BlockParts(parts.index[clusters.order[clusters.firsts]], parts.count)
        for family, (totals, by_cluster) in zip(families, tables, strict=True):
            made, trivial = block_columns(family, ratios, block, parts), (-1, *(1,) * len(family.grid))
            made.fixed["tokens"] = block.segments.sizes.reshape(trivial)
            made.fixed["sequences"] = block.segments.nonempty.astype(np.float64).reshape(trivial)
            own = made.sum_by(family.layouts.rows.shapes, clusters)
            by_cluster.add(of, own, made)
            totals.add(rows, made.totals(own, within), made)
    found: list[list[FamilySums]] = [[] for _ in names]
    for totals, by_cluster in tables:
        totals.layout.arrays(totals.sums)[EMPTY_COLUMN].T[...] = empty
        for cell, whole, table in zip(found, totals.split(len(names)), by_cluster.split(len(names)), strict=True):
            cell.append(FamilySums(whole, (table,)))
    return dict(zip(names, found, strict=True))


_NO_COLUMNS = GridLayout({})


class _FamilyTable:
    def __init__(self, rows: BatchRows, layout: GridLayout, maxima: GridLayout = _NO_COLUMNS) -> None:
        self._rows, self.layout, self._largest = rows, layout, maxima
        self.sums = np.zeros((len(rows), layout.width))
        self._maxima = np.full((len(rows), maxima.width), -np.inf)

    def add(self, rows: Ints, sums: Arrays, block: BlockColumns) -> None:
        where = as_slice(rows)
        for name, known in self.layout.arrays(self.sums).items():
            if name != EMPTY_COLUMN:
                known[where] += block.expand(name, sums)
        for name, known in self._largest.arrays(self._maxima).items():
            known[where] = np.maximum(known[where], block.maxima[name])

    def split(self, cells: int) -> Iterator[ClusterTable]:
        return self._rows.split(cells, self.sums, self._maxima)


@dataclass(frozen=True)
class ClosedFamily:
    """Final sums of one group (such as a step) for a family, after normalization, over all micro-batches."""

    # name -> column, with a value per point of the grid [1, ...]
    totals: Arrays
    maxima: Arrays
    rows: ClusterTable  # columns by cluster, with R rows
    counted: Bools  # True if the row is a single cluster with a token [R]
    emptied: Bools  # True if a correction (a point of the grid) rejects all of the cluster [R, ...]


def family_factors(family: CorrectionFamily, group: FamilySums) -> ScopeFactors | None:
    """Return the divisors of the weights in each micro-batch, or `None` if the family does not normalize weights."""
    rule, table = family.correction.weight, group.totals
    if rule is None or rule.normalize == "none":
        return None
    return normalization_factors(rule, family.layouts.totals.arrays(table.sums), table.scopes)


def close_family(family: CorrectionFamily, cell: FamilySums, group: ScopeFactors | None) -> ClosedFamily:
    """Compute the final sums of one step or `--by` group: normalize weights, join micro-batches, and count clusters."""

    def normalized(layout: GridLayout, table: ClusterTable) -> Arrays:
        columns = layout.arrays(table.sums)
        if group is None:
            return columns
        return columns | normalize_columns(columns, group.at(table.scopes), family.correction)

    layouts, rows = family.layouts, cell.merged
    columns, maxima = normalized(layouts.totals, cell.totals), layouts.maxima.arrays(cell.totals.maxima)
    columns["factor"] = columns["tokens"]
    if group is not None:
        factors, own = group.at(cell.totals.scopes), normalized(layouts.rows, rows)
        maxima |= {name: maxima[name] / factors for name in ("weight", "-weight")}
        columns["factor"] = columns["tokens"] * factors
        rows = replace(rows, sums=np.empty_like(rows.sums))
        for name, values in layouts.rows.arrays(rows.sums).items():
            values[...] = own[name]
    rows = rows.merge_scopes()
    by_cluster = layouts.rows.arrays(rows.sums)
    counted = (by_cluster["tokens"] > 0) & (not rows.is_folded)
    columns |= {"clusters": counted, "empty_cluster": counted & (by_cluster["kept"] == 0)}
    return ClosedFamily(
        {name: values.sum(axis=0, keepdims=True, dtype=np.float64) for name, values in columns.items()},
        {name: values.max(axis=0, keepdims=True) for name, values in maxima.items()},
        rows,
        counted.reshape(len(rows)),
        columns["empty_cluster"],
    )


@dataclass
class FamilyRunSums:
    """Final sums of one family over a run, or over the sequences with one value of a `--by` column."""

    # name -> column, with a value per point of the grid [1, ...]
    totals: Arrays = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)
    rows: list[ClusterTable] = field(default_factory=list)  # columns by cluster, in several tables
    prompts: PromptCounter | None = None  # counts prompts, None without prompt ids

    def add(self, closed: ClosedFamily, salt: np.uint64) -> None:
        """Add the sums of a step. Count each prompt once. Without prompt ids, clusters differ by step (hash `salt`)."""
        totals, rows = closed.totals, closed.rows
        if self.prompts is None:
            rows = replace(rows, clusters=mix_hashes(rows.clusters, salt))
        else:
            fresh, emptied = self.prompts.add(rows.clusters, closed.counted, closed.emptied)
            clusters = fresh.sum().reshape(totals["clusters"].shape)
            totals = totals | {"clusters": clusters, "empty_cluster": emptied.sum(axis=0, keepdims=True)}
        self.totals = merge_parts(self.totals, totals)
        self.maxima = merge_parts(self.maxima, closed.maxima, np.maximum)
        self.rows.append(rows)
        if sum(map(len, self.rows)) > 2 * OVERALL_CAP:
            self.rows = [merge_tables(self.rows, OVERALL_CAP)]
