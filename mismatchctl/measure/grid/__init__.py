"""The threshold grid: every point of a family of corrections in one pass."""
