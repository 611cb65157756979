"""Strings from outside made safe to look at: nothing invisible, nothing that turns the line around."""

from __future__ import annotations

import re
from collections.abc import Collection

from mismatchctl.escape import terminal as clean
from mismatchctl.numbers import label

__all__ = ["clean", "in_cell", "label", "short", "stems"]

_LONG_WORD = re.compile(r"(\S{60})\S{100,}(\S{30})")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


def short(text: str, length: int) -> str:
    """`text`, cleaned, cut to `length` characters with an ellipsis."""
    text = clean(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def in_cell(text: str) -> str:
    """`text`, cleaned; a long word in it, which would make a table as wide or a row as high, loses its middle."""
    return _LONG_WORD.sub(r"\1…\2", clean(text))


def stems(names: Collection[str]) -> list[str]:
    """Names as the beginnings of names of files, each unlike the others."""
    found: list[str] = []
    for name in names:
        plain = _NOT_IN_NAMES.sub("_", short(name, 60)).strip("._-") or "run"
        found.append(next(s for s in (plain, *(f"{plain}_{n}" for n in range(2, len(names) + 2))) if s not in found))
    return found
