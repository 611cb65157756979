"""Probabilities in a column of log-probs."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import better_as, cannot_be_logs, fact, loudest, percent

_LEAST_SHARE, _FEWEST = 0.05, 3
_SMALLEST = 1e-30


def _test(case: Case) -> Detection | None:
    for side in ("rollout", "train"):
        given = case.rollout if side == "rollout" else case.train
        sound = given[case.index]
        inside = case.segments.max(((sound < 0) | (sound > 1.0 + 1e-3)).view(np.uint8)) <= 0
        if inside.sum() < _FEWEST:
            continue
        as_logs = np.log(np.clip(given, _SMALLEST, None))
        rollout, train = (as_logs, case.train) if side == "rollout" else (case.rollout, as_logs)
        found = better_as(case, rollout, train) & inside
        if cannot_be_logs(sound) and _apart(case, rollout, train) < _apart(case, *_negated(case, side)):
            found |= inside & (case.counts > 0)
        if found.sum() >= _FEWEST and found.mean() >= _LEAST_SHARE:
            return _diagnosis(case, side, found, rollout, train)
    return None


def _negated(case: Case, side: str) -> tuple[Float64s, Float64s]:
    """The columns with one of them in the opposite sign, which lies above 0 as probabilities do."""
    return (-case.rollout, case.train) if side == "rollout" else (case.rollout, -case.train)


def _apart(case: Case, rollout: Float64s, train: Float64s) -> float:
    return float(np.median(np.abs(train - rollout)[case.index]))


def _diagnosis(case: Case, side: str, found: np.ndarray, rollout: Float64s, train: Float64s) -> Detection:
    tokens = found[case.sequence]
    before = float(np.median(np.abs(case.x[tokens[case.index]])))
    after = _apart(case.without(~tokens), rollout, train)
    return Detection(
        "high",
        f"{side}_log_probs are probabilities: their logarithms are {after:.3g} nats from the other side, not "
        f"{before:.3g}",
        share=case.share(tokens),
        evidence=(
            fact("difference_as_given", before, "median |log ratio| as the columns stand, nats"),
            fact("difference_of_logs", after, f"the same with the logarithm of {side}_log_probs"),
        ),
        where={"sequences": percent(float(found.mean())), "column": f"{side}_log_probs"},
        examples=loudest(case, found),
        leaves=case.repaired(
            rollout=np.where(tokens, rollout, case.rollout), train=np.where(tokens, train, case.train)
        ),
    )


CAUSE = Cause(
    id="probabilities_not_logs",
    title="Probabilities in place of log-probs",
    shows="The columns agree about three times better when the logarithm of one is taken.",
    test=_test,
    advice="Write log_softmax(logits), not softmax(logits), or take the logarithm where the dump is written.",
    pointless="every correction: the ratios are not ratios of probabilities",
)
