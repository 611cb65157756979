"""Find the files of path arguments (files, folders, globs, Hive folders), and divide them into named runs."""

from __future__ import annotations

import bz2
import contextlib
import difflib
import glob
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from mismatchctl.data.formats import ARROW_MAGIC, SUFFIXES, MemoryTable, is_dump_file
from mismatchctl.data.importers.rows import COMPRESSED_SUFFIXES, find_candidates, is_rollout_only
from mismatchctl.data.importers.tables import is_table, table_files
from mismatchctl.errors import DataError
from mismatchctl.io.files import natural_key, read_first_bytes
from mismatchctl.io.stores import Store, escape_unprintable, find_store, format_names, normalize_path

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_HIVE_PATTERN = re.compile(r"([A-Za-z_][\w.-]*)=(.*)")
_STEP_WORDS = frozenset({"step", "steps", "iter", "iters", "iteration", "it", "update", "rollout", "batch", "epoch"})
_PART_WORDS = frozenset({"", "data", "dump", "part", "shard", "rank", "file", "chunk", "train"})
"""Files are one run if their names differ only in a number after one of these words, such as `part_1` and `part_2`."""
_RUN_WORDS = frozenset({"run", "seed", "exp", "experiment", "trial", "job", "v", "version", "rep", "arm", "model"})
_MANY = 8
"""If at least this number of names differ only in a number, the files are a run, except after words such as `seed`."""
_STEP = re.compile(r"(?:^|[^a-z])(?:step|global_?step|iter|iteration)[_=-]?0*(\d{1,18})(?![0-9])", re.IGNORECASE)

DumpSource = str | MemoryTable


@dataclass(frozen=True)
class UnopenedFile:
    """A file that was found for a run, but is not opened yet."""

    location: str
    path: str
    run: str
    partition: Mapping[str, str | None] = field(default_factory=dict)
    foreign: bool = False  # True if an importer must convert the file
    size: int | None = None  # of the original file, in bytes, if an importer converted it
    table: MemoryTable | None = None
    step: int | None = None  # number in the path, if the files of the run have different steps


@dataclass(frozen=True)
class _PathArgument:
    """The files of one run. The run gets the last parts of a path as its name, with enough parts to be unique."""

    shown: str
    files: tuple[str, ...]
    parts: tuple[str, ...]
    exact: tuple[str, ...]  # used instead of `parts` if another run has equal `parts`
    foreign: bool = False
    table: MemoryTable | None = None

    @classmethod
    def of(cls, shown: str, files: Iterable[str], named: str | None = None, foreign: bool = False) -> _PathArgument:
        """Build a path argument. Its run is named after the path `named` (default: `shown`)."""
        exact, ordered = _path_parts(shown), tuple(sorted(files, key=natural_key))
        return cls(shown, ordered, exact if named is None else _path_parts(named), exact, foreign)

    @property
    def is_file(self) -> bool:
        return self.files == (self.shown,)


_skipped_locations: ContextVar[frozenset[str]] = ContextVar("_passed_over", default=frozenset())


@contextlib.contextmanager
def skip_locations(locations: Iterable[str]) -> Iterator[None]:
    """Inside a `with` block, make `discover_files` leave out these files, because they are still being written."""
    token = _skipped_locations.set(frozenset(locations))
    try:
        yield
    finally:
        _skipped_locations.reset(token)


def discover_files(paths: Sequence[DumpSource]) -> tuple[list[UnopenedFile], list[str]]:
    """Find the files of the path arguments. Return them sorted by run and name (part2 before part10), and warnings."""
    arguments, warnings = _list_arguments(paths)
    names = _find_run_names(arguments)
    runs = sorted(zip(names, arguments, strict=True), key=lambda run: (natural_key(run[0]), run[1].shown))
    found: list[UnopenedFile] = []
    for name, argument in runs:
        run = escape_unprintable(name)
        if argument.table is not None:
            found.append(UnopenedFile("", argument.shown, run, table=argument.table))
            continue
        for file, step in zip(argument.files, _steps(argument.files), strict=True):
            location = find_store(file).location(file)
            if location not in _skipped_locations.get():
                shown, partition = escape_unprintable(file), _hive_values(file)
                found.append(UnopenedFile(location, shown, run, partition, argument.foreign, step=step))
    return found, [*warnings, *_list_hints([argument for _, argument in runs], found)]


_KNOWN_SUFFIXES = (*SUFFIXES, ".jsonl", ".ndjson", ".csv", ".npz", ".safetensors", ".pt")
_TEMPORARY_SUFFIXES = (".tmp", ".crc", ".part", ".inprogress", ".incomplete")
_OTHER_NAME = re.compile(rf"({'|'.join(map(re.escape, _KNOWN_SUFFIXES))})[~.].*|.*\.parq", re.IGNORECASE)
_LOG_PROB_LISTS = re.compile(
    rb"log_?probs?\"?\s*:\s*\[|log_?probs?[,\r\n]|PK\x03\x04.*log_?prob", re.IGNORECASE | re.DOTALL
)
_PACKED_NAME = re.compile(rb"\.(parquet|pq|arrow|feather|ipc|jsonl|ndjson)", re.IGNORECASE)
_MOST_LISTED = 20_000
"""Maximum number of files that `find_unread_files` checks, so that a large folder costs little time."""


def find_unread_files(paths: Sequence[DumpSource], found: Sequence[UnopenedFile]) -> tuple[list[str], list[str]]:
    """Find files in the given folders that look like dumps but are not read. Return their paths, and notes on them."""
    read = {os.path.realpath(file.location) for file in found if file.location}
    skipped = {os.path.realpath(place) for place in _skipped_locations.get()}
    folders = sorted({path for path in map(str, paths) if os.path.isdir(path)})
    unread, hidden = [], []
    files = (path for folder in folders for path in _walk_everything(folder))
    for number, (path, is_hidden) in enumerate(files):
        name = os.path.basename(path)
        if number >= _MOST_LISTED:
            break
        if os.path.realpath(path) in read | skipped:
            continue
        if is_hidden or name.lower().endswith(_TEMPORARY_SUFFIXES):
            hidden += [path] if any(suffix in name.lower() for suffix in _KNOWN_SUFFIXES) else []
        elif _is_unread_dump(path):
            unread.append(path)
    notes = []
    if hidden:
        count = f"{len(hidden)} hidden or temporary file{'s are' if len(hidden) > 1 else ' is'}"
        notes.append(f"{count} ignored by convention: {format_names(sorted(hidden))}")
    packed = [path for path in unread if path.endswith(COMPRESSED_SUFFIXES) and not Path(path).with_suffix("").exists()]
    if packed:
        notes.append(f"{format_names(sorted(packed))}: archives are not read; unpack archives that belong to the run")
    if others := sorted({*unread} - {*packed}):
        verb = "look like dumps and are" if len(others) > 1 else "looks like a dump and is"
        remedy = "Rename files of the dump, for example to NAME.parquet, and move other files away"
        notes.append(f"{format_names(others)} {verb} not read because of the file name. {remedy}")
    return sorted(map(escape_unprintable, unread)), notes


def _walk_everything(folder: str) -> Iterator[tuple[str, bool]]:
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        inside = os.path.relpath(place, folder).split(os.sep)
        is_hidden = any(part.startswith((".", "_")) and part != "." for part in inside)
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            yield os.path.normpath(os.path.join(place, name)), is_hidden or name.startswith((".", "_"))


def _unpacked(start: bytes) -> bytes:
    for magic, make in ((b"\x1f\x8b", lambda: zlib.decompressobj(31)), (b"BZh", bz2.BZ2Decompressor)):
        if start.startswith(magic):
            with contextlib.suppress(zlib.error, OSError, EOFError):
                return bytes(make().decompress(start, 1 << 16)) or start
    return start


def _is_unread_dump(path: str) -> bool:
    name = os.path.basename(path).lower()
    if _is_cache(name) or is_rollout_only(path):
        return False
    try:
        start = _unpacked(read_first_bytes(path, 1 << 16))
    except OSError:
        return False
    if start.startswith((b"PAR1", ARROW_MAGIC)) or (_OTHER_NAME.search(name) and start):
        return True
    if start.startswith(b"PK\x03\x04") and _PACKED_NAME.search(start):
        return True
    return name.endswith(_KNOWN_SUFFIXES) and _LOG_PROB_LISTS.search(start) is not None


def _list_arguments(sources: Sequence[DumpSource]) -> tuple[list[_PathArgument], list[str]]:
    """Return the files of each run, and notes for the user. If a path is given twice, its files are returned once."""
    known: dict[str, _PathArgument] = {}
    paths, strangers = set(), []
    for source in sources:
        if isinstance(source, MemoryTable):
            parts = str(source.number), source.run
            known[source.title] = _PathArgument(source.title, (source.title,), parts, parts, table=source)
        elif source:
            paths.add(normalize_path(source))
    for path in sorted(paths, key=lambda path: (len(path), path)):
        store = find_store(path)
        is_stranger = store.is_file(path) and not is_dump_file(path, store)
        if is_stranger and (path.endswith(COMPRESSED_SUFFIXES) or not _list_foreign_files(path)):
            strangers.append(path)  # `dumps/*` in a shell also matches a README next to the runs
            continue
        for argument in _expand_path(path):
            known.setdefault(store.resolve(os.sep.join(argument.exact)), argument)
    if not known:
        for path in strangers:
            _list_foreign_files(path)  # raises an error for compressed files
        if not strangers:
            raise DataError("no path was given", remedy="pass the files or the folder of a dump")
        remedy = "write Parquet, Arrow, JSONL, CSV, NPZ, safetensors or a .pt dict of columns (docs/guides/files.md)"
        raise DataError("this format is not supported", file=escape_unprintable(strangers[0]), remedy=remedy)
    notes = [f"ignored, since they are not dumps: {format_names(sorted(strangers))}"] if strangers else []
    arguments, joined = _series(list(known.values()))
    return arguments, [*notes, *joined]


def _series(arguments: Sequence[_PathArgument]) -> tuple[list[_PathArgument], list[str]]:
    groups: defaultdict[tuple[str, str, bool, bool], list[_PathArgument]] = defaultdict(list)
    for argument in arguments:
        folder, name = os.path.split(argument.shown)
        pattern = "" if argument.table is not None or glob.has_magic(argument.shown) else re.sub(r"[0-9]+", "*", name)
        groups[folder, pattern, argument.is_file, argument.foreign].append(argument)
    found, notes = [], []
    for (folder, pattern, is_file, foreign), alike in groups.items():
        names = [os.path.basename(argument.shown) for argument in alike]
        if "*" not in pattern or len(alike) < 2 or not _is_series(names, is_file):
            found += alike
            continue
        files, shown = {file for argument in alike for file in argument.files}, os.path.join(folder, pattern)
        found.append(_PathArgument.of(shown, files, folder or ".", foreign))
        what = "files" if is_file else "folders"
        notes.append(
            f"{len(alike)} {what} {escape_unprintable(shown)} are read as one run (to compare the {what}, use compare)"
        )
    return found, notes


def _is_series(names: Sequence[str], files: bool) -> bool:
    numbers = [re.findall(r"[0-9]+", name) for name in names]
    differ = [place for place, values in enumerate(zip(*numbers, strict=True)) if len(set(values)) > 1]
    if len(differ) != 1:
        return False
    before = re.split(r"[0-9]+", names[0])[differ[0]]
    word = before.lower().rstrip("_-=. ")
    word = word[len(word.rstrip("abcdefghijklmnopqrstuvwxyz")) :]
    if word in _STEP_WORDS or word.endswith("step"):
        return True
    return files and (word in _PART_WORDS or (word not in _RUN_WORDS and len(names) >= _MANY))


def _steps(files: Sequence[str]) -> list[int | None]:
    found = [int(steps[-1]) if (steps := _STEP.findall(file)) else None for file in files]
    return found if None not in found and len(set(found)) > 1 else [None] * len(files)


def _expand_path(path: str) -> Iterator[_PathArgument]:
    store = find_store(path)
    if store.is_folder(path):
        yield _folder_argument(path)
    elif store.is_file(path):
        yield _PathArgument.of(path, [path], os.path.splitext(path)[0], not _is_dump_path(path, store))
    elif glob.has_magic(path):
        yield from _expand_glob(path)
    else:
        raise _missing_path_error(path)


def _folder_argument(path: str) -> _PathArgument:
    if files := _list_files(path):
        return _PathArgument.of(path, files)
    if foreign := _list_foreign_files(path):
        return _PathArgument(path, foreign, _path_parts(path), _path_parts(path), True)
    store = find_store(path)
    names = sorted(store.list_names(path), key=natural_key)
    what = f"contains no dump, only {format_names(names)}" if names else "is empty"
    remedy = "pass a folder of Parquet, Arrow, JSONL, CSV, NPZ, safetensors or .pt files"
    if store.remote:
        remedy += ", or copy a framework's files to a disk"
    raise DataError(f"this folder {what}", file=escape_unprintable(path), remedy=remedy)


def _list_foreign_files(path: str) -> tuple[str, ...]:
    if find_store(path).remote:
        return ()
    return tuple(os.path.normpath(file) for file in find_candidates(Path(path)) or table_files(Path(path)))


def contains_dump(path: str) -> bool:
    store = find_store(path)
    return bool(_list_files(path)) if store.is_folder(path) else store.is_file(path) and _is_dump_path(path, store)


def _is_dump_path(path: str, store: Store) -> bool:
    return is_dump_file(path, store) and not is_rollout_only(path)


def _list_files(path: str) -> list[str]:
    """Return the dump files and broken links below a folder, without cache files of the library `datasets`."""
    store = find_store(path)
    dumps = (file for file in store.walk(path) if file.lower().endswith(SUFFIXES) and not is_rollout_only(file))
    found = [
        file
        for file in dumps
        if not (_is_cache(os.path.basename(file)) and os.path.exists(os.path.join(os.path.dirname(file), "state.json")))
    ]
    lost = (link for link in store.walk(path) if not os.path.splitext(link)[1] and store.is_broken_link(link))
    return [*found, *lost] if found and not store.remote else found


def _is_cache(name: str) -> bool:
    return name.startswith("cache-") and name.endswith(".arrow")


def _expand_glob(pattern: str) -> Iterator[_PathArgument]:
    """Expand a glob into runs: all files, or else all `step=*` folders, are one run, and each other folder is a run."""
    store = find_store(pattern)
    found, hidden = store.glob(pattern), os.path.basename(pattern).startswith("_")
    matches = [path for path in sorted(found, key=natural_key) if hidden or not os.path.basename(path).startswith("_")]
    for path in matches:
        if store.is_broken_link(path) and not path.lower().endswith(SUFFIXES):
            raise _missing_path_error(path)
    files = [path for path in matches if found[path] and path.lower().endswith(SUFFIXES)]
    folders = [path for path in matches if not found[path]] if not files else []
    foreign = not files and not folders and not store.remote
    if foreign:
        files = [path for path in matches if find_candidates(Path(path)) or is_table(Path(path))]
    for folder in folders:
        if _HIVE_PATTERN.fullmatch(os.path.basename(folder)):
            files.extend(_list_files(folder))
        else:
            yield _folder_argument(folder)
    if files:
        fixed = pattern
        while glob.has_magic(fixed):
            fixed = os.path.dirname(fixed)
        yield _PathArgument.of(pattern, files, fixed, foreign)
    elif not folders:
        what = f"matches no dump, only {format_names(matches)}" if matches else "matches nothing"
        raise DataError(f"this pattern {what}", file=escape_unprintable(pattern), remedy=_suggest_path(pattern))


def _missing_path_error(path: str) -> DataError:
    store = find_store(path)
    if store.is_broken_link(path):
        return store.explain(FileNotFoundError(), path)
    try:
        os.stat("" if store.remote else path)
    except PermissionError as error:
        return store.explain(error, path)
    except (OSError, ValueError):
        problem = "the file or folder does not exist"
        return DataError(problem, file=escape_unprintable(path), remedy=_suggest_path(path))
    return DataError("this path is neither a file nor a folder", file=escape_unprintable(path), remedy="pass a dump")


def _suggest_path(path: str) -> str:
    store = find_store(path)
    parent, name = os.path.split(path)
    while parent and parent.strip("/") and not store.is_folder(parent):
        parent, name = os.path.split(parent)
    if store.remote and parent.count("/") < 2:
        return "check the name of the bucket"
    names = [entry for entry in store.list_names(parent) if not entry.startswith(".")]
    where = escape_unprintable(parent) if parent else "the current folder"
    close = difflib.get_close_matches(name, names, n=5)
    if close:
        return f"similar names in {where}: {format_names(close)}"
    return f"{where} contains {format_names(sorted(names, key=natural_key))}" if names else f"{where} is empty"


def _path_parts(path: str) -> tuple[str, ...]:
    return tuple(find_store(path).location(path).split(os.sep))


def _find_run_names(arguments: Sequence[_PathArgument]) -> list[str]:
    shared = Counter(argument.parts for argument in arguments)
    parts = [argument.parts if shared[argument.parts] == 1 else argument.exact for argument in arguments]
    names = []
    for mine in parts:
        depth = 1
        while depth < len(mine) and sum(other[-depth:] == mine[-depth:] for other in parts) > 1:
            depth += 1
        names.append("/".join(mine[-depth:]) or "/")
    return names


def _hive_values(path: str) -> dict[str, str | None]:
    matches = (_HIVE_PATTERN.fullmatch(name) for name in path.split(os.sep)[:-1])
    pairs = {match[1]: unquote(match[2]) for match in matches if match}
    return {key: None if value == HIVE_NULL else value for key, value in pairs.items()}


def _list_hints(arguments: Sequence[_PathArgument], found: Sequence[UnopenedFile]) -> Iterator[str]:
    for argument in arguments:
        places: defaultdict[str, set[str]] = defaultdict(set)
        for file in argument.files:
            folder, name = os.path.split(file)
            parts = (part for part in folder.split(os.sep) if not _HIVE_PATTERN.fullmatch(part))
            places[name].add(os.sep.join(part for part in parts if not _STEP.fullmatch(part)))
        name, folders = max(places.items(), key=lambda item: len(item[1]))
        if len(folders) > 1:
            yield (
                f"{escape_unprintable(argument.shown)} is read as one run, but {len(folders)} of its folders contain a "
                f"file {escape_unprintable(name)}; to compare the folders as runs, pass each folder"
            )
    for location, times in Counter(file.location for file in found if file.location).items():
        if times > 1:
            yield f"{escape_unprintable(location)} is part of {times} of the given paths and is read once for each path"
