"""Files of the user: their natural order, output written whole or not at all, and settings in TOML."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mismatchctl.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def natural_key(path: str) -> tuple[tuple[str | int, ...], ...]:
    """Sort key by path component in which numbers count as numbers: step_2 comes before step_10."""
    return tuple(
        tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name))
        for name in path.split(os.sep)
    )


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as plain data; a ValueError says what is wrong with it."""
    return tomllib.loads(text)


@contextlib.contextmanager
def replaced_when_done(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; move it there when the block ends well, remove it otherwise.

    Raises:
        ConfigError: the place cannot be written.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from None
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a whole file at once."""
    with replaced_when_done(path) as temporary:
        temporary.write_bytes(content)
