"""Sample: one row per sequence of what predictions are made from; mergeable, bounded, the same in any order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.analyze.trims import trims_of
from mismatchctl.batch import Bools, Float64s, Ints, TokenBatch
from mismatchctl.correction import Correction, apply
from mismatchctl.dumps import DumpSource, Problems, Unit, open_dump
from mismatchctl.engines.local import default_threads, ordered_map
from mismatchctl.frameworks import column_aliases
from mismatchctl.measure.hashes import cluster_hashes
from mismatchctl.measure.reduce import cut
from mismatchctl.measure.table import Hashes, hash_values, mix
from mismatchctl.ratios import ratios_of

FIRST_OCTAVE, OCTAVES = 4, 17
GRID: Ints = 1 << np.arange(FIRST_OCTAVE, FIRST_OCTAVE + OCTAVES, dtype=np.int64)
"""Lengths at which every sequence is looked at: 16, 32, ... 2^20 tokens."""
CAP = 1 << 15
"""Sequences that are kept of each run; beyond, those of the clusters with the smallest hashes."""
_WANTED = ("current_log_probs", "advantages", "prompt_id", "sequence_id", "step", "run")


@dataclass(frozen=True)
class SequenceSample:
    """Sequences [S], in no order that matters.

    Attributes:
        run: the run of each.
        step: hash of the group of each.
        cluster: hash of the prompt (else of the sequence) and the group of each.
        tokens: valid tokens of each.
        kept: tokens that each correction keeps [S, corrections].
        sums: of log ratio, K3 and ratio minus 1 over the first tokens, by GRID [S, OCTAVES, 3]; a sequence that has
            fewer shows all of its tokens.
        lowest, highest: extremes of the log ratio over the first tokens [S, OCTAVES].
        is_complete: whether no sequence was left out for the cap.
    """

    run: NDArray[Any]
    step: Hashes
    cluster: Hashes
    tokens: Ints
    kept: Float64s
    sums: Float64s
    lowest: Float64s
    highest: Float64s
    is_complete: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def together(cls, parts: Sequence[SequenceSample]) -> SequenceSample:
        """All of at least one."""
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        return cls(**joined, is_complete=all(part.is_complete for part in parts))._capped()

    def __add__(self, other: SequenceSample) -> SequenceSample:
        return SequenceSample.together([self, other])

    def of_run(self, run: str) -> SequenceSample:
        """The sequences of one run that hold a token, in an order of their own."""
        chosen = self._chosen((self.run == run) & (self.tokens > 0))
        order = np.lexsort((chosen.sums[:, -1, 0], chosen.tokens, chosen.cluster))
        return chosen._chosen(order)

    def first(self, octave: int) -> SequenceSample:
        """What the sequences of at least GRID[octave] tokens look like after so many."""
        long = self._chosen(self.tokens >= GRID[octave])
        return replace(
            long,
            tokens=np.full(len(long), GRID[octave]),
            sums=long.sums[:, : octave + 1],
            lowest=long.lowest[:, : octave + 1],
            highest=long.highest[:, : octave + 1],
        )

    def _chosen(self, which: Bools | Ints) -> SequenceSample:
        return replace(self, **{name: getattr(self, name)[which] for name in _ARRAYS})

    def _capped(self) -> SequenceSample:
        """At most CAP sequences of each run: whole clusters, by the order of their hashes."""
        if len(self) <= CAP:
            return self
        keep = np.zeros(len(self), np.bool_)
        for run in np.unique(self.run.astype(str)):
            own = np.flatnonzero(self.run == run)
            ranked = np.sort(self.cluster[own])
            keep[own] = self.cluster[own] <= ranked[min(CAP, len(own)) - 1]
        return replace(self._chosen(keep), is_complete=self.is_complete and bool(keep.all()))


_ARRAYS = tuple(field.name for field in fields(SequenceSample) if field.name != "is_complete")


def collect(batch: TokenBatch, run: str, corrections: Sequence[Correction]) -> SequenceSample:
    """What one batch adds; `run` names the rows that carry no run of their own."""
    some = batch.segments.nonempty  # of the others nothing is predicted
    held = batch if some.all() else batch.take(np.flatnonzero(some))
    parts = [_of_cell(part, name, step, corrections) for name, (step, _), part in cut(held, run, ())]
    return SequenceSample.together([empty_sample(len(corrections)), *parts])


def sample_of(
    paths: Sequence[DumpSource], corrections: Sequence[Correction], *, rename: Mapping[str, str] | None = None
) -> SequenceSample:
    """Read a dump for predictions alone; arguments as of `analyze`.

    Raises:
        DataError: the dump cannot be read or used.
    """
    looked_at = {column for correction in corrections for column in correction.columns}
    wanted = tuple(sorted({*_WANTED, *looked_at}))
    dump = open_dump(paths, rename=rename or {}, aliases=column_aliases(), by=(), wanted=wanted, on_bad="error")
    trims = trims_of(dump, corrections)

    def work(unit: Unit) -> list[SequenceSample]:
        run = unit.file.run
        return [collect(trims.on(batch, run), run, corrections) for batch in dump.read(unit, Problems())]

    sample = empty_sample(len(corrections))
    for _, parts in ordered_map(work, dump.readings, default_threads()):
        sample = reduce(add, parts, sample)
    dump.require_tokens(int(sample.tokens.sum()))
    return sample


def empty_sample(corrections: int) -> SequenceSample:
    """A sample without sequences, for so many corrections."""
    none, flat = np.zeros(0, np.uint64), np.zeros((0, OCTAVES))
    kept = np.zeros((0, corrections))
    return SequenceSample(
        np.zeros(0, object), none, none, np.zeros(0, np.int64), kept, np.zeros((0, OCTAVES, 3)), flat, flat
    )


def _of_cell(batch: TokenBatch, run: str, step: Any, corrections: Sequence[Correction]) -> SequenceSample:
    salt = hash_values(np.array([str(step)]))[0]
    parts = [_of_block(block, corrections) for _, block in batch.blocks()]
    kept, sums, lowest, highest = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return SequenceSample(
        np.full(len(batch), run, object),
        np.full(len(batch), salt),
        mix(cluster_hashes(batch), salt),
        batch.segments.lengths,
        kept,
        sums,
        lowest,
        highest,
    )._capped()


def _of_block(block: TokenBatch, corrections: Sequence[Correction]) -> tuple[Float64s, Float64s, Float64s, Float64s]:
    ratios = ratios_of(block, {"train/rollout"}.union(*(correction.sources for correction in corrections)))
    kept = [apply(correction, ratios, block).kept.counts for correction in corrections]
    own, offsets = ratios["train/rollout"], block.segments.offsets
    ends = offsets[:-1, None] + np.minimum(GRID, block.segments.lengths[:, None])
    sums = [_running(np.add, 0.0, values, offsets, ends) for values in (own.log_ratio, own.k3, own.excess)]
    lowest = _running(np.minimum, np.inf, own.log_ratio, offsets, ends)
    highest = _running(np.maximum, -np.inf, own.log_ratio, offsets, ends)
    return np.reshape(kept, (len(kept), len(block))).T, np.stack(sums, axis=2), lowest, highest


def _running(reduction: np.ufunc, neutral: float, values: Float64s, offsets: Ints, ends: Ints) -> Float64s:
    """Running sum or extreme of each sequence at `ends` [S, OCTAVES]."""
    starts = np.concatenate([offsets[:-1, None], ends[:, :-1]], axis=1)
    filled = starts < ends
    found = np.full(ends.shape, neutral)
    if filled.any():
        found[filled] = reduction.reduceat(values, starts[filled])
    return reduction.accumulate(found, axis=1)
