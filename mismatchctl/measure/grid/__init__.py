"""Threshold grids: sums of many corrections that differ only in bounds."""
