"""Figures of reports: data, message and drawing."""
