"""Read dumps: find and open files, decode them as TokenBatches, and report bad data."""
