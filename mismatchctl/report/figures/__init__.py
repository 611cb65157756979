"""Figures of reports: their data, message and drawing."""
