"""The layers of K3 of a sample, and what they come to in comparison with a baseline's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.measure.layers import BINS, CAPPED, CAPS, EXPONENTS, TOKENS
from mismatchctl.resample.samples import ClusterSample

_STEPS = np.diff(CAPS)
_BELOW = CAPS[0] / 4.0**8  # below the lowest cap, nearly all tokens are beyond
_SCARCE = 0.005  # share of the tokens from which a bin has a mean of its own


@dataclass(frozen=True)
class Layers:
    """K3 of each cluster in layers.

    Attributes:
        k3: in all [N].
        tokens: by bin of the rollout's probability [N, B].
        capped: K3 by that bin and cap [N, B, C].
    """

    k3: Float64s
    tokens: Float64s
    capped: Float64s

    @classmethod
    def of(cls, sample: ClusterSample) -> Layers | None:
        """Those of a sample; None where its Result is older than they are."""
        if not set(TOKENS + CAPPED + ("k3",)) <= sample.columns.keys():
            return None
        take = [sample.columns[name] for name in TOKENS], [sample.columns[name] for name in CAPPED]
        capped = sample.sums[:, take[1]].reshape(len(sample), BINS, len(CAPS))
        return cls(sample.column("k3"), sample.sums[:, take[0]], capped)

    @cached_property
    def beyond(self) -> Float64s:
        """Share of tokens whose K3 lies beyond each cap but the last; of those up to the next one, a part [C - 1]."""
        found: Float64s = np.diff(self.capped.sum(axis=(0, 1))) / (_STEPS * max(self.tokens.sum(), 1.0))
        return found

    def cap(self, share: float, least: int = EXPONENTS[0]) -> int:
        """Index of the lowest cap from 2^least nats on beyond which there is at most a share of the tokens."""
        first = least - EXPONENTS[0]
        reached = np.flatnonzero(self.beyond[first:] <= share)
        return first + int(reached[0]) if len(reached) else len(CAPS) - 2

    def count_beyond(self, cap: int) -> Float64s:
        """Tokens of each cluster beyond a cap, of those up to the next one a part [N]."""
        found: Float64s = np.diff(self.capped[:, :, cap : cap + 2].sum(axis=1), axis=1)[:, 0] / _STEPS[cap]
        return found

    def scaled(self, factor: float) -> Layers:
        """What they would be were the K3 of every token `factor` times as large.

        Between two caps, the sum over all clusters goes as a power of the cap, which holds where all tokens are beyond
        it and where none is; each cluster has its part of what lies between.
        """
        below = self.capped[:, :, :1] * (_BELOW / CAPS[0])
        known = np.concatenate([below, self.capped], axis=2)
        caps, wanted = np.concatenate([[_BELOW], CAPS]), np.maximum(CAPS / factor, _BELOW)
        at = np.clip(np.searchsorted(caps, wanted) - 1, 0, len(CAPS) - 1)
        total = known.sum(axis=0)
        low, high = total[:, at], total[:, at + 1]
        share = np.log(wanted / caps[at]) / np.log(caps[at + 1] / caps[at])
        with np.errstate(all="ignore"):
            part = np.clip(np.nan_to_num((low ** (1 - share) * high**share - low) / (high - low)), 0.0, 1.0)
        moved = known[:, :, at] * (1 - part) + known[:, :, at + 1] * part
        return Layers(self.k3 * factor, self.tokens, moved * factor)


def merged_bins(tokens: Float64s) -> list[slice]:
    """Neighbouring bins of probability in which the baseline has tokens enough for a mean, given its tokens [B]."""
    found, start, least = [], 0, _SCARCE * tokens.sum()
    for stop in range(1, len(tokens) + 1):
        if tokens[start:stop].sum() >= least and tokens[stop:].sum() >= least:
            found.append(slice(start, stop))
            start = stop
    return [*found, slice(start, len(tokens))]
