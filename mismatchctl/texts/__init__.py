"""One door for text: YAML, TOML and JSON, read with limits as plain data, and YAML written.

No other module calls a parser. Nothing is constructed from a tag, and only regular files are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatchctl.errors import ConfigError
from mismatchctl.files import read_regular
from mismatchctl.texts.parsers import parse_json, parse_toml
from mismatchctl.texts.scalars import TextError, is_text_in_yaml_1_1, number, scalar

if TYPE_CHECKING:
    from mismatchctl.texts.yaml_text import Scalar

__all__ = [
    "TextError",
    "decoded",
    "is_text_in_yaml_1_1",
    "number",
    "parse_inline",
    "parse_json",
    "read_data",
    "read_text",
    "read_with_scalars",
    "scalar",
]

MOST_BYTES = 1 << 20
"""Of a file of settings."""


def read_data(path: str | Path) -> Any:
    """The data of a file of settings: JSON or TOML where its suffix says so, else YAML.

    Raises:
        ConfigError: it cannot be read, or is not what it should be; names file, line and column.
    """
    return read_with_scalars(path)[0]


def read_with_scalars(path: str | Path) -> tuple[Any, list[Scalar]]:
    """The data of a file of settings, and the scalars of a YAML file as they are written, all parsed once.

    Raises:
        ConfigError: as `read_data`.
    """
    kind = {".json": "JSON", ".toml": "TOML"}.get(Path(path).suffix, "YAML")
    text, where = read_text(path), f"{path}: not valid {kind}"
    if kind == "YAML":
        from mismatchctl.texts.yaml_text import parse_with_scalars  # loaded where YAML is read

        found: tuple[Any, list[Scalar]] = _said(parse_with_scalars, text, where)
        return found
    return _said(parse_json if kind == "JSON" else parse_toml, text, where), []


def read_text(path: str | Path) -> str:
    """A small regular file as text.

    Raises:
        ConfigError: there is none, it is too large, or no UTF-8.
    """
    try:
        return decoded(read_regular(path, MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except TextError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_inline(text: str, where: str) -> Any:
    """A YAML mapping in a flag.

    Raises:
        ConfigError: it is not YAML.
    """
    return _said(_parse_yaml, text, f"{where}: not valid YAML")


def decoded(content: bytes) -> str:
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
    from mismatchctl.texts.yaml_text import parse_yaml  # loaded where YAML is read

    return parse_yaml(text)


def _said(parse: Callable[[str], Any], text: str, where: str) -> Any:
    try:
        return parse(text)
    except TextError as error:
        raise ConfigError(f"{where}: {error}") from None
