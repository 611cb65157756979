"""The worst tokens and sequences of a run, as documents tell them: places, what describes them, and token ids."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.dumps import Dump
from mismatchctl.measure.tails import Worst


def worst_rows(worst: Worst, dump: Dump) -> Iterator[tuple[dict[str, Any], NDArray[Any] | None]]:
    """Each with its place, as plain Python values, and the token ids of its sequence where the dump has them."""
    ids: dict[tuple[int, int], NDArray[Any]] = {}
    if dump.has("token_ids"):
        for file in np.unique(worst.place[:, 0]).tolist():  # the few units that hold them are read
            rows = np.unique(worst.place[worst.place[:, 0] == file, 1]).tolist()
            ids |= {(file, row): own for row, own in dump.token_ids(file, rows).items()}
    for index, (file, row, position) in enumerate(worst.place.tolist()):
        fields = {name: _plain(values[index]) for name, values in worst.fields.items()}
        yield {"file": dump.files[file].path, "row": row, "position": position} | fields, ids.get((file, row))


def worst_tokens(worst: Worst, dump: Dump, context: int) -> Iterator[dict[str, Any]]:
    """The same of tokens, each with its id and so many before it."""
    for fields, ids in worst_rows(worst, dump):
        token = int(fields.pop("token"))
        if ids is not None and token < len(ids):
            fields |= {"token_id": int(ids[token]), "context_ids": ids[max(0, token - context) : token].tolist()}
        yield fields


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        largest = np.finfo(np.float64).max
        return tuple(float(np.clip(number, -largest, largest)) for number in value.tolist())
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value
