"""Whether a metric grows otherwise on one side than on the other: the growth of each, and that of their quotient."""

from __future__ import annotations

import math

from mismatchctl.compare.model import GrowthContrast
from mismatchctl.result import Growth, RunResult, growth_of
from mismatchctl.result.growth import Label
from mismatchctl.result.story import growth_of_run

_Step = tuple[float, float]
"""K3 at a step, and its standard error over it."""


def growth(reference: RunResult, other: RunResult) -> GrowthContrast:
    """The growth of K3 on both sides, and of the other's over the reference's at the steps that both have."""
    sides = [growth_of_run(run) for run in (reference, other)]
    before, after = (_steps(run) for run in (reference, other))
    common = [label for label in before if label in after]
    pairs = [(before[label], after[label]) for label in common]
    quotients = [value / base for (base, _), (value, _) in pairs]
    errors = [
        quotient * math.hypot(first, second)
        for quotient, ((_, first), (_, second)) in zip(quotients, pairs, strict=True)
    ]
    return GrowthContrast(
        reference=sides[0], other=sides[1], quotient=growth_of(common, quotients, errors),
        onsets_differ=_apart(*sides),
    )  # fmt: skip


def _steps(run: RunResult) -> dict[Label, _Step]:
    """The steps at which K3 is above 0."""
    series = run.groups.metrics.get("k3")
    if series is None:
        return {}
    errors = series.se or [None] * len(series.value)
    found = zip(run.groups.labels, series.value, errors, strict=True)
    return {label: (value, (error or 0.0) / value) for label, value, error in found if value is not None and value > 0}


def _apart(first: Growth, second: Growth) -> bool | None:
    """Whether no step may be the onset of both; None where one does not grow, or steps have no numbers."""
    ends = [growth.onset_interval for growth in (first, second) if growth.verdict == "grew"]
    known = [(low, high) for low, high in filter(None, ends) if not isinstance(low, str) and not isinstance(high, str)]
    if len(known) < 2:
        return None
    return max(low for low, _ in known) > min(high for _, high in known)
