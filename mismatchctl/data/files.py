"""One file of a dump: its footer, columns, layout, and decoding it in pieces."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from mismatchctl.core.schema import COLUMNS, COLUMNS_BY_NAME, LONG_LAYOUT_REQUIRED, REQUIRED_COLUMNS, ColumnKind
from mismatchctl.data.arrays import NULL_TYPE, describe_type, find_type_misfit, is_list, plain_type
from mismatchctl.data.formats import (
    MOST_SEQUENCE_TOKENS,
    FileContents,
    IntegerRange,
    MemoryTable,
    format_name,
    read_contents,
)
from mismatchctl.data.paths import UnopenedFile
from mismatchctl.errors import ConfigError, DataError, option, suggestion, wording
from mismatchctl.io.stores import escape_unprintable, find_store, first_error_line

RowLayout = Literal["wide", "long"]
HiveValue = int | str | None

STRUCTURE_COLUMNS = frozenset({"run", "step", "sequence_id", "position", "advantages"})
"""Columns besides the per-token ones that must be usable if present. Other optional columns can be ignored."""

_SHOWN_COLUMNS = 12


@dataclass(frozen=True)
class FileFooter:
    """A file whose footer was read, before its columns are matched."""

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
    """One file of a dump.

    Attributes:
        index: index in the dump's `files`.
        path: path as shown to users, without control characters.
        run: run named by the path argument or by a Hive folder (`run=a/`).
        size: size in bytes.
        rows: number of rows: sequences in the wide layout, tokens in the long layout.
        row_groups: number of row groups (Parquet) or record batches (Arrow).
        layout: "wide" (one row per sequence) or "long" (one row per token).
        columns: canonical name -> name in the file. `--by` columns keep their name.
        dtypes: canonical name -> description of the Arrow type.
        partition: canonical name -> value of a Hive folder such as `step=12/`.
        ignored: optional columns that cannot be used -> reason.
        location: absolute path or object address, empty for a table in memory.
        version: changes if the file is written again.
        contents: metadata of the file.
    """

    index: int
    path: str
    run: str
    size: int
    rows: int
    row_groups: int
    layout: RowLayout
    columns: Mapping[str, str]
    dtypes: Mapping[str, str]
    partition: Mapping[str, HiveValue]
    ignored: Mapping[str, str] = field(default_factory=dict)
    location: str = field(default="", repr=False)
    version: str = field(default="", repr=False)
    contents: FileContents = field(default=None, repr=False, compare=False)  # type: ignore[assignment]
    types: Mapping[str, pa.DataType] = field(default_factory=dict, repr=False, compare=False)

    def elements(self, group: int, column: str) -> int:
        return self.contents.elements(group, self.columns[column])

    def integer_ranges(self, column: str) -> list[IntegerRange | None]:
        opening = find_store(self.location).open(self.location)
        with explain_failures(self.path, self.location, "cannot be read"):
            return self.contents.integer_ranges(opening, self.columns[column])

    def is_list(self, column: str) -> bool:
        return is_list(plain_type(self.types[column]))

    def is_per_token(self, column: str) -> bool:
        known = COLUMNS_BY_NAME.get(column)
        if known is None or known.kind is not ColumnKind.PER_TOKEN_OR_SCALAR:
            return column == "position" or (known is not None and known.per_token)
        return self.layout == "long" or self.is_list(column)


@dataclass(frozen=True)
class ReadUnit:
    """A part of a file that can be read independently: row groups, or whole sequences in the long layout.

    Attributes:
        index: index in the dump's `units`.
        file: the file.
        row_group: first row group or record batch.
        row_groups: number of row groups. Small ones are read together in the wide layout.
        step_range: lowest and highest `step`, if known exactly.
        rows: number of rows.
        tokens: approximate number of tokens, including masked ones.
        start: first row. `start + rows` is the row after the last.
        sequences: number of sequences.
    """

    index: int
    file: DumpFile
    row_group: int
    step_range: tuple[int, int] | None
    rows: int
    tokens: int
    start: int = 0
    sequences: int = 0
    row_groups: int = 1


def read_footer(found: UnopenedFile) -> FileFooter:
    if found.table is not None:
        size = found.table.table.nbytes if found.size is None else found.size
        return _footer(found, size, found.table.version, found.table)
    store = find_store(found.location)

    def read() -> tuple[int, str, FileContents]:
        with store.open(found.location) as file:
            size, version = file.size(), store.version(found.location, file)
            if size == 0:
                raise DataError("this file is empty (0 bytes)", file=found.path, remedy=_write_again())
            return size, version, read_contents(found.path, file)

    with explain_failures(found.path, found.location, f"this is not a complete {format_name(found.path)} file"):
        return _footer(found, *store.retry(read))


def _footer(found: UnopenedFile, size: int, version: str, contents: FileContents) -> FileFooter:
    names = contents.schema.names
    for name in names:
        if names.count(name) > 1:
            raise DataError("the file has two columns with this name", file=found.path, column=escape_unprintable(name))
    return FileFooter(found, size, version, contents, dict(zip(names, contents.schema.types, strict=True)))


NO_ROW_REMEDY = "name a dump that holds sequences"


def _skip_files() -> str:
    skip = wording(python="on_bad='skip' of mm.analyze", command="--on-bad skip")
    return f"leave unreadable files out with {skip}"


def _write_again() -> str:
    return f"write it again, or {_skip_files()}"


@contextmanager
def explain_failures(path: str, location: str, problem: str) -> Iterator[None]:
    """Convert errors of a file or its store to a DataError with a remedy."""
    store = find_store(location)
    try:
        yield
    except DataError:
        raise
    except (pa.ArrowException, *store.error_types) as error:
        if store.remote and not isinstance(error, (ValueError, pa.ArrowException)):
            raise store.explain(error, path) from error
        if isinstance(error, OSError) and error.errno:  # an error of the system, not of the content
            explained = store.explain(error, location)
            remedy = f"{explained.remedy}, or {_skip_files()}" if explained.remedy else _skip_files()
            raise DataError(explained.problem, file=path, remedy=remedy) from error
        raise DataError(f"{problem} ({first_error_line(error)})", file=path, remedy=_write_again()) from error


def identify_columns(footer: FileFooter, index: int, names: ColumnNames, values: Mapping[str, HiveValue]) -> DumpFile:
    path, columns = footer.found.path, names.match(footer)
    if footer.found.step is not None and "step" not in columns and "step" not in values:
        values = {**values, "step": footer.found.step}
    layout = _find_layout(footer, columns)
    required = LONG_LAYOUT_REQUIRED if layout == "long" else REQUIRED_COLUMNS
    for column in required:
        if column not in columns:
            raise names.missing(footer, column, columns)
    ignored = {}
    for column in list(columns):
        optional = column in COLUMNS_BY_NAME and column not in (*required, *names.by)
        if optional and footer.is_all_null(columns[column]) and not footer.is_all_null(columns[REQUIRED_COLUMNS[0]]):
            del columns[column]  # without tokens, empty lists are valid
            continue
        kind = footer.types[columns[column]]
        problem = find_type_misfit(COLUMNS_BY_NAME[column], kind, layout) if column in COLUMNS_BY_NAME else None
        if problem is None:
            continue
        if column in STRUCTURE_COLUMNS or COLUMNS_BY_NAME[column].per_token:
            raise DataError(
                problem,
                file=path,
                column=escape_unprintable(columns[column]),
                remedy=f"change the type, or {_column_option(column)}",
            )
        ignored[column] = problem
        del columns[column]
    return DumpFile(
        index=index,
        path=path,
        run=str(values.get("run", footer.found.run)),
        size=footer.size,
        rows=sum(footer.contents.rows),
        row_groups=len(footer.contents.rows),
        layout=layout,
        columns=columns,
        dtypes={column: escape_unprintable(str(footer.types[name])) for column, name in columns.items()},
        partition=values,
        ignored=ignored,
        location=footer.found.location,
        version=footer.version,
        contents=footer.contents,
        types={column: footer.types[name] for column, name in columns.items()},
    )


def _find_layout(footer: FileFooter, columns: Mapping[str, str]) -> RowLayout:
    lists = {
        column: is_list(plain_type(footer.types[columns[column]])) for column in REQUIRED_COLUMNS if column in columns
    }
    if len(set(lists.values())) > 1:
        scalar = next(column for column, listed in lists.items() if not listed)
        other = next(column for column, listed in lists.items() if listed)
        held, name = describe_type(footer.types[columns[scalar]]), escape_unprintable(columns[other])
        raise DataError(
            f"holds {held} while {name} holds lists",
            file=footer.found.path,
            column=escape_unprintable(columns[scalar]),
            remedy="write both as lists (one row per sequence) or both as floats (one row per token)",
        )
    return "wide" if not lists or any(lists.values()) else "long"


def _column_option(column: str) -> str:
    return f"name the right column with {option('columns', {column: 'NAME'})}"


@dataclass(frozen=True)
class ColumnNames:
    """Column names from `--column`, from framework aliases and from `--by`."""

    rename: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    by: Sequence[str] = ()

    def __post_init__(self) -> None:
        for column in self.rename:
            if column not in COLUMNS_BY_NAME:
                known, name = suggestion(column, COLUMNS_BY_NAME), escape_unprintable(column)
                where = wording(python=f"columns: {name}", command=f"--column {name}=...")
                raise ConfigError(f"{where}: unknown column{known}; run `mismatchctl schema` for the list")

    def match(self, footer: FileFooter, lenient: bool = False) -> dict[str, str]:
        """Return canonical name -> name in the file, in schema order, then `--by` columns."""
        present = {name: kind for name, kind in footer.types.items() if describe_type(kind) != NULL_TYPE}
        taken = set(self.rename.values())
        result = {}
        for column in (column.name for column in COLUMNS):
            if column in self.rename:
                if self.rename[column] in present:
                    result[column] = self.rename[column]
                continue
            if column in present and column not in taken:
                result[column] = column
                continue
            claims = [name for name in present if self.aliases.get(name) == column and name not in taken]
            if len(claims) > 1 and not lenient:
                both = " and ".join(escape_unprintable(name) for name in claims)
                raise DataError(f"{both} can all be {column}", file=footer.found.path, remedy=_column_option(column))
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
        if describe_type(footer.types.get(actual, pa.int8())) == NULL_TYPE:
            if not any(footer.contents.rows):  # without values, the type is unknown
                return DataError("the file does not contain rows", file=path, remedy=NO_ROW_REMEDY)
            return DataError(
                "holds only nulls", file=path, column=escape_unprintable(actual), remedy=_column_option(column)
            )
        free = [name for name in footer.types if name not in columns.values()]
        near = suggestion(actual, free)
        named = (
            f" (named with {option('columns', {column: escape_unprintable(actual)})})" if column in self.rename else ""
        )
        need = " of the long layout (one row per token)" if column not in REQUIRED_COLUMNS else ""
        listed = ", ".join(escape_unprintable(name) for name in list(footer.types)[:_SHOWN_COLUMNS]) or "none"
        more = ", ..." if len(footer.types) > _SHOWN_COLUMNS else ""
        problem = f"missing required column {escape_unprintable(actual)}{named}{need}{escape_unprintable(near)}"
        remedy = (
            f"{self._other_reading(footer, column, columns)}{_column_option(column)}; its columns are {listed}{more}"
        )
        return DataError(problem, file=path, remedy=remedy)

    @staticmethod
    def _other_reading(footer: FileFooter, column: str, columns: Mapping[str, str]) -> str:
        """Return what a file without a required column may be instead, and what to do with it."""
        if column not in REQUIRED_COLUMNS:
            return ""
        if columns.keys() & set(REQUIRED_COLUMNS):
            if footer.found.size is None:  # not a file in a common format
                return ""
            name = os.path.basename(footer.found.path)
            sides = (name, "FILE") if column == "train_log_probs" else ("FILE", name)
            return "if another file has them, use --rollout {} --train {} --on id; else ".format(*sides)
        scalars = not any(is_list(kind) for kind in footer.types.values())
        if scalars and any(name.lower().removeprefix("_").endswith("step") for name in footer.types):
            return "if this is a metrics log, pass it to `mismatchctl analyze` or `gate` alone; else "
        return "if this file is not a dump, name the dumps only; otherwise "


def read_pieces(
    file: DumpFile, columns: Collection[str], row_groups: Sequence[int], rows: int | None = None
) -> Iterator[pa.Table]:
    """Decode canonical columns of some groups, as one table or in pieces of `rows` rows."""
    if not row_groups:
        return
    names = list(dict.fromkeys(file.columns[column] for column in columns))
    if problem := file.contents.find_oversize(row_groups, names):
        remedy = f"write one row per sequence, at most {MOST_SEQUENCE_TOKENS:,} tokens each, in smaller row groups"
        raise DataError(escape_unprintable(problem), file=file.path, remedy=remedy)
    store, group = find_store(file.location), file.contents.group_name
    where = f"{group} {row_groups[0]}" if len(row_groups) == 1 else f"the file from {group} {row_groups[0]} on"

    def decode() -> Iterator[pa.Table]:
        if isinstance(file.contents, MemoryTable):
            yield from file.contents.decode(None, row_groups, names, rows)
            return
        with store.open(file.location) as opened:
            if (opened.size(), store.version(file.location, opened)) != (file.size, file.version):
                raise DataError("this file changed while it was being read", file=file.path, remedy="run again")
            yield from file.contents.decode(opened, row_groups, names, rows)

    def begin() -> tuple[Iterator[pa.Table], pa.Table | None]:
        tables = decode()
        return tables, next(tables, None)

    with explain_failures(file.path, file.location, f"{where} cannot be decoded"):
        tables, table = store.retry(begin)
        while table is not None:
            yield table
            table = next(tables, None)
