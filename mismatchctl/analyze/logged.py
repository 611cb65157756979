"""What a framework would have logged for each step: its rows are kept until the step is complete, then replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from mismatchctl.batch import Floats, TokenBatch
from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.finite import finite
from mismatchctl.frameworks import Framework
from mismatchctl.frameworks.framework import ReplayOptions
from mismatchctl.measure.groups import Cells, GroupMerger
from mismatchctl.measure.hashes import Value
from mismatchctl.measure.reduce import cut

Step = tuple[str, Value]
"""(run, step)."""
NAMES = ("micro_batch", "rollout_ids")
"""Columns that say what a framework sums up together."""
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
    for name in NAMES:
        if name in batch.columns:
            columns[name] = pa.array([_named(value) for value in batch.columns[name].tolist()], pa.string())
    return pa.table(columns)


def _named(value: object) -> str | None:
    """A name as text; None where a row has none (NaN in a column of numbers)."""
    return None if value is None or value != value else str(value)


def _lists(offsets: pa.Array, values: Floats) -> pa.Array:
    return pa.LargeListArray.from_arrays(offsets, pa.array(values.astype(np.float64)))


class LoggedSteps(GroupMerger[list[pa.Table]]):
    """What one framework logs, by run, step and correction.

    Attributes:
        options: how it is replayed.
        refused: why it cannot do a correction, by the correction's name.

    Raises:
        ConfigError: the framework has no such reducer.
    """

    at_once = 0

    def __init__(self, framework: Framework, corrections: Iterable[Correction], options: ReplayOptions) -> None:
        if options.reducer is not None and options.reducer not in framework.reducers:
            known = " or ".join(framework.reducers) or "one way only"
            raise ConfigError(f"{framework.title} knows no reducer {options.reducer}: it sums up {known}")
        super().__init__(())
        self._framework, self.options = framework, options
        self._corrections = list(corrections)
        self._logged: dict[Step, dict[str, dict[str, float]]] = {}
        self.refused: dict[str, str] = {}

    def add(self, parts: Parts) -> None:
        """Keep the rows of a unit."""
        for (run, step), table in parts:
            self.merge(run, step, (), [table])

    def _size(self, cell: list[pa.Table]) -> int:
        return sum(map(len, cell))

    def _both(self, cell: list[pa.Table], more: list[pa.Table]) -> list[pa.Table]:
        return cell + more

    def _close_groups(self, run: str, steps: list[Value], groups: Sequence[Cells[list[pa.Table]]]) -> None:
        for step, (tables,) in zip(steps, map(dict.values, groups), strict=True):
            shared = [name for name in tables[0].column_names if all(name in t.column_names for t in tables)]
            table = pa.concat_tables([part.select(shared) for part in tables])
            self._logged[run, step] = {
                correction.name: self._replay(table, correction)
                for correction in self._corrections
                if correction.name not in self.refused
            }

    def _replay(self, table: pa.Table, correction: Correction) -> dict[str, float]:
        options, framework = self.options, self._framework
        try:
            out = framework.replay(table, correction, options)
            logged = out.logged | framework.logged_beside(table, correction, options.dtype)
            untold = framework.untold(correction)
            return {name: value for name, value in logged.items() if name not in untold}
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
    return {
        name: [None if (value := step.get(name)) is None else finite(float(value)) for step in steps] for name in known
    }
