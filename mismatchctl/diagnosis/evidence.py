"""Evidence for causes of a mismatch: counts of the whole dump, sums by step and worker, and sampled rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Floats, Ints, Segments
from mismatchctl.data.blocks import Rows
from mismatchctl.data.problems import LengthMismatch
from mismatchctl.diagnosis.content import SequenceHashes
from mismatchctl.measure.sequence_terms import LevelTerms, ValidTokens, compute_sequence_terms
from mismatchctl.measure.sums import Hashes, merge_parts, sort_by_hash

MIN_SAMPLE, MAX_SAMPLE, SAMPLE_SHARE = 1 << 16, 1 << 18, 1 / 32
"""The sample of a run has SAMPLE_SHARE of the dump's tokens, but at least MIN_SAMPLE and at most MAX_SAMPLE."""
MAX_PLACES = 3
LAG_COLUMN = "lag"  # name of a column that mismatchctl computes: `train_version` minus `rollout_version`

GroupValue = str | int | float | bool | None
LevelSums = dict[tuple[str, GroupValue, GroupValue], Float64s]


@dataclass(frozen=True)
class Tally:
    """Numbers of flagged tokens and of sequences that contain them. `places`: (file, row, position) of some tokens."""

    tokens: int = 0
    sequences: int = 0
    places: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, rows: Rows, marks: Bools) -> Tally:
        marked = np.flatnonzero(rows.segments.max(marks) > 0)
        end = rows.segments.offsets[marked[:MAX_PLACES][-1] + 1] if len(marked) else 0
        first = np.flatnonzero(marks[:end])[:MAX_PLACES]
        sequence = np.searchsorted(rows.segments.offsets, first, side="right") - 1
        places = (rows.file[sequence], rows.rows[sequence], rows.position_of(first))
        tokens = int(np.count_nonzero(marks))
        return cls(tokens, len(marked), tuple(zip(*(of.tolist() for of in places), strict=True)))

    def __add__(self, other: Tally) -> Tally:
        places = tuple(sorted({*self.places, *other.places})[:MAX_PLACES])
        return Tally(self.tokens + other.tokens, self.sequences + other.sequences, places)


FlagFunction = Callable[[Rows], Mapping[str, Tally]]


@dataclass(frozen=True)
class RowSample:
    """A sample of whole rows, with about `size` tokens in total: the rows whose content has the lowest hashes.

    Copies of a row have the same hash, so they are sampled together. Therefore, the sample shows duplicates.
    """

    parts: tuple[tuple[Hashes, Rows], ...]
    size: int

    @classmethod
    def of(cls, hashes: Hashes, rows: Rows, size: int, tokens: int = 0) -> RowSample:
        """Sample the rows of one part of a run. `tokens` is the size of the whole run in tokens, or 0 if unknown."""
        order = sort_by_hash(hashes, rows.file, rows.rows)
        lengths = np.maximum(rows.segments.lengths[order], 1)  # a row without tokens takes memory too
        before = np.cumsum(lengths) - lengths
        most = np.full(len(order), size)
        if 2 * size < tokens:
            share = 2 * size * rows.segments.tokens // tokens + 1
            most[hashes[order] >= np.uint64(2**65 * size // tokens)] = min(share, size)
        order = order[before < most]
        chosen = rows if np.array_equal(order, np.arange(len(rows))) else rows.take(order)
        return cls(((hashes[order], chosen),), size)

    @cached_property
    def _chosen(self) -> tuple[Hashes, Rows]:
        if len(self.parts) == 1:
            return self.parts[0]
        hashes, rows = zip(*self.parts, strict=True)
        return RowSample.of(np.concatenate(hashes), _concatenate(rows), self.size).parts[0]

    @cached_property
    def _held(self) -> int:
        return sum(rows.segments.tokens + len(rows) for _, rows in self.parts)

    @property
    def hashes(self) -> Hashes:
        return self._chosen[0]

    @property
    def rows(self) -> Rows:
        return self._chosen[1]

    def __add__(self, other: RowSample) -> RowSample:
        both = RowSample((*self.parts, *other.parts), self.size)
        vars(both)["_held"] = held = self._held + other._held  # cached, so that a merge does not count all parts again
        return RowSample((both._chosen,), self.size) if held > 2 * self.size else both


@dataclass(frozen=True)
class Evidence:
    """Evidence about one run. Rows with different numbers of rollout and train log-probs only count in `unfit`."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    cells: LevelSums = field(default_factory=dict)
    sample: RowSample | None = None
    tokens: int = 0
    sequences: int = 0
    unfit: LengthMismatch | None = None
    hashes: SequenceHashes = field(default_factory=SequenceHashes)

    def __add__(self, other: Evidence) -> Evidence:
        tallies = dict(self.tallies)
        for name, tally in other.tallies.items():
            tallies[name] = tallies.get(name, Tally()) + tally
        return Evidence(
            tallies,
            merge_parts(self.cells, other.cells),
            self.sample + other.sample if self.sample and other.sample else self.sample or other.sample,
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.unfit + other.unfit if self.unfit and other.unfit else self.unfit or other.unfit,
            self.hashes + other.hashes,
        )

    def sampled(self, size: int, tokens: int) -> Evidence:
        if self.sample is None:
            return self
        return replace(self, sample=RowSample.of(self.sample.hashes, self.sample.rows, size, tokens))


def gather_evidence(
    rows: Rows, by: Sequence[str], flags: Sequence[FlagFunction], size: int, tokens: Mapping[str, int]
) -> dict[str, Evidence]:
    runs = rows.columns["run"]
    names = sorted({str(run) for run in set(runs.tolist())})
    whole = replace(rows, unequal={})
    parts = {names[0]: whole} if len(names) == 1 else {name: rows.take(np.flatnonzero(runs == name)) for name in names}
    found = {name: _gather_run(part, by, flags, size, tokens.get(name, 0)) for name, part in parts.items()}
    for name, unequal in rows.unequal.items():
        found[name] = found.get(name, Evidence()) + Evidence(unfit=unequal)
    return found


def _gather_run(rows: Rows, by: Sequence[str], flags: Sequence[FlagFunction], size: int, tokens: int) -> Evidence:
    valid = ValidTokens.of(rows.segments, rows.mask)
    terms = compute_sequence_terms(rows.segments, rows.rollout, rows.train, rows.mask, valid)
    tallies = _count_identical(rows, valid, terms.levels)
    for flag in flags:
        tallies |= flag(rows)
    return Evidence(
        tallies={name: found for name, found in tallies.items() if found.tokens},
        cells=sum_levels(rows, terms.levels, ("", LAG_COLUMN, "worker", *by)),
        sample=RowSample.of(terms.rows, rows, size, tokens),
        tokens=int(valid.counts.sum()),
        sequences=len(rows),
        hashes=SequenceHashes.of(rows, valid, terms),
    )


def _count_identical(rows: Rows, valid: ValidTokens, terms: LevelTerms) -> dict[str, Tally]:
    slim = replace(rows, columns={}, extra_columns={})  # without unused columns, which `take` would copy

    def tally(counts: Ints, is_marked: Callable[[Floats, Floats], Bools]) -> Tally:
        marked = np.flatnonzero(counts)
        few = slim.take(marked[:MAX_PLACES])
        places = Tally.of(few, is_marked(few.rollout, few.train) & few.mask).places
        return Tally(int(counts.sum()), len(marked), places)

    different = valid.counts - terms.identical
    return {"identical": tally(terms.identical, np.equal), "different": tally(different, np.not_equal)}


def sum_levels(rows: Rows, levels: LevelTerms, columns: Iterable[str]) -> LevelSums:
    """Return sums for a regression of the log mismatch on sequence length. The keys are (column, step, value).

    The log mismatch of a sequence is log(sum of |log ratio| / sum of 1 - p), where p is the trainer's probability and
    |log ratio| is limited to 1. If all logits have equal noise, sequences have a similar log mismatch. Each value of
    the result is a [4, 4] matrix: the sums of the products of 1, log mismatch, log(number of tokens), and log(mean of
    1 - p). The column name "" represents all sequences of a step.
    """
    some = (levels.finite > 0) & (levels.size > 0)  # if all log-probs are equal, log(0) would be -inf
    counts = levels.finite[some]
    expected = 1.02 * counts - levels.certain[some]
    level = np.log(levels.size[some] / expected)
    terms = np.stack([np.ones(len(counts)), level, np.log(counts), np.log(expected / counts)], axis=1)
    moments = terms[:, :, None] * terms[:, None]
    steps = read_column(rows, "step")[some]
    cells: LevelSums = {}
    for name in dict.fromkeys(columns):
        values = version_lag(rows) if name == LAG_COLUMN else read_column(rows, name) if name in rows.columns else None
        if values is None and name:
            continue
        keys = np.full(len(steps), None, object) if values is None else values[some]
        new = (steps[1:] != steps[:-1]) | (keys[1:] != keys[:-1])
        starts = np.flatnonzero(np.append(True, new)[: len(steps)])  # starts of stretches with equal step and key
        pairs = list(zip(steps[starts].tolist(), keys[starts].tolist(), strict=True))
        known = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        sums = np.zeros((len(known), *moments.shape[1:]))
        np.add.at(sums, [known[pair] for pair in pairs], np.add.reduceat(moments, starts))
        cells |= {(name, *key): own for key, own in zip(known, sums, strict=True)}
    return cells


def version_lag(rows: Rows) -> NDArray[Any] | None:
    train, rollout = (rows.columns.get(name) for name in ("train_version", "rollout_version"))
    if train is None or rollout is None or object in (train.dtype, rollout.dtype):
        return None
    return np.asarray(train, np.float64) - np.asarray(rollout, np.float64)


def read_column(rows: Rows, name: str) -> NDArray[Any]:
    """Return one value per sequence [S]. If the column does not exist, all values are `None`."""
    values = rows.columns.get(name)
    return np.full(len(rows), None, object) if values is None else values


def _concatenate(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows. Leave out per-token columns that any of the parts lacks."""
    first = parts[0]

    def join(values: Iterable[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([*values])

    def is_shared(name: str, values: NDArray[Any]) -> bool:
        found = [part.extra_columns.get(name) for part in parts]
        return all(own is not None and own.shape[1:] == values.shape[1:] for own in found)

    shared = [name for name, values in first.extra_columns.items() if is_shared(name, values)]
    columns = dict.fromkeys(name for part in parts for name in part.columns)
    alike = all(part.position is None for part in parts)
    return replace(
        first,
        segments=Segments.from_lengths(join(part.segments.lengths for part in parts)),
        rollout=join(part.rollout for part in parts),
        train=join(part.train for part in parts),
        mask=join(part.mask for part in parts),
        position=None if alike else join(part.positions for part in parts),
        extra_columns={name: join(part.extra_columns[name] for part in parts) for name in shared},
        columns={name: join(read_column(part, name) for part in parts) for name in columns},
        file=join(part.file for part in parts),
        rows=join(part.rows for part in parts),
        extents={},
    )
