"""Stubs of training frameworks: the tensors that the snippets of docs/integrations see, from known sequences."""
