"""Files that would run code are refused by name, and run none."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatchctl.errors import DataError
from mismatchctl.frameworks.importers.safe import load_pickle, load_torch


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def save_pickle(value: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


SAVERS: list[tuple[Callable[..., None], Callable[[Path], Any]]] = [(save_pickle, load_pickle), (torch.save, load_torch)]


@pytest.mark.parametrize(("save", "load"), SAVERS)
@pytest.mark.parametrize("nested", [False, True])
def test_hostile_files_run_nothing(
    tmp_path: Path, save: Callable[..., None], load: Callable[[Path], Any], nested: bool
) -> None:
    marker, path = tmp_path / "ran", tmp_path / "dump"
    save({"a": [Hostile(marker)]} if nested else Hostile(marker), path)
    with pytest.raises(DataError, match="system"):
        load(path)
    assert not marker.exists()


@pytest.mark.parametrize(("save", "load"), SAVERS)
def test_numbers_are_read(tmp_path: Path, save: Callable[..., None], load: Callable[[Path], Any]) -> None:
    path = tmp_path / "dump"
    save({"a": np.arange(3, dtype="int64"), "b": np.float32(1.5), "c": [None, "x"]}, path)
    read = load(path)
    assert read["a"].tolist() == [0, 1, 2]
    assert (float(read["b"]), read["c"]) == (1.5, [None, "x"])


@pytest.mark.parametrize("load", [load_pickle, load_torch])
def test_damaged_files_are_named(tmp_path: Path, load: Callable[[Path], Any]) -> None:
    path = tmp_path / "dump.pt"
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"dump\.pt"):
        load(path)
