"""Convert dumps of frameworks and other formats to tables in memory or in temporary files, one run at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain, count, groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.core.schema import REQUIRED_COLUMNS
from mismatchctl.data.formats import MemoryTable
from mismatchctl.data.importers.rows import all_layouts, read_raw_batches, recognize_layout, refuse_incomplete
from mismatchctl.data.importers.tables import as_dump, canonical_name, is_table, read_table
from mismatchctl.data.paths import UnopenedFile
from mismatchctl.errors import DataError
from mismatchctl.frameworks.adapter import FileLayout
from mismatchctl.io.files import explain_write_errors, make_temporary_folder, require_regular_file

Batches = Iterator[pa.RecordBatch]

BatchJoin = Callable[[pa.RecordBatch, Path], pa.RecordBatch]


class ForeignRun:
    """Reads files of a framework as one run.

    `missing` counts tokens without a log-prob. `copies` counts sequences that were in an earlier file of the run.
    """

    def __init__(self, place: str, join: BatchJoin | None = None, joined_columns: Collection[str] = ()) -> None:
        self.missing = self.copies = self._sequences = 0
        self._place, self._join, self._completes = place, join, "train_log_probs" in joined_columns
        self._first: tuple[Path, FileLayout] | None = None
        self._alone: tuple[Path, FileLayout] | None = None
        self._seen: dict[bytes, Path] = {}
        self._seen_step: object = None

    @property
    def recognized(self) -> bool:
        return self._first is not None or self._alone is not None

    def read(self, path: Path, framework: str = "") -> Batches:
        """Yield a file's sequences in batches. Yield no batch if its format is unknown or lacks train log-probs."""
        layout = recognize_layout(path, framework)
        if layout is None:
            refuse_incomplete(path)
            return
        if layout.rollout_only and not (self._completes and layout.columns):
            self._alone = self._alone or (path, layout)  # `finish` raises an error if all files are like this
            return
        first, known = self._first = self._first or (path, layout)
        if layout is not known:
            problem = f"is a file of {layout.framework}, but {first} is a file of {known.framework}"
            raise DataError(
                problem,
                file=str(path),
                remedy="pass a folder with files of one framework, or choose the framework with convert --from",
            )
        for batch in read_raw_batches(path, layout):
            batch = batch if self._join is None else self._join(batch, path)
            for side in ("rollout", "train"):
                if f"{side}_log_probs" not in batch.schema.names:
                    raise _incomplete_error(side, path, layout)
            batch = self._without_copies(self._without_missing(batch, layout), layout, path)
            self._sequences += len(batch)
            if len(batch):
                yield batch

    def finish(self) -> None:
        if self._first is None and self._alone is not None:
            raise _incomplete_error("train", *self._alone)
        if self._first is None or not self._sequences:
            remedy = f"pass the name of its framework with convert --from: {', '.join(all_layouts())}"
            if self._first and self._first[1].duplicates:
                remedy = "pass the whole folder. If several ranks saved the same data, only one rank's file is read"
            problem = "does not contain sequences" if self._first else "does not contain a file of a known format"
            raise DataError(problem, file=self._place, remedy=remedy)

    def _without_missing(self, batch: pa.RecordBatch, layout: FileLayout) -> pa.RecordBatch:
        if not layout.missing:
            return batch
        mask = _flat_values(batch, "response_mask")
        gone = np.zeros_like(mask)
        for name in ("rollout_log_probs", "train_log_probs"):
            gone |= mask & np.isin(_flat_values(batch, name), np.asarray(layout.missing, np.float32))
        self.missing += int(gone.sum())
        index, column = batch.schema.get_field_index("response_mask"), batch["response_mask"]
        kept = pa.ListArray.from_arrays(column.offsets, pa.array(mask & ~gone), type=column.type)
        return batch.set_column(index, batch.schema.field(index), kept)

    def _without_copies(self, batch: pa.RecordBatch, layout: FileLayout, path: Path) -> pa.RecordBatch:
        if not layout.duplicates:
            return batch
        keep = np.ones(len(batch), bool)
        steps = batch["step"].to_pylist() if "step" in batch.schema.names else [None] * len(batch)
        offsets = batch["response_mask"].offsets.to_numpy()
        values = [_flat_values(batch, name) for name in ("rollout_log_probs", "train_log_probs", "response_mask")]
        for row, (step, name) in enumerate(zip(steps, batch["sequence_id"].to_pylist(), strict=True)):
            if step != self._seen_step:  # files come step by step, so earlier steps can be dropped
                self._seen, self._seen_step = {}, step
            name = name.removeprefix(f"{path.stem}:")  # unnamed sequences are called FILE:ROW
            key = hashlib.blake2b(repr((str(path.parent), name)).encode(), digest_size=16)
            for column in values:
                key.update(column[offsets[row] : offsets[row + 1]].tobytes())
            keep[row] = self._seen.setdefault(key.digest(), path) == path
        self.copies += int((~keep).sum())
        return batch if keep.all() else batch.filter(pa.array(keep))


def skipped_notes(missing: int, copies: int) -> list[str]:
    notes = [f"{missing:,} tokens that have no log-prob in the source are masked"] if missing else []
    return [*notes, f"{copies:,} sequences are in several files and are read only once"] if copies else notes


def _incomplete_error(what: str, path: Path, layout: FileLayout) -> DataError:
    which = f"{what} log-probs" if layout.columns else "log-probs"
    remedy = f"record them, and join the files: mismatchctl convert SOURCE OUT --join {what}.parquet"
    if not layout.columns:
        remedy = layout.remedy or "record both in the training loop: docs/guides/recording.md"
    problem = f"files of {layout.framework} lack {which}, so no comparison is possible"
    return DataError(problem, file=str(path), remedy=remedy)


def _flat_values(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    values: NDArray[Any] = batch[name].flatten().to_numpy(zero_copy_only=False)
    return values


_MOST_IN_MEMORY = 1 << 27
"""A run is kept in memory if its files have at most this size in bytes. Larger runs use a temporary file."""
_FileStamp = tuple[str, int, int]
ConversionOutcome: TypeAlias = "pa.Table | DataError | None"
_file_numbers = count()
_temporary_folder = cache(make_temporary_folder)
"""Return the temporary folder of this process. The first call creates it. When the process ends, it is removed."""


def convert_foreign_files(
    found: Sequence[UnopenedFile], skip: bool, note: Callable[[str], None]
) -> Iterator[UnopenedFile | DataError]:
    """Convert `foreign` files to tables, one run at a time. Yield other files unchanged, and with `skip`, errors."""
    for (foreign, _), files in groupby(found, key=lambda one: (one.foreign, one.run)):
        run = list(files)
        if not foreign:
            yield from run
            continue
        stamps = tuple(_file_stamp(one) for one in run)
        outcomes, notes = _convert_run(tuple(one.path for one in run), stamps, skip)
        for text in notes:
            note(text)
        for one, (_, size, modified), outcome in zip(run, stamps, outcomes, strict=True):
            if isinstance(outcome, DataError):
                yield outcome
            elif outcome is not None:
                table = MemoryTable.of(outcome, one.path, version=str(modified))
                yield replace(one, table=table, size=size, foreign=False)


def _file_stamp(one: UnopenedFile) -> _FileStamp:
    try:
        require_regular_file(one.location)
        status = os.stat(one.location)
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", file=one.path) from error
    return one.location, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)  # some commands open a dump twice
def _convert_run(
    named: Sequence[str], stamps: Sequence[_FileStamp], skip: bool
) -> tuple[list[ConversionOutcome], list[str]]:
    """Convert each file to a table, `None` (no sequences) or, with `skip`, an error. Also return notes for users."""
    place = os.path.commonpath(named)
    source = ForeignRun(place)
    paths = [Path(path if os.path.exists(path) else stamp[0]) for path, stamp in zip(named, stamps, strict=True)]
    in_memory = sum(size for _, size, _ in stamps) <= _MOST_IN_MEMORY

    def outcome(path: Path, incomplete: bool) -> ConversionOutcome:
        try:
            return _collect(_read_file(source, path, incomplete), in_memory)
        except DataError as error:
            if not skip:
                raise
            return error

    outcomes = [outcome(path, False) for path in paths]
    if not source.recognized and not any(isinstance(found, pa.Table) for found in outcomes):
        for number, path in enumerate(paths):
            if outcomes[number] is None and is_table(path):
                outcomes[number] = outcome(path, True)
    if source.recognized or all(found is None for found in outcomes):
        source.finish()
    return outcomes, [f"{place}: {text}" for text in skipped_notes(source.missing, source.copies)]


def _read_file(source: ForeignRun, path: Path, incomplete: bool) -> Batches:
    if not incomplete and (not is_table(path) or recognize_layout(path) is not None):
        yield from source.read(path)
        return
    table = read_table(path)
    found = set(map(canonical_name, table.schema.names))
    complete = found >= {*REQUIRED_COLUMNS} and ("response_mask" in found or "position" in found)
    if not incomplete and not complete:
        refuse_incomplete(path)
        return
    table = as_dump(table, path)
    if incomplete and not len(table):
        raise DataError("the file does not contain rows", file=str(path), remedy="pass a dump that contains sequences")
    yield from table.to_batches()


def _collect(batches: Batches, in_memory: bool) -> pa.Table | None:
    """Return the rows as a table, if there are rows. The table is in memory or in a temporary file."""
    first = next(batches, None)
    if first is None:
        return None
    batches = chain([first], batches)
    if in_memory:
        return pa.Table.from_batches(batches)
    path = _temporary_folder() / f"{next(_file_numbers)}.arrow"
    with explain_write_errors(path), pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
