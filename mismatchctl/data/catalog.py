"""Match columns of files with the schema, compare their types between files, and divide the files into parts."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice, pairwise, product
from typing import Literal

import numpy as np
import pyarrow as pa

from mismatchctl.core.batch import Bools, Ints
from mismatchctl.core.schema import (
    COLUMNS,
    COLUMNS_BY_NAME,
    LONG_LAYOUT_REQUIRED,
    REQUIRED_COLUMNS,
    VERSION_COLUMNS,
    ColumnKind,
)
from mismatchctl.data.formats import (
    FLAG_TYPE,
    MOST_SEQUENCE_TOKENS,
    NULL_TYPE,
    NUMBER_TYPE,
    FileContents,
    IntegerRange,
    MemoryTable,
    describe_type,
    find_changes,
    find_current_name,
    find_type_misfit,
    format_name,
    is_list,
    list_columns,
    plain_type,
    read_contents,
    to_plain_array,
    to_texts,
)
from mismatchctl.data.paths import UnopenedFile
from mismatchctl.data.problems import SORT_REMEDY, Problems, leave_out
from mismatchctl.errors import ConfigError, DataError, option, suggestion, wording
from mismatchctl.io.process import ordered_map
from mismatchctl.io.stores import escape_unprintable, find_store, first_error_line, format_names, is_remote

RowLayout = Literal["wide", "long"]
HiveValue = int | str | None

STRUCTURE_COLUMNS = frozenset({"run", "step", "sequence_id", "position", "advantages"})
"""In these columns and in per-token columns, a wrong type is an error. Other columns with a wrong type are ignored."""

_PARALLEL_REQUESTS = 16


@dataclass(frozen=True)
class FileFooter:
    """Metadata of a file with its own column names, which are not yet matched with the schema."""

    found: UnopenedFile
    size: int
    version: str
    contents: FileContents = field(repr=False)
    types: Mapping[str, pa.DataType] = field(repr=False)

    def is_all_null(self, column: str) -> bool:
        """Return True if all values of a column are null. The column then counts as missing."""
        location = self.found.location
        with explain_failures(self.found.path, location, "cannot be read"):
            return self.contents.is_all_null(find_store(location).open(location), column)


@dataclass(frozen=True)
class DumpFile:
    """One file of a dump: its rows, layout and columns."""

    index: int  # unique and ascending, see `plan_units`
    path: str  # as shown to users, without control characters
    run: str  # named by the path argument or by a Hive folder (`run=a/`)
    size: int
    rows: int  # sequences in the wide layout, tokens in the long layout
    layout: RowLayout
    columns: Mapping[str, str]  # canonical name -> name in the file. `--by` columns keep their name.
    partition: Mapping[str, HiveValue]  # canonical name -> value of a Hive folder such as `step=12/`
    ignored: Mapping[str, str] = field(default_factory=dict)  # optional columns that cannot be used -> reason
    location: str = field(default="", repr=False)  # absolute path or object address, empty for a table in memory
    version: str = field(default="", repr=False)  # version of the file, which changes if the file is written again
    contents: FileContents = field(default=None, repr=False, compare=False)  # type: ignore[assignment]
    types: Mapping[str, pa.DataType] = field(default_factory=dict, repr=False, compare=False)

    def elements(self, group: int, column: str) -> int:
        return self.contents.elements(group, self.columns[column])

    def integer_ranges(self, column: str) -> list[IntegerRange | None]:
        opening = find_store(self.location).open(self.location)
        with explain_failures(self.path, self.location, "cannot be read"):
            return self.contents.integer_ranges(opening, self.columns[column])

    def is_list(self, column: str) -> bool:
        return is_list(self.types[column])

    def is_per_token(self, column: str) -> bool:
        known = COLUMNS_BY_NAME.get(column)
        if known is None or known.kind is not ColumnKind.PER_TOKEN_OR_SCALAR:
            return column == "position" or (known is not None and known.per_token)
        return self.layout == "long" or self.is_list(column)


@dataclass(frozen=True)
class ReadUnit:
    """A part of a file that can be read alone: row groups, or whole sequences if a row is a token (long layout)."""

    index: int
    file: DumpFile
    row_group: int  # number of the first row group
    step_range: tuple[int, int] | None  # lowest and highest step (`None` if not known exactly)
    rows: int
    tokens: int  # approximate number, including masked tokens
    start: int = 0  # first row
    sequences: int = 0
    row_groups: int = 1  # in the wide layout, small row groups are read together
    # first row of each sequence, in the long layout
    starts: Ints = field(default_factory=lambda: np.empty(0, np.int64), repr=False, compare=False)


def read_footer(found: UnopenedFile) -> FileFooter:
    store = find_store(found.location)

    def read() -> tuple[int, str, FileContents]:
        if found.table is not None:
            size = found.table.table.nbytes if found.size is None else found.size
            return size, found.table.version, found.table
        with store.open(found.location) as file:
            if file.size() == 0:
                remedy = f"write the file again, or {leave_out('unreadable files')}"
                raise DataError("this file is empty (0 bytes)", file=found.path, remedy=remedy)
            return file.size(), store.version(found.location, file), read_contents(found.path, file)

    with explain_failures(found.path, found.location, f"this is not a complete {format_name(found.path)} file"):
        size, version, contents = store.retry(read)
        names = contents.schema.names
        if twice := next((name for name in names if names.count(name) > 1), None):
            problem = "the file has two columns with this name"
            raise DataError(problem, file=found.path, column=escape_unprintable(twice))
        return FileFooter(found, size, version, contents, dict(zip(names, contents.schema.types, strict=True)))


NO_ROW_REMEDY = "pass a dump that contains sequences"


@contextmanager
def explain_failures(path: str, location: str, problem: str) -> Iterator[None]:
    store = find_store(location)
    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, *store.error_types) as error:
        skip = leave_out("unreadable files")
        if store.remote and not isinstance(error, (ValueError, pa.ArrowException)):
            raise store.explain(error, path) from error
        if isinstance(error, OSError) and error.errno:  # an error of the system, not of the file's content
            explained = store.explain(error, location)
            remedy = f"{explained.remedy}, or {skip}" if explained.remedy else skip
            raise DataError(explained.problem, file=path, remedy=remedy) from error
        remedy = f"write the file again, or {skip}"
        raise DataError(f"{problem} ({first_error_line(error)})", file=path, remedy=remedy) from error


def identify_columns(footer: FileFooter, names: ColumnNames, values: Mapping[str, HiveValue]) -> DumpFile:
    path, columns = footer.found.path, names.match(footer)
    if footer.found.step is not None and "step" not in columns and "step" not in values:
        values = {**values, "step": footer.found.step}
    sides = [is_list(footer.types[columns[column]]) for column in REQUIRED_COLUMNS if column in columns]
    layout: RowLayout = "wide" if any(sides) or not sides else "long"
    required = LONG_LAYOUT_REQUIRED if layout == "long" else REQUIRED_COLUMNS
    for column in required:
        if column not in columns:
            raise names.missing(footer, column, columns)
    ignored = {}
    for column in list(columns):
        optional = column in COLUMNS_BY_NAME and column not in (*required, *names.by)
        if optional and footer.is_all_null(columns[column]) and not footer.is_all_null(columns[REQUIRED_COLUMNS[0]]):
            del columns[column]  # in a file without tokens, empty lists are valid
            continue
        known, name = COLUMNS_BY_NAME.get(column), columns[column]
        problem = None if known is None else find_type_misfit(known, footer.types[name], layout)
        if known is None or problem is None:
            continue
        if column in STRUCTURE_COLUMNS or known.per_token:
            remedy = f"change the type, or {_column_option(column)}"
            raise DataError(problem, file=path, column=escape_unprintable(name), remedy=remedy)
        ignored[column] = problem
        del columns[column]
    return DumpFile(
        index=0,  # `plan_units` sets the final index
        path=path,
        run=str(values.get("run", footer.found.run)),
        size=footer.size,
        rows=sum(footer.contents.rows),
        layout=layout,
        columns=columns,
        partition=values,
        ignored=ignored,
        location=footer.found.location,
        version=footer.version,
        contents=footer.contents,
        types={column: footer.types[name] for column, name in columns.items()},
    )


def _column_option(column: str) -> str:
    return f"choose the right column with {option('columns', {column: 'NAME'})}"


@dataclass(frozen=True)
class ColumnNames:
    """Names that `match` uses to find the columns of a file."""

    rename: Mapping[str, str] = field(default_factory=dict)  # canonical name -> name in the file, from `--column`
    aliases: Mapping[str, str] = field(default_factory=dict)  # name that a framework uses -> canonical name
    by: Sequence[str] = ()  # names in the file, from `--by`

    def __post_init__(self) -> None:
        for column in self.rename:
            if column not in COLUMNS_BY_NAME:
                known, name = suggestion(column, COLUMNS_BY_NAME), escape_unprintable(column)
                where = wording(python=f"columns: {name}", command=f"--column {name}=...")
                raise ConfigError(
                    f"{where}: the dump format has no such column{known}; `mismatchctl schema` lists the columns"
                )

    def match(self, footer: FileFooter, lenient: bool = False) -> dict[str, str]:
        present = {name for name, kind in footer.types.items() if describe_type(kind) != NULL_TYPE}
        free = [name for name in footer.types if name in present and name not in self.rename.values()]
        result = {}
        for column in (column.name for column in COLUMNS):
            if column in self.rename:
                actual = find_current_name(footer.contents.schema, self.rename[column])
                claims = [actual] if actual in present else []
            elif column in free:
                claims = [column]
            else:
                claims = [name for name in free if self.aliases.get(name) == column]
            if len(claims) > 1 and not lenient:
                both = " and ".join(escape_unprintable(name) for name in claims)
                problem = f"several columns may contain {column}: {both}"
                raise DataError(problem, file=footer.found.path, remedy=_column_option(column))
            if claims:
                result[column] = claims[0]
        for name in self.by:
            if name not in result and name in present:
                result[name] = name
        return result

    def canonical(self, name: str) -> str:
        return name if name in COLUMNS_BY_NAME else self.aliases.get(name, name)

    def missing(self, footer: FileFooter, column: str, columns: Mapping[str, str]) -> DataError:
        path, actual = footer.found.path, self.rename.get(column, column)
        shown, remedy = escape_unprintable(actual), _column_option(column)
        if describe_type(footer.types.get(actual, pa.int8())) == NULL_TYPE:
            if not any(footer.contents.rows):  # without values, the type is unknown
                return DataError("the file does not contain rows", file=path, remedy=NO_ROW_REMEDY)
            return DataError("contains only nulls", file=path, column=shown, remedy=remedy)
        near = escape_unprintable(suggestion(actual, [name for name in footer.types if name not in columns.values()]))
        named = f" (named with {option('columns', {column: shown})})" if column in self.rename else ""
        need = ", which a file with one row per token needs" if column not in REQUIRED_COLUMNS else ""
        listed = list_columns(footer.contents.schema)
        remedy = f"{self._other_reading(footer, column, columns)}{remedy}; the columns of the file are {listed}"
        return DataError(f"missing required column {shown}{named}{need}{near}", file=path, remedy=remedy)

    @staticmethod
    def _other_reading(footer: FileFooter, column: str, columns: Mapping[str, str]) -> str:
        if column not in REQUIRED_COLUMNS:
            return ""
        if columns.keys() & set(REQUIRED_COLUMNS):
            if footer.found.size is None:  # Parquet or Arrow: only imported files have a size
                return ""
            name = os.path.basename(footer.found.path)
            sides = (name, "FILE") if column == "train_log_probs" else ("FILE", name)
            other = "if another file contains this column, use --rollout {} --train {} --on id; ".format(*sides)
            return f"{other}if the column has another name, "
        scalars = not any(is_list(kind) for kind in footer.types.values())
        if scalars and any(name.lower().removeprefix("_").endswith("step") for name in footer.types):
            return (
                "if the file is a metrics log, pass it alone to `mismatchctl analyze` or `gate`; if the "
                "column has another name, "
            )
        return "if the file is not a dump, pass only the dumps; if the column has another name, "


def read_pieces(
    file: DumpFile, columns: Collection[str], row_groups: Sequence[int], rows: int | None = None
) -> Iterator[pa.Table]:
    if not row_groups:
        return
    names = list(dict.fromkeys(file.columns[column] for column in columns))
    if problem := file.contents.find_oversize(row_groups, names):
        single = f"store one sequence of at most {MOST_SEQUENCE_TOKENS:,} tokens per row"
        remedy = f"{file.contents.split_remedy}, and {single}"
        raise DataError(escape_unprintable(problem), file=file.path, remedy=remedy)
    store, group = find_store(file.location), file.contents.group_name
    where = f"{group} {row_groups[0]}" if len(row_groups) == 1 else f"the file from {group} {row_groups[0]} on"

    def decode() -> Iterator[pa.Table]:
        in_memory = isinstance(file.contents, MemoryTable)
        with nullcontext() if in_memory else store.open(file.location) as opened:
            if opened and (opened.size(), store.version(file.location, opened)) != (file.size, file.version):
                raise DataError("this file changed while it was being read", file=file.path, remedy="run again")
            yield from file.contents.decode(opened, row_groups, names, rows)

    def begin() -> Iterator[pa.Table]:
        tables = decode()
        first = list(islice(tables, 1))
        return chain(first, tables)

    with explain_failures(file.path, file.location, f"{where} cannot be decoded"):
        yield from store.retry(begin)


ALWAYS_READ_COLUMNS = (
    "response_mask", "run", "step", "sequence_id", "prompt_id", "reward", "micro_batch", "rollout_ids",
)  # fmt: skip


@dataclass
class Catalog:
    """The usable files of a dump. With `skip`, unusable files are recorded in `problems`, else they raise an error."""

    skip: bool
    files: list[DumpFile] = field(default_factory=list)
    footers: list[FileFooter] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    notes: list[str] = field(default_factory=list)

    def reject(self, error: DataError) -> None:
        if not self.skip:
            raise error
        place = "" if error.column is None else f"column {error.column}: "
        self.problems.files.setdefault(error.file or "-", f"{place}{error.problem}")


def build_catalog(found: Sequence[UnopenedFile], names: ColumnNames, wanted: Collection[str], skip: bool) -> Catalog:
    result = Catalog(skip)
    converted: Iterable[UnopenedFile | DataError] = found
    if any(one.foreign for one in found):  # the importers take long to load
        from mismatchctl.data.importers.sources import convert_foreign_files

        converted = convert_foreign_files(found, skip, result.notes.append)
    ready: list[UnopenedFile] = []
    for one in converted:
        if isinstance(one, DataError):
            result.reject(one)
        else:
            ready.append(one)
    threads = _PARALLEL_REQUESTS if any(is_remote(one.location) for one in ready) else 1
    for _, footer in ordered_map(_try_footer, ready, threads):
        if isinstance(footer, DataError):
            result.reject(footer)
        else:
            result.footers.append(footer)
    partitions = _partition_values(result.footers, names)
    for footer, values in zip(result.footers, partitions, strict=True):
        try:
            result.files.append(identify_columns(footer, names, values))
        except DataError as error:
            result.reject(error)
    _check_by(result, names)
    _check_agreement(result, list(dict.fromkeys((*REQUIRED_COLUMNS, *ALWAYS_READ_COLUMNS, *wanted, *names.by))))
    return result


def _try_footer(found: UnopenedFile) -> FileFooter | DataError:
    try:
        return read_footer(found)
    except DataError as error:
        return error


def require_files(catalog: Catalog, names: ColumnNames) -> None:
    footers = catalog.footers
    if not catalog.files:
        path, problem = next(iter(catalog.problems.files.items()))
        raise DataError(f"none of the files can be used. The problem of the first file: {problem}", file=path)
    present = {name for footer in footers for name in footer.types}
    for column, actual in names.rename.items():
        if not any(find_current_name(footer.contents.schema, actual) in footer.types for footer in footers):
            near = escape_unprintable(suggestion(actual, sorted(present)))
            shown = escape_unprintable(actual)
            problem = f"{option('columns', {column: shown})}: no file has a column {shown}{near}"
            listed = list_columns(footers[0].contents.schema)
            raise DataError(problem, file=footers[0].found.path, remedy=f"the columns of the file are {listed}")


def _partition_values(footers: Sequence[FileFooter], names: ColumnNames) -> list[dict[str, HiveValue]]:
    raw = [
        {names.canonical(key): value for key, value in footer.found.partition.items() if value is not None}
        for footer in footers
    ]
    texts = {value for values in raw for value in values.items()}
    broken = {key for key, text in texts if not re.fullmatch(r"-?[0-9]{1,18}", text)}
    return [
        {key: escape_unprintable(value) if key in broken else int(value) for key, value in values.items()}
        for values in raw
    ]


def _check_by(found: Catalog, names: ColumnNames) -> None:
    for name in names.by:
        holders = [file for file in found.files if name in file.columns]
        for file in [] if name in VERSION_COLUMNS else holders:
            long_list = file.layout == "long" and file.is_per_token(name)
            if pa.types.is_nested(plain_type(file.types[name])) or long_list:
                what = "one value per token" if file.layout == "long" else describe_type(file.types[name])
                raise ConfigError(
                    f"{option('by', escape_unprintable(name))}: the column contains {what} in {file.path}; "
                    "choose a column with one value per sequence"
                )
        if found.files and not holders and name != "run" and not any(name in file.partition for file in found.files):
            if ignored := [file for file in found.files if name in file.ignored]:
                problem = f"{option('by', name)}: the column {ignored[0].ignored[name]} in {ignored[0].path}"
                raise ConfigError(f"{problem}; change the type, or rename the column")
            known = {text for file in found.files for text in (*file.columns, *file.partition)}
            known.update(text for footer in found.footers for text in footer.types)
            near = escape_unprintable(suggestion(name, sorted(known)))
            raise ConfigError(f"{option('by', escape_unprintable(name))}: no file has a column of this name{near}")


def _check_agreement(found: Catalog, used: Sequence[str]) -> None:
    """Reject a file if the type of a used column differs from the type in most files of its run."""
    remedy = f"use one type in all files of a run, or skip the other files with {option('on_bad', 'skip')}"
    runs: defaultdict[str, list[DumpFile]] = defaultdict(list)
    for file in found.files:
        runs[file.run].append(file)
    for whole, column in product(runs.values(), used):
        files = [file for file in whole if column in file.types]
        words = [describe_type(file.types[column]) for file in files]
        if column in COLUMNS_BY_NAME and COLUMNS_BY_NAME[column].kind is not ColumnKind.ID:
            words = [one.replace(FLAG_TYPE, NUMBER_TYPE) for one in words]  # flags count as numbers
        counts = Counter(one for one in words if not one.endswith(NULL_TYPE))
        usual, times = counts.most_common(1)[0] if counts else ("", 0)  # ties go to the first
        for file, one in zip(files, words, strict=True):
            if one in counts and one != usual:
                others = f" and {times - 1} more file{'s' * (times > 2)}" if times > 1 else ""
                problem = f"contains {one} in this file, but {usual} in {files[words.index(usual)].path}{others}"
                name = escape_unprintable(file.columns[column])
                found.reject(DataError(problem, file=file.path, column=name, remedy=remedy))
                found.files = [other for other in found.files if other is not file]


def list_warnings(files: Sequence[DumpFile]) -> Iterator[str]:
    ignored: dict[str, list[str]] = {}
    for file in files:
        for column, problem in file.ignored.items():
            ignored.setdefault(f"{column} is ignored, because it {problem}", []).append(file.path)
    for text, paths in ignored.items():
        yield f"{text} (in {format_names(paths, 3)})"
    for column in [column.name for column in COLUMNS if not column.required and column.name != "position"]:
        without = [file.path for file in files if column not in file.columns and column not in file.partition]
        if without and len(without) < len(files):
            with_it = len(files) - len(without)
            yield f"{column}: used in {with_it} of {len(files)} files; missing in {format_names(without, 3)}"


SEQUENCE_KEYS = ("sequence_id", "step", "run")
"""Columns that identify a sequence. In the long layout, a new sequence begins if one of these columns changes."""

_PIECE_ROWS = 1 << 21
UNIT_TOKENS = 3 << 20  # to save time, small adjacent row groups are read together, up to this number of tokens


@dataclass(frozen=True)
class _Survey:
    """First row and SEQUENCE_KEYS of each sequence in a file, and whether a ReadUnit may begin there (`cuttable`)."""

    starts: Ints
    keys: pa.Table
    cuttable: Bools


SplitSequences = Mapping[int, Mapping[int, str]]
"""File index -> first row of a sequence -> why it cannot be read: its rows are not adjacent or are in several files."""


def plan_units(catalog: Catalog) -> tuple[tuple[ReadUnit, ...], SplitSequences]:
    """Divide the files into parts that can be read independently. Remove unreadable files from `catalog`."""
    surveyed: list[tuple[DumpFile, _Survey | None]] = []
    for file in catalog.files:
        try:
            surveyed.append((file, _survey_file(file) if file.layout == "long" else None))
        except DataError as error:
            catalog.reject(error)
    catalog.files = [  # indices of earlier files and of other runs stay equal if a file is added
        replace(file, index=(rank << 32) + number)
        for rank, (_, run) in enumerate(groupby((file for file, _ in surveyed), key=lambda file: file.run))
        for number, file in enumerate(run)
    ]
    units: list[ReadUnit] = []
    tables = []
    for file, (_, survey) in zip(catalog.files, surveyed, strict=True):
        if survey is None:
            units.extend(_wide_units(file))
        else:
            units.extend(_long_units(file, survey))
            tables.append(_read_sequence_keys(file, survey))
    broken: dict[int, dict[int, str]] = {}
    paths = {file.index: file.path for file in catalog.files}
    for number, row, problem, remedy in _find_scattered_sequences(tables, paths):
        if not catalog.skip:
            raise DataError(problem, file=paths[number], row=row, column="sequence_id", remedy=remedy)
        broken.setdefault(number, {})[row] = problem
    return tuple(replace(unit, index=index) for index, unit in enumerate(units)), broken


def _wide_units(file: DumpFile) -> list[ReadUnit]:
    found: list[ReadUnit] = []
    for unit in _group_units(file):
        if not found or found[-1].tokens + unit.tokens > UNIT_TOKENS:
            found.append(unit)
            continue
        first, steps = found[-1], (*(found[-1].step_range or ()), *(unit.step_range or ()))
        found[-1] = replace(
            first,
            step_range=(min(steps), max(steps)) if len(steps) == 4 else None,
            rows=first.rows + unit.rows,
            tokens=first.tokens + unit.tokens,
            sequences=first.sequences + unit.sequences,
            row_groups=unit.row_group + unit.row_groups - first.row_group,
        )
    return found


def _group_units(file: DumpFile) -> Iterator[ReadUnit]:
    steps = file.integer_ranges("step") if "step" in file.columns else [_folder_step(file)] * len(file.contents.rows)
    start = 0
    for group, rows in enumerate(file.contents.rows):
        if rows:
            tokens = file.elements(group, "rollout_log_probs")
            yield ReadUnit(0, file, group, steps[group], rows, tokens, start, rows)
        start += rows


def split_unit(unit: ReadUnit) -> list[ReadUnit]:
    last = unit.row_group + unit.row_groups
    return [own for own in _group_units(unit.file) if unit.row_group <= own.row_group < last]


def _folder_step(file: DumpFile) -> IntegerRange | None:
    step = file.partition.get("step")
    return (step, step) if isinstance(step, int) else None


def _survey_file(file: DumpFile) -> _Survey:
    columns = [column for column in SEQUENCE_KEYS if column in file.columns]
    starts, keys, cuttable, first = [], [], [], 0
    last: pa.Table | None = None
    for piece in read_pieces(file, columns, range(len(file.contents.rows)), _PIECE_ROWS):
        arrays = [to_plain_array(piece.column(file.columns[column])) for column in columns]
        table = pa.table(arrays, names=columns)
        joined = table if last is None else pa.concat_tables([last, table])
        flags = [find_changes(to_plain_array(joined.column(column))) for column in columns]
        if last is None and len(table):
            flags = [np.append(True, flag) for flag in flags]
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
    cuts: list[tuple[int, int]] = []
    edges = np.searchsorted(survey.starts, np.append(0, np.cumsum(file.contents.rows))).tolist()
    for row_group, (begin, end) in enumerate(pairwise(edges)):
        if survey.cuttable[begin:end].any():
            cuts.append((begin + int(survey.cuttable[begin:end].argmax()), row_group))
    bounds = np.append(survey.starts, file.rows)
    for (sequence, row_group), (end, _) in pairwise([*cuts, (len(survey.starts), -1)]):
        start, stop = bounds[[sequence, end]].tolist()
        steps = _step_range(file, survey.keys, sequence, end)
        starts = survey.starts[sequence:end]
        yield ReadUnit(0, file, row_group, steps, stop - start, stop - start, start, len(starts), starts=starts)


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
    tables: Sequence[pa.Table], paths: Mapping[int, str]
) -> Iterator[tuple[int, int, str, str]]:
    """Yield (file, row, problem, remedy) for each piece of a sequence whose rows are in several places."""
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
    for repeats in sorted(own.tolist() for own in np.split(places[order], starts) if len(own)):
        found = table.take(pa.array(repeats)).to_pylist()
        for before, after in [*pairwise(found), (found[1], found[0])]:
            yield _scattered_piece(before, after, paths)


def _scattered_piece(
    other: dict[str, int], piece: dict[str, int], paths: Mapping[int, str]
) -> tuple[int, int, str, str]:
    step = "" if piece["step"] is None else f" of step {piece['step']}"
    name = escape_unprintable(f"sequence {piece['sequence_id']}{step}")
    if other["file"] == piece["file"]:
        problem = f"the rows of {name} are not adjacent: they begin at row {other['start']}, and again at this row"
        return piece["file"], piece["start"], problem, f"{SORT_REMEDY}; an id must be unique within its step"
    problem = f"{name} is also in {paths[other['file']]} (row {other['start']})"
    return piece["file"], piece["start"], problem, "keep each sequence in one file, under its own id"
