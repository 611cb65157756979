"""Cut files into units of work that can be read independently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np
import pyarrow as pa

from mismatchctl.core.batch import Bools, Ints
from mismatchctl.data.arrays import find_changes, is_list, plain_type, to_plain_array, to_texts
from mismatchctl.data.catalog import Catalog
from mismatchctl.data.files import DumpFile, ReadUnit, read_pieces
from mismatchctl.data.formats import IntegerRange
from mismatchctl.data.problems import SORT_REMEDY
from mismatchctl.errors import DataError
from mismatchctl.io.stores import escape_unprintable

SEQUENCE_KEYS = ("sequence_id", "step", "run")
"""Columns that identify a sequence. A new sequence begins if one of them changes."""

_PIECE_ROWS = 1 << 21
UNIT_TOKENS = 3 << 20
"""Row groups up to this number of tokens are read together, because each unit has a fixed cost."""
SMALL_TOKENS = 1 << 14
"""Maximum tokens of a file that is read together with others if there are many."""
_MANY_FILES, _MOST_FILES = 33, 128
"""Minimum number of consecutive small files to merge, and maximum per unit. A few files are not merged."""
_MOST_TOKENS = 1 << 18
"""Maximum tokens of merged files, so that memory stays small."""


@dataclass(frozen=True)
class ReadPlan:
    """Units of all files, and the sequences that are not contiguous: file -> first row -> reason."""

    units: tuple[ReadUnit, ...]
    broken: dict[int, dict[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Survey:
    """Starts and keys of the sequences in a long file, with flags for possible cuts.

    A file is not cut if only the step changes: if positions continue there, it is one sequence with a wrong step, and
    the reader must see both sides to detect it.
    """

    starts: Ints
    keys: pa.Table
    cuttable: Bools


def plan_units(catalog: Catalog, skip: bool) -> ReadPlan:
    """Divide all files into units. With `skip`, files that cannot be surveyed are removed from `catalog`.

    Raises:
        DataError: the sequences of a long file are scattered or span files, and `skip` is False.
    """
    surveys: dict[str, _Survey] = {}
    files = []
    for file in catalog.files:
        try:
            if file.layout == "long":
                surveys[_file_identity(file)] = _survey_file(file)
            files.append(file)
        except DataError as error:
            catalog.reject(error, skip)
    catalog.files = [replace(file, index=index) for index, file in enumerate(files)]
    units: list[ReadUnit] = []
    tables = []
    for file in catalog.files:
        survey = surveys.get(_file_identity(file))
        if survey is None:
            units.extend(_wide_units(file))
        else:
            units.extend(_long_units(file, survey))
            tables.append(_read_sequence_keys(file, survey))
    broken: dict[int, dict[int, str]] = {}
    for number, row, problem, remedy in _find_scattered_sequences(tables, catalog.files):
        if not skip:
            raise DataError(problem, file=catalog.files[number].path, row=row, column="sequence_id", remedy=remedy)
        broken.setdefault(number, {})[row] = problem
    return ReadPlan(tuple(replace(unit, index=index) for index, unit in enumerate(units)), broken)


def _file_identity(file: DumpFile) -> str:
    return f"{file.run}\0{file.location}"


def _wide_units(file: DumpFile) -> list[ReadUnit]:
    """Return row groups or record batches as units, with small consecutive ones merged."""
    found: list[ReadUnit] = []
    for unit in _group_units(file):
        if found and found[-1].tokens + unit.tokens <= UNIT_TOKENS:
            found[-1] = _join_units(found[-1], unit)
        else:
            found.append(unit)
    return found


def _group_units(file: DumpFile) -> Iterator[ReadUnit]:
    """Yield one unit per nonempty row group or record batch."""
    start, steps = 0, _step_ranges(file)
    for group, rows in enumerate(file.contents.rows):
        if rows:
            tokens = file.elements(group, "rollout_log_probs")
            yield ReadUnit(0, file, group, steps[group], rows, tokens, start, rows)
        start += rows


def _join_units(first: ReadUnit, then: ReadUnit) -> ReadUnit:
    """Merge two consecutive units."""
    return replace(
        first,
        step_range=_units_step_range((first, then)),
        rows=first.rows + then.rows,
        tokens=first.tokens + then.tokens,
        sequences=first.sequences + then.sequences,
        row_groups=then.row_group + then.row_groups - first.row_group,
    )


def _units_step_range(units: Sequence[ReadUnit]) -> IntegerRange | None:
    """Return the range of `step` in several units, if known for all of them."""
    known = [unit.step_range for unit in units if unit.step_range is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(units) else None


def merge_small_files(units: Iterable[ReadUnit]) -> Iterator[ReadUnit]:
    """Yield the units in order, with many consecutive small files of one run and type merged."""
    for key, alike in groupby(units, key=_small_file_key):
        found = list(alike)
        if key is None or len(found) < _MANY_FILES:
            yield from found
            continue
        first, tokens = 0, 0
        for number, unit in enumerate(found):
            if number - first == _MOST_FILES or (number > first and tokens + unit.tokens > _MOST_TOKENS):
                yield _combine_units(found[first:number])
                first, tokens = number, 0
            tokens += unit.tokens
        yield _combine_units(found[first:])


def _small_file_key(unit: ReadUnit) -> object:
    """Return the properties that small files must share to be merged. A large unit does not have them."""
    file = unit.file
    if file.layout != "wide" or unit.tokens > SMALL_TOKENS or unit.rows != file.rows:
        return None
    if any(is_list(plain_type(kind)) and is_list(plain_type(kind.value_type)) for kind in file.types.values()):
        return None  # lists within lists may be of one length in each file, and of several in all
    return file.run, file.columns, file.types, file.partition


def _combine_units(units: Sequence[ReadUnit]) -> ReadUnit:
    """Merge units of small files."""
    if len(units) == 1:
        return units[0]
    tokens, sequences, steps = (
        sum(unit.tokens for unit in units),
        sum(unit.sequences for unit in units),
        _units_step_range(units),
    )
    return replace(
        units[0], index=units[-1].index, step_range=steps, tokens=tokens, sequences=sequences, members=tuple(units)
    )


def unit_files(units: Iterable[ReadUnit]) -> tuple[DumpFile, ...]:
    """Return the files of some units, in order."""
    every = (one.file for unit in units for one in unit.members or (unit,))
    return tuple({file.index: file for file in every}.values())


def split_unit(unit: ReadUnit) -> list[ReadUnit]:
    """Return the row groups of a unit, or two halves of merged files, to isolate a bad file."""
    if unit.members:
        half = len(unit.members) // 2
        return [_combine_units(unit.members[:half]), _combine_units(unit.members[half:])]
    last = unit.row_group + unit.row_groups
    return [own for own in _group_units(unit.file) if unit.row_group <= own.row_group < last]


def _step_ranges(file: DumpFile) -> list[IntegerRange | None]:
    """Return the range of `step` in each group, from the file or the Hive folder."""
    return file.integer_ranges("step") if "step" in file.columns else [_folder_step(file)] * file.row_groups


def _folder_step(file: DumpFile) -> IntegerRange | None:
    step = file.partition.get("step")
    return (step, step) if isinstance(step, int) else None


def _survey_file(file: DumpFile) -> _Survey:
    """Find the starts of sequences, reading only their keys."""
    columns = [column for column in SEQUENCE_KEYS if column in file.columns]
    starts, keys, cuttable, first = [], [], [], 0
    last: pa.Table | None = None
    for piece in read_pieces(file, columns, range(file.row_groups), _PIECE_ROWS):
        arrays = [to_plain_array(piece.column(file.columns[column])) for column in columns]
        table = pa.table(arrays, names=columns)
        joined = table if last is None else pa.concat_tables([last, table]).combine_chunks()
        flags = [find_changes(to_plain_array(joined.column(column))) for column in columns]
        if last is None and len(table):
            flags = [np.concatenate([[True], flag]) for flag in flags]
        begins = np.flatnonzero(np.logical_or.reduce(flags))
        starts.append(begins + first)
        keys.append(table.take(pa.array(begins)))
        sure = [flag for column, flag in zip(columns, flags, strict=True) if column != "step"]
        cuttable.append(np.logical_or.reduce(sure)[begins])
        first += len(table)
        last = table.slice(len(table) - 1) if len(table) else last
    if not starts:
        return _Survey(np.zeros(0, np.int64), pa.table({}), np.zeros(0, np.bool_))
    return _Survey(np.concatenate(starts), pa.concat_tables(keys).combine_chunks(), np.concatenate(cuttable))


def _long_units(file: DumpFile, survey: _Survey) -> Iterator[ReadUnit]:
    """Yield units from the first sequence start in a row group to the next row group that has one."""
    cuts: list[tuple[int, int]] = []
    low = 0
    for row_group, rows in enumerate(file.contents.rows):
        high = low + rows
        begin, end = np.searchsorted(survey.starts, [low, high])
        places = np.flatnonzero(survey.cuttable[begin:end])
        if len(places):
            cuts.append((int(begin + places[0]), row_group))
        low = high
    ends = [sequence for sequence, _ in cuts[1:]] + [len(survey.starts)] * bool(cuts)
    bounds = [*survey.starts.tolist(), file.rows]
    for (sequence, row_group), end in zip(cuts, ends, strict=True):
        start, stop = bounds[sequence], bounds[end]
        steps = _step_range(file, survey.keys, sequence, end)
        yield ReadUnit(0, file, row_group, steps, stop - start, stop - start, start, end - sequence)


def _step_range(file: DumpFile, keys: pa.Table, begin: int, end: int) -> IntegerRange | None:
    if "step" not in file.columns:
        return _folder_step(file)
    import pyarrow.compute as pc

    extremes = pc.min_max(keys.column("step").slice(begin, end - begin)).as_py()
    low, high = extremes["min"], extremes["max"]
    return (low, high) if type(low) is int and type(high) is int else None


def _read_sequence_keys(file: DumpFile, survey: _Survey) -> pa.Table:
    """Return the keys of each sequence as strings, with its file and first row."""
    number = len(survey.starts)
    fixed = {"run": file.run, "step": file.partition.get("step"), "sequence_id": None}
    names = {
        column: to_texts(to_plain_array(survey.keys.column(column)))
        if column in survey.keys.column_names
        else pa.array([None if value is None else str(value)] * number, pa.string())
        for column, value in fixed.items()
    }
    names["run"] = names["run"].fill_null(file.run)
    return pa.table({**names, "file": np.full(number, file.index), "start": survey.starts})


def _find_scattered_sequences(
    tables: Sequence[pa.Table], files: Sequence[DumpFile]
) -> Iterator[tuple[int, int, str, str]]:
    """Yield (file, row, problem, remedy) for sequences that begin more than once, later parts first."""
    if not tables:
        return
    import pyarrow.compute as pc

    table = pa.concat_tables(tables).combine_chunks()
    table = table.append_column("place", pa.array(np.arange(len(table))))
    table = table.filter(pc.is_valid(table.column("sequence_id")))
    groups = table.group_by(["run", "step", "sequence_id"], use_threads=False).aggregate([("place", "list")])
    groups = groups.filter(pc.greater(pc.list_value_length(groups.column("place_list")), 1))
    # One row per sequence, whose places are in the order of files and rows.
    repeats = sorted(sorted(places) for places in groups.column("place_list").to_pylist())
    if not repeats:
        return
    rows = table.filter(pc.is_in(table.column("place"), pa.array([place for places in repeats for place in places])))
    where = {row["place"]: row for row in rows.to_pylist()}
    for places in repeats:
        for before, after in [*pairwise(places), (places[1], places[0])]:
            yield _scattered_piece(where[before], where[after], files)


def _scattered_piece(
    other: dict[str, int], piece: dict[str, int], files: Sequence[DumpFile]
) -> tuple[int, int, str, str]:
    name = escape_unprintable(f"sequence {piece['sequence_id']}")
    if piece["step"] is not None:
        name += escape_unprintable(f" of step {piece['step']}")
    if other["file"] == piece["file"]:
        problem = f"{name} is not contiguous: it begins at row {other['start']} and again here"
        return piece["file"], piece["start"], problem, f"{SORT_REMEDY}; an id must be unique within its step"
    problem = f"{name} is also in {files[other['file']].path} (row {other['start']})"
    return piece["file"], piece["start"], problem, "keep each sequence in one file, under an id of its own"
