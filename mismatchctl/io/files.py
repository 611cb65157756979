"""Local files: limited reads, atomic writes, temporary folders, and a check for mismatchctl's own output files."""

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
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO

from mismatchctl.errors import ConfigError
from mismatchctl.io import __version__
from mismatchctl.io.process import defer_signals, raise_if_received, register_cleanup

_STALE_SECONDS = 24 * 3600.0  # A temporary file of another machine is deleted if it is older than this
_MARK_PATTERN = re.compile(r"\.?mismatchctl-([0-9a-f]{8})-(\d+)-[0-9a-f]{12}(?:\.tmp)?")
_own_folders: set[Path] = set()


@dataclass(frozen=True)
class NextNumber:
    """The next numbered JSON file in a folder (0001.json, ...). `claim` picks the number when it moves a file there."""

    folder: Path

    def claim(self, temporary: Path) -> Path:
        from mismatchctl.recorder.recorder import claim_name

        numbers = [int(name[1]) for path in self.folder.iterdir() if (name := _NUMBERED.match(path.name))]
        names = (self.folder / f"{number:04d}.json" for number in count(max(numbers, default=0) + 1))
        return next(name for name in names if claim_name(temporary, name))


_NUMBERED = re.compile(r"(\d{1,18})\D?.*\.json")
_pending_moves: ContextVar[list[tuple[Path, Path | NextNumber]] | None] = ContextVar("_together", default=None)


def natural_key(path: str | Path) -> tuple[tuple[str | int, ...], ...]:
    """Return a sort key that puts step_2 before step_10."""
    return tuple(
        tuple(int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name))
        for name in str(path).split(os.sep)
    )


def read_regular_file(path: str | Path, most: int, *, owners: Container[int] | None = None) -> bytes:
    content = read_first_bytes(path, most + 1, owners=owners)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most >> 20:,} MB")
    return content


def read_first_bytes(path: str | Path, count: int, *, owners: Container[int] | None = None) -> bytes:
    """Read up to `count` bytes of a regular file. Raise an OSError for a pipe, or if the owner is not in `owners`."""
    with open_regular_file(path) as file:
        found = os.fstat(file.fileno())
        if owners is not None and (found.st_uid not in owners or found.st_mode & stat.S_IWOTH):
            raise OSError(errno.EPERM, "may belong to another user")
        # `read` reserves the requested number of bytes, so do not request all of `count`. Files in /proc have size 0.
        content: bytes | None = file.read(min(count, max(found.st_size, 1 << 20)))
        if content is None:  # such as a kernel log without new lines
            raise OSError(errno.EAGAIN, "does not contain data")
        return content


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. Raise an OSError for a pipe instead of waiting for data."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)  # `fdopen` does not close the descriptor of a folder
    number, problem = (errno.EISDIR, os.strerror(errno.EISDIR)) if stat.S_ISDIR(mode) else _NOT_REGULAR
    raise OSError(number, problem, str(path))


_NOT_REGULAR = errno.EINVAL, "is not a regular file"


def require_regular_file(path: str | Path) -> None:
    """Raise an OSError if a path is a pipe, a socket or a device. Opening a pipe could wait forever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(*_NOT_REGULAR, str(path))


def find_packaged_folder(name: str) -> Path:
    """Find a folder of data files. It is inside an installed package, but next to the package in a git checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{name} is missing in {package}. Install mismatchctl again.")


@contextlib.contextmanager
def replace_together() -> Iterator[list[Path]]:
    """Replace files only after this block, if it succeeds. Yield a list that will contain the replaced paths."""
    pending: list[tuple[Path, Path | NextNumber]] = []
    places: list[Path] = []
    token = _pending_moves.set(pending)
    try:
        yield places
        raise_if_received()
        for target in (target for _, target in pending if isinstance(target, Path) and target.is_dir()):
            raise ConfigError(f"{target}: cannot be written: {os.strerror(errno.EISDIR)}")
        with defer_signals():
            places += [_move(temporary, target) for temporary, target in pending]
    finally:
        _pending_moves.reset(token)
        for temporary, _ in pending:
            _delete_temporary(temporary)


@contextlib.contextmanager
def atomic_output(path: str | Path | NextNumber, *, at_once: bool = False) -> Iterator[Path]:
    """Yield a temporary path, then move it to `path`. With `at_once`, do not wait for the end of `replace_together`."""
    target = path if isinstance(path, NextNumber) else Path(path)
    pending = None if at_once else _pending_moves.get()
    temporary = _new_temporary_file(_shown_target(target))
    try:
        with explain_write_errors(_shown_target(target)):
            yield temporary
        if pending is not None:
            pending.append((temporary, target))
            return
        raise_if_received()
        _move(temporary, target)
    finally:
        if pending is None or (temporary, target) not in pending:
            _delete_temporary(temporary)


@contextlib.contextmanager
def explain_write_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from None
    except Exception as error:
        # polars' exceptions contain the system's error only as text
        found = re.search(r"\(os error (\d+)\)|thrift: transport error", str(error))
        if found is None:
            raise
        reason = os.strerror(int(found[1])) if found[1] else "the disk is full, or the file is too large"
        raise ConfigError(f"{target}: cannot be written: {reason}") from None


def write_atomically(path: str | Path | NextNumber, content: bytes, *, at_once: bool = False) -> None:
    with atomic_output(path, at_once=at_once) as temporary:
        temporary.write_bytes(content)


def make_temporary_folder() -> Path:
    parent = Path(tempfile.gettempdir())
    _remove_stale_entries(parent)
    folder = parent / f"mismatchctl-{_process_mark()}"
    folder.mkdir(mode=0o700)
    _own_folders.add(folder)
    return folder


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _own_folders.discard(folder)


def _new_temporary_file(target: Path) -> Path:
    _remove_stale_entries(target.parent)
    temporary = target.parent / f".mismatchctl-{_process_mark()}.tmp"
    with explain_write_errors(target):
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    _own_folders.add(temporary)
    return temporary


def _shown_target(target: Path | NextNumber) -> Path:
    return target.folder / "NNNN.json" if isinstance(target, NextNumber) else target


def _move(temporary: Path, target: Path | NextNumber) -> Path:
    with explain_write_errors(_shown_target(target)):
        return target.claim(temporary) if isinstance(target, NextNumber) else temporary.replace(target)


def _delete_temporary(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
    _own_folders.discard(temporary)


def _process_mark() -> str:
    return f"{_machine_id()}-{os.getpid()}-{os.urandom(6).hex()}"


def _machine_id() -> str:
    """Return an id of the machine or container, because processes on two machines can have the same process id."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{zlib.crc32(f'{socket.gethostname()} {space}'.encode()):08x}"


def _remove_stale_entries(folder: Path) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _MARK_PATTERN.fullmatch(entry.name)
            if found is not None and _is_stale(entry, found[1], int(found[2])):
                with contextlib.suppress(OSError):
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def _is_stale(entry: os.DirEntry[str], machine: str, process: int) -> bool:
    if machine != _machine_id():
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def _remove_own_folders() -> None:
    own = str(os.getpid())  # a forked child inherits the set but does not own the folders
    for place in [place for place in _own_folders if place.name.split("-")[2] == own]:
        shutil.rmtree(place, ignore_errors=True) if place.is_dir() else _delete_temporary(place)


atexit.register(_remove_own_folders)
register_cleanup(_remove_own_folders)
TOOL_NAME = f"mismatchctl {__version__}"
"""Signature that the tool writes into figures and text pages, so that `is_own_output` recognizes them."""
PARQUET_METADATA = {"mismatchctl": __version__}
"""Metadata in the footers of our Parquet files, which `is_own_output` uses to recognize the files."""
CAPTIONS_FILE = "captions.md"
"""List of the figures and CSV files in a folder. It identifies our CSV files, which cannot contain a signature."""
_PREFIX_BYTES = 4096
_SIGNATURES = (
    rb'\{[^\0]*"tool":\s*"mismatchctl"',
    rb'(?i)<!doctype html>[^\0]*<meta name="generator" content="mismatchctl ',
    rb"<!-- mismatchctl ",
    rb"#+ mismatchctl ",
    rb'<\?xml [^>]*\?>\s*<testsuites name="mismatchctl ',
    rb"\x89PNG\r\n\x1a\n[\s\S]*Software\0mismatchctl ",
    rb"run,correction,point,",
)
"""Patterns for the start of the JSON, HTML, SVG, Markdown, JUnit, PNG and sweep CSV files that mismatchctl writes."""
_BASELINE_BYTES = 1 << 20
"""Number of bytes that `is_baseline` searches for the mark of an accepted baseline. Corrections may precede it."""
_ACCEPTED_BASELINE = re.compile(rb'"accepted":\s*\{\s*"(?:by_hand|rules|verdict)":')
"""Mark of an accepted baseline. Only `--save-baseline` may overwrite such a file."""


def is_own_output(path: Path) -> bool:
    """Return True if the file is empty, or if mismatchctl wrote it and it is not an accepted baseline."""
    try:
        with path.open("rb") as file:
            first = file.read(_PREFIX_BYTES)
            file.seek(max(0, path.stat().st_size - _PREFIX_BYTES))
            last = file.read()
    except OSError:
        return False
    if first.startswith(b"PAR1"):
        return _is_own_parquet(path)
    if first.startswith(b"%PDF"):
        return b"(mismatchctl " in last
    if _ACCEPTED_BASELINE.search(first):
        return False
    return not first or any(re.match(kind, first) for kind in _SIGNATURES) or _is_figure_csv(path)


def is_baseline(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return _ACCEPTED_BASELINE.search(read_first_bytes(path, _BASELINE_BYTES)) is not None
    return False


def add_signature(schema_metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes]:
    return (schema_metadata or {}) | {name.encode(): version.encode() for name, version in PARQUET_METADATA.items()}


def _is_own_parquet(path: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mismatchctl.io.parquet_footer import check_footer

    try:
        with pa.OSFile(str(path)) as file:
            check_footer(file)
            held = pq.read_metadata(file).metadata or {}
    except (OSError, pa.ArrowException):
        return False
    return all(name.encode() in held for name in PARQUET_METADATA)


def _is_figure_csv(path: Path) -> bool:
    beside = path.with_name(CAPTIONS_FILE)
    if path.suffix != ".csv" or not beside.is_file() or not is_own_output(beside):
        return False
    return f"({path.name})" in beside.read_text("utf-8", "replace")
