"""Adapters of the RL frameworks: configurations, metric names, losses and dump files."""
