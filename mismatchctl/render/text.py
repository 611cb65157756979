"""Strings from outside made safe to look at: nothing invisible, nothing that turns the line around."""

from __future__ import annotations

import re
from collections.abc import Collection

from mismatchctl.escape import terminal as clean
from mismatchctl.numbers import label

__all__ = ["clean", "label", "short", "stems"]

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


def short(text: str, length: int) -> str:
    """`text`, cleaned, cut to `length` characters with an ellipsis."""
    text = clean(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def stems(names: Collection[str]) -> list[str]:
    """Names as the beginnings of names of files, each unlike the others."""
    found: list[str] = []
    for name in names:
        plain = _NOT_IN_NAMES.sub("_", short(name, 60)).strip("._-") or "run"
        found.append(next(s for s in (plain, *(f"{plain}_{n}" for n in range(2, len(names) + 2))) if s not in found))
    return found
