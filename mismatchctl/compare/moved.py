"""Sums over tokens that are paired one by one, and the tokens that moved most."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.analyze.worst import worst_tokens
from mismatchctl.batch import Float64s, TokenBatch
from mismatchctl.compare.model import MovedToken, PairedTokens, TopShare
from mismatchctl.dumps import Dump
from mismatchctl.finite import OVERFLOW
from mismatchctl.measure.table import Hashes, hash_values
from mismatchctl.measure.tails import Worst
from mismatchctl.ratios import Ratios
from mismatchctl.result import Value

TOPS = (1, 10, 100, 1000)
"""Numbers of tokens of which is said what they carry."""
CONTEXT = 12
"""Token ids kept before a token that moved."""
_OVERFLOWS = 1e150  # the K3 of a token beyond it: its square is still a float
NAMES = ("step", "sequence_id", "prompt_id")


class Moved:
    """Collects paired tokens, block by block; memory is a few numbers per sequence."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._sums = np.zeros(9)
        self._largest = 0.0
        self._same = [True, True]
        self._top = np.zeros(0)
        self._worst = Worst()
        self._changes: list[Float64s] = []
        self._lengths: list[Float64s] = []
        self._clusters: list[Hashes] = []

    def add(self, before: Ratios, after: Ratios, block: TokenBatch) -> None:
        """Take note of a block; both ratios are on its tokens."""
        x, y = before.log_ratio, after.log_ratio
        with np.errstate(invalid="ignore"):
            change = np.nan_to_num(after.k3 - before.k3, nan=0.0, posinf=_OVERFLOWS, neginf=-_OVERFLOWS)
        self._sums += [
            len(x), x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum(), np.abs(y - x).sum(),
            np.abs(change).sum(), np.count_nonzero(x != y),
        ]  # fmt: skip
        self._largest = max(self._largest, float(np.abs(y - x).max(initial=0.0)))
        self._same[0] &= np.array_equal(before.reference, after.reference)
        self._same[1] &= np.array_equal(before.policy, after.policy)
        self._top = _largest(np.concatenate([self._top, change]))
        self._worst = self._worst + _worst(before, after, change, block, self._worst.threshold)
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
        """What was found; at least one token was added."""
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
            k3_change=_mean(change, lengths, np.concatenate(self._clusters)),
            abs_log_ratio_change=moved / tokens,
            largest_log_ratio_change=self._largest,
            correlation=min(covariance / spread, 1.0) if spread > 0 else None,
            moved=differing / tokens,
            shares=_shares(self._top, float(change.sum()), movement, int(tokens)),
            most_moved=[MovedToken(**own) for own in worst_tokens(self._worst, self._dump, CONTEXT)],
        )


def _mean(change: Float64s, lengths: Float64s, clusters: Hashes) -> Value:
    """Change per token with its standard error over clusters, as for every mean."""
    _, where = np.unique(clusters, return_inverse=True)
    sums, counts = np.bincount(where, weights=change), np.bincount(where, weights=lengths)
    mean = sums.sum() / counts.sum()
    if np.abs(change).max() >= _OVERFLOWS:
        return Value(value=None, status=OVERFLOW)
    if len(sums) < 2:
        return Value(value=float(mean))
    scatter = ((sums - mean * counts) ** 2).sum() * len(sums) / (len(sums) - 1)
    return Value(value=float(mean), se=float(np.sqrt(scatter) / counts.sum()))


def _largest(changes: Float64s) -> Float64s:
    """The most moved, largest first; ties go to the rise."""
    most = TOPS[-1]
    if len(changes) > 4 * most:
        cut = np.partition(np.abs(changes), len(changes) - most)[len(changes) - most]
        changes = changes[np.abs(changes) >= cut]
    return changes[np.lexsort((-changes, -np.abs(changes)))[:most]]


def _shares(top: Float64s, change: float, movement: float, tokens: int) -> list[TopShare]:
    if movement == 0:
        return []
    return [
        TopShare(
            tokens=count,
            of_change=float(top[:count].sum() / change) if change else None,
            of_movement=float(np.abs(top[:count]).sum() / movement),
        )
        for count in TOPS
        if count < tokens
    ]


def _worst(before: Ratios, after: Ratios, change: Float64s, block: TokenBatch, threshold: float) -> Worst:
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
    names = {name: block.columns[name][sequence].astype(object) for name in NAMES if name in block.columns}
    return Worst.of(score[found], place, fields | names)
