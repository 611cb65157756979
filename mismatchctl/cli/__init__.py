"""Command line: one module per command, options only."""
