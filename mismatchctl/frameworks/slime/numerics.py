"""Sums as slime's tensors make them: in their own dtype, rounded where it rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Floats, Segments


def sum_segments(values: NDArray[Any], segments: Segments) -> Floats:
    """Sum over each segment [S], rounded to the dtype of `values`; flags are counted, in float32 as torch does."""
    dtype = np.float32 if values.dtype == np.bool_ else values.dtype
    return segments.sum(values).astype(dtype)


def sum_in_order(values: Floats) -> Any:
    """Sum of `values` one after the other in their dtype, as Python's `sum` adds tensors."""
    return np.cumsum(values)[-1] if len(values) else values.dtype.type(0)
