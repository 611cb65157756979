"""Pickles and torch files as data: nothing that a file names is ever run, beyond the few classes that numbers need."""

from __future__ import annotations

import pickle
import re
import zipfile
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from mismatchctl.errors import DataError

NUMPY: frozenset[tuple[str, str]] = frozenset(
    {
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy._core.multiarray", "scalar"),
    }
)
"""Module and name of what plain numpy arrays and scalars are made of."""

_TORCH_CLASS = re.compile(r"(?:GLOBAL|class|global) `?([\w.]+\.[\w.]+)")
"""How torch names the class that it refuses."""

_ASKS = "it asks for "
_SKYRL = "skyrl.backends.skyrl_train.training_batch"


class _Unpickler(pickle._Unpickler):
    """Numbers, and stand-ins for SkyRL's own names: its batch is the plain state that it would be built from.

    It is Python's own and not the one in C, which takes the memory that a made-up index of its memo asks for.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in NUMPY:
            return super().find_class(module, name)
        if (module, name) == (_SKYRL, "_rebuild_tensor_batch"):
            return lambda cls, state: state
        if (module, name) == (_SKYRL, "TrainingInputBatch"):
            return None
        if (module, name) == ("torch", "device"):
            return lambda *parts: ":".join(map(str, parts))
        raise pickle.UnpicklingError(f"{_ASKS}{module}.{name}")


def load_skyrl(path: Path) -> Any:
    """What a pickle holds: plain values, numpy arrays, and of a SkyRL TrainingInputBatch its state.

    Raises:
        DataError: it asks for any other class, which is named, or it is damaged.
    """
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:
        raise _refusal(path, error) from error


def load_torch(path: Path, content: bytes | None = None) -> Any:
    """A torch file of plain values, tensors (on any device: they are loaded on the CPU) and numpy arrays.

    Args:
        path: the file.
        content: bytes of a torch file that lie within it, to be read instead.

    Raises:
        DataError: it asks for any other class, which is named, or it is damaged.
    """
    import numpy as np
    import torch

    multiarray = import_module("numpy._core.multiarray" if hasattr(np, "_core") else "numpy.core.multiarray")
    dtypes = [type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdUSO"]
    allowed: list[Any] = [np.dtype, np.ndarray, multiarray._reconstruct, multiarray.scalar, *dtypes]
    old: list[Any] = [(function, f"numpy.core.multiarray.{function.__name__}") for function in allowed[2:4]]
    try:
        with torch.serialization.safe_globals([*allowed, *old]):
            # Mapped, so that of the many ranks' files only what is looked at is read.
            mapped = content is None and zipfile.is_zipfile(path)
            source = path if content is None else BytesIO(content)
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: Exception) -> DataError:
    message = str(error).strip()
    found = _TORCH_CLASS.search(message)
    if found or message.startswith(_ASKS):
        wanted = found[1] if found else message.removeprefix(_ASKS)
        remedy = "save plain tensors, arrays and numbers"
        return DataError(f"it asks for {wanted}, and nothing in a file is executed", file=str(path), remedy=remedy)
    reason = message.split("\n")[0] or type(error).__name__
    return DataError(
        f"cannot be read: {reason}", file=str(path), remedy="it is damaged or of another kind: save it again"
    )
