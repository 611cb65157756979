"""A run's own log beside what the dump says it should have logged, name by name.

Two values agree where they are as close as the log can tell: within what float32 makes of the framework's own
reduction (how far its replays in float32 and float64 lie apart), within float32's rounding of the value itself, and
within half a unit of the last digit that the log prints. Nothing else is forgiven, however small the value; and a log
that has more digits right than float32 can have is held to those.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeGuard

from mismatchctl.analyze.tfevents import event_files, is_event_file, scalars
from mismatchctl.errors import DataError
from mismatchctl.files import read_regular
from mismatchctl.frameworks.meanings import certain_metric
from mismatchctl.result import AgainstLog, AgainstMetrics, Agreement
from mismatchctl.texts import TextError, decoded, parse_json

STEPS = ("step", "_step", "global_step", "training/global_step")
"""What the step is called, in any case."""
_ENDS = ("__MIN", "__MAX")
"""Columns that W&B adds to each of its own."""
_ALONE = {"Wall time", "Step", "Value"}


def of_csv(text: str, path: str) -> Iterator[tuple[str, str, Decimal]]:
    """Step, name and value of each cell that is a number.

    Raises:
        DataError: it is no table with a column of steps.
    """
    rows = csv.reader(text.splitlines())
    try:
        heads = next(rows, [])
        place = next((index for index, head in enumerate(heads) if head.lower() in STEPS), None)
        if place is None:
            raise DataError(
                f"no column of steps: one of {', '.join(STEPS)}", file=path, remedy="give the table a column step"
            )
        names = _names(heads, Path(path).stem)
        for row in rows:
            if len(row) > place and row[place].strip():
                step = row[place].strip()
                for name, cell in zip(names, row, strict=False):
                    value = decimal(cell)
                    if name and is_number(value):
                        yield step, name, value
    except csv.Error as error:
        raise DataError(f"no CSV: {error}", file=path, remedy="export the table again") from None


def _names(heads: list[str], called: str) -> list[str]:
    """Names of columns without the run that W&B puts before them, where all are of one run; empty: not a value."""
    if set(heads) == _ALONE:
        return [called if head == "Value" else "" for head in heads]
    kept = ["" if head.endswith(_ENDS) or head.lower() in STEPS else head for head in heads]
    runs = {head.partition(" - ")[0] for head in kept if head}
    one = len(runs) == 1 and all(" - " in head for head in kept if head)
    named = [head.partition(" - ")[2] if one and head else head for head in kept]
    return ["" if name.startswith("_") else name for name in named]


def decimal(text: str) -> Decimal:
    """A number with the digits that it is printed with; NaN where it is none."""
    try:
        return Decimal(text.strip())
    except InvalidOperation:  # or an exponent beyond every float's
        return Decimal("nan")


def is_number(value: Any) -> TypeGuard[Decimal]:
    """Whether it is one that a float can hold."""
    return isinstance(value, Decimal) and value.is_finite() and math.isfinite(float(value))


MOST_BYTES = 1 << 30
"""Of a log."""
ROUNDING = 2e-6
"""Relative: what trainers' sums in float32 differ by, however they are ordered."""
SPREAD = 2.0
"""How many times as far as the replays in float32 and float64 lie apart a third order of summation may lie."""
EXACT = 1e-9
"""Relative: what sums in float64 differ by."""
METRIC_DIGITS = 1e-8
"""Relative: what a metric of a step has lost to rounding."""
_LAST_BIT = 2.0**-24
_FEW_DIGITS = 4  # a series that shows fewer may have lost zeros: it has the digits of the whole log
_REMEDY = "name the run's log: JSON lines, events or CSV"
_PREFIXES = ("", "train/", "actor/")
"""What trackers and actors put before the names of a framework."""

Logged = Mapping[str, Sequence[float | None]]
"""By name, one value per group."""


@dataclass(frozen=True)
class _Digits:
    """How numbers are printed: the place of the last digit, as an exponent of 10, and how many digits at most."""

    place: int = 0
    count: int = 0

    @classmethod
    def of(cls, printed: Sequence[Decimal]) -> _Digits:
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

    def digits(self) -> dict[str, _Digits]:
        """How each name is printed."""
        printed: dict[str, list[Decimal]] = {}
        for row in self.rows.values():
            for name, value in row.items():
                printed.setdefault(name, []).append(value)
        whole = _Digits.of([value for values in printed.values() for value in values])
        own = {name: _Digits.of(values) for name, values in printed.items()}
        return {name: whole if digits.count < _FEW_DIGITS else digits for name, digits in own.items()}


def read_log(path: str | Path) -> RunLog:
    """Scalars by step: rows of JSON, TensorBoard's event files (one, or a folder of them), or an export as CSV.

    A row of JSON is `{step, data: {name: value}}` or `{step, name: value, ...}`. Rows of one step add to each other;
    what is no finite number is passed over.

    Raises:
        DataError: the file cannot be read, a line is no such row, or there is none.
    """
    place = Path(path)
    if place.is_dir() or is_event_file(place):
        return _collected(path, _events(place))
    if place.suffix.lower() == ".csv":
        return _collected(path, of_csv(_text(place), str(path)))
    return _json_log(place)


def _content(place: Path) -> bytes:
    try:
        return read_regular(place, MOST_BYTES)
    except OSError as error:
        raise DataError(error.strerror or str(error), file=str(place), remedy=_REMEDY) from None


def _text(place: Path) -> str:
    try:
        return decoded(_content(place))
    except TextError as error:
        raise DataError(str(error), file=str(place), remedy=_REMEDY) from None


def _events(place: Path) -> Iterator[tuple[str, str, Decimal]]:
    for file in event_files(place):
        for step, name, value in scalars(_content(file), str(file)):
            yield str(step), name, value


def _collected(path: str | Path, found: Iterator[tuple[str, str, Decimal]]) -> RunLog:
    rows: dict[str, dict[str, Decimal]] = {}
    for step, name, value in found:
        number = decimal(step)
        rows.setdefault(_label(number) if is_number(number) else step, {})[name] = value
    if not rows:
        raise DataError("holds no scalar", file=str(path), remedy=_REMEDY)
    return RunLog(str(path), rows)


def _json_log(path: Path) -> RunLog:
    """Rows of JSON.

    Raises:
        DataError: as of `read_log`.
    """
    rows: dict[str, dict[str, Decimal]] = {}
    for number, line in enumerate(_text(path).split("\n")):
        if line.strip():
            step, values = _row(line, str(path), number)
            rows.setdefault(step, {}).update(values)
    if not rows:
        raise DataError("holds no row", file=str(path), remedy="name a file with one JSON row per step")
    return RunLog(str(path), rows)


def _row(line: str, path: str, number: int) -> tuple[str, dict[str, Decimal]]:
    try:
        row = parse_json(line, as_python_writes=True, number=decimal)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise DataError(
            "not a JSON object", file=path, row=number, remedy="write one row per line, with step and values"
        )
    nested = row.get("data")
    values: Mapping[str, Any] = nested if isinstance(nested, dict) else row
    step = next((found[key] for found in (row, values) for key in STEPS if found.get(key) is not None), None)
    if step is None:
        raise DataError("the row names no step", file=path, row=number, remedy="give each row a key step")
    return _label(step), {name: value for name, value in values.items() if is_number(value) and name not in STEPS}


def _label(step: Any) -> str:
    if isinstance(step, (float, Decimal)):
        number = float(step)
        return str(int(number)) if number.is_integer() else str(number)
    return str(step)


def require_shared_steps(log: RunLog, labels: Sequence[Any]) -> None:
    """Refuse a log of other steps than these.

    Raises:
        DataError: no step of the log is one of the dump.
    """
    steps = {_label(label) for label in labels}
    if steps.isdisjoint(log.rows):
        problem = f"no step of the log is in the dump: it has {_few(log.rows)}, the dump {_few(steps)}"
        raise DataError(problem, remedy="give both the same steps")


def _few(steps: Mapping[str, Any] | set[str]) -> str:
    ordered = sorted(steps, key=lambda step: (len(step), step))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def carried(log: RunLog, labels: Sequence[Any]) -> dict[str, list[float | None]]:
    """Everything that the log has for these steps, one value per step."""
    return log.series([_label(label) for label in labels])


def agreement(log: RunLog, labels: Sequence[Any], replayed: Logged, rounded: Logged) -> AgainstLog:
    """One run under one correction beside its log.

    Args:
        log: of the run.
        labels: of the steps that the values run over.
        replayed: what the framework would have logged, by name.
        rounded: the same from a replay at the other precision.
    """
    steps, digits = [_label(label) for label in labels], log.digits()
    pairs = {
        name: list(_pairs(log, digits, steps, name, values, rounded.get(name, values)))
        for name, values in replayed.items()
    }
    exact = _is_exact([pair for found in pairs.values() for pair in found])
    return AgainstLog(
        names={name: _farthest([pair.judged(exact) for pair in found]) for name, found in pairs.items() if found},
        missing=[name for name, found in pairs.items() if not found],
    )


def metrics_of(log: RunLog, replayed: Collection[str]) -> dict[str, str]:
    """Names of a log that stand for a metric and are not among those that a framework's code replayed, and which."""
    names = dict.fromkeys(name for row in log.rows.values() for name in row)
    plain = {name: _unprefixed(name) for name in names}
    found = {name: certain_metric(name) or certain_metric(plain[name]) for name in names if plain[name] not in replayed}
    return {name: key for name, key in found.items() if key is not None}


def _unprefixed(name: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES[1:] if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def beside_metrics(
    log: RunLog, labels: Sequence[Any], metrics: Mapping[str, Sequence[float | None]], called: Mapping[str, str]
) -> AgainstMetrics | None:
    """Names of a log beside the metrics of a run that they stand for; None where there is none.

    How a framework's float32 rounds is not replayed here: its terms are taken to be right to float32's last bit of 1.

    Args:
        log: of the run.
        labels: of its steps.
        metrics: by key, one value per step, to METRIC_DIGITS.
        called: name -> key.
    """
    steps, digits = [_label(label) for label in labels], log.digits()
    found = {}
    for name, key in called.items():
        values = metrics.get(key, [None] * len(steps))
        rows = [(step, value, log.rows.get(step, {}).get(name)) for step, value in zip(steps, values, strict=True)]
        pairs = [
            _Pair(step, value, value + _LAST_BIT * (1 + abs(value)), float(printed),
                  digits[name].unit(printed) + METRIC_DIGITS * abs(value))
            for step, value, printed in rows
            if value is not None and printed is not None
        ]  # fmt: skip
        if pairs:
            found[name] = _farthest([pair.judged(exact=False) for pair in pairs])
    return AgainstMetrics(names=found, metrics={name: called[name] for name in found}) if found else None


@dataclass(frozen=True)
class _Pair:
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
        spread, rounding = (0.0, EXACT) if exact else (SPREAD * abs(self.rounded - self.dump), ROUNDING)
        near = [self.dump] if exact else [self.dump, self.rounded]
        apart, size = min(abs(self.log - value) for value in near), self.size or 1.0
        allowed = spread + rounding * size + self.unit / 2
        return Agreement(
            steps=1, difference=abs(self.log - self.dump) / size, allowed=min(allowed / size, 1.0),
            step=self.step, dump=self.dump, log=self.log, agrees=apart <= allowed,
        )  # fmt: skip


def _pairs(
    log: RunLog, digits: Mapping[str, _Digits], steps: Sequence[str], name: str,
    values: Sequence[float | None], rounded: Sequence[float | None],
) -> Iterator[_Pair]:  # fmt: skip
    """One name in every step that both have."""
    for step, value, other in zip(steps, values, rounded, strict=True):
        row = log.rows.get(step, {})
        called = next((prefix + name for prefix in _PREFIXES if prefix + name in row), None)
        if value is not None and called is not None:
            printed = row[called]
            yield _Pair(step, value, value if other is None else other, float(printed), digits[called].unit(printed))


def _is_exact(pairs: Sequence[_Pair]) -> bool:
    """Whether the log was computed in float64: mostly, it has the digits that float32 would have got wrong."""
    telling = [pair for pair in pairs if abs(pair.rounded - pair.dump) > EXACT * pair.size]
    right = sum(abs(pair.log - pair.dump) <= EXACT * pair.size for pair in telling)
    return 2 * right > len(telling)


def _farthest(judged: Sequence[Agreement]) -> Agreement:
    worst = max(judged, key=lambda pair: (not pair.agrees, pair.difference))
    return worst.model_copy(update={"steps": len(judged)})
