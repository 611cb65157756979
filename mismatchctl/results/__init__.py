"""The Result: model, reading, growth over the steps, summary and views."""
