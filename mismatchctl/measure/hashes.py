"""What rows are told apart by: numbers of groups within a batch, and hashes that are the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Ints, TokenBatch
from mismatchctl.measure.table import Hashes, hash_content, hash_values, mix, told_apart

Value = str | int | float | bool | None
"""The name of a group."""


def labels_of(keys: Sequence[NDArray[Any] | None], labels: Ints) -> Ints:
    """A number for each row [S], from 0 on, in the order of what it had and then of the keys."""
    for values in keys:
        if values is not None and not _is_constant(values):
            _, codes = told_apart(_with_missing(values))
            _, labels = np.unique(labels * (codes.max(initial=0) + 1) + codes, return_inverse=True)
    return labels


def _is_constant(values: NDArray[Any]) -> bool:
    """Whether all values are plainly one, as the runs of most batches are: nothing need be told apart then."""
    if not len(values):
        return True
    if values.dtype == object:
        return len(set(map(id, values.tolist()))) == 1
    return values.dtype.kind in "iu" and bool((values == values[0]).all())


def _with_missing(values: NDArray[Any]) -> NDArray[Any]:
    """Values of which a missing one is unlike the text "None"."""
    if values.dtype != object:
        return values
    return np.array(["\0" if value is None else str(value) for value in values])


def plain(value: Any) -> Value:
    """A group's name as JSON can hold it: numpy scalars become Python's, NaN (a missing number) None."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return None if np.isnan(value) else int(value) if value.is_integer() else value
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def cluster_hashes(batch: TokenBatch) -> Hashes:
    """Hash of each sequence's prompt, else of its own id, else of what it holds."""
    hashes, named = np.zeros(len(batch), np.uint64), np.zeros(len(batch), np.bool_)
    for name in ("prompt_id", "sequence_id"):
        values = batch.columns.get(name)
        if values is None or named.all():
            continue
        given = np.array([plain(value) is not None for value in values]) if values.dtype.kind in "fO" else ~named
        own = mix(hash_values(values), hash_values(np.array([name])))
        hashes = np.where(given & ~named, own, hashes)
        named |= given
    if named.all():
        return hashes
    held = [batch.segments.lengths.astype(np.float64), *map(batch.segments.sum, (batch.rollout, batch.train))]
    return np.where(named, hashes, hash_content(held))


def step_hash(step: Value) -> np.uint64:
    """What tells the clusters of a step from those of others."""
    hashed: np.uint64 = hash_values(np.array(["\0missing" if step is None else str(step)]))[0]
    return hashed


def step_hashes(batch: TokenBatch) -> Hashes:
    """The same of the step of each sequence [S]."""
    steps = batch.columns.get("step")
    if steps is None:
        return np.full(len(batch), step_hash(None))
    labels = labels_of([steps], np.zeros(len(batch), np.int64))
    _, firsts = np.unique(labels, return_index=True)
    return np.array([step_hash(plain(steps[row])) for row in firsts.tolist()], np.uint64)[labels]
