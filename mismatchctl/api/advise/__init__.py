"""Recommend a correction."""
