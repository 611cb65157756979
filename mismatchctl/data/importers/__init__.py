"""Importers: read the files of frameworks as rows of the schema."""
