"""Which layout a file has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.files import natural_key
from mismatchctl.frameworks import shelves
from mismatchctl.frameworks.layout import FileLayout
from mismatchctl.stores import printable

PACKED = (".gz", ".zst", ".bz2", ".xz", ".lz4")


@cache
def all_layouts() -> dict[str, FileLayout]:
    """Every framework's layouts by name."""
    return {layout.framework: layout for shelf in shelves() for layout in shelf.layouts}


def layouts(framework: str = "") -> Sequence[FileLayout]:
    """The layouts of a framework, or all.

    Raises:
        ConfigError: an unknown framework.
    """
    if framework and framework not in all_layouts():
        known = ", ".join(all_layouts())
        raise ConfigError(f"--from {framework}: not known{suggestion(framework, all_layouts())}; there are {known}")
    return [all_layouts()[framework]] if framework else list(all_layouts().values())


def candidates(place: Path, framework: str = "") -> list[Path]:
    """The files of a place that may be a framework's by their names, in natural order; hidden ones are left out.

    A file that is named itself, with its framework, may have any name.

    Raises:
        ConfigError: an unknown framework.
        DataError: a folder that cannot be listed, or of which all such files are packed.
    """
    found = [path for path in _called(place, framework) if path.suffix not in PACKED]
    if not found and (lost := packed(place, framework)):
        raise DataError("is packed, and only what is unpacked is read", file=str(lost[0]), remedy="unpack it")
    return found


def packed(place: Path, framework: str = "") -> list[Path]:
    """The files of a place that may be a framework's once they are unpacked; in a folder, those not there unpacked too.

    Raises:
        ConfigError: an unknown framework.
        DataError: a folder that cannot be listed.
    """
    files = [path for path in _called(place, framework) if path.suffix in PACKED]
    return [path for path in files if path == place or not _unpacked(path).exists()]


def packed_note(place: Path, framework: str = "") -> list[str]:
    """What to say of the packed files of a place of which others are read; nothing where there are none."""
    lost = packed(place, framework)
    more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
    return [f"{printable(str(lost[0]))}{more}: packed, so not read; unpack what belongs to the run"] if lost else []


def _called(place: Path, framework: str) -> list[Path]:
    """The files of a place with a framework's names, or such names packed."""
    patterns = [pattern for layout in layouts(framework) for pattern in layout.patterns]

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot be listed ({error.strerror})", file=str(error.filename))

    if place.is_file():
        return [place] if framework or _named(_unpacked(place), patterns) else []
    if not place.is_dir():
        return []
    files: list[Path] = []
    for folder, folders, names in os.walk(place, onerror=refuse):
        folders[:] = [one for one in folders if not one.startswith((".", "_"))]
        files += [Path(folder, one) for one in names if not one.startswith((".", "_"))]
    return sorted(
        (path for path in files if _named(_unpacked(path), patterns)), key=lambda path: natural_key(str(path))
    )


def _unpacked(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in PACKED else path


def recognize(path: Path, framework: str = "") -> FileLayout | None:
    """How a file is read: by its name, then by its content; None where it is nobody's, or not of `framework`.

    A file that nobody recognizes is taken to be of `framework`.

    Raises:
        ConfigError: an unknown framework.
        DataError: it may be a framework's, and cannot be read.
    """
    from mismatchctl.dumps.foreign.file import OpenFile

    chosen = layouts(framework)[0] if framework else None
    file = OpenFile(path)

    def fits(layout: FileLayout) -> bool:
        return (not layout.keys or file.holds(*layout.keys)) and layout.recognizes(file)

    if chosen is not None and fits(chosen):
        return chosen
    found = next((one for one in layouts() if _named(path, one.patterns) and fits(one)), None)
    return found if chosen is None else chosen if found is None else None


def refuse_incomplete(path: Path) -> None:
    """Refuse a file that nobody recognizes, where it is most like one framework's that lacks what tells it.

    Raises:
        DataError: it is.
    """
    from mismatchctl.dumps.foreign.file import OpenFile

    if not any(one.keys and _named(path, one.patterns) for one in layouts()):
        return
    file = OpenFile(path)
    names = {name: {*one.keys, *one.columns.values()} for name, one in all_layouts().items()}
    alike = {name: sum(map(file.holds, names[name])) for name in all_layouts()}
    most, next_one = sorted(alike, key=alike.__getitem__, reverse=True)[:2]
    lacks = [name for name in all_layouts()[most].keys if not file.holds(name)]
    if lacks and alike[most] > max(alike[next_one], len(names[most]) / 2):
        problem = f"has most of what files of {most} have, and no {', '.join(lacks)}"
        remedy = f"save it too, or name another framework with convert --from: {', '.join(all_layouts())}"
        raise DataError(problem, file=str(path), remedy=remedy)


def rollout_only(path: str) -> bool:
    """Whether a file's name, which may be that of Parquet, is one of those that hold no train log-probs."""
    return any(one.rollout_only and _named(Path(path), one.patterns) for one in all_layouts().values())


def _named(path: Path, patterns: Sequence[str]) -> bool:
    """Whether a file's name fits one of them, with as many folders above it as the pattern has."""
    parts = path.absolute().parts
    return any(fnmatch("/".join(parts[-pattern.count("/") - 1 :]), pattern) for pattern in patterns)
