"""The catalog of a dump: open all files, check that their columns agree, and divide them into units of work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from mismatchctl.core.batch import Bools, Ints
from mismatchctl.core.schema import COLUMNS, COLUMNS_BY_NAME, REQUIRED_COLUMNS, VERSION_COLUMNS
from mismatchctl.data.arrays import (
    NULL_TYPE,
    describe_comparable_type,
    describe_type,
    find_changes,
    plain_type,
    to_plain_array,
    to_texts,
)
from mismatchctl.data.files import (
    ColumnNames,
    DumpFile,
    FileFooter,
    HiveValue,
    ReadUnit,
    identify_columns,
    read_footer,
    read_pieces,
)
from mismatchctl.data.formats import IntegerRange
from mismatchctl.data.paths import UnopenedFile
from mismatchctl.data.problems import SORT_REMEDY, Problems
from mismatchctl.errors import ConfigError, DataError, option, suggestion
from mismatchctl.io.stores import escape_unprintable, is_remote, map_requests

ALWAYS_READ_COLUMNS = (
    "response_mask",
    "run",
    "step",
    "sequence_id",
    "prompt_id",
    "reward",
    "micro_batch",
    "rollout_ids",
)
"""Optional columns that are read if a file has them."""

_SHOWN_FILES = 3


@dataclass
class Catalog:
    """Usable files, and the problems of the other files."""

    files: list[DumpFile] = field(default_factory=list)
    footers: list[FileFooter] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    notes: list[str] = field(default_factory=list)

    def reject(self, error: DataError, skip: bool) -> None:
        if not skip:
            raise error
        place = "" if error.column is None else f"column {error.column}: "
        self.problems.files.setdefault(error.file or "-", f"{place}{error.problem}")


def build_catalog(found: Sequence[UnopenedFile], names: ColumnNames, wanted: Collection[str], skip: bool) -> Catalog:
    """Open all files. Unusable files raise an error, or are left out with `skip`."""
    result = Catalog()
    ready: list[UnopenedFile] = []
    for one in _convert_foreign(found, skip, result.notes.append):
        if isinstance(one, DataError):
            result.reject(one, skip)
        else:
            ready.append(one)
    for footer in _read_footers(ready):
        if isinstance(footer, DataError):
            result.reject(footer, skip)
        else:
            result.footers.append(footer)
    partitions = _partition_values(result.footers, names)
    for footer, values in zip(result.footers, partitions, strict=True):
        try:
            result.files.append(identify_columns(footer, 0, names, values))
        except DataError as error:
            result.reject(error, skip)
    _check_by(result, names)
    _check_agreement(result, list(dict.fromkeys((*REQUIRED_COLUMNS, *ALWAYS_READ_COLUMNS, *wanted, *names.by))), skip)
    result.files = [replace(file, index=index) for index, file in enumerate(result.files)]
    return result


def _convert_foreign(
    found: Sequence[UnopenedFile], skip: bool, note: Callable[[str], None]
) -> Iterable[UnopenedFile | DataError]:
    """Read files of frameworks as tables. The importers are imported only if there is such a file."""
    if not any(one.foreign for one in found):
        return found
    from mismatchctl.data.importers.sources import convert_foreign_files

    return convert_foreign_files(found, skip, note)


def _read_footers(found: Sequence[UnopenedFile]) -> Iterator[FileFooter | DataError]:
    def read(one: UnopenedFile) -> FileFooter | DataError:
        try:
            return read_footer(one)
        except DataError as error:
            return error

    return map_requests(read, found, over_network=any(is_remote(one.location) for one in found))


def require_files(catalog: Catalog, names: ColumnNames) -> None:
    """Raise if no file is left, or if no file has a column named with `--column`."""
    footers = catalog.footers
    if not catalog.files:
        path, problem = next(iter(catalog.problems.files.items()))
        raise DataError(f"no file can be used; the first one: {problem}", file=path)
    present = {name for footer in footers for name in footer.types}
    for column, actual in names.rename.items():
        if actual not in present:
            near = escape_unprintable(suggestion(actual, sorted(present)))
            shown = escape_unprintable(actual)
            problem = f"{option('columns', {column: shown})}: no file has a column {shown}{near}"
            listed = ", ".join(sorted(escape_unprintable(name) for name in footers[0].types))
            raise DataError(problem, file=footers[0].found.path, remedy=f"its columns are {listed}")


def _partition_values(footers: Sequence[FileFooter], names: ColumnNames) -> list[dict[str, HiveValue]]:
    """Return the Hive values of each file. A key is an integer if it is one in every folder."""
    raw = [{names.canonical(key): value for key, value in footer.found.partition.items()} for footer in footers]
    words: defaultdict[str, set[str]] = defaultdict(set)
    for values in raw:
        for key, value in values.items():
            if value is not None:
                words[key].add(value)
    whole = {key for key, texts in words.items() if all(_is_integer(text) for text in texts)}
    return [
        {
            key: int(value) if key in whole else escape_unprintable(value)
            for key, value in values.items()
            if value is not None
        }
        for values in raw
    ]


def _is_integer(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit() and len(text) < 19


def _check_by(found: Catalog, names: ColumnNames) -> None:
    """Raise if a `--by` column is missing or does not have one value per sequence."""
    for name in names.by:
        holders = [file for file in found.files if name in file.columns]
        for file in [] if name in VERSION_COLUMNS else holders:
            if pa.types.is_nested(plain_type(file.types[name])) or (file.layout == "long" and _is_per_token(name)):
                what = "one value per token" if file.layout == "long" else describe_type(file.types[name])
                raise ConfigError(
                    f"{option('by', escape_unprintable(name))}: the column holds {what} in {file.path}; "
                    "a column to break down by has one value per sequence"
                )
        if found.files and not holders and name != "run" and not any(name in file.partition for file in found.files):
            known = {text for file in found.files for text in (*file.columns, *file.partition)}
            known.update(text for footer in found.footers for text in footer.types)
            near = escape_unprintable(suggestion(name, sorted(known)))
            raise ConfigError(f"{option('by', escape_unprintable(name))}: no file has a column of this name{near}")


def _is_per_token(name: str) -> bool:
    column = COLUMNS_BY_NAME.get(name)
    return name == "position" or (column is not None and column.per_token)


def _check_agreement(found: Catalog, used: Sequence[str], skip: bool) -> None:
    runs: defaultdict[str, list[DumpFile]] = defaultdict(list)
    for file in found.files:
        runs[file.run].append(file)
    deviating: dict[int, DataError] = {}
    for files in runs.values():
        for column in used:
            for file, error in _find_deviating_files(files, column):
                deviating.setdefault(id(file), error)
    for file in found.files:
        if id(file) in deviating:
            found.reject(deviating[id(file)], skip)
    found.files = [file for file in found.files if id(file) not in deviating]


def _find_deviating_files(files: Sequence[DumpFile], column: str) -> Iterator[tuple[DumpFile, DataError]]:
    kinds = {
        id(file): describe_comparable_type(COLUMNS_BY_NAME.get(column), file.types[column])
        for file in files
        if column in file.types
    }
    kinds = {number: words for number, words in kinds.items() if not words.endswith(NULL_TYPE)}
    if len(set(kinds.values())) < 2:
        return
    usual, times = Counter(kinds.values()).most_common(1)[0]  # ties go to the first
    example = next(file for file in files if kinds.get(id(file)) == usual)
    others = f" and {times - 1} more" if times > 1 else ""
    for file in files:
        if kinds.get(id(file), usual) != usual:
            yield (
                file,
                DataError(
                    f"holds {kinds[id(file)]} here but {usual} in {example.path}{others}",
                    file=file.path,
                    column=escape_unprintable(file.columns[column]),
                    remedy=f"use one type in all files of a run, or skip unfit files with {option('on_bad', 'skip')}",
                ),
            )


def list_warnings(files: Sequence[DumpFile]) -> Iterator[str]:
    """Yield warnings about optional columns that cannot be used or that only some files have."""
    ignored: dict[str, list[str]] = {}
    for file in files:
        for column, problem in file.ignored.items():
            ignored.setdefault(f"{column}: ignored, since it {problem}", []).append(file.path)
    for text, paths in ignored.items():
        yield f"{text} (in {_format_paths(paths)})"
    for column in [column.name for column in COLUMNS if not column.required and column.name != "position"]:
        without = [file.path for file in files if column not in file.columns and column not in file.partition]
        if without and len(without) < len(files):
            with_it = len(files) - len(without)
            yield f"{column}: in {with_it} of {len(files)} files, used there; not in {_format_paths(without)}"


def _format_paths(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN_FILES} more" if len(paths) > _SHOWN_FILES else ""
    return ", ".join(paths[:_SHOWN_FILES]) + more


SEQUENCE_KEYS = ("sequence_id", "step", "run")
"""Columns that identify a sequence. A new sequence begins if one of them changes."""

_PIECE_ROWS = 1 << 21
UNIT_TOKENS = 3 << 20
"""Row groups up to this number of tokens are read together, because each unit has a fixed cost."""


@dataclass(frozen=True)
class ReadPlan:
    """Units of all files, and the sequences that are not contiguous: file -> first row -> reason."""

    units: tuple[ReadUnit, ...]
    broken: dict[int, dict[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Survey:
    """Starts and keys of the sequences in a long file, with flags for possible cuts.

    A file is not cut if only the step changes: if positions continue there, it is one sequence with a wrong step, and
    the reader must read both parts together to detect it.
    """

    starts: Ints
    keys: pa.Table
    cuttable: Bools


def plan_units(catalog: Catalog, skip: bool) -> ReadPlan:
    """Divide all files into units. With `skip`, files that cannot be surveyed are removed from `catalog`."""
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
    """Return row groups or record batches as units, small ones together."""
    found: list[ReadUnit] = []
    for unit in _group_units(file):
        if found and found[-1].tokens + unit.tokens <= UNIT_TOKENS:
            found[-1] = _join_units(found[-1], unit)
        else:
            found.append(unit)
    return found


def _group_units(file: DumpFile) -> Iterator[ReadUnit]:
    start, steps = 0, _step_ranges(file)
    for group, rows in enumerate(file.contents.rows):
        if rows:
            tokens = file.elements(group, "rollout_log_probs")
            yield ReadUnit(0, file, group, steps[group], rows, tokens, start, rows)
        start += rows


def _join_units(first: ReadUnit, then: ReadUnit) -> ReadUnit:
    return replace(
        first,
        step_range=_units_step_range((first, then)),
        rows=first.rows + then.rows,
        tokens=first.tokens + then.tokens,
        sequences=first.sequences + then.sequences,
        row_groups=then.row_group + then.row_groups - first.row_group,
    )


def _units_step_range(units: Sequence[ReadUnit]) -> IntegerRange | None:
    known = [unit.step_range for unit in units if unit.step_range is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(units) else None


def split_unit(unit: ReadUnit) -> list[ReadUnit]:
    last = unit.row_group + unit.row_groups
    return [own for own in _group_units(unit.file) if unit.row_group <= own.row_group < last]


def _step_ranges(file: DumpFile) -> list[IntegerRange | None]:
    return file.integer_ranges("step") if "step" in file.columns else [_folder_step(file)] * file.row_groups


def _folder_step(file: DumpFile) -> IntegerRange | None:
    step = file.partition.get("step")
    return (step, step) if isinstance(step, int) else None


def _survey_file(file: DumpFile) -> _Survey:
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
    bounds = np.append(survey.starts, file.rows)
    for (sequence, row_group), end in zip(cuts, ends, strict=True):
        start, stop = bounds[[sequence, end]].tolist()
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
    number = len(survey.starts)
    fixed = {"run": file.run, "step": file.partition.get("step"), "sequence_id": None}
    names = {
        column: to_texts(to_plain_array(survey.keys.column(column)))
        if column in survey.keys.column_names
        else pa.repeat(pa.scalar(None if value is None else str(value), pa.string()), number)
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

    table = pa.concat_tables(tables)
    places = np.flatnonzero(table.column("sequence_id").is_valid().to_numpy())
    codes = np.zeros(len(places), np.int64)
    for column in ("run", "step", "sequence_id"):  # ranks take a tenth of the memory of a hash table
        own = pc.rank(table.column(column), sort_keys="ascending", tiebreaker="dense").to_numpy()[places]
        _, codes = np.unique(codes * (len(table) + 1) + own.astype(np.int64), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    order = order[np.bincount(codes, minlength=1)[codes[order]] > 1]
    starts = np.flatnonzero(np.diff(codes[order])) + 1
    # One row per sequence, with places in the order of files and rows.
    repeats = sorted(own.tolist() for own in np.split(places[order], starts) if len(own))
    found = [place for own in repeats for place in own]
    where = dict(zip(found, table.take(pa.array(found, pa.int64())).to_pylist(), strict=True))
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
    return piece["file"], piece["start"], problem, "keep each sequence in one file, under its own id"
