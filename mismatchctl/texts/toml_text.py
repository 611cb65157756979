"""TOML."""

from __future__ import annotations

import datetime
import re
import sys
from typing import Any

from mismatchctl.texts.errors import TextError

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
