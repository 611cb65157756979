"""Judge a Result against rules and a baseline."""
