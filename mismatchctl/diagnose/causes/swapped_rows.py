"""Rows whose log-probs belong to other rows."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import fact, listed, percent, share_of
from mismatchctl.numbers import counted

_BAD, _LEAST, _HEAD, _MOST = 0.2, 10, 32, 384
_MATCH, _FEWEST, _SURE = 0.35, 2, 0.5


def _test(case: Case) -> Detection | None:
    off = case.means(np.minimum(np.abs(case.x), 1.0))
    candidates = np.flatnonzero((off > _BAD) & (case.counts >= _LEAST))[:_MOST]
    if len(candidates) < _FEWEST:
        return None
    level = _levels(case, candidates)
    own = np.diagonal(level).copy()
    np.fill_diagonal(level, np.inf)
    best = level.argmin(axis=1)
    reached = level[np.arange(len(best)), best]
    usual = np.median(np.where(np.isfinite(level), level, np.nan), axis=1) if len(best) > 2 else own
    matched = (reached < _MATCH * own) & (reached < _MATCH * np.nan_to_num(usual, nan=np.inf))
    if matched.sum() < _FEWEST:
        return None
    found = np.zeros(case.size, np.bool_)
    found[candidates[matched]] = True
    if matched.mean() > _SURE and len(candidates) > 4:  # then those without their other row in the sample too
        found = (case.counts > 0) if found.mean() > _SURE else np.isin(np.arange(case.size), np.flatnonzero(off > _BAD))
    tokens = found[case.sequence]
    ids = case.column("sequence_id")
    names = [ids[row] if ids[row] is not None else case.rows.rows[row] for row in range(case.size)]
    pairs = [f"{names[candidates[i]]} holds {names[candidates[best[i]]]}'s" for i in np.flatnonzero(matched)]
    share = float(matched.mean())
    return Detection(
        "high" if matched.sum() > 2 or share > _SURE else "medium",
        f"the rollout log-probs of {counted(int(matched.sum()), 'row')} fit the trainer's of another row: "
        f"{np.median(reached[matched]):.2g} nats apart there, {np.median(own[matched]):.2g} in their own",
        share=case.share(tokens),
        evidence=(
            fact("rows", int(matched.sum()), "rows whose rollout log-probs fit those of another row"),
            share_of(
                "sequences",
                found,
                case.counts >= _LEAST,
                "share of sequences that hold another's; of some the other row may be elsewhere: at most all that "
                "disagree throughout",
                perhaps=off > _BAD,
            ),
            fact("difference_own", float(np.median(own[matched])), "mean |log ratio| as they stand (at most 1), nats"),
            fact("difference_other", float(np.median(reached[matched])), "the same beside the row that they fit"),
            fact("pairs", listed(pairs, 6), "which row holds whose log-probs"),
        ),
        where={"sequences": percent(float(found.mean()))},
        examples=candidates[matched][:3],
        leaves=case.without(tokens),
    )


def _levels(case: Case, candidates: Ints) -> Float64s:
    """Mean difference (at most 1 nat) of the rollout of each candidate and the trainer of each, over their heads."""
    starts = case.starts[candidates]
    place = np.arange(_HEAD)
    inside = place < case.counts[candidates][:, None]
    at = np.minimum(starts[:, None] + place, len(case.x) - 1)
    rollout, train, weights = case.r[at], case.t[at], inside.astype(np.float64)
    heads = inside.sum(axis=1)
    found = np.empty((len(candidates), len(candidates)))
    for row, head in enumerate(heads.tolist()):
        apart = np.abs(train[:, :head] - rollout[row, :head])
        np.minimum(apart, 1.0, out=apart)
        found[row] = np.einsum("ij,ij->i", apart, weights[:, :head]) / np.minimum(heads, head)
    return found


CAUSE = Cause(
    id="swapped_rows",
    title="Rows hold each other's log-probs",
    shows="Rows that disagree throughout agree with the other column of another row.",
    test=_test,
    advice="Look at what joins rollout and trainer: sorting or balancing by length on one side, an index that was not "
    "undone, asynchronous requests collected in the order of completion. Join by a sequence id.",
    pointless="every correction: ratios of different texts",
)
