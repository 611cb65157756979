"""Schema, token batches, ratios, losses, number formatting, and machine code of compiled loops."""
