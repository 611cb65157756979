"""K3 that models usually show, in nats per token."""

from __future__ import annotations

DENSE_RANGE = (1e-5, 1e-3)
"""Dense models."""
MOE_RANGE = (1e-3, 1e-1)
"""Mixtures of experts."""
