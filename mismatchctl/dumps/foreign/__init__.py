"""What frameworks already write, read as rows of the contract: the machinery. Layouts stand in the shelves."""
