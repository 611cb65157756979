"""Which format a file has: by its name, else by its first bytes. Nothing else asks."""

from __future__ import annotations

import pyarrow as pa

from mismatchctl.dumps.arrow import MAGIC as ARROW_MAGIC
from mismatchctl.dumps.arrow import Arrow
from mismatchctl.dumps.contents import Contents
from mismatchctl.dumps.parquet import Parquet
from mismatchctl.stores import Store

_PARQUET_SUFFIXES, _ARROW_SUFFIXES = (".parquet", ".pq"), (".arrow", ".arrows", ".feather", ".ipc")
_PARQUET_MAGIC = b"PAR1"
SUFFIXES = _PARQUET_SUFFIXES + _ARROW_SUFFIXES


def is_dump_file(path: str, store: Store) -> bool:
    """Whether the file can be one of a dump: writers such as Spark or Ray may leave the suffix out."""
    return path.lower().endswith(SUFFIXES) or store.start(path, 6).startswith((_PARQUET_MAGIC, ARROW_MAGIC))


def format_name(path: str) -> str:
    """What a file with this name is expected to be."""
    return "Arrow" if path.lower().endswith(_ARROW_SUFFIXES) else "Parquet"


def read_contents(path: str, file: pa.NativeFile) -> Contents:
    """What an opened file holds.

    Raises:
        OSError, ValueError, pa.ArrowException: damaged, or not what its name says.
    """
    bare = not path.lower().endswith(SUFFIXES)
    if format_name(path) == "Arrow" or (bare and file.read_at(len(ARROW_MAGIC), 0) == ARROW_MAGIC):
        return Arrow.of(file)
    return Parquet.of(file)
