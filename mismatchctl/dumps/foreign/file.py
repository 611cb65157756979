"""A file as a layout's rows are read from it: JSON lines, what torch saved, a pickle; all of them as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mismatchctl.dumps.foreign.safe import load_pickle, load_torch
from mismatchctl.dumps.foreign.standins import DamagedError, from_bytes, plain_dtype
from mismatchctl.errors import DataError
from mismatchctl.frameworks.layout import Row, array
from mismatchctl.texts import decoded, parse_json

BYTES_READ: ContextVar[Callable[[int], None] | None] = ContextVar("BYTES_READ", default=None)
"""Is told the bytes of each line, for a progress bar."""


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one per line; memory holds one line.

    Raises:
        DataError: a line that is no JSON object.
    """
    watch = BYTES_READ.get()
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if watch is not None:
                watch(len(line))
            if not line.strip():
                continue
            try:
                value = parse_json(decoded(line), as_python_writes=True)
            except ValueError as error:
                remedy = "the file was cut off or damaged: remove the line"
                raise DataError(f"no JSON: {error}", file=str(path), row=number, remedy=remedy) from error
            if not isinstance(value, dict):
                raise DataError("the line is no JSON object", file=str(path), row=number)
            yield value


@dataclass(frozen=True)
class OpenFile:
    """A `frameworks.layout.File` on disk."""

    path: Path

    @property
    def step(self) -> int | None:
        """The step that its name tells: the last number in it."""
        numbers = re.findall(r"\d+", self.path.stem)
        return int(numbers[-1]) if numbers else None

    def at(self, path: Path) -> OpenFile:
        """Another file, opened the same way."""
        return OpenFile(path)

    def lines(self) -> Iterator[dict[str, Any]]:
        """JSON objects, one per line; memory holds one line."""
        return json_lines(self.path)

    def torch(self, content: Any = None) -> Any:
        """What torch saved. The last file is kept, so that recognizing and reading it load it once.

        Raises:
            DataError: it cannot be read.
        """
        if content is not None:
            return load_torch(self.path, content)
        status = self.path.stat()
        return _loaded(self.path, status.st_size, status.st_mtime_ns)

    def holds(self, *names: str) -> bool:
        """Whether torch saved a dict that has these keys."""
        content = self.torch()
        return isinstance(content, dict) and all(name in content for name in names)

    def batch(self, names: Collection[str]) -> Iterator[Row]:
        """The rows of a dict of columns of one batch, which are tensors, arrays or lists of them.

        Args:
            names: the columns to read; what else there is stays out, as do columns of one number or nothing.

        Raises:
            DataError: the file holds no such dict, or its columns differ in their number of rows.
        """
        content = self.torch()
        if not isinstance(content, dict):
            raise DataError("holds no dict of tensors", file=str(self.path))
        columns = {name: array(content[name]) for name in names if name in content}
        columns = {
            name: value
            for name, value in columns.items()
            if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim)
        }
        counts = {len(value) for value in columns.values()}
        if len(counts) > 1:
            listed = ", ".join(f"{name} {len(value)}" for name, value in columns.items())
            raise DataError(f"columns differ in their number of rows: {listed}", file=str(self.path))
        for number in range(max(counts, default=0)):
            yield {"step": self.step, **{name: array(value[number]) for name, value in columns.items()}}

    def pickle(self, known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> Any:
        """What a pickle holds: see `load_pickle`."""
        return load_pickle(self.path, known)

    def array(self, data: Any, dtype: Any, shape: Any) -> Any:
        """An array from its bytes.

        Raises:
            ValueError: they are not as many as that takes.
        """
        try:
            return from_bytes(data, plain_dtype(dtype), shape)
        except DamagedError as error:
            raise ValueError(str(error)) from error


@lru_cache(maxsize=1)
def _loaded(path: Path, size: int, modified: int) -> Any:
    return load_torch(path)
