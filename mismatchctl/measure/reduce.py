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
from mismatchctl.measure.cell import CellSums, PairCollector, PairSums, RunCollector, RunSums
from mismatchctl.measure.histogram import MOST_ROWS, Rows
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
        by_prompt: whether the dump names prompts: each is one cluster of its run, in whatever steps it occurs.
        every_cluster: whether cluster tables of runs are kept as they are, with the columns of the drift and of
            corrections too, rather than at the size of a file.
    """

    corrections: tuple[Correction, ...] = ()
    by: tuple[str, ...] = ()
    drift: bool = False
    sequences: bool = False
    kernel: Kernel = PLAIN
    every_cluster: bool = False
    by_prompt: bool = False

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
    found = _gathered(batch, run, plan.by)
    result = Sums()
    for name, together in itertools.groupby(range(len(found.names)), key=lambda cell: found.names[cell][0]):
        cells = list(together)
        bounds = found.bounds[cells[0] : cells[-1] + 2]
        part = found.batch.sequences(int(bounds[0]), int(bounds[-1]))
        names = [found.names[cell][1] for cell in cells]
        result = result + _reduce_run(part, name, names, np.diff(bounds), plan)
    return result


def cut(batch: TokenBatch, run: str, by: Sequence[str]) -> Iterator[tuple[str, Cell, TokenBatch]]:
    """Cut a batch into cells. Sequences that lie scattered are gathered first; their order within a cell stays.

    Raises:
        ConfigError: `by` makes too many of them.
    """
    found = _gathered(batch, run, by)
    for (name, cell), (start, stop) in zip(found.names, itertools.pairwise(found.bounds.tolist()), strict=True):
        yield name, cell, found.batch.sequences(start, stop)


@dataclass(frozen=True)
class _Gathered:
    """A batch whose sequences lie together by cell: the run and cell of each stretch, and its bounds [cells + 1]."""

    batch: TokenBatch
    names: list[tuple[str, Cell]]
    bounds: Ints


def _gathered(batch: TokenBatch, run: str, by: Sequence[str]) -> _Gathered:
    keys = [batch.columns.get(name) for name in ("run", "step", *by)]
    groups = _labels(keys[:2], np.zeros(len(batch), np.int64))
    labels = _labels(keys[2:], groups)
    require_few(by, (labels.max(initial=0) + 1) // (groups.max(initial=0) + 1))
    if np.any(np.diff(labels) < 0):
        order = np.argsort(labels, kind="stable")
        batch, labels = batch.take(order), labels[order]
        keys = [batch.columns.get(name) for name in ("run", "step", *by)]
    starts = np.flatnonzero(np.append(True, np.diff(labels) != 0)) if len(labels) else np.zeros(0, np.int64)
    names = []
    for start in starts.tolist():
        own, *cell = [None if key is None else _plain(key[start]) for key in keys]
        names.append((run if own is None else str(own), (cell[0], tuple(cell[1:]))))
    return _Gathered(batch, names, np.append(starts, len(batch)))


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


def _reduce_run(batch: TokenBatch, run: str, names: Sequence[Cell], sizes: Ints, plan: Plan) -> Sums:
    """Sums of a batch of one run, whose cells of so many sequences lie one after the other."""
    cells, clusters = np.repeat(np.arange(len(sizes)), sizes), cluster_hashes(batch)
    buckets = (clusters % np.uint64(BUCKETS)).astype(np.int64)
    places, rows = np.unique(cells * BUCKETS + buckets, return_inverse=True)
    if len(places) > MOST_ROWS:  # by bucket within each cell, so that a part of the batch has few rows
        order = np.argsort(rows, kind="stable")
        batch, cells, clusters, buckets, rows = (
            batch.take(order), cells[order], clusters[order], buckets[order], rows[order],
        )  # fmt: skip
    worst = RunCollector(plan.kernel)
    pairs: list[dict[str, PairSums]] = [{} for _ in names]
    found: list[dict[str, Float64s]] = []
    for first in range(0, len(places), MOST_ROWS):
        own = places[first : first + MOST_ROWS]
        start, stop = np.searchsorted(rows, [first, first + len(own)]) if len(own) < len(places) else (0, len(batch))
        part = batch.sequences(int(start), int(stop))
        collectors = {name: PairCollector(plan.kernel, Rows(*np.divmod(own, BUCKETS))) for name in plan.pairs}
        found += _reduce_part(part, rows[start:stop] - first, buckets[start:stop], collectors, worst, plan)
        for name, collector in collectors.items():
            for cell, sums in collector.sums().items():
                pairs[cell][name] = pairs[cell][name] + sums if name in pairs[cell] else sums
    merged = {name: np.concatenate([columns[name] for columns in found]) for name in found[0]}
    scopes = scopes_of(batch, plan)
    additive, maxima = plan.columns
    added = np.stack([merged[name] for name in additive], axis=1)
    largest = np.stack([merged[f"max {name}"] for name in maxima], axis=1)
    ends = np.cumsum(sizes).tolist()
    tables = (
        ClusterTable.of(clusters[start:stop], scopes[start:stop], added[start:stop], largest[start:stop])
        for start, stop in itertools.pairwise([0, *ends])
    )
    done = {(run, cell): CellSums(table, own) for cell, table, own in zip(names, tables, pairs, strict=True)}
    sequences = (_sequence_rows(batch, run, names, sizes, scopes, merged),) if plan.sequences else ()
    return Sums(done, {run: worst.sums(merged, batch, buckets)}, sequences)


def _reduce_part(
    batch: TokenBatch,
    rows: Ints,
    buckets: Ints,
    collectors: dict[str, PairCollector],
    worst: RunCollector,
    plan: Plan,
) -> list[dict[str, Float64s]]:
    """All columns of each block of a part; maxima are called `max ...`. The collectors take note of its tokens."""
    found = []
    for start, block in plan.kernel.blocks(batch):
        ratios = ratios_of(block, plan)
        within = slice(start, start + len(block))
        reduced = {
            name: collectors[name].reduce(
                ratios[source],
                block.position,
                rows[within],
                buckets[within],
                worst.tables if name == MISMATCH else None,
            )
            for name, source in plan.pairs.items()
            if source in ratios
        }
        worst.add(ratios["train/rollout"], block)
        additive, maxima = _block_columns(block, ratios, reduced, plan)
        found.append(additive | {f"max {name}": values for name, values in maxima.items()})
    return found


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
    batch: TokenBatch, run: str, names: Sequence[Cell], sizes: Ints, scopes: Hashes, merged: dict[str, Float64s]
) -> dict[str, NDArray[Any]]:
    """The columns of `--sequences`: names and place of each sequence, then all its sums."""
    place = {
        "run": np.full(len(batch), run, object),
        "file": np.full(len(batch), batch.file),
        "row": batch.rows,
        "_step": np.repeat(np.array([str(step) for step, _ in names], object), sizes),
        "_scope": scopes,
    }
    sums = {name: values for name, values in merged.items() if name not in LAYERS}
    return place | {name: values for name, values in batch.columns.items() if name != "run"} | sums
