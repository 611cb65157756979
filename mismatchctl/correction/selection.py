"""Which tokens of which sequences: what is decided per sequence stays per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Float64s, Segments


@dataclass(frozen=True)
class Selection:
    """Selected tokens: those of the selected `sequences` [S] that are in `tokens` [T] (None: all of them)."""

    segments: Segments
    sequences: Bools
    tokens: Bools | None = None

    @classmethod
    def everything(cls, segments: Segments) -> Selection:
        """All tokens of all sequences."""
        return cls(segments, np.ones(len(segments), np.bool_))

    @cached_property
    def counts(self) -> Float64s:
        """Selected tokens of each sequence, [S]."""
        within = self.segments.sizes if self.tokens is None else self.segments.sum(self.tokens)
        return within * self.sequences

    def sum(self, values: NDArray[Any]) -> Float64s:
        """Sum of per-token `values` [T] over the selected tokens of each sequence, [S]."""
        masked = values if self.tokens is None else np.where(self.tokens, values, 0.0)
        return np.where(self.sequences, self.segments.sum(masked), 0.0)

    def sum_log_ratio(self, log_ratio: NDArray[Any]) -> Float64s:
        """The same of log ratios, times flags as trainers take it: NaN where one that is left out is not finite."""
        masked = log_ratio if self.tokens is None else log_ratio * self.tokens
        return self.segments.sum(masked) * self.sequences

    def expanded(self) -> Bools:
        """One flag per token, [T]."""
        spread = self.segments.spread(self.sequences)
        return spread if self.tokens is None else spread & self.tokens

    def over(self, segments: Segments) -> Selection:
        """The same tokens, of other segments."""
        return Selection(segments, np.ones(len(segments), np.bool_), self.expanded())

    def without(self, rejected: Selection) -> Selection:
        """What is left when `rejected` is taken out."""
        if rejected.tokens is None:
            return Selection(self.segments, self.sequences & ~rejected.sequences, self.tokens)
        left = ~rejected.expanded()
        return Selection(self.segments, self.sequences, left if self.tokens is None else self.tokens & left)
