"""The pass over the tokens: a batch in, sums out. One reading serves every metric and every correction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.measure import columns as cols
from mismatchctl.measure.cell import CellSums, PairCollector, RunCollector, RunSums
from mismatchctl.measure.kernels.kernel import BUCKETS, TOKEN_MAXIMA, TOKEN_SUMS, Kernel
from mismatchctl.measure.kernels.plain import PLAIN
from mismatchctl.measure.layers import LAYERS
from mismatchctl.measure.losses import plain_loss_columns, token_loss
from mismatchctl.measure.table import (
    DETAILED_CAP,
    GROUP_CAP,
    OVERALL_CAP,
    ClusterTable,
    Hashes,
    hash_content,
    hash_values,
    mix,
)
from mismatchctl.ratios import Ratios
from mismatchctl.stores import printable

MISMATCH, DRIFT = "mismatch", "drift"
MOST_VALUES = 1024
"""Values of the columns to break down by, in all."""
Value = str | int | float | bool | None
Cell = tuple[Value, tuple[Value, ...]]
"""(step, one value per `--by` column)."""


@dataclass(frozen=True)
class Plan:
    """What one pass computes.

    Attributes:
        corrections: all are applied in the same pass.
        by: columns to break down by.
        drift: whether the dump has current log-probs.
        sequences: whether a row per sequence is wanted too.
        kernel: what does the arithmetic over tokens.
        every_cluster: whether cluster tables of runs are kept as they are, with the columns of the drift and of
            corrections too, rather than at the size of a file.
    """

    corrections: tuple[Correction, ...] = ()
    by: tuple[str, ...] = ()
    drift: bool = False
    sequences: bool = False
    kernel: Kernel = PLAIN
    every_cluster: bool = False

    @property
    def pairs(self) -> dict[str, str]:
        """The pairs of policies that are measured: name -> policy/reference."""
        return {MISMATCH: "train/rollout"} | ({DRIFT: "current/train"} if self.drift else {})

    @cached_property
    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the additive columns and of the maxima of a cluster table, in order.

        Whatever the column functions give for one token is what they give for all.
        """
        one = np.zeros(1)
        block = TokenBatch(
            Segments(np.array([0, 1])), one, one, current=one, advantages=one, rows=np.zeros(1, np.int64)
        )
        plain = replace(self, kernel=PLAIN)
        ratios = ratios_of(block, plain)
        nothing = np.zeros((len(TOKEN_SUMS), 1)), np.zeros((len(TOKEN_MAXIMA), 1))
        additive, maxima = _block_columns(block, ratios, dict.fromkeys(self.pairs, nothing), plain)
        return tuple(additive), tuple(maxima)

    @property
    def most_clusters(self) -> int:
        """Rows, one per cluster and group, that are kept apart of a whole run."""
        return DETAILED_CAP if self.every_cluster else OVERALL_CAP

    @property
    def scoped(self) -> bool:
        """Whether some weights are normalized within micro-batches."""
        return any(correction.normalizes_micro_batches for correction in self.corrections)


@dataclass(frozen=True)
class Sums:
    """Sums by run and cell, and by run; `+` in the order of the input is the only merge."""

    cells: dict[tuple[str, Cell], CellSums] = field(default_factory=dict)
    runs: dict[str, RunSums] = field(default_factory=dict)
    sequences: tuple[dict[str, NDArray[Any]], ...] = ()

    def __add__(self, other: Sums) -> Sums:
        cells, runs = dict(self.cells), dict(self.runs)
        for key, cell in other.cells.items():
            cells[key] = (cells[key] + cell).folded(GROUP_CAP) if key in cells else cell
        for name, run in other.runs.items():
            runs[name] = runs[name] + run if name in runs else run
        return Sums(cells, runs, self.sequences + other.sequences)

    def at_file(self, index: int) -> Sums:
        """The same sums of one file, which has another place in the dump."""
        runs = {name: run.at_file(index) for name, run in self.runs.items()}
        rows = tuple(columns | {"file": np.full_like(columns["file"], index)} for columns in self.sequences)
        return Sums(self.cells, runs, rows)


def reduce_batch(batch: TokenBatch, run: str, plan: Plan) -> Sums:
    """Sums of one batch; `run` names the rows that carry no run of their own."""
    result = Sums()
    for name, cell, part in cut(batch, run, plan.by):
        result = result + _reduce_cell(part, name, cell, plan)
    return result


def cut(batch: TokenBatch, run: str, by: Sequence[str]) -> Iterator[tuple[str, Cell, TokenBatch]]:
    """Cut a batch into cells. Sequences that lie scattered are gathered first; their order within a cell stays.

    Raises:
        ConfigError: `by` makes too many of them.
    """
    keys = [batch.columns.get(name) for name in ("run", "step", *by)]
    groups = _labels(keys[:2], np.zeros(len(batch), np.int64))
    labels = _labels(keys[2:], groups)
    require_few(by, (labels.max(initial=0) + 1) // (groups.max(initial=0) + 1))
    order = np.argsort(labels, kind="stable")
    if np.any(np.diff(labels) < 0):
        batch, labels = batch.take(order), labels[order]
        keys = [batch.columns.get(name) for name in ("run", "step", *by)]
    starts = np.flatnonzero(np.append(True, np.diff(labels) != 0)) if len(labels) else np.zeros(0, np.int64)
    bounds = [*starts.tolist(), len(batch)]
    for start, stop in itertools.pairwise(bounds):
        names = [None if key is None else _plain(key[start]) for key in keys]
        cell = names[1], tuple(names[2:])
        yield run if names[0] is None else str(names[0]), cell, batch.sequences(start, stop)


def require_few(by: Sequence[str], values: int) -> None:
    """Refuse columns to break down by that hardly two sequences share: each value takes as much memory as a run.

    Raises:
        ConfigError: there are more than `MOST_VALUES`.
    """
    if values > MOST_VALUES:
        raise ConfigError(
            f"--by {', '.join(map(printable, by))}: more than {MOST_VALUES:,} values; "
            "break down by what many sequences share"
        )


def _labels(keys: Sequence[NDArray[Any] | None], labels: Ints) -> Ints:
    """A number for each row [S], from 0 on, in the order of what it had and then of the keys."""
    for values in keys:
        if values is not None:
            _, codes = np.unique(_told_apart(values), return_inverse=True)
            _, labels = np.unique(labels * (codes.max(initial=0) + 1) + codes, return_inverse=True)
    return labels


def _told_apart(values: NDArray[Any]) -> NDArray[Any]:
    """Values as text, a missing one unlike the text "None"."""
    if values.dtype != object:
        return values.astype(str)
    return np.array(["\0" if value is None else str(value) for value in values])


def _plain(value: Any) -> Value:
    """A group's name as JSON can hold it: numpy scalars become Python's, NaN (a missing number) None."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return None if np.isnan(value) else int(value) if value.is_integer() else value
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def _reduce_cell(batch: TokenBatch, run: str, cell: Cell, plan: Plan) -> Sums:
    additive_names, maxima_names = plan.columns
    collectors = {name: PairCollector(plan.kernel) for name in plan.pairs}
    clusters = cluster_hashes(batch)
    buckets = (clusters % np.uint64(BUCKETS)).astype(np.int64)
    rows: list[dict[str, Float64s]] = []
    worst = RunCollector(plan.kernel)
    for start, block in plan.kernel.blocks(batch):
        ratios = ratios_of(block, plan)
        within = slice(start, start + len(block))
        reduced = {
            name: collectors[name].reduce(
                ratios[source], block.position, buckets[within], worst.tables if name == MISMATCH else None
            )
            for name, source in plan.pairs.items()
            if source in ratios
        }
        worst.add(ratios["train/rollout"], block)
        additive, maxima = _block_columns(block, ratios, reduced, plan)
        rows.append(additive | {f"max {name}": values for name, values in maxima.items()})
    scopes = scopes_of(batch, plan)
    merged = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    table = ClusterTable.of(
        clusters,
        scopes,
        np.stack([merged[name] for name in additive_names], axis=1),
        np.stack([merged[f"max {name}"] for name in maxima_names], axis=1),
    )
    sums = CellSums(table, {name: collector.sums() for name, collector in collectors.items()})
    sequences = (_sequence_rows(batch, run, cell, scopes, merged),) if plan.sequences else ()
    return Sums({(run, cell): sums}, {run: worst.sums(merged, batch, buckets)}, sequences)


def ratios_of(block: TokenBatch, plan: Plan) -> dict[str, Ratios]:
    """One Ratios per source that a metric or a correction looks at."""
    made = {"train/rollout": plan.kernel.ratios(block.train, block.rollout, block.segments)}
    if plan.drift and block.current is not None:
        made["current/train"] = plan.kernel.ratios(block.current, block.train, block.segments)
        if any("current/rollout" in correction.sources for correction in plan.corrections):
            made["current/rollout"] = plan.kernel.ratios(block.current, block.rollout, block.segments)
    return made


def _block_columns(
    block: TokenBatch, ratios: dict[str, Ratios], reduced: dict[str, tuple[Float64s, Float64s]], plan: Plan
) -> tuple[dict[str, Float64s], dict[str, Float64s]]:
    """All columns of one block: additive, and those of which the largest counts."""
    additive: dict[str, Float64s] = {}
    maxima: dict[str, Float64s] = {}
    for pair, source in plan.pairs.items():
        prefix = "" if pair == MISMATCH else f"{DRIFT}_"
        if source in ratios:
            columns, largest = cols.pair_columns(ratios[source], *reduced[pair])
            columns = cols.base_columns(block) | columns
        else:  # a file without current log-probs among others that have them
            columns = dict.fromkeys(additive, np.zeros(len(block)))
            largest = dict.fromkeys(maxima, np.full(len(block), -np.inf))
        additive |= {prefix + name: values for name, values in columns.items()}
        maxima |= {prefix + name: values for name, values in largest.items()}
    additive |= dict(zip(LAYERS, plan.kernel.layers(ratios["train/rollout"]), strict=True))
    plain = token_loss("ppo", block) if plan.drift and plan.corrections else None
    if plan.drift:
        additive |= plain_loss_columns(plain, block)
    for index, correction in enumerate(plan.corrections):
        columns, largest = plan.kernel.correct(correction, ratios, additive["k3"], block, plain, losses=plan.drift)
        additive |= {f"{index}/{name}": values for name, values in columns.items()}
        maxima |= {f"{index}/{name}": values for name, values in largest.items()}
    return additive, maxima


def cluster_hashes(batch: TokenBatch) -> Hashes:
    """Hash of each sequence's prompt, else of its own id, else of what it holds."""
    hashes, named = np.zeros(len(batch), np.uint64), np.zeros(len(batch), np.bool_)
    for name in ("prompt_id", "sequence_id"):
        values = batch.columns.get(name)
        if values is None or named.all():
            continue
        given = np.array([_plain(value) is not None for value in values]) if values.dtype.kind in "fO" else ~named
        own = mix(hash_values(values), hash_values(np.array([name])))
        hashes = np.where(given & ~named, own, hashes)
        named |= given
    if named.all():
        return hashes
    held = [batch.segments.lengths.astype(np.float64), *map(batch.segments.sum, (batch.rollout, batch.train))]
    return np.where(named, hashes, hash_content(held))


def scopes_of(batch: TokenBatch, plan: Plan) -> Hashes:
    """Hash of each sequence's micro-batch [S]; 0 where that does not matter."""
    scopes = batch.columns.get("micro_batch") if plan.scoped else None
    return np.zeros(len(batch), np.uint64) if scopes is None else hash_values(scopes)


def _sequence_rows(
    batch: TokenBatch, run: str, cell: Cell, scopes: Hashes, merged: dict[str, Float64s]
) -> dict[str, NDArray[Any]]:
    """The columns of `--sequences`: names and place of each sequence, then all its sums."""
    place = {
        "run": np.full(len(batch), run, object),
        "file": np.full(len(batch), batch.file),
        "row": batch.rows,
        "_step": np.full(len(batch), str(cell[0]), object),
        "_scope": scopes,
    }
    sums = {name: values for name, values in merged.items() if name not in LAYERS}
    return place | {name: values for name, values in batch.columns.items() if name != "run"} | sums
