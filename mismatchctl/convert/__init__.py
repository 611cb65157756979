"""Files that frameworks write, converted to one Parquet file of the contract."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mismatchctl.errors import DataError
from mismatchctl.files import replaced_when_done
from mismatchctl.frameworks.importers.batches import parquet_writer
from mismatchctl.frameworks.importers.reading import Source, watched, workers
from mismatchctl.frameworks.importers.registry import LAYOUTS, candidates


@dataclass(frozen=True)
class Converted:
    """What was written: sequences and valid tokens; tokens masked out and sequences left out."""

    sequences: int
    tokens: int
    missing: int = 0
    copies: int = 0


def convert(
    place: Path,
    out: Path,
    framework: str = "",
    *,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Write the sequences of a file or folder to `out`, whole or not at all; the same bytes whatever `jobs`.

    Args:
        place: what a framework wrote.
        out: the Parquet file.
        framework: whose files these are; empty: as they are recognized.
        jobs: processes that read files side by side.
        progress: is told how many bytes were read, of how many.

    Raises:
        DataError: nothing is recognized, a row is bad, or columns are shifted against each other.
        ConfigError: an unknown framework, or `out` cannot be written.
    """
    if not place.exists():
        raise DataError("there is no such file or folder", file=str(place))
    paths = candidates(place, framework)
    if not paths:
        known = ", ".join(LAYOUTS)
        raise DataError("holds no file that is recognized", file=str(place), remedy=f"name its framework: {known}")
    with ExitStack() as stack:
        temporary = stack.enter_context(replaced_when_done(out))
        reader = workers(paths, framework, jobs, progress) if jobs > 1 else watched(paths, framework, progress)
        source = Source(str(place), framework, raw=stack.enter_context(reader))
        writer = None
        for path in paths:
            for batch in source.read(path):
                writer = writer or stack.enter_context(parquet_writer(temporary, batch.schema))
                writer.write_batch(batch)
        source.finish()
    return Converted(source.sequences, source.tokens, source.missing, source.copies)
