"""Options of a configuration: found among other keys, read with their defaults, written as they are spelt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.run import Options
from mismatchctl.frameworks.unread import Unread, nearest

Place = tuple[str, ...]
Found = tuple[Place, str, Any]
"""Where an option stands, its name, its value."""


@dataclass(frozen=True)
class Spelling:
    """How a framework spells its options.

    Attributes:
        options: name -> default.
        aliases: its spelling -> name; the first of a name is the one that is written.
        places: of a full configuration, the keys under which options stand; the first is the one that is written.
        signs: what only its configurations have a key like.
    """

    options: Options
    aliases: Mapping[str, str]
    places: tuple[Place, ...]
    signs: str

    def levels(self, native: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
        """What may hold options: a configuration's root, a block alone, one of a full configuration."""
        blocks = (place[start:] for place in self.places for start in range(len(place)))
        for place in dict.fromkeys(((), *blocks)):
            inner: Any = native
            for key in place:
                inner = inner.get(key) if isinstance(inner, Mapping) else None
            if isinstance(inner, Mapping):
                yield place, inner

    def find(self, native: Mapping[str, Any]) -> Iterator[Found]:
        """The options of a configuration."""
        for place, inner in self.levels(native):
            for key, value in inner.items():
                name = self.name_of(key)
                if name is not None:
                    yield (*place, key), name, value

    def name_of(self, key: object) -> str | None:
        """The option that a key spells, as a flag too."""
        text = str(key)
        for spelt in (text, text.lstrip("-").replace("-", "_")):
            name = self.aliases.get(spelt, spelt)
            if name in self.options:
                return name
        return None

    def recognizes(self, native: Mapping[str, Any]) -> bool:
        """Whether a configuration has a key that is a sign."""
        return any(re.fullmatch(self.signs, key.lstrip("-").replace("-", "_")) for key in _keys(native))

    def unread(self, native: Mapping[str, Any]) -> list[Unread]:
        """Keys that are no option.

        Of a configuration that has no sign, all at its root are refused; of another one those that look like an option.
        In a block, whose other keys are many, only what is misspelt is one of them.
        """
        found, known = [], self.recognizes(native)
        blocks = {key for place in self.places for key in place}
        spelt = [*self.options, *self.aliases]
        for place, inner in self.levels(native):
            for key in inner:
                if self.name_of(key) is not None or key in blocks:
                    continue
                hint = nearest(str(key), spelt)
                sign = not place and (not known or re.fullmatch(self.signs, str(key).lstrip("-")) is not None)
                if not place or hint:
                    found.append(Unread((*place, str(key)), hint, refused=sign or bool(hint)))
        return found

    def read(self, native: Mapping[str, Any], title: str) -> Options:
        """All options of a configuration.

        Raises:
            ConfigError: an option that there is not.
        """
        for item in self.unread(native):
            if item.refused:
                raise ConfigError(f"{title} has no option {item.key!r}{suggestion(item.key, self.options)}")
        made = dict(self.options)
        for place, name, value in self.find(native):
            usual = self.options[name]
            if isinstance(usual, dict) and isinstance(value, Mapping):
                if unknown := sorted(set(value) - set(usual)) if usual else []:
                    near = suggestion(unknown[0], usual)
                    raise ConfigError(f"{title} has no option {'.'.join(place)}.{unknown[0]}{near}")
                value = made[name] | dict(value)
            made[name] = value
        return made

    def written(self, options: Options) -> dict[str, Any]:
        """Options as the framework spells them; those that are null by default and here are left out."""
        spelt: dict[str, str] = {}
        for key, name in self.aliases.items():
            spelt.setdefault(name, key)
        return {
            spelt.get(name, name): _less(value, self.options.get(name))
            for name, value in options.items()
            if value is not None or self.options.get(name) is not None
        }


def _less(value: Any, usual: Any) -> Any:
    """Of a block what is not null by default and here."""
    if isinstance(value, Mapping) and isinstance(usual, Mapping):
        return {key: one for key, one in value.items() if one is not None or usual.get(key) is not None}
    return list(value) if isinstance(value, tuple) else value


def _keys(native: Mapping[str, Any]) -> Iterator[str]:
    for key, value in native.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from _keys(value)


def merged(parts: Iterable[Options]) -> Options:
    """Options of several parts together: blocks are merged, lists joined."""
    made: Options = {}
    for part in parts:
        for name, value in part.items():
            before = made.get(name)
            if isinstance(before, dict) and isinstance(value, dict):
                value = before | {key: one for key, one in value.items() if one is not None or key not in before}
            elif isinstance(before, list) and isinstance(value, list):
                value = before + value
            made[name] = value
    return made
