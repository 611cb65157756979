"""JSON lines, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from mismatchctl.errors import DataError
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
