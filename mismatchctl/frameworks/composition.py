"""Configurations that consist of several files: Hydra's `defaults:` list, and files that a launch names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatchctl.errors import ConfigError
from mismatchctl.io.yaml import read_data

_MOST_FILES = 64
_MOST_PARENTS = 8
_SUFFIXES = ("", ".yaml", ".yml")
_CHOICE = re.compile(r"(?:override\s+)?(?P<group>[^@]*)(?:@(?P<package>.*))?")


@dataclass
class Composed:
    """A configuration with its parents merged in."""

    keys: dict[str, Any]  # the merged keys
    missing: list[str] = field(default_factory=list)  # files that were not found. Their values are unknown.
    files: list[Path] = field(default_factory=list)  # files that were read


def compose(keys: Mapping[str, Any], folder: Path) -> Composed:
    made = Composed({})
    chosen = [key for key, value in keys.items() if re.search("[/@]", key) and isinstance(value, str)]
    own = {key: value for key, value in keys.items() if key not in chosen}
    if chosen:  # of files for groups, on a command line
        listed = own.get("defaults", [])
        own["defaults"] = [*([listed] if isinstance(listed, str) else listed), *({key: keys[key]} for key in chosen)]
    made.keys = _composed(own, folder, made)
    return made


def _composed(keys: dict[str, Any], folder: Path, made: Composed) -> dict[str, Any]:
    listed = keys.get("defaults")
    if not isinstance(listed, (str, list)):
        return keys
    own = {key: value for key, value in keys.items() if key != "defaults"}
    whole: dict[str, Any] = {}
    for entry in [listed] if isinstance(listed, str) else listed:
        if entry == "_self_":
            continue  # the file's own keys win in all frameworks here
        for name, package in _named(entry):
            found = find_file(name, folder)
            if found is None or len(made.files) >= _MOST_FILES:
                made.missing.append(name)
                continue
            made.files.append(found)
            parent = _read(found)
            inner = _composed(parent, found.parent, made)
            for key in reversed(package):
                inner = {key: inner}
            whole = merge(whole, inner)
    return merge(whole, own)


def _named(entry: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the file names in one entry of `defaults:`, with the place of their content."""
    if isinstance(entry, str):
        name, _, package = entry.partition("@")
        group = name.rpartition("/")[0].strip("./") if not name.endswith((".yaml", ".yml")) else ""
        place = "" if package in ("_here_", "_global_") or name.startswith(".") else package or group
        yield name, tuple(part for part in re.split(r"[./]", place) if part)
    elif isinstance(entry, Mapping):
        for key, value in entry.items():
            choice = _CHOICE.fullmatch(str(key))
            if choice is None or value is None or not isinstance(value, str):
                continue
            group, package = choice["group"].strip("/"), choice["package"]
            place = "" if package in ("_here_", "_global_") else package if package is not None else group
            yield f"{group}/{value}", tuple(part for part in re.split(r"[./]", place) if part)


def find_file(name: str, folder: Path, *, above: bool = False) -> Path | None:
    """Find a file that a configuration names."""
    relative = name.removeprefix("file://")
    parents = list(folder.resolve().parents)[:_MOST_PARENTS] if "/" in relative else []
    folders: Sequence[Path] = [folder, *parents, Path()] if above else [folder]
    if Path(relative).is_absolute():
        folders = [Path("/")]
    for place in folders:
        for suffix in _SUFFIXES:
            candidate = place / f"{relative}{suffix}"
            try:
                if candidate.is_file():
                    return candidate
            except (OSError, ValueError):
                return None
    return None


def _read(path: Path) -> dict[str, Any]:
    data = read_data(path) or {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected keys and values")
    return dict(data)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations: mappings are merged, other values replaced.

    `_override_: true` in a mapping replaces the one below.
    """
    made = dict(below)
    for key, value in above.items():
        before = made.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping) and not value.get("_override_"):
            made[key] = merge(before, value)
        else:
            made[key] = value
    return made
