"""One number per sequence, repeated on its tokens."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import fact, loudest, percent

_LONG, _NEARLY_ALL, _CLOSE = 8, 0.9, 0.05


def _test(case: Case) -> Detection | None:
    long = case.counts >= _LONG
    if long.sum() < 3 or np.all(case.x == 0):
        return None
    for side, values, other in (("rollout", case.r, case.t), ("train", case.t, case.r)):
        first = values[np.minimum(case.starts, len(values) - 1)]
        one_value = (case.counts > 0) & (case.means(np.abs(values - case.each(first))) == 0)
        constant, least = long & one_value, max(3, _NEARLY_ALL * long.sum())
        if constant.sum() < least:
            continue
        varies = case.means(np.abs(other - case.each(case.means(other)))) > 0
        if (constant & varies).sum() < least or len(np.unique(first[constant])) < 3:
            continue
        far = np.abs(case.means(other) - first)[constant]
        mean = float(np.median(far)) < _CLOSE * max(float(np.median(np.abs(first[constant]))), 0.1)
        tokens = one_value[case.sequence]
        return Detection(
            "high",
            f"{side}_log_probs hold one number per sequence, repeated on its tokens"
            + (": the mean of its log-probs" if mean else ""),
            share=case.share(tokens),
            evidence=(
                fact("constant_rows", float(constant.sum() / long.sum()), "share of rows with one value throughout"),
                fact("off_the_mean", float(np.median(far)), "median distance from the other column's mean, nats"),
            ),
            where={"sequences": percent(float(constant.mean())), "column": f"{side}_log_probs"},
            examples=loudest(case, constant),
            leaves=case.without(tokens),
        )
    return None


CAUSE = Cause(
    id="sequence_means",
    title="One number per sequence in place of log-probs",
    shows="A column is constant within its rows, differs between them, and the other column is not.",
    test=_test,
    advice="Write the log-prob of each token. GSPO and other sequence-level losses average before they form ratios: "
    "take the column from before that.",
    pointless="every correction at the level of tokens; a sequence-level ratio is still right if this is the mean",
)
