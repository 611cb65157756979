"""Which importer reads which file."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.frameworks.importers import areal, nemo_rl, openrlhf, prime_rl, roll, skyrl, slime, trl
from mismatchctl.frameworks.importers.layout import Layout

LAYOUTS: dict[str, Layout] = {
    module.LAYOUT.framework: module.LAYOUT for module in (areal, nemo_rl, openrlhf, prime_rl, roll, skyrl, slime, trl)
}


def sources(place: Path, framework: str = "") -> list[tuple[Path, Layout]]:
    """The files of a place and how each is read, in the order of their names.

    Raises:
        ConfigError: an unknown framework.
        DataError: nothing there is recognized.
    """
    if framework and framework not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise ConfigError(f"--from {framework}: not known{suggestion(framework, LAYOUTS)}; there are {known}")
    if not place.exists():
        raise DataError("there is no such file or folder", file=str(place))
    layouts = [LAYOUTS[framework]] if framework else list(LAYOUTS.values())
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    found = [(path, layout) for path in files for layout in layouts if _fits(path, layout, bool(framework))]
    if not found:
        known = ", ".join(LAYOUTS)
        raise DataError("holds no file that is recognized", file=str(place), remedy=f"name its framework: {known}")
    return sorted(found, key=lambda pair: _natural(pair[0]))


def _fits(path: Path, layout: Layout, told: bool) -> bool:
    named = any(fnmatch(path.name, pattern) for pattern in layout.patterns)
    return named and (told or layout.recognizes(path))


def _natural(path: Path) -> list[tuple[int, int, str]]:
    import re

    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", str(path)) if part
    ]
