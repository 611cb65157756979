"""Escaping and shortening of text from dumps."""

from __future__ import annotations

import re
from collections.abc import Collection

from mismatchctl.core.formatting import escape_terminal

_LONG_WORD = re.compile(r"(\S{60})\S{100,}(\S{30})")
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")


def shorten(text: str, length: int) -> str:
    """Escape `text` and cut it to `length` characters, ending in an ellipsis."""
    text = escape_terminal(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def shorten_for_cell(text: str) -> str:
    """Escape `text` and remove the middle of very long words, so that the column stays narrow."""
    return _LONG_WORD.sub(r"\1…\2", escape_terminal(text))


def file_stems(names: Collection[str]) -> list[str]:
    """Return unique file names, without suffix, for names from a dump."""
    found: list[str] = []
    for name in names:
        plain = _UNSAFE_CHARACTERS.sub("_", shorten(name, 60)).strip("._-") or "run"
        found.append(next(s for s in (plain, *(f"{plain}_{n}" for n in range(2, len(names) + 2))) if s not in found))
    return found
