"""Files that frameworks write, and Parquet of the contract, converted to one Parquet file of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from mismatchctl.dumps.convert.joining import Joined, joining
from mismatchctl.dumps.convert.rewrite import open_parquet, parquet_batches
from mismatchctl.dumps.foreign.batches import fitted, parquet_writer
from mismatchctl.dumps.foreign.reading import ForeignRun, Raw, left_out, watched, workers
from mismatchctl.dumps.foreign.registry import candidates, packed_note
from mismatchctl.dumps.paths import holds_dump
from mismatchctl.errors import DataError
from mismatchctl.files import replaced_when_done

Progress = Callable[[int, int], None]
Batches = Iterator[tuple[Path, pa.RecordBatch]]


@dataclass(frozen=True)
class Converted:
    """What was written.

    Attributes:
        rows: sequences, or tokens of Parquet that has one per row.
        tokens: valid ones.
        missing: tokens masked out since the framework had no log-prob of them.
        copies: sequences left out since another file had them, with the same values.
        passed_over: files that were not read, in sentences.
    """

    rows: int
    tokens: int
    missing: int = 0
    copies: int = 0
    passed_over: Sequence[str] = ()

    @property
    def notes(self) -> list[str]:
        """What was left out, in sentences."""
        return [*left_out(self.missing, self.copies), *self.passed_over]


def convert(
    place: str | Path,
    out: Path,
    framework: str = "",
    *,
    join: Path | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Converted:
    """Write the sequences of a file or folder to `out`, whole or not at all; the same bytes whatever `jobs`.

    Args:
        place: what a framework wrote, or Parquet of the contract, which is written anew.
        out: the Parquet file.
        framework: whose files these are; empty: as they are recognized.
        join: more columns of the same sequences, by `sequence_id` (and `step`, where both name it).
        jobs: processes that read files side by side.
        progress: is told how many bytes were read, of how many.

    Raises:
        DataError: nothing is recognized, a row is bad, or columns are shifted against each other.
        ConfigError: an unknown framework, or `out` cannot be written.
    """
    named = str(place)
    is_foreign = named and (framework or not holds_dump(named))  # no name is no folder, though Path makes it this one
    paths = candidates(Path(named), framework) if is_foreign else []
    with ExitStack() as stack:
        joined = stack.enter_context(joining(join)) if join is not None else None
        source = ForeignRun(named, joined)
        if paths:
            reader = workers(paths, framework, jobs, progress) if jobs > 1 else watched(paths, framework, progress)
            batches = _read(source, paths, stack.enter_context(reader))
        else:
            batches = _rewritten(named, joined, progress)
        temporary = stack.enter_context(replaced_when_done(out))
        writer, rows, tokens = None, 0, 0
        for path, batch in batches:
            writer = writer or stack.enter_context(parquet_writer(temporary, batch.schema))
            writer.write_batch(fitted(batch, writer.schema, path))
            rows, tokens = rows + len(batch), tokens + _tokens(batch)
        if writer is None:
            raise DataError("holds no sequence", file=named)
        if joined is not None and not joined.found:
            remedy = "join a file of the same run"
            raise DataError(f"none of its sequences is in {join}", file=named, remedy=remedy)
    return Converted(rows, tokens, source.missing, source.copies, packed_note(Path(named), framework) if paths else ())


def _read(source: ForeignRun, paths: Sequence[Path], raw: Raw) -> Batches:
    for path in paths:
        for batch in source.read(path, raw):
            yield path, batch
    source.finish()


def _rewritten(place: str, joined: Joined | None, progress: Progress | None) -> Batches:
    dump, done = open_parquet(place), 0
    total = sum(file.size for file in dump.files)
    for file in dump.files:
        for batch in parquet_batches(file):
            yield Path(file.path), batch if joined is None else joined(batch, Path(file.path))
        done += file.size
        if progress is not None:
            progress(done, total)


def _tokens(batch: pa.RecordBatch) -> int:
    """Valid tokens; all, where there is no mask. What is no mask is counted as reading it would: by its ones."""
    if "response_mask" in batch.schema.names:
        mask = batch["response_mask"]
        valid = mask.flatten() if pa.types.is_list(mask.type) else mask
        valid = valid if pa.types.is_boolean(valid.type) else pc.equal(valid.cast(pa.float64(), safe=False), 1)
        return int(pc.sum(valid).as_py() or 0)
    column = batch["rollout_log_probs"]
    return len(column.flatten()) if pa.types.is_list(column.type) else len(column)
