"""Read the reports of layer-wise comparators and find the first layer that diverges."""
