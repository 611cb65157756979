"""TokenBatch: the valid tokens of some sequences as flat arrays, and the operations on their segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]
Float64s = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BLOCK_TOKENS = 1 << 16
"""Tokens per block: small enough that the temporaries of a pass stay in the processor's cache."""
TILE = 1024
"""Tokens that compiled loops process together: their temporaries fit the processor's first-level cache."""
_LONG_SEGMENT = 64
"""Tokens of a segment, on average, from which segments are copied one by one, not token by token."""
BLOCK_SEQUENCES = 1 << 14
"""Sequences per block at most: each has hundreds of columns."""


Extent = tuple[float, float]
"""Smallest and largest of some values; both NaN where one is."""


def compute_extent(values: Floats) -> Extent:
    """The extent, in blocks that are still in the cache when they are looked at again; of nothing, NaN."""
    if not len(values):
        return math.nan, math.nan
    parts = [values[start : start + BLOCK_TOKENS] for start in range(0, len(values), BLOCK_TOKENS)]
    lowest, highest = np.min([np.min(part) for part in parts]), np.max([np.max(part) for part in parts])
    return float(lowest), float(highest)


@dataclass(frozen=True)
class Segments:
    """Contiguous segments of a flat token array, given by `offsets` [S + 1], ascending, from 0 to T."""

    offsets: Ints

    @classmethod
    def of(cls, lengths: ArrayLike) -> Segments:
        """Segments of so many tokens each [S], one after the other."""
        return cls(np.append(0, np.cumsum(lengths, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens T over all segments."""
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each segment, [S]."""
        return np.diff(self.offsets)

    @cached_property
    def sizes(self) -> Float64s:
        """The same as what sums are made of."""
        return self.lengths.astype(np.float64)

    @cached_property
    def nonempty(self) -> Bools:
        """Which segments hold at least one token, [S]."""
        return self.lengths > 0

    def take(self, chosen: Bools | Ints) -> Segments:
        """Some of the segments, by index, one after the other."""
        return Segments.of(self.lengths[chosen])

    def members(self, chosen: Bools | Ints) -> Ints:
        """Tokens of the segments chosen by flags [S] or by index, one segment after the other."""
        starts, lengths = self.offsets[:-1][chosen], self.lengths[chosen]
        ends = np.cumsum(lengths)
        return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)

    def picker(self, chosen: Ints) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """What takes values per token [T, ...] to those of some segments, by index, one segment after the other."""
        starts, stops = self.offsets[:-1][chosen], self.offsets[1:][chosen]
        if (stops - starts).sum() <= _LONG_SEGMENT * len(chosen):
            tokens = self.members(chosen)
            return lambda values: values[tokens]
        bounds = list(zip(starts.tolist(), stops.tolist(), strict=True))
        return lambda values: np.concatenate([values[start:stop] for start, stop in bounds])

    def blocks(self, tokens: int = BLOCK_TOKENS, segments: int | None = None) -> Iterator[tuple[int, int]]:
        """Ranges of whole segments, so many and of about so many tokens at most; a longer one is a range of its own."""
        start = 0
        while start < len(self):
            stop = int(np.searchsorted(self.offsets, self.offsets[start] + tokens, side="right")) - 1
            stop = min(max(stop, start + 1), start + (segments or len(self)), len(self))
            yield start, stop
            start = stop

    @cached_property
    def places(self) -> Ints:
        """Place of each token in its segment, [T]."""
        starts: Ints = self.spread(self.offsets[:-1])
        return np.arange(self.tokens, dtype=np.int64) - starts

    @cached_property
    def _starts(self) -> Ints:
        return self.offsets[:-1][self.nonempty]

    def _reduce(self, ufunc: np.ufunc, values: NDArray[Any], empty: float, dtype: type | None) -> Float64s:
        if 0 < len(self._starts) == len(self):
            return ufunc.reduceat(values, self._starts, axis=-1, dtype=dtype).astype(np.float64, copy=False)
        result = np.full((*values.shape[:-1], len(self)), empty, dtype=np.float64)
        if len(self._starts):
            result[..., self.nonempty] = ufunc.reduceat(values, self._starts, axis=-1, dtype=dtype)
        return result

    def sum(self, values: NDArray[Any]) -> Float64s:
        """Sum of `values` [..., T] over each segment in float64, [..., S]; 0 where the segment is empty."""
        return self._reduce(np.add, values, 0.0, np.float64)

    def min(self, values: NDArray[Any]) -> Float64s:
        """Smallest of `values` [T] in each segment, [S]; +inf where the segment is empty."""
        return self._reduce(np.minimum, values, np.inf, None)

    def max(self, values: NDArray[Any]) -> Float64s:
        """Largest of `values` [T] in each segment, [S]; -inf where the segment is empty."""
        return self._reduce(np.maximum, values, -np.inf, None)

    def mean(self, values: NDArray[Any]) -> Float64s:
        """Mean of `values` [T] over each segment, [S]; 0 where the segment is empty, as trainers do."""
        return self.sum(values) / np.maximum(self.lengths, 1)

    def from_host(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values per token [T] that were made by numpy, where the tokens are: here they are."""
        return values

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeat each segment's value [S] over its tokens, [T]."""
        return np.repeat(values, self.lengths)


@dataclass(frozen=True)
class TokenBatch:
    """The valid tokens of some sequences; the mask is applied before a batch exists.

    Attributes:
        segments: one segment per sequence.
        rollout: log-probs of the rollout engine [T], in the dtype of the dump.
        train: log-probs of the trainer's recomputation [T].
        current: log-probs of the policy being updated [T], where the dump has them.
        position: place of each token in its response [T], counted from the sequence's first valid token
            over masked tokens too; None when no sequence has masked tokens between valid ones.
        advantages: per token [T], where the dump has them (a scalar per sequence is repeated).
        columns: per-sequence values [S] by name (step, prompt_id, reward, any column named with `--by`);
            numbers are float64 or int64, a missing number is NaN, other values are objects or None.
        file: index of the file of each sequence [S]; 0 where it is not given.
        rows: row of each sequence in its file [S] (its first row in the long layout).
        others: more columns of the contract by name: log-probs of further policies [T], experts [T, K]; NaN where a
            sequence lacks them.
        trims: by gate over: batch, from which value on each sequence's step drops a token [S]; without a gate's, the
            batch is whole.
    """

    segments: Segments
    rollout: Floats
    train: Floats
    current: Floats | None = None
    position: Ints | None = None
    advantages: Floats | None = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    file: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    others: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    trims: Mapping[Any, Float64s] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.file) < len(self.rows):  # not given: all are of one
            object.__setattr__(self, "file", np.zeros(len(self.rows), np.int64))

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def tokens(self) -> int:
        """Number of valid tokens."""
        return self.segments.tokens

    @cached_property
    def positions(self) -> Ints:
        """Place of each token in its response [T], counted from the first valid token."""
        return self.segments.places if self.position is None else self.position

    @cached_property
    def outcomes(self) -> dict[str, tuple[Float64s, Float64s]]:
        """Reward, mean advantage and length of each sequence: 1 where there is one, else 0, and itself, else 0 [S]."""
        unknown = np.full(len(self), np.nan)
        reward = np.asarray(self.columns.get("reward", unknown), np.float64)
        advantage = unknown if self.advantages is None else self.segments.mean(self.advantages)
        found = {}
        for name, values in (("reward", reward), ("advantage", advantage), ("length", self.segments.sizes)):
            known = np.isfinite(values) & self.segments.nonempty
            found[name] = known.astype(np.float64), np.where(known, values, 0.0)
        return found

    @cached_property
    def age(self) -> Float64s:
        """Weight updates from the version that sampled each sequence to the one that trains on it [S]; NaN: unknown."""
        unknown = np.full(len(self), np.nan)
        train, rollout = (self.columns.get(f"{side}_version", unknown) for side in ("train", "rollout"))
        return train.astype(np.float64) - rollout.astype(np.float64)

    def lacking(self, columns: Iterable[str]) -> list[str]:
        """Which of some columns of the contract it is without, beside those that every dump has."""
        has = {"current_log_probs": self.current, "advantages": self.advantages, **self.columns}
        return sorted(column for column in columns if has.get(column) is None)

    def log_probs(self, policy: str) -> Floats | None:
        """Log-probs of the tokens under a policy [T]: rollout, train, current, ref or reference; None without them.

        Proximal: the policy one update before current, as if every update since the sampling had moved log-probs as
        far as any other (log-linear interpolation by versions).
        """
        if policy == "proximal":
            return None if self.current is None else self._proximal(self.current)
        if policy in ("rollout", "train", "current"):
            found: Floats | None = getattr(self, policy)
            return found
        values = self.others.get(f"{policy}_log_probs")
        return None if values is None else self.segments.from_host(values)

    def _proximal(self, current: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            moved = np.clip((self.age - 1) / np.where(self.age > 0, self.age, np.inf), 0, 1)
        return self.rollout + self.segments.spread(moved) * (current - self.rollout)

    def scored(self, *policies: str) -> Bools:
        """Which sequences have log-probs of all these policies on every token [S]; an empty one has."""
        known = np.ones(len(self), np.bool_)
        for policy in policies:
            values = self.log_probs(policy)
            if values is None:
                return np.zeros(len(self), np.bool_)
            if policy not in ("ref", "reference"):  # complete, or the sequence would not be here
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                if not np.isfinite(values.sum()):  # a sixth of the time of sums by sequence
                    known &= np.isfinite(self.segments.sum(values))
        return known

    def sequences(self, start: int, stop: int) -> TokenBatch:
        """The sequences `start:stop` as a batch of views."""
        offsets = self.segments.offsets[start : stop + 1]
        tokens, sequences = slice(int(offsets[0]), int(offsets[-1])), slice(start, stop)
        return self._part(Segments(offsets - offsets[0]), lambda values: values[tokens], sequences)

    def take(self, chosen: Ints) -> TokenBatch:
        """Some of the sequences, by index, in the order given."""
        return self._part(self.segments.take(chosen), self.segments.picker(chosen), chosen)

    def _part(
        self, segments: Segments, picked: Callable[[NDArray[Any]], NDArray[Any]], chosen: Ints | slice
    ) -> TokenBatch:
        """The sequences `chosen`, which are these segments; `picked` takes values per token to those of theirs."""

        def pick(values: NDArray[Any] | None) -> NDArray[Any] | None:
            return None if values is None else picked(values)

        return replace(
            self,
            segments=segments,
            rollout=picked(self.rollout),
            train=picked(self.train),
            current=pick(self.current),
            position=pick(self.position),
            advantages=pick(self.advantages),
            others={name: picked(values) for name, values in self.others.items()},
            columns={name: values[chosen] for name, values in self.columns.items()},
            trims={gate: values[chosen] for gate, values in self.trims.items()},
            file=self.file[chosen],
            rows=self.rows[chosen],
        )

    def blocks(self, tokens: int = BLOCK_TOKENS, sequences: int = BLOCK_SEQUENCES) -> Iterator[tuple[int, TokenBatch]]:
        """Whole sequences in cache-sized blocks: (index of the first sequence, block); a long sequence is its own."""
        for start, stop in self.segments.blocks(tokens, sequences):
            yield start, self.sequences(start, stop)
