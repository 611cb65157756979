"""The mismatch grows from some step on."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.levels import series
from mismatchctl.diagnose.measures import fact, loudest

_STEPS, _Z, _SURE, _FACTOR = 6, 6.0, 8.0, 1.25
_WITHIN = 2.71
"""Rise of the weighted squares that bounds a 90 % interval."""


def _test(case: Case) -> Diagnosis | None:
    steps, level, error = series(case)
    if len(steps) < _STEPS:
        return None
    extra = max(0.0, float(np.median(np.diff(level) ** 2)) / 0.4549 / 2 - float(np.mean(error**2)))
    weight = 1 / (error**2 + extra)
    squares, change = _splits(level, weight)
    best = int(np.argmin(squares))
    difference = float(change[best])
    before, after = weight[: best + 1].sum(), weight[best + 1 :].sum()
    z = difference * math.sqrt(before * after / (before + after))
    if z < _Z or difference < math.log(_FACTOR):
        return None
    scale = max(1.0, float(squares[best]) / max(len(steps) - 3, 1))
    close = np.flatnonzero(squares <= squares[best] + _WITHIN * scale)
    onset, first, last = steps[best + 1], steps[int(close[0]) + 1], steps[int(close[-1]) + 1]
    versions = "stale_policy" in case.explained
    later = np.array(
        [isinstance(step, (int, float)) and step >= onset for step in case.column("step").tolist()], np.bool_
    )
    return Diagnosis(
        "medium" if versions or z < _SURE else "high",
        f"|log ratio| is {math.exp(difference):.3g} times larger from step {onset} on (onset between {first} and {last})"
        + ("; the version lag may be why" if versions else ""),
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
            "stale_policy": "rollout_version as the engine reports it, not as the trainer believes: did the syncs arrive?"
        }
        if not versions
        else {},
        leaves=case.without(later[case.sequence]),
    )


def _splits(level: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For a change after each step but the last: weighted squares that are left, and the change."""
    w, wy = np.cumsum(weight), np.cumsum(weight * level)
    total, sums = w[-1], wy[-1]
    low, high = wy[:-1] / w[:-1], (sums - wy[:-1]) / (total - w[:-1])
    left = (weight * level**2).sum() - w[:-1] * low**2 - (total - w[:-1]) * high**2
    return left, high - low


CAUSE = Cause(
    id="growing_mismatch",
    title="The mismatch grows over the steps",
    test=_test,
    advice="Look at what happened at the onset: a weight sync that stopped arriving, a resumed engine, a longer context, a "
    "changed setting. Compare weight checksums on both sides at that step. Stop the run if it goes on: corrections can only delay.",
    pointless="fixed thresholds: a bound that fits the first steps rejects more and more later",
)
