"""Both columns agree to the bit."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Bools
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.evidence import Marks
from mismatchctl.diagnose.measures import fact, listed, percent, share_of
from mismatchctl.dumps import Rows
from mismatchctl.result import Fact

_ALL, _ENOUGH_ROWS, _LONG, _OFTEN = 0.999, 0.02, 16, 0.3


def _are_identical(rows: Rows) -> Bools:
    same: Bools = rows.rollout == rows.train
    return same & rows.mask


def _flags(rows: Rows) -> dict[str, Marks]:
    known = rows.look
    return {"identical": Marks.on(rows, _are_identical) if known is None else Marks(known.identical, _are_identical)}


def _test(case: Case) -> Detection | None:
    tally = case.evidence.tallies.get("identical")
    if tally is None or case.evidence.tokens == 0:
        return None
    share = tally.tokens / case.evidence.tokens
    evidence: tuple[Fact, ...] = (
        fact("identical_share", share, "share of valid tokens whose two log-probs are the same bits"),
    )
    if share >= _ALL:
        return Detection(
            "high",
            f"{percent(share)} of the {case.evidence.tokens:,} valid tokens have the same bits in both columns",
            evidence=evidence,
            rivals={"numerical_noise": "recompute one batch with the trainer: exactly equal again, or a copy?"},
            examples=np.arange(min(3, case.size)),
            leaves=case.without(case.sound),
        )
    same = (case.means(case.x == 0) == 1.0) & (case.counts >= _LONG)
    if same.mean() < _ENOUGH_ROWS or same.sum() < 3:
        return None
    others = case.x[~case.each(same)]
    if len(others) and float((others == 0).mean()) > _OFTEN:
        return None  # engines that often agree to the bit do so throughout some rows
    evidence += (
        share_of("identical_sequences", same, case.counts >= _LONG, "share of long sequences that agree to the bit"),
    )
    where = {"sequences": percent(float(same.mean()))}
    workers = case.column("worker")
    if len(set(workers[same].tolist())) < len(set(workers.tolist())):
        where["worker"] = listed(sorted(set(workers[same].tolist()), key=str))
    return Detection(
        "medium",
        f"{percent(float(same.mean()))} of the sequences agree to the bit, the others do not: some rows hold a copy",
        share=0.0,
        evidence=evidence,
        where=where,
        examples=np.flatnonzero(same)[:3],
        rivals={"numerical_noise": "recompute these rows with the trainer"},
        leaves=case.without(same[case.sequence]),
    )


CAUSE = Cause(
    id="identical",
    title="Both columns are the same",
    shows="All log ratios are exactly 0; or whole sequences are, among others that are not.",
    test=_test,
    advice="Nothing to correct, if the trainer recomputed these. Often the column is a copy of the engine's log-"
    "probs, taken as the trainer's{settings}; make sure that the dump holds a recomputation. Truly "
    "bitwise engines (batch-invariant kernels) look the same.",
    pointless="every correction: all ratios are 1",
    flags=_flags,
)
