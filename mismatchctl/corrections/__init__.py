"""The Correction model, its application, presets, and corrections on tensors."""
