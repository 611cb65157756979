"""What no named cause explains: tokens that are no noise of this size, or noise that no arithmetic makes."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mismatchctl.batch import Bools
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE, ENOUGH, UNRELATED, fits, may_be_larger, tail
from mismatchctl.diagnose.kinds import kinds
from mismatchctl.diagnose.measures import calibration, fact, greedy, level, loudest, percent, related
from mismatchctl.numbers import counted
from mismatchctl.result import Confidence

_GROSS, _BEYOND, _RARELY = 1.2, 30.0, 0.05
"""A gross token: so many nats and times the usual noise off, among not more than this share of such."""
_TAIL, _TAILED = 12.0, 3
"""Beyond so many times the noise begins the tail: with so many times more tokens there, gross ones are its end."""
_LOUD, _FEWER, _SEATED = 5.0, 1.5, 5
_HOLD, _FEWEST = 0.05, 200
_MANY, _APART = 32, 1.0
"""Rows, and the variance of their levels, from which rows of two kinds are sure: prompts of two sorts may vary too."""
_BROKEN, _FAR, _CALIBRATED = 8.0, 0.2, 3.0


def _test(case: Case) -> Detection | None:
    if len(case.x) < _FEWEST and not len(gross(case).nonzero()[0]):
        return None
    return _tokens(case) or (None if case.filled or case.reshaped else _rows(case) or _everywhere(case))


def gross(case: Case) -> Bools:
    """Sound tokens far beyond what the others of this dump do, where they are few [N]."""
    size = np.abs(case.x)
    found: Bools = (size > _GROSS) & (size > _BEYOND * max(case.noise, 1e-6))
    tailed = int((np.abs(case.standard) > _TAIL).sum()) - int(found.sum()) > _TAILED * int(found.sum())
    if tailed or case.filled or case.reshaped:  # then they end a tail, or are ratios of unlikely tokens
        found &= size > 3 * _GROSS
    return found if len(found) and found.mean() < _RARELY else np.zeros(len(found), np.bool_)


def _tokens(case: Case) -> Detection | None:
    """Few tokens that hold much of the K3."""
    chosen = gross(case)
    if not chosen.any():
        return None
    share = float(case.k3[chosen].sum() / max(float(case.k3.sum()), 1e-300))
    if share < _HOLD or share * float(case.k3.sum()) < _HOLD * case.whole_k3:
        return None
    tokens = case.marked(chosen)
    rows = np.bincount(case.where[chosen], minlength=case.size)
    count, sequences = int(chosen.sum()), int((rows > 0).sum())
    sure = share > 0.3 and sequences > 1 and not case.reshaped and not case.explained  # else it may be more of the same
    seats = _seats(case, chosen)
    confidence: Confidence = "high" if sure else "medium"
    seated = "positions" in seats and count >= _SEATED  # of workers and steps: one long row is many tokens of one
    if may_be_larger(case) and _ends_a_tail(case) and not seated:
        confidence = "low"
    examples = loudest(case, rows > 0, case.sums(case.k3 * chosen))
    first = {int(case.where[i]): int(case.rows.position[case.index[i]]) for i in np.flatnonzero(chosen)[::-1]}
    return Detection(
        confidence,
        f"{counted(count, 'token')} in {counted(sequences, 'row')} {'hold' if count > 1 else 'holds'} {percent(share)} "
        f"of the K3: {np.median(np.abs(case.x[chosen])):.2g} nats off where others are "
        f"{np.median(np.abs(case.x[~chosen])):.2g}, and no cause that is known here makes such",
        share=case.share(tokens),
        evidence=(
            fact("tokens", count, "tokens far beyond what the others do"),
            fact("rows", sequences, "sequences that hold them"),
            fact("k3_share", share, "share of the K3 (of what other causes leave) on them"),
            fact("probability", float(np.exp(np.median(case.t[chosen]))), "median probability that the trainer gives"),
        ),
        where={"tokens": f"{count:,} of {len(case.x):,}", "sequences": f"{sequences:,} of {case.size:,}"} | seats,
        examples=examples,
        positions=np.array([first[int(row)] for row in examples]),
        rivals={
            "padding_or_sentinel": "print both columns beside token_ids around these positions: a constant, an end?",
            "edited_response": "decode these rows: is the text there what the engine returned?",
        },
        leaves=case.without(tokens),
    )


def _ends_a_tail(case: Case) -> bool:
    """Whether far tokens are fewer than those between them and the noise: so it is where experts differ."""
    size = np.abs(case.standard)
    return int((size > _LOUD).sum()) >= _FEWER * int((size > _BEYOND).sum())


def _seats(case: Case, chosen: Bools) -> dict[str, str]:
    """Where most of some tokens sit, if that is not where tokens usually are: ends, workers, steps."""
    found = {}
    total = int(chosen.sum())
    left = case.each(case.counts) - case.place
    for name, seat in (("first", case.place == 0), ("last", left == 1)):
        inside = int((chosen & seat).sum())
        if inside > max(1, 0.3 * total) and inside > 4 * seat.mean() * total:
            found["positions"] = f"{inside:,} of {total:,} on the {name} token of their row"
    for column in ("worker", "step"):
        values = case.column(column)
        often = Counter(values[case.where[chosen]].tolist()).most_common(1)[0]
        usual = float((case.each(values) == often[0]).mean())
        if often[0] is not None and often[1] > max(2, 0.6 * total) and often[1] > 2 * usual * total:
            found[column] = f"{often[0]} ({often[1]:,} of {total:,})"
    return found


def _rows(case: Case) -> Detection | None:
    """Some rows that were sampled or scored otherwise than the rest."""
    found = kinds(case)
    if found is None:
        return None
    tokens = found.louder[case.sequence]
    share = float(found.louder.sum()) / found.rows
    return Detection(
        "high" if found.rows >= _MANY and found.variance >= _APART else "medium",
        f"rows are of two kinds: {percent(share)} of them are {found.times:.3g} times as far apart as the others, all "
        "along, and no column of the dump says which: they were sampled, or scored, otherwise",
        share=case.share(tokens),
        evidence=(
            fact("sequences", share, "share of the rows that are farther apart"),
            fact("times", found.times, "difference (in logits) of their tokens over that of the others"),
            fact("variance", found.variance, "of the rows' log levels beyond chance: of one kind, below 0.6"),
        ),
        where={"sequences": percent(share)},
        examples=loudest(case, found.louder),
        rivals={
            "stale_worker": "record the worker, rank or engine of each row: do these come from one?",
            "temperature": "the sampling settings of these requests: are they those of the others?",
            "stale_policy": "record rollout_version of each row: are these older?",
        },
        leaves=case.without(tokens),
    )


def _everywhere(case: Case) -> Detection | None:
    """Noise that no arithmetic makes, or a rollout column that did not sample these tokens."""
    if fits(case):
        return None
    share, _ = tail(case)
    _, z, _, inverse_z = calibration(case)
    if related(case) < UNRELATED:
        return _unrelated(case)
    broken = abs(z) > _BROKEN and not greedy(case)
    bulk = case.noise > BFLOAT16_NOISE
    told = len(case.x) >= ENOUGH
    if not bulk and not broken:
        return None  # a tail beyond noise that is as it should be: the noise's own finding says so
    confidence: Confidence = "high" if told and (case.noise > _FAR or broken) else "medium"
    if may_be_larger(case):
        confidence = "low"
    said = (
        f"the two sides are {np.mean(np.abs(case.x)):.2g} nats apart on average, a noise of {case.noise:.2g} in "
        f"the logits, {case.noise / BFLOAT16_NOISE:.2g} times the most that bfloat16 makes; it belongs to no "
        "token, place, worker or step that stands out"
    )
    if level(case):
        said += (
            "; tokens that both sides are certain of differ as much as others, as if something had been added to "
            "log-probs, or log_softmax computed in low precision"
        )
    if broken:
        said += "; the rollout column is not the distribution that sampled (E[ratio] is not 1)"
    return Detection(
        confidence,
        said,
        evidence=(
            fact("noise", case.noise, f"of the logits, robust; bfloat16 stays below {BFLOAT16_NOISE:g}"),
            fact("spread", case.spread, "noise of the logits that would make this K3"),
            fact("tail_k3", share, "share of the K3 on tokens beyond the tail of noise"),
            fact("ratio_mean_z", z, "E[ratio] - 1 in standard errors: not 0 where another distribution sampled"),
            fact("inverse_ratio_mean_z", inverse_z, "the same of 1 / ratio: 0 where the trainer's column sampled"),
        ),
        rivals=_rivals(case, broken),
        everywhere=True,
    )


def _unrelated(case: Case) -> Detection:
    """Columns that are not of the same tokens."""
    together = related(case)
    _, z, _, inverse_z = calibration(case)
    sampled = min(abs(z), abs(inverse_z)) < _CALIBRATED
    return Detection(
        "medium" if sampled else "high",
        f"the two columns have little to do with each other (correlation {together:.2g}): they are not log-probs of "
        "the same tokens in the same order"
        + (
            ", or weights have moved very far: one of both may still be what sampled"
            if sampled
            else ", whatever the weights"
        ),
        evidence=(
            fact("correlation", together, "of the two columns; other weights and settings usually leave it above 0.6"),
            fact(
                "ratio_mean_z",
                z,
                "E[ratio] - 1 in standard errors: 0 where the rollout column sampled",
                against=sampled,
            ),
            fact(
                "inverse_ratio_mean_z",
                inverse_z,
                "the same of 1 / ratio: 0 where the trainer's column sampled",
                against=sampled,
            ),
            fact("difference", float(np.mean(np.abs(case.x))), "mean |log ratio|, nats"),
        ),
        rivals={
            "swapped_rows": "join rollout and trainer by a sequence id, not by place",
            "misaligned": "compare lengths, offsets and padding of both sides beside token_ids",
            "edited_response": "the text of both sides: is it the same?",
        },
        everywhere=True,
    )


def _rivals(case: Case, broken: bool) -> dict[str, str]:
    if broken:
        return {
            "other_model": "is this column a draft model's, or from before a logits processor? Score a batch with each",
            "mask_wrong": "token_ids under the mask: did the policy sample all of them?",
        }
    return {
        "weights_differ": "checksums of the weights on both sides; merge adapters; compare checkpoint names",
        "random_noise": "score a batch twice with the trainer: equal? Dropout, and router noise, are not",
        "position_mismatch": "rope_theta, rope scaling, sliding_window and position_ids of both configurations; a row "
        "scored alone and beside longer ones: equal? Where padding is attended to, it is not",
        "cache_quantization": "the same prompts with the cache in bfloat16",
    }


CAUSE = Cause(
    id="unexplained",
    title="A part of the mismatch is unexplained",
    shows="Tokens, or a noise, beyond what the causes found and the precision make.",
    test=_test,
    advice="Look at the rows named here, at both sides' log-probs beside the text. Then run the experiments below, "
    "cheapest first: score a batch twice, compare the weights' checksums, compare both configurations. `mismatchctl "
    "score` makes a third column, which says whose error it is; its --replay writes sequences for the engine.",
    pointless="thresholds: they hide what is not understood",
    in_layers=True,
)
