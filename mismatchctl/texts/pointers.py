"""Values of a configuration that point to others, in OmegaConf's words: `${a.b}`, `${.b}`, `${oc.env:NAME,default}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mismatchctl.texts.scalars import scalar

_POINTER = re.compile(r"\$\{([^${}]*)\}")
_RESOLVER = re.compile(r"oc\.(env|select):\s*([^,]*?)\s*(?:,(.*))?", re.DOTALL)
_MOST_STEPS = 8
"""Pointers to pointers, and pointers inside pointers, that are followed."""
_LONGEST = 1000
"""Of a text with pointers, and with what they point to put in: a setting is shorter."""
_DEEPEST = 64
"""Keys above a value that is looked at: no setting lies deeper."""
_ABSENT = object()


def resolved(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys and values with what is pointed to put in; a pointer to nothing in them stays as it is written.

    The environment is not looked at, the one of the training is another: `oc.env` is its default. A block that is
    pointed to is taken as it stands.
    """
    found: dict[str, Any] = _resolved(keys, (), keys)
    return found


def _resolved(value: Any, place: tuple[str, ...], root: Mapping[str, Any]) -> Any:
    if len(place) > _DEEPEST:
        return value
    if isinstance(value, Mapping):
        return {key: _resolved(one, (*place, str(key)), root) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolved(one, (*place, str(number)), root) for number, one in enumerate(value)]
    return _followed(value, place, root) if isinstance(value, str) and "${" in value else value


def _followed(text: str, place: tuple[str, ...], root: Mapping[str, Any]) -> Any:
    """What a text with pointers stands for: a value where it is one pointer, else text with values in it."""

    def put_in(pointer: re.Match[str]) -> str:
        found = _pointed(pointer[1].strip(), place, root)
        plain = found is not _ABSENT and not isinstance(found, (Mapping, list))
        return str(found)[:_LONGEST] if plain else pointer[0]

    for _ in range(_MOST_STEPS):
        if whole := _POINTER.fullmatch(text):
            found = _pointed(whole[1].strip(), place, root)
            if found is _ABSENT:
                return text
            if not isinstance(found, str):
                return found
            text = found
        elif len(text) <= _LONGEST and len(inside := _POINTER.sub(put_in, text)) <= _LONGEST and inside != text:
            text = inside
        else:
            break
    return text


def _pointed(where: str, place: tuple[str, ...], root: Mapping[str, Any]) -> Any:
    resolver = _RESOLVER.fullmatch(where)
    if resolver is None:
        return _at(where, place, root)
    found = _at(resolver[2], (), root) if resolver[1] == "select" else _ABSENT
    if found is not _ABSENT:
        return found
    return _ABSENT if resolver[3] is None else scalar(resolver[3].strip().strip("'\""))


def _at(where: str, place: tuple[str, ...], root: Mapping[str, Any]) -> Any:
    """What stands at dotted keys: from the root, or, behind dots, from as many blocks outside the value's own place."""
    keys = where.lstrip(".")
    up = len(where) - len(keys)
    found: Any = root
    for key in (*(place[: max(len(place) - up, 0)] if up else ()), *keys.split(".")):
        if not isinstance(found, Mapping) or key not in found:
            return _ABSENT
        found = found[key]
    return found
