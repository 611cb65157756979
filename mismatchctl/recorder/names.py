"""Names of files among any number of processes: a temporary file reserves one, and a dead process reserves none."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

HAS_LOCKS = importlib.util.find_spec("fcntl") is not None
"""Windows has none: what a dead process left there stays."""


@contextlib.contextmanager
def published(folder: Path, stem: str, suffix: str, first: int) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file under the next free name, which it gets when the block ends well.

    Yields:
        The name, and a handle of the temporary file, whose lock says that its process is alive.
    """
    final, partial, handle = _reserve(folder, stem, suffix, first)
    with handle:
        try:
            yield final, handle
            handle.flush()
            os.fsync(handle.fileno())
            if not HAS_LOCKS:  # there a file cannot be renamed while it is open
                handle.close()
            os.replace(partial, final)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _reserve(folder: Path, stem: str, suffix: str, first: int) -> tuple[Path, Path, BinaryIO]:
    """Find the next free name: whoever creates and locks its temporary file, returned open, owns it."""
    for earlier in itertools.count(first):
        final = folder / f"{stem}{f'_{earlier:03d}' if earlier else ''}.{suffix}"
        partial = final.with_name(f".{final.name}.tmp")
        try:
            handle = open(partial, "xb")  # noqa: SIM115 (the caller closes it)
        except FileExistsError:
            continue
        if _locked(handle) is False or not _is(handle, partial):  # before the lock it was a dead process's to others
            handle.close()
            continue
        if not final.exists():
            break
        partial.unlink()  # an earlier write, or another process, has the name
        handle.close()
    return final, partial, handle


def sweep(folder: Path, rank: int | None) -> None:
    """Remove what processes of this rank that are no more have begun: nobody holds its lock."""
    own = re.compile(r"\.step_\d+" + ("" if rank is None else f"_rank{rank:05d}") + r"(_\d+)?\.(parquet|arrow)\.tmp")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if own.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_if_stale(folder / name)


def _remove_if_stale(partial: Path) -> None:
    with open(partial, "r+b") as handle:
        if _locked(handle) and _is(handle, partial):
            partial.unlink()  # its owner would have to hold the lock to rename it or to let another have the name


def _is(handle: BinaryIO, path: Path) -> bool:
    """Whether the path still is the file that was opened."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _locked(handle: BinaryIO) -> bool | None:
    """Lock a file until it is closed; False: another process has, None: locks do not exist here."""
    if not HAS_LOCKS:
        return None
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
