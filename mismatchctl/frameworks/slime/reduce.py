"""slime's reducers: from a quantity per token to the scalar that is logged for a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Floats
from mismatchctl.frameworks.slime.call import Call, sum_in_order, sum_stacked
from mismatchctl.frameworks.slime.metrics import LoggedMetric
from mismatchctl.frameworks.slime.versions import Version

_STACKED = 1 << 20
"""Values that are summed at once, at most: for few tokens, it is the calls that take the time."""


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

    def contributions(
        self, metrics: Sequence[LoggedMetric], call: Call, rows: NDArray[np.int64]
    ) -> Iterator[tuple[str, float]]:
        """What the call over these rows of the step adds to the total of each metric."""
        alike: dict[Any, list[LoggedMetric]] = defaultdict(list)
        values: dict[Any, list[NDArray[Any]]] = defaultdict(list)
        most = max(1, _STACKED // max(call.segments.tokens, 1))
        for metric in metrics:
            made = metric.quantity(call)
            if metric.mask == "none":
                weight = call.counts if self.per_token and metric.name == "ess_ratio" else 1
                yield metric.name, float(sum_in_order((made * weight).astype(made.dtype)))
                continue
            made = made if metric.mask == "original" else made * call.kept
            of_a_kind = made.dtype, metric.mask
            alike[of_a_kind].append(metric)
            values[of_a_kind].append(made)
            if len(values[of_a_kind]) == most:
                yield from self._summed(alike.pop(of_a_kind), values.pop(of_a_kind), call, rows)
        for of_a_kind, last in alike.items():
            yield from self._summed(last, values[of_a_kind], call, rows)

    def _summed(
        self, alike: Sequence[LoggedMetric], values: Sequence[NDArray[Any]], call: Call, rows: NDArray[np.int64]
    ) -> Iterator[tuple[str, float]]:
        """Contributions of metrics with the same mask and dtype, all at once: a step's arrays are small."""
        sums = sum_stacked(values, call.segments)
        if not self.per_token:
            sums = sums / self._denominators(alike[0], call, rows).astype(sums.dtype)
        totals = sum_in_order(sums)
        return zip((metric.name for metric in alike), totals.tolist(), strict=True)

    def _denominators(self, metric: LoggedMetric, call: Call, rows: NDArray[np.int64]) -> Floats:
        if self.rollout_tokens is not None:
            return np.maximum(self.rollout_tokens[rows], 1).astype(call.dtype)
        return call.counts if metric.mask == "original" else call.kept_counts
