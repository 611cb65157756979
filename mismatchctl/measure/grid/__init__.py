"""Sums for the corrections of a sweep, which differ only in their bounds."""
