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
from mismatchctl.numbers import label
from mismatchctl.result import Growth, growth_of

_STEPS, _BEFORE, _Z, _SURE, _FACTOR = 6, 3, 5.0, 7.0, 1.25


def _test(case: Case) -> Diagnosis | None:
    found = series(case)
    steps, level, error = found.steps, found.level, found.error
    if len(steps) < _STEPS or found.freedom < len(steps):
        return None  # a change between steps is one beyond the scatter within them
    z, difference = _stands_out(level, error, found.freedom)
    if z < _Z or difference < math.log(_FACTOR):
        return None
    growth = case.growth or _of_sample(case)
    if growth.verdict != "grew":  # the level of |log ratio| is known better than K3
        scale = np.exp(level)
        growth = growth_of(steps, scale.tolist(), (scale * error).tolist(), "abs_log_ratio")
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
    return Diagnosis(
        "medium" if recorded or z < _SURE else "high",
        f"{what} {growth.text}" + ("; the version lag may be why" if recorded else ""),
        share=case.share(later[case.sequence]),
        evidence=(
            fact("onset", onset, "first step of the larger mismatch", interval=(float(ends[0]), float(ends[1]))),
            fact("factor", growth.factor or 1.0, f"{what} after over before", interval=growth.interval),
            fact("z", z, "the change of the level of |log ratio| in standard errors"),
        ),
        where={"steps": f"{label(onset)} to {steps[-1]}"},
        examples=loudest(case, later, case.means(np.abs(case.x))),
        rivals={
            "stale_policy": "rollout_version as the engine reports it, not as the trainer believes: did the "
            "syncs arrive?"
        }
        if not recorded
        else {},
        leaves=case.without(later[case.sequence]),
    )


def _stands_out(level: Float64s, error: Float64s, freedom: float) -> tuple[float, float]:
    """How far the levels after some step stand out from those before, in standard errors, and the difference.

    Steps vary as those before the change do; what is left of z is that of the best of all splits.
    """
    squares, change = _splits(level, 1 / error**2)
    best = int(np.argmin(squares))
    good = level[: best + 1] if best >= _BEFORE - 1 else level
    extra = max(0.0, float(np.var(good, ddof=1)) - float(np.mean(error**2)))
    weight = 1 / (error**2 + extra)
    squares, change = _splits(level, weight)
    before, after = weight[: best + 1].sum(), weight[best + 1 :].sum()
    within, between = float(np.mean(error**2)) ** 2 / freedom, extra**2 / (len(good) - 1)
    degrees = (float(np.mean(error**2)) + extra) ** 2 / max(within + between, 1e-300)
    t = float(change[best]) * math.sqrt(before * after / (before + after))
    return among(as_normal(t, degrees), len(level) - 1), float(change[best])


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
