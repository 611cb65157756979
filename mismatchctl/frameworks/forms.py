"""The forms in which configurations are written: data, flags and overrides of a shell script, calls in Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mismatchctl.errors import ConfigError
from mismatchctl.frameworks import SHELVES
from mismatchctl.texts import TextError, read_data, read_text
from mismatchctl.texts.python_text import python_calls
from mismatchctl.texts.shell_text import looks_like_shell, parse_shell

Form = Literal["data", "shell", "python"]
_BY_SUFFIX: dict[str, Form] = {".json": "data", ".toml": "data", ".sh": "shell", ".bash": "shell", ".py": "python"}
PYTHON_CLASSES = {name: keys_of for shelf in SHELVES for name, keys_of in shelf.classes.items()}
"""Classes whose calls say a configuration: the keys of one."""
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


def keys_in(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The keys of each configuration in a file, whatever the form, under the name of its correction.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    form, name = form_of(path), path.stem[:80]
    try:
        if form == "python":
            return _called(path, name)
        return [(name, parse_shell(read_text(path)) if form == "shell" else _mapping(path))]
    except TextError as error:
        raise ConfigError(f"{path}: not valid {'Python' if form == 'python' else 'shell'}: {error}") from None


def _called(path: Path, name: str) -> list[tuple[str, dict[str, Any]]]:
    """What the calls of a framework's class say; each may be called after its function."""
    text = read_text(path)
    calls = [(call, keys_of) for owner, keys_of in PYTHON_CLASSES.items() for call in python_calls(text, owner)]
    try:
        said = [(call.function or name, keys_of(call)) for call, keys_of in calls]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    found = [(called, keys) for called, keys in said if keys is not None]
    if not found:
        raise ConfigError(f"{path}: calls no {' or '.join(PYTHON_CLASSES)}: that is what is read of Python")
    return found


def _mapping(path: Path) -> dict[str, Any]:
    data = read_data(path)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected keys and values; name a configuration of a framework")
    return dict(data)
