"""Running sums of log-probs in place of log-probs."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import better_as, fact, loudest, percent

_LEAST_SHARE, _FALLS, _LONG = 0.5, 0.98, 6


def _test(case: Case) -> Detection | None:
    for side, values in (("rollout", case.r), ("train", case.t)):
        steps = _steps(case, values)
        inner = case.place > 0
        if inner.sum() < _LONG or float((steps[inner] <= 1e-6).mean()) < _FALLS:
            continue
        column = (case.rollout if side == "rollout" else case.train).copy()
        column[case.index] = np.minimum(steps, 0.0)
        rollout, train = (column, case.train) if side == "rollout" else (case.rollout, column)
        found = better_as(case, rollout, train)
        if found.sum() < 2 or found.sum() < _LEAST_SHARE * (case.counts >= _LONG).sum():
            continue
        after = float(np.median(np.abs(train - rollout)[case.index]))
        return Detection(
            "high",
            f"{side}_log_probs are running sums: their differences are {after:.2g} nats from the other side, not "
            f"{np.median(np.abs(case.x)):.2g}",
            share=1.0,
            evidence=(
                fact("falls", float((steps[inner] <= 1e-6).mean()), "share of tokens no higher than the one before"),
                fact("difference_of_steps", after, f"median |log ratio| with the differences of {side}_log_probs"),
            ),
            where={"sequences": percent(float(found.mean())), "column": f"{side}_log_probs"},
            examples=loudest(case, found),
            leaves=case.repaired(rollout=rollout, train=train),
        )
    return None


def _steps(case: Case, values: Float64s) -> Float64s:
    """Each value minus the one before it in its row; the first as it is [N]."""
    steps = np.diff(values, prepend=0.0)
    return np.where(case.place == 0, values, steps)


CAUSE = Cause(
    id="cumulative",
    title="Running sums in place of log-probs",
    shows="One column only falls within its rows, and its differences agree with the other column.",
    test=_test,
    advice="Write the log-prob of each token: some engines (and beam search) report cumulative_logprob. Take "
    "differences where the dump is written.",
    pointless="every correction: the ratios are not ratios of probabilities",
)
