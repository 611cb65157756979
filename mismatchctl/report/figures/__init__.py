"""Figures of reports: their data and how they are drawn."""
