"""K3 that models usually show, in nats per token."""

from __future__ import annotations

import math

DENSE_RANGE = (1e-5, 1e-3)
"""Dense models."""
MOE_RANGE = (1e-3, 1e-1)
"""Mixtures of experts."""
SCALE = (1e-8, 1.0)
"""Ends of the scale on which K3 is marked."""


def place(k3: float) -> float:
    """Where a K3 stands on the scale, from 0 to 1: by its logarithm."""
    low, high = (math.log10(end) for end in SCALE)
    return min(max((math.log10(k3) - low) / (high - low), 0.0), 1.0) if k3 > 0 else 0.0
