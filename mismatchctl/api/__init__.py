"""The Python API: typed functions that `mismatchctl` exports, and the inputs that they take."""
