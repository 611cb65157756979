"""A run's own log beside what the dump says it should have logged, name by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mismatchctl.errors import DataError
from mismatchctl.result import Result

AGREES = 1e-3
"""Largest relative difference of values that agree: trainers sum in float32."""
NOISE = 1e-6
"""An absolute difference that counts as none: what float32 leaves of sums that cancel."""
_STEPS = ("step", "_step", "global_step", "training/global_step")
_PREFIXES = ("", "train/", "actor/")
"""What trackers and actors put before the names of a framework."""

Log = dict[str, dict[str, float]]
"""Values by step and name."""


@dataclass(frozen=True)
class Agreement:
    """One name: in how many steps both have it, and the step in which they are farthest apart, relatively."""

    name: str
    steps: int
    difference: float
    step: str
    dump: float
    log: float
    agrees: bool


@dataclass
class Comparison:
    """One run under one correction; `missing` names are not in the log, or in no step of the dump's."""

    run: str
    correction: str
    names: list[Agreement] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def read_log(path: str | Path) -> Log:
    """Rows of JSON, each with a step and its values: `{step, data: {name: value}}` or `{step, name: value, ...}`.

    Rows of one step add to each other; what is no finite number is passed over.

    Raises:
        DataError: the file cannot be read, a line is no such row, or there is none.
    """
    log: Log = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "not text"
        raise DataError(problem, file=str(path), remedy="name a file with one JSON row per step") from None
    for number, line in enumerate(lines):
        if line.strip():
            step, values = _row(line, str(path), number)
            log.setdefault(step, {}).update(values)
    if not log:
        raise DataError("holds no row", file=str(path), remedy="name a file with one JSON row per step")
    return log


def _row(line: str, path: str, number: int) -> tuple[str, dict[str, float]]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise DataError(
            "not a JSON object", file=path, row=number, remedy="write one row per line, with step and values"
        )
    nested = row.get("data")
    values: Mapping[str, Any] = nested if isinstance(nested, dict) else row
    step = next((found[key] for found in (row, values) for key in _STEPS if found.get(key) is not None), None)
    if step is None:
        raise DataError("the row names no step", file=path, row=number, remedy="give each row a key step")
    return _label(step), {name: float(value) for name, value in values.items() if _is_number(value)}


def _label(step: Any) -> str:
    return str(int(step)) if isinstance(step, float) and step.is_integer() else str(step)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def compare_with_log(result: Result, log: Log) -> list[Comparison]:
    """Every run and correction that was replayed beside the log.

    Raises:
        DataError: no step of the log is one of the dump.
    """
    steps = {_label(label) for run in result.runs.values() for label in run.groups.labels}
    if steps.isdisjoint(log):
        problem = f"no step of the log is in the dump: it has {_few(log)}, the dump {_few(steps)}"
        raise DataError(problem, remedy="give both the same steps")
    return [
        _compared(Comparison(name, correction), [_label(label) for label in run.groups.labels], logged, log)
        for name, run in result.runs.items()
        for correction, logged in run.logged.items()
    ]


def _few(steps: Mapping[str, Any] | set[str]) -> str:
    ordered = sorted(steps, key=lambda step: (len(step), step))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _compared(found: Comparison, labels: list[str], logged: Mapping[str, list[float | None]], log: Log) -> Comparison:
    for name, values in logged.items():
        pairs = list(_pairs(name, labels, values, log))
        if not pairs:
            found.missing.append(name)
            continue
        step, dump, other = max(pairs, key=lambda pair: _difference(*pair[1:]))
        largest = _difference(dump, other)
        found.names.append(Agreement(name, len(pairs), largest, step, dump, other, largest <= AGREES))
    return found


def _pairs(name: str, labels: list[str], values: list[float | None], log: Log) -> Iterator[tuple[str, float, float]]:
    for label, value in zip(labels, values, strict=True):
        row = log.get(label, {})
        other = next((row[prefix + name] for prefix in _PREFIXES if prefix + name in row), None)
        if value is not None and other is not None:
            yield label, value, other


def _difference(dump: float, other: float) -> float:
    """Relative to the larger of both; 0 for noise."""
    apart = abs(dump - other)
    return 0.0 if apart <= NOISE else apart / max(abs(dump), abs(other))
