"""Decode units in the wide layout (a row per sequence) and the long layout (a row per token)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Floats, Ints, Segments
from mismatchctl.core.schema import PARTIAL_COLUMNS, REQUIRED_COLUMNS
from mismatchctl.data.arrays import ListColumn, find_changes, find_nulls, to_numpy, to_plain_array, to_positions
from mismatchctl.data.blocks import MASK_COLUMN, POSITION_COLUMN, DecodedBlock
from mismatchctl.data.catalog import SEQUENCE_KEYS
from mismatchctl.data.files import DumpFile, ReadUnit, read_pieces
from mismatchctl.data.formats import MOST_SEQUENCE_TOKENS
from mismatchctl.data.problems import (
    EXAMPLE_ROWS,
    SORT_REMEDY,
    Fault,
    LengthMismatch,
    count_unequal_rows,
    describe_lengths,
)
from mismatchctl.errors import DataError
from mismatchctl.io.stores import escape_unprintable

BATCH_TOKENS = 1 << 21
"""Approximate tokens per batch. Larger row groups are decoded in several pieces."""
_COMPARED_ROWS = 64
"""Maximum number of rows whose list ends are compared."""
BATCH_ROWS = 1 << 16
"""Sequences per batch, at most: each takes about 500 bytes, with or without tokens."""


def read_wide(unit: ReadUnit, columns: Collection[str], watched: Collection[str] = ()) -> Iterator[DecodedBlock]:
    """Decode a unit, in pieces if it is large. The pieces only depend on the file."""
    for first, table in read_wide_tables(unit, [*columns, *watched]):
        yield build_wide_block(unit.file, table, np.arange(first, first + len(table)), columns, watched)


def read_wide_tables(unit: ReadUnit, columns: Collection[str]) -> Iterator[tuple[int, pa.Table]]:
    rows = None
    if unit.tokens > BATCH_TOKENS * 3 // 2 or unit.rows > BATCH_ROWS:
        rows = max(1, min(unit.rows * BATCH_TOKENS // max(unit.tokens, 1), BATCH_ROWS))
    first = unit.start
    for table in read_pieces(unit.file, columns, range(unit.row_group, unit.row_group + unit.row_groups), rows):
        for piece in _split_by_tokens(unit.file, table, first):
            yield first, piece
            first += len(piece)


def _split_by_tokens(file: DumpFile, table: pa.Table, first: int) -> Iterator[pa.Table]:
    """Yield the rows in pieces of at most about `BATCH_TOKENS` tokens, if some rows are far longer than others."""
    names = [file.columns[column] for column in REQUIRED_COLUMNS if file.is_list(column)]
    columns = [table.column(name) for name in names if name in table.column_names]
    if not columns or max(_count_values(column) for column in columns) <= min(
        BATCH_TOKENS * 3 // 2, MOST_SEQUENCE_TOKENS
    ):
        yield table
        return
    lengths = np.max([ListColumn.of(to_plain_array(column)).lengths for column in columns], axis=0)
    if lengths.max(initial=0) > MOST_SEQUENCE_TOKENS:
        row = int(np.argmax(lengths > MOST_SEQUENCE_TOKENS))
        problem = f"the row has {lengths[row]:,} tokens, and at most {MOST_SEQUENCE_TOKENS:,} are read"
        raise DataError(problem, file=file.path, row=first + row, remedy="write one row per sequence")
    segments = Segments(np.concatenate([[0], np.cumsum(lengths)]))
    most = max(segments.tokens, 1) if segments.tokens <= BATCH_TOKENS * 3 // 2 else BATCH_TOKENS
    for start, stop in segments.blocks(most):
        yield table.slice(start, stop - start)


def _count_values(column: pa.ChunkedArray) -> int:
    return sum(len(getattr(chunk, "storage", chunk).values) for chunk in column.chunks)


def build_wide_block(
    file: DumpFile,
    table: pa.Table,
    rows: Ints,
    columns: Collection[str],
    watched: Collection[str] = (),
) -> DecodedBlock:
    """Concatenate the tokens of rows whose lists match, and record the other rows as faults."""
    arrays = {column: to_plain_array(table.column(file.columns[column])) for column in columns}
    lists = {column: ListColumn.of(array) for column, array in arrays.items() if file.is_list(column)}
    lists = {column: lists[column] for column in dict.fromkeys((*REQUIRED_COLUMNS, *lists))}
    faults = list(find_mismatched_lists(file, lists, rows))
    named = table.column(file.columns["run"]) if "run" in file.columns else None
    apart = _unequal(file, lists, named, rows) if faults else {}
    keep: Bools | None = None
    if faults:
        keep = ~np.isin(rows, np.concatenate([fault.sequences for fault in faults]))
        rows = rows[keep]
    lengths = lists[REQUIRED_COLUMNS[0]].lengths
    left_out = 0
    if keep is not None:
        left_out = int(np.max([each.lengths[~keep] for each in lists.values()], axis=0).sum())
        lengths = lengths[keep]
    chosen = None if keep is None else pa.array(keep)
    watched_arrays = {column: to_plain_array(table.column(file.columns[column])) for column in watched}
    unchecked = {column: ListColumn.of(array) for column, array in watched_arrays.items() if file.is_list(column)}
    watched_tokens = {
        column: _watched_values(column, column_lists, keep, lengths) for column, column_lists in unchecked.items()
    }
    return DecodedBlock(
        file=file,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        rows=rows,
        tokens={column: column_lists.flat(keep) for column, column_lists in lists.items()},
        values={
            column: array if chosen is None else array.filter(chosen)
            for column, array in arrays.items()
            if column not in lists
        },
        watched_tokens={column: values for column, values in watched_tokens.items() if values is not None},
        watched_values={
            column: array if chosen is None else array.filter(chosen)
            for column, array in watched_arrays.items()
            if column not in unchecked
        },
        faults=faults,
        unequal=apart,
        left_out_tokens=left_out,
    )


def _unequal(
    file: DumpFile, lists: dict[str, ListColumn], named: pa.ChunkedArray | None, rows: Ints
) -> dict[str, LengthMismatch]:
    """Return the rows whose lists are not null but have different lengths, by run."""
    there = np.ones(len(rows), np.bool_)
    for mine in lists.values():
        if mine.null is not None:
            there &= ~mine.null
    reference = lists[REQUIRED_COLUMNS[0]].lengths
    differ = there & np.any([mine.lengths != reference for mine in lists.values()], axis=0)
    places = np.flatnonzero(differ)
    runs = [file.run] * len(places)
    if named is not None:
        runs = [file.run if (value := named[int(i)].as_py()) is None else str(value) for i in places]
    found = {}
    for run in dict.fromkeys(runs):
        own = [int(i) for i, name in zip(places, runs, strict=True) if name == run]
        values = [
            (_row_values(lists["rollout_log_probs"], i), _row_values(lists["train_log_probs"], i))
            for i in own[:EXAMPLE_ROWS]
        ]
        lengths = {column: [int(mine.lengths[i]) for i in own] for column, mine in lists.items()}
        found[run] = count_unequal_rows(lengths, values, [(file.index, int(rows[i])) for i in own])
    return found


def _row_values(lists: ListColumn, row: int) -> Floats:
    values = lists.values.slice(int(lists.starts[row]), int(lists.lengths[row]))
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)


def _watched_values(column: str, lists: ListColumn, keep: Bools | None, lengths: Ints) -> pa.Array | None:
    """Return the elements of an unchecked column, unless its lists have other lengths than the log-probs.

    In a partial column, the tokens of sequences with other lengths become null.
    """
    own = lists.lengths if keep is None else lists.lengths[keep]
    if np.array_equal(own, lengths):
        return lists.flat(keep)
    fits = own == lengths
    if column not in PARTIAL_COLUMNS or not (fits & (lengths > 0)).any():
        return None
    starts = (lists.starts if keep is None else lists.starts[keep]) - (np.cumsum(lengths) - lengths)
    index = np.repeat(starts, lengths) + np.arange(int(lengths.sum()))
    return lists.values.take(pa.array(index, mask=np.repeat(~fits, lengths)))


def find_mismatched_lists(file: DumpFile, lists: dict[str, ListColumn], rows: Ints) -> Iterator[Fault]:
    """Yield faults for null lists and for lists whose length differs from the first required column."""
    reference = lists[REQUIRED_COLUMNS[0]]
    for column, mine in lists.items():
        if mine.null is not None:
            bad = rows[mine.null]
            yield Fault(column, f"{column}: null list", bad, int(bad[0]), "the list is null")
        present = np.ones(len(rows), np.bool_)
        for null in (mine.null, reference.null):
            if null is not None:
                present &= ~null
        differ = np.flatnonzero(present & (mine.lengths != reference.lengths))
        if len(differ):
            row = differ[0]
            name = escape_unprintable(file.columns[REQUIRED_COLUMNS[0]])
            problem = f"the list has {mine.lengths[row]} elements and {name} has {reference.lengths[row]}"
            pattern = None
            if len(differ) == int(present.sum()):
                compared = differ[:_COMPARED_ROWS].tolist() if column.endswith("log_probs") else []
                pairs = ((_row_values(mine, row), _row_values(reference, row)) for row in compared)
                apart = (mine.lengths - reference.lengths)[differ]
                pattern = describe_lengths(escape_unprintable(file.columns[column]), name, apart, pairs)
            yield Fault(column, f"{column}: length differs", rows[differ], int(rows[row]), problem, pattern=pattern)


@dataclass(frozen=True)
class LongSequences:
    """Whole sequences of a long file: columns by canonical name, first row, and the start of each sequence."""

    columns: dict[str, pa.Array]
    first: int
    starts: Ints
    length: int


def read_long(
    unit: ReadUnit, columns: Collection[str], broken: Mapping[int, str], watched: Collection[str] = ()
) -> Iterator[DecodedBlock]:
    """Decode a unit in pieces of whole sequences. `broken` contains the sequences that are not contiguous."""
    for stretch in read_sequences(unit, [*columns, *watched]):
        yield _build_long_block(unit.file, stretch, broken, watched)


def read_sequences(unit: ReadUnit, columns: Collection[str]) -> Iterator[LongSequences]:
    """Yield whole sequences of a unit, about `BATCH_TOKENS` rows at a time."""
    columns = dict.fromkeys([*columns, *(column for column in SEQUENCE_KEYS if column in unit.file.columns)])
    parts: list[pa.Table] = []
    first, rows, enough = unit.start, 0, BATCH_TOKENS
    for table in _read_unit_rows(unit, columns):
        parts.append(table)
        rows += len(table)
        if rows < enough:
            continue
        joined = pa.concat_tables(parts)
        stretch = _build_sequences(unit.file, joined, columns, first)
        done = int(stretch.starts[-1])  # the last sequence may continue in the next piece
        if done:
            held = {column: array.slice(0, done) for column, array in stretch.columns.items()}
            yield from _split_by_sequences(LongSequences(held, first, stretch.starts[:-1], done))
        parts, first, rows = [joined.slice(done)], first + done, rows - done
        if rows > MOST_SEQUENCE_TOKENS:
            problem = f"the sequence has more than {MOST_SEQUENCE_TOKENS:,} tokens"
            raise DataError(problem, file=unit.file.path, row=first, remedy="give each response its own sequence_id")
        enough = max(BATCH_TOKENS, 2 * rows)  # doubling avoids many copies of a huge sequence
    if rows:
        yield from _split_by_sequences(_build_sequences(unit.file, pa.concat_tables(parts), columns, first))


def _split_by_sequences(stretch: LongSequences) -> Iterator[LongSequences]:
    for number in range(0, len(stretch.starts), BATCH_ROWS):
        starts = stretch.starts[number : number + BATCH_ROWS]
        begin, end = int(starts[0]), int(np.append(stretch.starts, stretch.length)[number + len(starts)])
        columns = {column: array.slice(begin, end - begin) for column, array in stretch.columns.items()}
        yield LongSequences(columns, stretch.first + begin, starts - begin, end - begin)


def _read_unit_rows(unit: ReadUnit, columns: Collection[str]) -> Iterator[pa.Table]:
    lengths, stop = unit.file.contents.rows, unit.start + unit.rows
    row = sum(lengths[: unit.row_group])
    group = unit.row_group
    while row < stop:
        # Often only the start of the last row group is needed. A piece of that size avoids decoding the rest.
        size = min(BATCH_TOKENS, stop - row)
        ahead = row
        row += lengths[group]
        for table in read_pieces(unit.file, columns, [group], size):
            begin, end = max(unit.start - ahead, 0), min(stop - ahead, len(table))
            if end > begin:
                yield table.slice(begin, end - begin)
            ahead += len(table)
            if ahead >= stop:
                break
        group += 1


def _build_sequences(file: DumpFile, table: pa.Table, columns: Collection[str], first: int) -> LongSequences:
    arrays = {column: to_plain_array(table.column(file.columns[column])) for column in columns}
    if POSITION_COLUMN in arrays:
        arrays[POSITION_COLUMN] = to_positions(arrays[POSITION_COLUMN])
    changed = [find_changes(arrays[column]) for column in SEQUENCE_KEYS if column in arrays]
    starts = np.concatenate([[0], np.flatnonzero(np.logical_or.reduce(changed)) + 1]).astype(np.int64)
    return LongSequences(arrays, first, starts, len(table))


def _build_long_block(
    file: DumpFile, stretch: LongSequences, broken: Mapping[int, str], watched: Collection[str]
) -> DecodedBlock:
    columns = {column: array for column, array in stretch.columns.items() if column not in watched}
    unchecked = {column: array for column, array in stretch.columns.items() if column in watched}
    tokens = {column: array for column, array in columns.items() if file.is_per_token(column)}
    watched_tokens = {column: array for column, array in unchecked.items() if file.is_per_token(column)}
    starts = pa.array(stretch.starts)
    per_sequence = {column: array for column, array in columns.items() if column not in tokens}
    block = DecodedBlock(
        file=file,
        offsets=np.append(stretch.starts, stretch.length),
        rows=stretch.first + stretch.starts,
        tokens={column: tokens[column] for column in dict.fromkeys((*REQUIRED_COLUMNS, *tokens))},
        values={column: array.take(starts) for column, array in per_sequence.items()},
        watched_tokens=watched_tokens,
        watched_values={
            column: array.take(starts) for column, array in unchecked.items() if column not in watched_tokens
        },
    )
    _check_complete(block, broken)
    _check_ids(block, stretch)
    _check_constant(block, per_sequence)
    _check_positions(block, stretch)
    return block


def _check_complete(block: DecodedBlock, broken: Mapping[int, str]) -> None:
    for row in sorted(broken):
        at = np.flatnonzero(block.rows == row)
        if len(at):
            reason = "sequence_id: in several pieces"
            block.faults.append(Fault("sequence_id", reason, block.rows[at], row, broken[row], SORT_REMEDY))


def _check_ids(block: DecodedBlock, stretch: LongSequences) -> None:
    missing = find_nulls(stretch.columns["sequence_id"])
    if missing is not None:
        block.add_faults("sequence_id", "sequence_id: missing", np.flatnonzero(missing), "the row lacks sequence_id")


def _check_constant(block: DecodedBlock, per_sequence: Mapping[str, pa.Array]) -> None:
    """Record changes of a per-sequence column within a sequence."""
    for column, array in per_sequence.items():
        if column not in SEQUENCE_KEYS:
            differ = np.append(False, find_changes(array))
            differ[block.offsets[:-1]] = False
            _note_long_faults(block, column, f"{column}: changes within a sequence", differ)


def _check_positions(block: DecodedBlock, stretch: LongSequences) -> None:
    position = stretch.columns[POSITION_COLUMN]
    missing = find_nulls(position)
    if missing is not None:
        bad = np.flatnonzero(missing)
        block.add_faults(
            POSITION_COLUMN, "position: missing", bad, "the row has no position, or none that is a whole number"
        )
    values = to_numpy(position)
    inside = np.ones(stretch.length, np.bool_)
    inside[block.offsets[:-1]] = False
    if stretch.length < 2:
        return
    bad = np.flatnonzero(inside[1:] & ~(values[1:] > values[:-1])) + 1
    if len(bad):
        problem = f"position {values[bad[0]]} follows {values[bad[0] - 1]}: positions must ascend in a sequence"
        block.add_faults(POSITION_COLUMN, "position: not ascending", bad, problem, SORT_REMEDY)
    _check_steps(block, stretch, inside, values)


def _check_steps(block: DecodedBlock, stretch: LongSequences, inside: Bools, values: NDArray[Any]) -> None:
    """Record sequences whose step changes while id and position continue."""
    if "step" not in stretch.columns:
        return
    same_id = ~find_changes(stretch.columns["sequence_id"])
    goes_on = same_id & ~inside[1:] & (values[1:] == values[:-1] + 1)
    if "run" in stretch.columns:
        goes_on &= ~find_changes(stretch.columns["run"])
    _note_long_faults(block, "step", "step: changes within a sequence", np.append(False, goes_on))


def _note_long_faults(block: DecodedBlock, column: str, reason: str, flags: Bools) -> None:
    bad = np.flatnonzero(flags)
    if len(bad):
        block.add_faults(column, reason, bad, f"{column} changes within a sequence", SORT_REMEDY)


TOKEN_IDS_COLUMN = "token_ids"


def read_token_ids(units: Sequence[ReadUnit], rows: Collection[int]) -> dict[int, NDArray[Any]]:
    """Return the token ids of the valid tokens of the sequences at `rows`. All `units` belong to one file."""
    wanted = np.unique(np.fromiter(rows, np.int64, len(rows)))
    result: dict[int, NDArray[Any]] = {}
    for unit in units:
        inside = wanted[(wanted >= unit.start) & (wanted < unit.start + unit.rows)]
        if len(inside) and TOKEN_IDS_COLUMN in unit.file.columns:
            result.update(_read_wide_ids(unit, inside) if unit.file.layout == "wide" else _read_long_ids(unit, inside))
    return result


def _id_columns(unit: ReadUnit) -> list[str]:
    return [TOKEN_IDS_COLUMN, *([MASK_COLUMN] if MASK_COLUMN in unit.file.columns else [])]


def _read_wide_ids(unit: ReadUnit, rows: Ints) -> Iterator[tuple[int, NDArray[Any]]]:
    columns = _id_columns(unit)
    for first, table in read_wide_tables(unit, columns):
        lists = [ListColumn.of(to_plain_array(table.column(unit.file.columns[column]))) for column in columns]
        for row in rows[(rows >= first) & (rows < first + len(table))].tolist():
            ids, *mask = (
                own.values.slice(int(own.starts[row - first]), int(own.lengths[row - first])) for own in lists
            )
            yield from _valid_ids(row, ids, mask)


def _read_long_ids(unit: ReadUnit, rows: Ints) -> Iterator[tuple[int, NDArray[Any]]]:
    for stretch in read_sequences(unit, _id_columns(unit)):
        ends = np.append(stretch.starts[1:], stretch.length)
        for begin, end in zip(stretch.starts.tolist(), ends.tolist(), strict=True):
            if stretch.first + begin in rows:
                ids = stretch.columns[TOKEN_IDS_COLUMN].slice(begin, end - begin)
                mask = (
                    [stretch.columns[MASK_COLUMN].slice(begin, end - begin)] if MASK_COLUMN in stretch.columns else []
                )
                yield from _valid_ids(stretch.first + begin, ids, mask)


def _valid_ids(row: int, ids: pa.Array, mask: Sequence[pa.Array]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the ids of valid tokens, unless the mask has another length or an id is missing."""
    if mask and len(mask[0]) != len(ids):
        return
    valid = to_numpy(mask[0]) == 1 if mask else slice(None)
    missing = find_nulls(ids)
    if missing is None or not missing[valid].any():
        yield row, to_numpy(ids)[valid]
