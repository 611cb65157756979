"""Shell scripts that start a training: their flags (`--name value`) and Hydra overrides (`a.b=value`), nothing else.

Nothing is executed. Variables that the text itself sets are put in; others stay as they are written.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from mismatchctl.texts.errors import TextError
from mismatchctl.texts.scalars import scalar

_FLAG_LINE = re.compile(r"^\s*(?:[A-Za-z_]\w*=\(|--[A-Za-z][\w-]*(?:[\s=]|$))", re.MULTILINE)
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=([^(].*|)", re.DOTALL)
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")


def looks_like_shell(text: str) -> bool:
    """Whether a text has a line that begins with a flag, or with an array of them."""
    return _FLAG_LINE.search(text) is not None


def parse_shell(text: str) -> dict[str, Any]:
    """Flags as `--name`: value (True without one), and overrides as nested keys.

    Raises:
        TextError: a quote is not closed, or a key is given a value and keys below it.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise TextError(str(error).lower()) from None
    found: dict[str, Any] = {}
    variables: dict[str, str] = {}
    flag = ""
    for word in words:
        closes, word = word.endswith(")") and "(" not in word, word.removesuffix(")") if word != "(" else word
        given = _USED.sub(lambda used: variables.get(used[1], used[0]), word)
        if named := _FLAG.fullmatch(given):
            flag = f"--{named[1]}"
            found[flag] = True if named[2] is None else scalar(named[2])
            flag = flag if named[2] is None else ""
        elif override := _OVERRIDE.fullmatch(given):
            _put(found, override[1].split("."), scalar(override[2]))
            flag = ""
        elif variable := _VARIABLE.fullmatch(given):
            variables[variable[1]], flag = variable[2], ""
        elif flag and given:
            found[flag] = scalar(given) if found[flag] is True else found[flag]
        flag = "" if closes else flag
    return found


def _put(found: dict[str, Any], keys: list[str], value: Any) -> None:
    level = found
    for key in keys[:-1]:
        level = level.setdefault(key, {})
        if not isinstance(level, dict):
            raise TextError(f"{'.'.join(keys)} stands below a key that has a value")
    level[keys[-1]] = value
