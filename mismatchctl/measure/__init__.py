"""Measure a dump in one pass: sums per cluster (usually a prompt), metrics per step, and sweeps of thresholds."""
