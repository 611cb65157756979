"""Reports: pages, figures and writers."""
