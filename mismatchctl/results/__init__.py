"""The Result: its model, summary, and reading it back."""
