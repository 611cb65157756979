"""The command line: one module per command, with options only."""
