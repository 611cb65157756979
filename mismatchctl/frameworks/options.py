"""Options of a configuration: found among other keys, read with their defaults, written as they are spelt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.framework import UnreadKey, nearest
from mismatchctl.frameworks.run import Options

Meant = TypeVar("Meant")
Place = tuple[str, ...]
Found = tuple[Place, str, Any]
"""Where an option stands, its name, its value."""
_NEGATED = re.compile(r"--no[-_](.+)", re.DOTALL)


@dataclass(frozen=True)
class Spelling:
    """How a framework spells its options.

    Attributes:
        options: name -> default.
        aliases: its spelling -> name; the first of a name is the one that is written.
        places: of a full configuration, the keys under which options stand; the first is the one that is written.
        signs: what only its configurations have a key like, a dotted place, or one with its value: `loss.type=ipo`.
        shared: options that are blocks in which other things stand too.
    """

    options: Options
    aliases: Mapping[str, str]
    places: tuple[Place, ...]
    signs: str
    shared: tuple[str, ...] = ()

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
                    negated = _NEGATED.fullmatch(str(key)) is not None and isinstance(value, bool)
                    yield (*place, key), name, not value if negated else value

    def name_of(self, key: object) -> str | None:
        """The option that a key spells, as a flag too."""
        for spelt in (str(key), _plain(key)):
            name = self.aliases.get(spelt, spelt)
            if name in self.options:
                return name
        return None

    def _home(self, key: object) -> str:
        """The block that a key outside it belongs in, as a clause; empty if there is none."""
        blocks = [name for name, usual in self.options.items() if isinstance(usual, dict) and _plain(key) in usual]
        return f": it belongs in {self._spelt.get(blocks[0], blocks[0])}" if blocks else ""

    @property
    def _spelt(self) -> dict[str, str]:
        """How an option with another spelling is written: as the first of them."""
        return {name: key for key, name in reversed(list(self.aliases.items()))}

    def recognizes(self, native: Mapping[str, Any]) -> bool:
        """Whether a configuration has a sign."""
        return any(re.fullmatch(self.signs, said) for said in _said(native))

    def unread(self, native: Mapping[str, Any]) -> list[UnreadKey]:
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
                sign = not place and (not known or re.fullmatch(self.signs, _plain(key)) is not None)
                hint = (self._home(key) if place or sign else "") or nearest(str(key), spelt)
                if not place or hint:
                    found.append(UnreadKey((*place, str(key)), hint, refused=sign or bool(hint)))
        return found

    def read(self, native: Mapping[str, Any], title: str) -> Options:
        """All options of a configuration.

        Raises:
            ConfigError: an option that there is not.
        """
        for item in self.unread(native):
            if item.refused:
                hint = item.hint or suggestion(item.key, self.options)
                raise ConfigError(f"{title} has no option {'.'.join(item.place)!r}{hint}")
        made = dict(self.options)
        for place, name, value in self.find(native):
            usual = self.options[name]
            check_flag(value, usual, place, title)
            made[name] = self._block(made[name], name, place, value, title) if isinstance(usual, dict) else value
        return made

    def _block(self, before: Options, name: str, place: Place, value: Any, title: str) -> Options:
        """A block's defaults, with what is given of them."""
        where, usual = ".".join(place), self.options[name]
        if not isinstance(value, Mapping):
            raise ConfigError(f"{title}: {where} takes keys and values, not {value!r}")
        unknown = sorted(str(key) for key in value.keys() - usual.keys()) if usual else []
        for key in unknown:
            if name not in self.shared or nearest(key, usual):
                raise ConfigError(f"{title} has no option {where}.{key}{suggestion(key, usual)}")
        for key, one in value.items():
            check_flag(one, usual.get(key), (*place, str(key)), title)
        return before | {key: one for key, one in value.items() if key not in unknown}

    def written(self, options: Options) -> dict[str, Any]:
        """Options as the framework spells them; those that are null by default and here are left out."""
        spelt = self._spelt
        return {
            spelt.get(name, name): _less(value, self.options.get(name))
            for name, value in options.items()
            if value is not None or self.options.get(name) is not None
        }


def choice(choices: Mapping[str, Meant], options: Options, name: str) -> Meant:
    """What the value of an option stands for.

    Raises:
        ConfigError: it is none of the choices.
    """
    given = options[name]
    if not isinstance(given, str) or given not in choices:
        raise ConfigError(f"{name} takes {', '.join(choices)}, not {given!r}")
    return choices[given]


def check_flag(value: Any, usual: Any, place: Place, title: str) -> None:
    """Refuse text for a flag: frameworks take "false" for true, or for false, each in its own way."""
    if isinstance(usual, bool) and isinstance(value, str):
        raise ConfigError(f"{title}: {'.'.join(place)} takes true or false, not the text {value!r}")


def _less(value: Any, usual: Any) -> Any:
    """Of a block what is not null by default and here."""
    if isinstance(value, Mapping) and isinstance(usual, Mapping):
        return {key: one for key, one in value.items() if one is not None or usual.get(key) is not None}
    return list(value) if isinstance(value, tuple) else value


def _plain(key: object) -> str:
    """A flag as the option that it sets, or with `--no-` takes away; another key as it is."""
    negated = _NEGATED.fullmatch(str(key))
    return (negated[1] if negated else str(key).lstrip("-")).replace("-", "_")


def _said(native: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Every key, its dotted place, and the place with its value."""
    for key, value in native.items():
        place = f"{above}{_plain(key)}"
        yield _plain(key)
        yield place
        if isinstance(value, Mapping):
            yield from _said(value, f"{place}.")
        else:
            yield f"{place}={value}"


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
