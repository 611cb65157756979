"""What `mismatchctl schema --check` says: per file what was recognized, what is missing and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from mismatchctl.contract import COLUMNS
from mismatchctl.dumps.blocks import ADVANTAGES, CURRENT
from mismatchctl.dumps.catalog import Catalog, catalog
from mismatchctl.dumps.files import ColumnNames, DumpFile
from mismatchctl.dumps.paths import UnopenedFile, discover
from mismatchctl.dumps.problems import Problems
from mismatchctl.dumps.reader import Dump
from mismatchctl.errors import DataError, suggestion
from mismatchctl.stores import printable

_UNUSABLE = "the file can't be used"


@dataclass(frozen=True)
class RecognizedColumn:
    """A column of the contract and the column of the file that plays it."""

    name: str
    actual: str
    dtype: str


@dataclass(frozen=True)
class UnknownColumn:
    """A column that the contract does not know; `hint` says which one may be meant."""

    name: str
    dtype: str
    hint: str


@dataclass(frozen=True)
class BadValues:
    """One kind of bad value: in how many sequences, and where first."""

    column: str
    reason: str
    sequences: int
    row: int
    problem: str


@dataclass(frozen=True)
class FileCheck:
    """All that is to be said about one file.

    Attributes:
        error: why the file can't be used at all, or all of them hold nothing; None when it can.
        layout: "wide" or "long"; None when it can't be used, or others of its run hold what is compared.
        sequences: sequences without a bad value.
        tokens: valid tokens in them.
        partition: values that Hive folders give.
        absent: optional columns of the contract that the file does not have.
        ignored: optional columns that can't be used -> why.
    """

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
        """Whether the file can be used as it is, all of it."""
        return self.error is None and not self.bad


def check(
    paths: Sequence[str],
    rename: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> list[FileCheck]:
    """Open and read everything, and explain it; a bad file is explained like a good one.

    Raises:
        DataError: a path that leads to no file.
        ConfigError: a `--column` that the contract does not know.
    """
    found, _ = discover(paths)
    names = ColumnNames(rename or {}, aliases or {})
    wanted = (CURRENT, ADVANTAGES)
    opened = catalog(found, names, wanted, skip=True)
    dump = Dump(opened, (), wanted=wanted, by=(), on_bad="skip")
    counted = {file.path: _scan(dump, file) for file in dump.files}
    empty = _emptiness(dump, counted.values()) if counted else None
    return [_explain(one, opened, names, counted, empty) for one in found]


@dataclass(frozen=True)
class _Scan:
    file: DumpFile
    sequences: int
    tokens: int
    problems: Problems


def _scan(dump: Dump, file: DumpFile) -> _Scan:
    problems, sequences, tokens = Problems(), 0, 0
    for unit in dump.units:
        if unit.file.index == file.index:
            for batch in dump.read(unit, problems):
                sequences, tokens = sequences + len(batch), tokens + batch.tokens
    return _Scan(file, sequences, tokens, problems)


def _emptiness(dump: Dump, scans: Iterable[_Scan]) -> str | None:
    """Why verbs refuse all files together, though each can be read: none holds anything to measure."""
    try:
        dump.require_tokens(sum(scan.tokens for scan in scans))
    except DataError as error:
        return error.problem
    return None


def _explain(
    found: UnopenedFile, opened: Catalog, names: ColumnNames, counted: Mapping[str, _Scan], empty: str | None
) -> FileCheck:
    footer = next((footer for footer in opened.footers if footer.found.path == found.path), None)
    scan = counted.get(found.path)
    columns = scan.file.columns if scan else names.match(footer, lenient=True) if footer else {}
    ignored = scan.file.ignored if scan else {}
    types = footer.types if footer else {}
    used = {*columns.values(), *(names.rename.get(name, name) for name in ignored)}
    bad = _bad(scan.problems) if scan else ()
    unusable = opened.problems.files.get(found.path, None if found.foreign else _UNUSABLE)
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
            RecognizedColumn(name, printable(actual), printable(str(types[actual]))) for name, actual in columns.items()
        ),
        partition=scan.file.partition if scan else found.partition,
        absent=_absent(scan, columns) if footer else (),
        ignored=ignored,
        unknown=_unknown(types, used, names),
        bad=bad,
    )


def _absent(scan: _Scan | None, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Optional columns the file lacks; `position` has no meaning where a row is a sequence."""
    held = {*columns, *(scan.file.partition if scan else ())}
    wide = scan is None or scan.file.layout == "wide"
    optional = (column.name for column in COLUMNS if not column.required)
    return tuple(name for name in optional if name not in held and not (wide and name == "position"))


def _unknown(types: Mapping[str, pa.DataType], used: set[str], names: ColumnNames) -> tuple[UnknownColumn, ...]:
    contract = {column.name for column in COLUMNS}
    known = sorted({*contract, *names.aliases} - used)
    return tuple(
        UnknownColumn(printable(name), printable(str(kind)), _hint(name, names, known))
        for name, kind in types.items()
        if name not in used
    )


def _hint(name: str, names: ColumnNames, known: Sequence[str]) -> str:
    """What an unused column may be meant as: its alias lost to another column, or its name is near."""
    if name in names.aliases:
        return f" (another column is {names.aliases[name]} already)"
    return suggestion(name, known)


def _bad(problems: Problems) -> tuple[BadValues, ...]:
    found = [
        BadValues(example.column, reason, problems.counts[path, reason], example.row, example.problem)
        for (path, reason), example in problems.examples.items()
    ]
    return tuple(sorted(found, key=lambda bad: (bad.row, bad.reason)))
