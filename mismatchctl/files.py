"""Writing output files: whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mismatchctl.errors import ConfigError


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
