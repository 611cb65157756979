"""What frameworks call things: their presets and their column names, one module per framework.

Everything else in the package knows corrections and columns, never who named them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from mismatchctl.correction import Correction
from mismatchctl.correction import presets as generic
from mismatchctl.correction.presets import Preset
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks import peers, slime, verl
from mismatchctl.frameworks.framework import Framework, Loss, Replay
from mismatchctl.frameworks.shelves import SHELVES, load_shelf
from mismatchctl.texts.python_text import Call

__all__ = [
    "DEFAULT_CORRECTIONS",
    "FRAMEWORKS",
    "Framework",
    "Loss",
    "Preset",
    "Replay",
    "column_aliases",
    "load",
    "load_for",
    "preset",
    "presets",
    "recognize",
    "titles",
]

LOADERS: dict[str, Callable[[str], Framework]] = {
    "verl": verl.load,
    "slime": slime.load_slime,
    "miles": slime.load_miles,
}
"""Framework by name, given the version after the @ (empty: the newest)."""


def _slime(native: Mapping[str, Any]) -> str | None:
    return "" if slime.recognizes(native) else None


RECOGNIZERS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "verl": verl.recognize,
    "slime": _slime,
    "miles": _slime,
}
"""By framework: the version that a configuration was written for (empty: any), None where it is of another one."""

FRAMEWORKS: tuple[str, ...] = (*LOADERS, *(shelf.name for shelf, _ in SHELVES))
"""All of them, by name."""

DEFAULT_CORRECTIONS: tuple[str, ...] = ("none", "token_tis", "seq_mis", "geo_rs", "miles-moe-2")
"""Compared when nobody says what to compare: one of each kind."""


PYTHON_CLASSES: dict[str, Callable[[Call], dict[str, Any]]] = {"RolloutCorrectionConfig": verl.keys_of}
"""Classes whose calls say a configuration: the keys of one."""

VERSIONS: dict[str, list[str]] = {
    "verl": [version.name for version in reversed(verl.VERSIONS)],
    "slime": [version.month for version in reversed(slime.VERSIONS) if version.framework == "slime"],
    "miles": [version.month for version in reversed(slime.VERSIONS) if version.framework == "miles"],
}
"""Versions of each framework, the newest first."""


def load(name: str) -> Framework:
    """A framework at a version: `verl`, `verl@2025-11`, `verl@3915`, `slime@2026-01`; without a version the newest.

    Raises:
        ConfigError: there is no such framework or version.
    """
    framework, _, version = name.partition("@")
    if (shelf := load_shelf(framework, version)) is not None:
        return shelf
    if framework not in LOADERS:
        raise ConfigError(f"there is no framework {framework!r}{suggestion(framework, FRAMEWORKS)}")
    return LOADERS[framework](version)


def titles(framework: str) -> list[str]:
    """A framework at each of its versions, the newest first."""
    return [f"{framework}@{version}" for version in VERSIONS.get(framework, ())]


def load_for(native: Mapping[str, Any], name: str) -> Framework:
    """A framework by name, at the version that a configuration was written for where the name says none.

    Raises:
        ConfigError: there is no such framework or version.
    """
    framework, _, version = name.partition("@")
    known = RECOGNIZERS.get(framework)
    return load(f"{framework}@{version or (known(native) if known else None) or ''}".rstrip("@"))


def recognize(native: Mapping[str, Any]) -> str | None:
    """The framework at the version that a configuration in its own keys was written for; None if it is of none here.

    Miles has slime's keys: what could be either is taken for slime's.
    """
    versions = {framework: found(native) for framework, found in RECOGNIZERS.items()}
    return next((f"{name}@{version}".rstrip("@") for name, version in versions.items() if version is not None), None)


@cache
def _by_name() -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for item in (*generic.PRESETS, *verl.PRESETS, *slime.PRESETS):
        if item.name in found:
            raise ValueError(f"two presets are called {item.name}")
        found[item.name] = item
    return found


def presets() -> dict[str, Preset]:
    """All presets by name, the generic ones first, then framework by framework, oldest version first."""
    return dict(_by_name())


def preset(name: str) -> Correction:
    """The correction of a preset.

    Raises:
        ConfigError: there is none of this name.
    """
    known = _by_name()
    if name not in known:
        raise ConfigError(f"there is no preset {name!r}{suggestion(name, known)}")
    return known[name].correction


@cache
def _aliases() -> dict[str, str]:
    merged: dict[str, str] = {}
    for names in (verl.COLUMNS, slime.COLUMNS, *peers.COLUMNS.values()):
        for alias, column in names.items():
            if merged.setdefault(alias, column) != column:
                raise ValueError(f"{alias} would be {merged[alias]} and {column}")
    return merged


def column_aliases() -> dict[str, str]:
    """What frameworks call the columns of the dump contract: their name -> the contract's."""
    return dict(_aliases())
