"""Tests for causes of a mismatch."""
