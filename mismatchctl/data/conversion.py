"""Convert files of frameworks, and Parquet dumps, to one Parquet dump, and join columns of other files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mismatchctl.core.schema import PARTIAL_COLUMNS, REQUIRED_COLUMNS
from mismatchctl.data.arrays import ListColumn, to_plain_array
from mismatchctl.data.files import DumpFile, read_pieces
from mismatchctl.data.importers.rows import (
    BATCH_ROWS,
    COLUMN_TYPES,
    DERIVED,
    NEEDED_COLUMNS,
    TOKEN_COLUMNS,
    compressed_file_notes,
    find_candidates,
    fit_schema,
    open_parquet_writer,
    read_raw_batches,
    recognize_layout,
)
from mismatchctl.data.importers.sources import (
    ForeignRun,
    skipped_notes,
)
from mismatchctl.data.importers.tables import is_table
from mismatchctl.data.layouts import find_mismatched_lists
from mismatchctl.data.pairing import pair
from mismatchctl.data.paths import contains_dump
from mismatchctl.data.reader import Dump, open_dump
from mismatchctl.errors import DataError
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.io.files import atomic_output
from mismatchctl.io.parquet_footer import check_footer
from mismatchctl.io.stores import walk_files

JOIN_KEYS = ("step", "sequence_id")
SequenceKey = tuple[str | None, ...]


def open_join(place: Path) -> JoinedColumns:
    """Read Parquet files or files of a framework, whose columns may be incomplete."""
    paths = sorted(path for path in walk_files(place) if path.suffix == ".parquet") if place.is_dir() else []
    if place.is_file() and not find_candidates(place):
        paths = [place]
    if paths:
        with _explain_decoding(place, "is no Parquet file"):
            tables = [_read_parquet(path) for path in paths]
    else:
        batches = [list(read_raw_batches(path, layout)) for path in find_candidates(place)
                   if (layout := recognize_layout(path)) is not None]  # fmt: skip
        tables = [pa.Table.from_batches(found).combine_chunks() for found in batches if found]
    if not tables:
        raise DataError("does not contain columns to join", file=str(place))
    return JoinedColumns(place, tables)


def _read_parquet(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        check_footer(file)
        return pq.read_table(file).combine_chunks()


@contextmanager
def _explain_decoding(place: Path, problem: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{problem}: {str(error).splitlines()[0]}", file=str(place)) from error


class JoinedColumns:
    """Sequences that are looked up by id.

    Attributes:
        columns: canonical name -> name in the files.
        found: number of sequences that were found.
    """

    def __init__(self, place: Path, tables: Sequence[pa.Table]) -> None:
        """Match the columns. Canonical names take precedence over framework aliases."""
        self._place, self._tables = place, tables
        self._rows: dict[tuple[str, ...], dict[SequenceKey, tuple[int, int]]] = {}
        self.found = 0
        aliases = column_aliases()
        shared = set.intersection(*(set(table.column_names) for table in tables))
        ordered = sorted(shared, key=lambda name: (name in COLUMN_TYPES, name))
        self.columns = {aliases.get(name, name): name for name in ordered}
        if "sequence_id" not in self.columns:
            remedy = "write the ids that the other file has"
            raise DataError("the column does not exist", file=str(place), column="sequence_id", remedy=remedy)

    def __call__(self, batch: pa.RecordBatch, path: Path) -> pa.RecordBatch:
        keys = tuple(name for name in JOIN_KEYS if name in self.columns and name in batch.schema.names)
        if "sequence_id" not in keys:
            raise DataError("has neither sequence_id nor another key, so it cannot be joined", file=str(path))
        added = [name for name in COLUMN_TYPES if name in self.columns and name not in batch.schema.names]
        if "prompt_id" in self.columns and _is_derived(batch.schema):
            batch = batch.drop_columns(["prompt_id"])
            added.append("prompt_id")
        partial = all(name in (*PARTIAL_COLUMNS, "reference_version") for name in added)
        places = [self._find(keys, key, path, partial) for key in _keys(batch, keys)]
        self.found += sum(place is not None for place in places)
        known = next(batch[name] for name in REQUIRED_COLUMNS if name in batch.schema.names)
        if not pa.types.is_list(known.type):
            raise DataError("has one row per token, and joining is by sequence", file=str(path))
        lengths = np.diff(known.offsets.to_numpy())
        for name in added:
            with _explain_decoding(self._place, f"its {name} cannot be read"):
                values = [place and self._tables[place[0]][self.columns[name]][place[1]].as_py() for place in places]
            self._check(name, values, lengths, batch, path)
            column = pa.field(name, COLUMN_TYPES[name], nullable=name not in NEEDED_COLUMNS)
            with _explain_decoding(self._place, f"its {name} is of another kind than {COLUMN_TYPES[name]}"):
                batch = batch.append_column(column, pa.array(values, COLUMN_TYPES[name]))
        return batch

    def _find(self, keys: tuple[str, ...], key: SequenceKey, path: Path, partial: bool) -> tuple[int, int] | None:
        """Return table and row of a sequence. If `partial`, it may be missing."""
        if keys not in self._rows:
            self._rows[keys] = self._index(keys)
        if key not in self._rows[keys] and not partial:
            named = _describe_key(keys, key)
            raise DataError(f"{named} is not in {self._place}", file=str(path), remedy="join a file of the same run")
        return self._rows[keys].get(key)

    def _index(self, keys: tuple[str, ...]) -> dict[SequenceKey, tuple[int, int]]:
        index: dict[SequenceKey, tuple[int, int]] = {}
        for number, table in enumerate(self._tables):
            for row, key in enumerate(_keys(table, [self.columns[name] for name in keys])):
                if index.setdefault(key, (number, row)) != (number, row):
                    raise DataError(f"{_describe_key(keys, key)} occurs twice", file=str(self._place), row=row)
        return index

    def _check(self, name: str, values: Sequence[Any], lengths: Any, batch: pa.RecordBatch, path: Path) -> None:
        if name not in TOKEN_COLUMNS:
            return
        for row, (value, length) in enumerate(zip(values, lengths.tolist(), strict=True)):
            if value is None and name in PARTIAL_COLUMNS:
                continue
            if not isinstance(value, list) or len(value) != length or None in value:
                have = "none" if not isinstance(value, list) else "nulls" if None in value else f"{len(value)} values"
                problem = f"{self._place} has {have} of sequence {batch['sequence_id'][row]}, which has {length} tokens"
                raise DataError(problem, file=str(path), column=name, remedy="join one value per response token")


def _keys(table: pa.Table | pa.RecordBatch, names: Sequence[str]) -> Iterator[SequenceKey]:
    columns = (table[name].to_pylist() for name in names)
    return (tuple(None if part is None else str(part) for part in key) for key in zip(*columns, strict=True))


def _describe_key(names: Sequence[str], key: SequenceKey) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(names, key, strict=True))


def _is_derived(schema: pa.Schema) -> bool:
    """Return True if prompt ids are hashes of prompts, so that ids of another file are better."""
    return "prompt_id" in schema.names and schema.field("prompt_id").metadata == DERIVED


_CHECKED_COLUMNS = (*REQUIRED_COLUMNS, "response_mask", "current_log_probs", "advantages")
"""Columns whose lists must have equal lengths, because every analysis reads them."""
_REMEDY = "correct the dump; analyze --on-bad skip leaves such rows out"


def open_parquet_dump(place: str) -> Dump:
    return open_dump([place], aliases=column_aliases())


def read_parquet_batches(file: DumpFile, rows: int = BATCH_ROWS) -> Iterator[pa.RecordBatch]:
    """Read all columns of a file and its Hive partition, at most `rows` rows at a time, under canonical names."""
    stored = file.contents.schema.names
    canonical = {actual: column for column, actual in file.columns.items()}
    everything = replace(file, columns={canonical.get(name, name): name for name in stored})
    first = 0
    for table in read_pieces(everything, list(everything.columns), range(file.row_groups), rows):
        _check_lists(table, file, first)
        first += len(table)
        renamed = table.rename_columns([canonical.get(name, name) for name in table.column_names])
        for name, value in file.partition.items():
            if name not in renamed.column_names:
                renamed = renamed.append_column(name, pa.array([value] * len(renamed)))
        for batch in renamed.combine_chunks().to_batches():
            yield _remove_nulls(batch, file)


def _check_lists(table: pa.Table, file: DumpFile, first: int) -> None:
    if file.layout == "long":
        return
    named = {
        column: file.columns[column] for column in _CHECKED_COLUMNS if column in file.columns and file.is_list(column)
    }
    lists = {column: ListColumn.of(to_plain_array(table.column(name))) for column, name in named.items()}
    for fault in find_mismatched_lists(file, lists, np.arange(first, first + len(table))):
        raise replace(fault, remedy=_REMEDY).error(file.path, named[fault.column])


def _remove_nulls(batch: pa.RecordBatch, file: DumpFile) -> pa.RecordBatch:
    fields, columns = [], []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        kind = field.type
        if field.name in file.columns and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            if column.flatten().null_count:
                raise DataError("a list holds nulls", file=file.path, column=field.name, remedy=_REMEDY)
            kind = pa.list_(pa.field("element", kind.value_type, nullable=False))
            column = column.cast(kind)
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


Progress = Callable[[int, int], None]
Batches = Iterator[tuple[Path, pa.RecordBatch]]


@dataclass(frozen=True)
class ConversionResult:
    """Statistics of a conversion."""

    rows: int
    tokens: int
    missing: int = 0
    copies: int = 0
    passed_over: Sequence[str] = ()

    @property
    def notes(self) -> list[str]:
        return [*skipped_notes(self.missing, self.copies), *self.passed_over]


def convert_dump(
    place: str | Path,
    out: Path,
    framework: str = "",
    *,
    join: Path | None = None,
    progress: Progress | None = None,
) -> ConversionResult:
    """Write the sequences of a file or folder to `out`, atomically."""
    named = str(place)
    is_foreign = named and (framework or not contains_dump(named))  # Path("") would be the current folder
    paths = find_candidates(Path(named), framework) if is_foreign else []
    if not framework and all(is_table(path) and recognize_layout(path) is None for path in paths):
        paths = []
    joined = None if join is None else open_join(join)
    source = ForeignRun(named, joined)
    batches = _read_batches(source, paths, framework, progress) if paths else _rewrite_batches(named, joined, progress)
    with ExitStack() as stack:
        temporary = stack.enter_context(atomic_output(out))
        writer, rows, tokens = None, 0, 0
        for path, batch in batches:
            writer = writer or stack.enter_context(open_parquet_writer(temporary, batch.schema))
            writer.write_batch(fit_schema(batch, writer.schema, path))
            rows, tokens = rows + len(batch), tokens + _count_tokens(batch)
        if writer is None:
            raise DataError("does not contain sequences", file=named)
        if joined is not None and not joined.found:
            remedy = "join a file of the same run"
            raise DataError(f"its sequences are not in {join}", file=named, remedy=remedy)
    return ConversionResult(
        rows, tokens, source.missing, source.copies, compressed_file_notes(Path(named), framework) if paths else ()
    )


def convert_pair(rollout: Path, train: Path, out: Path, on: Sequence[str] = ()) -> ConversionResult:
    paired = pair(rollout, train, on)
    table = paired.table
    with atomic_output(out) as temporary, open_parquet_writer(temporary, table.schema) as writer:
        writer.write_table(table, row_group_size=BATCH_ROWS)
    tokens = sum(_count_tokens(batch) for batch in table.to_batches())
    return ConversionResult(len(table), tokens, passed_over=paired.notes)


def _read_batches(source: ForeignRun, paths: Sequence[Path], framework: str, progress: Progress | None) -> Batches:
    sizes = {path: path.stat().st_size for path in paths}
    done = 0
    for path in paths:
        for batch in source.read(path, framework):
            yield path, batch
        done += sizes[path]
        if progress is not None:
            progress(done, sum(sizes.values()))
    source.finish()


def _rewrite_batches(place: str, joined: JoinedColumns | None, progress: Progress | None) -> Batches:
    dump, done = open_parquet_dump(place), 0
    total = sum(file.size for file in dump.files)
    for file in dump.files:
        for batch in read_parquet_batches(file):
            yield Path(file.path), batch if joined is None else joined(batch, Path(file.path))
        done += file.size
        if progress is not None:
            progress(done, total)


def _count_tokens(batch: pa.RecordBatch) -> int:
    if "response_mask" in batch.schema.names:
        mask = batch["response_mask"]
        valid = mask.flatten() if pa.types.is_list(mask.type) else mask
        valid = valid if pa.types.is_boolean(valid.type) else pc.equal(valid.cast(pa.float64(), safe=False), 1)
        return int(pc.sum(valid).as_py() or 0)
    column = batch["rollout_log_probs"]
    return len(column.flatten()) if pa.types.is_list(column.type) else len(column)
