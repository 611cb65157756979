"""Registry of metrics."""
