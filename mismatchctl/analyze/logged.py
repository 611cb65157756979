"""What a framework would have logged for each step: its rows are kept until the step is complete, then replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from mismatchctl.batch import Floats, TokenBatch
from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks import Framework
from mismatchctl.sums.reduce import Value, cut

Step = tuple[str, Value]
"""(run, step)."""
Parts = list[tuple[Step, pa.Table]]
"""Rows by step, in the order of the input."""


def step_tables(batch: TokenBatch, run: str) -> Parts:
    """The rows of a batch by step as tables in the contract's names; masked tokens are not in them."""
    return [((name, step), _table(part)) for name, (step, _), part in cut(batch, run, ())]


def _table(batch: TokenBatch) -> pa.Table:
    offsets = pa.array(batch.segments.offsets)
    tokens = {
        "rollout_log_probs": batch.rollout,
        "train_log_probs": batch.train,
        "current_log_probs": batch.current,
        "advantages": batch.advantages,
    }
    columns = {name: _lists(offsets, values) for name, values in tokens.items() if values is not None}
    if "micro_batch" in batch.columns:
        columns["micro_batch"] = pa.array([str(name) for name in batch.columns["micro_batch"].tolist()], pa.string())
    return pa.table(columns)


def _lists(offsets: pa.Array, values: Floats) -> pa.Array:
    return pa.LargeListArray.from_arrays(offsets, pa.array(values.astype(np.float64)))


class LoggedSteps:
    """What one framework logs, by run, step and correction.

    Attributes:
        refused: why it cannot do a correction, by the correction's name.
    """

    def __init__(self, framework: Framework, corrections: Iterable[Correction], micro_batch_size: int | None) -> None:
        self._framework, self._size = framework, micro_batch_size
        self._corrections = list(corrections)
        self._open: dict[Step, list[pa.Table]] = {}
        self._logged: dict[Step, dict[str, dict[str, float]]] = {}
        self.refused: dict[str, str] = {}

    def add(self, parts: Parts) -> None:
        """Keep the rows of a unit."""
        for step, table in parts:
            self._open.setdefault(step, []).append(table)

    def close(self, may_grow: Callable[[str, Value], bool] = lambda run, step: False) -> None:
        """Replay every step that cannot grow any more."""
        for step in [key for key in self._open if not may_grow(*key)]:
            tables = self._open.pop(step)
            shared = [name for name in tables[0].column_names if all(name in t.column_names for t in tables)]
            table = pa.concat_tables([part.select(shared) for part in tables])
            self._logged[step] = {
                correction.name: self._replay(table, correction)
                for correction in self._corrections
                if correction.name not in self.refused
            }

    def _replay(self, table: pa.Table, correction: Correction) -> dict[str, float]:
        try:
            return self._framework.replay(table, correction, micro_batch_size=self._size).logged
        except ConfigError as error:
            self.refused[correction.name] = str(error)
        except DataError:  # no valid token: nothing would be logged
            pass
        return {}

    def of_run(self, run: str, labels: Sequence[Value]) -> dict[str, dict[str, list[float | None]]]:
        """By correction and name, one value per step; None where nothing finite is logged."""
        steps = [self._logged.get((run, label), {}) for label in labels]
        names = [item.name for item in self._corrections if item.name not in self.refused]
        return {name: _series([step.get(name, {}) for step in steps]) for name in names}


def _series(steps: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    known = dict.fromkeys(name for step in steps for name in step)
    return {name: [_finite(step.get(name)) for step in steps] for name in known}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
