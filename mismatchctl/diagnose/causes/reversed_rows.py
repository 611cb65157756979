"""One side's log-probs run from the end of the response to its start."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import better_as, fact, loudest, percent

_FEWEST, _LEAST_SHARE, _FAR = 3, 0.05, 0.2


def _test(case: Case) -> Detection | None:
    if not len(case.x) or float(np.mean(np.minimum(np.abs(case.x), 1.0))) < _FAR * _LEAST_SHARE:
        return None
    turned = _turned(case)
    found = better_as(case, turned, case.train)
    if found.sum() < _FEWEST or found.mean() < _LEAST_SHARE:
        return None
    if found.mean() > 0.5:
        found = case.counts > 0
    tokens = found[case.sequence]
    inside = tokens[case.index]
    before = float(np.median(np.abs(case.x[inside])))
    after = float(np.median(np.abs(case.train - turned)[case.index][inside]))
    share = float(found.mean())
    return Detection(
        "high",
        f"read from its end to its start, one column agrees with the other: {after:.2g} nats apart, not {before:.2g}, "
        f"in {percent(share)} of the sequences",
        share=case.share(tokens),
        evidence=(
            fact("difference_as_given", before, "median |log ratio| as the columns stand, nats"),
            fact("difference_reversed", after, "the same with one column reversed within its row"),
        ),
        where={"sequences": percent(share)},
        examples=loudest(case, found),
        leaves=case.repaired(rollout=np.where(tokens, turned, case.rollout)),
    )


def _turned(case: Case) -> Float64s:
    """The rollout's log-probs with the sound tokens of each row in the other order [T]."""
    values = case.rollout.copy()
    values[case.index] = case.r[case.each(case.starts) + case.each(case.counts) - 1 - case.place]
    return values


CAUSE = Cause(
    id="reversed_rows",
    title="One column is in reverse order",
    shows="The columns agree about three times better when one is read from its end.",
    test=_test,
    advice="Look at what joins the columns: a flip for left padding that was not undone, or tokens that a trie or a "
    "queue returns last first. Compare the first and the last log-prob of a row on both sides.",
    pointless="every correction: ratios of different tokens",
)
