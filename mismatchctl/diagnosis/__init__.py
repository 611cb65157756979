"""Diagnose the causes of a mismatch."""
