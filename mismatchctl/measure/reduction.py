"""Reduce a batch to sums per group. A group contains the sequences with the same run, step and `--by` values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, TokenBatch
from mismatchctl.core.bins import LAYER_COLUMNS, close_layers
from mismatchctl.core.ratios import Ratios
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, option
from mismatchctl.io.stores import escape_unprintable
from mismatchctl.measure.columns import (
    MISMATCH_NAME,
    PAIR_COLUMNS,
    PAIRS,
    PLAIN_LOSS_NAMES,
    WHOLE_COLUMNS,
    Columns,
    Pair,
    column_names,
    compute_token_loss,
    correction_columns,
    list_columns,
    pair_columns,
    plain_loss_columns,
    whole_column_names,
)
from mismatchctl.measure.kernels.kernel import BUCKETS, NUMPY_KERNEL, Kernel, PairTables, SequencePlaces
from mismatchctl.measure.metrics.registry import FACETS, Facet
from mismatchctl.measure.sums import (
    DETAILED_CAP,
    GROUP_CAP,
    MAX_ROWS,
    OVERALL_CAP,
    BatchTable,
    CellSums,
    ColumnSubject,
    Hashes,
    LabelValue,
    PairCollector,
    PairSums,
    RunCollector,
    RunSums,
    TableAxis,
    cluster_hashes,
    hash_values,
    merge_parts,
    number_rows,
    to_plain_value,
)

MOST_VALUES = 1024
CellKey = tuple[LabelValue, tuple[LabelValue, ...]]
"""The key of a group of sequences: (step, one value per `--by` column)."""

ROW_COLUMNS = ("tokens", "log_ratio", "square", "k3", "abs", "product", "policy_log_ppl", "reference_log_ppl")


@dataclass(frozen=True)
class MeasurePlan:
    """Settings of one pass over a dump: corrections, breakdowns, and other measurements."""

    corrections: tuple[Correction, ...] = ()  # all are applied in the same pass
    by: tuple[str, ...] = ()  # the `--by` columns
    available_columns: frozenset[str] = frozenset()  # optional columns of the dump, which decide what can be measured
    sequences: bool = False  # True to also return a row per sequence, for `--sequences`
    kernel: Kernel = NUMPY_KERNEL  # computes the sums over tokens
    # True to store up to DETAILED_CAP clusters per run with all columns, instead of a small table for a file
    every_cluster: bool = False
    by_prompt: bool = False  # True if the dump has prompt ids, so that a prompt is one cluster over all steps

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in PAIRS if pair.needs <= self.available_columns)

    @property
    def facets(self) -> tuple[Facet, ...]:
        return tuple(facet for facet in FACETS if facet.is_available(self.available_columns))

    @property
    def has_losses(self) -> bool:
        return "current_log_probs" in self.available_columns

    @cached_property
    def sequence_columns(self) -> TableAxis:
        """Return the columns that are computed per sequence and then summed per cluster."""
        pairs = [(pair.name, name) for pair in self.pairs for name in _pair_column_names(pair)]
        facets = [(MISMATCH_NAME, name) for facet in self.facets for name in facet.names]
        losses = [(MISMATCH_NAME, name) for name in PLAIN_LOSS_NAMES if self.has_losses]
        return TableAxis((*pairs, *facets, *losses, *self._of_corrections("sum")))

    @cached_property
    def row_columns(self) -> TableAxis:
        """Return the columns that `--sequences` writes. Storing all columns would take ten times the memory."""
        own = ((index, name) for index in range(len(self.corrections)) for name in ("kept", "mean_excess"))
        return TableAxis((*((MISMATCH_NAME, name) for name in ROW_COLUMNS), *own))

    @cached_property
    def sums(self) -> TableAxis:
        """Return the sum columns of a cluster table: `sequence_columns`, with LAYER_COLUMNS after the pairs."""
        names = self.sequence_columns.names
        return TableAxis(
            (
                *names[: self.layer_position],
                *((MISMATCH_NAME, name) for name in LAYER_COLUMNS),
                *names[self.layer_position :],
            )
        )

    @cached_property
    def layer_position(self) -> int:
        return sum(len(_pair_column_names(pair)) for pair in self.pairs)

    @cached_property
    def maxima(self) -> TableAxis:
        pairs = [(pair.name, name) for pair in self.pairs for name in column_names(PAIR_COLUMNS, "largest")]
        return TableAxis((*pairs, *self._of_corrections("largest")))

    def _of_corrections(self, merge: Literal["sum", "largest"]) -> Iterator[tuple[ColumnSubject, str]]:
        for index, correction in enumerate(self.corrections):
            yield from ((index, name) for name in column_names(list_columns(correction, losses=self.has_losses), merge))

    @property
    def max_clusters(self) -> int:
        return DETAILED_CAP if self.every_cluster else OVERALL_CAP

    @property
    def has_micro_batches(self) -> bool:
        return any(correction.normalizes_micro_batches for correction in self.corrections)


@dataclass(frozen=True)
class Sums:
    """Sums of batches, per group and per run. In `a + b`, `a` must come before `b` in the dump."""

    cells: dict[tuple[str, CellKey], CellSums] = field(default_factory=dict)
    runs: dict[str, RunSums] = field(default_factory=dict)
    sequences: tuple[dict[str, NDArray[Any]], ...] = ()

    def __add__(self, other: Sums) -> Sums:
        cells = merge_parts(self.cells, other.cells, lambda some, more: (some + more).fold(GROUP_CAP))
        return Sums(cells, merge_parts(self.runs, other.runs), self.sequences + other.sequences)


def reduce_batch(batch: TokenBatch, run: str, plan: MeasurePlan) -> Sums:
    batch, names, bounds = gather_cells(batch, run, plan.by)
    result = Sums()
    for name, together in itertools.groupby(range(len(names)), key=lambda cell: names[cell][0]):
        cells = list(together)
        own = bounds[cells[0] : cells[-1] + 2]
        part = batch.sequences(int(own[0]), int(own[-1]))
        result = result + _reduce_run(part, name, [names[cell][1] for cell in cells], np.diff(own), plan)
    return result


def split_steps(batch: TokenBatch, run: str) -> Iterator[tuple[str, CellKey, TokenBatch]]:
    """Yield the run, the step and the sequences of each step in a batch. Sequences keep their order."""
    batch, names, bounds = gather_cells(batch, run, ())
    for (name, cell), (start, stop) in zip(names, itertools.pairwise(bounds.tolist()), strict=True):
        yield name, cell, batch.sequences(start, stop)


def split_runs(batch: TokenBatch, run: str) -> Iterator[tuple[str, TokenBatch]]:
    """Split a batch by run. The sequences of a run keep their order."""
    names = batch.columns.get("run")
    if names is None:
        yield run, batch
        return
    labels = number_rows([names], np.zeros(len(batch), np.int64))
    for label in range(labels.max(initial=-1) + 1):
        rows = np.flatnonzero(labels == label)
        own = to_plain_value(names[rows[0]])
        yield run if own is None else str(own), batch.take(rows)


def gather_cells(batch: TokenBatch, run: str, by: Sequence[str]) -> tuple[TokenBatch, list[tuple[str, CellKey]], Ints]:
    """Sort a batch by group. Also return the (run, key) of each group, and the row offsets of groups [groups + 1]."""
    keys = [batch.columns.get(name) for name in ("run", "step", *by)]
    groups = number_rows(keys[:2], np.zeros(len(batch), np.int64))
    labels = number_rows(keys[2:], groups)
    check_breakdown_values(by, (labels.max(initial=0) + 1) // (groups.max(initial=0) + 1))
    if np.any(np.diff(labels) < 0):
        order = np.argsort(labels, kind="stable")
        batch, labels = batch.take(order), labels[order]
        keys = [batch.columns.get(name) for name in ("run", "step", *by)]
    starts = np.flatnonzero(np.append(True, np.diff(labels) != 0)) if len(labels) else np.zeros(0, np.int64)
    names = []
    for start in starts.tolist():
        own, *cell = [None if key is None else to_plain_value(key[start]) for key in keys]
        names.append((run if own is None else str(own), (cell[0], tuple(cell[1:]))))
    return batch, names, np.append(starts, len(batch))


def check_breakdown_values(by: Sequence[str], values: int) -> None:
    """Raise an error if `--by` columns have too many values, because each value needs the memory of a run."""
    if values > MOST_VALUES:
        raise ConfigError(
            f"{option('by', ', '.join(map(escape_unprintable, by)))}: more than {MOST_VALUES:,} values; "
            "choose a column with fewer different values"
        )


def _reduce_run(batch: TokenBatch, run: str, names: Sequence[CellKey], sizes: Ints, plan: MeasurePlan) -> Sums:
    """Compute the sums of one run. The batch must be sorted by group."""
    cells, clusters, scopes = np.repeat(np.arange(len(sizes)), sizes), cluster_hashes(batch), scope_hashes(batch, plan)
    buckets = (clusters % np.uint64(BUCKETS)).astype(np.int64)
    filled, rows = np.unique(cells * BUCKETS + buckets, return_inverse=True)
    if len(filled) > MAX_ROWS:  # sort by bucket, so that each part needs at most MAX_ROWS rows
        order = np.argsort(rows, kind="stable")
        batch, cells, clusters, scopes, buckets, rows = (
            batch.take(order), cells[order], clusters[order], scopes[order], buckets[order], rows[order],
        )  # fmt: skip
    table = BatchTable(cells, clusters, scopes, len(plan.sequence_columns), len(plan.maxima))
    worst = RunCollector(plan.kernel, len(table))
    pairs: list[dict[str, PairSums]] = [{} for _ in names]
    found: list[Float64s] = []
    for first in range(0, len(filled), MAX_ROWS):
        own = filled[first : first + MAX_ROWS]
        start, stop = np.searchsorted(rows, [first, first + len(own)]) if len(own) < len(filled) else (0, len(batch))
        places = SequencePlaces(rows[start:stop] - first, buckets[start:stop], table.rows[start:stop])
        collectors = {
            pair.name: PairCollector(plan.kernel, PairTables(*np.divmod(own, BUCKETS))) for pair in plan.pairs
        }
        for sums, maxima in _reduce_blocks(batch.sequences(int(start), int(stop)), places, collectors, worst, plan):
            table.add(sums, maxima)
            if plan.sequences:
                kept = [sums[plan.sequence_columns.position(*name)] for name in plan.row_columns.names]
                farthest = (maxima[plan.maxima.position(MISMATCH_NAME, name)] for name in ("log_ratio", "-log_ratio"))
                found.append(np.stack([*kept, np.maximum(*farthest)], axis=1))
        for name, collector in collectors.items():
            for cell, pair in collector.sums().items():
                pairs[cell][name] = pairs[cell][name] + pair if name in pairs[cell] else pair
    tables = table.tables(len(names), close_layers(worst.tables.layers), plan.layer_position)
    done = {(run, cell): CellSums(own, pair) for cell, own, pair in zip(names, tables, pairs, strict=True)}
    sequences = (_sequence_rows(batch, run, names, sizes, scopes, found),) if plan.sequences else ()
    return Sums(done, {run: worst.sums()}, sequences)


def _reduce_blocks(
    batch: TokenBatch,
    places: SequencePlaces,
    collectors: dict[str, PairCollector],
    worst: RunCollector,
    plan: MeasurePlan,
) -> Iterator[tuple[list[Float64s], list[Float64s]]]:
    """Yield (columns with sums, columns with maxima) of each block, and add the block to the collectors."""
    scored = {pair: batch.has_log_probs(*pair.policies) for pair in plan.pairs}
    some = {
        pair: _optional_pair_columns(pair, known, batch, places, collectors[pair.name], plan)
        for pair, known in scored.items()
        if not known.all()
    }
    for start, block in plan.kernel.split_blocks(batch):
        ratios, within = correction_ratios(block, plan), places.part(start, start + len(block))
        columns: dict[str, tuple[Columns, Columns]] = {}
        for pair in plan.pairs:
            if pair in some:
                part = slice(start, start + len(block))
                added, largest = ({name: values[part] for name, values in each.items()} for each in some[pair])
            else:
                own = ratios.get(pair.source) or _pair_ratios(pair.source, block, plan)
                tables = worst.tables if pair.name == MISMATCH_NAME else None
                sums = collectors[pair.name].reduce(own, block.position, within, tables)
                added, largest = pair_columns(own, *sums)
                added |= {
                    f"mismatch_{name}": columns[MISMATCH_NAME][0][name]
                    for name in WHOLE_COLUMNS
                    if whole_column_names(pair)
                }
            columns[pair.name] = added, largest
        mismatch = columns[MISMATCH_NAME][0]
        worst.add(ratios["train/rollout"], block, mismatch, within.buckets)
        made = [*columns.values()]
        for facet in plan.facets:
            found = facet.columns(block, ratios["train/rollout"])
            made.append(({name: found[name] for name in facet.names}, {}))
        plain = compute_token_loss("ppo", block) if plan.has_losses and plan.corrections else None
        if plan.has_losses:
            made.append((plain_loss_columns(plain, block), {}))
        for correction in plan.corrections:
            made.append(
                correction_columns(
                    correction,
                    ratios,
                    mismatch["k3"],
                    block,
                    plain,
                    losses=plan.has_losses,
                    all_tokens=plan.kernel.evaluates_all_tokens,
                )
            )
        yield (
            [values for added, _ in made for values in added.values()],
            [values for _, largest in made for values in largest.values()],
        )


def _pair_column_names(pair: Pair) -> tuple[str, ...]:
    return (*column_names(PAIR_COLUMNS, "sum"), *whole_column_names(pair))


def _optional_pair_columns(
    pair: Pair, known: Bools, batch: TokenBatch, places: SequencePlaces, collector: PairCollector, plan: MeasurePlan
) -> tuple[Columns, Columns]:
    """Return sums and maxima of a pair of policies: 0 and -inf for sequences that lack the log-probs of the pair."""
    columns = {name: np.zeros(len(batch)) for name in _pair_column_names(pair)}
    maxima = {name: np.full(len(batch), -np.inf) for name in column_names(PAIR_COLUMNS, "largest")}
    chosen = np.flatnonzero(known)
    if not len(chosen):
        return columns, maxima
    for start, block in plan.kernel.split_blocks(batch.take(chosen)):
        rows = chosen[start : start + len(block)]
        own, gap = (_pair_ratios(each.source, block, plan) for each in (pair, PAIRS[0]))
        within = SequencePlaces(places.rows[rows], places.buckets[rows], places.clusters[rows])
        added, largest = pair_columns(own, *collector.reduce(own, block.position, within))
        whole = (gap.log_ratio_sum, gap.square_sum, gap.k3_sum)
        added |= dict(zip(whole_column_names(pair), whole, strict=True))
        for into, made in ((columns, added), (maxima, largest)):
            for name, values in made.items():
                into[name][rows] = values
    return columns, maxima


def correction_ratios(block: TokenBatch, plan: MeasurePlan) -> dict[str, Ratios]:
    sources = {"train/rollout", *(source for correction in plan.corrections for source in correction.sources)}
    if plan.has_losses and block.current is not None:
        sources |= {"current/train", "current/rollout"}
    return {source: _pair_ratios(source, block, plan) for source in sources}


def _pair_ratios(source: str, block: TokenBatch, plan: MeasurePlan) -> Ratios:
    policy, reference = map(block.log_probs, source.split("/"))
    assert policy is not None
    assert reference is not None
    return plan.kernel.compute_ratios(policy, reference, block.segments)


def scope_hashes(batch: TokenBatch, plan: MeasurePlan) -> Hashes:
    scopes = batch.columns.get("micro_batch") if plan.has_micro_batches else None
    return np.zeros(len(batch), np.uint64) if scopes is None else hash_values(scopes)


def _sequence_rows(
    batch: TokenBatch, run: str, names: Sequence[CellKey], sizes: Ints, scopes: Hashes, found: Sequence[Float64s]
) -> dict[str, NDArray[Any]]:
    """Return one row per sequence, for `--sequences`."""
    place = {
        "run": np.full(len(batch), run, object),
        "row": batch.rows,
        "_step": np.repeat(np.array([str(step) for step, _ in names], object), sizes),
        "_scope": scopes,
    }
    labels = {name: values for name, values in batch.columns.items() if name != "run"}
    return place | labels | {"_sums": np.concatenate(found)}
