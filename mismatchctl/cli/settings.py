"""Defaults of flags: a settings file, and above it the environment.

The file is `mismatchctl.toml`, or `[tool.mismatchctl]` of a pyproject.toml: the nearest one, from the current folder
upwards. A key on top is for every verb that has such a flag, a table `[analyze]` for that verb alone. In the
environment one writes `MISMATCHCTL_ANALYZE_THREADS=4`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatchctl.errors import ConfigError, MismatchctlError, suggestion
from mismatchctl.texts import read_data

Settings = dict[str, dict[str, Any]]
"""Defaults by verb and flag."""
PREFIX = "MISMATCHCTL_"


def read_settings(group: Any) -> Settings:
    """Defaults of each verb of `group`, by the names of its flags.

    Raises:
        ConfigError: the file is not TOML, or names a verb or a flag that does not exist.
    """
    chosen = settings_and_places(group)
    return {verb: {flag: value for flag, (value, _) in of_verb.items()} for verb, of_verb in chosen.items()}


def settings_and_places(group: Any) -> dict[str, dict[str, tuple[Any, str]]]:
    """The same, each with where it comes from: a variable, or a file and the key in it."""
    flags = {verb: {param.name: param for param in command.params} for verb, command in group.commands.items()}
    settings: dict[str, dict[str, tuple[Any, str]]] = {verb: {} for verb in flags}
    for where, verbs, name, value in (*_of_file(flags), *_of_environment(flags)):
        known = {param for verb in verbs for param in flags[verb]}
        if name not in known:
            raise ConfigError(
                f"{where}: no such flag{suggestion(name, known if len(verbs) == 1 else known.union(verbs))}"
            )
        for verb in verbs:
            if name in flags[verb]:
                settings[verb][name] = _fitting(value, flags[verb][name], where), where
    return settings


def any_settings() -> bool:
    """Whether a file or a variable sets anything, or may: one that cannot be read has an error to be told."""
    try:
        return any(name.startswith(PREFIX) for name in os.environ) or bool(_nearest()[1])
    except (MismatchctlError, OSError):
        return True


def unread_variables(group: Any) -> list[str]:
    """Variables that look like settings and name no verb, so that nothing reads them."""
    prefixes = tuple(f"{PREFIX}{verb.upper()}_" for verb in group.commands)
    return sorted(name for name in os.environ if name.startswith(PREFIX) and not name.startswith(prefixes))


Entry = tuple[str, list[str], str, Any]
"""(where it stands, verbs, flag, value)."""


def _of_file(flags: Mapping[str, Any]) -> Iterator[Entry]:
    path, data = _nearest()
    for key, value in data.items():  # general keys first, so that a verb's own prevail
        if not (key in flags and isinstance(value, dict)):
            yield f"{path}: {key}", list(flags), key.replace("-", "_"), value
    for verb in flags:
        table = data.get(verb)
        for key, value in table.items() if isinstance(table, dict) else ():
            yield f"{path}: {verb}.{key}", [verb], key.replace("-", "_"), value


def _of_environment(flags: Mapping[str, Any]) -> Iterator[Entry]:
    variables = sorted((name, text) for name, text in os.environ.items() if name.startswith(PREFIX))
    for verb in flags:
        prefix = f"{PREFIX}{verb.upper()}_"
        for variable, text in variables:
            if variable.startswith(prefix) and text:
                yield variable, [verb], variable.removeprefix(prefix).lower(), text


def _fitting(value: Any, param: Any, where: str) -> Any:
    """A value as the flag takes it: several where it repeats, mappings as text."""
    if not getattr(param, "multiple", False):
        if isinstance(value, (list, dict)):
            raise ConfigError(f"{where}: takes one value, not several")
        return value
    if isinstance(value, str):
        return [value] if value.lstrip().startswith("{") else value.split()
    if isinstance(value, dict):  # columns = {train_log_probs = "old_log_probs"}
        return [f"{key}={name}" for key, name in value.items()]
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, list) for item in items):
        raise ConfigError(f"{where}: takes a list of values, not of lists")
    return [json.dumps(item) if isinstance(item, dict) else item for item in items]


def _nearest() -> tuple[Path | None, dict[str, Any]]:
    """The first file from here upwards that has settings, and its tables."""
    try:
        here = Path.cwd()
    except OSError:  # the folder is gone
        return None, {}
    for folder in (here, *here.parents):
        own, project = folder / "mismatchctl.toml", folder / "pyproject.toml"
        if own.is_file():
            return own, read_data(own)
        tools = read_data(project).get("tool") if project.is_file() else None
        settings = tools.get("mismatchctl") if isinstance(tools, dict) else None
        if isinstance(settings, dict) and settings:
            return project, settings
    return None, {}
