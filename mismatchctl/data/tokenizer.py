"""Decode token ids to text, with a tokenizer.json or by treating ids as bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from mismatchctl.core.batch import Ints
from mismatchctl.errors import ConfigError
from mismatchctl.io.files import read_regular_file
from mismatchctl.io.yaml import decode_utf8, parse_json

MOST_TOKENIZER_BYTES = 200 << 20
_BYTE_IDS = 256
_BYTE_LEVEL_IDS = 257


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of token ids (`pieces`). Unknown ids are shown as numbers. `name`: a file name, "bytes" or "ids"."""

    name: str
    pieces: Mapping[int, bytes]

    def texts(self, ids: Ints | None) -> list[str]:
        """Decode each token separately. If a token is only a part of a character, show its bytes as escapes."""
        if ids is None:
            return []
        return [
            self.pieces[token].decode("utf-8", "backslashreplace") if token in self.pieces else f"⟨{token}⟩"
            for token in ids.tolist()
        ]

    def text(self, ids: Sequence[int] | None) -> str:
        """Decode all tokens together to one string, because one character can consist of several tokens."""
        return "".join(
            b"".join(self.pieces[token] for token in run).decode("utf-8", "backslashreplace")
            if known else "".join(f"⟨{token}⟩" for token in run)
            for known, run in groupby(ids or (), self.pieces.__contains__)
        )  # fmt: skip


def load_vocabulary(named: str | Path | None, ids: Iterable[Sequence[int] | Ints | None]) -> Vocabulary:
    """Load the vocabulary `named` ("bytes", "ids" or a file). Default: "bytes" if no id is above 256, else "ids"."""
    text = "" if named is None else str(named)
    seen = {int(token) for row in ids if row is not None for token in row if token >= 0}
    if text == "bytes" or (
        not text and seen and max(seen) < _BYTE_LEVEL_IDS and any(token < _BYTE_IDS for token in seen)
    ):
        return Vocabulary("bytes", {token: bytes([token]) for token in range(_BYTE_IDS)})
    if text in ("", "ids"):
        return Vocabulary("ids", {})
    place = Path(text) / "tokenizer.json" if Path(text).is_dir() else Path(text)
    return Vocabulary(str(place), _read_tokenizer_file(place))


def _read_tokenizer_file(place: Path) -> dict[int, bytes]:
    try:
        data: Any = parse_json(decode_utf8(read_regular_file(place, MOST_TOKENIZER_BYTES)))
        vocabulary = data["model"]["vocab"]
        entries = vocabulary.items() if isinstance(vocabulary, dict) else ((e[0], i) for i, e in enumerate(vocabulary))
        named = {int(number): str(piece) for piece, number in entries}
        added = {int(entry["id"]): str(entry["content"]) for entry in data.get("added_tokens") or ()}
    except OSError as error:
        raise ConfigError(f"--tokenizer {place}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ConfigError(f"--tokenizer {place}: this file is not a tokenizer.json with a vocabulary") from None
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_BYTE_IDS) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {chr(_BYTE_IDS + place): byte for place, byte in enumerate(others)}
    by_bytes = sum("Ġ" in piece for piece in named.values()) > sum("▁" in piece for piece in named.values())
    found = {}
    for number, piece in named.items():
        if by_bytes and all(letter in letters for letter in piece):
            found[number] = bytes(letters[letter] for letter in piece)
        elif not by_bytes and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)):
            found[number] = bytes.fromhex(byte[1])
        else:
            found[number] = (piece if by_bytes else piece.replace("▁", " ")).encode("utf-8", "replace")
    return found | {number: text.encode() for number, text in added.items()}
