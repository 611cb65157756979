"""Read all files of one source, check them together, and convert them to temporary Parquet files."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from itertools import count, groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.data.importers.rows import (
    BATCH_ROWS,
    BYTES_READ,
    LAGS,
    alignment_sums,
    all_layouts,
    check_alignment,
    read_raw_batches,
    recognize_layout,
    refuse_incomplete,
    write_batches,
)
from mismatchctl.data.importers.tables import as_dump, has_both_sides, is_table, read_table
from mismatchctl.data.paths import UnopenedFile
from mismatchctl.errors import DataError
from mismatchctl.frameworks.adapter import FileLayout
from mismatchctl.io.files import make_temporary_folder, require_regular_file, temporary_folder

Batches = Iterator[pa.RecordBatch]
RawReader = Callable[[Path], "tuple[FileLayout | None, Batches]"]


class BatchJoin(Protocol):
    """Adds columns to a batch of a file."""

    @property
    def columns(self) -> Collection[str]:
        """Those that it has, by the contract's names."""

    def __call__(self, batch: pa.RecordBatch, path: Path) -> pa.RecordBatch:
        """The batch with the columns that it lacks."""


class ForeignRun:
    """Files that are read as one: a run."""

    def __init__(self, place: str, join: BatchJoin | None = None) -> None:
        """Begin."""
        self.missing = self.copies = 0
        self._place, self._join = place, join
        self._completes = join is not None and "train_log_probs" in join.columns
        self._sums = np.zeros((len(LAGS), 6))
        self._sequences = 0
        self._first: tuple[Path, FileLayout] | None = None
        self._alone: tuple[Path, FileLayout] | None = None
        self._seen: dict[bytes, Path] = {}
        self._seen_step: object = None

    @property
    def recognized(self) -> bool:
        """True if a file of a framework was read."""
        return self._first is not None or self._alone is not None

    def read(self, path: Path, raw: RawReader) -> Batches:
        """The sequences of a file; none where it is no framework's."""
        layout, batches = raw(path)
        if layout is None:
            refuse_incomplete(path)
            return
        if layout.rollout_only and not (self._completes and layout.columns):
            self._alone = self._alone or (path, layout)  # no matter, where it lies beside what the trainer wrote
            return
        first, known = self._first = self._first or (path, layout)
        if layout is not known:
            problem = f"is {layout.framework}'s, while {first} is {known.framework}'s"
            raise DataError(problem, file=str(path), remedy="name the folder of one, or choose with convert --from")
        sums = np.zeros_like(self._sums)
        for number, batch in enumerate(batches):
            batch = batch if self._join is None else self._join(batch, path)
            _check_complete(batch, layout, path)
            batch = self._without_copies(self._without_missing(batch, layout), layout, path)
            sums += _batch_alignment_sums(batch)
            if number == 0:
                _check_alignment_sums(sums, str(path), layout)
            self._sequences += len(batch)
            if len(batch):
                yield batch
        _check_alignment_sums(sums, str(path), layout)
        self._sums += sums

    def finish(self) -> None:
        """Check what all files together show."""
        if self._first is None and self._alone is not None:
            raise _incomplete_error("train", *self._alone)
        if self._first is None or not self._sequences:
            remedy = f"name its framework with convert --from: {', '.join(all_layouts())}"
            if self._first and self._first[1].duplicates:
                remedy = "name its folder: what several ranks hold is read from the file of one"
            problem = "does not contain sequences" if self._first else "does not contain a file of a known format"
            raise DataError(problem, file=self._place, remedy=remedy)
        _check_alignment_sums(self._sums, self._place, self._first[1])

    def _without_missing(self, batch: pa.RecordBatch, layout: FileLayout) -> pa.RecordBatch:
        """Tokens that the framework had no log-prob of are no valid ones."""
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
        """The rows that no other file of the folder has: the same sequence of a step, with the same values."""
        if not layout.duplicates:
            return batch
        keep = np.ones(len(batch), bool)
        steps = batch["step"].to_pylist() if "step" in batch.schema.names else [None] * len(batch)
        offsets = batch["response_mask"].offsets.to_numpy()
        values = [_flat_values(batch, name) for name in ("rollout_log_probs", "train_log_probs", "response_mask")]
        for row, (step, name) in enumerate(zip(steps, batch["sequence_id"].to_pylist(), strict=True)):
            if step != self._seen_step:  # files come step by step, so that earlier ones can be forgotten
                self._seen, self._seen_step = {}, step
            name = name.removeprefix(f"{path.stem}:")  # a sequence without a name has its file's, and its place there
            key = hashlib.blake2b(repr((str(path.parent), name)).encode(), digest_size=16)
            for column in values:
                key.update(column[offsets[row] : offsets[row + 1]].tobytes())
            keep[row] = self._seen.setdefault(key.digest(), path) == path
        self.copies += int((~keep).sum())
        return batch if keep.all() else batch.filter(pa.array(keep))


def skipped_notes(missing: int, copies: int) -> list[str]:
    """What a `ForeignRun` left out, in sentences."""
    notes = [f"{missing:,} tokens that have no log-prob in the source are masked out"] if missing else []
    return [*notes, f"{copies:,} sequences that several files hold are read once"] if copies else notes


def _check_complete(batch: pa.RecordBatch, layout: FileLayout, path: Path) -> None:
    for name in ("rollout_log_probs", "train_log_probs"):
        if name not in batch.schema.names:
            raise _incomplete_error(name.removesuffix("_log_probs"), path, layout)


def _incomplete_error(what: str, path: Path, layout: FileLayout) -> DataError:
    which = f"{what} log-probs" if layout.columns else "log-probs"
    remedy = f"record them, and join both: mismatchctl convert SRC OUT --join {what}.parquet"
    if not layout.columns:
        remedy = layout.remedy or "record both in the training loop: docs/guides/recording.md"
    problem = f"files of {layout.framework} hold no {which}, so there is nothing to compare"
    return DataError(problem, file=str(path), remedy=remedy)


def _flat_values(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    values: NDArray[Any] = batch[name].flatten().to_numpy(zero_copy_only=False)
    return values


def _batch_alignment_sums(batch: pa.RecordBatch) -> NDArray[Any]:
    mask = batch["response_mask"]
    rollout, train, valid = (
        _flat_values(batch, name) for name in ("rollout_log_probs", "train_log_probs", "response_mask")
    )
    return alignment_sums(rollout, train, valid, mask.offsets.to_numpy() - mask.offsets[0].as_py())


def _check_alignment_sums(sums: NDArray[Any], place: str, layout: FileLayout) -> None:
    rollout, train = (layout.columns.get(name, name) for name in ("rollout_log_probs", "train_log_probs"))
    check_alignment(sums, place, rollout, train)


def read_file(path: Path, framework: str = "") -> tuple[FileLayout | None, Batches]:
    """How a file is read, by its name or content, and its batches; neither where it is no framework's."""
    layout = recognize_layout(path, framework)
    return layout, read_raw_batches(path, layout) if layout else iter(())


@contextmanager
def read_with_progress(
    paths: Sequence[Path], framework: str, progress: Callable[[int, int], None] | None
) -> Iterator[RawReader]:
    """A way to read files that tells how many bytes of them were read, of how many."""
    sizes = {path: path.stat().st_size for path in paths}
    total, size, before, inside = sum(sizes.values()), 0, 0, 0

    def told(count: int) -> None:
        nonlocal inside
        inside = min(inside + count, size)  # a reader may look at some lines twice
        if progress is not None:
            progress(before + inside, total)

    def raw(path: Path) -> tuple[FileLayout | None, Batches]:
        nonlocal size
        size = sizes[path]
        layout, batches = read_file(path, framework)

        def counted() -> Batches:
            nonlocal before, inside
            yield from batches
            before, inside = before + sizes[path], 0
            told(0)

        return layout, counted()

    token = BYTES_READ.set(told)
    try:
        yield raw
    finally:
        BYTES_READ.reset(token)


@contextmanager
def read_in_processes(
    paths: Sequence[Path], framework: str, jobs: int, progress: Callable[[int, int], None] | None
) -> Iterator[RawReader]:
    """A way to read files, in the order of `paths`, of which `jobs` processes read the next ones meanwhile.

    What they read lies in a temporary folder until it is taken; at most two files per process do.
    """
    sizes = [path.stat().st_size for path in paths]
    total, done = sum(sizes), 0
    with (
        temporary_folder() as folder,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        todo = deque(enumerate(paths))
        running: deque[tuple[int, Path, Future[str | None]]] = deque()

        def submit() -> None:
            if todo:
                number, path = todo.popleft()
                place = folder / f"{number}.arrow"
                running.append((number, place, pool.submit(_convert_in_process, path, framework, place)))

        def raw(path: Path) -> tuple[FileLayout | None, Batches]:
            number, place, future = running.popleft()
            assert paths[number] == path
            name = future.result()
            submit()

            def batches() -> Batches:
                nonlocal done
                if place.exists():
                    with pa.OSFile(str(place)) as file, pa.ipc.open_stream(file) as stream:
                        yield from stream
                    place.unlink()
                done += sizes[number]
                if progress is not None:
                    progress(done, total)

            return (all_layouts()[name], batches()) if name else (None, iter(()))

        for _ in range(2 * jobs):
            submit()
        try:
            yield raw
        finally:
            pool.shutdown(cancel_futures=True)


def _convert_in_process(path: Path, framework: str, place: Path) -> str | None:
    """Read a file to a place, in another process; returns its framework's name."""
    layout, batches = read_file(path, framework)
    if layout is None:
        return None
    with ExitStack() as stack:
        stream = None
        for batch in batches:
            stream = stream or stack.enter_context(pa.ipc.new_stream(str(place), batch.schema))
            stream.write_batch(batch)
    return layout.framework


ConversionOutcome = Path | DataError | None

_conversions: dict[tuple[tuple[str, int, int], ...], tuple[list[ConversionOutcome], list[str]]] = {}
"""By place, size and time of a run's files, what became of each, and what to say about them: a verb that opens them
twice converts them once."""
_file_numbers = count()
_temporary_folder = cache(make_temporary_folder)
"""Makes a folder once, which is removed when the process ends."""


def convert_foreign_files(
    found: Sequence[UnopenedFile], skip: bool, note: Callable[[str], None]
) -> Iterator[UnopenedFile | DataError]:
    """The files as Parquet; those that are no framework's, or whose sequences other files have too, are left out."""
    for (foreign, _), files in groupby(found, key=lambda one: (one.foreign, one.run)):
        run = list(files)
        if not foreign:
            yield from run
            continue
        stamps = tuple(_file_stamp(one) for one in run)
        if stamps not in _conversions:
            _conversions[stamps] = _convert_run(run, skip)
        outcomes, notes = _conversions[stamps]
        for text in notes:
            note(text)
        for one, (_, size, _), outcome in zip(run, stamps, outcomes, strict=True):
            if isinstance(outcome, DataError):
                yield outcome
            elif outcome is not None:
                yield replace(one, location=str(outcome), size=size, foreign=False)


def _file_stamp(one: UnopenedFile) -> tuple[str, int, int]:
    try:
        require_regular_file(one.location)
        status = os.stat(one.location)
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", file=one.path) from error
    return one.location, status.st_size, status.st_mtime_ns


def _convert_run(run: Sequence[UnopenedFile], skip: bool) -> tuple[list[ConversionOutcome], list[str]]:
    """Convert each file of a run to Parquet. Files that are not dumps become None if the run has dumps."""
    place = os.path.commonpath([one.path for one in run])
    source = ForeignRun(place)
    paths = [Path(one.path if os.path.exists(one.path) else one.location) for one in run]
    outcomes: list[ConversionOutcome] = []
    for path in paths:
        outcomes.append(_outcome(lambda path=path: _convert_file(source, path), skip))  # type: ignore[misc]
    if source.recognized:
        source.finish()
    elif not any(isinstance(outcome, Path) for outcome in outcomes):
        for number, path in enumerate(paths):
            if outcomes[number] is None and is_table(path):
                outcomes[number] = _outcome(lambda path=path: _convert_incomplete(path), skip)  # type: ignore[misc]
        if all(outcome is None for outcome in outcomes):
            source.finish()
    return outcomes, [f"{place}: {text}" for text in skipped_notes(source.missing, source.copies)]


def _outcome(convert: Callable[[], Path | None], skip: bool) -> ConversionOutcome:
    try:
        return convert()
    except DataError as error:
        if not skip:
            raise
        return error


def _convert_file(source: ForeignRun, path: Path) -> Path | None:
    """Convert a file of a framework or a table with both sides. Return None for any other table."""
    place = _temporary_folder() / f"{next(_file_numbers)}.parquet"
    if not is_table(path) or recognize_layout(path) is not None:
        return place if write_batches(place, source.read(path, read_file)) else None
    table = read_table(path)
    if not has_both_sides(table):
        refuse_incomplete(path)
        return None
    return place if write_batches(place, as_dump(table, path).to_batches(BATCH_ROWS)) else None


def _convert_incomplete(path: Path) -> Path:
    """Convert a table whose columns may be named with `--column`."""
    place = _temporary_folder() / f"{next(_file_numbers)}.parquet"
    if not write_batches(place, as_dump(read_table(path), path).to_batches(BATCH_ROWS)):
        raise DataError("the file does not contain rows", file=str(path), remedy="name a dump that contains sequences")
    return place
