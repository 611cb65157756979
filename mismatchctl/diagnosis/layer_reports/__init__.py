"""Reports of layer-wise comparators: the layer at which two runs diverge."""
