"""Corrections from YAML or TOML files and plain mappings, with errors that say what was meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mismatchctl.correction.model import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.texts import read_data
from mismatchctl.validation import explained

CORRECTION_SUFFIXES = (".yaml", ".yml", ".toml")


def correction_from_mapping(data: Mapping[str, Any], where: str = "correction") -> Correction:
    """Validate plain data as a Correction.

    Raises:
        ConfigError: one line per problem, each with the path of the key, and a near name for an unknown key.
    """
    try:
        return Correction.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(f"{where}: {explained(error, Correction)}") from None


def corrections_from_file(path: str | Path) -> list[Correction]:
    """Read one Correction, or a list of them (a top-level list, or a `corrections` key), from YAML or TOML."""
    path = Path(path)
    data = read_data(path)
    items = data.get("corrections", data) if isinstance(data, dict) else data
    items = items if isinstance(items, list) else [items]
    for item in items:
        if not isinstance(item, dict):
            raise ConfigError(f"{path}: expected a mapping with weight and gates, found {type(item).__name__}")
    named = [{"name": path.stem if len(items) == 1 else f"{path.stem}-{i + 1}", **item} for i, item in enumerate(items)]
    return [correction_from_mapping(item, str(path)) for item in named]
