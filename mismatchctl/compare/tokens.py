"""The same tokens on both sides: recognized, paired one by one, in bounded memory.

First both dumps are read once and each sequence is hashed: by its token ids (with its prompt), by its rollout and by
its train log-probs, with and without its name. What most sequences agree in is what they are matched by. Then the
reference is read again, `MOST_HELD` tokens at a time, and those units of the other dump that hold the same sequences:
once each where the two are in about the same order, and again for every such part where they are shuffled. Beside
that, memory is about 400 bytes a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Ints, Segments, TokenBatch
from mismatchctl.compare.model import PairedTokens
from mismatchctl.compare.moved import Moved
from mismatchctl.compare.sources import ComparedRun
from mismatchctl.dumps import Dump, Problems, Unit
from mismatchctl.measure.table import Hashes, hash_values, mix
from mismatchctl.ratios import Ratios

MOST_HELD = 1 << 22
"""Tokens of the reference in memory at once, and up to a batch more."""
LEAST_MATCHED = 0.1
"""Share of the smaller side's sequences below which a few chance hits are no pairing."""

MatchedBy = Literal["token_ids", "rollout_log_probs", "train_log_probs"]
CONTENTS: tuple[MatchedBy, ...] = ("token_ids", "rollout_log_probs", "train_log_probs")
NO_TOKENS = "the dump is needed for this: a Result holds no tokens"
_MISSING = np.uint64(0)


@dataclass(frozen=True)
class _Index:
    """Hashes of each sequence that has tokens, in the order of reading [S]; 0 where there is nothing to hash.

    `units` is which unit of its dump each sequence is in, ascending.
    """

    hashes: Mapping[str, Hashes]
    units: Ints


def pair_tokens(reference: ComparedRun, other: ComparedRun) -> tuple[PairedTokens | None, str]:
    """Pair two sides token by token; or None, and why not."""
    if reference.dump is None or other.dump is None:
        return None, NO_TOKENS
    both_have_ids = reference.dump.has("token_ids") and other.dump.has("token_ids")
    names = ("step", "sequence_id", "prompt_id")
    shared = [name for name in names if reference.dump.has(name) and other.dump.has(name)]
    first, second = (_index(side, both_have_ids, shared) for side in (reference, other))
    matched_by, keys = _best_keys(first, second)
    common = np.intersect1d(*keys)
    if len(common) < max(1, LEAST_MATCHED * min(map(len, keys))):
        ids = "token ids" if both_have_ids else "token_ids are missing, and log-probs"
        return None, f"the two do not hold the same tokens: {ids} agree in {len(common)} of {len(keys[0])} sequences"
    moved = Moved(other.dump)
    for held in _parts(_chosen(reference, first.units, keys[0], common)):
        for whole, own in _chosen(other, second.units, keys[1], held.keys):
            _meet(held, whole, own, moved)
        del held  # before the next is put together
    unmatched = len(keys[0]) - len(common), len(keys[1]) - len(common)
    return moved.finish(matched_by, unmatched), "ok"


def _batches(source: ComparedRun, unit: Unit) -> Iterator[TokenBatch]:
    """The sequences of a unit that are of the run and have tokens."""
    assert source.dump is not None
    for batch in source.dump.read(unit, Problems()):
        chosen = np.flatnonzero(batch.segments.nonempty & _is_of_run(batch, unit.file.run, source.run_name))
        if len(chosen):
            yield batch if len(chosen) == len(batch) else batch.take(chosen)


def _is_of_run(batch: TokenBatch, default: str, wanted: str) -> Bools:
    """Which sequences belong to a run; those that name none belong to that of their file."""
    runs = batch.columns.get("run")
    if runs is None:
        return np.full(len(batch), default == wanted)
    names = [int(run) if isinstance(run, float) and run.is_integer() else run for run in runs.tolist()]
    return np.array([(default if run is None or run != run else str(run)) == wanted for run in names])


def _index(source: ComparedRun, with_ids: bool, names: list[str]) -> _Index:
    assert source.dump is not None
    hashes: dict[str, list[Hashes]] = {name: [np.zeros(0, np.uint64)] for name in (*CONTENTS, "name")}
    units: list[Ints] = [np.zeros(0, np.int64)]
    for number, unit in enumerate(source.dump.units):
        for batch in _batches(source, unit):
            for name, found in _batch_hashes(batch, source.dump if with_ids else None, names).items():
                hashes[name].append(found)
            units.append(np.full(len(batch), number))
    return _Index({name: np.concatenate(found) for name, found in hashes.items()}, np.concatenate(units))


def _batch_hashes(batch: TokenBatch, ids_from: Dump | None, names: list[str]) -> dict[str, Hashes]:
    named = np.zeros(len(batch), np.uint64)
    for name in names:
        named = mix(named, _column_hash(batch, name))
    found = {
        "rollout_log_probs": _content_hash(batch.rollout, batch.segments),
        "train_log_probs": _content_hash(batch.train, batch.segments),
        "token_ids": np.zeros(len(batch), np.uint64),
        "name": named,
    }
    if ids_from is not None:
        prompts = _column_hash(batch, "prompt_id") if "prompt_id" in names else np.zeros(len(batch), np.uint64)
        found["token_ids"] = _id_hashes(batch, ids_from.token_ids(int(batch.file[0]), batch.rows.tolist()), prompts)
    return found


def _column_hash(batch: TokenBatch, name: str) -> Hashes:
    values = batch.columns.get(name)
    return np.zeros(len(batch), np.uint64) if values is None else hash_values(values)


def _content_hash(values: NDArray[Any], segments: Segments) -> Hashes:
    """A hash of each segment's values in their order; equal numbers hash alike in any width."""
    bits = (values.astype(np.float64) + 0.0).view(np.uint64)
    with np.errstate(over="ignore"):
        total = np.add.reduceat(mix(bits, segments.places.astype(np.uint64)), segments.offsets[:-1])
    return np.maximum(mix(total, segments.lengths.astype(np.uint64)), np.uint64(1))


def _id_hashes(batch: TokenBatch, ids: Mapping[int, NDArray[Any]], prompts: Hashes) -> Hashes:
    """A hash of each sequence's token ids and prompt; 0 where it has none, or they do not fit its tokens."""
    hashes = np.full(len(batch), _MISSING)
    known = [ids.get(row) for row in batch.rows.tolist()]
    lengths = batch.segments.lengths
    fits = np.array([own is not None and len(own) == length for own, length in zip(known, lengths, strict=True)])
    chosen = np.flatnonzero(fits)
    if len(chosen):
        values = np.concatenate([own for own, fit in zip(known, fits, strict=True) if fit and own is not None])
        hashes[chosen] = np.maximum(
            mix(_content_hash(values, batch.segments.take(chosen)), prompts[chosen]), np.uint64(1)
        )
    return hashes


def _best_keys(first: _Index, second: _Index) -> tuple[MatchedBy, tuple[Hashes, Hashes]]:
    """What most sequences agree in: each kind of content, first with the sequence's name, then without it."""
    best: tuple[int, MatchedBy, tuple[Hashes, Hashes]] | None = None
    for content in CONTENTS:
        for with_name in (True, False):
            keys = _keys(first, content, with_name, 0), _keys(second, content, with_name, 1)
            matched = len(np.intersect1d(*keys))
            if best is None or matched > best[0]:
                best = matched, content, keys
    assert best is not None
    return best[1], best[2]


def _keys(index: _Index, content: str, with_name: bool, side: int) -> Hashes:
    """One key per sequence, those that agree numbered by the rest of their content, whatever the order of rows.

    A sequence that lacks the content has a key that the other side does not have.
    """
    own = index.hashes[content]
    keys = mix(own, index.hashes["name"]) if with_name else own.copy()
    missing = own == _MISSING
    keys[missing] = mix(np.arange(np.count_nonzero(missing), dtype=np.uint64), np.uint64(side + 1))
    order = np.lexsort((index.hashes["train_log_probs"], index.hashes["rollout_log_probs"], keys))
    ordered = keys[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(ordered) else np.zeros(0, np.int64)
    counts = np.diff(np.append(starts, len(ordered)))
    keys[order] = mix(ordered, (np.arange(len(ordered)) - np.repeat(starts, counts)).astype(np.uint64))
    return keys


@dataclass(frozen=True)
class _Held:
    """Sequences of the reference, by key ascending: place of each in flat arrays of its log-probs."""

    keys: Hashes
    starts: Ints
    rollout: NDArray[Any]
    train: NDArray[Any]


class _SequencePart:
    """Collects sequences to hold; of their batches no more than what will be asked for."""

    def __init__(self) -> None:
        self.tokens = 0
        self._keys: list[Hashes] = []
        self._lengths: list[Ints] = []
        self._rollout: list[NDArray[Any]] = []
        self._train: list[NDArray[Any]] = []

    def add(self, batch: TokenBatch, keys: Hashes) -> None:
        self.tokens += batch.tokens
        self._keys.append(keys)
        self._lengths.append(batch.segments.lengths)
        self._rollout.append(batch.rollout)
        self._train.append(batch.train)

    def held(self) -> _Held:
        keys, lengths = np.concatenate(self._keys), np.concatenate(self._lengths)
        order = np.argsort(keys)
        return _Held(keys[order], (np.cumsum(lengths) - lengths)[order], _emptied(self._rollout), _emptied(self._train))


def _emptied(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """All in one; the list lets go of its own, so that nothing is kept twice."""
    flat = np.concatenate(arrays)
    arrays.clear()
    return flat


def _chosen(source: ComparedRun, units: Ints, keys: Hashes, wanted: Hashes) -> Iterator[tuple[TokenBatch, Hashes]]:
    """The wanted sequences with their keys, batch by batch, from the units that hold any."""
    assert source.dump is not None
    chosen = np.isin(keys, wanted)
    for number in np.unique(units[chosen]).tolist():
        start = int(np.searchsorted(units, number))
        for batch in _batches(source, source.dump.units[number]):
            here = slice(start, start + len(batch))
            rows = np.flatnonzero(chosen[here])
            if len(rows):
                yield batch.take(rows), keys[here][rows]
            start += len(batch)


def _parts(found: Iterable[tuple[TokenBatch, Hashes]]) -> Iterator[_Held]:
    """As many sequences at a time as may be held."""
    part = _SequencePart()
    for batch, keys in found:
        part.add(batch, keys)
        if part.tokens >= MOST_HELD:
            yield part.held()
            part = _SequencePart()
    if part.tokens:
        yield part.held()


def _meet(held: _Held, whole: TokenBatch, own: Hashes, moved: Moved) -> None:
    for start, block in whole.blocks():
        found = np.searchsorted(held.keys, own[start : start + len(block)])
        first = block.segments.spread(held.starts[found] - block.segments.offsets[:-1])
        tokens = first + np.arange(block.tokens)
        moved.add(
            Ratios(held.train[tokens], held.rollout[tokens], block.segments),
            Ratios(block.train, block.rollout, block.segments),
            block,
        )
