"""Pages: each module builds the documents of one or more commands from their results."""
