"""Where files lie: on a disk, or in an object store behind `s3://`, `gs://` or `hf://`.

A store lists, opens and tells apart files, and puts its errors into one sentence. What the files hold, and how runs
are named, is found elsewhere.
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from mismatchctl.errors import DataError
from mismatchctl.files import read_regular
from mismatchctl.stores.clients import SCHEMES, filesystem, forget
from mismatchctl.stores.disk import Disk
from mismatchctl.stores.failures import failure
from mismatchctl.stores.objects import ObjectStore
from mismatchctl.stores.store import Store, first_line, printable

__all__ = ["Store", "asked", "first_line", "forget", "normal", "printable", "read_whole", "remote", "store_of"]

_ASKED_AT_ONCE = 16
"""Questions over the network that wait for their answers at the same time."""
MOST_BYTES = 1 << 30
"""Of a file that is read whole."""
_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://?(.*)", re.DOTALL)
_DISK = Disk()
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def remote(path: str) -> bool:
    """Whether a path names something in an object store."""
    return _REMOTE.match(path) is not None


def normal(path: str) -> str:
    """The path without `.`, `..` and doubled or trailing separators."""
    match = _REMOTE.match(path)
    if match is None:
        return os.path.normpath(path)
    return f"{match[1].lower()}://{posixpath.normpath(match[2]) if match[2] else ''}"


_ROOTS = {"hf": ("repository", "datasets/OWNER/NAME/FOLDER", 2)}
"""What a path begins with, how the rest is written, and of how many parts the beginning is; a bucket elsewhere."""


def store_of(path: str) -> Store:
    """The store that a path leads to.

    Raises:
        DataError: a scheme that is not read, or credentials in the path.
        ConfigError: a package that the store needs is not installed.
    """
    match = _REMOTE.match(path)
    if match is None:
        return _DISK
    scheme, rest = match[1].lower(), match[2]
    bucket = rest.split("/", 1)[0]
    if "@" in bucket:
        shown = f"{scheme}://{printable(rest.rpartition('@')[2])}"
        remedy = "put them into the environment or a profile"
        raise DataError("credentials do not belong into a path", file=shown, remedy=remedy)
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise DataError(f"{scheme}:// is not read", file=printable(path), remedy=f"copy it to a disk, or to {known}")
    what, shape, count = _ROOTS.get(scheme, ("bucket", "BUCKET/FOLDER", 1))
    root = rest.split("/")[:count]
    if len(root) < count or not all(root) or any(map(glob.has_magic, root)):
        raise DataError(f"this names no {what}", file=printable(path), remedy=f"write {scheme}://{shape}")
    try:
        return ObjectStore(scheme, filesystem(scheme, bucket))
    except (OSError, ValueError) as error:
        raise failure(scheme, error, path) from error


def asked(question: Callable[[Asked], Answer], of: Sequence[Asked], *, over_network: bool) -> Iterator[Answer]:
    """The answers in order; many at once where each is a question over the network."""
    if not over_network:
        yield from map(question, of)
        return
    from concurrent.futures import ThreadPoolExecutor  # takes longer in loading than a small file

    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        yield from pool.map(question, of)


def read_whole(path: str | Path) -> bytes:
    """The content of a file that fits into memory, wherever it lies.

    Raises:
        OSError: a file of the disk that cannot be read.
        DataError: an object that cannot be read.
    """
    if not remote(str(path)):
        return read_regular(path, MOST_BYTES)
    where = normal(str(path))
    store = store_of(where)
    try:
        with store.open(where) as file:
            return bytes(file.read())
    except store.failures as error:
        raise store.explain(error, where) from error
