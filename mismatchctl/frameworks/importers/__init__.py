"""What frameworks already write, read as rows of the contract."""
