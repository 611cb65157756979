"""Sources of a comparison: dumps or Results, and tokens paired across runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.api.analyze.builder import describe_worst_tokens
from mismatchctl.api.compare.comparison import MovedToken, PairedTokens, TopShare
from mismatchctl.core.batch import Bools, Float64s, Ints, Segments, TokenBatch
from mismatchctl.core.ratios import Ratios
from mismatchctl.core.validation import OVERFLOW_STATUS
from mismatchctl.corrections.model import Correction
from mismatchctl.data.catalog import ReadUnit
from mismatchctl.data.formats import MemoryTable
from mismatchctl.data.paths import DumpSource
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import Dump
from mismatchctl.errors import DataError
from mismatchctl.io.process import release_memory
from mismatchctl.io.stores import escape_unprintable, normalize_path
from mismatchctl.measure.cluster_table import Hashes, hash_values, mix_hashes
from mismatchctl.measure.sums import WorstRows
from mismatchctl.results.model import Result, RunResult, Value, storage_types
from mismatchctl.results.reader import is_result, read_result
from mismatchctl.results.summary import prompt_notes, skipped_data_notes

DumpOpener = Callable[[DumpSource], Dump]
"""Opens the dump at a path."""


@dataclass(frozen=True)
class ComparedRun:
    """One run to compare, which is a part of a Result.

    `is_only_run` is true if the argument of the run contains no other run. `corrections` are the corrections that were
    analyzed. `reopen` opens the dump of the run again. `storage` contains the data type of the stored log-probs by
    column.
    """

    name: str
    source: DumpSource | Result
    path: str
    run_name: str
    run: RunResult
    is_only_run: bool
    corrections: tuple[Correction, ...] = ()
    reopen: DumpOpener | None = None
    storage: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def dump(self) -> Dump | None:
        if self.reopen is None or isinstance(self.source, Result):
            return None
        return self.reopen(self.source)


def read_sources(
    given: Sequence[DumpSource | Result], analyze_source: Callable[[DumpSource], Result], reopen: DumpOpener
) -> tuple[list[ComparedRun], list[str]]:
    """Return all runs of all arguments in order, with unique names, and a list of warnings."""
    sources: list[ComparedRun] = []
    warnings: list[str] = []
    for source, path in zip(given, _source_titles(given), strict=True):
        saved = isinstance(source, Result) or (isinstance(source, str) and is_result(source))
        result = source if isinstance(source, Result) else read_result(str(source)) if saved else analyze_source(source)
        warnings += [warning for warning in result.warnings if warning not in warnings]
        warnings += skipped_data_notes(result.provenance.left_out)
        corrections, is_only_run = tuple(result.corrections), len(result.runs) == 1
        opener = None if saved else reopen
        sources += [
            ComparedRun(name, source, path, name, run, is_only_run, corrections, opener, storage_types(result, name))
            for name, run in result.runs.items()
        ]
    if len(sources) < 2:
        raise DataError(
            "compare needs two runs, found one", file=sources[0].path, remedy="pass a second dump or Result"
        )
    named = _assign_names(sources)
    return named, [*warnings, *prompt_notes(source.run for source in named), *_storage_warnings(named)]


def _source_titles(given: Sequence[DumpSource | Result]) -> Iterator[str]:
    in_memory, number = sum(not isinstance(source, str) for source in given), 0
    for source in given:
        number += not isinstance(source, str)
        if isinstance(source, str):
            yield source
        elif isinstance(source, MemoryTable):
            yield source.title
        else:
            yield "the Result in memory" if in_memory == 1 else f"Result {number} in memory"


def _storage_warnings(sources: Sequence[ComparedRun]) -> Iterator[str]:
    first, *others = sources
    for other in others:
        for column, there in first.storage.items():
            here = other.storage[column]
            if here != there:
                yield f"{column} is stored as {here} in {other.name}, as {there} in {first.name}: rounding differs"


def _assign_names(sources: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Give each run a unique name: its name, the name with its path, or a number."""
    names = [source.run_name for source in sources]
    shared = Counter(names)
    for index, source in enumerate(sources):
        if shared[names[index]] > 1:
            path = escape_unprintable(normalize_path(source.path))
            names[index] = path if source.is_only_run else f"{path}: {source.run_name}"
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        names[index] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return [replace(source, name=name) for source, name in zip(sources, names, strict=True)]


TOP_COUNTS = (1, 10, 100, 1000)
"""Numbers of most changed tokens whose joint contribution is reported."""
CONTEXT_TOKENS = 12
"""Token ids stored before a token that changed."""
_K3_LIMIT = 1e150  # maximum K3 of a token, so that its square does not overflow
IDENTITY_COLUMNS = ("step", "sequence_id", "prompt_id")


class PairedTokenSums:
    """Sums over paired tokens, which are added block by block."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._sums = np.zeros(9)
        self._largest = 0.0
        self._same = [True, True]
        self._top = np.zeros(0)
        self._worst = WorstRows()
        self._changes: list[Float64s] = []
        self._lengths: list[Float64s] = []
        self._clusters: list[Hashes] = []

    def add(self, before: Ratios, after: Ratios, block: TokenBatch) -> None:
        x, y = before.log_ratio, after.log_ratio
        with np.errstate(invalid="ignore"):
            change = np.nan_to_num(after.k3 - before.k3, nan=0.0, posinf=_K3_LIMIT, neginf=-_K3_LIMIT)
        self._sums += [
            len(x), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum(), np.abs(y - x).sum(),
            np.abs(change).sum(), np.count_nonzero(x != y),
        ]  # fmt: skip
        self._largest = max(self._largest, float(np.abs(y - x).max(initial=0.0)))
        self._same[0] &= np.array_equal(before.reference, after.reference)
        self._same[1] &= np.array_equal(before.policy, after.policy)
        self._top = _largest_changes(np.concatenate([self._top, change]))
        self._worst = self._worst + _most_changed(before, after, change, block, self._worst.threshold)
        self._changes.append(block.segments.sum(change))
        self._lengths.append(block.segments.lengths.astype(np.float64))
        prompts = block.columns.get("prompt_id")
        unnamed = np.arange(len(block), dtype=np.uint64) + np.uint64(sum(map(len, self._clusters)))
        self._clusters.append(unnamed if prompts is None else hash_values(prompts))

    def finish(
        self,
        matched_by: Literal["token_ids", "rollout_log_probs", "train_log_probs"],
        unmatched: tuple[int, int],
    ) -> PairedTokens:
        tokens, x, y, xx, yy, xy, moved, movement, differing = self._sums.tolist()
        change, lengths = np.concatenate(self._changes), np.concatenate(self._lengths)
        spread = math.sqrt(max(xx / tokens - (x / tokens) ** 2, 0) * max(yy / tokens - (y / tokens) ** 2, 0))
        covariance = xy / tokens - x * y / tokens**2
        return PairedTokens(
            matched_by=matched_by,
            same_rollout=self._same[0],
            same_train=self._same[1],
            sequences=len(change),
            unmatched=unmatched,
            tokens=int(tokens),
            k3_change=_mean_change(change, lengths, np.concatenate(self._clusters)),
            abs_log_ratio_change=moved / tokens,
            largest_log_ratio_change=self._largest,
            correlation=min(covariance / spread, 1.0) if spread > 0 else None,
            moved=differing / tokens,
            shares=_top_shares(self._top, float(change.sum()), movement, int(tokens)),
            most_moved=[MovedToken(**own) for own in describe_worst_tokens(self._worst, self._dump, CONTEXT_TOKENS)],
        )


def _mean_change(change: Float64s, lengths: Float64s, clusters: Hashes) -> Value:
    _, where = np.unique(clusters, return_inverse=True)
    sums, counts = np.bincount(where, weights=change), np.bincount(where, weights=lengths)
    mean = sums.sum() / counts.sum()
    if np.abs(change).max() >= _K3_LIMIT:
        return Value(value=None, status=OVERFLOW_STATUS)
    if len(sums) < 2:
        return Value(value=float(mean))
    scatter = ((sums - mean * counts) ** 2).sum() * len(sums) / (len(sums) - 1)
    return Value(value=float(mean), se=float(np.sqrt(scatter) / counts.sum()))


def _largest_changes(changes: Float64s) -> Float64s:
    """Return the largest changes by absolute value. If changes have the same size, rises come first."""
    most = TOP_COUNTS[-1]
    if len(changes) > 4 * most:
        cut = np.partition(np.abs(changes), len(changes) - most)[len(changes) - most]
        changes = changes[np.abs(changes) >= cut]
    return changes[np.lexsort((-changes, -np.abs(changes)))[:most]]


def _top_shares(top: Float64s, change: float, movement: float, tokens: int) -> list[TopShare]:
    if movement == 0:
        return []
    return [
        TopShare(
            tokens=count,
            of_change=float(top[:count].sum() / change) if change else None,
            of_movement=float(np.abs(top[:count]).sum() / movement),
        )
        for count in TOP_COUNTS
        if count < tokens
    ]


def _most_changed(before: Ratios, after: Ratios, change: Float64s, block: TokenBatch, threshold: float) -> WorstRows:
    score = np.abs(change)
    found = np.flatnonzero((score >= threshold) & (score > 0))
    sequence = np.searchsorted(block.segments.offsets, found, side="right") - 1
    place = np.stack([block.file[sequence], block.rows[sequence], block.positions[found]], axis=1)
    fields: dict[str, NDArray[Any]] = {
        "token": found - block.segments.offsets[sequence],
        "rollout_log_prob": np.stack([before.reference[found], after.reference[found]], axis=1),
        "train_log_prob": np.stack([before.policy[found], after.policy[found]], axis=1),
        "log_ratio": np.stack([before.log_ratio[found], after.log_ratio[found]], axis=1),
        "k3_change": change[found],
    }
    names = {name: block.columns[name][sequence].astype(object) for name in IDENTITY_COLUMNS if name in block.columns}
    return WorstRows.rank(score[found], place, fields | names)


MAX_TOKENS_IN_MEMORY = 1 << 22
"""Approximate maximum number of reference tokens in memory."""
MIN_MATCHED_SHARE = 0.1
"""Tokens are paired if at least this share of the smaller run's sequences match, which excludes chance matches."""

MatchKey = Literal["token_ids", "rollout_log_probs", "train_log_probs"]
MATCH_KEYS: tuple[MatchKey, ...] = ("token_ids", "rollout_log_probs", "train_log_probs")
NO_DUMP_REASON = "a Result contains no tokens, pass the dump"
_MISSING = np.uint64(0)


@dataclass(frozen=True)
class _SequenceIndex:
    """Hashes of the nonempty sequences in reading order [S], 0 if the content is missing.

    `units` contains the index of the block of rows that each sequence belongs to.
    """

    hashes: Mapping[str, Hashes]
    units: Ints


def pair_tokens(reference: ComparedRun, other: ComparedRun) -> tuple[PairedTokens | None, str]:
    if reference.dump is None or other.dump is None:
        return None, NO_DUMP_REASON
    both_have_ids = reference.dump.has("token_ids") and other.dump.has("token_ids")
    shared = [name for name in IDENTITY_COLUMNS if reference.dump.has(name) and other.dump.has(name)]
    first, second = (_index_sequences(side, both_have_ids, shared) for side in (reference, other))
    matched_by, keys = _choose_match_keys(first, second)
    units = first.units, second.units
    del first, second  # free memory before the tokens are read
    release_memory()
    common = np.intersect1d(*keys)
    if len(common) < max(1, MIN_MATCHED_SHARE * min(map(len, keys))):
        ids = "token ids" if both_have_ids else "token_ids are missing, and log-probs"
        return None, f"the runs have different tokens: {ids} agree in {len(common)} of {len(keys[0])} sequences"
    moved = PairedTokenSums(other.dump)
    for loaded, before in _load_in_parts(_read_matches(reference, units[0], keys[0], common)):
        for whole, own in _read_matches(other, units[1], keys[1], loaded):
            for start, block in whole.blocks():
                same = before.take(np.searchsorted(loaded, own[start : start + len(block)]))
                old, new = (Ratios(side.train, side.rollout, block.segments) for side in (same, block))
                moved.add(old, new, block)
        del loaded, before  # free memory before the next part is loaded
    unmatched = len(keys[0]) - len(common), len(keys[1]) - len(common)
    return moved.finish(matched_by, unmatched), "ok"


def _read_batches(source: ComparedRun, unit: ReadUnit) -> Iterator[TokenBatch]:
    assert source.dump is not None
    for batch in source.dump.read(unit, Problems()):
        chosen = np.flatnonzero(batch.segments.nonempty & _select_run(batch, unit.file.run, source.run_name))
        if len(chosen):
            yield batch if len(chosen) == len(batch) else batch.take(chosen)


def _select_run(batch: TokenBatch, default: str, wanted: str) -> Bools:
    """Return flags of the sequences of a run."""
    runs = batch.columns.get("run")
    if runs is None:
        return np.full(len(batch), default == wanted)
    names = [int(run) if isinstance(run, float) and run.is_integer() else run for run in runs.tolist()]
    return np.array([(default if run is None or run != run else str(run)) == wanted for run in names])


def _index_sequences(source: ComparedRun, with_ids: bool, names: list[str]) -> _SequenceIndex:
    assert source.dump is not None
    hashes: dict[str, list[Hashes]] = {name: [np.zeros(0, np.uint64)] for name in (*MATCH_KEYS, "name")}
    units: list[Ints] = [np.zeros(0, np.int64)]
    for number, unit in enumerate(source.dump.units):
        for batch in _read_batches(source, unit):
            for name, found in _batch_hashes(batch, source.dump if with_ids else None, names).items():
                hashes[name].append(found)
            units.append(np.full(len(batch), number))
    release_memory()
    return _SequenceIndex({name: np.concatenate(found) for name, found in hashes.items()}, np.concatenate(units))


def _batch_hashes(batch: TokenBatch, ids_from: Dump | None, names: list[str]) -> dict[str, Hashes]:
    none = np.zeros(len(batch), np.uint64)
    columns = {name: hash_values(batch.columns[name]) if name in batch.columns else none for name in names}
    found = {
        "rollout_log_probs": _content_hash(batch.rollout, batch.segments),
        "train_log_probs": _content_hash(batch.train, batch.segments),
        "token_ids": none,
        "name": reduce(mix_hashes, columns.values(), none),
    }
    if ids_from is not None:
        ids = ids_from.token_ids(int(batch.file[0]), batch.rows.tolist())
        found["token_ids"] = _id_hashes(batch, ids, columns.get("prompt_id", none))
    return found


def _content_hash(values: NDArray[Any], segments: Segments) -> Hashes:
    """Hash the values of each segment in order. The hash is the same for float32 and float64 columns."""
    bits = (values.astype(np.float64) + 0.0).view(np.uint64)
    with np.errstate(over="ignore"):
        total = np.add.reduceat(mix_hashes(bits, segments.places.astype(np.uint64)), segments.offsets[:-1])
    return np.maximum(mix_hashes(total, segments.lengths.astype(np.uint64)), np.uint64(1))


def _id_hashes(batch: TokenBatch, ids: Mapping[int, NDArray[Any]], prompts: Hashes) -> Hashes:
    """Hash the token ids and the prompt of each sequence. 0 if ids are missing or their number is wrong."""
    hashes = np.full(len(batch), _MISSING)
    rows = zip(batch.rows.tolist(), batch.segments.lengths.tolist(), strict=True)
    known = {place: ids[row] for place, (row, length) in enumerate(rows) if row in ids and len(ids[row]) == length}
    if known:
        chosen = np.array([*known])
        content = _content_hash(np.concatenate([*known.values()]), batch.segments.take(chosen))
        hashes[chosen] = np.maximum(mix_hashes(content, prompts[chosen]), np.uint64(1))
    return hashes


def _choose_match_keys(first: _SequenceIndex, second: _SequenceIndex) -> tuple[MatchKey, tuple[Hashes, Hashes]]:
    """Choose the content that matches most sequences of the two runs."""
    tried = (
        (content, (_match_keys(first, content, with_name, 0), _match_keys(second, content, with_name, 1)))
        for content in MATCH_KEYS
        for with_name in (True, False)
    )
    return max(tried, key=lambda item: len(np.intersect1d(*item[1])))


def _match_keys(index: _SequenceIndex, content: str, with_name: bool, side: int) -> Hashes:
    """Return a key for each sequence that identifies it in both runs.

    Sequences with equal content are numbered by the rest of their content, in any row order.

    A sequence that lacks the content gets a key that does not occur in the other run.
    """
    own = index.hashes[content]
    keys = mix_hashes(own, index.hashes["name"]) if with_name else own.copy()
    missing = own == _MISSING
    keys[missing] = mix_hashes(np.arange(np.count_nonzero(missing), dtype=np.uint64), np.uint64(side + 1))
    order = np.lexsort((index.hashes["train_log_probs"], index.hashes["rollout_log_probs"], keys))
    ordered = keys[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(ordered) else np.zeros(0, np.int64)
    counts = np.diff(np.append(starts, len(ordered)))
    keys[order] = mix_hashes(ordered, (np.arange(len(ordered)) - np.repeat(starts, counts)).astype(np.uint64))
    return keys


def _read_matches(
    source: ComparedRun, units: Ints, keys: Hashes, wanted: Hashes
) -> Iterator[tuple[TokenBatch, Hashes]]:
    """Yield the matched sequences with their keys, batch by batch.

    `wanted` is ascending.
    """
    assert source.dump is not None
    chosen = wanted[np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)] == keys
    for number in np.unique(units[chosen]).tolist():
        start = int(np.searchsorted(units, number))
        for batch in _read_batches(source, source.dump.units[number]):
            here = slice(start, start + len(batch))
            rows = np.flatnonzero(chosen[here])
            if len(rows):
                yield batch.take(rows), keys[here][rows]
            start += len(batch)


def _load_in_parts(found: Iterable[tuple[TokenBatch, Hashes]]) -> Iterator[tuple[Hashes, TokenBatch]]:
    """Join the log-probs of batches, with the ascending keys of their sequences."""
    held: list[tuple[TokenBatch, Hashes]] = []
    for one in found:
        held.append(one)
        if sum(batch.tokens for batch, _ in held) >= MAX_TOKENS_IN_MEMORY:
            yield _load(held)
            held = []
    if held:
        yield _load(held)


def _load(held: Sequence[tuple[TokenBatch, Hashes]]) -> tuple[Hashes, TokenBatch]:
    keys = np.concatenate([keys for _, keys in held])
    segments = Segments.from_lengths(np.concatenate([batch.segments.lengths for batch, _ in held]))
    rollout, train = (np.concatenate([getattr(batch, side) for batch, _ in held]) for side in ("rollout", "train"))
    order = np.argsort(keys)
    return keys[order], TokenBatch(segments, rollout, train, rows=np.arange(len(keys))).take(order)
