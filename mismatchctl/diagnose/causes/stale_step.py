"""One step among good ones whose mismatch stands out, and that is over after it."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.levels import LEAST_ROWS, among, as_normal, series
from mismatchctl.diagnose.measures import fact, listed, loudest

_STEPS, _Z, _SURE, _FACTOR, _MOST = 4, 5.0, 7.0, 1.35, 0.26


def _test(case: Case) -> Detection | None:
    found = series(case)
    level, number = found.level, len(found.steps)
    if number < _STEPS or found.freedom < number:
        return None
    away = level - np.median(level)
    usual = (np.median(np.abs(away)) / 0.6745) ** 2
    extra = max(0.0, float(usual - np.median(found.error**2)))
    error = np.sqrt(found.error**2 * (1 + 1.6 / number) + extra)
    z = np.array([among(as_normal(float(t), found.freedom), number) for t in away / error])
    out = (z > _Z) & (away > math.log(_FACTOR)) & (found.counts >= LEAST_ROWS)
    count = int(out.sum())
    if not count or count > _MOST * number or out[-2:].all():
        return None  # many are no exception, and the last ones may be the begin of something
    names = [found.steps[i] for i in np.flatnonzero(out)]
    mine = np.array([step in names for step in case.column("step").tolist()], np.bool_)
    tokens, factor = mine[case.sequence], math.exp(float(away[out].mean()))
    last = bool(out[-1])
    return Detection(
        "high" if z.max() > _SURE and not last else "medium",
        f"step{'s' * (count > 1)} {listed(names)} differ{'s' * (count == 1)} {factor:.3g} times as much as the others, "
        "before and after: something went wrong there and was over",
        share=case.share(tokens),
        evidence=(
            fact("factor", factor, "level of |log ratio| over the median step"),
            fact("z", float(z.max()), "the difference in standard errors, among so many steps"),
            fact("steps", number, "steps that were compared"),
        ),
        where={"steps": listed(names)},
        examples=loudest(case, mine),
        rivals={"growing_mismatch": "the steps that follow: does it stay?"} if last else {},
        leaves=case.without(tokens),
    )


CAUSE = Cause(
    id="stale_step",
    title="One step differs from the others",
    shows="The level of a step, or of a few, stands out from those before and after.",
    test=_test,
    advice="Look at the logs of that step: a weight sync that came late or not at all, a restarted or resumed engine, "
    "another batch of prompts. If it was a sync, the next one has mended it.",
)
