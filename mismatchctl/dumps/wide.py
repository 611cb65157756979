"""The wide layout: one row per sequence, lists of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa

from mismatchctl.batch import Bools, Ints
from mismatchctl.contract import PARTIAL, REQUIRED
from mismatchctl.dumps.arrays import Lists, single
from mismatchctl.dumps.blocks import DecodedBlock
from mismatchctl.dumps.files import DumpFile, Unit, failing, pieces
from mismatchctl.dumps.problems import Fault, skip_remedy
from mismatchctl.stores import asked, printable, remote

BATCH_TOKENS = 1 << 21
"""Tokens per batch, about: a bigger row group is decoded in several pieces."""


def read_wide(unit: Unit, columns: Collection[str], watched: Collection[str] = ()) -> Iterator[DecodedBlock]:
    """Decode a unit, in pieces where it is big. The pieces depend on the file alone.

    Small files that are read together are one block, whose faults are told file by file by whoever reads each alone.
    """
    wanted = [*columns, *watched]
    if unit.along:
        yield wide_block(unit.file, *_joined(unit, wanted), columns, watched)
        return
    for first, table in wide_tables(unit, wanted):
        files = np.full(len(table), unit.file.index)
        yield wide_block(unit.file, table, files, np.arange(first, first + len(table)), columns, watched)


def _joined(unit: Unit, columns: Collection[str]) -> tuple[pa.Table, Ints, Ints]:
    """The rows of small files, and the file and the row in it of each."""

    def read(one: Unit) -> pa.Table:
        return pa.concat_tables([table for _, table in wide_tables(one, columns)])

    tables = list(asked(read, unit.along, over_network=remote(unit.file.location)))
    lengths = [len(table) for table in tables]
    files = np.repeat([one.file.index for one in unit.along], lengths)
    rows = np.concatenate([np.arange(length) for length in lengths])
    with failing(unit.file.path, unit.file.location, "cannot be read together with others"):
        return pa.concat_tables(tables), files, rows


def wide_tables(unit: Unit, columns: Collection[str]) -> Iterator[tuple[int, pa.Table]]:
    """The unit's rows in pieces of about `BATCH_TOKENS`, each with the number of its first row."""
    rows = None
    if unit.tokens > BATCH_TOKENS * 3 // 2:
        rows = max(1, unit.rows * BATCH_TOKENS // unit.tokens)
    first = unit.start
    for table in pieces(unit.file, columns, range(unit.row_group, unit.row_group + unit.row_groups), rows):
        yield first, table
        first += len(table)


def wide_block(
    file: DumpFile,
    table: pa.Table,
    files: Ints,
    rows: Ints,
    columns: Collection[str],
    watched: Collection[str] = (),
) -> DecodedBlock:
    """Sort out rows whose lists don't match, and lay the others' tokens end to end; so with `watched` that match."""
    arrays = {column: single(table.column(file.columns[column])) for column in columns}
    lists = {column: Lists.of(array) for column, array in arrays.items() if file.is_list(column)}
    lists = {column: lists[column] for column in dict.fromkeys((*REQUIRED, *lists))}
    faults = list(mismatched(file, lists, rows))
    keep: Bools | None = None
    if faults:
        keep = ~np.isin(rows, np.concatenate([fault.sequences for fault in faults]))
        files, rows = files[keep], rows[keep]
    lengths = lists[REQUIRED[0]].lengths
    lengths = lengths if keep is None else lengths[keep]
    chosen = None if keep is None else pa.array(keep)
    watched_arrays = {column: single(table.column(file.columns[column])) for column in watched}
    unchecked = {column: Lists.of(array) for column, array in watched_arrays.items() if file.is_list(column)}
    beside = {column: _watched(column, column_lists, keep, lengths) for column, column_lists in unchecked.items()}
    return DecodedBlock(
        file=file,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        files=files,
        rows=rows,
        tokens={column: column_lists.flat(keep) for column, column_lists in lists.items()},
        values={
            column: array if chosen is None else array.filter(chosen)
            for column, array in arrays.items()
            if column not in lists
        },
        watched_tokens={column: values for column, values in beside.items() if values is not None},
        watched_values={
            column: array if chosen is None else array.filter(chosen)
            for column, array in watched_arrays.items()
            if column not in unchecked
        },
        faults=faults,
        lacks=None in beside.values(),
    )


def _watched(column: str, lists: Lists, keep: Bools | None, lengths: Ints) -> pa.Array | None:
    """The elements of a column that nothing is checked about; None where its lists do not match the others.

    Of a column that sequences may lack, null for each token of those whose lists do not match.
    """
    own = lists.lengths if keep is None else lists.lengths[keep]
    if np.array_equal(own, lengths):
        return lists.flat(keep)
    fits = own == lengths
    if column not in PARTIAL or not (fits & (lengths > 0)).any():
        return None
    starts = (lists.starts if keep is None else lists.starts[keep]) - (np.cumsum(lengths) - lengths)
    index = np.repeat(starts, lengths) + np.arange(int(lengths.sum()))
    return lists.values.take(pa.array(index, mask=np.repeat(~fits, lengths)))


def mismatched(file: DumpFile, lists: dict[str, Lists], rows: Ints) -> Iterator[Fault]:
    """Null lists, and lists longer or shorter than the row's first required one that is not null."""
    reference = lists[REQUIRED[0]]
    for column, mine in lists.items():
        if mine.null is not None:
            bad = rows[mine.null]
            yield Fault(column, f"{column}: null list", bad, int(bad[0]), "the list is null", skip_remedy())
        present = np.ones(len(rows), np.bool_)
        for null in (mine.null, reference.null):
            if null is not None:
                present &= ~null
        differ = np.flatnonzero(present & (mine.lengths != reference.lengths))
        if len(differ):
            row = differ[0]
            problem = (
                f"the list has {mine.lengths[row]} elements and {printable(file.columns[REQUIRED[0]])} "
                f"has {reference.lengths[row]}"
            )
            yield Fault(column, f"{column}: length differs", rows[differ], int(rows[row]), problem, skip_remedy())
