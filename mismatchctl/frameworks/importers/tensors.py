"""Padded batches saved as one torch file: a dict of tensors, one row per sequence."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mismatchctl.errors import DataError
from mismatchctl.frameworks.importers.layout import Row
from mismatchctl.frameworks.importers.safe import load_torch


def array(value: Any) -> Any:
    """An array, of half precision as float32; everything else as it is."""
    return value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float16 else value


def step_of(path: Path) -> int | None:
    """The step that a file's name tells, its last number."""
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else None


def loaded(path: Path) -> Any:
    """What a torch file holds. The last one is kept, so that recognizing and reading a file load it once.

    Raises:
        DataError: the file cannot be read.
    """
    status = path.stat()
    return _loaded(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _loaded(path: Path, size: int, modified: int) -> Any:
    return load_torch(path)


def batch_rows(path: Path, names: Collection[str]) -> Iterator[Row]:
    """The rows of a dict of columns of one batch, which are tensors, arrays or lists of them.

    Args:
        path: the file.
        names: the columns to read; what else the file has stays out, as do columns that hold one number or nothing.

    Raises:
        DataError: the file holds no such dict, or its columns differ in their number of rows.
    """
    content = loaded(path)
    if not isinstance(content, dict):
        raise DataError("holds no dict of tensors", file=str(path))
    columns = {name: array(content[name]) for name in names if name in content}
    columns = {
        name: value
        for name, value in columns.items()
        if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim)
    }
    counts = {len(value) for value in columns.values()}
    if len(counts) > 1:
        listed = ", ".join(f"{name} {len(value)}" for name, value in columns.items())
        raise DataError(f"columns differ in their number of rows: {listed}", file=str(path))
    for number in range(max(counts, default=0)):
        yield {"step": step_of(path), **{name: array(value[number]) for name, value in columns.items()}}


def holds(*names: str) -> Callable[[Path], bool]:
    """A test whether the top level of a torch file has these keys; a DataError if the file cannot be loaded."""

    def test(path: Path) -> bool:
        content = loaded(path)
        return isinstance(content, dict) and all(name in content for name in names)

    return test
