"""Dumps: find, open and read files as TokenBatches, and name bad data."""
