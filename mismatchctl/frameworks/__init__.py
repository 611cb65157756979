"""Adapters of the supported RL frameworks: configurations, metric names, losses and dump files."""
