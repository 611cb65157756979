"""Placeholders that the mask counts as tokens: NaN, -9999, +1, zeros at the end, an end of text without a log-prob."""

from __future__ import annotations

from functools import partial

import numpy as np

from mismatchctl.batch import Bools
from mismatchctl.contract import POSITIVE_TOLERANCE
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.evidence import Marks, Tally
from mismatchctl.diagnose.measures import fact, loudest, percent, share_of, suspicious_runs
from mismatchctl.dumps import Rows

LOWEST = -200.0
"""No sampled token has a log-prob below this."""
_LEAST_SHARE, _Z = 0.1, 5.0
_SHORT, _FAR, _TIMES = 3, 1.0, 20.0
"""Tokens of which no median is usual; nats, and times that median, beyond which a last token is far off."""
_KINDS = {"nonfinite": "NaN, infinite or null", "positive": "above 0", "sentinel": f"below {LOWEST:g}"}


def _flags(rows: Rows) -> dict[str, Marks]:
    sides = [side for side in ("rollout", "train") if not rows.lies_within(side, LOWEST, POSITIVE_TOLERANCE)]
    return {f"{kind}_{side}": Marks.on(rows, partial(_of_kind, kind, side)) for side in sides for kind in _KINDS}


def _of_kind(kind: str, side: str, rows: Rows) -> Bools:
    values = rows.rollout if side == "rollout" else rows.train
    with np.errstate(invalid="ignore"):
        if kind == "nonfinite":
            return ~np.isfinite(values) & rows.mask
        if kind == "positive":
            return (values > POSITIVE_TOLERANCE) & (values < np.inf) & rows.mask
        return (values < LOWEST) & (values > -np.inf) & rows.mask


def _test(case: Case) -> Detection | None:
    tallies = {name: tally for name, tally in case.evidence.tallies.items() if _counts(case, name)}
    off = (case.rollout > POSITIVE_TOLERANCE) | (case.train > POSITIVE_TOLERANCE)
    off |= (case.rollout < LOWEST) | (case.train < LOWEST)
    cleaned = case.without(off & case.sound)
    ends = _ends(cleaned)
    runs = suspicious_runs(cleaned)
    runs = runs[runs.at_end & ((runs.length >= 4) | (runs.value == 0))]
    tail = runs.tokens(cleaned) | (ends if ends is not None else np.zeros(len(off), np.bool_))
    ended = np.unique(cleaned.sequence[tail])
    if len(ended) < max(3, 0.01 * case.size):
        tail[:] = False
        ended = ended[:0]
    if not tallies and not len(ended):
        return None
    return _diagnosis(case, cleaned, tallies, tail, ended)


def _counts(case: Case, name: str) -> bool:
    """Whether a tally is one of ours, and no other cause has repaired its values."""
    kind, _, _ = name.partition("_")
    repaired = {"wrong_log_base", "probabilities_not_logs", "cumulative"} & {*case.explained}
    return kind in _KINDS and not (kind in ("positive", "sentinel") and repaired)


def _ends(case: Case) -> Bools | None:
    """Last tokens that are far off where those before them are not; None where they are no worse."""
    size = np.abs(case.x)
    long = np.flatnonzero(case.counts > _SHORT)
    least = _LEAST_SHARE * len(long)
    ends = case.segments.offsets[1:][long]
    if (size[ends - 1] > _FAR).sum() < least:
        return None
    some = long[np.maximum(size[ends - 1], size[ends - 2]) > _FAR]
    usual = np.array([np.median(size[slice(*case.segments.offsets[row : row + 2])]) for row in some.tolist()])
    ends = case.segments.offsets[1:][some]
    last, before = (size[ends - k] > np.maximum(_TIMES * usual, _FAR) for k in (1, 2))
    difference = int(last.sum()) - int(before.sum())
    if difference < least or difference < _Z * np.sqrt(last.sum() + before.sum()):
        return None
    return case.marked(ends[last] - 1)


def _diagnosis(case: Case, cleaned: Case, tallies: dict[str, Tally], tail: Bools, ended: np.ndarray) -> Detection:
    evidence, phrases = [], []
    for name, tally in sorted(tallies.items()):
        kind, _, side = name.partition("_")
        evidence.append(fact(name, tally.tokens, f"valid tokens whose {side} log-prob is {_KINDS[kind]}"))
        phrases.append(f"{tally.tokens:,} valid tokens have a {side} log-prob {_KINDS[kind]}")
    where = {}
    if len(ended):
        meaning = "share of sequences that end in tokens one side has no log-prob for"
        rows = np.isin(np.arange(case.size), ended)
        evidence.append(share_of("ends", rows, case.counts > 0, meaning))
        share = len(ended) / max(int((case.counts > 0).sum()), 1)
        values = cleaned.rollout[tail]
        common = values[0] if len(values) and np.all(values == values[0]) else None
        constant = "" if common is None else f" (rollout says {common:g})"
        phrases.append(f"{percent(share)} of the sequences end in tokens that only one side knows{constant}")
        where["positions"] = "the end of the response"
    places = tuple(place for tally in tallies.values() for place in tally.places)[:3]
    return Detection(
        "high",
        "; ".join(phrases),
        share=max(
            case.share(~cleaned.sound | tail),
            min(1.0, sum(t.tokens for t in tallies.values()) / max(case.evidence.tokens, 1)),
        ),
        evidence=tuple(evidence),
        where=where,
        examples=loudest(cleaned, rows) if len(ended) else ended,
        places=places,
        rivals={"mask_wrong": "the mask beside token_ids: does it cover padding?"} if len(ended) else {},
        leaves=cleaned.without(tail),
    )


CAUSE = Cause(
    id="padding_or_sentinel",
    title="Placeholders counted as tokens",
    shows="NaN, infinities, values above 0 or below -200 on valid tokens; constants or gross differences on "
    "last tokens alone.",
    test=_test,
    advice="Mask padding and placeholders out, and record a log-prob for the end-of-text token: engines leave it out "
    "with ignore_eos or when a stop string ends the text (vLLM include_stop_str_in_output, SGLang no_stop_trim), "
    "and give None for the first token of a prompt.",
    pointless="vetoes and rejection: they would drop these sequences and hide the placeholders",
    flags=_flags,
)
