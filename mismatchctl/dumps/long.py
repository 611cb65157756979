"""The long layout: one row per token, the rows of a sequence one after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Ints
from mismatchctl.contract import REQUIRED
from mismatchctl.dumps.arrays import changes, nulls, numbers, single, whole
from mismatchctl.dumps.blocks import POSITION, DecodedBlock
from mismatchctl.dumps.files import DumpFile, Unit, pieces
from mismatchctl.dumps.plan import KEYS
from mismatchctl.dumps.problems import SORT_REMEDY, Fault
from mismatchctl.dumps.wide import BATCH_TOKENS


@dataclass(frozen=True)
class Stretch:
    """Whole sequences of a long file: their columns by canonical name, their first row, where each begins."""

    columns: dict[str, pa.Array]
    first: int
    starts: Ints
    length: int


def read_long(
    unit: Unit, columns: Collection[str], broken: Mapping[int, str], watched: Collection[str] = ()
) -> Iterator[DecodedBlock]:
    """Decode a unit in pieces of whole sequences; `broken` says which sequences lie in several pieces."""
    for stretch in stretches(unit, [*columns, *watched]):
        yield _block(unit.file, stretch, broken, watched)


def stretches(unit: Unit, columns: Collection[str]) -> Iterator[Stretch]:
    """Whole sequences of a unit, about `BATCH_TOKENS` rows at a time; a longer sequence comes whole."""
    columns = dict.fromkeys([*columns, *(column for column in KEYS if column in unit.file.columns)])
    parts: list[pa.Table] = []
    first, rows, enough = unit.start, 0, BATCH_TOKENS
    for table in _rows(unit, columns):
        parts.append(table)
        rows += len(table)
        if rows < enough:
            continue
        joined = pa.concat_tables(parts)
        stretch = _stretch(unit.file, joined, columns, first)
        done = int(stretch.starts[-1])  # the last sequence may go on in the next piece
        if done:
            held = {column: array.slice(0, done) for column, array in stretch.columns.items()}
            yield Stretch(held, first, stretch.starts[:-1], done)
        parts, first, rows = [joined.slice(done)], first + done, rows - done
        enough = max(BATCH_TOKENS, 2 * rows)  # doubling, so that a huge sequence is not copied often
    if rows:
        yield _stretch(unit.file, pa.concat_tables(parts), columns, first)


def _rows(unit: Unit, columns: Collection[str]) -> Iterator[pa.Table]:
    """The unit's rows in pieces, without what its row groups hold before and after it."""
    lengths, stop = unit.file.contents.rows, unit.start + unit.rows
    row = sum(lengths[: unit.row_group])
    group = unit.row_group
    while row < stop:
        # Of the last row group often only the head is needed: a piece of that size keeps the rest undecoded.
        size = min(BATCH_TOKENS, stop - row)
        ahead = row
        row += lengths[group]
        for table in pieces(unit.file, columns, [group], size):
            begin, end = max(unit.start - ahead, 0), min(stop - ahead, len(table))
            if end > begin:
                yield table.slice(begin, end - begin)
            ahead += len(table)
            if ahead >= stop:
                break
        group += 1


def _stretch(file: DumpFile, table: pa.Table, columns: Collection[str], first: int) -> Stretch:
    arrays = {column: single(table.column(file.columns[column])) for column in columns}
    if POSITION in arrays:
        arrays[POSITION] = whole(arrays[POSITION])
    changed = [changes(arrays[column]) for column in KEYS if column in arrays]
    starts = np.concatenate([[0], np.flatnonzero(np.logical_or.reduce(changed)) + 1]).astype(np.int64)
    return Stretch(arrays, first, starts, len(table))


def _block(file: DumpFile, stretch: Stretch, broken: Mapping[int, str], watched: Collection[str]) -> DecodedBlock:
    columns = {column: array for column, array in stretch.columns.items() if column not in watched}
    unchecked = {column: array for column, array in stretch.columns.items() if column in watched}
    tokens = {column: array for column, array in columns.items() if file.is_per_token(column)}
    beside = {column: array for column, array in unchecked.items() if file.is_per_token(column)}
    starts = pa.array(stretch.starts)
    per_sequence = {column: array for column, array in columns.items() if column not in tokens}
    block = DecodedBlock(
        file=file,
        offsets=np.append(stretch.starts, stretch.length),
        files=np.full(len(stretch.starts), file.index),
        rows=stretch.first + stretch.starts,
        tokens={column: tokens[column] for column in dict.fromkeys((*REQUIRED, *tokens))},
        values={column: array.take(starts) for column, array in per_sequence.items()},
        watched_tokens=beside,
        watched_values={column: array.take(starts) for column, array in unchecked.items() if column not in beside},
    )
    _check_whole(block, broken)
    _check_ids(block, stretch)
    _check_constant(block, per_sequence)
    _check_positions(block, stretch)
    return block


def _check_whole(block: DecodedBlock, broken: Mapping[int, str]) -> None:
    """Sequences of which other rows lie elsewhere."""
    for row in sorted(broken):
        at = np.flatnonzero(block.rows == row)
        if len(at):
            reason = "sequence_id: in several pieces"
            block.faults.append(Fault("sequence_id", reason, block.rows[at], row, broken[row], SORT_REMEDY))


def _check_ids(block: DecodedBlock, stretch: Stretch) -> None:
    missing = nulls(stretch.columns["sequence_id"])
    if missing is not None:
        block.fault("sequence_id", "sequence_id: missing", np.flatnonzero(missing), "the row has no sequence_id")


def _check_constant(block: DecodedBlock, per_sequence: Mapping[str, pa.Array]) -> None:
    """Columns that describe a sequence must say the same in all of its rows."""
    for column, array in per_sequence.items():
        if column not in KEYS:
            differ = np.append(False, changes(array))
            differ[block.offsets[:-1]] = False
            _note(block, column, f"{column}: changes within a sequence", differ)


def _check_positions(block: DecodedBlock, stretch: Stretch) -> None:
    """Positions ascend strictly within a sequence."""
    position = stretch.columns[POSITION]
    missing = nulls(position)
    if missing is not None:
        bad = np.flatnonzero(missing)
        block.fault(POSITION, "position: missing", bad, "the row has no position, or none that is a whole number")
    values = numbers(position)
    inside = np.ones(stretch.length, np.bool_)
    inside[block.offsets[:-1]] = False
    if stretch.length < 2:
        return
    bad = np.flatnonzero(inside[1:] & ~(values[1:] > values[:-1])) + 1
    if len(bad):
        problem = f"position {values[bad[0]]} follows {values[bad[0] - 1]}: positions must ascend in a sequence"
        block.fault(POSITION, "position: not ascending", bad, problem, SORT_REMEDY)
    _check_steps(block, stretch, inside, values)


def _check_steps(block: DecodedBlock, stretch: Stretch, inside: Bools, values: NDArray[Any]) -> None:
    """A step that changes where id and position just go on is no new sequence but a wrong step."""
    if "step" not in stretch.columns:
        return
    same_id = ~changes(stretch.columns["sequence_id"])
    goes_on = same_id & ~inside[1:] & (values[1:] == values[:-1] + 1)
    if "run" in stretch.columns:
        goes_on &= ~changes(stretch.columns["run"])
    _note(block, "step", "step: changes within a sequence", np.append(False, goes_on))


def _note(block: DecodedBlock, column: str, reason: str, flags: Bools) -> None:
    bad = np.flatnonzero(flags)
    if len(bad):
        block.fault(column, reason, bad, f"{column} changes within a sequence", SORT_REMEDY)
