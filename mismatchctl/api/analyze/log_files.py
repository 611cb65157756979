"""Logs of metrics by step: JSONL, JSON (also trainer_state.json), CSV of W&B, and TensorBoard events."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from mismatchctl.errors import ConfigError, DataError, describe_os_error
from mismatchctl.io.files import read_regular_file
from mismatchctl.io.stores import walk_files
from mismatchctl.io.yaml import TextError, decode_utf8, parse_json

MAX_LOG_BYTES = 1 << 30
"""Largest log that is read."""
_MIN_DIGITS = 4  # a series with fewer digits may have lost zeros, so it gets the digits of the whole log
_REMEDY = "pass the run's log: JSON lines, TensorBoard events or CSV"
_NOT_FINITE = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "-infinity"})

STEP_NAMES = ("step", "_step", "global_step", "training/global_step")
"""Names of the step, in upper or lower case."""
_WANDB_SUFFIXES = ("__MIN", "__MAX")
"""Suffixes of the columns that W&B adds to each metric."""
_CSV_KEYS = {"Wall time", "Step", "Value"}


def read_csv_cells(text: str, path: str) -> Iterator[tuple[str, str, Decimal]]:
    """Read the step, name and value of each cell that contains a number, NaN or an infinite value."""
    rows = csv.reader(text.splitlines())
    try:
        heads = next(rows, [])
        place = next((index for index, head in enumerate(heads) if head.lower() in STEP_NAMES), None)
        if place is None:
            problem = f"no step column: expected one of {', '.join(STEP_NAMES)}"
            raise DataError(problem, file=path, remedy="add a column step to the table")
        names = _metric_names(heads, Path(path).stem)
        for row in rows:
            if len(row) > place and row[place].strip():
                step = row[place].strip()
                for name, cell in zip(names, row, strict=False):
                    value = parse_decimal(cell)
                    if name and (is_number(value) or cell.strip().lower() in _NOT_FINITE):
                        yield step, name, value
    except csv.Error as error:
        raise DataError(f"not a valid CSV file: {error}", file=path, remedy="export the table again") from None


def _metric_names(heads: list[str], called: str) -> list[str]:
    """Return the metric name of each column.

    If there is one run, the run name that W&B adds is removed. Columns that are not metrics get an empty name.
    """
    if set(heads) == _CSV_KEYS:
        return [called if head == "Value" else "" for head in heads]
    kept = ["" if head.endswith(_WANDB_SUFFIXES) or head.lower() in STEP_NAMES else head for head in heads]
    runs = {head.partition(" - ")[0] for head in kept if head}
    one = len(runs) == 1 and all(" - " in head for head in kept if head)
    named = [head.partition(" - ")[2] if one and head else head for head in kept]
    return ["" if name.startswith("_") else name for name in named]


def parse_decimal(text: str) -> Decimal:
    """Parse a number and keep its printed digits. Other text becomes NaN."""
    try:
        return Decimal(text.strip())
    except InvalidOperation:  # or an exponent that no float has
        return Decimal("nan")


def is_number(value: Any) -> TypeGuard[Decimal]:
    return isinstance(value, Decimal) and value.is_finite() and math.isfinite(float(value))


@dataclass(frozen=True)
class PrintedDigits:
    """The exponent of the last printed digit of a number, and the largest number of digits."""

    place: int = 0
    count: int = 0

    @classmethod
    def of(cls, printed: Sequence[Decimal]) -> PrintedDigits:
        shown = [value.as_tuple() for value in printed]
        places = [parts.exponent for parts in shown if isinstance(parts.exponent, int)]
        return cls(min(places, default=0), max((len(parts.digits) for parts in shown), default=0))

    def unit(self, value: Decimal) -> float:
        """Return the size of one unit of the last digit, including trailing zeros that were not printed."""
        place = max(self.place, value.adjusted() - self.count + 1) if value else self.place
        return 10.0 ** max(place, -400)


@dataclass(frozen=True)
class RunLog:
    """The log of a run."""

    path: str  # the file
    # values by step and name, with the digits that were printed
    rows: Mapping[str, Mapping[str, Decimal]] = field(default_factory=dict)
    not_finite: Mapping[str, int] = field(default_factory=dict)  # how often each name was logged as NaN or infinity

    def series(self, labels: Sequence[str]) -> dict[str, list[float | None]]:
        """Return one value per step for each name that the log contains at these steps."""
        names = dict.fromkeys(name for label in labels for name in self.rows.get(label, {}))
        found = {name: [self.rows.get(label, {}).get(name) for label in labels] for name in names}
        return {name: [None if value is None else float(value) for value in values] for name, values in found.items()}

    def digits(self) -> dict[str, PrintedDigits]:
        printed: dict[str, list[Decimal]] = {}
        for row in self.rows.values():
            for name, value in row.items():
                printed.setdefault(name, []).append(value)
        whole = PrintedDigits.of([value for values in printed.values() for value in values])
        own = {name: PrintedDigits.of(values) for name, values in printed.items()}
        return {name: whole if digits.count < _MIN_DIGITS else digits for name, digits in own.items()}


def read_run_log(path: str | Path) -> RunLog:
    """Read scalars by step from rows of JSON, TensorBoard event files (one, or a folder of them), or a CSV export.

    A row of JSON is `{step, data: {name: value}}` or `{step, name: value, ...}`. Rows of the same step are merged.
    Values that are not finite are counted but not returned.
    """
    place = Path(path)
    if place.is_dir() or is_event_file(place):
        return _collect_log(path, _read_events(place))
    if place.suffix.lower() == ".csv":
        return _collect_log(path, read_csv_cells(_read_text(place), str(path)))
    return _collect_log(path, _read_json_cells(place))


def _read_text(place: Path) -> str:
    try:
        return decode_utf8(read_regular_file(place, MAX_LOG_BYTES))
    except (OSError, TextError) as error:
        problem = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise DataError(problem, file=str(place), remedy=_REMEDY) from None


def is_event_file(path: Path) -> bool:
    return "tfevents" in path.name


def _read_events(place: Path) -> Iterator[tuple[str, str, Decimal]]:
    """Read step, name and value of every scalar with the `tensorboard` package.

    Reading of a file stops at a damaged record.
    """
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        raise ConfigError(
            f"{place}: reading TensorBoard events needs the package tensorboard: pip install 'mismatchctl[tensorboard]'"
        ) from None
    for file in sorted(filter(is_event_file, walk_files(place))) if place.is_dir() else [place]:
        if file.stat().st_size > MAX_LOG_BYTES:
            raise DataError(f"the log is larger than {MAX_LOG_BYTES >> 20:,} MB", file=str(file), remedy=_REMEDY)
        try:
            for record in RawEventFileLoader(str(file)).Load():
                event = Event.FromString(record)
                for value in event.summary.value:
                    scalar = _scalar_of(value)
                    if value.tag and scalar is not None:
                        yield str(event.step), value.tag, scalar
        except (DecodeError, OSError, ValueError, MemoryError, OverflowError) as error:  # a damaged record length
            raise DataError(
                f"this is not an event file of TensorBoard ({error})", file=str(file), remedy=_REMEDY
            ) from None


def _scalar_of(value: Any) -> Decimal | None:
    """Return the number in a summary with the digits of its type, or null for images, strings and histograms."""
    if value.HasField("simple_value"):
        return _printed(np.float32(value.simple_value))
    if not value.HasField("tensor") or any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    try:
        array = np.asarray(make_ndarray(value.tensor))
    except (TypeError, ValueError):
        return None
    return _printed(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind == "f" else None


def _printed(value: np.floating[Any]) -> Decimal:
    return Decimal(np.format_float_scientific(value)) if np.isfinite(value) else Decimal("nan")


def _collect_log(path: str | Path, found: Iterable[tuple[str, str, Decimal]]) -> RunLog:
    rows: dict[str, dict[str, Decimal]] = {}
    not_finite: Counter[str] = Counter()
    for step, name, value in found:
        if not is_number(value):
            not_finite[name] += 1
            continue
        number = parse_decimal(step)
        rows.setdefault(step_label(number) if is_number(number) else step, {})[name] = value
    if not rows:
        raise DataError("contains no metric", file=str(path), remedy=_REMEDY)
    return RunLog(str(path), rows, dict(not_finite))


def _read_json_cells(path: Path) -> Iterator[tuple[str, str, Decimal]]:
    """Read JSON objects: one per line, or in a list such as `log_history` in `trainer_state.json`."""
    for number, row in _json_rows(_read_text(path), path):
        step, values = _parse_json_row(row, str(path), number)
        for name, value in values.items():
            text = value.strip().lower() if isinstance(value, str) else ""
            is_float = isinstance(value, (float, Decimal))
            if is_number(value) or text in _NOT_FINITE or (is_float and not math.isfinite(value)):
                yield step, name, value if is_number(value) else Decimal("nan")


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix.lower() == ".json":
        try:
            whole = parse_json(text, as_python_writes=True, number=parse_decimal)
        except ValueError:
            whole = None
        history = whole.get("log_history") if isinstance(whole, dict) else whole
        if isinstance(history, list):
            yield from enumerate(history)
            return
    for number, line in enumerate(text.split("\n")):
        if line.strip():
            try:
                yield number, parse_json(line, as_python_writes=True, number=parse_decimal)
            except ValueError:
                yield number, None


def _parse_json_row(row: Any, path: str, number: int) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        remedy = "write one JSON object per line, with a step and values"
        raise DataError("not a JSON object", file=path, row=number, remedy=remedy)
    nested = row.get("data")
    values: Mapping[str, Any] = nested if isinstance(nested, dict) else row
    step = next((found[key] for found in (row, values) for key in STEP_NAMES if found.get(key) is not None), None)
    if step is None:
        raise DataError("missing step", file=path, row=number, remedy="add the key step to each row")
    return step_label(step), {name: value for name, value in values.items() if name not in STEP_NAMES}


def step_label(step: Any) -> str:
    if isinstance(step, (float, Decimal)):
        number = float(step)
        return str(int(number)) if number.is_integer() else str(number)
    return str(step)
