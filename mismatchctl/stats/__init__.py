"""Resampling of clusters and comparison of two samples."""
