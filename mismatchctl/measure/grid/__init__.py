"""Compute the sums of all corrections of a sweep at once. They differ only in their bounds."""
