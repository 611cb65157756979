"""Read YAML, TOML and JSON as plain data, and resolve OmegaConf interpolations."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from mismatchctl.errors import ConfigError, describe_os_error
from mismatchctl.io.files import read_regular_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class TextError(ValueError):
    """A syntax error in a text, with its line and column if they are known."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        place = "" if line is None else f"line {line}, column {column}: "
        super().__init__(place + " ".join(problem.split()))


class Unknown(str):
    """A text that refers to a value outside the file: `$CLIP`, `${trainer.clip}`, `???`."""


MOST_DEPTH = 64  # Maximum nesting of mappings and lists. Real settings have fewer levels.

PlainValue = str | int | float | bool | None

_SIGNED = re.compile(r"[-+]?[0-9_]*\.[0-9_]*[eE][-+][0-9]+")
_TAG_PREFIX = "tag:yaml.org,2002:"
_TAGS = tuple(f"{_TAG_PREFIX}{name}" for name in ("int", "float", "bool", "null"))
_CONSTRUCTOR = yaml.constructor.SafeConstructor()


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML loader that recognizes numbers, booleans and null as OmegaConf does. Dates stay text."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] in _TAGS]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# In YAML 1.2, a float with an exponent needs no decimal point, and its exponent needs no sign.
_FLOAT = r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+)\Z"
_Loader.add_implicit_resolver(f"{_TAG_PREFIX}float", re.compile(_FLOAT), list("-+0123456789"))
_RESOLVER = _Loader("")


def parse_scalar(text: str) -> PlainValue:
    """Parse an unquoted YAML scalar as PyYAML does, but also read floats of YAML 1.2, such as 1e-4."""
    if text.endswith("\n"):  # PyYAML's patterns would ignore the final line end
        return text
    return _construct(yaml.ScalarNode(_RESOLVER.resolve(yaml.ScalarNode, text, (True, False)), text))


def _construct(node: yaml.ScalarNode) -> PlainValue:
    text: str = node.value
    name = node.tag.removeprefix(_TAG_PREFIX)
    if node.tag == f"{_TAG_PREFIX}str":
        return text
    if node.tag not in _TAGS:
        raise TextError(f"the tag {_format_tag(node.tag)} is not supported")
    if text.count(":") > 3:
        raise TextError(f"{text[:40]} is not a number; quote it if it is a string")
    if name == "int" and len(text) > _MOST_DIGITS:
        return parse_integer(text)
    try:
        value: PlainValue = getattr(_CONSTRUCTOR, f"construct_yaml_{name}")(node)
    except (ValueError, LookupError):
        raise TextError(f"{text[:40]!r} does not match the tag {_format_tag(node.tag)}") from None
    if name == "int":
        return parse_integer(str(value))
    if isinstance(value, float) and math.isinf(value) and "inf" not in text.lower():
        raise TextError(f"the number {text[:40]} is larger than any float")
    return value


def is_text_in_yaml_1_1(text: str) -> bool:
    """Return True for an unquoted number that PyYAML reads as text, such as 1e-4 or 1.0e8."""
    return "e" in text.lower() and isinstance(parse_scalar(text), float) and not _SIGNED.fullmatch(text)


_DECIMAL = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def parse_number(text: str) -> float:
    plain = text.strip().removesuffix("%").strip()
    if not _DECIMAL.fullmatch(plain) or not math.isfinite(float(plain)):
        raise TextError(f"{text[:40]!r} is not a plain decimal number such as 0.01, 1e-4 or 20%")
    return float(plain) / 100 if text.strip().endswith("%") else float(plain)


_MOST_DIGITS = 80


def parse_integer(text: str) -> int:
    value = int(text) if len(text) < _MOST_DIGITS else 1 << 64
    if not -(1 << 63) <= value < 1 << 64:
        raise TextError(f"the number {text[:40]} has more than 64 bits")
    return value


def parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise TextError(f"the number {text[:40]} is larger than any float")
    return value


_POINTER = re.compile(r"\$\{([^${}]*)\}")
_CALL = re.compile(r"oc\.(env|select):\s*([^,]*?)\s*(?:,(.*))?", re.DOTALL)
_MOST_STEPS = 8  # maximum length of a chain of interpolations, in which each one refers to the next
_MOST_CHARACTERS = 1000  # maximum length of a string with interpolations, before and after they are resolved
_MISSING = object()


def resolve_interpolations(keys: dict[str, Any]) -> dict[str, Any]:
    """Replace interpolations such as `${trainer.clip}` in the values of `keys`. Unknown references are not replaced.

    `oc.env` resolves to its default value, because the training runs in another environment. A referenced block is
    copied without resolving the interpolations inside it.
    """

    def look_up(pointer: str, place: tuple[str, ...]) -> Any:
        call = _CALL.fullmatch(pointer.strip())
        if call is None:
            return _find_value(pointer.strip(), place, keys)
        found = _find_value(call[2], (), keys) if call[1] == "select" else _MISSING
        return found if found is not _MISSING or call[3] is None else parse_scalar(call[3].strip().strip("'\""))

    def put_in(pointer: re.Match[str], place: tuple[str, ...]) -> str:
        found = look_up(pointer[1], place)
        return pointer[0] if found is _MISSING or isinstance(found, (Mapping, list)) else str(found)[:_MOST_CHARACTERS]

    def resolve_text(text: str, place: tuple[str, ...]) -> Any:
        for _ in range(_MOST_STEPS):  # if the whole string is one interpolation, its value keeps its type
            before = text
            if whole := _POINTER.fullmatch(text):
                found = look_up(whole[1], place)
                if not isinstance(found, str):
                    return before if found is _MISSING else found
                text = found
            elif len(text) <= _MOST_CHARACTERS:
                inside = _POINTER.sub(lambda pointer: put_in(pointer, place), text)
                text = inside if len(inside) <= _MOST_CHARACTERS else text
            if text == before:
                break
        return text

    def resolve(value: Any, place: tuple[str, ...]) -> Any:
        if len(place) > MOST_DEPTH:
            return value
        if isinstance(value, Mapping):
            return {key: resolve(one, (*place, str(key))) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [resolve(one, (*place, str(number))) for number, one in enumerate(value)]
        return resolve_text(value, place) if isinstance(value, str) and "${" in value else value

    found: dict[str, Any] = resolve(keys, ())
    return found


def _find_value(where: str, place: tuple[str, ...], root: Mapping[str, Any]) -> Any:
    """Look up a dotted path. As in OmegaConf, one leading dot means the value's own block, and two mean its parent."""
    keys = where.lstrip(".")
    up = len(where) - len(keys)
    found: Any = root
    for key in (*(place[: max(len(place) - up, 0)] if up else ()), *keys.split(".")):
        if not isinstance(found, Mapping) or key not in found:
            return _MISSING
        found = found[key]
    return found


def parse_json(text: str, *, as_python_writes: bool = False, number: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON. `as_python_writes`: allow NaN, overflows and repeated keys, and convert numbers by `number`."""
    strict: dict[str, Any] = {"parse_float": parse_float, "parse_int": parse_integer}
    strict |= {"parse_constant": _refuse_constant, "object_pairs_hook": _check_unique_keys}
    try:
        return json.loads(text, **({"parse_float": number, "parse_int": number} if as_python_writes else strict))
    except json.JSONDecodeError as error:
        raise TextError(error.msg, error.lineno, error.colno) from None
    except RecursionError:
        raise TextError("nested too deeply") from None
    except TextError:
        raise
    except ValueError:  # Python limits the number of digits
        raise TextError("a number has too many digits") from None


def _refuse_constant(text: str) -> Any:
    raise TextError(f"{text} is not a JSON number")


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise TextError(f"the key {twice!r} occurs twice in one object")
    return found


_PLACE_PATTERN = re.compile(r"(.*) \(at line (\d+), column (\d+)\)", re.DOTALL)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML into plain data. Dates and times become strings."""
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


MOST_VALUES = 100_000
"""Maximum number of values in a YAML document. If an alias (`*name`) repeats values, each repetition counts."""


@dataclass(frozen=True)
class YamlScalar:
    """A scalar with its text in the YAML file, before conversion, and its path of keys."""

    keys: tuple[str, ...]
    text: str
    quoted: bool


def parse_yaml(text: str, *, decimal: bool = False) -> Any:
    """Parse one YAML document. With `decimal`, `010`, `1:30`, `0b1` and `1_0` stay text instead of becoming numbers."""
    return _parse_yaml(text, decimal)[0]


def _parse_yaml(text: str, decimal: bool) -> tuple[Any, list[YamlScalar]]:
    builder = _Builder(decimal)
    try:
        _check_depth(text)
        node = yaml.compose(text, _Loader)
        return None if node is None else builder.build(node), list(builder.scalars.values())
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "cannot be read"
        problem = "this anchor occurs twice" if problem == "second occurrence" else problem
        raise TextError(problem, *_line_and_column(error.problem_mark or error.context_mark)) from None
    except yaml.YAMLError as error:
        raise TextError(str(error)) from None
    except TextError as error:
        raise TextError(str(error), *_line_and_column(builder.mark)) from None


def _check_depth(text: str) -> None:
    """Refuse a second YAML document. Also refuse deep nesting, because libyaml would recurse without a limit."""
    depth = documents = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        if depth > MOST_DEPTH or documents > 1:
            problem = "nested too deeply" if depth else "expected one YAML document, found a second document"
            raise TextError(problem, *_line_and_column(event.start_mark))


def _line_and_column(mark: Any) -> tuple[int, ...]:
    return () if mark is None else (mark.line + 1, mark.column + 1)


class _Builder:
    """Builds plain values from YAML nodes. Each repetition by an alias counts towards MOST_VALUES."""

    def __init__(self, decimal: bool) -> None:
        self._decimal, self._values = decimal, 0
        self.scalars: dict[int, YamlScalar] = {}  # by the id of the node: an alias repeats the same node
        self.mark: Any = None  # start of the current node

    def build(self, node: yaml.Node, keys: tuple[str, ...] = (), depth: int = 0, *, has_key: bool = False) -> Any:
        self.mark, self._values = node.start_mark, self._values + 1
        if depth > MOST_DEPTH:  # an alias can contain itself
            raise TextError("nested too deeply")
        if self._values > MOST_VALUES:
            raise TextError(f"more than {MOST_VALUES:,} values")
        if isinstance(node, yaml.ScalarNode):
            if has_key:
                self.scalars.setdefault(id(node), YamlScalar(keys, node.value, bool(node.style)))
            value = _construct(node)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return str(node.value) if self._decimal and is_number and not _DECIMAL.fullmatch(node.value) else value
        is_mapping = isinstance(node, yaml.MappingNode)
        if node.tag != f"{_TAG_PREFIX}{'map' if is_mapping else 'seq'}":
            raise TextError(f"the tag {_format_tag(node.tag)} is not supported")
        if is_mapping:
            return self._mapping(node, keys, depth + 1)
        return [self.build(one, keys, depth + 1) for one in node.value]

    def _mapping(self, node: yaml.Node, keys: tuple[str, ...], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: list[dict[str, Any]] = []
        for key_node, value_node in node.value:
            self.mark, key = key_node.start_mark, key_node.value
            if not isinstance(key, str):
                raise TextError("a key must be a string")
            merges = key == "<<" and not key_node.style
            if key in found and not merges:
                raise TextError(f"the key {key!r} occurs twice in one mapping")
            value = self.build(value_node, (*keys, key), depth, has_key=True)
            if not merges:
                found[key] = value
                continue
            merged += value if isinstance(value, list) else [value]
            if not all(isinstance(item, dict) for item in merged):
                raise TextError("the merge key << needs a mapping")
        for mapping in merged:
            found = mapping | found
        return found


def _format_tag(tag: str) -> str:
    return f"!!{tag.removeprefix(_TAG_PREFIX)}" if tag.startswith(_TAG_PREFIX) else tag


MOST_SETTINGS_BYTES = 1 << 20


def read_data(path: str | Path, *, decimal: bool = False) -> Any:
    """Read a settings file: .json as JSON, .toml as TOML, any other file as YAML. `decimal`: see `parse_yaml`."""
    return read_with_scalars(path, decimal=decimal)[0]


def read_with_scalars(path: str | Path, *, decimal: bool = False) -> tuple[Any, list[YamlScalar]]:
    """Read a settings file. For YAML, also return each scalar with its text in the file, such as `1e-4`."""
    kind = {".json": "JSON", ".toml": "TOML"}.get(Path(path).suffix, "YAML")
    text = read_text(path)
    with _explain(f"{path}: not valid {kind}"):
        if kind == "YAML":
            return _parse_yaml(text, decimal)
        found = (parse_json if kind == "JSON" else parse_toml)(text)
        _check_nesting(found, MOST_DEPTH)
        return found, []


def _check_nesting(data: Any, most: int) -> None:
    """Refuse JSON or TOML with more than `most` levels, because later functions recurse into them."""
    if isinstance(data, (dict, list)):
        if not most:
            raise TextError("nested too deeply")
        for one in data.values() if isinstance(data, dict) else data:
            _check_nesting(one, most - 1)


def read_text(path: str | Path) -> str:
    try:
        with _explain(str(path)):
            return decode_utf8(read_regular_file(path, MOST_SETTINGS_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: {describe_os_error(error)}; check the path") from None


def parse_inline(text: str, where: str, *, decimal: bool = False) -> Any:
    """Parse YAML that is given as an argument, not as a file. `decimal`: see `parse_yaml`."""
    with _explain(f"{where}: not valid YAML"):
        return parse_yaml(text, decimal=decimal)


def decode_utf8(content: bytes) -> str:
    """Decode UTF-8, and drop the byte order mark that some editors add."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        raise TextError("not UTF-8", before.count(b"\n") + 1, error.start - before.rfind(b"\n")) from None


@contextlib.contextmanager
def _explain(where: str) -> Iterator[None]:
    try:
        yield
    except TextError as error:
        raise ConfigError(f"{where}: {error}") from None


_NEEDS_QUOTES = ("\n", "\r", "\x85", "\u2028", "\u2029", "::", "##")
"""Strings with these characters are quoted: line breaks, and `::` or `##`, which start commands in CI systems."""


@lru_cache
def _quotes(text: str) -> str | None:
    """Return the quotes that a string needs, or `None`. Without quotes, it may be read as another type or command."""
    try:
        quoted = not isinstance(parse_scalar(text), str)
    except ValueError:
        quoted = True
    return '"' if any(sign in text for sign in _NEEDS_QUOTES) else "'" if quoted else None


class _YamlDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """YAML dumper that quotes strings as `_quotes` decides. The dumper uses libyaml if PyYAML contains libyaml."""


_YamlDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(f"{_TAG_PREFIX}str", text, style=_quotes(text))
)


def dump_yaml(data: Any, *, inner: bool = False) -> str:
    """Write plain data as YAML. With `inner`, each innermost mapping or list is on one line."""
    return yaml.dump(
        data,
        Dumper=_YamlDumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None if inner else False,
        width=100 if inner else 80,
    )
