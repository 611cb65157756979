"""Defaults of flags: a table per verb in a settings file, and above it the environment.

The file is `mismatchctl.toml` or `[tool.mismatchctl]` in the nearest pyproject.toml; in the environment one
writes `MISMATCHCTL_ANALYZE_THREADS=4`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from mismatchctl.errors import ConfigError, suggestion

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


def read_settings(group: Any) -> dict[str, dict[str, Any]]:
    """Defaults of each verb of `group`, by the names of its flags.

    Raises:
        ConfigError: the file is not TOML, or names a verb or a flag that does not exist.
    """
    path, data = _nearest()
    settings: dict[str, dict[str, Any]] = {}
    for verb, flags in data.items():
        if verb not in group.commands or not isinstance(flags, dict):
            raise ConfigError(f"{path}: [{verb}] is no verb{suggestion(verb, group.commands)}")
        known = {param.name for param in group.commands[verb].params}
        settings[verb] = {}
        for flag, value in flags.items():
            name = flag.replace("-", "_")
            if name not in known:
                raise ConfigError(f"{path}: unknown key {verb}.{flag}{suggestion(name, known)}")
            settings[verb][name] = value
    for verb, command in group.commands.items():
        for param in command.params:
            text = os.environ.get(f"MISMATCHCTL_{verb}_{param.name}".upper())
            if text:
                value = text.split() if getattr(param, "multiple", False) else text
                settings.setdefault(verb, {})[param.name] = value
    return settings


def _nearest() -> tuple[Path | None, dict[str, Any]]:
    """The first file from here upwards that has settings, and its tables."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        own, project = folder / "mismatchctl.toml", folder / "pyproject.toml"
        if own.is_file():
            return own, _load(own)
        if project.is_file():
            settings = _load(project).get("tool", {}).get("mismatchctl")
            return (project, settings) if settings else (None, {})
    return None, {}


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None
