"""Measure dumps."""
