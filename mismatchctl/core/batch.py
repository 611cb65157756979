"""TokenBatch: the valid tokens of several sequences as flat arrays, and sums over segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]
Float64s = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BatchT = TypeVar("BatchT", bound="TokenBatch")
BLOCK_TOKENS = 1 << 16
"""Maximum tokens per block, unless one sequence is longer. Temporary arrays of a block then fit the CPU cache."""
TILE = 1024
"""Number of tokens that compiled loops process at a time, so that temporary arrays fit the first-level cache."""
_LONG_SEGMENT = 64  # `token_selector` copies whole segments if their mean length is above this, else single tokens
BLOCK_SEQUENCES = 1 << 14
"""Maximum number of sequences per block. It limits memory, because each sequence has hundreds of values."""

Extent = tuple[float, float]
"""Minimum and maximum of an array. Both are NaN if the array contains NaN."""


def compute_extent(values: Floats) -> Extent:
    return (float(np.min(values)), float(np.max(values))) if len(values) else (math.nan, math.nan)


@dataclass(frozen=True)
class Segments:
    """S segments of a flat array of T tokens. Segment i contains the tokens offsets[i] to offsets[i + 1] - 1."""

    offsets: Ints

    @classmethod
    def from_lengths(cls, lengths: ArrayLike) -> Segments:
        return cls(np.append(0, np.cumsum(lengths, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    @cached_property
    def sizes(self) -> Float64s:
        return self.lengths.astype(np.float64)

    @cached_property
    def nonempty(self) -> Bools:
        return self.lengths > 0

    def take(self, chosen: Bools | Ints) -> Segments:
        return Segments.from_lengths(self.lengths[chosen])

    def token_indices(self, chosen: Bools | Ints) -> Ints:
        """Return the indices of the tokens in the `chosen` segments (flags or segment indices)."""
        starts, lengths = self.offsets[:-1][chosen], self.lengths[chosen]
        ends = np.cumsum(lengths)
        return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)

    def token_selector(self, chosen: Ints) -> Callable[[NDArray[Any]], NDArray[Any]]:
        """Return a function that takes one value per token and returns the values of the `chosen` segments."""
        starts, stops = self.offsets[:-1][chosen], self.offsets[1:][chosen]
        if (stops - starts).sum() <= _LONG_SEGMENT * len(chosen):
            tokens = self.token_indices(chosen)
            return lambda values: values[tokens]
        bounds = list(zip(starts.tolist(), stops.tolist(), strict=True))
        return lambda values: np.concatenate([values[start:stop] for start, stop in bounds])

    def blocks(self, tokens: int = BLOCK_TOKENS, segments: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of groups of adjacent segments, with at most `tokens` tokens or one longer segment."""
        start = 0
        while start < len(self):
            stop = int(np.searchsorted(self.offsets, self.offsets[start] + tokens, side="right")) - 1
            stop = min(max(stop, start + 1), start + (segments or len(self)), len(self))
            yield start, stop
            start = stop

    @cached_property
    def places(self) -> Ints:
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
        """Return the sum of `values` in each segment, in float64. The sum of an empty segment is 0."""
        return self._reduce(np.add, values, 0.0, np.float64)

    def min(self, values: NDArray[Any]) -> Float64s:
        """Return the minimum of `values` per segment. Empty segments give +inf."""
        return self._reduce(np.minimum, values, np.inf, None)

    def max(self, values: NDArray[Any]) -> Float64s:
        """Return the maximum of `values` per segment. Empty segments give -inf."""
        return self._reduce(np.maximum, values, -np.inf, None)

    def mean(self, values: NDArray[Any]) -> Float64s:
        """Return the mean of `values` per segment. Empty segments give 0."""
        return self.sum(values) / np.maximum(self.lengths, 1)

    def from_host(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return per-token values unchanged. A subclass copies them to a GPU."""
        return values

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(values, self.lengths)


@dataclass(frozen=True)
class TokenBatch:
    """The valid tokens of several sequences. Masked tokens are already removed."""

    segments: Segments  # one segment per sequence
    rollout: Floats  # log-probs of the rollout engine [T], in the dtype of the dump
    train: Floats  # log-probs of the trainer's recomputation [T]
    current: Floats | None = None  # log-probs of the policy being updated [T], if the dump contains them
    # position of each token in its response [T], counted from the first valid token and including masked tokens. None
    # if no sequence has masked tokens between valid ones.
    position: Ints | None = None
    advantages: Floats | None = None  # per token [T], if the dump contains them. A scalar per sequence is repeated.
    # per-sequence values [S] by name (step, prompt_id, reward, any `--by` column). Numbers are float64 or int64 with
    # NaN for missing values, other values are objects or None.
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # index of the file of each sequence [S]. Default: 0.
    file: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    # row of each sequence in its file [S]. In the long layout (one row per token), the first row of the sequence.
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    # more columns of the schema by name: log-probs of other policies [T], experts [T, K]. Missing values are NaN.
    extra_columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # for each gate with `over: batch`, one value per sequence [S]: the smallest value that the gate drops in the whole
    # step of the sequence. Without an entry, the gate drops values based on this batch alone.
    trims: Mapping[Any, Float64s] = field(default_factory=dict)
    # number of valid tokens per sequence to which the trainer gives probability 0 (log-prob -inf) [S], or None. All
    # arrays [T] and all means leave out these tokens. Gates and weights of whole sequences include them.
    impossible: Ints | None = None
    # where the tokens counted in `impossible` are. Three numbers per remaining token [T, 3]: 1 if the token is first in
    # its turn (a range of adjacent valid tokens) else 0, number of impossible tokens in this turn, number of impossible
    # tokens earlier in the response.
    impossible_near: Ints | None = None

    def __post_init__(self) -> None:
        if len(self.file) < len(self.rows):  # default: one file
            object.__setattr__(self, "file", np.zeros(len(self.rows), np.int64))

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def tokens(self) -> int:
        return self.segments.tokens

    @cached_property
    def positions(self) -> Ints:
        """Return the position of each token in its response, counted from the first valid token (0)."""
        return self.segments.places if self.position is None else self.position

    @cached_property
    def outcomes(self) -> dict[str, tuple[Float64s, Float64s]]:
        """Map "reward", "advantage" and "length" to (known, values) [S]. An unknown value is 0, with known = 0."""
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
        """Return the staleness of each sequence [S] in weight updates, or NaN if a version is missing."""
        unknown = np.full(len(self), np.nan)
        train, rollout = (self.columns.get(f"{side}_version", unknown) for side in ("train", "rollout"))
        return train.astype(np.float64) - rollout.astype(np.float64)

    def missing_columns(self, columns: Iterable[str]) -> list[str]:
        has = {"current_log_probs": self.current, "advantages": self.advantages, **self.columns}
        return sorted(column for column in columns if has.get(column) is None)

    def log_probs(self, policy: str) -> Floats | None:
        """Return a policy's log-probs [T], or `None` if missing. `proximal` interpolates `rollout` and `current`."""
        if policy == "proximal":
            return None if self.current is None else self._proximal(self.current)
        if policy in ("rollout", "train", "current"):
            found: Floats | None = getattr(self, policy)
            return found
        values = self.extra_columns.get(f"{policy}_log_probs")
        return None if values is None else self.segments.from_host(values)

    def _proximal(self, current: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            moved = np.clip((self.age - 1) / np.where(self.age > 0, self.age, np.inf), 0, 1)
        return self.rollout + self.segments.spread(moved) * (current - self.rollout)

    def has_log_probs(self, *policies: str) -> Bools:
        """Flag the sequences [S] whose tokens all have log-probs of all `policies`."""
        known = np.ones(len(self), np.bool_)
        for policy in policies:
            values = self.log_probs(policy)
            if values is None:
                return np.zeros(len(self), np.bool_)
            if policy not in ("ref", "reference"):  # rollout and train log-probs are always complete
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                if not np.isfinite(values.sum()):  # this one sum is six times as fast as one sum per sequence
                    known &= np.isfinite(self.segments.sum(values))
        return known

    def sequences(self: BatchT, start: int, stop: int) -> BatchT:
        offsets = self.segments.offsets[start : stop + 1]
        tokens, sequences = slice(int(offsets[0]), int(offsets[-1])), slice(start, stop)
        return self._select(Segments(offsets - offsets[0]), lambda values: values[tokens], sequences)

    def take(self: BatchT, chosen: Ints) -> BatchT:
        return self._select(self.segments.take(chosen), self.segments.token_selector(chosen), chosen)

    def _select(
        self: BatchT, segments: Segments, picked: Callable[[NDArray[Any]], NDArray[Any]], chosen: Ints | slice
    ) -> BatchT:
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
            extra_columns={name: picked(values) for name, values in self.extra_columns.items()},
            columns={name: values[chosen] for name, values in self.columns.items()},
            trims={gate: values[chosen] for gate, values in self.trims.items()},
            impossible=None if self.impossible is None else self.impossible[chosen],
            impossible_near=pick(self.impossible_near),
            file=self.file[chosen],
            rows=self.rows[chosen],
        )

    def blocks(
        self: BatchT, tokens: int = BLOCK_TOKENS, sequences: int = BLOCK_SEQUENCES
    ) -> Iterator[tuple[int, BatchT]]:
        """Split the batch into blocks that fit into the CPU cache. Yield (index of the first sequence, block)."""
        for start, stop in self.segments.blocks(tokens, sequences):
            yield start, self.sequences(start, stop)


def experts_per_layer(experts: np.ndarray) -> int:
    """Infer the number k of experts per layer from ids [T, layers x k]: the largest k <= 8 without repeated ids."""
    some = experts[:: max(1, len(experts) // 512)]
    best = 1
    for width in range(2, 8 + 1):
        if experts.shape[1] % width == 0:
            groups = np.sort(some.reshape(-1, width), axis=1)
            if (np.diff(groups, axis=1) != 0).all():
                best = width
    return best
