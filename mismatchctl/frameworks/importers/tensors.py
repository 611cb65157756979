"""Padded batches saved as one torch file: a dict of tensors, one row per sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mismatchctl.errors import DataError
from mismatchctl.frameworks.importers.layout import Row
from mismatchctl.frameworks.importers.safe import load_torch


def array(value: Any) -> Any:
    """A tensor as numpy, half precisions as float32; everything else as it is."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def step_of(path: Path) -> int | None:
    """The step that a file's name tells, its last number."""
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else None


def batch_rows(path: Path) -> Iterator[Row]:
    """The rows of a dict of tensors of one batch; what is no such column stays out.

    Raises:
        DataError: the file holds no such dict.
    """
    content = load_torch(path)
    if not isinstance(content, dict):
        raise DataError("holds no dict of tensors", file=str(path))
    columns = {name: array(value) for name, value in content.items()}
    columns = {name: value for name, value in columns.items() if isinstance(value, np.ndarray) and value.ndim}
    for number in range(min(map(len, columns.values()), default=0)):
        yield {**{name: value[number] for name, value in columns.items()}, "step": step_of(path)}


def holds(path: Path, *names: str) -> bool:
    """Whether a torch file can be loaded and its top level has these keys."""
    try:
        content = load_torch(path)
    except DataError:
        return False
    return isinstance(content, dict) and all(name in content for name in names)
