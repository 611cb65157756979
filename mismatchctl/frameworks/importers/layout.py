"""What a framework's file looks like, said once, and rows of the contract made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.errors import DataError

Row = dict[str, Any]

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("sequence_id", pa.string()),
        ("rollout_log_probs", pa.list_(pa.float32())),
        ("train_log_probs", pa.list_(pa.float32())),
        ("response_mask", pa.list_(pa.bool_())),
        ("token_ids", pa.list_(pa.int64())),
        ("advantages", pa.list_(pa.float32())),
        ("reward", pa.float64()),
    ]
)
"""Columns of every converted file; null where the source does not say."""

PER_TOKEN = tuple(name for name in SCHEMA.names if pa.types.is_list(SCHEMA.field(name).type))


@dataclass(frozen=True)
class Layout:
    """One framework's file.

    Attributes:
        framework: its name, as `--from` takes it.
        columns: column of the contract -> name in the file.
        next_token: columns of the contract whose entry j is about token j + 1; the others are unshifted.
        prompt: whether the token axis begins with the prompt.
        padding: the side that rows are padded on.
        mask: what the mask's ones mean.
        patterns: names of its files.
        rows: what reads one file, as values of the file's own names.
        duplicates: whether several files may hold the same sequence of a step (tensor-parallel ranks).
        recognizes: whether a file whose name fits none of `patterns` alone is one of these.
    """

    framework: str
    columns: Mapping[str, str]
    prompt: bool
    padding: Literal["left", "right", "none"]
    mask: str
    patterns: tuple[str, ...]
    rows: Callable[[Path], Iterator[Row]] = field(repr=False)
    next_token: frozenset[str] = frozenset()
    duplicates: bool = False
    recognizes: Callable[[Path], bool] = field(default=lambda path: True, repr=False)

    def read(self, path: Path) -> Iterator[Row]:
        """Rows of the contract, one by one.

        Raises:
            DataError: a column is missing, lengths differ, or the file cannot be read.
        """
        for number, raw in enumerate(self.rows(path)):
            yield self._row(path, number, raw)

    def _row(self, path: Path, number: int, raw: Row) -> Row:
        row: Row = {name: raw.get(name) for name in SCHEMA.names}
        for column, name in self.columns.items():
            value = raw.get(name)
            if value is None:
                if column in ("rollout_log_probs", "train_log_probs", "response_mask"):
                    remedy = f"{self.framework} needs it for {column}"
                    raise DataError("there is no such value", file=str(path), row=number, column=name, remedy=remedy)
                continue
            row[column] = np.asarray(value, dtype=np.float32 if "log_probs" in column else None)
        given = {name: row[name] for name in PER_TOKEN if isinstance(row[name], np.ndarray) and row[name].ndim}
        for name in given.keys() & self.next_token:
            given[name] = np.concatenate([np.zeros(1, given[name].dtype), given[name]])
        if len({len(values) for values in given.values()}) > 1:
            lengths = ", ".join(f"{self.columns[name]} {len(values)}" for name, values in given.items())
            raise DataError(f"lists differ in length: {lengths}", file=str(path), row=number)
        mask = given["response_mask"] != 0
        given["response_mask"] = mask
        inside = np.flatnonzero(mask)
        window = slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)
        row.update({name: values[window] for name, values in given.items()})
        if row["advantages"] is not None and "advantages" not in given:
            row["advantages"] = np.full(len(row["response_mask"]), float(row["advantages"]), np.float32)
        row["sequence_id"] = f"{path.stem}:{number}" if row["sequence_id"] is None else str(row["sequence_id"])
        return row


LEAST_PAIRS, CLEAR = 50, 0.3
"""Tokens below which a shift is not judged, and by how much another lag must correlate better."""


def check_alignment(path: Path, rows: list[Row]) -> None:
    """Refuse rows whose rollout log-probs fit their train log-probs better one token to the side.

    Raises:
        DataError: a shift by one.
    """
    correlation = {lag: _correlation(rows, lag) for lag in (-1, 0, 1)}
    best = max(correlation, key=lambda lag: correlation[lag])
    if best != 0 and correlation[best] > correlation[0] + CLEAR:
        raise DataError(
            f"train log-probs fit the rollout's shifted by {best:+d} token (correlation {correlation[best]:.2f}) "
            f"better than unshifted ({correlation[0]:.2f})",
            file=str(path),
            remedy="one of both columns was saved with another alignment: save it again",
        )


def _correlation(rows: list[Row], lag: int) -> float:
    left, right = [], []
    for row in rows:
        mask: NDArray[np.bool_] = row["response_mask"]
        rollout, train = row["rollout_log_probs"], row["train_log_probs"]
        end = len(mask) - abs(lag)
        a, b = (0, lag) if lag >= 0 else (-lag, 0)
        both = mask[a : a + end] & mask[b : b + end]
        left.append(rollout[a : a + end][both])
        right.append(train[b : b + end][both])
    x, y = np.concatenate(left).astype(np.float64), np.concatenate(right).astype(np.float64)
    good = np.isfinite(x) & np.isfinite(y)
    x, y = x[good], y[good]
    if len(x) < LEAST_PAIRS or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
