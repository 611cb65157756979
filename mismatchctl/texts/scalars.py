"""What is wrong with a text, and what an unquoted word is: a number, a truth value, nothing, or text.

YAML 1.1, as OmegaConf reads it, since that is how configurations for Hydra are read: `1e-4` is a number, which YAML 1.1
alone takes for text, and a date is text.
"""

from __future__ import annotations

import math
import re


class TextError(ValueError):
    """One sentence: line and column, counted from 1, where they are known, and what is wrong there."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        place = "" if line is None else f"line {line}, column {column}: "
        super().__init__(place + " ".join(problem.split()))


Plain = str | int | float | bool | None

_FLOAT = re.compile(
    r"""[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
      | [-+]?[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+
      | \.[0-9][0-9_]*(?:[eE][-+][0-9]+)?
      | [-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*
      | [-+]?\.(?:inf|Inf|INF)
      | \.(?:nan|NaN|NAN)""",
    re.VERBOSE,
)
_INTEGER = re.compile(
    r"""[-+]?0b[0-1_]*[0-1][0-1_]*
      | [-+]?0[0-7_]+
      | [-+]?(?:0|[1-9][0-9_]*)
      | [-+]?0x[0-9a-fA-F_]*[0-9a-fA-F][0-9a-fA-F_]*
      | [-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+""",
    re.VERBOSE,
)
_SIGNED = re.compile(r"[-+]?[0-9_]*\.[0-9_]*[eE][-+][0-9]+")
_WORDS: dict[str, bool | None] = {
    spelt: value
    for value, words in {True: ("yes", "true", "on"), False: ("no", "false", "off"), None: ("null",)}.items()
    for word in words
    for spelt in (word, word.capitalize(), word.upper())
} | {"~": None, "": None}


def scalar(text: str) -> Plain:
    """What an unquoted scalar of YAML is.

    Raises:
        TextError: a number that no float, or no integer of 64 bits, holds.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text.replace("_", ""))
    return _float(text.replace("_", "").lower()) if _FLOAT.fullmatch(text) else text


def is_text_in_yaml_1_1(text: str) -> bool:
    """Whether an unquoted number is text to readers of YAML 1.1, such as PyYAML: 1e-4 needs a point, 1.0e8 a sign."""
    return "e" in text.lower() and isinstance(scalar(text), float) and not _SIGNED.fullmatch(text)


def number(text: str) -> float:
    """A finite number as a flag takes it; `20%` is 0.2.

    Raises:
        TextError: it is none.
    """
    share = text.strip().removesuffix("%").strip()
    value = scalar(share)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TextError(f"{text[:40]!r} is no finite number")
    return value / 100 if text.strip().endswith("%") else float(value)


def whole(text: str, base: int = 10) -> int:
    """An integer of 64 bits.

    Raises:
        TextError: it is larger.
    """
    value = int(text, base) if len(text) < 80 else 1 << 64
    if not -(1 << 63) <= value < 1 << 64:
        raise TextError(f"the number {text[:40]} has more than 64 bits")
    return value


def finite(text: str) -> float:
    """A float that is written in digits.

    Raises:
        TextError: it is larger than any.
    """
    value = float(text)
    if math.isinf(value):
        raise TextError(f"the number {text[:40]} is larger than any float")
    return value


def _integer(digits: str) -> int:
    unsigned = digits.lstrip("+-")
    if ":" in unsigned:
        return int(_sixtieths(digits))
    base = 2 if unsigned.startswith("0b") else 16 if unsigned.startswith("0x") else 8 if unsigned[0] == "0" else 10
    return whole(digits, base)


def _float(digits: str) -> float:
    if digits.endswith((".inf", ".nan")):
        return float(digits.replace(".", ""))
    return _sixtieths(digits) if ":" in digits else finite(digits)


def _sixtieths(digits: str) -> float:
    """`1:30` is 90."""
    parts = digits.lstrip("+-").split(":")
    if len(parts) > 4:
        raise TextError(f"{digits[:40]} is no number: quote it if it is text")
    value = 0.0
    for part in parts:
        value = 60 * value + finite(part)
    return -value if digits.startswith("-") else value
