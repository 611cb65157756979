"""Measurement in one pass over the tokens: sums per cluster, groups, metrics and threshold grids."""
