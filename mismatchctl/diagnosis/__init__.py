"""Find the causes of a mismatch."""
