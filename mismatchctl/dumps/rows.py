"""Rows as they lie in the file: masked tokens included, nothing refused. What looks for causes reads these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Extent, Floats, Ints, Segments, extent_of
from mismatchctl.dumps.blocks import MASK, POSITION, DecodedBlock, column_values, per_token, with_versions
from mismatchctl.measure.kernels.look import RowScan

PIECE_TOKENS = 1 << 17
"""Tokens per piece: its few temporaries, mostly of four bytes, stay in the processor's cache."""


@dataclass(frozen=True)
class Rows:
    """Sequences with all their tokens, flat.

    Attributes:
        segments: one segment per sequence, masked tokens included.
        rollout: log-probs of the rollout engine [T]; NaN where the file has a null.
        train: log-probs of the trainer's recomputation [T].
        mask: which tokens are trained on [T].
        given_position: `position` of each token in the long layout [T]; None: its place in its list.
        tokens: other columns with a value per token, by name: [T], or [T, K] for lists of one length.
        columns: per-sequence values [S] by name.
        file: index of the file of each sequence [S].
        rows: row of each sequence in its file [S].
        extents: for rollout and train, an extent that holds all its values, where one is known.
        look: a look at both of them, where one was taken.
    """

    segments: Segments
    rollout: Floats
    train: Floats
    mask: Bools
    given_position: Ints | None = None
    tokens: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    file: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    extents: Mapping[str, Extent] = field(default_factory=dict)
    look: RowScan | None = None

    def __len__(self) -> int:
        return len(self.segments)

    @classmethod
    def of(cls, block: DecodedBlock) -> Rows:
        """The rows of a block, faults or not."""
        segments = Segments(block.offsets)
        found = {name: per_token(array) for name, array in {**block.tokens, **block.watched_tokens}.items()}
        tokens = {name: values for name, values in found.items() if values is not None}
        tokens.pop(MASK, None)
        position = tokens.pop(POSITION, None)
        return cls(
            segments=segments,
            rollout=tokens.pop("rollout_log_probs"),
            train=tokens.pop("train_log_probs"),
            mask=block.mask,
            given_position=None if position is None else np.nan_to_num(position).astype(np.int64, copy=False),
            tokens=tokens,
            columns=with_versions(column_values(block), tokens, segments),
            file=block.files,
            rows=block.rows,
            extents={side: block.extent(f"{side}_log_probs") for side in ("rollout", "train")},
            look=block.look,
        )

    def lies_within(self, side: str, lowest: float, highest: float) -> bool:
        """Whether all values of rollout or train lie between two numbers, masked ones included; NaN does not."""
        if side in self.extents and lowest <= self.extents[side][0] and self.extents[side][1] <= highest:
            return True
        low, high = extent_of(self.rollout if side == "rollout" else self.train)
        return lowest <= low and high <= highest

    @property
    def position(self) -> Ints:
        """Place of each token in its list, or its `position` in the long layout [T]."""
        return self.segments.places if self.given_position is None else self.given_position

    def position_of(self, tokens: Ints) -> Ints:
        """The same of some tokens, given by index."""
        if self.given_position is not None:
            return self.given_position[tokens]
        return tokens - self.segments.offsets[np.searchsorted(self.segments.offsets, tokens, side="right") - 1]

    def pieces(self, most: int = PIECE_TOKENS) -> Iterator[Rows]:
        """The same rows in pieces of about so many tokens at most: views of whole sequences."""
        for start, stop in self.segments.blocks(most):
            tokens = slice(int(self.segments.offsets[start]), int(self.segments.offsets[stop]))
            segments = Segments(self.segments.offsets[start : stop + 1] - tokens.start)
            yield self._part(segments, itemgetter(tokens), slice(start, stop))

    def take(self, chosen: Ints) -> Rows:
        """Some of the sequences, in the order given."""
        return self._part(self.segments.take(chosen), self.segments.picker(chosen), chosen)

    def _part(self, segments: Segments, pick: Callable[[Any], Any], chosen: Ints | slice) -> Rows:
        """Some of the sequences: `pick` takes their tokens."""
        return replace(
            self,
            segments=segments,
            rollout=pick(self.rollout),
            train=pick(self.train),
            mask=pick(self.mask),
            given_position=None if self.given_position is None else pick(self.given_position),
            tokens={name: pick(values) for name, values in self.tokens.items()},
            columns={name: values[chosen] for name, values in self.columns.items()},
            file=self.file[chosen],
            rows=self.rows[chosen],
            look=self.look and self.look.of(chosen),
        )
