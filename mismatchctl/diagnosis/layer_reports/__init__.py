"""Reports of layer-wise comparators and the first layer that diverges."""
