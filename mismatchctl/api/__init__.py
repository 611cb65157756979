"""The commands and the public Python API, with one module or package per command."""
