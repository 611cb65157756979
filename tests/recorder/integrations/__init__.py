"""Stubs of training frameworks with known sequences, for the snippets of docs/integrations."""
