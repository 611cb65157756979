"""slime's reducers: from a quantity per token to the scalar that is logged for a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Floats
from mismatchctl.frameworks.slime.call import Call
from mismatchctl.frameworks.slime.metrics import LoggedMetric
from mismatchctl.frameworks.slime.numerics import sum_in_order
from mismatchctl.frameworks.slime.versions import Version


@dataclass(frozen=True)
class Reducer:
    """How one step is summed up.

    Attributes:
        per_token: `--calculate-per-token-loss`: nothing is divided within a sequence, the total by all valid tokens
            (a sequence without any counts as one, and rejection never shrinks it).
        rollout_tokens: valid tokens of the rollout that each sequence belongs to [S], where the version divides by
            them; None: by the tokens of the mask that the metric is reduced with.
        divisor: what the total of the step is divided by.
    """

    per_token: bool
    rollout_tokens: NDArray[np.int64] | None
    divisor: int

    @classmethod
    def of(cls, version: Version, lengths: NDArray[np.int64], rollouts: NDArray[Any], per_token: bool) -> Reducer:
        """The reducer of a step whose sequences have so many valid tokens and belong to these rollouts [S]."""
        if per_token:
            return cls(True, None, int(np.maximum(lengths, 1).sum()))
        if not version.rollout_denominators:
            return cls(False, None, len(lengths))
        names, index = np.unique(rollouts, return_inverse=True)
        tokens = np.bincount(index, weights=lengths, minlength=len(names)).astype(np.int64)
        return cls(False, tokens[index], len(names))

    def contribution(self, metric: LoggedMetric, call: Call, rows: NDArray[np.int64]) -> float:
        """What the call over these rows of the step adds to the total of a metric."""
        values = metric.quantity(call)
        if metric.mask == "none":
            weight = call.counts if self.per_token and metric.name == "ess_ratio" else 1
            return float(sum_in_order((values * weight).astype(values.dtype)))
        kept = None if metric.mask == "original" else call.kept
        sums = call.total(values if kept is None else values * kept)
        if self.per_token:
            return float(sum_in_order(sums))
        return float(sum_in_order(sums / self._denominators(metric, call, rows).astype(sums.dtype)))

    def _denominators(self, metric: LoggedMetric, call: Call, rows: NDArray[np.int64]) -> Floats:
        if self.rollout_tokens is not None:
            return np.maximum(self.rollout_tokens[rows], 1).astype(call.dtype)
        return call.counts if metric.mask == "original" else call.kept_counts
