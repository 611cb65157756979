"""Files of the user: their natural order, what is read of them, and output that appears whole or not at all."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Container, Iterator
from contextvars import ContextVar
from pathlib import Path

from mismatchctl import interrupts
from mismatchctl.errors import ConfigError

_STALE = 24 * 3600.0
"""Seconds after which what another machine left is nobody's any more."""
_MARK = re.compile(r"\.?mismatchctl-([0-9a-f]{8})-(\d+)-[0-9a-f]{12}(?:\.tmp)?")
_here: set[Path] = set()
_together: ContextVar[list[tuple[Path, Path]] | None] = ContextVar("_together", default=None)


def natural_key(path: str) -> tuple[tuple[str | int, ...], ...]:
    """Sort key by path component in which numbers count as numbers: step_2 comes before step_10."""
    return tuple(
        tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name))
        for name in path.split(os.sep)
    )


def read_regular(path: str | Path, most: int, *, owners: Container[int] | None = None) -> bytes:
    """The bytes of a regular file that is not too large: no pipe, no device, nothing without an end.

    With `owners`, it has to be one that nobody but one of these users could write.

    Raises:
        OSError: it cannot be read, or is none.
    """
    content = first_bytes(path, most + 1, owners=owners)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most >> 20:,} MB")
    return content


def first_bytes(path: str | Path, count: int, *, owners: Container[int] | None = None) -> bytes:
    """As many bytes of a regular file, or all that it has; nothing waits for a pipe.

    Raises:
        OSError: it cannot be read, or is none.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        if owners is not None and (found.st_uid not in owners or found.st_mode & stat.S_IWOTH):
            raise OSError(errno.EPERM, "may be another user's")
        return file.read(count)


@contextlib.contextmanager
def together() -> Iterator[list[Path]]:
    """Whatever is replaced in this block appears at its end, all of it, or nothing if the block fails.

    Yields:
        What will have been written, as it comes to be known.

    Raises:
        ConfigError: a place cannot be written.
    """
    pending: list[tuple[Path, Path]] = []
    places: list[Path] = []
    token = _together.set(pending)
    try:
        yield places
        interrupts.check()
        with interrupts.held():
            _move_all(pending)
            places += [target for _, target in pending]
    finally:
        _together.reset(token)
        for temporary, _ in pending:
            _drop(temporary)


@contextlib.contextmanager
def replaced_when_done(path: str | Path, *, at_once: bool = False) -> Iterator[Path]:
    """Give a temporary path beside `path`; move it there when the block ends well, remove it otherwise.

    Within `together` the move waits for the others, unless it is wanted `at_once`.

    Raises:
        ConfigError: the place cannot be written.
    """
    target = Path(path)
    pending = None if at_once else _together.get()
    temporary = _beside(target)
    waits = False
    try:
        yield temporary
        if pending is None:
            interrupts.check()
            _move(temporary, target)
        else:
            pending.append((temporary, target))
            waits = True
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        if not waits:
            _drop(temporary)


def write_atomically(path: str | Path, content: bytes, *, at_once: bool = False) -> None:
    """Write a whole file, as `replaced_when_done`."""
    with replaced_when_done(path, at_once=at_once) as temporary:
        temporary.write_bytes(content)


def scratch_folder() -> Path:
    """A temporary folder; it goes with the process, or earlier by `remove`."""
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    folder = parent / f"mismatchctl-{_mark()}"
    folder.mkdir(mode=0o700)
    _here.add(folder)
    return folder


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for the length of a block."""
    folder = scratch_folder()
    try:
        yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Remove a temporary folder with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    _here.discard(folder)


def _beside(target: Path) -> Path:
    """A new temporary file in the folder of a target, with the mode that the target will have."""
    _sweep(target.parent)
    temporary = target.parent / f".mismatchctl-{_mark()}.tmp"
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise _unwritable(target, error) from None
    _here.add(temporary)
    return temporary


def _move(temporary: Path, target: Path) -> None:
    try:
        temporary.replace(target)
    except OSError as error:
        raise _unwritable(target, error) from None


def _move_all(pending: list[tuple[Path, Path]]) -> None:
    """Move each to its target; if one cannot be moved, the targets are again what they were."""
    kept: list[Path | None] = []
    moved = 0
    try:
        for temporary, target in pending:
            kept.append(_keep(target) if len(pending) > 1 else None)
            _move(temporary, target)
            moved += 1
    except ConfigError:
        for (_, target), before in zip(pending[:moved], kept, strict=False):
            before.replace(target) if before is not None else target.unlink(missing_ok=True)
        raise
    finally:
        for before in kept:
            if before is not None:
                _drop(before)


def _keep(target: Path) -> Path | None:
    """What stands at a target under another name beside it; None where nothing does."""
    if not os.path.lexists(target):
        return None
    kept = target.parent / f".mismatchctl-{_mark()}.tmp"
    try:
        os.link(target, kept, follow_symlinks=False)
    except OSError:  # a file system without links
        try:
            shutil.copy2(target, kept, follow_symlinks=False)
        except OSError as error:
            raise _unwritable(target, error) from None
    _here.add(kept)
    return kept


def _drop(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
    _here.discard(temporary)


def _unwritable(target: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{target}: cannot be written: {error.strerror or error}")


def _mark() -> str:
    """What tells the temporary things of this process from those of others: its machine, its number, and chance."""
    return f"{_machine()}-{os.getpid()}-{os.urandom(6).hex()}"


def _machine() -> str:
    """Where process numbers mean the same: a machine, or a container on it."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{zlib.crc32(f'{socket.gethostname()} {space}'.encode()):08x}"


def _sweep(folder: Path) -> None:
    """Remove what processes have left that are no more."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _MARK.fullmatch(entry.name)
            if found is not None and _is_stale(entry, found[1], int(found[2])):
                with contextlib.suppress(OSError):
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def _is_stale(entry: os.DirEntry[str], machine: str, process: int) -> bool:
    if machine != _machine():
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _tidy() -> None:
    own = str(os.getpid())  # a child that was forked inherits the set, not what is in it
    for place in [place for place in _here if place.name.split("-")[2] == own]:
        shutil.rmtree(place, ignore_errors=True) if place.is_dir() else _drop(place)


atexit.register(_tidy)
interrupts.at_once(_tidy)
