"""Decode parts of a file with a row per sequence (wide layout) or a row per token (long layout)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from mismatchctl.core.batch import Bools, Floats, Ints, Segments
from mismatchctl.core.schema import PARTIAL_COLUMNS, REQUIRED_COLUMNS
from mismatchctl.data.arrays import (
    ListColumn,
    concatenate_ranges,
    find_changes,
    find_nulls,
    to_numpy,
    to_plain_array,
    to_positions,
)
from mismatchctl.data.blocks import POSITION_COLUMN, DecodedBlock
from mismatchctl.data.catalog import SEQUENCE_KEYS, DumpFile, ReadUnit, read_pieces
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

TOKEN_IDS_COLUMN = "token_ids"
BATCH_TOKENS = 1 << 21
"""Approximate tokens per batch. Larger row groups are decoded in several pieces."""
_COMPARED_ROWS = 64
"""Maximum number of rows whose list ends are compared."""
BATCH_ROWS = 1 << 16
"""Maximum number of sequences per batch. Each sequence takes about 500 bytes, even without tokens."""


def read_wide(unit: ReadUnit, columns: Collection[str], watched: Collection[str] = ()) -> Iterator[DecodedBlock]:
    """Decode a part of a file with a row per sequence.

    Large parts are decoded in pieces, which only depend on the file.
    """
    rows = None
    if unit.tokens > BATCH_TOKENS * 3 // 2 or unit.rows > BATCH_ROWS:
        rows = max(1, min(unit.rows * BATCH_TOKENS // max(unit.tokens, 1), BATCH_ROWS))
    first = unit.start
    groups = range(unit.row_group, unit.row_group + unit.row_groups)
    for table in read_pieces(unit.file, [*columns, *watched], groups, rows):
        for piece in _split_by_tokens(unit.file, table, first):
            yield _build_wide_block(unit.file, piece, np.arange(first, first + len(piece)), columns, watched)
            first += len(piece)


def _split_by_tokens(file: DumpFile, table: pa.Table, first: int) -> Iterator[pa.Table]:
    """Yield the rows in pieces of about `BATCH_TOKENS` tokens, if some rows are very long."""
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


def _build_wide_block(
    file: DumpFile, table: pa.Table, rows: Ints, columns: Collection[str], watched: Collection[str]
) -> DecodedBlock:
    """Concatenate the tokens of rows whose lists match, and record the other rows as faults."""
    arrays = {column: to_plain_array(table.column(file.columns[column])) for column in columns}
    lists = {column: ListColumn.of(array) for column, array in arrays.items() if file.is_list(column)}
    lists = {column: lists[column] for column in dict.fromkeys((*REQUIRED_COLUMNS, *lists))}
    faults = list(find_mismatched_lists(file, lists, rows))
    named = arrays.get("run")
    apart = _unequal(file, lists, named, rows) if faults else {}
    keep: Bools | None = None
    lengths, left_out = lists[REQUIRED_COLUMNS[0]].lengths, 0
    if faults:
        keep = ~np.isin(rows, np.concatenate([fault.sequences for fault in faults]))
        left_out = int(np.max([each.lengths[~keep] for each in lists.values()], axis=0).sum())
        rows, lengths = rows[keep], lengths[keep]
        arrays = {column: array.filter(pa.array(keep)) for column, array in arrays.items() if column not in lists}
    unchecked = {column: to_plain_array(table.column(file.columns[column])) for column in watched}
    watched_tokens = {
        column: _watched_values(column, ListColumn.of(array), keep, lengths)
        for column, array in unchecked.items()
        if file.is_list(column)
    }
    return DecodedBlock(
        file=file,
        offsets=Segments.from_lengths(lengths).offsets,
        rows=rows,
        tokens={column: column_lists.flat(keep) for column, column_lists in lists.items()},
        values={column: array for column, array in arrays.items() if column not in lists},
        watched_tokens={column: values for column, values in watched_tokens.items() if values is not None},
        watched_values={
            column: array if keep is None else array.filter(pa.array(keep))
            for column, array in unchecked.items()
            if column not in watched_tokens
        },
        faults=faults,
        unequal=apart,
        left_out_tokens=left_out,
    )


def _unequal(
    file: DumpFile, lists: dict[str, ListColumn], named: pa.Array | None, rows: Ints
) -> dict[str, LengthMismatch]:
    """Return by run the rows whose lists have different lengths."""
    null = np.any([own.missing for own in lists.values()], axis=0)
    reference = lists[REQUIRED_COLUMNS[0]].lengths
    places = np.flatnonzero(np.any([mine.lengths != reference for mine in lists.values()], axis=0) & ~null)
    values = [None] * len(places) if named is None else named.take(pa.array(places)).to_pylist()
    runs = [file.run if value is None else str(value) for value in values]
    found = {}
    for run in dict.fromkeys(runs):
        own = [int(i) for i, name in zip(places, runs, strict=True) if name == run]
        sides = lists["rollout_log_probs"], lists["train_log_probs"]
        pairs = [(_row_values(sides[0], i), _row_values(sides[1], i)) for i in own[:EXAMPLE_ROWS]]
        lengths = {column: mine.lengths[own].tolist() for column, mine in lists.items()}
        found[run] = count_unequal_rows(lengths, pairs, [(file.index, int(rows[i])) for i in own])
    return found


def _row_values(lists: ListColumn, row: int) -> Floats:
    values = lists.values.slice(int(lists.starts[row]), int(lists.lengths[row]))
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)


def _watched_values(column: str, lists: ListColumn, keep: Bools | None, lengths: Ints) -> pa.Array | None:
    """Return the elements of a column that only `diagnose` reads, if its lists have the lengths of the log-probs.

    In a partial column and in token ids, the tokens of sequences with other lengths become null.
    """
    own = lists.lengths if keep is None else lists.lengths[keep]
    if np.array_equal(own, lengths):
        return lists.flat(keep)
    fits = own == lengths
    if column not in (*PARTIAL_COLUMNS, TOKEN_IDS_COLUMN) or not (fits & (lengths > 0)).any():
        return None
    starts = np.where(fits, lists.starts if keep is None else lists.starts[keep], 0)
    return lists.values.take(pa.array(concatenate_ranges(starts, lengths), mask=np.repeat(~fits, lengths)))


def find_mismatched_lists(file: DumpFile, lists: dict[str, ListColumn], rows: Ints) -> Iterator[Fault]:
    """Yield faults for null lists, and for lists of another length than the first required column."""
    reference = lists[REQUIRED_COLUMNS[0]]
    for column, mine in lists.items():
        if mine.null is not None:
            bad = rows[mine.null]
            yield Fault(column, f"{column}: null list", bad, int(bad[0]), "the list is null")
        present = ~(mine.missing | reference.missing)
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


class LongSequences(NamedTuple):
    """Whole sequences of a file with a row per token: columns, first row, and the start of each sequence."""

    columns: dict[str, pa.Array]
    first: int
    starts: Ints
    length: int


def read_long(
    unit: ReadUnit, columns: Collection[str], broken: Mapping[int, str], watched: Collection[str] = ()
) -> Iterator[DecodedBlock]:
    """Decode a part of a file with a row per token, in pieces of whole sequences.

    `broken` contains the sequences that are split over several places.
    """
    for stretch in _read_sequences(unit, [*columns, *watched]):
        yield _build_long_block(unit.file, stretch, broken, watched)


def _read_sequences(unit: ReadUnit, columns: Collection[str]) -> Iterator[LongSequences]:
    """Yield whole sequences of a part of a file, about `BATCH_TOKENS` rows at a time."""
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
    for group in range(unit.row_group, len(lengths)):
        if row >= stop:
            return
        # Often only the start of the last row group is needed. A piece of that size avoids decoding the rest.
        for table in read_pieces(unit.file, columns, [group], min(BATCH_TOKENS, stop - row)):
            begin, end = max(unit.start - row, 0), min(stop - row, len(table))
            if end > begin:
                yield table.slice(begin, end - begin)
            row += len(table)
            if row >= stop:
                return


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
    starts = pa.array(stretch.starts)
    tokens, values, watched_tokens, watched_values = (
        {
            column: array if per_token else array.take(starts)
            for column, array in stretch.columns.items()
            if (column in watched) is unchecked and file.is_per_token(column) is per_token
        }
        for unchecked in (False, True)
        for per_token in (True, False)
    )
    block = DecodedBlock(
        file=file,
        offsets=np.append(stretch.starts, stretch.length),
        rows=stretch.first + stretch.starts,
        tokens={column: tokens[column] for column in dict.fromkeys((*REQUIRED_COLUMNS, *tokens))},
        values=values,
        watched_tokens=watched_tokens,
        watched_values=watched_values,
    )
    for row in sorted(broken):
        at = np.flatnonzero(block.rows == row)
        if len(at):
            reason = "sequence_id: in several pieces"
            block.faults.append(Fault("sequence_id", reason, block.rows[at], row, broken[row], SORT_REMEDY))
    missing = find_nulls(stretch.columns["sequence_id"])
    if missing is not None:
        block.add_faults("sequence_id", "sequence_id: missing", np.flatnonzero(missing), "the row lacks sequence_id")
    inside = np.ones(stretch.length, np.bool_)
    inside[stretch.starts] = False
    for column in values:
        if column not in SEQUENCE_KEYS:
            changes = np.append(False, find_changes(stretch.columns[column])) & inside
            _note_changes(block, column, changes)
    _check_positions(block, stretch, inside)
    return block


def _check_positions(block: DecodedBlock, stretch: LongSequences, inside: Bools) -> None:
    position = stretch.columns[POSITION_COLUMN]
    missing, values = find_nulls(position), to_numpy(position)
    if missing is not None:
        problem = "the row has no position, or none that is a whole number"
        block.add_faults(POSITION_COLUMN, "position: missing", np.flatnonzero(missing), problem)
    bad = np.flatnonzero(inside[1:] & ~(values[1:] > values[:-1])) + 1
    if len(bad):
        problem = f"position {values[bad[0]]} follows {values[bad[0] - 1]}: positions must ascend in a sequence"
        block.add_faults(POSITION_COLUMN, "position: not ascending", bad, problem, SORT_REMEDY)
    if "step" in stretch.columns:  # a step that changes while id and position continue
        goes_on = ~inside[1:] & (values[1:] == values[:-1] + 1)
        for column in ("sequence_id", "run"):
            if column in stretch.columns:
                goes_on &= ~find_changes(stretch.columns[column])
        _note_changes(block, "step", np.append(False, goes_on))


def _note_changes(block: DecodedBlock, column: str, flags: Bools) -> None:
    if flags.any():
        problem = f"{column} changes within a sequence"
        block.add_faults(column, f"{column}: changes within a sequence", np.flatnonzero(flags), problem, SORT_REMEDY)
