"""One page per command: a function from its result to a Document."""
