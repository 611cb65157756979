"""Log-probs that end at a bound."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import fact, loudest, percent

_FEWEST, _BEYOND, _HIGHEST, _SLACK = 4, 0.8, -0.05, 0.1


def _test(case: Case) -> Detection | None:
    if not len(case.x):
        return None
    for side, values, other in (("rollout", case.r, case.t), ("train", case.t, case.r)):
        bound = float(values.min())
        at = values == bound
        count = int(at.sum())
        if count < _FEWEST or bound > _HIGHEST or len(np.unique(values)) < 4 * _FEWEST:
            continue
        slack = _SLACK * abs(bound)
        beyond = float((other[at] <= bound + slack).mean())
        if (
            beyond < _BEYOND
            or len(np.unique(other[at])) < _FEWEST
            or float((other < bound - slack).sum()) < 0.5 * count
        ):
            continue
        tokens = case.marked(at)
        rows = np.bincount(case.where[at], minlength=case.size) > 0
        return Detection(
            "high",
            f"{side}_log_probs end at {bound:.6g}: {count:,} tokens ({percent(count / len(values))}) have it exactly, "
            f"and {percent(beyond)} of these are as low or lower on the other side: they were clamped",
            share=case.share(tokens),
            evidence=(
                fact("bound", bound, f"lowest of the {side} log-probs, nats"),
                fact("tokens", count, "tokens exactly there"),
                fact("beyond", beyond, "share of these that are no higher on the other side"),
            ),
            where={"tokens": percent(count / len(values)), "column": f"{side}_log_probs"},
            examples=loudest(case, rows, case.sums(np.abs(case.x) * at)),
            leaves=case.without(tokens),
        )
    return None


CAUSE = Cause(
    id="clamped",
    title="Log-probs are clamped",
    shows="Several tokens hold exactly the lowest value of a column, and the other column goes below it.",
    test=_test,
    advice="Remove the clamp (torch.clamp, nan_to_num, a probability plus epsilon) between log_softmax and the file: "
    "ratios of unlikely tokens are what corrections act on.",
    pointless="vetoes of unlikely tokens: the clamp hides them",
)
