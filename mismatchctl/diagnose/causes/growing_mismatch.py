"""The mismatch grows from some step on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.evidence import LAG
from mismatchctl.diagnose.levels import among, as_normal, cells_of, series
from mismatchctl.diagnose.measures import fact, loudest

_STEPS, _BEFORE, _Z, _SURE, _FACTOR = 6, 3, 5.0, 7.0, 1.25
_CLEARLY, _PERHAPS = 3.0, 1.64
_WITHIN = 2.71
"""Rise of the weighted squares that bounds a 90 % interval."""


def _test(case: Case) -> Diagnosis | None:
    found = series(case)
    steps, level, error = found.steps, found.level, found.error
    if len(steps) < _STEPS or found.freedom < len(steps):
        return None  # a change between steps is one beyond the scatter within them
    squares, change = _splits(level, 1 / error**2)
    best = int(np.argmin(squares))
    good = level[: best + 1] if best >= _BEFORE - 1 else level  # steps vary as those before the change do
    extra = max(0.0, float(np.var(good, ddof=1)) - float(np.mean(error**2)))
    weight = 1 / (error**2 + extra)
    squares, change = _splits(level, weight)
    difference = float(change[best])
    before, after = weight[: best + 1].sum(), weight[best + 1 :].sum()
    within, between = float(np.mean(error**2)) ** 2 / found.freedom, extra**2 / (len(good) - 1)
    freedom = (float(np.mean(error**2)) + extra) ** 2 / max(within + between, 1e-300)
    t = difference * math.sqrt(before * after / (before + after))
    z = among(as_normal(t, freedom), len(steps) - 1)
    if z < _Z or difference < math.log(_FACTOR):
        return None
    scale = max(1.0, float(squares[best]) / max(len(steps) - 3, 1))
    close = np.flatnonzero(squares <= squares[best] + _WITHIN * scale)
    begin = _first_above(level, error, best + 1, _CLEARLY)
    onset = steps[begin]
    first = steps[min(_first_above(level, error, best + 1, _PERHAPS), int(close[0]) + 1)]
    last = steps[max(begin, int(close[-1]) + 1)]
    lag = _lag_by_step(case, steps)
    recorded = lag is not None and lag.max() > lag.min()
    if lag is not None and recorded and lag[-1] <= lag[len(lag) // 2]:
        return None  # the lag has settled: it is a stale policy's, and grows no more
    later = np.array(
        [isinstance(step, (int, float)) and step >= onset for step in case.column("step").tolist()], np.bool_
    )
    return Diagnosis(
        "medium" if recorded or z < _SURE else "high",
        f"|log ratio| is {math.exp(difference):.3g} times larger from step {onset} on (onset between {first} "
        f"and {last})" + ("; the version lag may be why" if recorded else ""),
        share=case.share(later[case.sequence]),
        evidence=(
            fact("onset", float(onset), "first step of the larger mismatch", interval=(float(first), float(last))),
            fact("factor", math.exp(difference), "level of |log ratio| from there on over that before"),
            fact("z", z, "the change in standard errors"),
            fact(
                "last_over_first",
                math.exp(float(level[-1] - level[0])),
                "level of the last step over that of the first",
            ),
        ),
        where={"steps": f"{onset} to {steps[-1]}"},
        examples=loudest(case, later, case.means(np.abs(case.x))),
        rivals={
            "stale_policy": "rollout_version as the engine reports it, not as the trainer believes: did the "
            "syncs arrive?"
        }
        if not recorded
        else {},
        leaves=case.without(later[case.sequence]),
    )


def _lag_by_step(case: Case, steps: list[Any]) -> Float64s | None:
    """Mean version lag of each step; None where some step has none."""
    sums = {step: [0.0, 0.0] for step in steps}
    for (step, lag), row in cells_of(case, LAG).items():
        if step in sums and isinstance(lag, float) and not math.isnan(lag):
            sums[step][0] += row[0]
            sums[step][1] += row[0] * lag
    if not sums or any(count == 0 for count, _ in sums.values()):
        return None
    return np.array([total / count for count, total in sums.values()])


def _first_above(level: Float64s, error: Float64s, begin: int, z: float) -> int:
    """Go back from the best split as long as the step before stands out from all before it: a ramp starts early."""
    while begin > 2:
        before = level[: begin - 1]
        spread = math.hypot(float(error[begin - 1]), float(np.sqrt((error[: begin - 1] ** 2).sum()) / len(before)))
        if level[begin - 1] - before.mean() < z * spread:
            break
        begin -= 1
    return begin


def _splits(level: Float64s, weight: Float64s) -> tuple[Float64s, Float64s]:
    """For a change after each step but the last: weighted squares that are left, and the change."""
    w, wy = np.cumsum(weight), np.cumsum(weight * level)
    total, sums = w[-1], wy[-1]
    low, high = wy[:-1] / w[:-1], (sums - wy[:-1]) / (total - w[:-1])
    left = (weight * level**2).sum() - w[:-1] * low**2 - (total - w[:-1]) * high**2
    return left, high - low


CAUSE = Cause(
    id="growing_mismatch",
    title="The mismatch grows over the steps",
    shows="The level of the mismatch changes at a step and stays up.",
    test=_test,
    advice="Look at what happened at the onset: a weight sync that stopped arriving, a resumed engine, a longer "
    "context, a "
    "changed setting. Compare weight checksums on both sides at that step. Stop the run if it goes on: "
    "corrections can only delay.",
    pointless="fixed thresholds: a bound that fits the first steps rejects more and more later",
)
