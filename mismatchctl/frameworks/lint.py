"""Findings of `lint`, and checks of bounds that all frameworks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.io.yaml import read_data

Level = Literal["error", "warning", "advice", "unknown", "info"]
GatePlace = Callable[[Gate], str]
"""Returns the place of a gate's bounds in a configuration."""

LEVELS: tuple[Level, ...] = ("error", "warning", "advice", "unknown", "info")
"""Severities of findings, most severe first.

error: the framework refuses to start, or its behavior differs from the file. warning: a documented trap. advice: a
documented recommendation. unknown: a value that the file does not contain. info: background."""

_STATISTIC_LIMITS = {
    "k1": LOG_RATIO_BOUND,
    "k2": LOG_RATIO_BOUND**2 / 2,
    "k3": math.exp(LOG_RATIO_BOUND) - 1 - LOG_RATIO_BOUND,
}
"""Range of a statistic of log ratios clamped to ±20."""


@dataclass(frozen=True)
class LintMessage:
    """One finding of `lint` about a configuration."""

    level: Level  # severity
    place: str  # the dotted key in the configuration. Empty: the whole configuration.
    consequence: str  # the framework's actual behavior
    fix: str  # the suggested configuration
    source: str  # a reference
    instead: Correction | None = None  # the correction after the fix, or in another reading of the documents
    change: str = ""  # effect of `instead` on the given dumps, a clause per run


@dataclass(frozen=True)
class Trap:
    """Texts of one documented trap. Consequence and fix contain names of values in braces."""

    level: Level
    consequence: str
    fix: str
    place: str = ""

    def message(self, source: str, instead: Correction | None = None, /, **values: Any) -> LintMessage:
        consequence, fix = (text.format(**values) for text in (self.consequence, self.fix))
        return LintMessage(self.level, self.place, consequence, fix, source, instead)


@cache
def load_traps(folder: Path) -> dict[str, Trap]:
    """Read a framework's traps.yaml."""
    return {name: Trap(**texts) for name, texts in read_data(folder / "traps.yaml").items()}


def is_text_of_number(value: object) -> bool:
    """Return True if YAML reads a number such as 1e-4 as a string."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True


def format_decimal(value: object) -> str:
    """Format a number so that YAML reads it as a number: 1e-4 needs a point, and 1.0e8 needs a sign."""
    mantissa, letter, exponent = str(value).strip().lower().partition("e")
    if not letter:
        return mantissa
    point, sign = "" if "." in mantissa else ".0", "" if exponent[:1] in "+-" else "+"
    return f"{mantissa}{point}e{sign}{exponent}"


def trap_if(name: str, caught: Callable[[Any], Any], place: str = "") -> Callable[[Any], Iterator[LintMessage]]:
    """Create a rule that yields a finding if `caught` is true for a configuration."""

    def rule(written: Any) -> Iterator[LintMessage]:
        if found := caught(written):
            yield written.trap(name, place, **(found if isinstance(found, dict) else {}))

    return rule


def find_named_key(message: str, keys: Mapping[str, Any] | tuple[str, ...]) -> str:
    """Return the longest key in an error message, or ""."""
    return max((key for key in keys if key in message), key=len, default="")


def check_bounds(
    correction: Correction, weight_place: str, gate_place: GatePlace, source: str
) -> Iterator[LintMessage]:
    """Check for bounds that are unreachable, empty, or reject equal policies."""
    if correction.weight is not None:
        yield from _check_weight(correction.weight, weight_place, source)
    for gate in correction.gates:
        yield from _check_gate(gate, gate_place(gate), source)


def _shared_trap(
    name: str, place: str, source: str, instead: Correction | None = None, /, **values: Any
) -> LintMessage:
    return replace(load_traps(Path(__file__).parent)[name].message(source, instead, **values), place=place)


def _check_gate(gate: Gate, place: str, source: str) -> Iterator[LintMessage]:
    """Check for an interval that is empty, rejects equal policies, or has an unreachable bound."""
    low, high = _gate_interval(gate)
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
            what = f"{gate.statistic} never exceeds {largest:g}: the upper bound never rejects"
            yield _shared_trap("unreachable", place, source, what=what)
        if low < smallest and low not in (0.0, -math.inf):
            what = f"{gate.statistic} is never below {smallest:g}: the lower bound never rejects"
            yield _shared_trap("unreachable", place, source, what=what)


def _check_weight(weight: Weight, place: str, source: str) -> Iterator[LintMessage]:
    low, high = weight.bounds
    if math.exp(LOG_RATIO_BOUND) < high < math.inf:
        what = "weights never exceed exp(20): the bound has no effect"
        yield _shared_trap("unreachable", place, source, what=what)
    if not low <= 1 <= high:
        becomes = "0" if weight.zero else f"{min(max(1.0, low), high):g}"
        found = _shared_trap("changes_agreement", place, source, low=low, high=high, becomes=becomes)
        yield replace(found, level="error") if weight.zero else found


def _gate_interval(gate: Gate) -> tuple[float, float]:
    low, high = gate.keep
    lowest = -math.inf if gate.statistic == "k1" else 0.0
    return (lowest if low is None else low), (math.inf if high is None else high)


USEFUL_RATIO_BOUNDS: dict[str, tuple[float, float]] = {
    "token": (1.5, 5.0),
    "sequence": (2.0, 10.0),
    "geometric": (1.0002, 1.001),
}
"""Upper bounds on a ratio at each level, of weights and of rejection."""
USEFUL_VETO_RANGE = (1e-6, 1e-4)
"""Useful thresholds of a veto."""

_RANGES_SOURCE = "documents on rollout importance sampling and rollout correction, recommended threshold ranges"
_VETO_SOURCE = "rollout_corr_math.md and a page on rollout correction, typical values of the veto"
_NORMALIZATION_SOURCE = "articles on the mismatch, batch normalization and the bias-variance trade-off"
_K1_RATIO_LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric"}


def check_advice(
    correction: Correction, weight_place: str, gate_place: GatePlace, normalizing: str
) -> Iterator[LintMessage]:
    """Compare a correction with the recommendations. `normalizing` describes how to normalize, or is empty."""
    if correction.weight is not None:
        yield from _advise_weight(correction, correction.weight, weight_place, normalizing)
    for index, gate in enumerate(correction.gates):
        yield from _advise_gate(correction, index, gate, gate_place(gate))


def replace_gate(correction: Correction, index: int, gate: Gate) -> Correction | None:
    """Return the correction with another gate at an index, or `None` if the gate's interval is empty."""
    gates = (*correction.gates[:index], gate, *correction.gates[index + 1 :])
    return _replace_rules(correction, gates=gates)


def _replace_rules(correction: Correction, **rules: Any) -> Correction | None:
    """Replace rules of a correction, or return `None` if bounds are reversed or nan."""
    kept = {"weight": correction.weight, "gates": correction.gates, "loss": correction.loss}
    try:
        return Correction(**(kept | rules))
    except ValidationError:
        return None


def _advise_weight(correction: Correction, weight: Weight, place: str, normalizing: str) -> Iterator[LintMessage]:
    (low, high), useful = weight.bounds, USEFUL_RATIO_BOUNDS[weight.level]
    nearer = _clip_to(high, useful)
    if weight.level != "token" and weight.normalize == "none" and normalizing:
        instead = _replace_rules(correction, weight=weight.model_copy(update={"normalize": "sequence"}))
        values: dict[str, Any] = {"level": weight.level, "normalizing": normalizing}
        yield _shared_trap("not_normalized", place, _NORMALIZATION_SOURCE, instead, **values)
    if low <= 1 < high < math.inf and nearer != high:  # reported elsewhere if absent or harmful
        instead = _replace_rules(correction, weight=_replace_upper_bound(weight, nearer))
        values = {"high": high, "what": f"{weight.level} weights", "useful": useful, "nearer": nearer}
        yield _shared_trap("outside", place, _RANGES_SOURCE, instead, **values)
    if weight.normalize != "none" and low <= 1 < high < useful[1]:
        instead = _replace_rules(correction, weight=_replace_upper_bound(weight, useful[1]))
        yield _shared_trap("tight", place, _NORMALIZATION_SOURCE, instead, high=high, most=useful[1])


def _advise_gate(correction: Correction, index: int, gate: Gate, place: str) -> Iterator[LintMessage]:
    veto = gate.keep[0]
    if gate.is_veto and veto is not None and (nearer := _clip_to(veto, USEFUL_VETO_RANGE)) != veto:
        instead = replace_gate(correction, index, gate.model_copy(update={"keep": (nearer, gate.keep[1])}))
        values: dict[str, Any] = {"veto": veto, "useful": USEFUL_VETO_RANGE, "nearer": format_decimal(nearer)}
        yield _shared_trap("veto_outside", place, _VETO_SOURCE, instead, **values)
    if (found := ratio_bounds(gate)) is None:
        return
    level, low, high = found
    useful = USEFUL_RATIO_BOUNDS[level]
    nearer = _clip_to(high, useful)
    if low <= 1 < high < math.inf and nearer != high:  # as above
        lower = 1 / nearer if low > 0 and math.isclose(low * high, 1, rel_tol=1e-6) else low
        # k1 is bounded as the framework writes it.
        keep = (lower, nearer)
        if gate.statistic != "ratio":
            keep = (math.log(lower) if lower else -math.inf, math.log(nearer))
        instead = replace_gate(correction, index, gate.model_copy(update={"keep": keep}))
        values = {"high": high, "what": f"{level} rejection", "useful": useful, "nearer": nearer}
        yield _shared_trap("outside", place, _RANGES_SOURCE, instead, **values)


def ratio_bounds(gate: Gate) -> tuple[Literal["token", "sequence", "geometric"], float, float] | None:
    """Return level and bounds of a gate on the ratio as a framework writes them, or `None`."""
    low, high = gate.keep
    if gate.statistic == "ratio" and gate.level in USEFUL_RATIO_BOUNDS:
        return gate.level, low or 0.0, math.inf if high is None else high  # type: ignore[return-value]
    if gate.statistic == "k1" and gate.level in _K1_RATIO_LEVELS and low is not None and high is not None:
        return _K1_RATIO_LEVELS[gate.level], math.exp(low), math.exp(min(high, 700.0))  # type: ignore[return-value]
    return None


def _replace_upper_bound(weight: Weight, high: float) -> Weight:
    """Return the weight with another upper bound. If the lower bound was its inverse, the lower bound changes too."""
    low, before = weight.bounds
    lower = 1 / high if low and math.isclose(low * before, 1, rel_tol=1e-6) else low
    if weight.truncate is not None:
        return weight.model_copy(update={"truncate": high})
    return weight.model_copy(update={"clip" if weight.clip else "zero": (lower, high)})


def _clip_to(value: float, interval: tuple[float, float]) -> float:
    return min(max(value, interval[0]), interval[1])
