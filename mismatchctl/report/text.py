"""Escape and shorten text from outside before it is shown."""

from __future__ import annotations

import re
from collections.abc import Collection

from mismatchctl.core.formatting import escape_terminal as clean

_LONG_WORD = re.compile(r"(\S{60})\S{100,}(\S{30})")
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")


def shorten(text: str, length: int) -> str:
    """`text`, cleaned, cut to `length` characters with an ellipsis."""
    text = clean(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def shorten_for_cell(text: str) -> str:
    """`text`, cleaned; a long word in it, which would make a table as wide or a row as high, loses its middle."""
    return _LONG_WORD.sub(r"\1…\2", clean(text))


def file_stems(names: Collection[str]) -> list[str]:
    """Names as the beginnings of names of files, each unlike the others."""
    found: list[str] = []
    for name in names:
        plain = _UNSAFE_CHARACTERS.sub("_", shorten(name, 60)).strip("._-") or "run"
        found.append(next(s for s in (plain, *(f"{plain}_{n}" for n in range(2, len(names) + 2))) if s not in found))
    return found
