"""The mismatch grows from some step on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.evidence import LAG
from mismatchctl.diagnose.levels import cells_of, series
from mismatchctl.diagnose.measures import fact, loudest
from mismatchctl.numbers import label
from mismatchctl.result import Growth, growth_of

_STEPS, _Z, _SURE, _FACTOR = 6, 5.0, 7.0, 1.25


def _test(case: Case) -> Detection | None:
    found = series(case)
    steps, scale = found.steps, np.exp(found.level)
    if len(steps) < _STEPS or found.freedom < len(steps):
        return None  # a change between steps is one beyond the scatter within them
    own = growth_of(steps, scale.tolist(), (scale * found.error).tolist(), "abs_log_ratio")
    z = own.z or 0.0
    if own.verdict != "grew" or z < _Z or (own.factor or 0.0) < _FACTOR:
        return None
    growth = case.growth or _of_sample(case)
    if growth.verdict != "grew":
        growth = own  # the level of |log ratio| is known better than K3
    onset, ends = growth.onset, growth.onset_interval
    if growth.verdict != "grew" or not isinstance(onset, (int, float)) or ends is None:
        return None
    lag = _lag_by_step(case, steps)
    recorded = lag is not None and lag.max() > lag.min()
    if lag is not None and recorded and lag[-1] <= lag[len(lag) // 2]:
        return None  # the lag has settled: it is a stale policy's, and grows no more
    later = np.array(
        [isinstance(step, (int, float)) and step >= onset for step in case.column("step").tolist()], np.bool_
    )
    what = "K3" if growth.metric == "k3" else "|log ratio|"
    return Detection(
        "medium" if recorded or z < _SURE else "high",
        f"{what} {growth.text}" + ("; the version lag may be why" if recorded else ""),
        share=case.share(later[case.sequence]),
        evidence=(
            fact("onset", onset, "first step of the larger mismatch", interval=(float(ends[0]), float(ends[1]))),
            fact("factor", growth.factor or 1.0, f"{what} after over before", interval=growth.interval),
            fact("z", z, "the change of the level of |log ratio| in standard errors"),
        ),
        where={"steps": f"{label(onset)} to {steps[-1]}"},
        examples=loudest(case, later),
        rivals={
            "stale_policy": "rollout_version as the engine reports it, not as the trainer believes: did the "
            "syncs arrive?"
        }
        if not recorded
        else {},
        leaves=case.without(later[case.sequence]),
    )


def _of_sample(case: Case) -> Growth:
    """How K3 changed over the steps of the sample, as it stands in the dump."""
    whole = Case.of(case.evidence, case.rows)
    own = whole.column("step")
    numbered = [isinstance(step, (int, float)) and not isinstance(step, bool) for step in own.tolist()]
    steps = sorted({step for step, known in zip(own.tolist(), numbered, strict=True) if known})
    sums, values, errors = whole.sums(whole.k3), [], []
    for step in steps:
        inside = np.array([known and one == step for one, known in zip(own.tolist(), numbered, strict=True)])
        tokens = float(whole.counts[inside].sum())
        values.append(float(sums[inside].sum()) / tokens if tokens else None)
        left = np.bincount(whole.clusters[inside], sums[inside] - (values[-1] or 0.0) * whole.counts[inside])
        used = len(np.unique(whole.clusters[inside]))
        errors.append(math.sqrt(float((left**2).sum()) * used / max(used - 1, 1)) / tokens if tokens else None)
    return growth_of(steps, values, errors)


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


CAUSE = Cause(
    id="growing_mismatch",
    title="The mismatch grows over the steps",
    shows="The level of the mismatch changes at a step and stays up.",
    test=_test,
    advice="Look at what happened at the onset: a weight sync that stopped arriving, a resumed engine, a longer "
    "context, a changed setting. Compare weight checksums on both sides at that step. Stop the run if it goes on: "
    "corrections can only delay.",
    pointless="fixed thresholds: a bound that fits the first steps rejects more and more later",
)
