"""What is wrong with a text."""

from __future__ import annotations


class TextError(ValueError):
    """One sentence: line and column, counted from 1, where they are known, and what is wrong there."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        place = "" if line is None else f"line {line}, column {column}: "
        super().__init__(place + " ".join(problem.split()))
