"""Defaults of options from mismatchctl.toml, pyproject.toml and environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatchctl.errors import ConfigError, MismatchctlError, suggestion

VARIABLE_PREFIX = "MISMATCHCTL_"


def read_settings(group: Any) -> dict[str, dict[str, tuple[Any, str]]]:
    """Return {command: {option: (default, origin)}}. The origin is an environment variable, or a file and a key."""
    flags = {verb: {param.name: param for param in command.params} for verb, command in group.commands.items()}
    settings: dict[str, dict[str, tuple[Any, str]]] = {verb: {} for verb in flags}
    for where, verbs, name, value in (*_entries_from_file(flags), *_entries_from_environment(flags)):
        known = {param for verb in verbs for param in flags[verb]}
        if name not in known:
            raise ConfigError(
                f"{where}: unknown option{suggestion(name, known if len(verbs) == 1 else known.union(verbs))}"
            )
        for verb in verbs:
            if name in flags[verb]:
                settings[verb][name] = _convert_value(value, flags[verb][name], where), where
    return settings


def has_settings() -> bool:
    """Return True if a settings file or variable sets a default, or if the file is unreadable and must be reported."""
    try:
        return any(name.startswith(VARIABLE_PREFIX) for name in os.environ) or bool(_find_settings_file()[1])
    except (MismatchctlError, OSError):
        return True


def find_unread_variables(group: Any) -> list[str]:
    """Return the environment variables that begin with MISMATCHCTL_, but do not belong to a command (typos)."""
    prefixes = tuple(f"{VARIABLE_PREFIX}{verb.upper()}_" for verb in group.commands)
    return sorted(name for name in os.environ if name.startswith(VARIABLE_PREFIX) and not name.startswith(prefixes))


SettingEntry = tuple[str, list[str], str, Any]
"""(origin of the setting, commands that it applies to, name of the option, value)."""


def _entries_from_file(flags: Mapping[str, Any]) -> Iterator[SettingEntry]:
    path, data = _find_settings_file()
    for key, value in data.items():  # keys for all commands first, so that the table of a command overrides them
        if not (key in flags and isinstance(value, dict)):
            yield f"{path}: {key}", list(flags), key.replace("-", "_"), value
    for verb in flags:
        table = data.get(verb)
        for key, value in table.items() if isinstance(table, dict) else ():
            yield f"{path}: {verb}.{key}", [verb], key.replace("-", "_"), value


def _entries_from_environment(flags: Mapping[str, Any]) -> Iterator[SettingEntry]:
    variables = sorted((name, text) for name, text in os.environ.items() if name.startswith(VARIABLE_PREFIX))
    for verb in flags:
        prefix = f"{VARIABLE_PREFIX}{verb.upper()}_"
        for variable, text in variables:
            if variable.startswith(prefix) and text:
                yield variable, [verb], variable.removeprefix(prefix).lower(), text


def _convert_value(value: Any, param: Any, where: str) -> Any:
    if not getattr(param, "multiple", False):
        if isinstance(value, (list, dict)):
            raise ConfigError(f"{where}: expected one value, found several")
        return value
    if isinstance(value, str):
        return [value] if value.lstrip().startswith("{") else value.split()
    if isinstance(value, dict):  # column = {train_log_probs = "old_log_probs"}
        return [f"{key}={name}" for key, name in value.items()]
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, list) for item in items):
        raise ConfigError(f"{where}: expected a list of values, found a list of lists")
    return [json.dumps(item) if isinstance(item, dict) else item for item in items]


def _find_settings_file() -> tuple[Path | None, dict[str, Any]]:
    """Return the path and the tables of the nearest settings file, in the working directory or a parent folder."""
    try:
        here = Path.cwd()
    except OSError:  # the working directory was deleted
        return None, {}
    for folder in (here, *here.parents):
        own, project = folder / "mismatchctl.toml", folder / "pyproject.toml"
        if own.is_file():
            return own, _read_tables(own)
        tools = _read_tables(project).get("tool") if project.is_file() else None
        settings = tools.get("mismatchctl") if isinstance(tools, dict) else None
        if isinstance(settings, dict) and settings:
            return project, settings
    return None, {}


def _read_tables(path: Path) -> Any:
    from mismatchctl.io.yaml import read_data  # slow import that most calls do not need

    return read_data(path)
