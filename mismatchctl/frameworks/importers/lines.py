"""JSON lines, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mismatchctl.errors import DataError


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one per line; memory holds one line.

    Raises:
        DataError: a line that is no JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                remedy = "the file was cut off or damaged: remove the line"
                raise DataError(f"no JSON: {error}", file=str(path), row=number, remedy=remedy) from error
            if not isinstance(value, dict):
                raise DataError("the line is no JSON object", file=str(path), row=number)
            yield value
