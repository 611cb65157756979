"""Open dumps, divide them into parts, yield the batches of each part, and check files."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.core.batch import TokenBatch
from mismatchctl.core.formatting import format_count
from mismatchctl.core.schema import COLUMNS, COLUMNS_BY_NAME, PARTIAL_COLUMNS, REQUIRED_COLUMNS
from mismatchctl.data.blocks import (
    ADVANTAGES_COLUMN,
    CURRENT_COLUMN,
    MASK_COLUMN,
    POSITION_COLUMN,
    TOKEN_IDS_COLUMN,
    DecodedBlock,
    Rows,
    assemble_batch,
    read_long,
    read_wide,
)
from mismatchctl.data.catalog import (
    ALWAYS_READ_COLUMNS,
    NO_ROW_REMEDY,
    Catalog,
    ColumnNames,
    DumpFile,
    FileFooter,
    HiveValue,
    ReadUnit,
    build_catalog,
    list_warnings,
    plan_units,
    require_files,
    split_unit,
)
from mismatchctl.data.paths import DumpSource, UnopenedFile, discover_files, find_unread_files
from mismatchctl.data.problems import Fault, Problems
from mismatchctl.errors import ConfigError, DataError, option, suggestion
from mismatchctl.io.stores import escape_unprintable

BadDataPolicy = Literal["error", "skip", "mask"]

_TOKEN_FIELDS = frozenset({*REQUIRED_COLUMNS, MASK_COLUMN, CURRENT_COLUMN, ADVANTAGES_COLUMN})
"""Per-token columns that become fields of a TokenBatch, and the mask column."""
_MAX_RECOUNTED_TOKENS = 1 << 26


def open_dump(
    paths: Sequence[DumpSource],
    *,
    rename: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    by: Sequence[str] = (),
    wanted: Collection[str] = (),
    watched: Collection[str] = (),
    on_bad: BadDataPolicy = "error",
) -> Dump:
    """Open the files of a dump and divide them into parts. Tokens are decoded later, in `Dump.read`.

    `rename` maps canonical names to column names in the files. `aliases` maps names that frameworks use to canonical
    names. `wanted` are optional columns to read and check. `watched` are columns that only `Rows` contain,
    read without checks. On bad data, "error" raises an error, and "skip" leaves the sequence or file out and counts it.
    "mask" masks and counts tokens without a value, and raises an error for other bad data.
    """
    if on_bad not in get_args(BadDataPolicy):
        raise ConfigError(f"{option('on_bad')} must be error, skip or mask, found {on_bad!r}")
    found, hints = discover_files(paths)
    names = ColumnNames(rename or {}, aliases or {}, tuple(dict.fromkeys(by)))
    catalog = build_catalog(found, names, wanted, on_bad == "skip")
    unread, notes = find_unread_files(paths, found)
    dump = Dump(catalog, [*hints, *notes], wanted=wanted, watched=watched, by=names.by, on_bad=on_bad, unread=unread)
    require_files(catalog, names)
    return dump


class Dump:
    """The files of a dump, ready to be read, sorted by run and then by name in natural order.

    With `on_bad="skip"`, `problems` contains the files that were left out. `read` counts bad sequences in other files.
    `unread` are files in the given folders that look like dumps but are not read because of their names.
    """

    def __init__(
        self,
        catalog: Catalog,
        hints: Sequence[str],
        *,
        wanted: Collection[str],
        by: Sequence[str],
        on_bad: BadDataPolicy,
        watched: Collection[str] = (),
        unread: Sequence[str] = (),
    ) -> None:
        self.unread = unread
        self._columns = tuple(dict.fromkeys((*REQUIRED_COLUMNS, *ALWAYS_READ_COLUMNS, *wanted, *by)))
        self._watched = tuple(column for column in watched if column not in self._columns)
        self._skip, self._mask_missing = on_bad == "skip", on_bad == "mask"
        self.units, self._broken = plan_units(catalog)  # may remove files from `catalog`
        self.problems: Problems = catalog.problems
        self.files: tuple[DumpFile, ...] = tuple(catalog.files)
        self.paths = {file.index: file.path for file in self.files}
        self.warnings: list[str] = [*hints, *catalog.notes, *list_warnings(self.files)]

    def has(self, column: str) -> bool:
        return any(column in file.columns or column in file.partition for file in self.files)

    def select(self, units: Sequence[ReadUnit]) -> Dump:
        """Return a copy of the dump with only these `units`. The copy is small enough to send to other processes."""
        part, own = copy.copy(self), tuple(units)
        part.files = tuple({unit.file.index: unit.file for unit in own}.values())
        part.paths = {file.index: file.path for file in part.files}
        part._broken = {file.index: self._broken[file.index] for file in part.files if file.index in self._broken}
        part.units, part.problems, part.warnings = own, Problems(), []
        return part

    def settings(self, file: DumpFile) -> list[Any]:
        columns = self._columns, self._watched, file.columns, file.partition
        return [file.index, file.run, *columns, self._skip, self._mask_missing, self._broken.get(file.index, {})]

    def read(
        self, unit: ReadUnit, problems: Problems, watch: Callable[[Rows], None] | None = None
    ) -> Iterator[TokenBatch]:
        """Yield batches of one part, up to about 3 million tokens each. Call `watch` with their Rows. Thread-safe."""
        path, done = unit.file.path, 0
        blocks = self._blocks(unit)
        while True:
            try:
                block = next(blocks, None)
            except DataError as error:
                if unit.row_groups > 1:  # find the bad row group
                    for part in split_unit(unit):
                        yield from self.read(part, problems, watch)
                    return
                if not self._skip:
                    raise
                left = round(unit.tokens * (unit.sequences - done) / max(unit.sequences, 1))
                rows = np.arange(unit.sequences - done)
                problems.add(path, [Fault("-", "cannot be decoded", rows, unit.start, error.problem)], left)
                return
            if block is None:
                return
            block.mask_missing = self._mask_missing
            batch = assemble_batch(block)
            if watch is not None:
                watch(Rows.of(block))
            if block.faults:
                if not self._skip:
                    raise self._explain(block, unit.file)
                problems.add(path, block.faults, block.faulty_tokens)
            problems.masked.update({(path, column): number for column, number in block.masked.items()})
            done += len(batch) + len({row for fault in block.faults for row in fault.sequences.tolist()})
            if len(batch):
                yield batch

    def _explain(self, block: DecodedBlock, file: DumpFile) -> DataError:
        """Build an error about the first fault. If all rows of the file have it, the error describes the column."""
        first = min(block.faults, key=lambda fault: fault.row)
        name = escape_unprintable(file.columns.get(first.column, first.column))
        units = [unit for unit in self.units if unit.file.index == file.index]
        sequences = sum(unit.sequences for unit in units)
        column = block.tokens.get(first.column)
        known = column is not None and pa.types.is_floating(column.type) and len(column) > 0
        extent = block.extent(first.column) if known else (math.nan, math.nan)

        def count() -> int:
            if sum(unit.tokens for unit in units) > _MAX_RECOUNTED_TOKENS:
                return 0
            other, found = copy.copy(self), Problems()
            other._skip = True
            for unit in units:
                for _ in other.read(unit, found):
                    pass
            return found.counts.get((file.path, first.reason), 0)

        error = first.column_error(file.path, name, sequences, extent, count)
        if error.row is None or not first.reason.endswith("length differs"):
            return error
        patterns = [(one.count, [*filter(None, (one.pattern(), one.overlap()))]) for one in block.unequal.values()]
        known = [
            f"in {format_count(count, 'row')} of unequal length, {' and '.join(texts)}"
            for count, texts in patterns
            if texts
        ]
        problem = "; ".join([error.problem, *known])
        return DataError(problem, file=error.file, row=error.row, column=error.column, remedy=error.remedy)

    def rows(self, unit: ReadUnit, problems: Problems) -> Iterator[Rows]:
        """Yield the stored rows, with masked tokens and bad values, but without rows whose lists differ in length."""
        try:
            for block in self._blocks(unit):
                if block.faults:
                    problems.add(unit.file.path, block.faults)
                yield Rows.of(block)
        except DataError:
            if unit.row_groups == 1:
                raise
            for part in split_unit(unit):
                yield from self.rows(part, problems)

    def _blocks(self, unit: ReadUnit) -> Iterator[DecodedBlock]:
        file = unit.file
        columns = [
            name
            for name in self._columns
            if name in file.columns
            and (name not in COLUMNS_BY_NAME or name in _TOKEN_FIELDS or not file.is_per_token(name))
        ]
        partial = [column for column in PARTIAL_COLUMNS if column in self._columns and column not in columns]
        watched = [column for column in (*self._watched, *partial) if column in file.columns]
        if file.layout == "wide":
            return read_wide(unit, columns, watched)
        return read_long(unit, [*columns, POSITION_COLUMN], self._broken.get(file.index, {}), watched)

    def token_ids(self, file_index: int, chosen: Collection[int]) -> dict[int, NDArray[Any]]:
        """Return row number -> ids of its valid tokens, for the rows in `chosen` that have token ids."""
        wanted, found = np.unique(np.fromiter(chosen, np.int64, len(chosen))), {}
        part = copy.copy(self)
        part._columns, part._watched = (*REQUIRED_COLUMNS, MASK_COLUMN, "run"), (TOKEN_IDS_COLUMN,)
        for unit in self.units:
            inside = (wanted >= unit.start) & (wanted < unit.start + unit.rows)
            if unit.file.index != file_index or TOKEN_IDS_COLUMN not in unit.file.columns or not inside.any():
                continue
            for rows in part.rows(unit, Problems()):
                ids = rows.extra_columns.get(TOKEN_IDS_COLUMN)
                if ids is None:
                    continue
                for place in np.flatnonzero(np.isin(rows.rows, wanted)):
                    tokens = slice(*rows.segments.offsets[place : place + 2].tolist())
                    own = ids[tokens][rows.mask[tokens]]
                    if np.isfinite(own).all():  # a null is NaN
                        found[int(rows.rows[place])] = own.astype(np.int64)
        return found

    def require_tokens(self, total: int, problems: Problems | None = None) -> None:
        if total:
            return
        if problems and (error := problems.no_tokens_error()):
            raise error
        file = self.files[0].path if len(self.files) == 1 else None
        where = "in the file" if file else f"in any of the {len(self.files)} files"
        if not self.units:
            raise DataError(f"no row found {where}", file=file, remedy=NO_ROW_REMEDY)
        remedy = "check that response_mask is 1 on the tokens that the policy sampled"
        raise DataError(f"no valid token found {where}", file=file, remedy=remedy)


@dataclass(frozen=True)
class RecognizedColumn:
    """A column of the file (`actual`) that matches a column of the schema (`name`)."""

    name: str
    actual: str
    dtype: str


@dataclass(frozen=True)
class UnknownColumn:
    """A column that is not in the schema. `hint` suggests a similar column of the schema."""

    name: str
    dtype: str
    hint: str


@dataclass(frozen=True)
class BadValues:
    """One kind of bad value: how many sequences contain it, and the first example."""

    column: str
    reason: str
    sequences: int
    row: int
    problem: str


@dataclass(frozen=True)
class FileCheck:
    """The result of checking one file."""

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
    found, _ = discover_files(paths)
    names = ColumnNames(rename or {}, aliases or {})
    wanted = (CURRENT_COLUMN, ADVANTAGES_COLUMN)
    catalog = build_catalog(found, names, wanted, skip=True)
    dump = Dump(catalog, (), wanted=wanted, by=(), on_bad="skip")
    footers = {footer.found.path: footer for footer in catalog.footers}
    usable = {file.path: file for file in dump.files}
    checks = [_check_file(one, footers.get(one.path), usable.get(one.path), dump, names) for one in found]
    try:
        dump.require_tokens(sum(check.tokens for check in checks) if usable else 1)
    except DataError as error:
        sound = [one for one in checks if one.path in usable and not one.bad]
        return [replace(one, error=one.error or error.problem) if one in sound else one for one in checks]
    return checks


def _check_file(
    found: UnopenedFile, footer: FileFooter | None, file: DumpFile | None, dump: Dump, names: ColumnNames
) -> FileCheck:
    error = None if found.foreign or file is not None else "the file can't be used"
    error, show = dump.problems.files.get(found.path, error), escape_unprintable
    if footer is None:
        return FileCheck(found.path, found.run, error, partition=found.partition)
    columns: Mapping[str, str] = names.match(footer, lenient=True) if file is None else file.columns
    partition: Mapping[str, HiveValue] = found.partition if file is None else file.partition
    ignored: Mapping[str, str] = {} if file is None else file.ignored
    problems, sequences, tokens = Problems(), 0, 0
    if file is not None:
        for unit in dump.units:
            if unit.file.index == file.index:
                for batch in dump.read(unit, problems):
                    sequences, tokens = sequences + len(batch), tokens + batch.tokens
    bad = [
        BadValues(example.column, reason, problems.counts[path, reason], example.row, example.problem)
        for (path, reason), example in problems.examples.items()
    ]
    used = {*columns.values(), *(names.rename.get(name, name) for name in ignored)}
    known = sorted({*COLUMNS_BY_NAME, *names.aliases} - used)
    hints = {name: f" (another column is {alias} already)" for name, alias in names.aliases.items()}
    without = REQUIRED_COLUMNS if file is not None and file.layout == "long" else (*REQUIRED_COLUMNS, POSITION_COLUMN)
    return FileCheck(
        path=footer.found.path,
        run=footer.found.run,
        error=error,
        layout=None if file is None else file.layout,
        size=footer.size,
        rows=sum(footer.contents.rows),
        row_groups=len(footer.contents.rows),
        sequences=sequences,
        tokens=tokens,
        recognized=tuple(
            RecognizedColumn(name, show(actual), show(str(footer.types[actual]))) for name, actual in columns.items()
        ),
        partition=partition,
        absent=tuple(one.name for one in COLUMNS if one.name not in {*columns, *partition, *without}),
        ignored=ignored,
        unknown=tuple(
            UnknownColumn(show(name), show(str(kind)), hints.get(name) or suggestion(name, known))
            for name, kind in footer.types.items()
            if name not in used
        ),
        bad=tuple(sorted(bad, key=lambda one: (one.row, one.reason))),
    )
