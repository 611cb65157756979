"""Figures: what each says, the numbers behind it, and its picture for a page, a paper or a notebook."""
