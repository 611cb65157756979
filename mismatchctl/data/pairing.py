"""Two files, one per side, as one table: the rollout's log-probs and the trainer's, matched by an id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mismatchctl.core.schema import COLUMNS_BY_NAME, ColumnKind
from mismatchctl.data.files import read_footer
from mismatchctl.data.formats import MemoryTable
from mismatchctl.data.importers.responses import PROMPT_LOG_PROBS
from mismatchctl.data.importers.tables import is_engine_file, is_table, read_table, with_prompt_ids
from mismatchctl.data.paths import UnopenedFile
from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.io.stores import escape_unprintable, find_store

IDS = ("sequence_id", "id", "request_id", "custom_id")
"""Groups of equivalent names. An id is searched under each name of its group."""
_GENERIC = ("logprobs", "log_probs", "token_logprobs", "token_log_probs", "logprob", "log_prob")
"""Names of log-probs that do not name a side. The option of the file determines the side."""
_SHOWN = 5


@dataclass(frozen=True)
class PairedTable:
    """Both sides as one table."""

    table: pa.Table
    notes: tuple[str, ...] = ()

    def source(self, rollout: Path, train: Path) -> MemoryTable:
        return MemoryTable.of(self.table, f"{rollout} with {train}", run=rollout.stem)


def pair(rollout: Path, train: Path, on: Sequence[str] = ()) -> PairedTable:
    sides = (_Side.read(rollout, "rollout_log_probs"), _Side.read(train, "train_log_probs"))
    keys = on or _common_id(*sides)
    places = [side.index(keys) for side in sides]
    shared = [key for key in places[0] if key in places[1]]
    if not shared:
        examples = " and ".join(
            f"{side.name} has {_named(list(found)[:2])}" for side, found in zip(sides, places, strict=True)
        )
        raise DataError(f"no {', '.join(keys)} occurs in the two files: {examples}", file=str(rollout))
    notes = []
    for here, there in ((0, 1), (1, 0)):
        if alone := [key for key in places[here] if key not in places[there]]:
            which = f"{len(alone):,} of {len(places[here]):,} rows of {sides[here].name}"
            notes.append(f"{which} are not in {sides[there].name} and are left out: {_named(alone)}")
    rows, unlike = [], []
    for key in shared:
        row, differ = _join(sides, places[0][key], places[1][key])
        rows.append({"sequence_id": ":".join(key), **row})
        unlike += [key] if differ else []
    if unlike:
        notes.append(
            f"token ids differ between the files in {len(unlike):,} of {len(shared):,} sequences: {_named(unlike)}"
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError):  # some rows contain lists, others a string
            notes.append(f"{escape_unprintable(name)} is left out: its values are of different kinds")
    return PairedTable(with_prompt_ids(pa.table(columns)), tuple(notes))


def _named(keys: Sequence[tuple[str, ...]]) -> str:
    more = f" and {len(keys) - _SHOWN:,} more" if len(keys) > _SHOWN else ""
    return ", ".join(escape_unprintable(":".join(key)) for key in keys[:_SHOWN]) + more


def _common_id(rollout: _Side, train: _Side) -> tuple[str, ...]:
    if all(side.id_column("id") is not None for side in (rollout, train)):
        return ("id",)
    lacking = next(side for side in (rollout, train) if side.id_column("id") is None)
    columns = ", ".join(map(escape_unprintable, lacking.columns))
    raise ConfigError(f"{lacking.path}: missing column id; name the column that identifies a row with --on: {columns}")


@dataclass(frozen=True)
class _Side:
    """One file."""

    path: Path
    canonical: str
    columns: Mapping[str, list[Any]]
    log_probs: str | None

    @property
    def name(self) -> str:
        return escape_unprintable(self.path.name)

    @classmethod
    def read(cls, path: Path, canonical: str) -> _Side:
        table = _read(path)
        table = _by_sequence(table, canonical)
        engine = is_table(path) and is_engine_file(path)
        columns = {name: table[name].to_pylist() for name in table.schema.names}
        return cls(path, canonical, columns, _log_probs(table, canonical, engine, path))

    def id_column(self, name: str) -> str | None:
        """Return the column of a key. A column of ids may have another name."""
        if name in self.columns:
            return name
        return next((one for one in IDS if one in self.columns), None) if name in IDS else None

    def index(self, keys: Sequence[str]) -> dict[tuple[str, ...], int]:
        values = []
        for key in keys:
            column = self.id_column(key)
            if column is None:
                near = suggestion(key, self.columns)
                columns = ", ".join(map(escape_unprintable, self.columns))
                raise ConfigError(f"{self.path}: unknown column {key!r}{near}; the columns are {columns}")
            values.append(self.columns[column])
        found: dict[tuple[str, ...], int] = {}
        for row, parts in enumerate(zip(*values, strict=True)):
            if any(part is None for part in parts):
                raise DataError(f"a row without {', '.join(keys)}", file=str(self.path), row=row)
            name = tuple(str(part) for part in parts)
            if found.setdefault(name, row) != row:
                remedy = "name every column that identifies a row: --on step,id"
                raise DataError(
                    f"{_named([name])} is in rows {found[name]} and {row}", file=str(self.path), row=row, remedy=remedy
                )
        return found

    def candidates(self, row: int) -> list[tuple[str, list[Any]]]:
        """Return the log-probs of the response and of a scored prompt."""
        names = [name for name in (self.log_probs, PROMPT_LOG_PROBS) if name is not None and name in self.columns]
        found = [(name, self.columns[name][row]) for name in names]
        for name, value in found:
            numbers = isinstance(value, list) and all(one is None or isinstance(one, (int, float)) for one in value)
            if value is not None and not numbers:
                problem = "the row holds something else than a list of numbers"
                raise DataError(problem, file=str(self.path), row=row, column=name, remedy="write log-probs as numbers")
        return [(name, value) for name, value in found if value is not None]


def _read(path: Path) -> pa.Table:
    if is_table(path):
        return read_table(path)
    if not path.is_file():
        raise DataError("the file does not exist", file=str(path))
    location = find_store(str(path)).location(str(path))
    footer = read_footer(UnopenedFile(location, escape_unprintable(str(path)), path.stem))
    names = list(dict.fromkeys(footer.types))
    with find_store(location).open(location) as file:
        tables = list(footer.contents.decode(file, range(len(footer.contents.rows)), names, None))
    return pa.concat_tables(tables) if tables else pa.table({})


def _lists(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _by_sequence(table: pa.Table, canonical: str) -> pa.Table:
    """Collect the tokens of each sequence, if the table has one row per token."""
    found = [name for name in _names(table, canonical) if pa.types.is_floating(table.schema.field(name).type)]
    keys = [name for name in (*IDS, "step", "run") if name in table.schema.names]
    if not found or not keys or any(_lists(kind) for kind in table.schema.types):
        return table
    import polars as pl

    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    frame = frame.sort("position", maintain_order=True) if "position" in frame.columns else frame
    aliases = column_aliases()
    per_token = [name for name in frame.columns if name in found or _is_per_token(aliases.get(name, name))]
    rest = [name for name in frame.columns if name not in (*keys, *per_token)]
    grouped = frame.group_by(keys, maintain_order=True).agg(pl.col(per_token), pl.col(rest).first())
    return grouped.to_arrow(compat_level=pl.CompatLevel.oldest())


def _is_per_token(name: str) -> bool:
    return name in COLUMNS_BY_NAME and COLUMNS_BY_NAME[name].per_token


def _names(table: pa.Table, canonical: str) -> list[str]:
    """Return the columns that may contain the log-probs of a side, the likeliest first."""
    aliases = column_aliases()
    own = [name for name in table.schema.names if name == canonical]
    known = [name for name in table.schema.names if name != canonical and aliases.get(name) == canonical]
    return [*own, *known, *(name for name in _GENERIC if name in table.schema.names and name not in known)]


def _log_probs(table: pa.Table, canonical: str, engine: bool, path: Path) -> str | None:
    found = [*_names(table, canonical), *(["rollout_log_probs"] if engine else [])]
    for name in found:
        if name in table.schema.names and _lists(table.schema.field(name).type):
            return name
    if PROMPT_LOG_PROBS in table.schema.names:
        return None
    floats = [one.name for one in table.schema if _lists(one.type) and pa.types.is_floating(one.type.value_type)]
    if len(floats) == 1:
        return str(floats[0])
    columns = ", ".join(map(escape_unprintable, table.schema.names))
    raise DataError(f"missing column {canonical}", file=str(path), remedy=f"rename a column; the columns are {columns}")


def _join(sides: tuple[_Side, _Side], first: int, second: int) -> tuple[dict[str, Any], bool]:
    rollout, train = sides
    left, right = _matching(rollout, first, train, second)
    length = len(left[1])
    row: dict[str, Any] = {}
    tokens = []
    for side, number, (name, values, window) in ((train, second, right), (rollout, first, left)):
        for column, value in _canonical(side, number):
            if isinstance(value, list):
                full = len(side.columns[name][number]) if side.columns[name][number] is not None else 0
                if column in COLUMNS_BY_NAME and COLUMNS_BY_NAME[column].kind is ColumnKind.PROMPT:
                    row.setdefault(column, value)
                elif column != "response_mask" and len(value) == full and name != PROMPT_LOG_PROBS:
                    value = value[window]
                    tokens += [value] if column == "token_ids" else []
                    row.setdefault(column, value)
            elif column != "response_mask":
                row.setdefault(column, value)
        row[side.canonical] = values
    mask = next((mask for mask in (_mask(rollout, first, left), _mask(train, second, right)) if mask is not None), None)
    if mask is not None and len(mask) == length:
        row["response_mask"] = mask
    return row, len(tokens) == 2 and tokens[0] != tokens[1] and len(tokens[0]) == len(tokens[1])


_Window = tuple[str, list[Any], slice]


def _matching(rollout: _Side, first: int, train: _Side, second: int) -> tuple[_Window, _Window]:
    """Choose log-probs of the same length on both sides, or the first ones."""
    lefts, rights = list(_windows(rollout, first)), list(_windows(train, second))
    if not lefts or not rights:
        side, row = (rollout, first) if not lefts else (train, second)
        raise DataError("missing log-probs", file=str(side.path), row=row)
    for left in lefts:
        for right in rights:
            if len(left[1]) == len(right[1]):
                return left, right
    # A scored prompt ends with the response, whose length is known from the other side.
    for left in lefts:
        for right in rights:
            if right[0] == PROMPT_LOG_PROBS and left[0] != PROMPT_LOG_PROBS and len(right[1]) > len(left[1]):
                return left, (right[0], right[1][len(right[1]) - len(left[1]) :], slice(0))
            if left[0] == PROMPT_LOG_PROBS and right[0] != PROMPT_LOG_PROBS and len(left[1]) > len(right[1]):
                return (left[0], left[1][len(left[1]) - len(right[1]) :], slice(0)), right
    return lefts[0], rights[0]


def _windows(side: _Side, row: int) -> Iterator[_Window]:
    """Yield the log-probs of a row, first without padding, then with it."""
    for name, values in side.candidates(row):
        mask = _full_mask(side, row)
        if mask is not None and name != PROMPT_LOG_PROBS and len(mask) == len(values):
            inside = np.flatnonzero([bool(one) for one in mask])
            window = slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)
            yield name, values[window], window
        yield name, values, slice(None)
        if name != PROMPT_LOG_PROBS:
            held = np.flatnonzero([one not in (None, 0) and one == one for one in values])
            padded = slice(0, int(held[-1]) + 1) if len(held) else slice(0, 0)
            if padded.stop < len(values):
                yield name, values[padded], padded


def _full_mask(side: _Side, row: int) -> list[Any] | None:
    aliases = column_aliases()
    found = (name for name in side.columns if "response_mask" in (name, aliases.get(name)))
    value = next((side.columns[name][row] for name in found), None)
    if isinstance(value, list) and any(one not in (0, 1) for one in value):
        problem = "response_mask must contain only 0 and 1"
        raise DataError(problem, file=str(side.path), row=row, remedy="write 0 and 1, or false and true")
    return value if isinstance(value, list) else None


def _mask(side: _Side, row: int, chosen: _Window) -> list[Any] | None:
    mask = _full_mask(side, row)
    return None if mask is None or chosen[0] == PROMPT_LOG_PROBS else mask[chosen[2]]


def _canonical(side: _Side, row: int) -> Iterator[tuple[str, Any]]:
    """Yield the other columns of a row under the names of the schema."""
    aliases = column_aliases()
    skipped = {side.log_probs, PROMPT_LOG_PROBS, "position", *IDS}
    for name, values in side.columns.items():
        column = aliases.get(name, name)
        if name not in skipped and column not in ("rollout_log_probs", "train_log_probs") and values[row] is not None:
            yield column, values[row]
