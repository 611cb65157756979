"""Micro-batches of a dump that names none: so many consecutive rows of each step. And turns of a response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mismatchctl.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.contract import TURN
from mismatchctl.correction import Correction
from mismatchctl.correction.gates import adjacent_runs
from mismatchctl.dumps import Dump, Problems
from mismatchctl.errors import ConfigError
from mismatchctl.measure.hashes import cluster_hashes
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
        "one. --micro-batch-size N takes N rows of it at a time, as the trainer did"
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


def are_within(dump: Dump) -> bool:
    """Whether turns are parts of sequences, and not something that the dump says of each whole sequence.

    Raises:
        ConfigError: its column `turn` holds something else.
    """
    for file in dump.files:
        if TURN in file.ignored:
            problem = f"--by turn: the column turn {file.ignored[TURN]} in {file.path}"
            raise ConfigError(f"{problem}; give turns as numbers, or the column another name")
    return all(
        TURN not in file.partition and (TURN not in file.columns or file.is_per_token(TURN)) for file in dump.files
    )


def by_turns(batch: TokenBatch) -> TokenBatch:
    """A sequence of its own for each turn, which its column `turn` names, in the cluster of the whole one."""
    told, offsets = batch.others.get(TURN), batch.segments.offsets
    turns = adjacent_runs(batch).offsets if told is None else np.union1d(_changes(told), offsets)
    starts = turns[:-1]
    sequence = np.searchsorted(offsets, starts, side="right") - 1
    number = np.arange(len(starts)) - np.searchsorted(sequence, sequence) + 1 if told is None else told[starts]
    columns = {name: values[sequence] for name, values in batch.columns.items() if name != "sequence_id"}
    columns |= {TURN: number, "prompt_id": cluster_hashes(batch)[sequence]}
    return replace(
        batch, segments=Segments(turns), columns=columns, file=batch.file[sequence], rows=batch.rows[sequence]
    )


def _changes(values: Float64s) -> Ints:
    """Tokens whose value differs from that of the one before, NaN being a value."""
    before, after = values[:-1], values[1:]
    return np.flatnonzero((before != after) & ~(np.isnan(before) & np.isnan(after))) + 1
