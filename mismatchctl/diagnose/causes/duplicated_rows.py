"""Rows that are in the dump more than once."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import fact, greedy, percent, share_of

_IMPROBABLE = 14.0
"""Nats: two samples of a sequence less probable than e^-14 do not agree by chance."""


def _test(case: Case) -> Detection | None:
    sample = case.evidence.sample
    if sample is None:
        return None
    _, first, number = np.unique(sample.hashes, return_index=True, return_inverse=True)
    surprise = np.zeros(case.size)
    np.subtract.at(surprise, case.where, np.maximum(case.r, -50.0))
    again = np.ones(case.size, np.bool_)
    again[first] = False
    again &= surprise > _IMPROBABLE
    for row in np.flatnonzero(again).tolist():  # equal hashes are equal rows but for one chance in 2^64
        again[row] = np.array_equal(_values(case, row), _values(case, int(first[number[row]])))
    long = surprise > _IMPROBABLE
    count, eligible = int(again.sum()), int(long.sum())
    if count == 0:
        return None
    share = count / eligible
    ids = case.column("sequence_id")
    same_id = np.array([ids[row] is not None and ids[row] == ids[first[number[row]]] for row in np.flatnonzero(again)])
    likeliest = greedy(case)
    return Detection(
        "low" if likeliest else "high",
        f"{count} of {eligible} rows long enough to tell ({percent(share)}) repeat another row to the bit",
        share=share,
        k3=0.0,
        evidence=(
            share_of("duplicates", again, long, "share of rows that repeat another one, log-probs and all"),
            fact("same_id", float(same_id.mean()), "share of these that carry the same sequence_id"),
        ),
        where={"sequences": percent(share)},
        examples=np.flatnonzero(again)[:3],
        rivals={"numerical_noise": "was sampling greedy? Then equal prompts give equal rows: prompt ids tell"}
        if likeliest
        else {},
        leaves=case.without(again[case.sequence]),
    )


def _values(case: Case, row: int) -> np.ndarray:
    start, stop = case.rows.segments.offsets[row : row + 2]
    return np.concatenate([case.rollout[start:stop], case.train[start:stop]])


CAUSE = Cause(
    id="duplicated_rows",
    title="Rows are there twice",
    shows="Rows with equal log-probs that two samples would share with a probability below e^-14.",
    test=_test,
    advice="Look at what writes the dump: every data-parallel rank writing the whole batch, a resumed run "
    "writing a step again, or rows repeated to fill a batch{settings}. Keep one of each.",
    pointless="nothing is wrong with corrections, but standard errors are too small by the repeats",
)
