"""Pages: each module builds the document of one command from its result."""
