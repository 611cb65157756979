"""Measurement: one pass over the tokens, reduced to sums that add up."""
