"""Micro-batches of a dump that names none: so many consecutive rows of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Ints, TokenBatch
from mismatchctl.correction import Correction
from mismatchctl.dumps import Dump, Problems
from mismatchctl.errors import option
from mismatchctl.result import Result

UNNAMED = "the dump has no column micro_batch"
"""What a warning says of it."""


@dataclass(frozen=True)
class MicroBatches:
    """The number of each row's micro-batch within its step, by file: `rows` ascending, `numbers` along with them."""

    rows: Mapping[int, Ints]
    numbers: Mapping[int, Ints]

    def of(self, batch: TokenBatch) -> Ints:
        """The micro-batch of each sequence of a batch [S]."""
        found = np.empty(len(batch), np.int64)
        for file in np.unique(batch.file).tolist():
            own = batch.file == file
            found[own] = self.numbers[file][np.searchsorted(self.rows[file], batch.rows[own])]
        return found


def numbered(dump: Dump, size: int) -> MicroBatches:
    """Number the micro-batches of `size` rows, in the order of the dump; this reads it once more.

    Raises:
        DataError: as of the reading itself.
    """
    seen: Counter[tuple[object, object]] = Counter()
    rows: dict[int, list[int]] = {}
    numbers: dict[int, list[int]] = {}
    for unit in dump.readings:
        for batch in dump.read(unit, Problems()):
            runs = batch.columns.get("run", np.full(len(batch), unit.file.run, object))
            steps = batch.columns.get("step", np.full(len(batch), None, object))
            places = (values.tolist() for values in (batch.file, batch.rows, runs, steps))
            for file, row, run, step in zip(*places, strict=True):
                rows.setdefault(file, []).append(row)
                numbers.setdefault(file, []).append(seen[run, step] // size)
                seen[run, step] += 1
    return MicroBatches(
        *({file: np.array(found, np.int64) for file, found in each.items()} for each in (rows, numbers))
    )


def taken_for_steps(corrections: Iterable[Correction]) -> str:
    """That the whole step was taken for a micro-batch, and what helps."""
    names = dict.fromkeys(c.name.split(" at point ")[0] for c in corrections if c.normalizes_micro_batches)
    return (
        f"{', '.join(names)}: weights are normalized within micro-batches, and {UNNAMED}: the whole step was taken for "
        f"one. {option('micro_batch_size', int)} takes N rows of it at a time, as the trainer did"
    )


def warn_of_steps(result: Result, corrections: Iterable[Correction]) -> None:
    """Say which corrections took the whole step for a micro-batch, and what that may change."""
    names = [correction.name for correction in corrections if correction.normalizes_micro_batches]
    if not names:
        return
    factors = [run.overall.corrections[names[0]]["normalization_factor"].value for run in result.runs.values()]
    known = [f"{factor:.6g}" for factor in factors if factor is not None]
    divided = f"weights of {names[0]} are divided by {', '.join(known)} in the mean; " if known else ""
    result.warnings.append(
        f"{taken_for_steps(corrections)}: {divided}with one row in each, the mean weight of every sequence becomes 1"
    )
