"""Convert files to one Parquet dump, add columns from other files, and join a rollout file with a train file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatchctl.core.schema import COLUMNS_BY_NAME, PARTIAL_COLUMNS, REQUIRED_COLUMNS, ColumnKind
from mismatchctl.data.blocks import find_mismatched_lists
from mismatchctl.data.catalog import DumpFile, read_footer, read_pieces
from mismatchctl.data.formats import ListColumn, is_list, to_plain_array
from mismatchctl.data.importers.rows import (
    BATCH_ROWS,
    COLUMN_TYPES,
    DERIVED,
    NEEDED_COLUMNS,
    TOKEN_COLUMNS,
    find_candidates,
    fit_schema,
    open_parquet_writer,
    read_raw_batches,
    recognize_layout,
)
from mismatchctl.data.importers.sources import ForeignRun, skipped_notes
from mismatchctl.data.importers.tables import (
    PROMPT_LOG_PROBS,
    canonical_name,
    is_engine_file,
    is_table,
    read_table,
    with_prompt_ids,
)
from mismatchctl.data.paths import UnopenedFile, contains_dump, find_unread_files
from mismatchctl.data.reader import Dump, open_dump
from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.io.files import atomic_output
from mismatchctl.io.stores import escape_unprintable, find_store, first_error_line, format_names, walk_files

Key = tuple[str | None, ...]


class JoinedColumns:
    """Columns from other files. `convert --join` adds them to the sequences with the same id."""

    def __init__(self, place: Path) -> None:
        """Read the files at `place`. If two columns have the same meaning, use the column with the canonical name."""
        self._place = place
        self._rows: dict[tuple[str, ...], dict[Key, int]] = {}
        self.found = 0
        tables = list(_read_joined_tables(place))
        if not tables:
            remedy = "convert other files first: mismatchctl convert FILE joined.parquet"
            raise DataError("--join needs a Parquet file or a framework's file", file=str(place), remedy=remedy)
        shared = set.intersection(*(set(table.column_names) for table in tables))
        ordered = sorted(shared, key=lambda name: (name in COLUMN_TYPES, name))
        with self._explain("the columns of the files in this folder have different types"):
            self._table = pa.concat_tables([table.select(ordered) for table in tables])
        self.columns = {canonical_name(name): name for name in ordered}
        if "sequence_id" not in self.columns:
            remedy = "add this column, with the sequence ids of the dump"
            raise DataError("the --join file lacks this column", file=str(place), column="sequence_id", remedy=remedy)

    def __call__(self, batch: pa.RecordBatch, path: Path) -> pa.RecordBatch:
        keys = tuple(name for name in ("step", "sequence_id") if name in self.columns and name in batch.schema.names)
        if "sequence_id" not in keys:
            raise DataError("this file has no sequence_id, so its rows cannot be matched", file=str(path))
        added = [name for name in COLUMN_TYPES if name in self.columns and name not in batch.schema.names]
        derived = "prompt_id" in batch.schema.names and batch.schema.field("prompt_id").metadata == DERIVED
        if "prompt_id" in self.columns and derived:  # ids of a joined file replace hashes of the prompts
            batch = batch.drop_columns(["prompt_id"])
            added.append("prompt_id")
        if keys not in self._rows:
            columns = [self._table[self.columns[name]].to_pylist() for name in keys]
            remedy = f"remove duplicate rows. The rows of the two files are matched by {', '.join(keys)}"
            self._rows[keys] = _index_rows(columns, self._place, remedy)
        rows, named = self._rows[keys], list(_list_keys(batch[name].to_pylist() for name in keys))
        lost = next((key for key in named if key not in rows), None)
        if lost is not None and not all(name in (*PARTIAL_COLUMNS, "reference_version") for name in added):
            which = ", ".join(f"{name} {value}" for name, value in zip(keys, lost, strict=True))
            problem = f"{which} is not in {self._place}"
            raise DataError(problem, file=str(path), remedy="with --join, pass a file of the same run")
        self.found += sum(key in rows for key in named)
        known = next(batch[name] for name in REQUIRED_COLUMNS if name in batch.schema.names)
        if not pa.types.is_list(known.type):
            raise DataError("this file has one row per token, but a join needs one row per sequence", file=str(path))
        places, lengths = pa.array(map(rows.get, named), pa.int64()), np.diff(known.offsets.to_numpy()).tolist()
        for name in added:
            with self._explain(f"the type of {name} is not {COLUMN_TYPES[name]}"):
                values = self._table[self.columns[name]].take(places).to_pylist()
                column = pa.array(values, COLUMN_TYPES[name])
            per_token = name in TOKEN_COLUMNS
            for row, (value, length) in enumerate(zip(values, lengths, strict=True)):
                if not pa.types.is_list(column.type) or (value is None and (name in PARTIAL_COLUMNS or not per_token)):
                    continue
                is_row = isinstance(value, list)  # pyarrow also converts bytes to lists of integers
                if not is_row or None in value or (per_token and len(value) != length):
                    have = "no list" if not is_row else "nulls" if None in value else f"{len(value)} values"
                    which = f"sequence {batch['sequence_id'][row]}, which has {length} tokens"
                    problem = f"{self._place} has {have} for {which}"
                    remedy = (
                        "write one value per response token" if per_token else "write the ids of the prompt's tokens"
                    )
                    raise DataError(problem, file=str(path), column=name, remedy=f"{remedy} in the joined column")
            batch = batch.append_column(pa.field(name, column.type, nullable=name not in NEEDED_COLUMNS), column)
        return batch

    @contextmanager
    def _explain(self, problem: str) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError, OverflowError) as error:
            raise DataError(f"{problem}: {first_error_line(error)}", file=str(self._place)) from error


def _read_joined_tables(place: Path) -> Iterator[pa.Table]:
    paths = sorted(path for path in walk_files(place) if path.suffix == ".parquet") if place.is_dir() else []
    candidates = [] if paths else find_candidates(place)
    for path in paths if paths or candidates or place.is_dir() else [place]:
        yield read_whole_file(path)
    for path in candidates:
        if (layout := recognize_layout(path)) is not None and (batches := list(read_raw_batches(path, layout))):
            yield pa.Table.from_batches(batches)


def _list_keys(columns: Iterable[Sequence[Any]]) -> Iterator[Key]:
    return (tuple(None if part is None else str(part) for part in key) for key in zip(*columns, strict=True))


def _index_rows(columns: Sequence[Sequence[Any]], path: Path, remedy: str) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for row, key in enumerate(_list_keys(columns)):
        if found.setdefault(key, row) != row:
            raise DataError(
                f"rows {found[key]} and {row} have the same identifier, {_named([key])}",
                file=str(path),
                row=row,
                remedy=remedy,
            )
    return found


_CHECKED_COLUMNS = (*REQUIRED_COLUMNS, "response_mask", "current_log_probs", "advantages")
"""Columns whose lists must have the same length in each row, because every analysis reads them."""
_REMEDY = "correct the dump; `mismatchctl analyze --on-bad skip` leaves such rows out"


def open_parquet_dump(place: str) -> Dump:
    return open_dump([place], aliases=column_aliases())


def read_parquet_batches(file: DumpFile, rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
    """Yield all columns in batches of at most `rows` rows. Names are canonical, and Hive partitions become columns."""
    stored = file.contents.schema.names
    canonical = {actual: column for column, actual in file.columns.items()}
    everything = replace(file, columns={canonical.get(name, name): name for name in stored})
    checked = {name: file.columns[name] for name in _CHECKED_COLUMNS if name in file.columns and file.is_list(name)}
    first = 0
    for table in read_pieces(everything, list(everything.columns), range(len(file.contents.rows)), rows):
        if file.layout == "wide":
            lists = {column: ListColumn.of(to_plain_array(table.column(name))) for column, name in checked.items()}
            for fault in find_mismatched_lists(file, lists, np.arange(first, first + len(table))):
                raise replace(fault, remedy=_REMEDY).error(file.path, checked[fault.column])
        first += len(table)
        renamed = table.rename_columns([canonical.get(name, name) for name in table.column_names])
        for name, value in file.partition.items():
            if name not in renamed.column_names:
                renamed = renamed.append_column(name, pa.array([value] * len(renamed)))
        for batch in renamed.combine_chunks().to_batches():
            yield _remove_nulls(batch, file)


def _remove_nulls(batch: pa.RecordBatch, file: DumpFile) -> pa.RecordBatch:
    fields, columns = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        kind = field.type
        if field.name in file.columns and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            if column.flatten().null_count:
                raise DataError("a list contains nulls", file=file.path, column=field.name, remedy=_REMEDY)
            empty = pa.types.is_null(kind.value_type)  # all lists are empty, and such a field must be nullable
            kind = pa.list_(pa.field("element", kind.value_type, nullable=empty))
            column = column.cast(kind)
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


@dataclass(frozen=True)
class ConversionResult:
    """Numbers of converted rows and tokens, and `notes` about data that was not converted."""

    rows: int
    tokens: int  # number of valid tokens
    missing: int = 0  # number of tokens without a log-prob, which are masked
    copies: int = 0  # number of sequences that were left out, because an earlier file contains them
    passed_over: Sequence[str] = ()  # other notes

    @property
    def notes(self) -> list[str]:
        return [*skipped_notes(self.missing, self.copies), *self.passed_over]


def convert_dump(
    place: str | Path,
    out: Path,
    framework: str = "",
    *,
    join: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionResult:
    named = str(place)
    is_foreign = named and (framework or not contains_dump(named))  # Path("") would be the current folder
    paths = find_candidates(Path(named), framework) if is_foreign else []
    if not framework and all(is_table(path) and recognize_layout(path) is None for path in paths):
        paths = []
    joined = None if join is None else JoinedColumns(join)
    source = ForeignRun(named, joined, () if joined is None else joined.columns)
    parts = [(path, path.stat().st_size, source.read(path, framework)) for path in paths]
    if not paths:
        parts = [(Path(one.path), one.size, read_parquet_batches(one)) for one in open_parquet_dump(named).files]
    done, total = 0, sum(size for _, size, _ in parts)
    with ExitStack() as stack:
        temporary = stack.enter_context(atomic_output(out))
        writer, rows, tokens = None, 0, 0
        for path, size, batches in parts:
            for batch in batches:
                batch = batch if paths or joined is None else joined(batch, path)
                writer = writer or stack.enter_context(open_parquet_writer(temporary, batch.schema))
                writer.write_batch(fit_schema(batch, writer.schema, path))
                rows, tokens = rows + len(batch), tokens + _count_tokens(batch)
            done += size
            if progress is not None:
                progress(done, total)
        if paths:
            source.finish()
        if writer is None:
            raise DataError("does not contain sequences", file=named)
        if joined is not None and not joined.found:
            remedy = "with --join, pass a file of the same run"
            raise DataError(f"{join} does not contain any sequence of this dump", file=named, remedy=remedy)
    _, notes = find_unread_files([named], [UnopenedFile(str(path), str(path), "") for path in paths])
    return ConversionResult(rows, tokens, source.missing, source.copies, notes if paths else ())


def convert_pair(rollout: Path, train: Path, out: Path, on: Sequence[str] = ()) -> ConversionResult:
    table, notes = pair(rollout, train, on)
    with atomic_output(out) as temporary, open_parquet_writer(temporary, table.schema) as writer:
        writer.write_table(table, row_group_size=BATCH_ROWS)
    tokens = sum(_count_tokens(batch) for batch in table.to_batches())
    return ConversionResult(len(table), tokens, passed_over=notes)


def _count_tokens(batch: pa.RecordBatch) -> int:
    if "response_mask" in batch.schema.names:
        mask = batch["response_mask"]
        valid = mask.flatten() if pa.types.is_list(mask.type) else mask
        valid = valid if pa.types.is_boolean(valid.type) else pc.equal(valid.cast(pa.float64(), safe=False), 1)
        return int(pc.sum(valid).as_py() or 0)
    column = batch["rollout_log_probs"]
    return len(column.flatten()) if pa.types.is_list(column.type) else len(column)


IDS = ("sequence_id", "id", "request_id", "custom_id")  # possible names of the column with the sequence ids
_GENERIC = ("logprobs", "log_probs", "token_logprobs", "token_log_probs", "logprob", "log_prob")
"""Possible names of the log-probs in a file that contains only one side (`--rollout` or `--train`)."""


class PairedTable(NamedTuple):
    """A table joined from a rollout file and a train file, and notes about it."""

    table: pa.Table
    notes: tuple[str, ...]


def pair(rollout: Path, train: Path, on: Sequence[str] = ()) -> PairedTable:
    sides = (_Side.read(rollout, "rollout_log_probs"), _Side.read(train, "train_log_probs"))
    keys = tuple(on) or ("id",)
    places = [side.index(keys) for side in sides]
    shared = [key for key in places[0] if key in places[1]]
    if not shared:
        examples = " and ".join(
            f"{side.name} has {_named(list(found)[:2])}" for side, found in zip(sides, places, strict=True)
        )
        raise DataError(f"the two files have no common {' and '.join(keys)}: {examples}", file=str(rollout))
    notes = []
    for here, there in ((0, 1), (1, 0)):
        if alone := [key for key in places[here] if key not in places[there]]:
            which = f"{len(alone):,} of {len(places[here]):,} rows of {sides[here].name}"
            notes.append(f"{which} are not in {sides[there].name} and are left out: {_named(alone)}")
    rows = [_join(_Row(sides[0], places[0][key]), _Row(sides[1], places[1][key])) for key in shared]
    if unlike := [key for key, (_, differ) in zip(shared, rows, strict=True) if differ]:
        notes.append(
            f"token ids differ between the files in {len(unlike):,} of {len(shared):,} sequences: {_named(unlike)}"
        )
    columns = {"sequence_id": pa.array([":".join(map(str, key)) for key in shared])}
    for name in dict.fromkeys(name for row, _ in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row, _ in rows])
        except (pa.ArrowException, OverflowError):  # some rows contain lists, others a string
            notes.append(f"{escape_unprintable(name)} is left out, because its values have different types")
    return PairedTable(with_prompt_ids(pa.table(columns)), tuple(notes))


def _named(keys: Sequence[Key]) -> str:
    return format_names([":".join(map(str, key)) for key in keys])


@dataclass(frozen=True)
class _Side:
    """One of the two files to join: `sources` are its columns with rollout log-probs or train log-probs."""

    path: Path
    canonical: str
    columns: Mapping[str, list[Any]]
    sources: Sequence[str]

    @property
    def name(self) -> str:
        return escape_unprintable(self.path.name)

    @classmethod
    def read(cls, path: Path, canonical: str) -> _Side:
        table = _by_sequence(read_table(path) if is_table(path) else read_whole_file(path), canonical)
        found = _find_log_probs(table, canonical, is_table(path) and is_engine_file(path), path)
        sources = [name for name in (found, PROMPT_LOG_PROBS) if name is not None and name in table.schema.names]
        return cls(path, canonical, {name: table[name].to_pylist() for name in table.schema.names}, sources)

    def index(self, keys: Sequence[str]) -> dict[Key, int]:
        names = [next((one for one in (key, *IDS) if one in self.columns), "") for key in keys]
        for key, name in zip(keys, names, strict=True):
            if name not in ((key, *IDS) if key in IDS else (key,)):
                near, listed = suggestion(key, self.columns), ", ".join(map(escape_unprintable, self.columns))
                remedy = f"use --on to pass the columns that identify a row. The columns of this file are {listed}"
                raise ConfigError(f"{self.path}: missing column {key}{near}; {remedy}")
        columns = [self.columns[name] for name in names]
        if missing := [column.index(None) for column in columns if None in column]:
            raise DataError(f"this row has no value for {' or '.join(keys)}", file=str(self.path), row=min(missing))
        remedy = "remove duplicate rows, or pass all columns that identify a row, as in --on step,id"
        return _index_rows(columns, self.path, remedy)


def read_whole_file(path: Path) -> pa.Table:
    if not path.is_file():
        problem = "this is a folder, not a file" if path.is_dir() else "the file does not exist"
        raise DataError(problem, file=str(path), remedy="pass a file" if path.is_dir() else "check the path")
    location = find_store(str(path)).location(str(path))
    contents = read_footer(UnopenedFile(location, escape_unprintable(str(path)), path.stem)).contents
    with find_store(location).open(location) as file:
        tables = list(contents.decode(file, range(len(contents.rows)), contents.schema.names, None))
    return pa.concat_tables(tables) if tables else pa.table({})


def _by_sequence(table: pa.Table, canonical: str) -> pa.Table:
    found = [name for name in _log_prob_names(table, canonical) if pa.types.is_floating(table.schema.field(name).type)]
    keys = [name for name in (*IDS, "step", "run") if name in table.schema.names]
    if not found or not keys or any(is_list(kind) for kind in table.schema.types):
        return table
    import polars as pl

    frame = pl.DataFrame(table)
    frame = frame.sort("position", maintain_order=True) if "position" in frame.columns else frame
    known = {name: COLUMNS_BY_NAME.get(canonical_name(name)) for name in frame.columns}
    per_token = [name for name, column in known.items() if name in found or (column is not None and column.per_token)]
    rest = [name for name in frame.columns if name not in (*keys, *per_token)]
    grouped = frame.group_by(keys, maintain_order=True).agg(pl.col(per_token), pl.col(rest).first())
    return grouped.to_arrow(compat_level=pl.CompatLevel.oldest())


def _log_prob_names(table: pa.Table, canonical: str) -> list[str]:
    """Return the columns that may contain the log-probs named `canonical`. The most likely column comes first."""
    known = [name for name in table.schema.names if canonical_name(name) == canonical]
    return [name for name in dict.fromkeys((canonical, *known, *_GENERIC)) if name in table.schema.names]


def _find_log_probs(table: pa.Table, canonical: str, engine: bool, path: Path) -> str | None:
    lists = [one for one in table.schema if is_list(one.type)]
    found = [*_log_prob_names(table, canonical), *(["rollout_log_probs"] if engine else [])]
    if (name := next((name for name in found if name in [one.name for one in lists]), None)) is not None:
        return name
    floats = [one.name for one in lists if pa.types.is_floating(one.type.value_type)]
    if len(floats) == 1 or PROMPT_LOG_PROBS in table.schema.names:
        return None if PROMPT_LOG_PROBS in table.schema.names else str(floats[0])
    columns = ", ".join(map(escape_unprintable, table.schema.names))
    remedy = f"rename the column with these log-probs to {canonical}; the file has the columns {columns}"
    raise DataError(f"missing column {canonical}", file=str(path), remedy=remedy)


_Window = tuple[str, list[Any], slice]
"""A possible response: (name of a log-prob column, values of the response, slice of the list that contains them)."""


@dataclass(frozen=True)
class _Row:
    side: _Side
    number: int

    def get(self, name: str) -> Any:
        return self.side.columns[name][self.number]

    @property
    def mask(self) -> list[Any] | None:
        name = next((name for name in self.side.columns if canonical_name(name) == "response_mask"), None)
        value = None if name is None else self.get(name)
        if isinstance(value, list) and any(one not in (0, 1) for one in value):
            remedy = "write 0 and 1, or false and true, in the mask"
            raise self.error("response_mask must contain only 0 and 1", None, remedy)
        return value if isinstance(value, list) else None

    def error(self, problem: str, column: str | None = None, remedy: str | None = None) -> DataError:
        return DataError(problem, file=str(self.side.path), row=self.number, column=column, remedy=remedy)

    def windows(self) -> list[_Window]:
        """Return the parts of the row that may be the response: tokens in the mask, all tokens, or all but padding."""
        found: list[_Window] = []
        for name in self.side.sources:
            values = self.get(name)
            if values is None:
                continue
            if not isinstance(values, list) or not all(one is None or isinstance(one, (int, float)) for one in values):
                raise self.error("the row does not contain a list of numbers", name, "write log-probs as numbers")
            spans = [slice(None)]
            if name != PROMPT_LOG_PROBS:
                if self.mask is not None and len(self.mask) == len(values):
                    spans.insert(0, _span(self.mask))
                spans.append(slice(0, _span([one not in (None, 0) and one == one for one in values]).stop))
            found += [(name, values[span], span) for span in spans]
        if not found:
            raise self.error("missing log-probs")
        return found

    def others(self) -> Iterator[tuple[str, Any]]:
        for name in self.side.columns:
            column, value = canonical_name(name), self.get(name)
            known = name in (*self.side.sources, PROMPT_LOG_PROBS, "position", *IDS) or column in REQUIRED_COLUMNS
            if not known and value is not None:
                yield column, value


def _span(flags: Sequence[Any]) -> slice:
    inside = np.flatnonzero(flags)
    return slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)


def _join(rollout: _Row, train: _Row) -> tuple[dict[str, Any], bool]:
    """Join the rollout row and the train row of a sequence. Also return True if their token ids differ."""
    sides = list(zip((rollout, train), _match_windows(rollout.windows(), train.windows()), strict=True))
    row: dict[str, Any] = {}
    tokens = []
    for one, (name, values, window) in sides[::-1]:
        for column, value in one.others():
            known = COLUMNS_BY_NAME.get(column)
            if column == "response_mask":
                continue
            if isinstance(value, list) and (known is None or known.kind is not ColumnKind.PROMPT):
                if len(value) != len(one.get(name)) or name == PROMPT_LOG_PROBS:
                    continue
                value = value[window]
                tokens += [value] if column == "token_ids" else []
            row.setdefault(column, value)
        row[one.side.canonical] = values
    for one, (name, _, window) in sides:
        if one.mask is not None and name != PROMPT_LOG_PROBS:
            if len(one.mask[window]) == len(row["rollout_log_probs"]):
                row["response_mask"] = one.mask[window]
            break
    return row, len(tokens) == 2 and tokens[0] != tokens[1] and len(tokens[0]) == len(tokens[1])


def _match_windows(lefts: Sequence[_Window], rights: Sequence[_Window]) -> tuple[_Window, _Window]:
    for left, right in product(lefts, rights):
        if len(left[1]) == len(right[1]):
            return left, right
    # A scored prompt ends with the response, whose length is known from the other side.
    for left, right in product(lefts, rights):
        surplus = len(right[1]) - len(left[1])
        if right[0] == PROMPT_LOG_PROBS != left[0] and surplus > 0:
            return left, (right[0], right[1][surplus:], slice(0))
        if left[0] == PROMPT_LOG_PROBS != right[0] and surplus < 0:
            return (left[0], left[1][-surplus:], slice(0)), right
    return lefts[0], rights[0]
