"""Where a verb writes to: refused before any work where it cannot be done, or would destroy what is not to be lost."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterable
from pathlib import Path

from mismatchctl.errors import ConfigError
from mismatchctl.marks import is_baseline, is_ours

_READ_IN_FOLDERS = (".parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc", ".jsonl", ".pt", ".pkl", ".npz")


def check_places(
    *named: Path | None, force: bool, inputs: Iterable[str | Path | None] = (), baseline: Path | None = None
) -> None:
    """Refuse, before any work, to write where it cannot be done, or over a file that is not to be lost.

    What mismatchctl wrote may be replaced, a baseline only by the next one, where it is named as `baseline`; everything
    else needs `--force`. What is read is never replaced.

    Raises:
        ConfigError: a place that cannot be written, that is given twice, or that is read.
    """
    places = [place for place in named if place is not None]
    for place in places:
        _check_place(place)
        if place.exists() and not (force or is_ours(place) or (place == baseline and is_baseline(place))):
            raise ConfigError(
                f"{place}: exists already and is not mismatchctl's; name another file, or overwrite it with --force"
            )
    names = [os.path.realpath(place) for place in places]
    twice = next((place for place, name in zip(places, names, strict=True) if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice}: two outputs cannot go to one file")
    given = [str(path) for path in inputs if path is not None]
    read = next((place for place in places if any(_reads(text, place) for text in given)), None)
    if read is not None and read.exists():
        raise ConfigError(f"{read}: is read as well; an output never replaces an input, name another file")
    if read is not None:
        raise ConfigError(f"{read}: lies in the dump that is read, and would be read with it; name a file beside it")


def or_stdout(output: Path | None, as_json: bool) -> tuple[Path | None, bool]:
    """The file of `-o`, and whether JSON goes to stdout: by `--json`, or by `-o -`.

    Raises:
        ConfigError: both are given.
    """
    output, printed = or_printed(output, as_json, "-o")
    return output, as_json or printed


def or_printed(place: Path | None, as_json: bool = False, flag: str = "--markdown") -> tuple[Path | None, bool]:
    """The file of a flag, and whether what it would hold goes to stdout: by `-` in its place.

    Raises:
        ConfigError: JSON goes there.
    """
    if str(place) != "-":
        return place, False
    if as_json:
        raise ConfigError(f"--json and {flag} - both write to stdout: give one of them")
    return None, True


def _reads(text: str, place: Path) -> bool:
    """Whether an argument names a file, as it is or by a pattern, or a folder in which it would be read."""
    for path in _named(text):
        if path.is_dir():
            inside = Path(os.path.realpath(place)).is_relative_to(os.path.realpath(path))
            if inside and place.suffix in _READ_IN_FOLDERS:
                return True
        elif path.exists() and place.exists() and os.path.samefile(path, place):
            return True
    return False


def _named(text: str) -> list[Path]:
    return [Path(text)] if os.path.exists(text) else [Path(found) for found in glob.glob(text, recursive=True)]


def holds_dump(folder: Path, inputs: Iterable[str | Path | None]) -> bool:
    """Whether files of a dump that is read lie in this very folder."""
    for path in (path for text in inputs if text is not None for path in _named(str(text))):
        held = path if path.is_dir() else path.parent
        is_read = path.is_dir() or path.suffix in _READ_IN_FOLDERS
        if is_read and os.path.realpath(held) == os.path.realpath(folder):
            return True
    return False


def on_disk(place: Path) -> Path:
    """The place, if it is one of this machine.

    Raises:
        ConfigError: it is an object, or its name is too long.
    """
    from mismatchctl.stores import normal, remote

    named = f"{place}/"  # as a Path, s3:// is s3:
    if remote(named):
        raise ConfigError(f"{normal(named)}: object stores are read, not written; name a place on a disk")
    try:
        os.lstat(place)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(f"{place}: the name is too long; choose a shorter one") from None
    return place


def _check_place(place: Path) -> None:
    if str(place) == "-":
        raise ConfigError("this cannot be written to stdout: name a file; --json prints there")
    on_disk(place)
    if not os.path.isdir(place.parent):  # unlike pathlib's, no error where a folder above may not be entered
        raise ConfigError(f"{place}: the folder {place.parent} does not exist; create it first")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{place}: the folder {place.parent} cannot be written")
    if place.is_dir():
        raise ConfigError(f"{place}: is a folder; name a file in it")
    if place.exists() and not place.is_file():
        raise ConfigError(f"{place}: is no regular file; name a file, or write to stdout with -o -")
