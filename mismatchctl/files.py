"""Files of the user: their natural order, what is read of them, and output written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mismatchctl.errors import ConfigError


def natural_key(path: str) -> tuple[tuple[str | int, ...], ...]:
    """Sort key by path component in which numbers count as numbers: step_2 comes before step_10."""
    return tuple(
        tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name))
        for name in path.split(os.sep)
    )


def read_regular(path: str | Path, most: int) -> bytes:
    """The bytes of a regular file that is not too large: no pipe, no device, nothing without an end.

    Raises:
        OSError: it cannot be read, or is none.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most >> 20:,} MB")
    return content


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
