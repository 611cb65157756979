"""Sample of whole prompts with token ids and advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.corrections.application import adjacent_segments
from mismatchctl.data.blocks import Rows
from mismatchctl.data.layouts import TOKEN_IDS_COLUMN
from mismatchctl.data.paths import DumpSource
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.measure.cluster_table import Hashes, cluster_hashes, hash_values, mix_hashes

MAX_TOKENS = 1 << 21
"""Maximum tokens of a run. Larger runs are reduced to whole prompts with the smallest hashes."""
MIN_SEQUENCES = 640
"""Minimum sequences, regardless of their tokens. The advice was reliable at this size in cases with a known truth."""
OPTIONAL_COLUMNS = (
    "current_log_probs", "advantages", "prompt_id", "sequence_id", "step", "run", "reward", "micro_batch",
    "rollout_version", "train_version",
)  # fmt: skip


@dataclass(frozen=True)
class RunSample:
    """Sequences of one run, ordered by step and prompt.

    Attributes:
        token_ids: token ids [T], if the dump has them.
        advantages: advantages [T] of the dump, or reward minus the mean of the prompt's other responses.
        cluster: index of the (step, prompt) of each sequence [S], in hash order.
        step: index of the step of each sequence [S], in step order.
        steps: labels of the steps, empty if the dump lacks them.
        dump_sequences: sequences of the dump, including those beyond the cap.
    """

    batch: TokenBatch
    token_ids: Ints | None
    advantages: Float64s | None
    cluster: Ints
    step: Ints
    steps: tuple[Any, ...] = ()
    dump_sequences: int = 0

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def is_complete(self) -> bool:
        return len(self) == self.dump_sequences

    @property
    def per_step(self) -> int | None:
        return max(round(self.dump_sequences / len(self.steps)), 1) if self.steps else None

    @property
    def clusters(self) -> int:
        return int(self.cluster[-1]) + 1 if len(self.cluster) else 0


def read_samples(
    paths: Sequence[DumpSource],
    rename: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, RunSample]:
    """Read a sample of each run."""
    dump = open_dump(
        paths,
        rename=rename or {},
        aliases=column_aliases(),
        by=(),
        wanted=OPTIONAL_COLUMNS,
        watched=(TOKEN_IDS_COLUMN,),
        on_bad="error",
    )
    found: dict[str, list[_SamplePart]] = {}
    seen: list[Rows] = []
    done, expected = 0, sum(unit.tokens for unit in dump.units)
    for unit in dump.units:
        for batch in dump.read(unit, Problems(), seen.append):
            for run, part in _split_by_run(batch, seen[-1], unit.file.run):
                found[run] = _cap_prompts([*found.get(run, []), part], 2)
            seen.clear()
        done += unit.tokens
        if progress is not None:
            progress(done, expected)
    dump.require_tokens(sum(part.batch.tokens for parts in found.values() for part in parts))
    return {run: _build_sample(found.pop(run)) for run in [*found]}


@dataclass(frozen=True)
class _SamplePart:
    """Sequences out of `seen`, with prompt hashes below `cut` and token ids."""

    batch: TokenBatch
    hashes: Hashes
    token_ids: Ints | None
    seen: int
    cut: int = 1 << 64

    def take(self, chosen: Ints) -> _SamplePart:
        ids = self.token_ids
        picked = None if ids is None else ids[self.batch.segments.token_indices(chosen)]
        return _SamplePart(self.batch.take(chosen), self.hashes[chosen], picked, len(chosen), self.cut)

    def below(self, cut: int) -> _SamplePart:
        """Return the sequences with hashes below `cut`, with the same number seen."""
        return replace(self.take(np.flatnonzero(self.hashes < cut)), seen=self.seen, cut=cut)


def _split_by_run(batch: TokenBatch, rows: Rows, run: str) -> list[tuple[str, _SamplePart]]:
    ids = rows.tokens.get(TOKEN_IDS_COLUMN)
    ids = None if ids is None or ids.ndim != 1 else ids[rows.mask]
    if ids is not None and (len(ids) != batch.tokens or np.isnan(ids.astype(np.float64)).any()):
        ids = None
    whole = _SamplePart(batch, cluster_hashes(batch), None if ids is None else ids.astype(np.int64), len(batch))
    names = batch.columns.get("run")
    if names is None:
        return [(run, whole)]
    return [(str(name), whole.take(np.flatnonzero(names == name))) for name in dict.fromkeys(names.tolist())]


def _cap_prompts(parts: list[_SamplePart], slack: int = 1) -> list[_SamplePart]:
    """Keep the prompts with the smallest hashes if the sample is larger than `slack` times the cap.

    A prompt is left out because of the prompts before it, and more data only adds to those. So a cut is final, and
    larger hashes stay excluded in any reading order.
    """
    cut = min(part.cut for part in parts)
    parts = [part if part.cut == cut else part.below(cut) for part in parts]
    tokens, sequences = sum(part.batch.tokens for part in parts), sum(len(part.batch) for part in parts)
    if tokens <= slack * MAX_TOKENS or sequences <= slack * MIN_SEQUENCES:
        return parts
    joined = _concatenate_parts(parts)
    hashes, prompt, responses = np.unique(joined.hashes, return_inverse=True, return_counts=True)
    fits = np.cumsum(np.bincount(prompt, joined.batch.segments.lengths)) <= MAX_TOKENS
    beyond = hashes[~fits & (np.cumsum(responses) - responses >= MIN_SEQUENCES)]
    return [joined.below(int(beyond[0])) if len(beyond) else joined]


def _concatenate_parts(parts: Sequence[_SamplePart]) -> _SamplePart:
    batches = [part.batch for part in parts]
    lengths = np.concatenate([batch.segments.lengths for batch in batches])
    names = dict.fromkeys(name for batch in batches for name in batch.columns)

    def joined(arrays: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
        given = [array for array in arrays if array is not None]
        return np.concatenate(given) if len(given) == len(arrays) else None

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([batch.columns.get(name, np.full(len(batch), None, object)) for batch in batches])

    gaps = any(batch.position is not None for batch in batches)
    position = np.concatenate([batch.positions for batch in batches]) if gaps else None
    batch = TokenBatch(
        Segments.from_lengths(lengths),
        np.concatenate([batch.rollout for batch in batches]),
        np.concatenate([batch.train for batch in batches]),
        current=joined([batch.current for batch in batches]),
        position=position,
        advantages=joined([batch.advantages for batch in batches]),
        columns={name: column(name) for name in names},
        rows=np.arange(len(lengths)),
        impossible=_concatenate_counts(batches),
        impossible_near=_concatenate_near(batches),
    )
    hashes = np.concatenate([part.hashes for part in parts])
    ids = joined([part.token_ids for part in parts])
    return _SamplePart(batch, hashes, ids, sum(part.seen for part in parts), min(part.cut for part in parts))


def _concatenate_counts(batches: Sequence[TokenBatch]) -> Ints | None:
    if all(batch.impossible is None for batch in batches):
        return None
    none = np.zeros(1, np.int64)
    return np.concatenate([none.repeat(len(b)) if b.impossible is None else b.impossible for b in batches])


def _concatenate_near(batches: Sequence[TokenBatch]) -> Ints | None:
    if all(batch.impossible_near is None for batch in batches):
        return None
    found = []
    for batch in batches:
        near = np.zeros((batch.tokens, 3), np.int64)
        near[adjacent_segments(batch).offsets[:-1], 0] = 1
        found.append(near if batch.impossible_near is None else batch.impossible_near)
    return np.concatenate(found)


def _build_sample(parts: list[_SamplePart]) -> RunSample:
    """Order the sequences by the hash of their prompt and step, independent of the reading order."""
    joined = _concatenate_parts(_cap_prompts(parts))
    parts.clear()  # free memory before making another copy
    named = joined.batch.columns.get("step")
    steps = np.zeros(len(joined.batch)) if named is None else named
    labels, step = np.unique(steps.astype(str) if steps.dtype == object else steps, return_inverse=True)
    mixed = mix_hashes(joined.hashes, hash_values(step))
    content = joined.batch.segments.sum(joined.batch.rollout)
    order = np.lexsort((content, joined.batch.segments.lengths, mixed))
    part = joined.take(order)
    _, cluster = np.unique(mixed[order], return_inverse=True)
    advantages = _read_advantages(part.batch, cluster)
    known = () if named is None else tuple(labels.tolist())
    return RunSample(part.batch, part.token_ids, advantages, cluster, step[order], known, joined.seen)


def _read_advantages(batch: TokenBatch, cluster: Ints) -> Float64s | None:
    """Return the advantages of the dump, else reward minus the mean of the prompt's other responses."""
    if batch.advantages is not None:
        return batch.advantages.astype(np.float64)
    reward = batch.columns.get("reward")
    if reward is None or reward.dtype.kind != "f" or not np.isfinite(reward).all():
        return None
    count = np.bincount(cluster)[cluster]
    others = (np.bincount(cluster, reward)[cluster] - reward) / np.maximum(count - 1, 1)
    each = np.where(count > 1, reward - others, 0.0)
    return batch.segments.spread(each) if each.any() else None
