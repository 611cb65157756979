"""The kernel for large dumps: the arithmetic of `plain` in compiled loops.

They are imported by those who run them, as numba takes its time: what a cache holds needs none of them.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import numpy as np

from mismatchctl.batch import Float64s, Floats, Ints, Segments, TokenBatch
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.kernels.kernel import TOKEN_MAXIMA, TOKEN_SUMS, Kernel, PairTables, RunTables
from mismatchctl.measure.layers import BINS, CAPS, close_layers
from mismatchctl.ratios import Ratios

_NOWHERE = np.zeros(0, np.int64)


def _summed(name: str) -> Any:
    """A property of the sums of each sequence."""
    index = TOKEN_SUMS.index(name)
    return property(lambda ratios: ratios.sums[0][index])


class CompiledRatios(Ratios):
    """Ratios of which the elementwise terms are made at once, when a correction asks for one."""

    def __init__(self, policy: Floats, reference: Floats, segments: Segments) -> None:
        super().__init__(_loopable(policy), _loopable(reference), segments)
        self.layers = _NO_LAYERS

    @cached_property
    def has_unlikely(self) -> bool:
        """Whether some token's probability is too small to make the policy's from it."""
        from mismatchctl.measure.kernels.loops import UNLIKELY

        return bool(self.given[1].min(initial=0.0) < UNLIKELY)

    @cached_property
    def sums(self) -> tuple[Float64s, Float64s]:
        """TOKEN_SUMS [len, S] and TOKEN_MAXIMA [len, S]; the neighbours as if there were no gap."""
        buckets = np.zeros(len(self.segments), np.int64)
        return _reduced(self, _NOWHERE, buckets, buckets, _NO_PAIR, _NO_RUN, _NOWHERE)

    log_ratio_sum, absolute_sum, square_sum = _summed("log_ratio"), _summed("abs"), _summed("square")
    k3_sum, excess_sum, squared_excess_sum = _summed("k3"), _summed("excess"), _summed("squared_excess")

    @cached_property
    def highest(self) -> Float64s:
        """Largest log ratio of each sequence, [S]; -inf where it is empty."""
        highest: Float64s = self.sums[1][0]
        return highest

    @cached_property
    def lowest(self) -> Float64s:
        """Smallest log ratio of each sequence, [S]; +inf where it is empty."""
        lowest: Float64s = -self.sums[1][1]
        return lowest

    @cached_property
    def _terms(self) -> tuple[Float64s, ...]:
        from mismatchctl.measure.kernels.loops import make_terms, mend_unlikely

        log_ratio, exp_minus_one, k3, policy_prob, reference_prob = terms = tuple(np.empty((5, self.segments.tokens)))
        make_terms(*self.given, log_ratio, exp_minus_one, k3, policy_prob, reference_prob)
        if self.has_unlikely:
            mend_unlikely(*self.given, policy_prob)
        return terms

    @cached_property
    def log_ratio(self) -> Float64s:
        """Policy minus reference [T], nats."""
        return self._terms[0]

    @cached_property
    def exp_minus_one(self) -> Float64s:
        """expm1 of the unclamped log ratio [T]."""
        return self._terms[1]

    @cached_property
    def k3(self) -> Float64s:
        """exp(x) - 1 - x of the unclamped log ratio [T]."""
        return self._terms[2]

    @cached_property
    def policy_prob(self) -> Float64s:
        """Probability of the token under the policy [T]."""
        return self._terms[3]

    @cached_property
    def reference_prob(self) -> Float64s:
        """Probability of the token under the reference [T]."""
        return self._terms[4]


def _loopable(values: Floats) -> Floats:
    """Values in a form that the loops are compiled for."""
    return np.ascontiguousarray(values, None if values.dtype in (np.float32, np.float64) else np.float64)


def reduce_tokens(
    ratios: Ratios, position: Ints | None, rows: Ints, buckets: Ints, pair: PairTables, run: RunTables | None
) -> tuple[Float64s, Float64s]:
    """As the interface says."""
    assert isinstance(ratios, CompiledRatios)
    places = _NOWHERE if position is None else np.ascontiguousarray(position)
    joint = _NOWHERE if run is None else run.joint.reshape(-1)
    if run is not None:
        ratios.layers = np.zeros((len(ratios.segments), *_NO_LAYERS.shape[1:]))
    ratios.sums = _reduced(ratios, places, rows, buckets, pair, run or _NO_RUN, joint)
    return ratios.sums


def _reduced(
    ratios: CompiledRatios, places: Ints, rows: Ints, buckets: Ints, pair: PairTables, run: RunTables, joint: Ints
) -> tuple[Float64s, Float64s]:
    """TOKEN_SUMS and TOKEN_MAXIMA; tables without a row are left as they are."""
    from mismatchctl.measure.kernels.loops import reduce_sequences

    sums = np.zeros((len(buckets), len(TOKEN_SUMS)))
    maxima = np.full((len(buckets), len(TOKEN_MAXIMA)), -np.inf)
    reduce_sequences(
        *ratios.given, places, ratios.segments.offsets, rows, buckets, ratios.has_unlikely,
        sums, maxima, pair.counts, pair.k3, run.breakdowns["surprisal"], run.breakdowns["position"], joint,
        ratios.layers,
    )  # fmt: skip
    return sums.T, maxima.T


def beyond(ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
    """As the interface says."""
    from mismatchctl.measure.kernels.loops import search

    found = np.empty(int(ratios.segments.lengths[sequences].sum()), np.int64)
    return found[: search(*ratios.given, ratios.segments.offsets, sequences, low, high, found)]


def layers(ratios: Ratios) -> Float64s:
    """As the interface says."""
    assert isinstance(ratios, CompiledRatios)
    return close_layers(ratios.layers)


_NO_LAYERS = np.zeros((0, BINS, len(CAPS) + 1, 2))
_NO_RUN, _NO_PAIR = RunTables(), PairTables(0)
COMPILED = Kernel(
    CompiledRatios, reduce_tokens, beyond, correction_columns, layers, partial(TokenBatch.blocks, tokens=1 << 20)
)
