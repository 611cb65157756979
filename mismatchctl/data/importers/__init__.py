"""Importers, which convert files of frameworks and of other formats to columns of the schema."""
