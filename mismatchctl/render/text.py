"""Strings from outside made safe to look at: nothing invisible, nothing that turns the line around."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from mismatchctl.escape import terminal as clean
from mismatchctl.numbers import label

__all__ = ["are_bytes", "clean", "label", "short", "stems", "token_text"]

_BYTES = 256
_SPECIAL = 257
"""Byte-level vocabularies may end in one special token."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")


def short(text: str, length: int) -> str:
    """`text`, cleaned, cut to `length` characters with an ellipsis."""
    text = clean(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def are_bytes(tokens: Iterable[Sequence[int] | None]) -> bool:
    """Whether token ids are those of a byte-level vocabulary, so that they can be read as text."""
    known = [token for ids in tokens if ids for token in ids]
    return bool(known) and all(0 <= token < _SPECIAL for token in known) and any(t < _BYTES for t in known)


def token_text(tokens: Sequence[int] | None, as_bytes: bool) -> str:
    """Token ids as the characters of their bytes, or as numbers."""
    if not tokens:
        return ""
    if not as_bytes:
        return " ".join(map(str, tokens))
    parts: list[str] = []
    run = bytearray()
    for token in tokens:
        if token < _BYTES:
            run.append(token)
        else:
            parts += [run.decode("utf-8", "backslashreplace"), f"⟨{token}⟩"]
            run = bytearray()
    return clean("".join([*parts, run.decode("utf-8", "backslashreplace")]))


def stems(names: Collection[str]) -> list[str]:
    """Names as the beginnings of names of files, each unlike the others."""
    found: list[str] = []
    for name in names:
        plain = _NOT_IN_NAMES.sub("_", short(name, 60)).strip("._-") or "run"
        found.append(next(s for s in (plain, *(f"{plain}_{n}" for n in range(2, len(names) + 2))) if s not in found))
    return found
