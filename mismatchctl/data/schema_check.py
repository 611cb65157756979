"""Check files against the schema: recognized, missing and unknown columns, and bad values per file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from mismatchctl.core.schema import COLUMNS
from mismatchctl.data.blocks import ADVANTAGES_COLUMN, CURRENT_COLUMN
from mismatchctl.data.catalog import Catalog, build_catalog
from mismatchctl.data.files import ColumnNames, DumpFile
from mismatchctl.data.paths import UnopenedFile, discover_files
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import Dump
from mismatchctl.errors import DataError, suggestion
from mismatchctl.io.stores import escape_unprintable

_UNUSABLE = "the file can't be used"


@dataclass(frozen=True)
class RecognizedColumn:
    """A canonical column and the column of the file that it matches."""

    name: str
    actual: str
    dtype: str


@dataclass(frozen=True)
class UnknownColumn:
    """A column that is not in the schema. `hint` suggests a canonical column."""

    name: str
    dtype: str
    hint: str


@dataclass(frozen=True)
class BadValues:
    """One kind of bad value: the number of sequences, and the first example."""

    column: str
    reason: str
    sequences: int
    row: int
    problem: str


@dataclass(frozen=True)
class FileCheck:
    """Results of checking one file."""

    path: str
    run: str
    error: str | None
    layout: str | None
    size: int
    rows: int
    row_groups: int
    sequences: int
    tokens: int
    recognized: tuple[RecognizedColumn, ...]
    partition: Mapping[str, int | str | None]
    absent: tuple[str, ...]
    ignored: Mapping[str, str]
    unknown: tuple[UnknownColumn, ...]
    bad: tuple[BadValues, ...]

    @property
    def sound(self) -> bool:
        """True if the file can be used completely."""
        return self.error is None and not self.bad


def check_files(
    paths: Sequence[str],
    rename: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> list[FileCheck]:
    """Open, read and describe all files, including bad ones."""
    found, _ = discover_files(paths)
    names = ColumnNames(rename or {}, aliases or {})
    wanted = (CURRENT_COLUMN, ADVANTAGES_COLUMN)
    catalog = build_catalog(found, names, wanted, skip=True)
    dump = Dump(catalog, (), wanted=wanted, by=(), on_bad="skip")
    counted = {file.path: _scan_file(dump, file) for file in dump.files}
    empty = _explain_empty(dump, counted.values()) if counted else None
    return [_explain_file(one, catalog, names, counted, empty) for one in found]


@dataclass(frozen=True)
class _FileScan:
    file: DumpFile
    sequences: int
    tokens: int
    problems: Problems


def _scan_file(dump: Dump, file: DumpFile) -> _FileScan:
    problems, sequences, tokens = Problems(), 0, 0
    for unit in dump.units:
        if unit.file.index == file.index:
            for batch in dump.read(unit, problems):
                sequences, tokens = sequences + len(batch), tokens + batch.tokens
    return _FileScan(file, sequences, tokens, problems)


def _explain_empty(dump: Dump, scans: Iterable[_FileScan]) -> str | None:
    """Return the reason why the readable files together cannot be used, if any."""
    try:
        dump.require_tokens(sum(scan.tokens for scan in scans))
    except DataError as error:
        return error.problem
    return None


def _explain_file(
    found: UnopenedFile, catalog: Catalog, names: ColumnNames, counted: Mapping[str, _FileScan], empty: str | None
) -> FileCheck:
    footer = next((footer for footer in catalog.footers if footer.found.path == found.path), None)
    scan = counted.get(found.path)
    columns = scan.file.columns if scan else names.match(footer, lenient=True) if footer else {}
    ignored = scan.file.ignored if scan else {}
    types = footer.types if footer else {}
    used = {*columns.values(), *(names.rename.get(name, name) for name in ignored)}
    bad = _list_bad_values(scan.problems) if scan else ()
    unusable = catalog.problems.files.get(found.path, None if found.foreign else _UNUSABLE)
    return FileCheck(
        path=found.path,
        run=found.run,
        error=unusable if scan is None else None if bad else empty,
        layout=scan.file.layout if scan else None,
        size=footer.size if footer else 0,
        rows=sum(footer.contents.rows) if footer else 0,
        row_groups=len(footer.contents.rows) if footer else 0,
        sequences=scan.sequences if scan else 0,
        tokens=scan.tokens if scan else 0,
        recognized=tuple(
            RecognizedColumn(name, escape_unprintable(actual), escape_unprintable(str(types[actual])))
            for name, actual in columns.items()
        ),
        partition=scan.file.partition if scan else found.partition,
        absent=_absent_columns(scan, columns) if footer else (),
        ignored=ignored,
        unknown=_unknown_columns(types, used, names),
        bad=bad,
    )


def _absent_columns(scan: _FileScan | None, columns: Mapping[str, str]) -> tuple[str, ...]:
    """List optional columns that the file lacks, without `position` in the wide layout."""
    held = {*columns, *(scan.file.partition if scan else ())}
    wide = scan is None or scan.file.layout == "wide"
    optional = (column.name for column in COLUMNS if not column.required)
    return tuple(name for name in optional if name not in held and not (wide and name == "position"))


def _unknown_columns(types: Mapping[str, pa.DataType], used: set[str], names: ColumnNames) -> tuple[UnknownColumn, ...]:
    contract = {column.name for column in COLUMNS}
    known = sorted({*contract, *names.aliases} - used)
    return tuple(
        UnknownColumn(escape_unprintable(name), escape_unprintable(str(kind)), _column_hint(name, names, known))
        for name, kind in types.items()
        if name not in used
    )


def _column_hint(name: str, names: ColumnNames, known: Sequence[str]) -> str:
    """Suggest the canonical column of an unused column."""
    if name in names.aliases:
        return f" (another column is {names.aliases[name]} already)"
    return suggestion(name, known)


def _list_bad_values(problems: Problems) -> tuple[BadValues, ...]:
    found = [
        BadValues(example.column, reason, problems.counts[path, reason], example.row, example.problem)
        for (path, reason), example in problems.examples.items()
    ]
    return tuple(sorted(found, key=lambda bad: (bad.row, bad.reason)))
