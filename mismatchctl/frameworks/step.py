"""The rows of one training step as flat arrays: what every framework's replay starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Floats, Segments
from mismatchctl.errors import DataError


@dataclass(frozen=True)
class Step:
    """A wide table (one row per sequence, list columns), its valid tokens flat.

    Attributes:
        table: columns under the names of the dump contract.
        dtype: what values are computed in: `float32` or `float64`.
    """

    table: pa.Table
    dtype: np.dtype[Any]

    @classmethod
    def read(cls, table: pa.Table, dtype: str, aliases: Mapping[str, str]) -> Step:
        """A table in the contract's names or in the framework's, which `aliases` translates."""
        names = set(table.column_names)
        renamed = [aliases.get(name, name) for name in table.column_names]
        kept = [name if to in names else to for name, to in zip(table.column_names, renamed, strict=True)]
        return cls(table.rename_columns(kept), np.dtype(dtype))

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def rows(self) -> Segments:
        """One segment per row over all its tokens, masked ones too."""
        import pyarrow.compute as pc

        lengths = pc.list_value_length(self._column("rollout_log_probs"))
        return Segments.of(lengths.to_numpy(zero_copy_only=False))

    @cached_property
    def mask(self) -> Bools:
        """Which tokens of the rows are valid, over all tokens."""
        if not self.has("response_mask"):
            return np.ones(self.rows.tokens, np.bool_)
        valid: Bools = self._flat("response_mask") != 0
        return valid

    @cached_property
    def segments(self) -> Segments:
        """One segment per row over its valid tokens."""
        return Segments.of(self.rows.sum(self.mask))

    def micro_batches(self, size: int | None) -> list[NDArray[np.int64]]:
        """The rows of each micro-batch, in the order in which they first occur.

        Args:
            size: consecutive rows in each, where no column `micro_batch` names them; None: all rows are one.
        """
        if self.has("micro_batch"):
            groups: dict[Any, list[int]] = {}
            for row, name in enumerate(self.table["micro_batch"].to_pylist()):
                groups.setdefault(name, []).append(row)
            return [np.array(rows, np.int64) for rows in groups.values()]
        length = size or max(len(self), 1)
        return [np.arange(start, min(start + length, len(self))) for start in range(0, len(self), length)]

    def take(self, rows: NDArray[np.int64]) -> Step:
        """Some of the rows."""
        return Step(self.table.take(pa.array(rows)), self.dtype)

    def has(self, column: str) -> bool:
        """Whether the table has this column."""
        return column in self._columns

    @cached_property
    def _columns(self) -> frozenset[str]:
        return frozenset(self.table.column_names)  # the table makes the list anew each time

    def values(self, column: str) -> Floats:
        """A column's values on the valid tokens, in the step's dtype [T]; one number per row is repeated."""
        if not pa.types.is_floating(self._column(column).type) and not pa.types.is_integer(self._column(column).type):
            return self._flat(column)[self.mask].astype(self.dtype)
        per_row = self._column(column).to_numpy(zero_copy_only=False).astype(self.dtype)
        return self.segments.spread(per_row)

    def everywhere(self, column: str) -> Floats:
        """A column's values on all tokens of the rows, masked ones too, in the step's dtype."""
        if pa.types.is_nested(self._column(column).type):
            return self._flat(column).astype(self.dtype)
        return self.rows.spread(self._column(column).to_numpy(zero_copy_only=False).astype(self.dtype))

    def by_row(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Values of the valid tokens [T] as one array per row over all its tokens; 0 where masked."""
        full = np.zeros(self.rows.tokens, values.dtype)
        full[self.mask] = values
        return np.split(full, self.rows.offsets[1:-1]) if len(self) else []

    def _column(self, name: str) -> pa.ChunkedArray:
        if not self.has(name):
            raise DataError(
                f"there is no column {name}", remedy=f"the columns are {', '.join(self.table.column_names)}"
            )
        return self.table[name]

    def _flat(self, name: str) -> NDArray[Any]:
        import pyarrow.compute as pc

        values: NDArray[Any] = pc.list_flatten(self._column(name)).to_numpy(zero_copy_only=False)
        if len(values) != self.rows.tokens:
            raise DataError(f"{len(values)} values for {self.rows.tokens} tokens", column=name)
        return values
