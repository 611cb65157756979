"""Check files against the schema: recognized, missing and unknown columns, and bad values per file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mismatchctl.core.schema import COLUMNS, COLUMNS_BY_NAME
from mismatchctl.data.blocks import ADVANTAGES_COLUMN, CURRENT_COLUMN
from mismatchctl.data.catalog import Catalog, build_catalog
from mismatchctl.data.files import ColumnNames, DumpFile, FileFooter, HiveValue
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
    error: str | None = None
    layout: str | None = None
    size: int = 0
    rows: int = 0
    row_groups: int = 0
    sequences: int = 0
    tokens: int = 0
    recognized: tuple[RecognizedColumn, ...] = ()
    partition: Mapping[str, HiveValue] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[UnknownColumn, ...] = ()
    bad: tuple[BadValues, ...] = ()

    @property
    def sound(self) -> bool:
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
    footers = {footer.found.path: footer for footer in catalog.footers}
    unreadable = [_describe_unusable(one, footers.get(one.path), catalog, names) for one in found]
    scanned = {file.path: _scan_file(dump, file, footers[file.path], names) for file in dump.files}
    try:
        dump.require_tokens(sum(check.tokens for check in scanned.values()) if scanned else 1)
    except DataError as error:
        scanned = {path: check if check.bad else replace(check, error=error.problem) for path, check in scanned.items()}
    return [scanned.get(check.path, check) for check in unreadable]


def _scan_file(dump: Dump, file: DumpFile, footer: FileFooter, names: ColumnNames) -> FileCheck:
    problems, sequences, tokens = Problems(), 0, 0
    for unit in dump.units:
        if unit.file.index == file.index:
            for batch in dump.read(unit, problems):
                sequences, tokens = sequences + len(batch), tokens + batch.tokens
    bad = [
        BadValues(example.column, reason, problems.counts[path, reason], example.row, example.problem)
        for (path, reason), example in problems.examples.items()
    ]
    return replace(
        _describe_columns(footer, file.columns, file.partition, file.ignored, file.layout == "wide", names),
        layout=file.layout,
        sequences=sequences,
        tokens=tokens,
        bad=tuple(sorted(bad, key=lambda one: (one.row, one.reason))),
    )


def _describe_unusable(
    found: UnopenedFile, footer: FileFooter | None, catalog: Catalog, names: ColumnNames
) -> FileCheck:
    error = catalog.problems.files.get(found.path, None if found.foreign else _UNUSABLE)
    if footer is None:
        return FileCheck(found.path, found.run, error, partition=found.partition)
    columns = names.match(footer, lenient=True)
    return replace(_describe_columns(footer, columns, found.partition, {}, True, names), error=error)


def _describe_columns(
    footer: FileFooter,
    columns: Mapping[str, str],
    partition: Mapping[str, HiveValue],
    ignored: Mapping[str, str],
    wide: bool,
    names: ColumnNames,
) -> FileCheck:
    """Describe the columns of a file. The wide layout has no `position`."""
    used = {*columns.values(), *(names.rename.get(name, name) for name in ignored)}
    known = sorted({*COLUMNS_BY_NAME, *names.aliases} - used)
    absent = (column.name for column in COLUMNS if not column.required and not (wide and column.name == "position"))
    return FileCheck(
        path=footer.found.path,
        run=footer.found.run,
        size=footer.size,
        rows=sum(footer.contents.rows),
        row_groups=len(footer.contents.rows),
        recognized=tuple(
            RecognizedColumn(name, escape_unprintable(actual), escape_unprintable(str(footer.types[actual])))
            for name, actual in columns.items()
        ),
        partition=partition,
        absent=tuple(name for name in absent if name not in columns and name not in partition),
        ignored=ignored,
        unknown=tuple(
            UnknownColumn(
                escape_unprintable(name),
                escape_unprintable(str(kind)),
                f" (another column is {names.aliases[name]} already)"
                if name in names.aliases
                else suggestion(name, known),
            )
            for name, kind in footer.types.items()
            if name not in used
        ),
    )
