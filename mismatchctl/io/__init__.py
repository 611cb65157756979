"""Files, object stores, signals and text formats."""
