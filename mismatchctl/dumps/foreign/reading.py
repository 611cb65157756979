"""The files of one source read one after another; what only all of them show is checked here."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.dumps.foreign.alignment import LAGS, alignment_sums, check_alignment
from mismatchctl.dumps.foreign.batches import raw_batches
from mismatchctl.dumps.foreign.file import BYTES_READ
from mismatchctl.dumps.foreign.registry import all_layouts, recognize, refuse_incomplete
from mismatchctl.errors import DataError
from mismatchctl.files import scratch
from mismatchctl.frameworks.layout import FileLayout

Batches = Iterator[pa.RecordBatch]
Raw = Callable[[Path], "tuple[FileLayout | None, Batches]"]


class Join(Protocol):
    """Adds columns to a batch of a file."""

    @property
    def columns(self) -> Collection[str]:
        """Those that it has, by the contract's names."""

    def __call__(self, batch: pa.RecordBatch, path: Path) -> pa.RecordBatch:
        """The batch with the columns that it lacks."""


class ForeignRun:
    """Files that are read as one: a run.

    Attributes:
        missing: tokens masked out since the framework had no log-prob of them.
        copies: sequences left out since another file had them, with the same values.
    """

    def __init__(self, place: str, join: Join | None = None) -> None:
        """Begin.

        Args:
            place: what errors about all files name.
            join: adds columns to a batch of a file.
        """
        self.missing = self.copies = 0
        self._place, self._join = place, join
        self._completes = join is not None and "train_log_probs" in join.columns
        self._sums = np.zeros((len(LAGS), 6))
        self._sequences = 0
        self._first: tuple[Path, FileLayout] | None = None
        self._alone: tuple[Path, FileLayout] | None = None
        self._seen: dict[bytes, Path] = {}
        self._seen_step: object = None

    def read(self, path: Path, raw: Raw) -> Batches:
        """The sequences of a file; none where it is no framework's.

        Args:
            path: the file.
            raw: how it is read: `read_file`, or from `watched` or `workers`.

        Raises:
            DataError: the file cannot be read, is of another framework than the others, or its columns are shifted.
        """
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
            sums += _sums(batch)
            if number == 0:
                _check(sums, str(path), layout)
            self._sequences += len(batch)
            if len(batch):
                yield batch
        _check(sums, str(path), layout)
        self._sums += sums

    def finish(self) -> None:
        """Check what all files together show.

        Raises:
            DataError: there was no sequence, or columns are shifted.
        """
        if self._first is None and self._alone is not None:
            raise _incomplete("train", *self._alone)
        if self._first is None or not self._sequences:
            remedy = f"name its framework with convert --from: {', '.join(all_layouts())}"
            if self._first and self._first[1].duplicates:
                remedy = "name its folder: what several ranks hold is read from the file of one"
            problem = "holds no sequence" if self._first else "holds no file that is recognized"
            raise DataError(problem, file=self._place, remedy=remedy)
        _check(self._sums, self._place, self._first[1])

    def _without_missing(self, batch: pa.RecordBatch, layout: FileLayout) -> pa.RecordBatch:
        """Tokens that the framework had no log-prob of are no valid ones."""
        if not layout.missing:
            return batch
        mask = _flat(batch, "response_mask")
        gone = np.zeros_like(mask)
        for name in ("rollout_log_probs", "train_log_probs"):
            gone |= mask & np.isin(_flat(batch, name), np.asarray(layout.missing, np.float32))
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
        values = [_flat(batch, name) for name in ("rollout_log_probs", "train_log_probs", "response_mask")]
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


def left_out(missing: int, copies: int) -> list[str]:
    """What a `ForeignRun` left out, in sentences."""
    notes = [f"{missing:,} tokens that have no log-prob in the source are masked out"] if missing else []
    return [*notes, f"{copies:,} sequences that several files hold are read once"] if copies else notes


def _check_complete(batch: pa.RecordBatch, layout: FileLayout, path: Path) -> None:
    for name in ("rollout_log_probs", "train_log_probs"):
        if name not in batch.schema.names:
            raise _incomplete(name.removesuffix("_log_probs"), path, layout)


def _incomplete(what: str, path: Path, layout: FileLayout) -> DataError:
    which = f"{what} log-probs" if layout.columns else "log-probs"
    remedy = f"record them, and join both: mismatchctl convert SRC OUT --join {what}.parquet"
    if not layout.columns:
        remedy = "record both in the training loop: docs/recording.md"
    problem = f"files of {layout.framework} hold no {which}, so there is nothing to compare"
    return DataError(problem, file=str(path), remedy=remedy)


def _flat(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    values: NDArray[Any] = batch[name].flatten().to_numpy(zero_copy_only=False)
    return values


def _sums(batch: pa.RecordBatch) -> NDArray[Any]:
    mask = batch["response_mask"]
    rollout, train, valid = (_flat(batch, name) for name in ("rollout_log_probs", "train_log_probs", "response_mask"))
    return alignment_sums(rollout, train, valid, mask.offsets.to_numpy() - mask.offsets[0].as_py())


def _check(sums: NDArray[Any], place: str, layout: FileLayout) -> None:
    rollout, train = (layout.columns.get(name, name) for name in ("rollout_log_probs", "train_log_probs"))
    check_alignment(sums, place, rollout, train)


def read_file(path: Path, framework: str = "") -> tuple[FileLayout | None, Batches]:
    """How a file is read, by its name or content, and its batches; neither where it is no framework's."""
    layout = recognize(path, framework)
    return layout, raw_batches(path, layout) if layout else iter(())


@contextmanager
def watched(paths: Sequence[Path], framework: str, progress: Callable[[int, int], None] | None) -> Iterator[Raw]:
    """A way to read files that tells how many bytes of them were read, of how many."""
    sizes = {path: path.stat().st_size for path in paths}
    total, before, inside = sum(sizes.values()), 0, 0

    def told(count: int) -> None:
        nonlocal inside
        inside += count
        if progress is not None:
            progress(before + inside, total)

    def raw(path: Path) -> tuple[FileLayout | None, Batches]:
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
def workers(
    paths: Sequence[Path], framework: str, jobs: int, progress: Callable[[int, int], None] | None
) -> Iterator[Raw]:
    """A way to read files, in the order of `paths`, of which `jobs` processes read the next ones meanwhile.

    What they read lies in a temporary folder until it is taken; at most two files per process do.
    """
    sizes = [path.stat().st_size for path in paths]
    total, done = sum(sizes), 0
    with (
        scratch() as folder,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        todo = deque(enumerate(paths))
        running: deque[tuple[int, Path, Future[str | None]]] = deque()

        def submit() -> None:
            if todo:
                number, path = todo.popleft()
                place = folder / f"{number}.arrow"
                running.append((number, place, pool.submit(_read_into, path, framework, place)))

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


def _read_into(path: Path, framework: str, place: Path) -> str | None:
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
