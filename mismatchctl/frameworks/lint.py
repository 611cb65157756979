"""Traps in configurations: what a finding is, and the checks of bounds that every framework shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.ratios import LOG_RATIO_BOUND

Level = Literal["error", "warning", "advice", "info"]
PlaceOf = Callable[[Gate], str]
"""Where the bounds of a gate stand in a configuration."""

LEVELS: tuple[Level, ...] = ("error", "warning", "advice", "info")
"""Worst first.

error: rejected, without effect, or ruinous; warning: not what one would expect; advice: what the documents would have
otherwise; info: good to know.
"""

_LARGEST = {"k1": LOG_RATIO_BOUND, "k2": LOG_RATIO_BOUND**2 / 2, "k3": math.exp(LOG_RATIO_BOUND) - 1 - LOG_RATIO_BOUND}
"""What a statistic of log ratios clamped to +-20 reaches."""


@dataclass(frozen=True)
class Finding:
    """One trap in a configuration.

    Attributes:
        level: how bad it is.
        place: the key in the configuration, dotted; empty: the configuration as a whole.
        consequence: what the framework will really do.
        fix: what to write instead.
        source: where that can be looked up.
        instead: the correction that the fix, or another reading of the documents, would make of it.
        change: what that would change on the dumps given, a clause for each run.
    """

    level: Level
    place: str
    consequence: str
    fix: str
    source: str
    instead: Correction | None = None
    change: str = ""


def is_text_of_number(value: object) -> bool:
    """Whether YAML has read a number such as 1e-4 as text."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def decimal(value: object) -> str:
    """A number as YAML takes it for one: 1e-4 needs a point, 1.0e8 a sign."""
    mantissa, letter, exponent = str(value).strip().lower().partition("e")
    if not letter:
        return mantissa
    point, sign = "" if "." in mantissa else ".0", "" if exponent[:1] in "+-" else "+"
    return f"{mantissa}{point}e{sign}{exponent}"


def named_key(message: str, keys: Mapping[str, Any] | tuple[str, ...]) -> str:
    """The key that an error message is about: the longest that it mentions; empty if none."""
    return max((key for key in keys if key in message), key=len, default="")


def bound_findings(correction: Correction, weight_place: str, gate_place: PlaceOf, source: str) -> Iterator[Finding]:
    """Bounds of a correction that nothing reaches, that hold nothing, or that agreement lies outside of."""
    if correction.weight is not None:
        yield from _of_weight(correction.weight, weight_place, source)
    for gate in correction.gates:
        yield from _of_gate(gate, gate_place(gate), source)


def _of_gate(gate: Gate, place: str, source: str) -> Iterator[Finding]:
    """An interval that keeps nothing, that rejects agreement, or with a bound that nothing reaches."""
    low, high = _interval(gate)
    agreement = 1.0 if gate.statistic == "ratio" else 0.0
    if not low <= high:
        yield Finding(
            "error",
            place,
            f"keeps {low:g} to {high:g}, which holds nothing: every token is rejected",
            "give a lower bound that is below the upper one",
            source,
        )
    elif not low <= agreement <= high:
        yield Finding(
            "error",
            place,
            f"keeps {low:g} to {high:g}: {gate.statistic} is {agreement:g} where both policies agree, and is rejected",
            f"give an interval around {agreement:g}",
            source,
        )
    elif gate.clamp != "none" and gate.level != "sum":
        yield from _unreachable(gate, low, high, place, source)


def _unreachable(gate: Gate, low: float, high: float, place: str, source: str) -> Iterator[Finding]:
    largest = _LARGEST.get(gate.statistic, math.exp(LOG_RATIO_BOUND))
    smallest = -LOG_RATIO_BOUND if gate.statistic == "k1" else 1 / largest if gate.statistic == "ratio" else 0.0
    if largest < high < math.inf:
        yield _beyond(f"{gate.statistic} never exceeds {largest:g}: the upper bound rejects nothing", place, source)
    if low < smallest and low not in (0.0, -math.inf):
        yield _beyond(f"{gate.statistic} is never below {smallest:g}: the lower bound rejects nothing", place, source)


def _of_weight(weight: Weight, place: str, source: str) -> Iterator[Finding]:
    """Bounds that nothing reaches, or that 1 is outside of."""
    low, high = weight.bounds
    if math.exp(LOG_RATIO_BOUND) < high < math.inf:
        yield _beyond("weights never exceed exp(20): the bound does nothing", place, source)
    if not low <= 1 <= high:
        becomes = "0" if weight.zero else f"{min(max(1.0, low), high):g}"
        yield Finding(
            "error" if weight.zero else "warning",
            place,
            f"weights are bounded by {low:g} and {high:g}: those of 1, where both policies agree, become {becomes}",
            "give bounds around 1",
            source,
        )


def _beyond(what: str, place: str, source: str) -> Finding:
    consequence = f"log ratios are clamped to +-20, so that {what}"
    return Finding("warning", place, consequence, "give a bound below exp(20), or leave it out", source)


def _interval(gate: Gate) -> tuple[float, float]:
    low, high = gate.keep
    lowest = -math.inf if gate.statistic == "k1" else 0.0
    return (lowest if low is None else low), (math.inf if high is None else high)
