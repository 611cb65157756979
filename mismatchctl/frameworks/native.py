"""Configuration files as frameworks write them, read as Corrections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks import RECOGNIZERS, load, load_for, recognize
from mismatchctl.frameworks.framework import Framework
from mismatchctl.texts import read_data


@dataclass(frozen=True)
class Configuration:
    """A configuration as its framework reads it.

    Attributes:
        framework: whose it is, at the version that it was written for.
        correction: what it does.
        unread: its keys that nothing here reads, dotted.
    """

    framework: Framework
    correction: Correction
    unread: tuple[str, ...]


def read_native(path: str | Path, framework: str = "") -> tuple[Framework, Correction]:
    """A configuration in a framework's own keys, and the framework it is of: see `read_configuration`."""
    found = read_configuration(path, framework)
    return found.framework, found.correction


def read_configuration(path: str | Path, framework: str = "") -> Configuration:
    """A configuration in a framework's own keys.

    Args:
        path: YAML or JSON.
        framework: whose configuration it is; its version, or all of it where empty, is what the keys tell.

    Raises:
        ConfigError: the file cannot be read, is of no framework here or of another one, or is rejected there.
    """
    path = Path(path)
    native = mapping_from_file(path)
    guessed = recognize(native)
    if guessed is None:
        known = ", ".join(RECOGNIZERS)
        raise ConfigError(f"{path}: holds no key of a correction of {known}; what mismatchctl writes is a --correction")
    chosen = load_for(native, framework) if framework else load(guessed)
    if RECOGNIZERS[chosen.name](native) is None:
        raise ConfigError(f"{path}: is a configuration of {load(guessed).title}, not of {chosen.title}")
    try:
        found = chosen.correction(native)
    except ConfigError as error:
        message = str(error)
        whose = "" if message.startswith(chosen.title) else f"{chosen.title}: "
        raise ConfigError(f"{path}: {whose}{message}") from None
    about = found.about or f"{path.name}, as {chosen.title} reads it"
    named = found.model_copy(update={"name": path.stem[:80], "about": about})
    _check_judgeable(named, path, chosen)
    return Configuration(chosen, named, tuple(".".join(item.place) for item in chosen.unread(native)))


def mapping_from_file(path: Path) -> dict[str, Any]:
    """The mapping of a YAML or JSON file.

    Raises:
        ConfigError: there is none.
    """
    data = read_data(path)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected keys and values; name a configuration of verl, slime or Miles")
    return dict(data)


def _check_judgeable(correction: Correction, path: Path, framework: Framework) -> None:
    """Refuse a bound that holds nothing: frameworks take that, a Result does not."""
    try:
        Correction.model_validate(correction.model_dump())
    except ValidationError as error:
        why = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"{path}: {framework.title} accepts this, but it can hold nothing: {why}") from None
