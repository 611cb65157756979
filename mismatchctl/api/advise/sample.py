"""A sample of whole prompts, with token ids and advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.corrections.application import adjacent_segments
from mismatchctl.data.blocks import TOKEN_IDS_COLUMN, Rows
from mismatchctl.data.paths import DumpSource
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.measure.cluster_table import cluster_hashes, hash_values, mix_hashes

MAX_TOKENS = 1 << 21
"""Maximum number of tokens per run. Of a larger run, only the prompts with the smallest hashes are sampled."""
MIN_SEQUENCES = 640
"""Minimum number of sequences, even if they exceed MAX_TOKENS. At this size, the advice was reliable in simulations."""
OPTIONAL_COLUMNS = (
    "current_log_probs", "advantages", "prompt_id", "sequence_id", "step", "run", "reward", "micro_batch",
    "rollout_version", "train_version",
)  # fmt: skip
_PROMPT_HASH = "\0prompt"
"""Column with the hash of each sequence's prompt."""


@dataclass(frozen=True)
class RunSample:
    """Sequences of one run in the sample, ordered by step and prompt."""

    batch: TokenBatch
    token_ids: Ints | None  # [T]
    advantages: Float64s | None  # of the dump [T], or reward minus the mean of the prompt's other responses
    cluster: Ints  # index of the (step, prompt) of each sequence [S], in hash order
    step: Ints  # index of the step of each sequence [S], in step order
    steps: tuple[Any, ...] = ()  # labels of the steps, empty if the dump lacks them
    dump_sequences: int = 0  # including sequences that were left out of the sample

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
    """Read a sample of prompts of each run."""
    dump = open_dump(
        paths, rename=rename or {}, aliases=column_aliases(), by=(), wanted=OPTIONAL_COLUMNS,
        watched=(TOKEN_IDS_COLUMN,), on_bad="error",
    )  # fmt: skip
    found: dict[str, PromptSample] = {}
    seen: list[Rows] = []
    done, expected = 0, sum(unit.tokens for unit in dump.units)
    for unit in dump.units:
        for batch in dump.read(unit, Problems(), seen.append):
            known = _add_ids_and_hashes(batch, seen[-1])
            seen.clear()
            names = known.columns.get("run", np.full(len(known), unit.file.run, object))
            for name in dict.fromkeys(names.tolist()):
                found.setdefault(str(name), PromptSample()).add(known.take(np.flatnonzero(names == name)))
        done += unit.tokens
        if progress is not None:
            progress(done, expected)
    dump.require_tokens(sum(batch.tokens for sample in found.values() for batch in sample.parts))
    return {run: _build_sample(found.pop(run)) for run in [*found]}


def _add_ids_and_hashes(batch: TokenBatch, rows: Rows) -> TokenBatch:
    """Add the hash of each sequence's prompt, and the token ids if every token has one."""
    ids = rows.tokens.get(TOKEN_IDS_COLUMN)
    ids = None if ids is None or ids.ndim != 1 else ids[rows.mask]
    if ids is None or len(ids) != batch.tokens or np.isnan(ids.astype(np.float64)).any():
        extra = {}
    else:
        extra = {TOKEN_IDS_COLUMN: ids.astype(np.int64)}
    return replace(batch, extra_columns=extra, columns={**batch.columns, _PROMPT_HASH: cluster_hashes(batch)})


class PromptSample:
    """The sequences of a run whose prompts have the smallest hashes.

    A prompt is left out if prompts with smaller hashes fill the sample. More data only adds such prompts, so a prompt
    that was left out stays out in any reading order.
    """

    def __init__(self) -> None:
        self.parts: list[TokenBatch] = []
        self.seen = 0
        self._cut: int | None = None

    def add(self, batch: TokenBatch) -> None:
        self.seen += len(batch)
        self.parts.append(batch if self._cut is None else self._below(batch, self._cut))
        self.shrink(slack=2)

    def shrink(self, slack: int = 1) -> None:
        """Keep the smallest hashes if the sample is larger than `slack` times the cap."""
        tokens, sequences = sum(part.tokens for part in self.parts), sum(map(len, self.parts))
        if tokens <= slack * MAX_TOKENS or sequences <= slack * MIN_SEQUENCES:
            return
        joined = _concatenate(self.parts)
        hashes, prompt, responses = np.unique(joined.columns[_PROMPT_HASH], return_inverse=True, return_counts=True)
        fits = np.cumsum(np.bincount(prompt, joined.segments.lengths)) <= MAX_TOKENS
        beyond = hashes[~fits & (np.cumsum(responses) - responses >= MIN_SEQUENCES)]
        if len(beyond):
            self._cut = int(beyond[0])
            joined = self._below(joined, self._cut)
        self.parts = [joined]

    @staticmethod
    def _below(batch: TokenBatch, cut: int) -> TokenBatch:
        return batch.take(np.flatnonzero(batch.columns[_PROMPT_HASH] < cut))


def _concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    def joined(name: str, fill: Callable[[TokenBatch], NDArray[Any]] | None = None) -> NDArray[Any] | None:
        """Join an attribute of all batches. If a batch lacks the attribute, `fill` computes it, or it is left out."""
        arrays = [getattr(batch, name) for batch in batches]
        if all(array is None for array in arrays):
            return None
        arrays = [fill(own) if fill and array is None else array for array, own in zip(arrays, batches, strict=True)]
        return None if any(array is None for array in arrays) else np.concatenate(arrays)

    lengths = np.concatenate([batch.segments.lengths for batch in batches])
    columns = {
        name: np.concatenate([batch.columns.get(name, np.full(len(batch), None, object)) for batch in batches])
        for name in dict.fromkeys(name for batch in batches for name in batch.columns)
    }
    extra = [name for name in batches[0].extra_columns if all(name in batch.extra_columns for batch in batches)]
    return TokenBatch(
        Segments.from_lengths(lengths),
        np.concatenate([batch.rollout for batch in batches]),
        np.concatenate([batch.train for batch in batches]),
        current=joined("current"),
        position=joined("position", lambda batch: batch.positions),
        advantages=joined("advantages"),
        columns=columns,
        rows=np.arange(len(lengths)),
        extra_columns={name: np.concatenate([batch.extra_columns[name] for batch in batches]) for name in extra},
        impossible=joined("impossible", lambda batch: np.zeros(len(batch), np.int64)),
        impossible_near=joined("impossible_near", _near_nothing_impossible),
    )


def _near_nothing_impossible(batch: TokenBatch) -> Ints:
    near = np.zeros((batch.tokens, 3), np.int64)
    near[adjacent_segments(batch).offsets[:-1], 0] = 1
    return near


def _build_sample(found: PromptSample) -> RunSample:
    """Order the sequences by the hash of prompt and step, which does not depend on the reading order."""
    found.shrink()
    joined = _concatenate(found.parts)
    found.parts.clear()  # free memory before the next copy
    named = joined.columns.get("step")
    steps = np.zeros(len(joined)) if named is None else named
    labels, step = np.unique(steps.astype(str) if steps.dtype == object else steps, return_inverse=True)
    mixed = mix_hashes(joined.columns[_PROMPT_HASH], hash_values(step))
    content = joined.segments.sum(joined.rollout)
    order = np.lexsort((content, joined.segments.lengths, mixed))
    batch = joined.take(order)
    _, cluster = np.unique(mixed[order], return_inverse=True)
    known = () if named is None else tuple(labels.tolist())
    ids, advantages = batch.extra_columns.get(TOKEN_IDS_COLUMN), _read_advantages(batch, cluster)
    return RunSample(batch, ids, advantages, cluster, step[order], known, found.seen)


def _read_advantages(batch: TokenBatch, cluster: Ints) -> Float64s | None:
    """Return the advantages of the dump, or the reward minus the mean reward of the prompt's other responses."""
    if batch.advantages is not None:
        return batch.advantages.astype(np.float64)
    reward = batch.columns.get("reward")
    if reward is None or reward.dtype.kind != "f" or not np.isfinite(reward).all():
        return None
    count = np.bincount(cluster)[cluster]
    others = (np.bincount(cluster, reward)[cluster] - reward) / np.maximum(count - 1, 1)
    each = np.where(count > 1, reward - others, 0.0)
    return batch.segments.spread(each) if each.any() else None
