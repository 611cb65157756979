"""YAML, built from the parser's events without recursion: mappings, lists, scalars, anchors and `<<`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from mismatchctl.texts.scalars import Plain, TextError, scalar

MOST_DEPTH = 64
"""Mappings and lists inside each other."""
MOST_VALUES = 100_000
"""Each as often as aliases repeat it."""

_TAG = "tag:yaml.org,2002:"
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "null": (type(None),)}


@dataclass(frozen=True)
class Scalar:
    """A value of a mapping as it is written: the keys that lead to it, its text, and whether it has quotes."""

    keys: tuple[str, ...]
    text: str
    quoted: bool


def parse_yaml(text: str) -> Any:
    """One YAML document as plain data; None where there is none. All keys are text.

    Raises:
        TextError: it is not YAML, or larger or deeper than settings are.
    """
    return parse_with_scalars(text)[0]


def parse_with_scalars(text: str) -> tuple[Any, list[Scalar]]:
    """The same, with the scalars of the document as they are written, in its order.

    Raises:
        TextError: as `parse_yaml`.
    """
    built = _built(text)
    return built.document, built.scalars


def _built(text: str) -> _Builder:
    builder = _Builder()
    for event in _events(text):
        try:
            builder.take(event)
        except TextError as error:
            raise TextError(str(error), *_place(event.start_mark)) from None
    return builder


def _events(text: str) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "cannot be read"
        raise TextError(problem, *_place(error.problem_mark or error.context_mark)) from None
    except yaml.YAMLError as error:
        raise TextError(str(error)) from None


def _place(mark: Any) -> tuple[int, ...]:
    return () if mark is None else (mark.line + 1, mark.column + 1)


@dataclass
class _Open:
    """A mapping or list that is being read; `key` is what the next value belongs to, `merges`: << in plain."""

    value: Any
    anchor: str | None
    before: int
    key: str | None = None
    merges: bool = False
    merged: list[dict[str, Any]] = field(default_factory=list)

    @property
    def awaits_key(self) -> bool:
        return isinstance(self.value, dict) and self.key is None


class _Builder:
    def __init__(self) -> None:
        self.document: Any = None
        self.scalars: list[Scalar] = []
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._values = 0
        self._documents = 0

    def take(self, event: yaml.Event) -> None:
        """The next event."""
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event.anchor)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._begin(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._end()
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise TextError("a second document begins here: one is read")

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        if self._open and self._open[-1].awaits_key:
            self._key(event.value, merges=event.implicit[0] and event.value == "<<")
            self._anchor(event.anchor, event.value, 1)
            return
        if self._open and isinstance(self._open[-1].value, dict):
            keys = tuple(level.key for level in self._open if level.key is not None)
            self.scalars.append(Scalar(keys, event.value, not event.implicit[0]))
        self._count(1)
        self._add(_value(event), event.anchor, 1)

    def _key(self, key: str, *, merges: bool = False) -> None:
        top = self._open[-1]
        if key in top.value and not merges:
            raise TextError(f"the key {key!r} stands twice in one mapping")
        top.key, top.merges = key, merges

    def _alias(self, name: str | None) -> None:
        if name is None or name not in self._anchors:
            raise TextError(f"*{name} repeats nothing that stands before it")
        value, size = self._anchors[name]
        if self._open and self._open[-1].awaits_key:
            if not isinstance(value, str):
                raise TextError("a key is a word")
            self._key(value)
            return
        self._count(size)
        self._add(value, None, size)

    def _begin(self, event: yaml.CollectionStartEvent) -> None:
        mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag not in (None, "!", f"{_TAG}{'map' if mapping else 'seq'}"):
            raise TextError(f"the tag {_shown(event.tag)} is not read")
        if self._open and self._open[-1].awaits_key:
            raise TextError("a key is a word")
        if len(self._open) == MOST_DEPTH:
            raise TextError("nested too deeply")
        self._open.append(_Open({} if mapping else [], event.anchor, self._values))

    def _end(self) -> None:
        done = self._open.pop()
        for mapping in done.merged:
            done.value = mapping | done.value
        self._add(done.value, done.anchor, self._values - done.before + 1)

    def _count(self, size: int) -> None:
        self._values += size
        if self._values > MOST_VALUES:
            raise TextError(f"more than {MOST_VALUES:,} values")

    def _add(self, value: Any, anchor: str | None, size: int) -> None:
        self._anchor(anchor, value, size)
        if not self._open:
            self.document = value
            return
        top = self._open[-1]
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.merges:
            top.merged += _mappings(value)
        else:
            top.value[top.key] = value
        top.key = None

    def _anchor(self, name: str | None, value: Any, size: int) -> None:
        if name is not None:
            self._anchors[name] = value, size


def _mappings(value: Any) -> list[dict[str, Any]]:
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(item, dict) for item in found):
        raise TextError("<< takes a mapping")
    return found


def _value(event: yaml.ScalarEvent) -> Plain:
    """What a scalar is: by its form, where no tag says it."""
    text: str = event.value
    tag: str | None = event.tag
    if tag is None or tag == "!":
        return scalar(text) if event.implicit[0] else text
    name = tag.removeprefix(_TAG)
    if name == "str":
        return text
    if not tag.startswith(_TAG) or name not in _KINDS:
        raise TextError(f"the tag {_shown(tag)} is not read")
    value = scalar(text)
    if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and name != "bool"):
        raise TextError(f"{text[:40]!r} is not what the tag {_shown(tag)} says")
    return float(value) if isinstance(value, int) and name == "float" else value


def _shown(tag: str) -> str:
    return f"!!{tag.removeprefix(_TAG)}" if tag.startswith(_TAG) else tag
