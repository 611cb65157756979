"""Corrections along axes of thresholds, all points of a family in one pass over the tokens."""
