"""The media: each writes any Document."""
