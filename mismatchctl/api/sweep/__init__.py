"""Sweep thresholds."""
