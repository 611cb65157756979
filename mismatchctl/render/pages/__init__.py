"""What each verb has to show: a function from its result to a Document, tested as data."""
