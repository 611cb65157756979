"""Files that frameworks wrote, read in their own layouts: converted into a temporary folder when they are opened.

Whatever is said about them names the original.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import count, groupby
from pathlib import Path

from mismatchctl.dumps.foreign.batches import write_batches
from mismatchctl.dumps.foreign.reading import ForeignRun, left_out, read_file
from mismatchctl.dumps.paths import UnopenedFile
from mismatchctl.errors import DataError
from mismatchctl.files import scratch_folder

Outcome = Path | DataError | None

_converted: dict[tuple[tuple[str, int, int], ...], tuple[list[Outcome], list[str]]] = {}
"""By place, size and time of a run's files, what became of each, and what to say about them: a verb that opens them
twice converts them once."""
_numbers = count()
_folder = cache(scratch_folder)
"""Makes a folder once, which is removed when the process ends."""


def native(
    found: Sequence[UnopenedFile], skip: bool, note: Callable[[str], None]
) -> Iterator[UnopenedFile | DataError]:
    """The files as Parquet; those that are no framework's, or whose sequences other files have too, are left out.

    Args:
        found: files of all runs, run by run.
        skip: whether errors of files are handed on in their place, or raised.
        note: is told what else was left out, as a sentence.

    Raises:
        DataError: a file that cannot be read, unless `skip`; a run of which no file can, or whose log-probs are
            shifted against each other.
    """
    for (foreign, _), files in groupby(found, key=lambda one: (one.foreign, one.run)):
        run = list(files)
        if not foreign:
            yield from run
            continue
        stamps = tuple(_stamp(one) for one in run)
        if stamps not in _converted:
            _converted[stamps] = _convert(run, skip)
        outcomes, notes = _converted[stamps]
        for text in notes:
            note(text)
        for one, (_, size, _), outcome in zip(run, stamps, outcomes, strict=True):
            if isinstance(outcome, DataError):
                yield outcome
            elif outcome is not None:
                yield replace(one, location=str(outcome), size=size, foreign=False)


def _stamp(one: UnopenedFile) -> tuple[str, int, int]:
    try:
        status = os.stat(one.location)
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", file=one.path) from error
    return one.location, status.st_size, status.st_mtime_ns


def _convert(run: Sequence[UnopenedFile], skip: bool) -> tuple[list[Outcome], list[str]]:
    """The Parquet file made of each file of a run: its place, why there is none, or None where it holds nothing."""
    place = os.path.commonpath([one.path for one in run])
    source = ForeignRun(place)
    outcomes: list[Outcome] = []
    for one in run:
        try:
            outcomes.append(_write(source, Path(one.path if os.path.exists(one.path) else one.location)))
        except DataError as error:
            if not skip:
                raise
            outcomes.append(error)
    if not all(isinstance(outcome, DataError) for outcome in outcomes):
        source.finish()
    return outcomes, [f"{place}: {text}" for text in left_out(source.missing, source.copies)]


def _write(source: ForeignRun, path: Path) -> Path | None:
    place = _folder() / f"{next(_numbers)}.parquet"
    return place if write_batches(place, source.read(path, read_file)) else None
