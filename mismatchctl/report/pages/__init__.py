"""One page per command: functions that build a document from a result."""
