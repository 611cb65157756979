"""The numbers that verl's formulas start from: two policies on ragged tokens, computed in verl's dtype.

Elementwise values are rounded to the dtype at every step as torch rounds them, so that ties fall as they fall in
verl. Sums are float64 and rounded once: torch's float32 sums differ in their last digits only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Floats, Segments
from mismatchctl.errors import DataError
from mismatchctl.ratios import LOG_RATIO_BOUND
from mismatchctl.surrogates import exp

Values = NDArray[Any]


def clamp(log_ratio: Floats) -> Floats:
    """Clamped to +-20 (verl's SAFETY_BOUND)."""
    return np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def float32_log(threshold: float) -> float:
    """Logarithm as verl takes it of ratio thresholds: in float32, whatever the dtype of the data."""
    rounded = float(np.float32(threshold))
    if not rounded > 0:
        return -math.inf if rounded == 0 else math.nan
    return float(np.float32(math.log(rounded)))


@dataclass(frozen=True)
class PolicyPair:
    """Two policies on the valid tokens of one batch.

    Attributes:
        policy: log-probs of the trainer: its recomputation, in bypass mode the policy being updated [T].
        reference: log-probs of the rollout engine [T].
        segments: one per row [S]; rows without a valid token count wherever verl counts them.
    """

    policy: Floats
    reference: Floats
    segments: Segments

    def __post_init__(self) -> None:
        if not len(self.policy):
            raise DataError("response_mask must contain at least one valid token (1)", column="response_mask")

    @cached_property
    def log_ratio(self) -> Floats:
        """Policy minus reference [T]."""
        return self.policy - self.reference

    def row_sum(self, values: Floats) -> Floats:
        """Sum over each row's valid tokens [S]."""
        return self.segments.sum(values).astype(values.dtype)

    def row_mean(self, values: Floats) -> Floats:
        """Mean over each row's valid tokens [S]; 0 for a row that has none."""
        return self.row_sum(values) / np.maximum(self.segments.lengths, 1).astype(values.dtype)

    def row_max(self, values: Floats) -> Floats:
        """Largest of each row's valid tokens [S]; 0 for a row that has none."""
        return np.where(self.segments.nonempty, self.segments.max(values), 0).astype(values.dtype)

    def any_in_row(self, flags: Bools) -> Bools:
        """Whether any valid token of the row is flagged [S]."""
        return self.segments.sum(flags) > 0

    def level(self, level: str) -> Floats:
        """Log ratio at a level, not clamped: [T] for tokens, else [S]."""
        if level == "token":
            return self.log_ratio
        return self.row_sum(self.log_ratio) if level == "sequence" else self.row_mean(self.log_ratio)

    def over_tokens(self, values: Values, level: str) -> Values:
        """Values of the rows [S] repeated over their tokens [T]; those of tokens as they are."""
        return values if level == "token" else self.segments.spread(values)


def mean(values: Values) -> Floats:
    """Mean in the dtype of the values, 0-d; flags are averaged in float32, as verl does even for float64 data."""
    dtype = np.dtype(np.float32) if values.dtype == np.bool_ else values.dtype
    total = np.asarray(values.sum(dtype=np.float64), dtype)
    return np.asarray(total / np.asarray(max(len(values), 1), dtype))


def _mean_less_one(values: Floats) -> Floats:
    return mean(values) - np.asarray(1, values.dtype)


def _std(values: Floats) -> float:
    """Sample standard deviation (n - 1); 0 of a single value."""
    return float(np.std(values, ddof=1, dtype=np.float64)) if len(values) > 1 else 0.0


def _spread(values: Floats) -> float:
    """Population standard deviation as mean of squares minus square of mean, which cancels when it is small."""
    if len(values) <= 1:
        return 0.0
    variance = mean(values * values) - mean(values) ** 2
    return math.sqrt(max(float(variance), 0.0))


def _effective_size(values: Floats) -> float:
    """1 / mean of the squared weights, these divided by their mean: a share of the tokens."""
    normalized = values / (mean(values) + np.asarray(1e-8, values.dtype))
    squares = float(mean(normalized * normalized))
    if squares == 0:
        raise DataError("verl divides by zero here: every weight of the batch is 0")
    return 1.0 / squares


REDUCTIONS: dict[str, Callable[[Values], Any]] = {
    "mean": mean,
    "mean - 1": _mean_less_one,
    "max": np.max,
    "min": np.min,
    "std": _std,
    "spread": _spread,
    "ess": _effective_size,
}


def ratio(log_ratio: Floats) -> Floats:
    """exp of a log ratio clamped to +-20."""
    return exp(clamp(log_ratio))
