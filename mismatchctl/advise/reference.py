"""What stands for no bias: the least biased correction that converges on a sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatchctl.advise.applied import correct
from mismatchctl.advise.sample import RunSample
from mismatchctl.correction import Correction, correction_from_mapping
from mismatchctl.measure.metrics.pareto import khat, khat_limit, tail_length

_PER_SEQUENCE, _PER_TOKEN = (
    correction_from_mapping({"name": name, "weight": {"level": level, "truncate": bound}})
    for name, level, bound in (("seq_truncate_10", "sequence", 10.0), ("token_truncate_5", "token", 5.0))
)
CONVERGES = (0.5, 1.5)
"""Mean of the truncated sequence weights outside which weights per token take their place."""
LOWER_BOUND_COUNTS = 3.0
"""Times that a squared bias counts which is a lower bound.

Where the truth is known, true ones were 0.6 to 5.6 times those estimated; within 1.8 to 5.6 the advice is the same but
for one case at 4,096 sequences (docs/advise.md).
"""


@dataclass(frozen=True)
class Reference:
    """The correction that biases are measured against.

    Attributes:
        sequence_mean: of the sequence weights truncated at 10, over tokens.
        k_hat: tail index of the sequence weights; None where undefined.
        is_heavy: whether that is beyond its limit: the tail of the sequence weights is not in the sample.
        lower_bound: whether the reference leaves something out that the sample cannot show.
    """

    correction: Correction
    sequence_mean: float
    k_hat: float | None
    is_heavy: bool
    lower_bound: bool

    @property
    def is_per_token(self) -> bool:
        """Whether token weights had to take the place of sequence weights."""
        return self.correction is _PER_TOKEN

    @property
    def counts(self) -> float:
        """Times that squared biases against it count."""
        return LOWER_BOUND_COUNTS if self.lower_bound else 1.0


def reference_of(sample: RunSample) -> Reference:
    """The least biased correction that converges.

    Sequence weights truncated at 10 have a finite variance at any length, and what truncation leaves out shows in their
    mean: where that is far from 1 (`CONVERGES`), weights per token are what converges. Where k-hat is beyond its limit,
    the part of the tail that matters is not in the sample, and a mean near 1 does not prove that little is left out.
    """
    k_hat = sequence_tail(sample)
    is_heavy = k_hat is not None and k_hat > khat_limit(len(sample))
    mean = float(correct(_PER_SEQUENCE, sample).weights.mean())
    converges = CONVERGES[0] < mean < CONVERGES[1]
    return Reference(_PER_SEQUENCE if converges else _PER_TOKEN, mean, k_hat, is_heavy, is_heavy or not converges)


def sequence_tail(sample: RunSample) -> float | None:
    """Pareto k-hat of the sequence weights."""
    batch = sample.batch
    sums = batch.segments.sum(batch.train.astype(np.float64) - batch.rollout)[batch.segments.nonempty]
    found = khat(np.sort(sums)[-tail_length(len(sums)) - 1 :], len(sums)) if len(sums) else math.nan
    return found if math.isfinite(found) else None
