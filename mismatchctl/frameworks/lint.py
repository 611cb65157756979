"""Findings of `lint`, and checks of bounds that all frameworks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.labels import short_number
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.io.yaml import read_data

Level = Literal["error", "warning", "unknown", "info"]
GatePlace = Callable[[Gate], str]
"""Function that returns the configuration key with the bounds of a gate, such as `rollout_rs_threshold`."""

LEVELS: tuple[Level, ...] = ("error", "warning", "unknown", "info")
"""Severities, most severe first: certain error, documented trap, possible error (a value is missing), information."""

_STATISTIC_LIMITS = {
    "k1": LOG_RATIO_BOUND,
    "k2": LOG_RATIO_BOUND**2 / 2,
    "k3": math.exp(LOG_RATIO_BOUND) - 1 - LOG_RATIO_BOUND,
}
"""Largest possible value of each statistic if log ratios are clamped to ±20. With `clamp: none`, there is no limit."""


@dataclass(frozen=True)
class LintMessage:
    """One finding of `lint` about a configuration."""

    level: Level
    place: str  # the dotted key in the configuration. Empty: the whole configuration.
    consequence: str  # the framework's actual behavior
    fix: str  # what to write instead
    source: str  # where the consequence is documented, such as a commit


@cache
def read_table(module: str, name: str) -> Any:
    """Read a YAML file in the folder of a module, with lists as tuples. If the file does not exist, return {}."""
    place = Path(module).with_name(name)
    return _with_tuples(read_data(place)) if place.exists() else {}


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(one) for key, one in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def make_finding(module: str, name: str, source: str, /, **values: Any) -> LintMessage:
    """Create a finding from the entry `name` of traps.yaml, and replace its placeholders by `values`."""
    trap = read_table(module, "traps.yaml")[name]
    shown = {key: _Number(value) if isinstance(value, float) else value for key, value in values.items()}
    consequence, fix = (trap[text].format(**shown) for text in ("consequence", "fix"))
    return LintMessage(trap["level"], trap.get("place", ""), consequence, fix, source)


class _Number(float):
    """A number that `{value:g}` formats with `short_number`, for example as 6.94e-7 or 1.0002."""

    def __format__(self, spec: str) -> str:
        return short_number(self) if spec == "g" else super().__format__(spec)


def is_text_of_number(value: object) -> bool:
    """Return True for a string that is a number, such as "1e-4". PyYAML also reads 1e-4 without quotes as a string."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def format_decimal(value: object) -> str:
    """Format a number so that PyYAML does not read it as a string: 1e-4 becomes 1.0e-4, and 1.0e8 becomes 1.0e+8."""
    mantissa, letter, exponent = str(value).strip().lower().partition("e")
    if not letter:
        return mantissa
    point = "" if "." in mantissa else ".0"
    return f"{mantissa}{point}e{int(exponent):+d}"


def find_named_key(message: str, keys: Mapping[str, Any] | tuple[str, ...]) -> str:
    """Return the longest of `keys` that an error message contains, or ""."""
    return max((key for key in keys if key in message), key=len, default="")


def check_bounds(
    correction: Correction, weight_place: str, gate_place: GatePlace, source: str
) -> Iterator[LintMessage]:
    """Report empty intervals, bounds that no value can reach, and bounds that exclude tokens without a mismatch."""
    if (weight := correction.weight) is not None:
        low, high = weight.bounds
        if math.exp(LOG_RATIO_BOUND) < high < math.inf:
            what = "weights never exceed exp(20), so the bound does not change any weight"
            yield _shared_trap("unreachable", weight_place, source, what=what)
        if not low <= 1 <= high:
            becomes = "0" if weight.zero else short_number(min(max(1.0, low), high))
            found = _shared_trap("changes_agreement", weight_place, source, low=low, high=high, becomes=becomes)
            yield replace(found, level="error") if weight.zero else found
    for gate in correction.gates:
        yield from _check_gate(gate, gate_place(gate), source)


def _shared_trap(name: str, place: str, source: str, /, **values: Any) -> LintMessage:
    return replace(make_finding(__file__, name, source, **values), place=place)


def _check_gate(gate: Gate, place: str, source: str) -> Iterator[LintMessage]:
    low, high = gate.keep
    low = (-math.inf if gate.statistic == "k1" else 0.0) if low is None else low
    high = math.inf if high is None else high
    agreement = 1.0 if gate.statistic == "ratio" else 0.0
    if not low <= high:
        yield _shared_trap("empty", place, source, low=low, high=high)
    elif not low <= agreement <= high:
        values = {"low": low, "high": high, "statistic": gate.statistic, "agreement": agreement}
        yield _shared_trap("rejects_agreement", place, source, **values)
    elif gate.clamp != "none" and gate.level != "sum":
        largest = _STATISTIC_LIMITS.get(gate.statistic, math.exp(LOG_RATIO_BOUND))
        smallest = -LOG_RATIO_BOUND if gate.statistic == "k1" else 1 / largest if gate.statistic == "ratio" else 0.0
        if largest < high < math.inf:
            what = f"{gate.statistic} never exceeds {short_number(largest)}: the upper bound never rejects"
            yield _shared_trap("unreachable", place, source, what=what)
        if low < smallest and low not in (0.0, -math.inf):
            what = f"{gate.statistic} is never below {short_number(smallest)}: the lower bound never rejects"
            yield _shared_trap("unreachable", place, source, what=what)
