"""Renderings of a Result: terminal, HTML, figures; and of the reference."""
