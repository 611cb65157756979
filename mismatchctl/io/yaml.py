"""YAML, TOML, JSON and INI files read as data, with the place of each value."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mismatchctl.errors import ConfigError
from mismatchctl.io.files import read_regular_file
from mismatchctl.io.scalars import (
    PlainValue,
    TextError,
    parse_float,
    parse_integer,
    parse_scalar,
)


def parse_json(text: str, *, as_python_writes: bool = False, number: Callable[[str], Any] | None = None) -> Any:
    """JSON of any size: no NaN, no number that overflows, no key twice in one object.

    Args:
        text: the JSON.
        as_python_writes: let NaN, Infinity and the like pass, as in logs and dumps that Python's `json` wrote.
        number: what makes a number of its digits then, where that is not Python.

    Raises:
        TextError: it is not JSON.
    """
    try:
        return json.loads(text, parse_float=number, parse_int=number) if as_python_writes else _parse_strict_json(text)
    except json.JSONDecodeError as error:
        raise TextError(error.msg, error.lineno, error.colno) from None
    except RecursionError:
        raise TextError("nested too deeply") from None
    except TextError:
        raise
    except ValueError:  # Python's limit of digits
        raise TextError("a number has too many digits") from None


def _parse_strict_json(text: str) -> Any:
    return json.loads(
        text,
        parse_constant=_refuse_constant,
        parse_float=parse_float,
        parse_int=parse_integer,
        object_pairs_hook=_check_unique_keys,
    )


def _refuse_constant(text: str) -> Any:
    raise TextError(f"{text} is no number of JSON")


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise TextError(f"the key {twice!r} stands twice in one object")
    return found


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PLACE_PATTERN = re.compile(r"(.*) \(at line (\d+), column (\d+)\)", re.DOTALL)


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as plain data; dates and times are text.

    Raises:
        TextError: it is not TOML.
    """
    try:
        found: dict[str, Any] = _to_plain(tomllib.loads(text))
    except RecursionError:
        raise TextError("nested too deeply") from None
    except ValueError as error:
        placed = _PLACE_PATTERN.fullmatch(str(error))
        if placed is None:
            raise TextError(str(error)) from None
        raise TextError(placed[1], int(placed[2]), int(placed[3])) from None
    return found


def _to_plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _to_plain(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_to_plain(value) for value in data]
    if isinstance(data, int) and not -(1 << 63) <= data < 1 << 64:
        raise TextError(f"the number {hex(data)[:40]} has more than 64 bits")
    return data.isoformat() if isinstance(data, (datetime.date, datetime.time)) else data


MOST_DEPTH = 64
"""Mappings and lists inside each other."""
MOST_VALUES = 100_000
"""Each as often as aliases repeat it."""

_TAG_PREFIX = "tag:yaml.org,2002:"
_TAG_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "null": (type(None),)}


@dataclass(frozen=True)
class YamlScalar:
    """A value of a mapping as it is written: the keys that lead to it, its text, and whether it has quotes."""

    keys: tuple[str, ...]
    text: str
    quoted: bool


def parse_yaml(text: str) -> Any:
    """One YAML document as plain data; None where there is none. All keys are text.

    Raises:
        TextError: it is not YAML, or larger or deeper than settings are.
    """
    return parse_yaml_with_scalars(text)[0]


def parse_yaml_with_scalars(text: str) -> tuple[Any, list[YamlScalar]]:
    """The same, with the scalars of the document as they are written, in its order.

    Raises:
        TextError: as `parse_yaml`.
    """
    built = _build(text)
    return built.document, built.scalars


def _build(text: str) -> _YamlBuilder:
    builder = _YamlBuilder()
    for event in _parse_events(text):
        try:
            builder.take(event)
        except TextError as error:
            raise TextError(str(error), *_line_and_column(event.start_mark)) from None
    return builder


def _parse_events(text: str) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "cannot be read"
        raise TextError(problem, *_line_and_column(error.problem_mark or error.context_mark)) from None
    except yaml.YAMLError as error:
        raise TextError(str(error)) from None


def _line_and_column(mark: Any) -> tuple[int, ...]:
    return () if mark is None else (mark.line + 1, mark.column + 1)


@dataclass
class _OpenCollection:
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


class _YamlBuilder:
    def __init__(self) -> None:
        self.document: Any = None
        self.scalars: list[YamlScalar] = []
        self._open: list[_OpenCollection] = []
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
            self.scalars.append(YamlScalar(keys, event.value, not event.implicit[0]))
        self._count(1)
        self._add(_scalar_value(event), event.anchor, 1)

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
        if event.tag not in (None, "!", f"{_TAG_PREFIX}{'map' if mapping else 'seq'}"):
            raise TextError(f"the tag {_format_tag(event.tag)} is not read")
        if self._open and self._open[-1].awaits_key:
            raise TextError("a key is a word")
        if len(self._open) == MOST_DEPTH:
            raise TextError("nested too deeply")
        self._open.append(_OpenCollection({} if mapping else [], event.anchor, self._values))

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
            top.merged += _merge_mappings(value)
        else:
            top.value[top.key] = value
        top.key = None

    def _anchor(self, name: str | None, value: Any, size: int) -> None:
        if name is not None:
            self._anchors[name] = value, size


def _merge_mappings(value: Any) -> list[dict[str, Any]]:
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(item, dict) for item in found):
        raise TextError("<< takes a mapping")
    return found


def _scalar_value(event: yaml.ScalarEvent) -> PlainValue:
    """What a scalar is: by its form, where no tag says it."""
    text: str = event.value
    tag: str | None = event.tag
    if tag is None or tag == "!":
        return parse_scalar(text) if event.implicit[0] else text
    name = tag.removeprefix(_TAG_PREFIX)
    if name == "str":
        return text
    if not tag.startswith(_TAG_PREFIX) or name not in _TAG_TYPES:
        raise TextError(f"the tag {_format_tag(tag)} is not read")
    value = parse_scalar(text)
    if not isinstance(value, _TAG_TYPES[name]) or (isinstance(value, bool) and name != "bool"):
        raise TextError(f"{text[:40]!r} is not what the tag {_format_tag(tag)} says")
    return float(value) if isinstance(value, int) and name == "float" else value


def _format_tag(tag: str) -> str:
    return f"!!{tag.removeprefix(_TAG_PREFIX)}" if tag.startswith(_TAG_PREFIX) else tag


MOST_SETTINGS_BYTES = 1 << 20
"""Of a file of settings."""


def read_data(path: str | Path) -> Any:
    """The data of a file of settings: JSON or TOML where its suffix says so, else YAML.

    Raises:
        ConfigError: it cannot be read, or is not what it should be; names file, line and column.
    """
    return read_with_scalars(path)[0]


def read_with_scalars(path: str | Path) -> tuple[Any, list[YamlScalar]]:
    """The data of a file of settings, and the scalars of a YAML file as they are written, all parsed once.

    Raises:
        ConfigError: as `read_data`.
    """
    kind = {".json": "JSON", ".toml": "TOML"}.get(Path(path).suffix, "YAML")
    text, where = read_text(path), f"{path}: not valid {kind}"
    if kind == "YAML":
        # loaded where YAML is read

        found: tuple[Any, list[YamlScalar]] = _parse_or_raise(parse_yaml_with_scalars, text, where)
        return found
    return _parse_or_raise(parse_json if kind == "JSON" else parse_toml, text, where), []


def read_text(path: str | Path) -> str:
    """A small regular file as text.

    Raises:
        ConfigError: there is none, it is too large, or no UTF-8.
    """
    try:
        return decode_utf8(read_regular_file(path, MOST_SETTINGS_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except TextError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_inline(text: str, where: str) -> Any:
    """A YAML mapping in a flag.

    Raises:
        ConfigError: it is not YAML.
    """
    return _parse_or_raise(_parse_yaml, text, f"{where}: not valid YAML")


def decode_utf8(content: bytes) -> str:
    """UTF-8 as text, without the mark that some editors put before it.

    Raises:
        TextError: it is no UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        raise TextError("not UTF-8", before.count(b"\n") + 1, error.start - before.rfind(b"\n")) from None


def _parse_yaml(text: str) -> Any:
    # loaded where YAML is read

    return parse_yaml(text)


def _parse_or_raise(parse: Callable[[str], Any], text: str, where: str) -> Any:
    try:
        return parse(text)
    except TextError as error:
        raise ConfigError(f"{where}: {error}") from None


_LINE_BREAKS = "\x85\u2028\u2029"
"""Line breaks to YAML alone, which only double quotes keep."""


class _YamlDumper(yaml.SafeDumper):
    """Quotes text that `scalar` would take for something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        quoted = not isinstance(parse_scalar(text), str)
    except ValueError:
        quoted = True
    style = '"' if any(sign in text for sign in _LINE_BREAKS) else "'" if quoted else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_YamlDumper.add_representer(str, _represent_text)


def dump_yaml(data: Any, *, inner: bool = False) -> str:
    """Plain data as YAML, in its order; `inner` writes the innermost mappings and lists on one line."""
    return yaml.dump(
        data,
        Dumper=_YamlDumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None if inner else False,
        width=100 if inner else 80,
    )
