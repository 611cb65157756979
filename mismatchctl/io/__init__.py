"""Access to files and object stores, text formats, and signals. `__version__` is the version of mismatchctl."""

__version__ = "0.1.0"
