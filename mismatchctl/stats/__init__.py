"""Statistics on Results: bootstrap, permutation tests and two-sample comparison, without the dumps."""
