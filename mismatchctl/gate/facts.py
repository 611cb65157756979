"""Judging what cannot be resampled: facts of a dump as they are, and quantiles by the intervals that they have."""

from __future__ import annotations

from mismatchctl.gate.rules import Allowance
from mismatchctl.gate.verdict import LOWER, WITHIN_NOISE, Check, Kind
from mismatchctl.result import Value

Limits = tuple[float, float, float]
"""What a value may reach, and the least and the most that this may truly be."""


def limits_of(
    check: Check, kind: Kind, bound: float | Allowance, baseline: Value | None, *, is_quantile: bool
) -> Limits | None:
    """The limits of a recorded value; None where they cannot be told, with the reason in the check."""
    if not isinstance(bound, Allowance):
        return bound, bound, bound
    if not is_quantile:
        check.reason = check.reason or f"{check.metric} has no known noise to compare with: give it max or min"
    if baseline is None or check.reason:
        return None
    check.baseline, check.baseline_interval, check.baseline_covers = baseline.value, baseline.interval, baseline.covers
    if baseline.value is None:
        check.reason = f"the baseline's value: {baseline.status}"
        return None
    sign = -1 if kind in LOWER else 1
    low, high = baseline.interval or (baseline.value, baseline.value)
    limit, least, most = (
        end + sign * (abs(end) * bound.relative + bound.absolute) for end in (baseline.value, low, high)
    )
    return limit, least, most


def judge_fact(check: Check, found: Value, limits: Limits) -> None:
    """Failed where the value and its interval are beyond the limit, undecided where only the value is."""
    if found.value is None:
        check.reason = found.status
        return
    limit, least, most = limits
    low, high = found.interval or (found.value, found.value)
    beyond, surely = found.value > limit, low > most
    if check.kind in LOWER:
        beyond, surely = found.value < limit, high < least
    check.limit = limit
    check.outcome = "failed" if beyond and surely else "undecided" if beyond else "passed"
    check.reason = WITHIN_NOISE if check.outcome == "undecided" else ""
