"""The definition, the registry and the evaluation of metrics."""
