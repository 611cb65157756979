"""mismatchctl: the mismatch between rollout and training log-probs, measured, corrected and gated."""

__version__ = "0.1.0"
