"""From path arguments to files: folders, globs, Hive folders, run names and the canonical order.

Everything here is about names. What a file holds is found elsewhere, so that another kind of storage or
file only needs to produce `Found` values.
"""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from mismatchctl.errors import DataError
from mismatchctl.files import natural_key
from mismatchctl.frameworks.importers.registry import candidates, rollout_only

SUFFIXES = (".parquet", ".pq")
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_HIVE = re.compile(r"([A-Za-z_][\w.-]*)=(.*)")
_SHOWN_NAMES = 5


@dataclass(frozen=True)
class Found:
    """One file of a run, not yet opened.

    Attributes:
        location: absolute path, to open it.
        path: the path as shown to users; free of control characters.
        run: the run that its path argument names.
        partition: values from Hive folders (`step=12/`), as text; None where the folder says null.
        foreign: whether it is in a framework's own layout, and no Parquet.
        size: bytes of the original, where `location` is of its conversion.
    """

    location: str
    path: str
    run: str
    partition: Mapping[str, str | None] = field(default_factory=dict)
    foreign: bool = False
    size: int | None = None


@dataclass(frozen=True)
class _Argument:
    """One run: what names it, and its files as paths the way the user wrote them.

    `parts` is what the run's name is cut from; `exact` tells two arguments with the same parts apart. `foreign` says
    that the files are in a framework's own layout.
    """

    shown: str
    parts: tuple[str, ...]
    exact: tuple[str, ...]
    files: tuple[str, ...]
    foreign: bool = False

    @property
    def is_file(self) -> bool:
        return self.files == (self.shown,)


def printable(text: str) -> str:
    """The text with control characters and undecodable bytes escaped, safe to show in a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def discover(paths: Sequence[str]) -> tuple[list[Found], list[str]]:
    """Find the files behind the path arguments, in canonical order, and what to warn about.

    The order depends on the names only: runs in natural order, then files in natural order.

    Raises:
        DataError: a path that leads to no Parquet file.
    """
    arguments, warnings = _arguments(paths)
    names = _run_names(arguments)
    runs = sorted(zip(names, arguments, strict=True), key=lambda run: (natural_key(run[0]), run[1].shown))
    found = [
        Found(os.path.abspath(file), printable(file), printable(name), _partition(file), argument.foreign)
        for name, argument in runs
        for file in argument.files
    ]
    return found, [*warnings, *_hints([argument for _, argument in runs], found)]


def _arguments(paths: Sequence[str]) -> tuple[list[_Argument], list[str]]:
    """One argument per run; the same path named twice counts once, whichever spelling came first."""
    known: dict[str, _Argument] = {}
    strangers = []
    for path in sorted({os.path.normpath(path) for path in paths if path}, key=lambda path: (len(path), path)):
        if os.path.isfile(path) and not _is_parquet(path) and not _foreign(path):
            strangers.append(path)  # `dumps/*` in a shell also names the README beside the runs
            continue
        for argument in _expand(path):
            known.setdefault(os.path.realpath(os.sep.join(argument.exact)), argument)
    if not known:
        if not strangers:
            raise DataError("no path was given", remedy="name files or folders that hold Parquet files")
        raise DataError(
            "this is not a Parquet file",
            file=printable(strangers[0]),
            remedy="name a .parquet file or a folder of them (`mismatchctl convert` reads other formats)",
        )
    ignored = f"not Parquet, ignored: {_some(sorted(strangers))}"
    return list(known.values()), [ignored] if strangers else []


def _expand(path: str) -> Iterator[_Argument]:
    """The arguments that one path stands for: itself, or what its wildcards match."""
    if "://" in path or re.match(r"[a-z0-9]+:/[^/]", path):
        raise DataError("object stores are not read", file=printable(path), remedy="copy the files to a disk")
    if os.path.isdir(path):
        yield _folder(path)
    elif os.path.isfile(path):
        parts = _parts(path)
        yield _Argument(path, (*parts[:-1], os.path.splitext(parts[-1])[0]), parts, (path,), not _is_parquet(path))
    elif glob.has_magic(path):
        yield from _glob(path)
    else:
        raise _absent(path)


def _folder(path: str) -> _Argument:
    files = tuple(sorted(_walk(path), key=natural_key))
    if not files and (foreign := _foreign(path)):
        return _Argument(path, _parts(path), _parts(path), foreign, True)
    if not files:
        names = sorted(os.listdir(path), key=natural_key)
        problem = f"this folder holds no Parquet file, only {_some(names)}" if names else "this folder is empty"
        raise DataError(problem, file=printable(path), remedy=f"name a folder that holds {' or '.join(SUFFIXES)} files")
    return _Argument(path, _parts(path), _parts(path), files)


def _foreign(path: str) -> tuple[str, ...]:
    """Files that may be in a framework's own layout, by their names."""
    return tuple(os.path.normpath(file) for file in candidates(Path(path)))


def _walk(path: str) -> Iterator[str]:
    """Parquet files below a folder. Links are followed once; hidden names and `_names` are left out."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot be listed ({error.strerror})", file=printable(str(error.filename)))

    seen: set[str] = set()
    for folder, folders, names in os.walk(path, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        for name in names:
            path = os.path.normpath(os.path.join(folder, name))
            if name.lower().endswith(SUFFIXES) and not name.startswith((".", "_")) and not rollout_only(path):
                yield path


def _glob(pattern: str) -> Iterator[_Argument]:
    """Files of a glob are one run, named by its fixed folder; folders are a run each, as from a shell.

    Hive folders (`step=*`) are parts of one run, not runs.
    """
    matches = sorted(glob.glob(pattern, recursive=True), key=natural_key)
    if not os.path.basename(pattern).startswith("_"):
        matches = [path for path in matches if not os.path.basename(path).startswith("_")]
    files = [path for path in matches if os.path.isfile(path) and path.lower().endswith(SUFFIXES)]
    folders = [path for path in matches if os.path.isdir(path)] if not files else []
    for folder in folders:
        if _HIVE.fullmatch(os.path.basename(folder)):
            files.extend(_walk(folder))
        else:
            yield _folder(folder)
    if files:
        fixed = pattern
        while glob.has_magic(fixed):
            fixed = os.path.dirname(fixed)
        yield _Argument(pattern, _parts(fixed), _parts(pattern), tuple(sorted(files, key=natural_key)))
    elif not folders:
        what = f"matches no Parquet file, only {_some(matches)}" if matches else "matches nothing"
        raise DataError(f"this pattern {what}", file=printable(pattern), remedy=_near(pattern))


def _absent(path: str) -> DataError:
    problem = "this is not a file or folder" if os.path.lexists(path) else "there is no such file or folder"
    return DataError(problem, file=printable(path), remedy=_near(path))


def _near(path: str) -> str:
    """What to say about a path that does not exist: the nearest names where it stops existing."""
    parent, name = os.path.split(path)
    while parent and not os.path.isdir(parent):
        parent, name = os.path.split(parent)
    try:
        names = [entry for entry in os.listdir(parent or ".") if not entry.startswith(".")]
    except OSError:
        names = []
    where = printable(parent) if parent else "the current folder"
    close = difflib.get_close_matches(name, names, n=_SHOWN_NAMES)
    if close:
        return f"near names in {where}: {_some(close)}"
    return f"{where} holds {_some(sorted(names, key=natural_key))}" if names else f"{where} is empty"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(printable(name) for name in names[:_SHOWN_NAMES]) + more


def _is_parquet(path: str) -> bool:
    """By its name, else by its first bytes: writers such as Spark or Ray may leave the suffix out."""
    if path.lower().endswith(SUFFIXES):
        return True
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as error:
        raise DataError(f"cannot be opened ({error.strerror})", file=printable(path)) from error


def _parts(path: str) -> tuple[str, ...]:
    return tuple(os.path.abspath(path).split(os.sep))


def _run_names(arguments: Sequence[_Argument]) -> list[str]:
    """The shortest trailing part of each argument's path that no other argument shares."""
    shared = Counter(argument.parts for argument in arguments)
    parts = [argument.parts if shared[argument.parts] == 1 else argument.exact for argument in arguments]
    names = []
    for mine in parts:
        depth = 1
        while depth < len(mine) and sum(other[-depth:] == mine[-depth:] for other in parts) > 1:
            depth += 1
        names.append("/".join(mine[-depth:]) or "/")
    return names


def _partition(path: str) -> dict[str, str | None]:
    """Values from `key=value` folders on the way to the file."""
    matches = (_HIVE.fullmatch(name) for name in path.split(os.sep)[:-1])
    pairs = {match[1]: unquote(match[2]) for match in matches if match}
    return {key: None if value == HIVE_NULL else value for key, value in pairs.items()}


def _hints(arguments: Sequence[_Argument], found: Sequence[Found]) -> Iterator[str]:
    """What probably was not meant: steps that became runs, runs that became one, a file in two runs."""
    siblings: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for argument in arguments:
        folder, name = os.path.split(argument.shown)
        if argument.is_file or _HIVE.fullmatch(name):
            siblings[folder, re.sub(r"[0-9]+", "*", name)].append(name)
    for (folder, pattern), names in sorted(siblings.items()):
        if len(names) > 1 and "*" in pattern:
            where = os.path.join(folder, pattern)
            yield (
                f"{len(names)} paths like {printable(where)} were named one by one, so each is a run of "
                f"its own; name the folder {printable(folder or '.')} or quote the pattern for one run"
            )
    for argument in arguments:
        places: defaultdict[str, set[str]] = defaultdict(set)
        for file in argument.files:
            folder, name = os.path.split(file)
            places[name].add(os.sep.join(part for part in folder.split(os.sep) if not _HIVE.fullmatch(part)))
        name, folders = max(places.items(), key=lambda item: len(item[1]))
        if len(folders) > 1:
            yield (
                f"{printable(argument.shown)} is read as one run, but {len(folders)} of its folders hold a "
                f"file {printable(name)}; name the folders one by one to set them side by side as runs"
            )
    for location, times in Counter(file.location for file in found).items():
        if times > 1:
            yield f"{printable(location)} belongs to {times} of the paths that were named and is read in each"
