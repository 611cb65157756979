"""Which layout a file has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.files import natural_key
from mismatchctl.frameworks import SHELVES
from mismatchctl.frameworks.layout import Layout

LAYOUTS: dict[str, Layout] = {layout.framework: layout for shelf in SHELVES for layout in shelf.layouts}


def layouts(framework: str = "") -> Sequence[Layout]:
    """The layouts of a framework, or all.

    Raises:
        ConfigError: an unknown framework.
    """
    if framework and framework not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise ConfigError(f"--from {framework}: not known{suggestion(framework, LAYOUTS)}; there are {known}")
    return [LAYOUTS[framework]] if framework else list(LAYOUTS.values())


def candidates(place: Path, framework: str = "") -> list[Path]:
    """The files of a place that may be a framework's by their names, in natural order; hidden ones are left out.

    A file that is named itself, with its framework, may have any name.

    Raises:
        ConfigError: an unknown framework.
        DataError: a folder that cannot be listed.
    """
    patterns = [pattern for layout in layouts(framework) for pattern in layout.patterns]

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot be listed ({error.strerror})", file=str(error.filename))

    if place.is_file():
        return [place] if framework or _named(place, patterns) else []
    if not place.is_dir():
        return []
    files: list[Path] = []
    for folder, folders, names in os.walk(place, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        files += [Path(folder, name) for name in names if not name.startswith((".", "_"))]
    return sorted((path for path in files if _named(path, patterns)), key=lambda path: natural_key(str(path)))


def recognize(path: Path, framework: str = "") -> Layout | None:
    """How a file is read: by its name, then by its content; None where it is nobody's, or not of `framework`.

    A file that nobody recognizes is taken to be of `framework`.

    Raises:
        ConfigError: an unknown framework.
        DataError: it may be a framework's, and cannot be read.
    """
    from mismatchctl.dumps.foreign.file import OpenFile

    chosen = layouts(framework)[0] if framework else None
    if chosen is not None and chosen.recognizes(OpenFile(path)):
        return chosen
    found = next((one for one in layouts() if _named(path, one.patterns) and one.recognizes(OpenFile(path))), None)
    return found if chosen is None else chosen if found is None else None


def rollout_only(path: str) -> bool:
    """Whether a file's name, which may be that of Parquet, is one of those that hold no train log-probs."""
    return any(one.rollout_only and _named(Path(path), one.patterns) for one in LAYOUTS.values())


def _named(path: Path, patterns: Sequence[str]) -> bool:
    """Whether a file's name fits one of them, with as many folders above it as the pattern has."""
    parts = path.absolute().parts
    return any(fnmatch("/".join(parts[-pattern.count("/") - 1 :]), pattern) for pattern in patterns)
