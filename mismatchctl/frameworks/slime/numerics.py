"""Sums as slime's tensors make them: in their own dtype, rounded where it rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Floats, Segments


def sum_segments(values: NDArray[Any], segments: Segments) -> Floats:
    """Sum over each segment [S], rounded to the dtype of `values`; flags are counted, in float32 as torch does."""
    return segments.sum(values).astype(_summed_as(values.dtype))


def sum_stacked(values: Sequence[NDArray[Any]], segments: Segments) -> Floats:
    """`sum_segments` of several values of the same dtype [M, S]."""
    if len(values) == 1:
        return sum_segments(values[0], segments)[None]
    stacked = np.stack(values, dtype=np.float64, casting="safe")
    return segments.sum(stacked).astype(_summed_as(values[0].dtype))


def sum_in_order(values: Floats) -> Any:
    """Sum of `values` [..., S] one after the other in their dtype, as Python's `sum` adds tensors."""
    if not values.shape[-1]:
        return np.zeros(values.shape[:-1], values.dtype)
    return np.cumsum(values, axis=-1)[..., -1]


def _summed_as(dtype: np.dtype[Any]) -> Any:
    return np.float32 if dtype == np.bool_ else dtype
