"""Kernels: the arithmetic over tokens in numpy, compiled, and on a device."""
