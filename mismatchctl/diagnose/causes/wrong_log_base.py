"""Natural logarithms on one side, another base or the other sign on the other."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.measures import better_as, fact, loudest, percent

_READINGS = {
    "base 2": math.log(2),
    "base 10": math.log(10),
    "the opposite sign": -1.0,
    "base 2 and the opposite sign": -math.log(2),
    "base 10 and the opposite sign": -math.log(10),
}
"""What to multiply by to have natural log-probs again."""
_LEAST_SHARE = 0.05


def _test(case: Case) -> Diagnosis | None:
    best, chosen = np.zeros(case.size, np.bool_), ("", "", 1.0)
    for reading, factor in _READINGS.items():
        for side in ("rollout", "train"):
            found = better_as(case, *_read(case, side, factor))
            if found.sum() > best.sum():
                best, chosen = found, (side, reading, factor)
    share = float(best.mean())
    if best.sum() < 3 or share < _LEAST_SHARE:
        return None
    side, reading, factor = chosen
    slope = float((case.r * case.t).sum() / max((case.t * case.t).sum(), 1e-300))
    rollout, train = _read(case, side, factor)
    tokens = best[case.sequence]
    before = float(np.median(np.abs(case.x[tokens[case.index]])))
    after = float(np.median(np.abs(train - rollout)[case.index][tokens[case.index]]))
    return Diagnosis(
        "high",
        f"{side}_log_probs are in {reading}: read so, the median difference falls from {before:.3g} to "
        f"{after:.3g} nats",
        share=case.share(tokens),
        evidence=(
            fact("difference_as_given", before, "median |log ratio| as the columns stand, nats"),
            fact("difference_reread", after, f"the same with {side}_log_probs times {factor:.4g}"),
            fact("slope", slope, "rollout log-probs by train log-probs through the origin; 1 where both are natural"),
        ),
        where={"sequences": percent(share), "column": f"{side}_log_probs"},
        examples=loudest(case, best, case.means(np.abs(case.x))),
        leaves=case.repaired(
            rollout=np.where(tokens, rollout, case.rollout), train=np.where(tokens, train, case.train)
        ),
    )


def _read(case: Case, side: str, factor: float) -> tuple[Float64s, Float64s]:
    return (case.rollout * factor, case.train) if side == "rollout" else (case.rollout, case.train * factor)


CAUSE = Cause(
    id="wrong_log_base",
    title="Another logarithm on one side",
    shows="The columns agree about three times better when one is multiplied by ln 2, ln 10 or -1.",
    test=_test,
    advice="Convert where the log-probs are recorded: log2 times 0.6931, log10 times 2.3026; negative log-likelihoods "
    "(cross-entropy losses) change their sign. Look at the code that writes the dump, not at the engine.",
    pointless="every correction: the ratios are not ratios of probabilities",
)
