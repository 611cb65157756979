"""What the frameworks' documents advise about a correction, beyond what their code accepts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ValidationError

from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.frameworks.lint import Finding, PlaceOf, decimal

USEFUL: dict[str, tuple[float, float]] = {"token": (1.5, 5.0), "sequence": (2.0, 10.0), "geometric": (1.0002, 1.001)}
"""Upper bounds on a ratio at each level, of weights and of rejection."""
VETO = (1e-6, 1e-4)
"""Thresholds of a veto."""

_RANGES = "documents on rollout importance sampling and rollout correction, recommended threshold ranges"
_VETOES = "rollout_corr_math.md and a page on rollout correction, typical values of the veto"
_NORMALIZES = "articles on the mismatch, batch normalization and the bias-variance trade-off"
_LEVEL_OF_K1 = {"token": "token", "sum": "sequence", "mean": "geometric"}


def advice(correction: Correction, weight_place: str, gate_place: PlaceOf, normalizing: str) -> Iterator[Finding]:
    """What the documents would have otherwise; each with the correction that they would have instead.

    Args:
        correction: what a configuration does.
        weight_place: where the upper bound of its weights stands.
        gate_place: where the bounds of each of its gates stand.
        normalizing: how the framework is told to normalize weights, or why it cannot.
    """
    weight = correction.weight
    if weight is not None:
        yield from _normalize(correction, weight, weight_place, normalizing)
        yield from _weight_range(correction, weight, weight_place)
        yield from _relax(correction, weight, weight_place)
    for index, gate in enumerate(correction.gates):
        yield from _veto(correction, index, gate, gate_place(gate))
        yield from _gate_range(correction, index, gate, gate_place(gate))


def with_gate(correction: Correction, index: int, gate: Gate) -> Correction | None:
    """The correction with another gate in that place; None if it would still be one that holds nothing."""
    gates = (*correction.gates[:index], gate, *correction.gates[index + 1 :])
    return _changed(correction, gates=gates)


def _with_weight(correction: Correction, weight: Weight) -> Correction | None:
    return _changed(correction, weight=weight)


def _changed(correction: Correction, **rules: Any) -> Correction | None:
    """None where a rule is one that a framework takes and nobody should write: reversed bounds, nan."""
    kept = {"weight": correction.weight, "gates": correction.gates, "loss": correction.loss}
    try:
        return Correction(**(kept | rules))
    except ValidationError:
        return None


def _normalize(correction: Correction, weight: Weight, place: str, how: str) -> Iterator[Finding]:
    if weight.level == "token" or weight.normalize != "none":
        return
    consequence = (
        f"{weight.level} weights are not normalized: their mean, and with it the step size, varies from batch to batch"
    )
    instead = _with_weight(correction, weight.model_copy(update={"normalize": "sequence"}))
    yield Finding("advice", place, consequence, how, _NORMALIZES, instead)


def _weight_range(correction: Correction, weight: Weight, place: str) -> Iterator[Finding]:
    low, high = weight.bounds
    nearer = _into(high, USEFUL[weight.level])
    if not low <= 1 < high < math.inf or nearer == high:  # without a bound, or ruinous: said elsewhere
        return
    consequence = _outside(f"the upper bound {high:g} of {weight.level} weights", USEFUL[weight.level])
    instead = _with_weight(correction, _bounded(weight, nearer))
    yield Finding("advice", place, consequence, f"take {nearer:g}", _RANGES, instead)


def _relax(correction: Correction, weight: Weight, place: str) -> Iterator[Finding]:
    (low, high), top = weight.bounds, USEFUL[weight.level][1]
    if weight.normalize == "none" or not low <= 1 < high < top:
        return
    consequence = (
        f"weights are normalized, which holds their variance down already: bounds as tight as {high:g} add bias"
    )
    instead = _with_weight(correction, _bounded(weight, top))
    fix = f"relax the bounds, up to {top:g}, and see that the effective sample size holds"
    yield Finding("advice", place, consequence, fix, _NORMALIZES, instead)


def _veto(correction: Correction, index: int, gate: Gate, place: str) -> Iterator[Finding]:
    low = gate.keep[0]
    if not gate.is_veto or low is None or _into(low, VETO) == low:
        return
    nearer = _into(low, VETO)
    consequence = f"the veto {low:g} lies outside {VETO[0]:g} to {VETO[1]:g}, where it catches catastrophic tokens only"
    instead = with_gate(correction, index, gate.model_copy(update={"keep": (nearer, gate.keep[1])}))
    yield Finding("advice", place, consequence, f"take {decimal(nearer)}", _VETOES, instead)


def _gate_range(correction: Correction, index: int, gate: Gate, place: str) -> Iterator[Finding]:
    found = ratio_bounds(gate)
    if found is None:
        return
    level, low, high = found
    nearer = _into(high, USEFUL[level])
    if not low <= 1 < high < math.inf or nearer == high:  # as above
        return
    consequence = _outside(f"the upper bound {high:g} of {level} rejection", USEFUL[level])
    reciprocal = low > 0 and math.isclose(low * high, 1, rel_tol=1e-6)
    instead = with_gate(correction, index, with_ratio_bounds(gate, 1 / nearer if reciprocal else low, nearer))
    yield Finding("advice", place, consequence, f"take {nearer:g}", _RANGES, instead)


def ratio_bounds(gate: Gate) -> tuple[Literal["token", "sequence", "geometric"], float, float] | None:
    """Level and bounds of a gate on the ratio as a framework writes them, those of k1 as they are; else None."""
    low, high = gate.keep
    if gate.statistic == "ratio" and gate.level in USEFUL:
        return gate.level, low or 0.0, math.inf if high is None else high  # type: ignore[return-value]
    if gate.statistic == "k1" and gate.level in _LEVEL_OF_K1 and low is not None and high is not None:
        return _LEVEL_OF_K1[gate.level], math.exp(low), math.exp(min(high, 700.0))  # type: ignore[return-value]
    return None


def with_ratio_bounds(gate: Gate, low: float, high: float) -> Gate:
    """The gate with other bounds, given as `ratio_bounds` gives them."""
    keep = (low, high) if gate.statistic == "ratio" else (math.log(low) if low else -math.inf, math.log(high))
    return gate.model_copy(update={"keep": keep})


def _bounded(weight: Weight, high: float) -> Weight:
    """The weight with another upper bound, and the lower one along with it where it was its inverse."""
    low, before = weight.bounds
    lower = 1 / high if low and math.isclose(low * before, 1, rel_tol=1e-6) else low
    if weight.truncate is not None:
        return weight.model_copy(update={"truncate": high})
    return weight.model_copy(update={"clip" if weight.clip else "zero": (lower, high)})


def _into(value: float, interval: tuple[float, float]) -> float:
    return min(max(value, interval[0]), interval[1])


def _outside(what: str, interval: tuple[float, float]) -> str:
    return f"{what} lies outside {interval[0]:g} to {interval[1]:g}, the range that is recommended"
