"""Metrics that a run logged, from JSONL, CSV or TensorBoard, next to those of a dump."""

from __future__ import annotations

import csv
import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from statistics import NormalDist
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa

from mismatchctl.core.batch import Float64s, Floats, TokenBatch
from mismatchctl.core.validation import replace_nonfinite
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.adapter import Framework, ReplayOptions
from mismatchctl.frameworks.glossary import find_certain_metric
from mismatchctl.io.files import read_regular_file
from mismatchctl.io.yaml import TextError, decode_utf8, parse_json
from mismatchctl.measure.cluster_table import LabelValue
from mismatchctl.measure.groups import GroupCells, GroupMerger
from mismatchctl.measure.reduction import split_cells
from mismatchctl.results.model import Agreement, Lag, LogComparison, MetricLogComparison

LAG_SIGNIFICANCE = 0.01
"""How often noise alone may show a lag."""
MIN_STEPS = 16
"""Steps below which no lag is looked for."""
_MAX_LAG = 20
_MIN_OVERLAP = 8


def estimate_lag(k3: Sequence[float | None], logged: Sequence[float | None]) -> Lag:
    """The lag of one series of a run's log; positive: K3 follows it."""
    ours = np.array([math.log(value) if value else np.nan for value in k3], np.float64)
    theirs = np.array([np.nan if value is None else value for value in logged], np.float64)
    known = np.isfinite(ours) & np.isfinite(theirs)
    count = int(known.sum())
    if count < MIN_STEPS:
        return Lag(compared=count, status=f"only {count} steps have both: a lag takes {MIN_STEPS}")
    first, last = np.flatnonzero(known)[[0, -1]]
    if count < last - first + 1:
        return Lag(compared=count, status="steps are missing in between")
    x, y = _ranked_changes(ours[first : last + 1]), _ranked_changes(theirs[first : last + 1])
    if not x.any() or not y.any():
        return Lag(compared=count, status="it does not vary")
    reach = min(_MAX_LAG, (len(x) - _MIN_OVERLAP) // 2)
    shifts = np.arange(-reach, reach + 1)
    found = np.array([_lagged_correlation(x, y, int(shift)) for shift in shifts])
    limit = NormalDist().inv_cdf(1 - LAG_SIGNIFICANCE / 2 / len(shifts)) * math.sqrt(_correlation_scale(x, y))
    strength = np.abs(found) * np.sqrt(len(x) - np.abs(shifts))
    best = int(np.argmax(strength))
    if strength[best] < limit:
        return Lag(compared=count, status="no lag beyond chance")
    return Lag(steps=int(shifts[best]), correlation=float(found[best]), compared=count)


def _ranked_changes(values: Float64s) -> Float64s:
    """Changes from step to step by their rank, of mean 0 and variance 1; zeros where nothing changes."""
    changes = np.diff(values)
    order = np.unique(changes, return_inverse=True, return_counts=True)
    counts = order[2]
    middle = np.cumsum(counts) - (counts + 1) / 2
    ranks = middle[order[1].ravel()]
    spread = ranks.std()
    return (ranks - ranks.mean()) / spread if spread > 0 else np.zeros(len(ranks))


def _lagged_correlation(x: Float64s, y: Float64s, shift: int) -> float:
    """Of x now with y so many steps before."""
    if shift > 0:
        x, y = x[shift:], y[:-shift]
    elif shift < 0:
        x, y = x[:shift], y[-shift:]
    return float(np.mean(x * y))


def _correlation_scale(x: Float64s, y: Float64s) -> float:
    """What a cross-correlation of unrelated series scatters by, times their length (Bartlett 1946)."""
    most = min(_MAX_LAG, len(x) // 4)
    return max(
        1.0, 1 + 2 * sum(_lagged_correlation(x, x, k) * _lagged_correlation(y, y, k) for k in range(1, most + 1))
    )


StepKey = tuple[str, LabelValue]
"""(run, step)."""
REPLAY_COLUMNS = ("micro_batch", "rollout_ids")
"""Columns that say what a framework sums up together."""
StepTables = list[tuple[StepKey, pa.Table]]
"""Rows by step, in the order of the input."""


def split_by_step(batch: TokenBatch, run: str) -> StepTables:
    """The rows of a batch by step as tables in the contract's names; masked tokens are not in them."""
    return [((name, step), _build_table(part)) for name, (step, _), part in split_cells(batch, run, ())]


def _build_table(batch: TokenBatch) -> pa.Table:
    offsets = pa.array(batch.segments.offsets)
    tokens = {
        "rollout_log_probs": batch.rollout,
        "train_log_probs": batch.train,
        "current_log_probs": batch.current,
        "advantages": batch.advantages,
    }
    columns = {name: _list_array(offsets, values) for name, values in tokens.items() if values is not None}
    for name in REPLAY_COLUMNS:
        if name in batch.columns:
            columns[name] = pa.array([_name_text(value) for value in batch.columns[name].tolist()], pa.string())
    return pa.table(columns)


def _name_text(value: object) -> str | None:
    """A name as text; None where a row has none (NaN in a column of numbers)."""
    return None if value is None or value != value else str(value)


def _list_array(offsets: pa.Array, values: Floats) -> pa.Array:
    return pa.LargeListArray.from_arrays(offsets, pa.array(values.astype(np.float64)))


class LoggedSteps(GroupMerger[list[pa.Table]]):
    """What one framework logs, by run, step and correction.

    Attributes:
        options: how it is replayed.
        refused: why it cannot do a correction, by the correction's name.

    Raises:
        ConfigError: the framework has no such reducer.
    """

    at_once = 0

    def __init__(self, framework: Framework, corrections: Iterable[Correction], options: ReplayOptions) -> None:
        if options.reducer is not None and options.reducer not in framework.reducers:
            known = " or ".join(framework.reducers) or "one way only"
            raise ConfigError(f"{framework.title} knows no reducer {options.reducer}: it sums up {known}")
        super().__init__(())
        self._framework, self.options = framework, options
        self._corrections = list(corrections)
        self._logged: dict[StepKey, dict[str, dict[str, float]]] = {}
        self.refused: dict[str, str] = {}

    def add(self, parts: StepTables) -> None:
        """Keep the rows of a unit."""
        for (run, step), table in parts:
            self.merge(run, step, (), [table])

    def _size(self, cell: list[pa.Table]) -> int:
        return sum(map(len, cell))

    def _both(self, cell: list[pa.Table], more: list[pa.Table]) -> list[pa.Table]:
        return cell + more

    def _close_groups(self, run: str, steps: list[LabelValue], groups: Sequence[GroupCells[list[pa.Table]]]) -> None:
        for step, (tables,) in zip(steps, map(dict.values, groups), strict=True):
            shared = [name for name in tables[0].column_names if all(name in t.column_names for t in tables)]
            table = pa.concat_tables([part.select(shared) for part in tables])
            self._logged[run, step] = {
                correction.name: self._replay(table, correction)
                for correction in self._corrections
                if correction.name not in self.refused
            }

    def _replay(self, table: pa.Table, correction: Correction) -> dict[str, float]:
        options, framework = self.options, self._framework
        try:
            out = framework.replay(table, correction, options)
            logged = out.logged | framework.logged_beside(table, correction, options.dtype)
            untold = framework.untold(correction)
            return {name: value for name, value in logged.items() if name not in untold}
        except ConfigError as error:
            self.refused[correction.name] = str(error)
        except DataError:  # no valid token: nothing would be logged
            pass
        return {}

    def of_run(self, run: str, labels: Sequence[LabelValue]) -> dict[str, dict[str, list[float | None]]]:
        """By correction and name, one value per step; None where nothing finite is logged."""
        steps = [self._logged.get((run, label), {}) for label in labels]
        names = [item.name for item in self._corrections if item.name not in self.refused]
        return {name: _series_by_name([step.get(name, {}) for step in steps]) for name in names}


def _series_by_name(steps: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    known = dict.fromkeys(name for step in steps for name in step)
    return {
        name: [None if (value := step.get(name)) is None else replace_nonfinite(float(value)) for step in steps]
        for name in known
    }


_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_MAX_RECORD_BYTES = 1 << 16
"""Bytes of a record with scalars: larger ones are pictures, text or histograms, and passed over."""
_DTYPE_FLOAT, _DTYPE_DOUBLE = 1, 2
_WIRE_VARINT, _WIRE_FIXED64, _WIRE_BYTES, _WIRE_FIXED32 = 0, 1, 2, 5
MessageField = tuple[int, int, int | bytes]
"""(number, kind, value) of a message."""


def is_event_file(path: Path) -> bool:
    """Whether a file is called as TensorBoard calls them."""
    return "tfevents" in path.name


def find_event_files(path: Path) -> list[Path]:
    """The event files of a folder and those below, by name; or the file itself."""
    if path.is_dir():
        return sorted(found for found in path.rglob("*tfevents*") if found.is_file())
    return [path]


def read_scalars(content: bytes, path: str) -> Iterator[tuple[int, str, Decimal]]:
    """Step, name and value of every scalar, in the order of the file.

    Raises:
        DataError: it is no event file, or damaged.
    """
    for number, record in _read_records(content, path):
        try:
            yield from _event_scalars(record)
        except (ValueError, struct.error, IndexError, UnicodeDecodeError):
            raise DataError(f"record {number} is no event", file=path, remedy="name TensorBoard's own file") from None


def _read_records(content: bytes, path: str) -> Iterator[tuple[int, bytes]]:
    place, number = 0, 0
    while place + _HEADER_BYTES <= len(content):
        length, checksum = struct.unpack_from("<QI", content, place)
        if masked_crc(content[place : place + 8]) != checksum:
            raise _damage_error(path, number)
        end = place + _HEADER_BYTES + length
        if end + _FOOTER_BYTES > len(content):
            return
        if length <= _MAX_RECORD_BYTES:
            record = content[place + _HEADER_BYTES : end]
            if masked_crc(record) != struct.unpack_from("<I", content, end)[0]:
                raise _damage_error(path, number)
            yield number, record
        place, number = end + _FOOTER_BYTES, number + 1


def _damage_error(path: str, number: int) -> DataError:
    problem = "is no event file of TensorBoard" if not number else f"record {number} is damaged: its checksum differs"
    return DataError(problem, file=path, remedy="copy the file again, or name a log as JSON lines or CSV")


def _event_scalars(record: bytes) -> Iterator[tuple[int, str, Decimal]]:
    step, summaries = 0, []
    for number, kind, value in _parse_fields(record):
        if number == 2 and kind == _WIRE_VARINT:
            step = _signed_integer(value)
        elif number == 5 and kind == _WIRE_BYTES:
            summaries.append(value)
    for summary in summaries:
        assert isinstance(summary, bytes)
        for number, kind, value in _parse_fields(summary):
            if number == 1 and kind == _WIRE_BYTES:
                assert isinstance(value, bytes)
                name, found = _parse_summary_value(value)
                if name and found is not None and math.isfinite(found):
                    yield step, name, found


def _parse_summary_value(message: bytes) -> tuple[str, Decimal | None]:
    name, found = "", None
    for number, kind, value in _parse_fields(message):
        if number == 1 and isinstance(value, bytes):
            name = value.decode("utf-8")
        elif number == 2 and kind == _WIRE_FIXED32:
            assert isinstance(value, bytes)
            found = _printed_decimal(np.frombuffer(value, "<f4")[0])
        elif number == 8 and isinstance(value, bytes):
            found = _parse_tensor(value)
    return name, found


def _parse_tensor(message: bytes) -> Decimal | None:
    """The value of a tensor that holds one."""
    dtype, held = 0, b""
    for number, kind, value in _parse_fields(message):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number in (4, 5, 6) and isinstance(value, bytes) and (number == 4 or kind != _WIRE_VARINT):
            held = value
    form = {_DTYPE_FLOAT: "<f4", _DTYPE_DOUBLE: "<f8"}.get(dtype)
    if form is None or len(held) != np.dtype(form).itemsize:
        return None
    return _printed_decimal(np.frombuffer(held, form)[0])


def _printed_decimal(value: np.floating) -> Decimal:
    """With the digits that its type has, and no more."""
    return Decimal(np.format_float_scientific(value)) if np.isfinite(value) else Decimal("nan")


def _signed_integer(value: int | bytes) -> int:
    assert isinstance(value, int)
    return value - (1 << 64) if value >= 1 << 63 else value


def _parse_fields(message: bytes) -> Iterator[MessageField]:
    """The fields of a message, one level deep.

    Raises:
        ValueError: it is none.
    """
    place = 0
    while place < len(message):
        key, place = _parse_varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == _WIRE_VARINT:
            value, place = _parse_varint(message, place)
            yield number, kind, value
            continue
        size = {_WIRE_FIXED64: 8, _WIRE_FIXED32: 4}.get(kind)
        if size is None:
            if kind != _WIRE_BYTES:
                raise ValueError(kind)
            size, place = _parse_varint(message, place)
        if place + size > len(message):
            raise ValueError(size)
        yield number, kind, message[place : place + size]
        place += size


def _parse_varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
    raise ValueError("a number without an end")


def masked_crc(content: bytes) -> int:
    """CRC-32C, rotated and shifted as the format has it."""
    value = 0xFFFFFFFF
    for byte in content:
        value = _CRC_TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = [_crc_table_entry(byte) for byte in range(256)]
STEP_NAMES = ("step", "_step", "global_step", "training/global_step")
"""What the step is called, in any case."""
_WANDB_SUFFIXES = ("__MIN", "__MAX")
"""Columns that W&B adds to each of its own."""
_CSV_KEYS = {"Wall time", "Step", "Value"}


def read_csv_cells(text: str, path: str) -> Iterator[tuple[str, str, Decimal]]:
    """Step, name and value of each cell that is a number.

    Raises:
        DataError: it is no table with a column of steps.
    """
    rows = csv.reader(text.splitlines())
    try:
        heads = next(rows, [])
        place = next((index for index, head in enumerate(heads) if head.lower() in STEP_NAMES), None)
        if place is None:
            raise DataError(
                f"no column of steps: one of {', '.join(STEP_NAMES)}", file=path, remedy="give the table a column step"
            )
        names = _metric_names(heads, Path(path).stem)
        for row in rows:
            if len(row) > place and row[place].strip():
                step = row[place].strip()
                for name, cell in zip(names, row, strict=False):
                    value = parse_decimal(cell)
                    if name and is_number(value):
                        yield step, name, value
    except csv.Error as error:
        raise DataError(f"no CSV: {error}", file=path, remedy="export the table again") from None


def _metric_names(heads: list[str], called: str) -> list[str]:
    """Names of columns without the run that W&B puts before them, where all are of one run; empty: not a value."""
    if set(heads) == _CSV_KEYS:
        return [called if head == "Value" else "" for head in heads]
    kept = ["" if head.endswith(_WANDB_SUFFIXES) or head.lower() in STEP_NAMES else head for head in heads]
    runs = {head.partition(" - ")[0] for head in kept if head}
    one = len(runs) == 1 and all(" - " in head for head in kept if head)
    named = [head.partition(" - ")[2] if one and head else head for head in kept]
    return ["" if name.startswith("_") else name for name in named]


def parse_decimal(text: str) -> Decimal:
    """A number with the digits that it is printed with; NaN where it is none."""
    try:
        return Decimal(text.strip())
    except InvalidOperation:  # or an exponent beyond every float's
        return Decimal("nan")


def is_number(value: Any) -> TypeGuard[Decimal]:
    """Whether it is one that a float can hold."""
    return isinstance(value, Decimal) and value.is_finite() and math.isfinite(float(value))


MAX_LOG_BYTES = 1 << 30
"""Of a log."""
FLOAT32_TOLERANCE = 2e-6
"""Relative: what trainers' sums in float32 differ by, however they are ordered."""
REPLAY_SPREAD = 2.0
"""How many times as far as the replays in float32 and float64 lie apart a third order of summation may lie."""
FLOAT64_TOLERANCE = 1e-9
"""Relative: what sums in float64 differ by."""
METRIC_TOLERANCE = 1e-8
"""Relative: what a metric of a step has lost to rounding."""
_FLOAT32_EPSILON = 2.0**-24
_MIN_DIGITS = 4  # a series that shows fewer may have lost zeros: it has the digits of the whole log
_REMEDY = "name the run's log: JSON lines, events or CSV"
_TRACKER_PREFIXES = ("", "train/", "actor/")
"""What trackers and actors put before the names of a framework."""

LoggedValues = Mapping[str, Sequence[float | None]]
"""By name, one value per group."""


@dataclass(frozen=True)
class _PrintedDigits:
    """How numbers are printed: the place of the last digit, as an exponent of 10, and how many digits at most."""

    place: int = 0
    count: int = 0

    @classmethod
    def of(cls, printed: Sequence[Decimal]) -> _PrintedDigits:
        shown = [value.as_tuple() for value in printed]
        places = [parts.exponent for parts in shown if isinstance(parts.exponent, int)]
        return cls(min(places, default=0), max((len(parts.digits) for parts in shown), default=0))

    def unit(self, value: Decimal) -> float:
        """One unit of the last digit of a value, zeros that were left out counted."""
        place = max(self.place, value.adjusted() - self.count + 1) if value else self.place
        return 10.0 ** max(place, -400)


@dataclass(frozen=True)
class RunLog:
    """What a run logged.

    Attributes:
        path: the file.
        rows: values by step and name, with the digits that were printed.
    """

    path: str
    rows: Mapping[str, Mapping[str, Decimal]] = field(default_factory=dict)

    def series(self, labels: Sequence[str]) -> dict[str, list[float | None]]:
        """Every name that one of these steps has, as one value per step."""
        names = dict.fromkeys(name for label in labels for name in self.rows.get(label, {}))
        found = {name: [self.rows.get(label, {}).get(name) for label in labels] for name in names}
        return {name: [None if value is None else float(value) for value in values] for name, values in found.items()}

    def digits(self) -> dict[str, _PrintedDigits]:
        """How each name is printed."""
        printed: dict[str, list[Decimal]] = {}
        for row in self.rows.values():
            for name, value in row.items():
                printed.setdefault(name, []).append(value)
        whole = _PrintedDigits.of([value for values in printed.values() for value in values])
        own = {name: _PrintedDigits.of(values) for name, values in printed.items()}
        return {name: whole if digits.count < _MIN_DIGITS else digits for name, digits in own.items()}


def read_run_log(path: str | Path) -> RunLog:
    """Scalars by step: rows of JSON, TensorBoard's event files (one, or a folder of them), or an export as CSV.

    A row of JSON is `{step, data: {name: value}}` or `{step, name: value, ...}`. Rows of one step add to each other;
    what is no finite number is passed over.

    Raises:
        DataError: the file cannot be read, a line is no such row, or there is none.
    """
    place = Path(path)
    if place.is_dir() or is_event_file(place):
        return _collect_log(path, _read_events(place))
    if place.suffix.lower() == ".csv":
        return _collect_log(path, read_csv_cells(_read_text(place), str(path)))
    return _read_json_log(place)


def _read_bytes(place: Path) -> bytes:
    try:
        return read_regular_file(place, MAX_LOG_BYTES)
    except OSError as error:
        raise DataError(error.strerror or str(error), file=str(place), remedy=_REMEDY) from None


def _read_text(place: Path) -> str:
    try:
        return decode_utf8(_read_bytes(place))
    except TextError as error:
        raise DataError(str(error), file=str(place), remedy=_REMEDY) from None


def _read_events(place: Path) -> Iterator[tuple[str, str, Decimal]]:
    for file in find_event_files(place):
        for step, name, value in read_scalars(_read_bytes(file), str(file)):
            yield str(step), name, value


def _collect_log(path: str | Path, found: Iterator[tuple[str, str, Decimal]]) -> RunLog:
    rows: dict[str, dict[str, Decimal]] = {}
    for step, name, value in found:
        number = parse_decimal(step)
        rows.setdefault(_step_label(number) if is_number(number) else step, {})[name] = value
    if not rows:
        raise DataError("holds no scalar", file=str(path), remedy=_REMEDY)
    return RunLog(str(path), rows)


def _read_json_log(path: Path) -> RunLog:
    """Rows of JSON.

    Raises:
        DataError: as of `read_log`.
    """
    rows: dict[str, dict[str, Decimal]] = {}
    for number, line in enumerate(_read_text(path).split("\n")):
        if line.strip():
            step, values = _parse_json_row(line, str(path), number)
            rows.setdefault(step, {}).update(values)
    if not rows:
        raise DataError("holds no row", file=str(path), remedy="name a file with one JSON row per step")
    return RunLog(str(path), rows)


def _parse_json_row(line: str, path: str, number: int) -> tuple[str, dict[str, Decimal]]:
    try:
        row = parse_json(line, as_python_writes=True, number=parse_decimal)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise DataError(
            "not a JSON object", file=path, row=number, remedy="write one row per line, with step and values"
        )
    nested = row.get("data")
    values: Mapping[str, Any] = nested if isinstance(nested, dict) else row
    step = next((found[key] for found in (row, values) for key in STEP_NAMES if found.get(key) is not None), None)
    if step is None:
        raise DataError("the row names no step", file=path, row=number, remedy="give each row a key step")
    return _step_label(step), {
        name: value for name, value in values.items() if is_number(value) and name not in STEP_NAMES
    }


def _step_label(step: Any) -> str:
    if isinstance(step, (float, Decimal)):
        number = float(step)
        return str(int(number)) if number.is_integer() else str(number)
    return str(step)


def require_shared_steps(log: RunLog, labels: Sequence[Any]) -> None:
    """Refuse a log of other steps than these.

    Raises:
        DataError: no step of the log is one of the dump.
    """
    steps = {_step_label(label) for label in labels}
    if steps.isdisjoint(log.rows):
        problem = f"no step of the log is in the dump: it has {_format_some_steps(log.rows)}, the dump {_format_some_steps(steps)}"
        raise DataError(problem, remedy="give both the same steps")


def _format_some_steps(steps: Mapping[str, Any] | set[str]) -> str:
    ordered = sorted(steps, key=lambda step: (len(step), step))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def logged_series(log: RunLog, labels: Sequence[Any]) -> dict[str, list[float | None]]:
    """Everything that the log has for these steps, one value per step."""
    return log.series([_step_label(label) for label in labels])


def compare_replay(log: RunLog, labels: Sequence[Any], replayed: LoggedValues, rounded: LoggedValues) -> LogComparison:
    """One run under one correction beside its log.

    Args:
        log: of the run.
        labels: of the steps that the values run over.
        replayed: what the framework would have logged, by name.
        rounded: the same from a replay at the other precision.
    """
    steps, digits = [_step_label(label) for label in labels], log.digits()
    pairs = {
        name: list(_compared_values(log, digits, steps, name, values, rounded.get(name, values)))
        for name, values in replayed.items()
    }
    exact = _is_exact([pair for found in pairs.values() for pair in found])
    return LogComparison(
        names={
            name: _worst_agreement([pair.judged(exact) for pair in found]) for name, found in pairs.items() if found
        },
        missing=[name for name, found in pairs.items() if not found],
    )


def match_metrics(log: RunLog, replayed: Collection[str]) -> dict[str, str]:
    """Names of a log that stand for a metric and are not among those that a framework's code replayed, and which."""
    names = dict.fromkeys(name for row in log.rows.values() for name in row)
    plain = {name: _strip_prefix(name) for name in names}
    found = {
        name: find_certain_metric(name) or find_certain_metric(plain[name])
        for name in names
        if plain[name] not in replayed
    }
    return {name: key for name, key in found.items() if key is not None}


def _strip_prefix(name: str) -> str:
    prefix = next((prefix for prefix in _TRACKER_PREFIXES[1:] if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def compare_metrics(
    log: RunLog, labels: Sequence[Any], metrics: Mapping[str, Sequence[float | None]], called: Mapping[str, str]
) -> MetricLogComparison | None:
    """Names of a log beside the metrics of a run that they stand for; None where there is none.

    How a framework's float32 rounds is not replayed here: its terms are taken to be right to float32's last bit of 1.

    Args:
        log: of the run.
        labels: of its steps.
        metrics: by key, one value per step, to METRIC_DIGITS.
        called: name -> key.
    """
    steps, digits = [_step_label(label) for label in labels], log.digits()
    found = {}
    for name, key in called.items():
        values = metrics.get(key, [None] * len(steps))
        rows = [(step, value, log.rows.get(step, {}).get(name)) for step, value in zip(steps, values, strict=True)]
        pairs = [
            _ComparedValue(step, value, value + _FLOAT32_EPSILON * (1 + abs(value)), float(printed),
                  digits[name].unit(printed) + METRIC_TOLERANCE * abs(value))
            for step, value, printed in rows
            if value is not None and printed is not None
        ]  # fmt: skip
        if pairs:
            found[name] = _worst_agreement([pair.judged(exact=False) for pair in pairs])
    return MetricLogComparison(names=found, metrics={name: called[name] for name in found}) if found else None


@dataclass(frozen=True)
class _ComparedValue:
    """One name in one step: as replayed, as replayed at the other precision, as logged, and a unit of what is shown."""

    step: str
    dump: float
    rounded: float
    log: float
    unit: float

    @property
    def size(self) -> float:
        return max(abs(self.dump), abs(self.log))

    def judged(self, exact: bool) -> Agreement:
        """Whether both agree; `exact`: to the digits of float64."""
        spread, rounding = (
            (0.0, FLOAT64_TOLERANCE) if exact else (REPLAY_SPREAD * abs(self.rounded - self.dump), FLOAT32_TOLERANCE)
        )
        near = [self.dump] if exact else [self.dump, self.rounded]
        apart, size = min(abs(self.log - value) for value in near), self.size or 1.0
        allowed = spread + rounding * size + self.unit / 2
        return Agreement(
            steps=1, difference=abs(self.log - self.dump) / size, allowed=min(allowed / size, 1.0),
            step=self.step, dump=self.dump, log=self.log, agrees=apart <= allowed,
        )  # fmt: skip


def _compared_values(
    log: RunLog, digits: Mapping[str, _PrintedDigits], steps: Sequence[str], name: str,
    values: Sequence[float | None], rounded: Sequence[float | None],
) -> Iterator[_ComparedValue]:  # fmt: skip
    """One name in every step that both have."""
    for step, value, other in zip(steps, values, rounded, strict=True):
        row = log.rows.get(step, {})
        called = next((prefix + name for prefix in _TRACKER_PREFIXES if prefix + name in row), None)
        if value is not None and called is not None:
            printed = row[called]
            yield _ComparedValue(
                step, value, value if other is None else other, float(printed), digits[called].unit(printed)
            )


def _is_exact(pairs: Sequence[_ComparedValue]) -> bool:
    """Whether the log was computed in float64: mostly, it has the digits that float32 would have got wrong."""
    telling = [pair for pair in pairs if abs(pair.rounded - pair.dump) > FLOAT64_TOLERANCE * pair.size]
    right = sum(abs(pair.log - pair.dump) <= FLOAT64_TOLERANCE * pair.size for pair in telling)
    return 2 * right > len(telling)


def _worst_agreement(judged: Sequence[Agreement]) -> Agreement:
    worst = max(judged, key=lambda pair: (not pair.agrees, pair.difference))
    return worst.model_copy(update={"steps": len(judged)})
