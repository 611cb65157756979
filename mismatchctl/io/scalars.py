"""Scalars of configurations: parse unquoted words, and resolve OmegaConf interpolations such as `${a.b}`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any


class TextError(ValueError):
    """One sentence: line and column, counted from 1, where they are known, and what is wrong there."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        place = "" if line is None else f"line {line}, column {column}: "
        super().__init__(place + " ".join(problem.split()))


PlainValue = str | int | float | bool | None

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
_WORD_VALUES: dict[str, bool | None] = {
    spelt: value
    for value, words in {True: ("yes", "true", "on"), False: ("no", "false", "off"), None: ("null",)}.items()
    for word in words
    for spelt in (word, word.capitalize(), word.upper())
} | {"~": None, "": None}


def parse_scalar(text: str) -> PlainValue:
    """What an unquoted scalar of YAML is.

    Raises:
        TextError: a number that no float, or no integer of 64 bits, holds.
    """
    if text in _WORD_VALUES:
        return _WORD_VALUES[text]
    if _INTEGER.fullmatch(text):
        return _parse_yaml_integer(text.replace("_", ""))
    return _parse_yaml_float(text.replace("_", "").lower()) if _FLOAT.fullmatch(text) else text


def is_text_in_yaml_1_1(text: str) -> bool:
    """Whether an unquoted number is text to readers of YAML 1.1, such as PyYAML: 1e-4 needs a point, 1.0e8 a sign."""
    return "e" in text.lower() and isinstance(parse_scalar(text), float) and not _SIGNED.fullmatch(text)


def parse_number(text: str) -> float:
    """A finite number as a flag takes it; `20%` is 0.2.

    Raises:
        TextError: it is none.
    """
    share = text.strip().removesuffix("%").strip()
    value = parse_scalar(share)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TextError(f"{text[:40]!r} is no finite number")
    return value / 100 if text.strip().endswith("%") else float(value)


def parse_integer(text: str, base: int = 10) -> int:
    """An integer of 64 bits.

    Raises:
        TextError: it is larger.
    """
    value = int(text, base) if len(text) < 80 else 1 << 64
    if not -(1 << 63) <= value < 1 << 64:
        raise TextError(f"the number {text[:40]} has more than 64 bits")
    return value


def parse_float(text: str) -> float:
    """A float that is written in digits.

    Raises:
        TextError: it is larger than any.
    """
    value = float(text)
    if math.isinf(value):
        raise TextError(f"the number {text[:40]} is larger than any float")
    return value


def _parse_yaml_integer(digits: str) -> int:
    unsigned = digits.lstrip("+-")
    if ":" in unsigned:
        return int(_parse_sexagesimal(digits))
    base = 2 if unsigned.startswith("0b") else 16 if unsigned.startswith("0x") else 8 if unsigned[0] == "0" else 10
    return parse_integer(digits, base)


def _parse_yaml_float(digits: str) -> float:
    if digits.endswith((".inf", ".nan")):
        return float(digits.replace(".", ""))
    return _parse_sexagesimal(digits) if ":" in digits else parse_float(digits)


def _parse_sexagesimal(digits: str) -> float:
    """`1:30` is 90."""
    parts = digits.lstrip("+-").split(":")
    if len(parts) > 4:
        raise TextError(f"{digits[:40]} is no number: quote it if it is text")
    value = 0.0
    for part in parts:
        value = 60 * value + parse_float(part)
    return -value if digits.startswith("-") else value


_POINTER = re.compile(r"\$\{([^${}]*)\}")
_RESOLVER = re.compile(r"oc\.(env|select):\s*([^,]*?)\s*(?:,(.*))?", re.DOTALL)
_MOST_STEPS = 8
"""Pointers to pointers, and pointers inside pointers, that are followed."""
_MOST_CHARACTERS = 1000
"""Of a text with pointers, and with what they point to put in: a setting is shorter."""
_MOST_DEPTH = 64
"""Keys above a value that is looked at: no setting lies deeper."""
_MISSING = object()


def resolve_interpolations(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys and values with what is pointed to put in; a pointer to nothing in them stays as it is written.

    The environment is not looked at, the one of the training is another: `oc.env` is its default. A block that is
    pointed to is taken as it stands.
    """
    found: dict[str, Any] = _resolve_value(keys, (), keys)
    return found


def _resolve_value(value: Any, place: tuple[str, ...], root: Mapping[str, Any]) -> Any:
    if len(place) > _MOST_DEPTH:
        return value
    if isinstance(value, Mapping):
        return {key: _resolve_value(one, (*place, str(key)), root) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolve_value(one, (*place, str(number)), root) for number, one in enumerate(value)]
    return _resolve_text(value, place, root) if isinstance(value, str) and "${" in value else value


def _resolve_text(text: str, place: tuple[str, ...], root: Mapping[str, Any]) -> Any:
    """What a text with pointers stands for: a value where it is one pointer, else text with values in it."""

    def put_in(pointer: re.Match[str]) -> str:
        found = _resolve_pointer(pointer[1].strip(), place, root)
        plain = found is not _MISSING and not isinstance(found, (Mapping, list))
        return str(found)[:_MOST_CHARACTERS] if plain else pointer[0]

    for _ in range(_MOST_STEPS):
        if whole := _POINTER.fullmatch(text):
            found = _resolve_pointer(whole[1].strip(), place, root)
            if found is _MISSING:
                return text
            if not isinstance(found, str):
                return found
            text = found
        elif (
            len(text) <= _MOST_CHARACTERS
            and len(inside := _POINTER.sub(put_in, text)) <= _MOST_CHARACTERS
            and inside != text
        ):
            text = inside
        else:
            break
    return text


def _resolve_pointer(where: str, place: tuple[str, ...], root: Mapping[str, Any]) -> Any:
    resolver = _RESOLVER.fullmatch(where)
    if resolver is None:
        return _find_value(where, place, root)
    found = _find_value(resolver[2], (), root) if resolver[1] == "select" else _MISSING
    if found is not _MISSING:
        return found
    return _MISSING if resolver[3] is None else parse_scalar(resolver[3].strip().strip("'\""))


def _find_value(where: str, place: tuple[str, ...], root: Mapping[str, Any]) -> Any:
    """What stands at dotted keys: from the root, or, behind dots, from as many blocks outside the value's own place."""
    keys = where.lstrip(".")
    up = len(where) - len(keys)
    found: Any = root
    for key in (*(place[: max(len(place) - up, 0)] if up else ()), *keys.split(".")):
        if not isinstance(found, Mapping) or key not in found:
            return _MISSING
        found = found[key]
    return found
