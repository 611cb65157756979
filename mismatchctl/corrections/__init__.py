"""Corrections: weights, gates and losses."""
