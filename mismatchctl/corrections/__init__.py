"""The class `Correction`, presets, and code that applies corrections to dumps and tensors."""
