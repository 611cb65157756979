"""Strict JSON, and TOML, as plain data."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from mismatchctl.texts.scalars import TextError, finite, whole


def parse_json(text: str, *, as_python_writes: bool = False, number: Callable[[str], Any] | None = None) -> Any:
    """JSON of any size: no NaN, no number that overflows, no key twice in one object.

    Args:
        text: the JSON.
        as_python_writes: let NaN, Infinity and the like pass, as in logs and dumps that Python's `json` wrote.
        number: what makes a number of its digits then, where that is not Python.

    Raises:
        TextError: it is not JSON.
    """
    try:
        return json.loads(text, parse_float=number, parse_int=number) if as_python_writes else _strict(text)
    except json.JSONDecodeError as error:
        raise TextError(error.msg, error.lineno, error.colno) from None
    except RecursionError:
        raise TextError("nested too deeply") from None
    except TextError:
        raise
    except ValueError:  # Python's limit of digits
        raise TextError("a number has too many digits") from None


def _strict(text: str) -> Any:
    return json.loads(text, parse_constant=_refused, parse_float=finite, parse_int=whole, object_pairs_hook=_keys_once)


def _refused(text: str) -> Any:
    raise TextError(f"{text} is no number of JSON")


def _keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise TextError(f"the key {twice!r} stands twice in one object")
    return found


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PLACE = re.compile(r"(.*) \(at line (\d+), column (\d+)\)", re.DOTALL)


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as plain data; dates and times are text.

    Raises:
        TextError: it is not TOML.
    """
    try:
        found: dict[str, Any] = _plain(tomllib.loads(text))
    except RecursionError:
        raise TextError("nested too deeply") from None
    except ValueError as error:
        placed = _PLACE.fullmatch(str(error))
        if placed is None:
            raise TextError(str(error)) from None
        raise TextError(placed[1], int(placed[2]), int(placed[3])) from None
    return found


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_plain(value) for value in data]
    if isinstance(data, int) and not -(1 << 63) <= data < 1 << 64:
        raise TextError(f"the number {hex(data)[:40]} has more than 64 bits")
    return data.isoformat() if isinstance(data, (datetime.date, datetime.time)) else data
