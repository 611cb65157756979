"""Kernels: arithmetic over tokens in numpy, in compiled loops, and on a GPU."""
