"""Decode parts of a file and check them. A row is a sequence in the wide layout, and a token in the long layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Extent, Floats, Ints, Segments, TokenBatch, compute_extent
from mismatchctl.core.formatting import format_label
from mismatchctl.core.schema import (
    COLUMNS_BY_NAME,
    MIN_LOG_PROB,
    PARTIAL_COLUMNS,
    POSITIVE_TOLERANCE,
    REFERENCE_COLUMN,
    REQUIRED_COLUMNS,
    VERSION_COLUMNS,
)
from mismatchctl.data.catalog import SEQUENCE_KEYS, DumpFile, ReadUnit, read_pieces
from mismatchctl.data.formats import (
    MOST_SEQUENCE_TOKENS,
    ListColumn,
    concatenate_ranges,
    find_changes,
    find_nulls,
    is_list,
    to_numpy,
    to_plain_array,
    to_positions,
    to_scalars,
)
from mismatchctl.data.problems import (
    EXAMPLE_ROWS,
    SORT_REMEDY,
    Fault,
    LengthMismatch,
    UnequalRow,
    describe_lengths,
    leave_out,
    mask_remedy,
    skip_remedy,
)
from mismatchctl.errors import DataError
from mismatchctl.io.stores import escape_unprintable

MASK_COLUMN, CURRENT_COLUMN, ADVANTAGES_COLUMN = "response_mask", "current_log_probs", "advantages"
POSITION_COLUMN = "position"
TRAIN_COLUMN = "train_log_probs"
FLOAT_COLUMNS = (*REQUIRED_COLUMNS, CURRENT_COLUMN, ADVANTAGES_COLUMN)
"""Columns with one float per token. Each becomes a field of TokenBatch."""
IMPOSSIBLE_TOKENS = "train_log_probs of -inf"
"""Key in `DecodedBlock.masked`. Its value is the number of valid tokens with train probability 0."""


@dataclass
class DecodedBlock:
    """Decoded sequences of one file, including masked tokens."""

    file: DumpFile
    offsets: Ints
    rows: Ints
    tokens: Mapping[str, pa.Array]
    values: Mapping[str, pa.Array]
    watched: Collection[str] = ()  # columns whose values are not checked
    faults: list[Fault] = field(default_factory=list)
    mask_missing: bool = False
    masked: dict[str, int] = field(default_factory=dict)
    unequal: Mapping[str, LengthMismatch] = field(default_factory=dict)
    left_out_tokens: int = 0
    _extents: dict[str, Extent] = field(default_factory=dict)

    @property
    def files(self) -> Ints:
        return np.full(len(self.rows), self.file.index)

    @property
    def checked(self) -> list[str]:
        return [column for column in FLOAT_COLUMNS if column in self.tokens and column not in self.watched]

    @cached_property
    def mask(self) -> Bools:
        if MASK_COLUMN not in self.tokens:
            return np.ones(self.offsets[-1], np.bool_)
        return np.asarray(token_values(self.tokens[MASK_COLUMN]) == 1)

    def extent(self, column: str) -> Extent:
        """Return minimum and maximum of a float column, including masked tokens. Nulls make both NaN."""
        if column not in self._extents:
            array = self.tokens[column]
            self._extents[column] = (math.nan, math.nan) if array.null_count else compute_extent(to_numpy(array))
        return self._extents[column]

    def add_faults(self, column: str, reason: str, bad: Ints, problem: str, remedy: str = "") -> None:
        """Record bad values of a column. `bad` contains the indices of their tokens in this block, sorted."""
        sequences = np.unique(np.searchsorted(self.offsets, bad, side="right") - 1)
        first = int(bad[0] - self.offsets[sequences[0]])
        row = int(self.rows[sequences[0]])
        if self.file.layout == "long":
            row += first  # the rows of a sequence are consecutive
        else:
            problem = f"{problem} at token {first}"
        self.faults.append(Fault(column, reason, self.rows[sequences], row, problem, remedy or skip_remedy()))

    @property
    def faulty_tokens(self) -> int:
        if not self.faults:
            return 0
        bad = np.isin(self.rows, np.concatenate([fault.sequences for fault in self.faults]))
        return self.left_out_tokens + int(np.diff(self.offsets)[bad].sum())


def assemble_batch(block: DecodedBlock) -> TokenBatch:
    before = _mask_missing_values(block, _valid_mask(block))
    valid, impossible = _remove_impossible_tokens(block, before)
    index = None if valid is None else np.flatnonzero(valid)
    offsets = block.offsets if index is None else np.searchsorted(index, block.offsets).astype(np.int64)
    picked: dict[str, NDArray[Any]] = {}
    for column in block.checked:
        picked[column] = _check_column(block, column, index)
    place = to_numpy(block.tokens[POSITION_COLUMN]) if POSITION_COLUMN in block.tokens else None
    if place is not None and index is not None:
        place = place.take(index)
    position = _token_positions(index if place is None else place, Segments(offsets))
    if position is not None:
        picked[POSITION_COLUMN] = position
    if impossible is not None and valid is not None:
        picked[_IMPOSSIBLE_NEAR] = _locate_impossible_tokens(block, before, valid)
    for column in PARTIAL_COLUMNS:
        values = token_values(block.tokens[column]) if column in block.tokens else None
        if values is not None:
            picked[column] = values if index is None else values[index]
            # Unlike other log-probs, a reference may lack values.
            if column == REFERENCE_COLUMN and not _is_sound(column, compute_extent(picked[column])):
                _note_faults(block, column, index, picked[column], _find_impossible(picked[column]))
    _check_values(block, np.diff(offsets) > 0)
    return _build_batch(block, Segments(offsets), picked, impossible)


def _valid_mask(block: DecodedBlock) -> Bools | None:
    mask = block.tokens.get(MASK_COLUMN)
    if mask is None or len(mask) == 0:
        return None
    missing = find_nulls(mask)
    if pa.types.is_boolean(mask.type):
        # Most masks are all true, and counting their bits is much faster than unpacking them.
        if missing is None and mask.true_count == len(mask):
            return None
        valid, odd = to_numpy(mask), missing
    else:
        values = to_numpy(mask)
        valid = values == 1
        odd = ~valid & (values != 0)
        odd = odd if missing is None else odd | missing
    if odd is not None and odd.any():
        bad = np.flatnonzero(odd)
        what = "null" if missing is not None and missing[bad[0]] else format_label(float(to_numpy(mask)[bad[0]]))
        problem = f"a mask must contain only 0 and 1, found {what}"
        block.add_faults(MASK_COLUMN, "mask is not 0 or 1", bad, problem)
    return None if valid.all() else valid


def _mask_missing_values(block: DecodedBlock, valid: Bools | None) -> Bools | None:
    if not block.mask_missing:
        return valid
    for column in block.checked:
        gone = np.isnan(np.asarray(token_values(block.tokens[column]), np.float64))
        if valid is not None:
            gone &= valid
        if gone.any():
            block.masked[column] = int(gone.sum())
            valid = ~gone if valid is None else valid & ~gone
    return valid


def _remove_impossible_tokens(block: DecodedBlock, valid: Bools | None) -> tuple[Bools | None, Ints | None]:
    if not len(block.tokens[TRAIN_COLUMN]) or block.extent(TRAIN_COLUMN)[0] > -math.inf:  # False if a value is missing
        return valid, None
    gone = np.asarray(token_values(block.tokens[TRAIN_COLUMN]), np.float64) == -np.inf
    if valid is not None:
        gone &= valid
    if not gone.any():
        return valid, None
    block.masked[IMPOSSIBLE_TOKENS] = int(gone.sum())
    counts = Segments(block.offsets).sum(gone).astype(np.int64)
    return ~gone if valid is None else valid & ~gone, counts


_IMPOSSIBLE_NEAR = "\0impossible"


def _locate_impossible_tokens(block: DecodedBlock, before: Bools | None, left: Bools) -> Ints:
    """Compute `TokenBatch.impossible_near`. Tokens with train probability 0 are in the mask `before`, not in `left`."""
    index = np.arange(len(left)) if before is None else np.flatnonzero(before)
    place = to_numpy(block.tokens[POSITION_COLUMN])[index] if POSITION_COLUMN in block.tokens else index
    sequence = np.searchsorted(block.offsets, index, side="right") - 1
    turn = np.cumsum(np.append(False, (np.diff(place) != 1) | (np.diff(sequence) != 0)))
    kept = left[index]
    passed = np.append(0, np.cumsum(~kept))
    in_turn, in_sequence = np.bincount(turn, ~kept)[turn], passed[:-1] - passed[np.searchsorted(sequence, sequence)]
    begins = np.append(True, np.diff(turn[kept]) != 0)[: np.count_nonzero(kept)]
    return np.stack([begins, in_turn[kept], in_sequence[kept]], axis=1).astype(np.int64)


def _check_column(block: DecodedBlock, column: str, index: Ints | None) -> Floats:
    """Return the column's values at the valid tokens. Record null, NaN, infinity and impossible log-probs as faults."""
    array = block.tokens[column]
    missing, values = find_nulls(array), to_numpy(array)
    if not np.issubdtype(values.dtype, np.floating):
        values = values.astype(np.float64)
    sound = len(values) == 0 or _is_sound(column, block.extent(column))
    if index is not None:
        # `take` is five times as fast as indexing.
        values, missing = values.take(index), None if missing is None else missing.take(index)
        present = missing is None or not missing.any()
        sound = sound or len(values) == 0 or (present and _is_sound(column, compute_extent(values)))
    if not sound:
        gone = np.zeros(len(values), np.bool_) if missing is None else missing
        checks = {"null element": gone, "NaN": np.isnan(values) & ~gone, "infinite": np.isinf(values) & ~gone}
        if column != ADVANTAGES_COLUMN:
            checks |= {reason: flags & ~gone for reason, flags in _find_impossible(values).items()}
        _note_faults(block, column, index, values, checks)
    return values


def _is_sound(column: str, extent: Extent) -> bool:
    lowest, highest = (-math.inf, math.inf) if column == ADVANTAGES_COLUMN else (MIN_LOG_PROB, POSITIVE_TOLERANCE)
    return extent[0] > lowest and extent[1] <= highest and extent[1] < math.inf


def _find_impossible(values: Floats) -> dict[str, Bools]:
    return {
        "log-prob below all": (values.astype(np.float64, copy=False) < MIN_LOG_PROB) & (values > -np.inf),
        "log-prob above 0": (values > POSITIVE_TOLERANCE) & (values < np.inf),
    }


def _note_faults(
    block: DecodedBlock, column: str, index: Ints | None, values: Floats, checks: Mapping[str, Bools]
) -> None:
    for reason, flags in checks.items():
        bad = np.flatnonzero(flags)
        if len(bad):
            value = format_label(float(values[bad[0]]))
            problem = {
                "null element": "expected a number, found null",
                "log-prob below all": f"{value} is too low for a log-prob",
                "log-prob above 0": f"log-probs must not be above 0, found {value}",
            }.get(reason, f"expected a finite number, found {value}")
            remedy = mask_remedy() if reason in ("null element", "NaN") else ""
            if reason == "log-prob below all":
                remedy = f"set response_mask to 0 for placeholders, or {leave_out('such rows')}"
            block.add_faults(column, f"{column}: {reason}", bad if index is None else index[bad], problem, remedy)


def token_values(array: pa.Array) -> NDArray[Any] | None:
    """Return a column's values, [T] for one value per token, [T, K] for a list of K values. A null becomes NaN.

    If the lists are empty or have different lengths, return `None`.
    """
    if not is_list(array.type):
        values, missing = to_numpy(array), find_nulls(array)
        if missing is None:
            return values
        values = values.astype(np.float64)
        values[missing] = np.nan
        return values
    lists = ListColumn.of(array)
    given = np.ones(len(array), np.bool_) if lists.null is None else ~lists.null
    widths = np.unique(lists.lengths[given])
    if len(widths) != 1 or widths[0] == 0:
        return None
    flat = to_numpy(lists.flat(None)).reshape(-1, int(widths[0]))
    if lists.null is None:
        return flat
    values = np.full((len(array), flat.shape[1]), np.nan)
    values[given] = flat
    return values


def _token_positions(place: Ints | None, segments: Segments) -> Ints | None:
    if place is None or not len(place):
        return None
    offsets, lengths = segments.offsets, segments.lengths
    first, last = place[np.minimum(offsets[:-1], len(place) - 1)], place[offsets[1:] - 1]
    if np.array_equal((last - first + 1)[lengths > 0], lengths[lengths > 0]):
        return None
    position: Ints = (place - np.repeat(first, lengths)).astype(np.int64, copy=False)
    return position


def _check_values(block: DecodedBlock, filled: Bools) -> None:
    for column in ("step", ADVANTAGES_COLUMN):
        array = block.values.get(column)
        if array is None:
            continue
        bad = find_nulls(array)
        if pa.types.is_floating(array.type):
            bad = ~np.isfinite(to_numpy(array)) if bad is None else bad | ~np.isfinite(to_numpy(array))
        if bad is None:
            continue
        rows = block.rows[bad & filled if column == ADVANTAGES_COLUMN else bad]
        if len(rows):
            problem = "the value is missing or not finite"
            block.faults.append(Fault(column, f"{column}: missing", rows, int(rows[0]), problem))


def _build_batch(
    block: DecodedBlock, segments: Segments, picked: dict[str, NDArray[Any]], impossible: Ints | None
) -> TokenBatch:
    files, rows = block.files, block.rows
    values = {column: array for column, array in block.values.items() if column not in block.watched}
    if block.faults:
        keep = ~np.isin(rows, np.concatenate([fault.sequences for fault in block.faults]))
        if not keep.all():
            tokens = segments.spread(keep)
            picked = {column: column_values[tokens] for column, column_values in picked.items()}
            segments = segments.take(keep)
            files, rows, chosen = files[keep], rows[keep], pa.array(keep)
            impossible = None if impossible is None else impossible[keep]
            values = {column: array.filter(chosen) for column, array in values.items()}
    columns = add_versions(_sequence_columns(block.file, values, len(rows)), picked, segments)
    if ADVANTAGES_COLUMN in columns:
        picked[ADVANTAGES_COLUMN] = segments.spread(columns.pop(ADVANTAGES_COLUMN))
    return TokenBatch(
        segments=segments,
        rollout=picked["rollout_log_probs"],
        train=picked["train_log_probs"],
        current=picked.get(CURRENT_COLUMN),
        position=picked.get(POSITION_COLUMN),
        advantages=picked.get(ADVANTAGES_COLUMN),
        extra_columns={column: picked[column] for column in PARTIAL_COLUMNS if column in picked},
        columns=columns,
        file=files,
        rows=rows,
        impossible=impossible,
        impossible_near=picked.get(_IMPOSSIBLE_NEAR),
    )


def add_versions(
    columns: dict[str, NDArray[Any]], tokens: Mapping[str, NDArray[Any]], segments: Segments
) -> dict[str, NDArray[Any]]:
    for column in VERSION_COLUMNS:
        if column in tokens:
            oldest = segments.min(np.where(np.isfinite(tokens[column]), tokens[column], np.inf))
            columns[column] = np.where(np.isfinite(oldest), oldest, np.nan)
    return columns


def _sequence_columns(file: DumpFile, values: Mapping[str, pa.Array], length: int) -> dict[str, NDArray[Any]]:
    columns = {column: to_scalars(array, COLUMNS_BY_NAME.get(column)) for column, array in values.items()}
    for column, value in {**file.partition, "run": file.run}.items():
        if column == "run" and column in columns:
            named = [file.run if run is None else str(run) for run in columns[column].tolist()]
            columns[column] = np.empty(length, object)
            columns[column][:] = named
        elif column not in columns:
            columns[column] = np.empty(length, np.int64 if isinstance(value, int) else object)
            columns[column].fill(value)  # one shared string: `np.full` makes copies, which are slower to compare
    return columns


@dataclass(frozen=True, kw_only=True)
class Rows(TokenBatch):
    """Sequences with all tokens, including masked tokens. A null in the file becomes NaN."""

    mask: Bools
    extents: Mapping[str, Extent] = field(default_factory=dict)  # "rollout", "train" -> (minimum, maximum), if known
    unequal: Mapping[str, LengthMismatch] = field(default_factory=dict)  # rows with lists of different lengths, by run

    @classmethod
    def of(cls, block: DecodedBlock) -> Rows:
        segments = Segments(block.offsets)
        found = {name: token_values(array) for name, array in block.tokens.items()}
        tokens = {name: values for name, values in found.items() if values is not None}
        tokens.pop(MASK_COLUMN, None)
        position = tokens.pop(POSITION_COLUMN, None)
        return cls(
            segments,
            tokens.pop("rollout_log_probs"),
            tokens.pop("train_log_probs"),
            position=None if position is None else np.nan_to_num(position).astype(np.int64, copy=False),
            columns=add_versions(_sequence_columns(block.file, block.values, len(block.rows)), tokens, segments),
            file=block.files,
            rows=block.rows,
            extra_columns=tokens,
            mask=block.mask,
            extents={side: block.extent(f"{side}_log_probs") for side in ("rollout", "train")},
            unequal=block.unequal,
        )

    def is_within(self, side: str, lowest: float, highest: float) -> bool:
        if side in self.extents and lowest <= self.extents[side][0] and self.extents[side][1] <= highest:
            return True
        low, high = compute_extent(self.rollout if side == "rollout" else self.train)
        return lowest <= low and high <= highest

    def position_of(self, tokens: Ints) -> Ints:
        if self.position is not None:
            return self.position[tokens]
        return tokens - self.segments.offsets[np.searchsorted(self.segments.offsets, tokens, side="right") - 1]

    def _select(self, segments: Segments, picked: Callable[[NDArray[Any]], NDArray[Any]], chosen: Ints | slice) -> Rows:
        return replace(super()._select(segments, picked, chosen), mask=picked(self.mask), unequal={})


TOKEN_IDS_COLUMN = "token_ids"
BATCH_TOKENS = 1 << 21
"""Approximate number of tokens per batch. A part with over 1.5 times this number is decoded in several pieces."""
_COMPARED_ROWS = 64
BATCH_ROWS = 1 << 16
"""Maximum number of sequences per batch, which limits memory: even an empty sequence takes about 500 bytes."""


def read_wide(unit: ReadUnit, columns: Collection[str], watched: Collection[str] = ()) -> Iterator[DecodedBlock]:
    """Decode a part of a file with one row per sequence. A large part is decoded in pieces."""
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
        problem = f"the row has {lengths[row]:,} tokens, but only {MOST_SEQUENCE_TOKENS:,} are supported"
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
    """Build a block from rows of lists. Record null lists and unequal lengths as faults, and leave out their rows."""
    arrays = {column: to_plain_array(table.column(file.columns[column])) for column in (*columns, *watched)}
    every = {column: ListColumn.of(array) for column, array in arrays.items() if file.is_list(column)}
    values = {column: array for column, array in arrays.items() if column not in every}
    lists = {name: every[name] for name in dict.fromkeys((*REQUIRED_COLUMNS, *every)) if name not in watched}
    faults = list(find_mismatched_lists(file, lists, rows))
    apart = _unequal(file, lists, values.get("run"), rows) if faults else {}
    keep: Bools | None = None
    lengths, left_out = lists[REQUIRED_COLUMNS[0]].lengths, 0
    if faults:
        keep = ~np.isin(rows, np.concatenate([fault.sequences for fault in faults]))
        left_out = int(np.max([each.lengths[~keep] for each in lists.values()], axis=0).sum())
        rows, lengths = rows[keep], lengths[keep]
        values = {column: array.filter(pa.array(keep)) for column, array in values.items()}
    tokens = {column: own.flat(keep) for column, own in lists.items()}
    for column in (column for column in every if column in watched):
        if (unchecked := _watched_values(column, every[column], keep, lengths)) is not None:
            tokens[column] = unchecked
    return DecodedBlock(
        file=file,
        offsets=Segments.from_lengths(lengths).offsets,
        rows=rows,
        tokens=tokens,
        values=values,
        watched=watched,
        faults=faults,
        unequal=apart,
        left_out_tokens=left_out,
    )


def _unequal(
    file: DumpFile, lists: dict[str, ListColumn], named: pa.Array | None, rows: Ints
) -> dict[str, LengthMismatch]:
    null = np.any([own.missing for own in lists.values()], axis=0)
    reference = lists[REQUIRED_COLUMNS[0]].lengths
    places = np.flatnonzero(np.any([mine.lengths != reference for mine in lists.values()], axis=0) & ~null)
    values = [None] * len(places) if named is None else named.take(pa.array(places)).to_pylist()
    runs = [file.run if value is None else str(value) for value in values]
    sides, found = [lists[column] for column in REQUIRED_COLUMNS], {}
    for run in dict.fromkeys(runs):
        own = [i for i, name in zip(places.tolist(), runs, strict=True) if name == run]
        columns = {name: int((mine.lengths[own] != reference[own]).sum()) for name, mine in lists.items()}
        examples = tuple(
            UnequalRow(
                file.index,
                int(rows[i]),
                {name: int(mine.lengths[i]) for name, mine in lists.items()},
                *(_row_values(side, i) for side in sides),
            )
            for i in own[:EXAMPLE_ROWS]
        )
        found[run] = LengthMismatch(len(own), {name: number for name, number in columns.items() if number}, examples)
    return found


def _row_values(lists: ListColumn, row: int) -> Floats:
    values = lists.values.slice(int(lists.starts[row]), int(lists.lengths[row]))
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)


def _watched_values(column: str, lists: ListColumn, keep: Bools | None, lengths: Ints) -> pa.Array | None:
    """Return a `watched` column. If lengths differ, partial columns and token ids get nulls. Others become `None`."""
    own = lists.lengths if keep is None else lists.lengths[keep]
    if np.array_equal(own, lengths):
        return lists.flat(keep)
    fits = own == lengths
    if column not in (*PARTIAL_COLUMNS, TOKEN_IDS_COLUMN) or not (fits & (lengths > 0)).any():
        return None
    starts = np.where(fits, lists.starts if keep is None else lists.starts[keep], 0)
    return lists.values.take(pa.array(concatenate_ranges(starts, lengths), mask=np.repeat(~fits, lengths)))


def find_mismatched_lists(file: DumpFile, lists: dict[str, ListColumn], rows: Ints) -> Iterator[Fault]:
    """Yield faults for lists that are null, or whose length differs from the rollout log-probs of the same row."""
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
            problem = f"expected {reference.lengths[row]} elements as in {name}, found {mine.lengths[row]}"
            pattern = None
            if len(differ) == int(present.sum()):
                compared = differ[:_COMPARED_ROWS].tolist() if column.endswith("log_probs") else []
                pairs = ((_row_values(mine, row), _row_values(reference, row)) for row in compared)
                apart = (mine.lengths - reference.lengths)[differ]
                pattern = describe_lengths(escape_unprintable(file.columns[column]), name, apart, pairs)
            yield Fault(column, f"{column}: length differs", rows[differ], int(rows[row]), problem, pattern=pattern)


def read_long(
    unit: ReadUnit, columns: Collection[str], broken: Mapping[int, str], watched: Collection[str] = ()
) -> Iterator[DecodedBlock]:
    """Decode a part of a file with one row per token. `broken` maps first rows of split sequences to their problems."""
    keys = [column for column in SEQUENCE_KEYS if column in unit.file.columns]
    columns = dict.fromkeys([*columns, *watched, *keys])
    tables, parts = _read_unit_rows(unit, columns), list[pa.Table]()
    bounds = np.append(unit.starts, unit.start + unit.rows)
    for start, stop in Segments(bounds).blocks(BATCH_TOKENS, BATCH_ROWS):
        first, length = int(bounds[start]), int(bounds[stop] - bounds[start])
        if length > MOST_SEQUENCE_TOKENS:
            problem = f"the sequence has more than {MOST_SEQUENCE_TOKENS:,} tokens"
            remedy = "give each response its own sequence_id"
            raise DataError(problem, file=unit.file.path, row=first, remedy=remedy)
        while sum(map(len, parts)) < length:
            parts.append(next(tables))
        joined = pa.concat_tables(parts)
        arrays = {name: to_plain_array(joined.column(unit.file.columns[name]).slice(0, length)) for name in columns}
        yield _build_long_block(unit.file, arrays, unit.starts[start:stop], broken, watched)
        parts = [joined.slice(length)]


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


def _build_long_block(
    file: DumpFile, arrays: dict[str, pa.Array], rows: Ints, broken: Mapping[int, str], watched: Collection[str]
) -> DecodedBlock:
    arrays[POSITION_COLUMN] = to_positions(arrays[POSITION_COLUMN])
    tokens = {column: array for column, array in arrays.items() if file.is_per_token(column)}
    starts, length = rows - rows[0], len(arrays[POSITION_COLUMN])
    block = DecodedBlock(
        file=file,
        offsets=np.append(starts, length),
        rows=rows,
        tokens={column: tokens[column] for column in dict.fromkeys((*REQUIRED_COLUMNS, *tokens))},
        values={column: array.take(pa.array(starts)) for column, array in arrays.items() if column not in tokens},
        watched=watched,
    )
    for row in sorted(broken):
        at = np.flatnonzero(block.rows == row)
        if len(at):
            reason = "sequence_id: rows not adjacent"
            block.faults.append(Fault("sequence_id", reason, block.rows[at], row, broken[row], SORT_REMEDY))
    missing = find_nulls(arrays["sequence_id"])
    if missing is not None:
        block.add_faults("sequence_id", "sequence_id: missing", np.flatnonzero(missing), "the row lacks sequence_id")
    inside = np.ones(length, np.bool_)
    inside[starts] = False
    for column in block.values:
        if column not in (*SEQUENCE_KEYS, *watched):
            _note_changes(block, column, np.append(False, find_changes(arrays[column])) & inside)
    _check_positions(block, arrays, inside)
    return block


def _check_positions(block: DecodedBlock, arrays: Mapping[str, pa.Array], inside: Bools) -> None:
    position = arrays[POSITION_COLUMN]
    missing, values = find_nulls(position), to_numpy(position)
    if missing is not None:
        problem = "the row's position is missing or is not a whole number"
        block.add_faults(POSITION_COLUMN, "position: missing", np.flatnonzero(missing), problem)
    bad = np.flatnonzero(inside[1:] & ~(values[1:] > values[:-1])) + 1
    if len(bad):
        problem = f"position {values[bad[0]]} follows {values[bad[0] - 1]}, but positions must ascend within a sequence"
        block.add_faults(POSITION_COLUMN, "position: not ascending", bad, problem, SORT_REMEDY)
    if "step" in arrays:  # it must not change while sequence id and position continue
        goes_on = ~inside[1:] & (values[1:] == values[:-1] + 1)
        for column in ("sequence_id", "run"):
            if column in arrays:
                goes_on &= ~find_changes(arrays[column])
        _note_changes(block, "step", np.append(False, goes_on))


def _note_changes(block: DecodedBlock, column: str, flags: Bools) -> None:
    if flags.any():
        problem = f"{column} changes within a sequence"
        block.add_faults(column, f"{column}: changes within a sequence", np.flatnonzero(flags), problem, SORT_REMEDY)
