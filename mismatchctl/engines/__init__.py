"""Where the units of work run."""
