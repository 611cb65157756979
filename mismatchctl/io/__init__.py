"""Files, object stores, signals and text formats, and the version of the package, which hatch reads from this file."""

__version__ = "0.1.0"
