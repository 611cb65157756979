"""From a position on one side computed with a wrong state or cache, for the same sampled tokens."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.core.batch import Bools, Ints
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.cause import Cause, Detection
from mismatchctl.diagnosis.causes.alignment import find_breaks
from mismatchctl.diagnosis.measures import break_at_turns, find_loudest, make_fact, make_share_fact, percent
from mismatchctl.results.model import Confidence

_CAP = 7.0
_LEAST, _MOST, _MOST_PLACED, _ENOUGH = 0.3, 1.6, 4.0, 60
"""Range of E[ratio] after the break for sampled tokens, and the number of tokens it needs."""
_NOISY = 0.04
"""Noise of the other tokens above which a rise within a row may be usual."""
_RELATED, _NEAR_END = 0.2, 16
_SAME, _ROWS, _FEW, _BESIDE = 0.8, 5, 3, 3
_MANY, _ROUGH = 300, 0.6
"""Tokens, and error of E[ratio], that are enough to call the tokens sampled."""
_MEMBERS, _IMPROBABLE = 3, 1e-4


def _test(case: Case) -> Detection | None:
    breaks = find_breaks(case)
    if breaks is None:
        return None
    found, split = breaks
    if break_at_turns(case, found, split):
        return None  # contexts differ from a turn on
    at_limit = _at_limit(case, found, split)
    by_prompt = _by_prompt(case, found, split)
    after = (case.place >= case.each(split)) & case.each(found)
    ratio = np.exp(np.minimum(case.x[after], _CAP))
    mean, count = float(ratio.mean()), int(after.sum())
    sums, numbers = case.sums(np.where(after, np.exp(np.minimum(case.x, _CAP)), 0.0)), case.sums(after)
    error = float(np.sqrt(((sums - mean * numbers)[found] ** 2).sum())) / max(count, 1)
    related = _correlation(case, after) > _RELATED
    begins, rows = split[found], int(found.sum())
    at_one_place = rows >= _ROWS and float(np.mean(np.abs(begins - np.median(begins)) <= _BESIDE)) >= _SAME
    placed = by_prompt or (at_one_place and related)
    sampled = _LEAST < mean < _MOST and abs(mean - 1) < max(4 * error, 0.3)
    possible = mean < (_MOST_PLACED if placed and related else _MOST) and (placed or (mean > _LEAST and related))
    if not (at_limit or (possible and count >= _ENOUGH)):
        return None
    tokens = case.marked(after)
    if case.without(tokens).noise > _NOISY and not (at_limit or by_prompt):
        return None  # the other rows differ too, late in the response perhaps
    told = sampled and count >= _MANY and 4 * error < _ROUGH
    sure = (at_limit and rows >= _ROWS) or (possible and placed and count >= _ENOUGH) or told
    confidence: Confidence = "high" if sure else "medium"
    share = float(found.sum() / max((case.counts > 0).sum(), 1))
    level = case.sums(np.minimum(np.abs(case.x), 5.0) * after) / np.maximum(numbers, 1)
    examples = find_loudest(case, found, level)
    at = case.rows.position[case.index[np.minimum(case.starts + split, len(case.index) - 1)]]
    left = int(np.median((case.counts - split)[found]))
    if at_limit:
        place = f"the last {left:,} tokens of rows of the greatest length ({int(case.counts.max()):,} tokens)"
    elif by_prompt:
        place = "all samples of some prompts, from a position on"
    else:
        place = f"{percent(share)} of the rows, from a position on"
    said = (
        f". The tokens are the sampled ones: E[ratio] is {mean:.2g} there, and text that was changed after sampling "
        "would leave far more than 1"
        if sampled
        else ""
    )
    return Detection(
        confidence,
        f"one side is off in {place}, by {level[found].mean():.2g} nats on average{said}",
        share=case.share(tokens),
        evidence=(
            make_share_fact(
                "sequences", found, case.counts > 0, "share of rows that agree up to a position and not after it"
            ),
            make_fact(
                "ratio_mean",
                mean,
                "E[ratio] after that position: 1 where these tokens were sampled",
                against=not sampled,
            ),
            make_fact("tokens_after", left, "tokens from there to the end of the row, median"),
            make_fact(
                "at_limit", float(at_limit), "1 if rows of the greatest length are concerned, at one distance from it"
            ),
            make_fact("by_prompt", float(by_prompt), "1 if all samples of some prompts are affected and no others"),
        ),
        where={
            "sequences": percent(share),
            "positions": f"the last {left:,} tokens" if at_limit else "from a position on",
        },
        examples=examples,
        positions=at[examples],
        rivals={"edited_response": "do the two sides have the same token_ids in these rows?"}
        | ({} if at_limit else {"context_mismatch": "the prompt's token ids and their positions on each side"}),
        leaves=case.without(tokens),
    )


def _correlation(case: Case, chosen: Bools) -> float:
    """Return the correlation of the columns on some tokens. In any context it is positive for the same tokens."""
    r, t = case.r[chosen], case.t[chosen]
    return float(np.corrcoef(r, t)[0, 1]) if len(r) > 2 and r.std() > 0 and t.std() > 0 else 0.0


def _at_limit(case: Case, found: Bools, split: Ints) -> bool:
    """Return True if all breaks are in rows of maximum length, at one distance from their end."""
    longest = case.counts == case.counts.max()
    left = (case.counts - split)[found]
    _, counts = np.unique(left, return_counts=True)
    same = counts.max() >= _SAME * len(left) or float(np.ptp(np.quantile(left, (0.1, 0.9)))) <= 2
    return bool(
        found.sum() >= _FEW
        and (found & longest).sum() >= _SAME * found.sum()
        and (found & longest).sum() >= 0.3 * longest.sum()
        and longest.sum() < 0.9 * (case.counts > 0).sum()
        and same
        and np.median(left) <= max(_NEAR_END, 0.1 * case.counts.max())
    )


def _by_prompt(case: Case, found: Bools, split: Ints) -> bool:
    """Return True if broken rows make up whole prompts more often than by chance."""
    if case.rows.columns.get("prompt_id") is None:
        return False
    used = case.counts > np.median(split[found]) + 6  # shorter rows end before it
    if not used.any():
        return False
    clusters = case.clusters[used]
    rows, broken_rows = np.bincount(clusters), np.bincount(clusters, weights=found[used])
    share = float(found[used].mean())
    touched = (broken_rows > 0) & (rows >= _MEMBERS)
    if not touched.any() or share > 0.9:
        return False
    whole = broken_rows[touched] >= _SAME * rows[touched]
    chance = float(np.sum(rows[touched][whole]) * math.log(max(share, 1e-9)))
    return bool(whole.sum() >= _SAME * touched.sum() and chance + math.log(len(rows)) < math.log(_IMPROBABLE))


ENGINE_STATE = Cause("engine_state", _test, in_layers=True)
