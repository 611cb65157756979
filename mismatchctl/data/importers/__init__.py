"""Importers: read the files of frameworks and other formats as rows of the schema."""
