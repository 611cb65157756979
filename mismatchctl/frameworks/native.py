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
from mismatchctl.frameworks.said import is_same
from mismatchctl.frameworks.verl.factories import CLASS, keys_of
from mismatchctl.texts import TextError, read_data, read_text
from mismatchctl.texts.python_text import python_calls
from mismatchctl.texts.shell_text import looks_like_shell, parse_shell

_SHELL, _DATA = (".sh", ".bash"), (".json", ".toml")


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


@dataclass(frozen=True)
class Written:
    """A configuration as it stands in a file.

    Attributes:
        name: how the correction that it makes is called.
        framework: whose it is, at the version that it was written for.
        keys: all of it, what it includes put in.
    """

    name: str
    framework: Framework
    keys: dict[str, Any]

    def says_the_same(self, other: Written) -> bool:
        """Whether both make the same correction: an example in Python often shows two ways to say it."""
        try:
            ours, theirs = (one.framework.correction(one.keys) for one in (self, other))
        except ConfigError:
            return self.keys == other.keys
        return is_same(ours, theirs)


def read_native(path: str | Path, framework: str = "") -> tuple[Framework, Correction]:
    """The first configuration of a file, and the framework it is of: see `read_configurations`."""
    found = read_configurations(path, framework)[0]
    return found.framework, found.correction


def read_configurations(path: str | Path, framework: str = "") -> list[Configuration]:
    """The configurations of a file in a framework's own keys: one, unless calls in Python make different corrections.

    Args:
        path: YAML, JSON or TOML; a shell script with flags or Hydra overrides; Python that calls verl's class.
        framework: whose configuration it is; its version, or all of it where empty, is what the keys tell.

    Raises:
        ConfigError: the file cannot be read, is of no framework here or of another one, or is rejected there.
    """
    return [_read(Path(path), written) for written in read_written(path, framework)]


def read_written(path: str | Path, framework: str = "") -> list[Written]:
    """What stands in a file, and whose it is: see `read_configurations`."""
    path = Path(path)
    found: list[Written] = []
    for name, keys in _keys_of(path):
        guessed = recognize(keys)
        if guessed is None:
            known = ", ".join(RECOGNIZERS)
            raise ConfigError(
                f"{path}: holds no key of a correction of {known}: say whose it is with --framework; "
                "what mismatchctl writes is a --correction"
            )
        chosen = load_for(keys, framework) if framework else load(guessed)
        if RECOGNIZERS[chosen.name](keys) is None:
            raise ConfigError(f"{path}: is a configuration of {load(guessed).title}, not of {chosen.title}")
        one = Written(name, chosen, chosen.with_included(keys, path.parent))
        if not any(one.says_the_same(other) for other in found):
            found.append(one)
    return found


def _read(path: Path, written: Written) -> Configuration:
    chosen = written.framework
    try:
        found = chosen.correction(written.keys)
    except ConfigError as error:
        message = str(error)
        whose = "" if message.startswith(chosen.title) else f"{chosen.title}: "
        raise ConfigError(f"{path}: {whose}{message}") from None
    about = found.about or f"{path.name}, as {chosen.title} reads it"
    named = found.model_copy(update={"name": written.name, "about": about})
    _check_judgeable(named, path, chosen)
    return Configuration(chosen, named, tuple(".".join(item.place) for item in chosen.unread(written.keys)))


def _keys_of(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The keys of each configuration in a file, whatever the form, under the name of its correction."""
    text, stem = read_text(path), path.stem[:80]
    if path.suffix == ".py" or CLASS in text:
        try:
            calls = python_calls(text, CLASS)
        except TextError as error:
            raise ConfigError(f"{path}: not valid Python: {error}") from None
        if not calls:
            raise ConfigError(f"{path}: calls no {CLASS}: that is what is read of Python")
        try:
            return [(call.function or stem, {"rollout_correction": keys_of(call)}) for call in calls]
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    if path.suffix in _SHELL or (path.suffix not in _DATA and looks_like_shell(text)):
        try:
            return [(stem, parse_shell(text))]
        except TextError as error:
            raise ConfigError(f"{path}: not a shell script: {error}") from None
    return [(stem, mapping_from_file(path))]


def is_yaml(path: Path) -> bool:
    """Whether a file is read as YAML."""
    text = read_text(path)
    return path.suffix not in (*_SHELL, *_DATA, ".py") and CLASS not in text and not looks_like_shell(text)


def mapping_from_file(path: Path) -> dict[str, Any]:
    """The mapping of a YAML, JSON or TOML file.

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
