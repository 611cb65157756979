"""Threshold grids: sums for many corrections that differ only in bounds."""
