"""Columns that another file has of the same sequences, by their ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.contract import PARTIAL, REQUIRED
from mismatchctl.dumps.foreign.batches import write_batches
from mismatchctl.dumps.foreign.reading import read_file
from mismatchctl.dumps.foreign.registry import candidates
from mismatchctl.dumps.foreign.rows import NEEDED, PER_TOKEN, TYPES
from mismatchctl.errors import DataError
from mismatchctl.files import scratch
from mismatchctl.footer import check_footer
from mismatchctl.frameworks import column_aliases

KEYS = ("step", "sequence_id")
_ROW_GROUPS_HELD = 8

Key = tuple[Any, ...]


@contextmanager
def joining(place: Path) -> Iterator[Joined]:
    """Open Parquet, or what a framework wrote, of which temporary Parquet is made.

    Raises:
        DataError: nothing there can be read, or it names no sequences.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        paths = sorted(place.rglob("*.parquet")) if place.is_dir() else []
        if place.is_file() and not candidates(place):
            paths = [place]
        paths = paths or list(_converted(place, folder))
        if not paths:
            raise DataError("holds nothing that can be joined", file=str(place))
        with _decoding(place, "is no Parquet file"):
            files = [_opened(stack.enter_context(pa.OSFile(str(path)))) for path in paths]
        yield Joined(place, files)


def _opened(file: pa.NativeFile) -> pq.ParquetFile:
    check_footer(file)
    return pq.ParquetFile(file)


@contextmanager
def _decoding(place: Path, problem: str) -> Iterator[None]:
    """Say what is wrong with what cannot be read."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{problem}: {str(error).splitlines()[0]}", file=str(place)) from error


def _converted(place: Path, folder: Path) -> Iterator[Path]:
    """One Parquet file of each file that a framework wrote; what they lack, others may have."""
    for number, path in enumerate(candidates(place)):
        out = folder / f"{number}.parquet"
        if write_batches(out, read_file(path)[1]):
            yield out


class Joined:
    """Sequences that are looked up one by one; memory holds their ids, and a few row groups.

    Attributes:
        columns: column of the contract -> its name in the files.
        found: how many sequences were there so far.
    """

    def __init__(self, place: Path, files: Sequence[pq.ParquetFile]) -> None:
        """Tell columns apart; a name of the contract goes before what frameworks call it.

        Raises:
            DataError: there are no ids.
        """
        self._place, self._files = place, files
        self._rows: dict[tuple[str, ...], dict[Key, tuple[int, int, int]]] = {}
        self.found = 0
        self._group = lru_cache(_ROW_GROUPS_HELD)(self._read_group)
        aliases = column_aliases()
        shared = set.intersection(*(set(file.schema_arrow.names) for file in files))
        ordered = sorted(shared, key=lambda name: (name in TYPES, name))
        self.columns = {aliases.get(name, name): name for name in ordered}
        if "sequence_id" not in self.columns:
            remedy = "write the ids that the other file has"
            raise DataError("there is no such column", file=str(place), column="sequence_id", remedy=remedy)

    def __call__(self, batch: pa.RecordBatch, path: Path) -> pa.RecordBatch:
        """The batch with the columns that it lacks.

        Raises:
            DataError: a sequence that is not there, or is there twice, or has another length.
        """
        keys = tuple(name for name in KEYS if name in self.columns and name in batch.schema.names)
        if "sequence_id" not in keys:
            raise DataError("names no sequences, so nothing can be joined", file=str(path))
        added = [name for name in TYPES if name in self.columns and name not in batch.schema.names]
        partial = all(name in (*PARTIAL, "reference_version") for name in added)
        wanted = zip(*(_texts(batch[name]) for name in keys), strict=True)
        places = [self._find(keys, key, path, partial) for key in wanted]
        self.found += sum(place is not None for place in places)
        known = next(batch[name] for name in REQUIRED if name in batch.schema.names)
        if not pa.types.is_list(known.type):
            raise DataError("has one row per token, and joining is by sequence", file=str(path))
        lengths = np.diff(known.offsets.to_numpy())
        for name in added:
            with _decoding(self._place, f"its {name} cannot be read"):
                values = [place and self._group(*place[:2])[self.columns[name]][place[2]].as_py() for place in places]
            self._check(name, values, lengths, batch, path)
            column = pa.field(name, TYPES[name], nullable=name not in NEEDED)
            with _decoding(self._place, f"its {name} is of another kind than {TYPES[name]}"):
                batch = batch.append_column(column, pa.array(values, TYPES[name]))
        return batch

    def _find(self, keys: tuple[str, ...], key: Key, path: Path, partial: bool) -> tuple[int, int, int] | None:
        """File, row group and row of a sequence; None where it may lack what is joined, and is not there."""
        if keys not in self._rows:
            self._rows[keys] = self._index(keys)
        named = ", ".join(f"{name} {value}" for name, value in zip(keys, key, strict=True))
        if key not in self._rows[keys] and not partial:
            raise DataError(f"{named} is not in {self._place}", file=str(path), remedy="join a file of the same run")
        return self._rows[keys].get(key)

    def _index(self, keys: tuple[str, ...]) -> dict[Key, tuple[int, int, int]]:
        index: dict[Key, tuple[int, int, int]] = {}
        for number, file in enumerate(self._files):
            for group in range(file.num_row_groups):
                with _decoding(self._place, "cannot be read"):
                    table = file.read_row_group(group, columns=[self.columns[name] for name in keys])
                for row, key in enumerate(zip(*(_texts(table[self.columns[name]]) for name in keys), strict=True)):
                    if index.setdefault(key, (number, group, row)) != (number, group, row):
                        named = ", ".join(f"{name} {value}" for name, value in zip(keys, key, strict=True))
                        raise DataError(f"{named} is there twice", file=str(self._place), row=row)
        return index

    def _read_group(self, file: int, group: int) -> pa.Table:
        return self._files[file].read_row_group(group).combine_chunks()

    def _check(self, name: str, values: Sequence[Any], lengths: Any, batch: pa.RecordBatch, path: Path) -> None:
        if name not in PER_TOKEN:
            return
        for row, (value, length) in enumerate(zip(values, lengths.tolist(), strict=True)):
            if value is None and name in PARTIAL:
                continue
            if not isinstance(value, list) or len(value) != length or None in value:
                have = "none" if not isinstance(value, list) else "nulls" if None in value else f"{len(value)} values"
                problem = f"{self._place} has {have} of sequence {batch['sequence_id'][row]}, which has {length} tokens"
                raise DataError(problem, file=str(path), column=name, remedy="join values of the response's tokens")


def _texts(column: Any) -> list[str | None]:
    return [None if value is None else str(value) for value in column.to_pylist()]
