"""The catalog of a dump: open all files and check that their columns agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from mismatchctl.core.schema import COLUMNS, COLUMNS_BY_NAME, REQUIRED_COLUMNS, VERSION_COLUMNS
from mismatchctl.data.arrays import NULL_TYPE, describe_comparable_type, describe_type, plain_type
from mismatchctl.data.files import ColumnNames, DumpFile, FileFooter, HiveValue, identify_columns, read_footer
from mismatchctl.data.paths import UnopenedFile
from mismatchctl.data.problems import Problems
from mismatchctl.errors import ConfigError, DataError, option, suggestion
from mismatchctl.io.stores import escape_unprintable, is_remote, map_requests

ALWAYS_READ_COLUMNS = (
    "response_mask",
    "run",
    "step",
    "sequence_id",
    "prompt_id",
    "reward",
    "micro_batch",
    "rollout_ids",
)
"""Optional columns that are read if a file has them."""

_SHOWN_FILES = 3


@dataclass
class Catalog:
    """Usable files, and the problems of the other files."""

    files: list[DumpFile] = field(default_factory=list)
    footers: list[FileFooter] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    notes: list[str] = field(default_factory=list)

    def reject(self, error: DataError, skip: bool) -> None:
        """Record a file as left out, or raise its error if `skip` is False."""
        if not skip:
            raise error
        place = "" if error.column is None else f"column {error.column}: "
        self.problems.add_file(error.file or "-", f"{place}{error.problem}")


def build_catalog(found: Sequence[UnopenedFile], names: ColumnNames, wanted: Collection[str], skip: bool) -> Catalog:
    """Open all files. Unusable files raise an error, or are left out with `skip`.

    Raises:
        DataError: a file cannot be used and `skip` is False.
        ConfigError: a `--by` column is missing or has the wrong type.
    """
    result = Catalog()
    ready: list[UnopenedFile] = []
    for one in _convert_foreign(found, skip, result.notes.append):
        if isinstance(one, DataError):
            result.reject(one, skip)
        else:
            ready.append(one)
    for footer in _read_footers(ready):
        if isinstance(footer, DataError):
            result.reject(footer, skip)
        else:
            result.footers.append(footer)
    partitions = _partition_values(result.footers, names)
    for footer, values in zip(result.footers, partitions, strict=True):
        try:
            result.files.append(identify_columns(footer, 0, names, values))
        except DataError as error:
            result.reject(error, skip)
    _check_by(result, names)
    _check_agreement(result, list(dict.fromkeys((*REQUIRED_COLUMNS, *ALWAYS_READ_COLUMNS, *wanted, *names.by))), skip)
    result.files = [replace(file, index=index) for index, file in enumerate(result.files)]
    return result


def _convert_foreign(
    found: Sequence[UnopenedFile], skip: bool, note: Callable[[str], None]
) -> Iterable[UnopenedFile | DataError]:
    """Convert framework files to Parquet. The importers are imported only if there is such a file."""
    if not any(one.foreign for one in found):
        return found
    from mismatchctl.data.importers.sources import convert_foreign_files

    return convert_foreign_files(found, skip, note)


def _read_footers(found: Sequence[UnopenedFile]) -> Iterator[FileFooter | DataError]:
    def read(one: UnopenedFile) -> FileFooter | DataError:
        try:
            return read_footer(one)
        except DataError as error:
            return error

    return map_requests(read, found, over_network=any(is_remote(one.location) for one in found))


def require_files(catalog: Catalog, names: ColumnNames) -> None:
    """Raise if no file is left, or if no file has a column named with `--column`.

    Raises:
        DataError: no file is left, or a column is missing.
    """
    footers = catalog.footers
    if not catalog.files:
        path, problem = next(iter(catalog.problems.files.items()))
        raise DataError(f"no file can be used; the first one: {problem}", file=path)
    present = {name for footer in footers for name in footer.types}
    for column, actual in names.rename.items():
        if actual not in present:
            near = escape_unprintable(suggestion(actual, sorted(present)))
            shown = escape_unprintable(actual)
            problem = f"{option('columns', {column: shown})}: no file has a column {shown}{near}"
            listed = ", ".join(sorted(escape_unprintable(name) for name in footers[0].types))
            raise DataError(problem, file=footers[0].found.path, remedy=f"its columns are {listed}")


def _partition_values(footers: Sequence[FileFooter], names: ColumnNames) -> list[dict[str, HiveValue]]:
    """Return the Hive values of each file. A key is an integer if it is one in every folder."""
    raw = [{names.canonical(key): value for key, value in footer.found.partition.items()} for footer in footers]
    words: defaultdict[str, set[str]] = defaultdict(set)
    for values in raw:
        for key, value in values.items():
            if value is not None:
                words[key].add(value)
    whole = {key for key, texts in words.items() if all(_is_integer(text) for text in texts)}
    return [
        {
            key: int(value) if key in whole else escape_unprintable(value)
            for key, value in values.items()
            if value is not None
        }
        for values in raw
    ]


def _is_integer(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit() and len(text) < 19


def _check_by(found: Catalog, names: ColumnNames) -> None:
    """Raise if a `--by` column is missing or does not have one value per sequence."""
    for name in names.by:
        holders = [file for file in found.files if name in file.columns]
        for file in [] if name in VERSION_COLUMNS else holders:
            if pa.types.is_nested(plain_type(file.types[name])) or (file.layout == "long" and _is_per_token(name)):
                what = "one value per token" if file.layout == "long" else describe_type(file.types[name])
                raise ConfigError(
                    f"{option('by', escape_unprintable(name))}: the column holds {what} in {file.path}; "
                    "a column to break down by has one value per sequence"
                )
        if found.files and not holders and name != "run" and not any(name in file.partition for file in found.files):
            known = {text for file in found.files for text in (*file.columns, *file.partition)}
            known.update(text for footer in found.footers for text in footer.types)
            near = escape_unprintable(suggestion(name, sorted(known)))
            raise ConfigError(f"{option('by', escape_unprintable(name))}: no file has a column of this name{near}")


def _is_per_token(name: str) -> bool:
    column = COLUMNS_BY_NAME.get(name)
    return name == "position" or (column is not None and column.per_token)


def _check_agreement(found: Catalog, used: Sequence[str], skip: bool) -> None:
    """Reject files whose column types differ from the rest of their run."""
    runs: defaultdict[str, list[DumpFile]] = defaultdict(list)
    for file in found.files:
        runs[file.run].append(file)
    odd: dict[int, DataError] = {}
    for files in runs.values():
        for column in used:
            for file, error in _find_deviating_files(files, column):
                odd.setdefault(id(file), error)
    for file in found.files:
        if id(file) in odd:
            found.reject(odd[id(file)], skip)
    found.files = [file for file in found.files if id(file) not in odd]


def _find_deviating_files(files: Sequence[DumpFile], column: str) -> Iterator[tuple[DumpFile, DataError]]:
    kinds = {
        id(file): describe_comparable_type(COLUMNS_BY_NAME.get(column), file.types[column])
        for file in files
        if column in file.types
    }
    kinds = {number: words for number, words in kinds.items() if not words.endswith(NULL_TYPE)}
    if len(set(kinds.values())) < 2:
        return
    usual, times = Counter(kinds.values()).most_common(1)[0]  # of equals, the one seen first
    example = next(file for file in files if kinds.get(id(file)) == usual)
    others = f" and {times - 1} more" if times > 1 else ""
    for file in files:
        if kinds.get(id(file), usual) != usual:
            yield (
                file,
                DataError(
                    f"holds {kinds[id(file)]} here but {usual} in {example.path}{others}",
                    file=file.path,
                    column=escape_unprintable(file.columns[column]),
                    remedy=f"write the files of a run alike, or leave unfit files out with {option('on_bad', 'skip')}",
                ),
            )


def list_warnings(files: Sequence[DumpFile]) -> Iterator[str]:
    """Yield warnings about optional columns that cannot be used or that only some files have."""
    ignored: dict[str, list[str]] = {}
    for file in files:
        for column, problem in file.ignored.items():
            ignored.setdefault(f"{column}: ignored, since it {problem}", []).append(file.path)
    for text, paths in ignored.items():
        yield f"{text} (in {_format_paths(paths)})"
    for column in [column.name for column in COLUMNS if not column.required and column.name != "position"]:
        without = [file.path for file in files if column not in file.columns and column not in file.partition]
        if without and len(without) < len(files):
            with_it = len(files) - len(without)
            yield f"{column}: in {with_it} of {len(files)} files, used there; not in {_format_paths(without)}"


def _format_paths(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN_FILES} more" if len(paths) > _SHOWN_FILES else ""
    return ", ".join(paths[:_SHOWN_FILES]) + more
