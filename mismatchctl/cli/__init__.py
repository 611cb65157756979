"""The command line: modules that define the commands and their options, and call the API."""
