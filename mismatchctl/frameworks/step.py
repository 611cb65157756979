"""One training step as flat arrays, and the values that a configuration computes from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Floats, Segments, TokenBatch
from mismatchctl.core.losses import Array
from mismatchctl.core.ratios import Float32Ratios, Ratios
from mismatchctl.corrections.application import CorrectedBlock, apply_correction
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Step:
    """A table with one row per sequence, and its valid tokens as flat arrays."""

    table: pa.Table  # columns under the names of the dump schema
    dtype: np.dtype[Any]  # dtype of computed values: `float32` or `float64`

    @classmethod
    def read(cls, table: pa.Table, dtype: str, aliases: Mapping[str, str]) -> Step:
        names = set(table.column_names)
        renamed = [aliases.get(name, name) for name in table.column_names]
        kept = [name if to in names else to for name, to in zip(table.column_names, renamed, strict=True)]
        return cls(table.rename_columns(kept), np.dtype(dtype))

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def rows(self) -> Segments:
        """Return the start and end of each row in the flat arrays that include masked tokens."""
        import pyarrow.compute as pc

        lengths = pc.list_value_length(self._column("rollout_log_probs"))
        return Segments.from_lengths(lengths.to_numpy(zero_copy_only=False))

    @cached_property
    def mask(self) -> Bools:
        if not self.has("response_mask"):
            return np.ones(self.rows.tokens, np.bool_)
        valid: Bools = self._flat("response_mask") != 0
        return valid

    @cached_property
    def segments(self) -> Segments:
        return Segments.from_lengths(self.rows.sum(self.mask))

    def micro_batches(self, size: int | None) -> list[NDArray[np.int64]]:
        """Return the row indices of each micro-batch. Micro-batches are in the order of their first rows."""
        if self.has("micro_batch"):
            groups: dict[Any, list[int]] = {}
            for row, name in enumerate(self.table["micro_batch"].to_pylist()):
                groups.setdefault(name, []).append(row)
            return [np.array(rows, np.int64) for rows in groups.values()]
        length = size or max(len(self), 1)
        return [np.arange(start, min(start + length, len(self))) for start in range(0, len(self), length)]

    def take(self, rows: NDArray[np.int64]) -> Step:
        return Step(self.table.take(rows), self.dtype)

    def has(self, column: str) -> bool:
        return column in self.table.column_names

    def values(self, column: str) -> Floats:
        """Return one value per valid token [T]. If a column has one value per row, each token gets its row's value."""
        return self.all_values(column)[self.mask]

    def all_values(self, column: str) -> Floats:
        """Return the values at all tokens, including masked tokens."""
        import pyarrow as pa

        if pa.types.is_nested(self._column(column).type):
            return self._flat(column).astype(self.dtype)
        return self.rows.spread(self._column(column).to_numpy(zero_copy_only=False).astype(self.dtype))

    def by_row(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Split an array with one value per valid token [T] into one array per row. Masked tokens get 0."""
        full = np.zeros(self.rows.tokens, values.dtype)
        full[self.mask] = values
        return np.split(full, self.rows.offsets[1:-1]) if len(self) else []

    def _column(self, name: str) -> pa.ChunkedArray:
        if not self.has(name):
            raise DataError(f"missing column {name}", remedy=f"the columns are {', '.join(self.table.column_names)}")
        return self.table[name]

    def _flat(self, name: str) -> NDArray[Any]:
        import pyarrow.compute as pc

        values: NDArray[Any] = pc.list_flatten(self._column(name)).to_numpy(zero_copy_only=False)
        if len(values) != self.rows.tokens:
            raise DataError(
                f"the column has {len(values)} values, but the rows have {self.rows.tokens} tokens", column=name
            )
        return values


Options = dict[str, Any]


@dataclass
class ConfiguredStep:
    """One training step with one configuration. Values per token [T] have the dtype of `step`, and can overflow."""

    step: Step
    options: Options  # all options, including defaults
    correction: Correction
    trained: str = "train_log_probs"  # the column with the log-probs of `train`
    anchored: str = "rollout_log_probs"  # the column with the log-probs of `rollout`
    single: bool = True  # False: statistics are float64 even if the dtype of the step is float32
    unknown: float | None = None  # replaces NaN in the rollout log-probs. None: NaN stays.

    @cached_property
    def segments(self) -> Segments:
        return self.step.segments

    @cached_property
    def rollout(self) -> Array:
        values = self.step.values(self.anchored)
        return values if self.unknown is None else np.where(np.isnan(values), self.unknown, values).astype(values.dtype)

    @cached_property
    def train(self) -> Array:
        return self.step.values(self.trained)

    @cached_property
    def current(self) -> Array:
        """Return the log-probs of the current policy. If they or the advantages are missing, return `train`."""
        return self.step.values("current_log_probs" if self.has_loss else self.trained)

    @cached_property
    def advantages(self) -> Array:
        return self.step.values("advantages") if self.step.has("advantages") else np.zeros_like(self.rollout)

    @property
    def has_loss(self) -> bool:
        return self.step.has("current_log_probs") and self.step.has("advantages")

    @cached_property
    def d(self) -> Array:
        """Return the log ratio train/rollout: the mismatch."""
        return self.train - self.rollout

    @cached_property
    def u(self) -> Array:
        """Return the log ratio current/train, which shows how much this step's updates have changed the policy."""
        return self.current - self.train

    @cached_property
    def v(self) -> Array:
        """Return log(current / rollout), the sum of mismatch (train / rollout) and policy update (current / train)."""
        return self.current - self.rollout

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return self.segments.lengths

    @property
    def tokens(self) -> int:
        return self.segments.tokens

    @cached_property
    def width(self) -> int:
        return int(self.step.rows.lengths.max(initial=0))

    @cached_property
    def batch(self) -> TokenBatch:
        mask = self.step.mask
        places = self.step.rows.places[mask]
        return TokenBatch(
            self.segments, self.rollout, self.train, self.current, places.astype(np.int64), self.advantages
        )

    @cached_property
    def applied(self) -> CorrectedBlock:
        """Return the result of the correction. Statistics are float32 if the dtype is float32 and `single` is True."""
        single = self.single and self.step.dtype == np.float32
        kind, rules = Ratios, self.correction
        if single:
            kind = Float32Ratios
            gates = tuple(gate.model_copy(update={"precision": "float32"}) for gate in rules.gates)
            rules = Correction(name=rules.name, weight=rules.weight, gates=gates, loss=rules.loss)
        policies = {"train": self.train, "proximal": self.train, "rollout": self.rollout, "current": self.current}
        made = {}
        for source in self.correction.sources:
            policy, _, reference = source.partition("/")
            made[source] = kind(policies[policy], policies[reference], self.segments)
        return apply_correction(rules, made, self.batch)

    @cached_property
    def keep(self) -> Bools:
        return self.applied.kept.expand()

    @cached_property
    def counted(self) -> Bools:
        return self.applied.counted.expand()

    def passed(self, chosen: Callable[[Gate], bool]) -> Bools:
        flags = np.ones(self.tokens, np.bool_)
        for outcome in self.applied.gates:
            if chosen(outcome.gate):
                flags &= ~outcome.rejected
        return flags

    @cached_property
    def raw_weights(self) -> Array:
        """Return each token's weight after truncation, also for rejected tokens. Without a weight rule, it is 1."""
        return self.applied.token_weights().astype(self.step.dtype)

    @cached_property
    def weights(self) -> Array:
        return np.where(self.keep, self.raw_weights, 0).astype(self.step.dtype)

    def mean(self, values: Array, where: Bools | None = None) -> float:
        chosen = values if where is None else values[where]
        return float(np.mean(chosen, dtype=np.float64)) if len(chosen) else 0.0

    def row_means(self, values: Array, where: Bools | None = None) -> Array:
        """Return one mean per row [S], or 0 for a row without selected tokens."""
        where = np.ones(self.tokens, np.bool_) if where is None else where
        return self.segments.sum(np.where(where, values, 0.0)) / np.maximum(self.segments.sum(where), 1)

    def row_max(self, values: Array) -> Array:
        return np.where(self.segments.nonempty, self.segments.max(values), 0).astype(values.dtype)

    @cached_property
    def counts(self) -> Array:
        return np.maximum(self.lengths, 1).astype(self.step.dtype)

    def row_sum(self, values: Array) -> Array:
        """Return one sum per row [S], in the dtype of the values. As in torch, a sum of booleans is float32."""
        return self.segments.sum(values).astype(np.float32 if values.dtype == np.bool_ else values.dtype)

    def row_mean(self, values: Array) -> Array:
        """Return one mean per row [S], or 0 for an empty row."""
        return self.row_sum(values) / self.counts

    def each(self, value: float) -> Array:
        return np.full(self.tokens, value)

    def by_rows(self, rows: float | None = None, where: Bools | None = None) -> Array:
        """Return weights [T] that turn sums over tokens into means over rows: 1 / (selected tokens of row * rows)."""
        counts = self.lengths if where is None else self.segments.sum(where)
        return self.segments.spread(1.0 / np.maximum(counts, 1)) / (len(self.step) if rows is None else rows)


def k3(x: Array) -> Array:
    """Return e^x - 1 - x for the log ratios x [T]. expm1 in float64 keeps the digits of a small x."""
    return np.expm1(x.astype(np.float64)) - x
