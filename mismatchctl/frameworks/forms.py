"""The forms in which configurations are written: data, flags and overrides of a shell script, calls in Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mismatchctl.errors import ConfigError
from mismatchctl.frameworks import SHELVES
from mismatchctl.texts import TextError, read_data, read_text
from mismatchctl.texts.python_text import python_calls
from mismatchctl.texts.shell_text import looks_like_shell, parse_shell

Form = Literal["data", "shell", "python"]
_BY_SUFFIX: dict[str, Form] = {".json": "data", ".toml": "data", ".sh": "shell", ".bash": "shell", ".py": "python"}
PYTHON_CLASSES = {name: (shelf.name, keys_of) for shelf in SHELVES for name, keys_of in shelf.classes.items()}
"""Classes whose calls say a configuration: whose, and the keys of one."""
_CALLED = re.compile(rf"^\s*(?:\w+\s*=\s*)?(?:{'|'.join(PYTHON_CLASSES)})[.(]", re.MULTILINE)


def form_of(path: Path) -> Form:
    """What a file holds: as its suffix says, else as its lines begin."""
    if path.suffix in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix]
    text = read_text(path)
    return "python" if _CALLED.search(text) else "shell" if looks_like_shell(text) else "data"


def is_yaml(path: Path) -> bool:
    """Whether a file is read as YAML."""
    return form_of(path) == "data" and path.suffix not in _BY_SUFFIX


@dataclass(frozen=True)
class Said:
    """What stands in a file: the keys of a configuration, whatever the form.

    Attributes:
        name: of the correction that it makes.
        keys: and their values.
        whose: the framework whose class is called; empty where only the keys can tell.
        line: where it begins, counted from 1, or, negated, a branch that it leaves out; 0 where it is all of the file.
        beside: where further branches begin that it takes all.
    """

    name: str
    keys: dict[str, Any]
    whose: str = ""
    line: int = 0
    beside: tuple[int, ...] = ()


def keys_in(path: Path) -> list[Said]:
    """The keys of each configuration in a file.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    form, name = form_of(path), path.stem[:80]
    try:
        if form == "python":
            return _called(path, name)
        if form == "shell":
            return [Said(name, one.keys, line=one.line, beside=one.beside) for one in parse_shell(read_text(path))]
        return [Said(name, _mapping(path))]
    except TextError as error:
        raise ConfigError(f"{path}: not valid {'Python' if form == 'python' else 'shell'}: {error}") from None


def _called(path: Path, name: str) -> list[Said]:
    """What the calls of a framework's class say; each may be called after its function."""
    text = read_text(path)
    calls = [(call, *known) for owner, known in PYTHON_CLASSES.items() for call in python_calls(text, owner)]
    try:
        said = [(call, keys_of(call), whose) for call, whose, keys_of in calls]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    found = [Said(call.function or name, keys, whose, call.line) for call, keys, whose in said if keys is not None]
    if not found:
        classes = ", ".join(PYTHON_CLASSES)
        raise ConfigError(f"{path}: no call of {classes} says a correction: that is what is read of Python")
    return found


def _mapping(path: Path) -> dict[str, Any]:
    data = read_data(path)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected keys and values; name a configuration of a framework")
    return dict(data)
