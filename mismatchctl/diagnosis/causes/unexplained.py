"""Mismatch that no cause explains: a few tokens, some rows, or more noise than arithmetic can cause."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mismatchctl.core.batch import Bools
from mismatchctl.core.formatting import format_count
from mismatchctl.diagnosis.case import Case, Detection
from mismatchctl.diagnosis.causes.numerics import MIN_STRUCTURE_TOKENS, is_plain_noise, may_be_larger, tail_shares
from mismatchctl.diagnosis.measures import (
    BFLOAT16_NOISE,
    UNRELATED_CORRELATION,
    calibration,
    certain_tokens_differ,
    column_correlation,
    find_loudest,
    find_row_kinds,
    is_greedy,
    make_fact,
    make_noise_fact,
    percent,
)

_GROSS_DISTANCE, _GROSS_NOISE_FACTOR, _GROSS_MAX_SHARE = 1.2, 30.0, 0.45
"""A gross token is off by this many nats and multiples of the noise, on at most this share of tokens."""
_TAIL_Z, _TAIL_COUNT_FACTOR = 12.0, 3
"""The tail contains differences above this multiple of the noise."""
_LOUD_Z, _LOUD_COUNT_FACTOR, _SEAT_MIN_TOKENS = 5.0, 1.5, 5
_FEW_GROSS, _NEARLY_ALL, _FLIP_Z, _FLIP_SHARE, _FEW_FLIPS = 0.05, 0.9, 4.0, 0.2, 0.01
_CALIBRATED_MEAN = 2.0
"""E[ratio] - 1 of a possible sampling distribution. Unrelated columns have far more."""
_MIN_K3_SHARE, _MIN_TOKENS = 0.05, 200
_SURE_ROWS, _SURE_VARIANCE = 32, 1.0
"""With fewer rows and less variance, the cause may be two kinds of prompts."""
_BROKEN_Z, _LOUD_NOISE, _CALIBRATED_Z = 8.0, 0.2, 3.0


def detect_unexplained(case: Case) -> Detection | None:
    if len(case.x) < _MIN_TOKENS and not len(mark_gross_tokens(case).nonzero()[0]):
        return None
    return _match_tokens(case) or (
        None if case.filled or case.reshaped else _match_rows(case) or _match_everywhere(case)
    )


def mark_gross_tokens(case: Case) -> Bools:
    """Return flags of the few tokens [N] that differ far more than the other tokens."""
    size = np.abs(case.x)
    found: Bools = (size > _GROSS_DISTANCE) & (size > _GROSS_NOISE_FACTOR * max(case.noise, 1e-6))
    tailed = int((np.abs(case.standard) > _TAIL_Z).sum()) - int(found.sum()) > _TAIL_COUNT_FACTOR * int(found.sum())
    if tailed or case.filled or case.reshaped:  # then they may be the end of a tail, or ratios of unlikely tokens
        found &= size > 3 * _GROSS_DISTANCE
    return found if len(found) and found.mean() < _GROSS_MAX_SHARE else np.zeros(len(found), np.bool_)


def _match_tokens(case: Case) -> Detection | None:
    chosen = mark_gross_tokens(case)
    if not chosen.any():
        return None
    share = float(case.k3[chosen].sum() / max(float(case.k3.sum()), 1e-300))
    if share < _MIN_K3_SHARE or share * float(case.k3.sum()) < _MIN_K3_SHARE * case.whole_k3:
        return None
    rows = np.bincount(case.where[chosen], minlength=case.size)
    count, sequences = int(chosen.sum()), int((rows > 0).sum())
    upward = float((case.x[chosen] > 0).mean())
    flips = abs(calibration(case).z) < _FLIP_Z and _FLIP_SHARE < upward < 1 - _FLIP_SHARE  # as experts make them
    flips &= count < _FEW_FLIPS * len(case.x)
    sure = share > 0.3 and sequences > 1 and not case.reshaped and not flips
    more = bool(case.explained) and share * float(case.k3.sum()) < _NEARLY_ALL * case.whole_k3  # the same cause again
    sure &= count < _FEW_GROSS * len(case.x) or case.size >= _SURE_ROWS // 2  # a few rows may have a cause of their own
    seats = _find_seats(case, chosen)
    seated = "positions" in seats and count >= _SEAT_MIN_TOKENS  # one long row has many tokens of one worker and step
    far = [int((np.abs(case.standard) > limit).sum()) for limit in (_LOUD_Z, _GROSS_NOISE_FACTOR)]
    tail = may_be_larger(case) and far[0] >= _LOUD_COUNT_FACTOR * far[1] and not seated  # as with different experts
    examples = find_loudest(case, rows > 0, case.sums(case.k3 * chosen))
    first = {int(case.where[i]): int(case.rows.position[case.index[i]]) for i in np.flatnonzero(chosen)[::-1]}
    size, probability = np.abs(case.x), float(np.exp(np.median(case.t[chosen])))
    return Detection(
        "low" if tail or more else "high" if sure else "medium",
        f"{format_count(count, 'token')} in {format_count(sequences, 'row')} {'cause' if count > 1 else 'causes'} "
        f"{percent(share)} of the K3: they are {np.median(size[chosen]):.2g} nats off, other tokens are "
        f"{np.median(size[~chosen]):.2g} nats off, and no known cause explains such tokens",
        tokens=case.marked(chosen),
        evidence=(
            make_fact("tokens", count, "tokens that differ far more than the others"),
            make_fact("rows", sequences, "sequences that contain these tokens"),
            make_fact("k3_share", share, "their share of the K3 that other causes do not explain"),
            make_fact("probability", probability, "median probability that the trainer gives"),
        ),
        where={"tokens": f"{count:,} of {len(case.x):,}", "sequences": f"{sequences:,} of {case.size:,}"} | seats,
        examples=examples,
        positions=np.array([first[int(row)] for row in examples]),
        rivals={
            "padding_or_sentinel": "both columns next to token_ids around these positions: a constant or an end",
            "edited_response": "decode these rows and compare the text with the engine's output",
        },
    )


def _find_seats(case: Case, chosen: Bools) -> dict[str, str]:
    """Return the place where some tokens concentrate: the start or end of rows, a worker or a step."""
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


def _match_rows(case: Case) -> Detection | None:
    found = find_row_kinds(case)
    if found is None:
        return None
    share = float(found.louder.sum()) / found.rows
    meaning = "variance of the rows' log levels beyond chance, below 0.6 for rows of one kind"
    return Detection(
        "high" if found.rows >= _SURE_ROWS and found.variance >= _SURE_VARIANCE else "medium",
        f"rows are of two kinds: in {percent(share)} of the rows, the two sides are {found.times:.3g} times as "
        f"far apart as "
        "in the others, without a pattern in the dump's columns: these rows were sampled or scored differently",
        tokens=found.louder[case.sequence],
        evidence=(
            make_fact("sequences", share, "share of the rows that are farther apart"),
            make_fact("times", found.times, "difference (in logits) of their tokens relative to the others"),
            make_fact("variance", found.variance, meaning),
        ),
        where={"sequences": percent(share)},
        examples=find_loudest(case, found.louder),
        rivals={
            "stale_worker": "record the worker, rank or engine of each row: do these come from one?",
            "temperature": "the sampling settings of these requests, compared with the others",
            "stale_policy": "record rollout_version of each row: are these older?",
        },
    )


def _match_everywhere(case: Case) -> Detection | None:
    """Find more noise than arithmetic can cause, or a rollout column that does not belong to the sampled tokens."""
    if is_plain_noise(case):
        return None
    (share, _), ratio = tail_shares(case), calibration(case)
    if column_correlation(case) < UNRELATED_CORRELATION:
        return _match_unrelated(case)
    broken, told = abs(ratio.z) > _BROKEN_Z and not is_greedy(case), len(case.x) >= MIN_STRUCTURE_TOKENS
    if case.noise <= BFLOAT16_NOISE and not broken:
        return None  # a usual tail beyond noise is part of the noise finding
    sure = told and (case.noise > _LOUD_NOISE or broken)
    summary = (
        f"the two sides are {np.mean(np.abs(case.x)):.2g} nats apart on average, a noise of {case.noise:.2g} in the "
        f"logits, {case.noise / BFLOAT16_NOISE:.2g} times the most that bfloat16 causes. It does not depend on the "
        "token, position, worker or step"
    )
    if certain_tokens_differ(case):
        summary += (
            "; certain tokens differ like the others, as if a number had been added to log-probs, or log_softmax "
            "computed in low precision"
        )
    if broken:
        summary += "; the rollout column is not the distribution that sampled (E[ratio] is not 1)"
    meaning = "E[ratio] - 1 in standard errors: not 0 where another distribution sampled"
    return Detection(
        "low" if may_be_larger(case) else "high" if sure else "medium",
        summary,
        evidence=(
            make_noise_fact(case),
            make_fact("spread", case.spread, "noise of the logits that would cause this K3"),
            make_fact("tail_k3", share, "share of the K3 on tokens beyond the tail of noise"),
            make_fact("ratio_mean_z", ratio.z, meaning),
            make_fact("inverse_ratio_mean_z", ratio.inverse_z, _TRAINER_SAMPLED),
        ),
        rivals=_BROKEN_RIVALS if broken else _NOISE_RIVALS,
        everywhere=True,
    )


def _match_unrelated(case: Case) -> Detection:
    together, ratio = column_correlation(case), calibration(case)
    means = (ratio.z, ratio.excess), (ratio.inverse_z, ratio.inverse)
    sampled = any(abs(z) < _CALIBRATED_Z and mean < _CALIBRATED_MEAN for z, mean in means)
    limit = ", or weights have moved very far, so that one of the two may still be the sampling distribution"
    meaning = "E[ratio] - 1 in standard errors, 0 if the rollout column is the sampling distribution"
    usual = "of the two columns; other weights and settings usually leave it above 0.6"
    return Detection(
        "medium" if sampled else "high",
        f"the two columns have little to do with each other (correlation {together:.2g}): they are not log-probs of "
        f"the same tokens in the same order{limit if sampled else ', with any weights'}",
        evidence=(
            make_fact("correlation", together, usual),
            make_fact("ratio_mean_z", ratio.z, meaning, against=sampled),
            make_fact("inverse_ratio_mean_z", ratio.inverse_z, _TRAINER_SAMPLED, against=sampled),
            make_fact("difference", float(np.mean(np.abs(case.x))), "mean |log ratio|, nats"),
        ),
        rivals={
            "swapped_rows": "join rollout and trainer by a sequence id, not by position",
            "misaligned": "lengths, offsets and padding of each side next to token_ids",
            "edited_response": "the text of each side",
        },
        everywhere=True,
    )


_TRAINER_SAMPLED = "E[1 / ratio] - 1 in standard errors, 0 if the trainer's column is the sampling distribution"
_BROKEN_RIVALS = {
    "other_model": "is this column a draft model's, or from before a logits processor? Score a batch with both",
    "mask_wrong": "token_ids under the mask: did the policy sample all of them?",
}
_NOISE_RIVALS = {
    "weights_differ": "checksums of the weights on both sides; merge adapters; compare checkpoint names",
    "random_noise": "score a batch twice with the trainer: with dropout or router noise, the results differ",
    "position_mismatch": "rope_theta, rope scaling, sliding_window and position_ids on each side; a row scored alone "
    "and together with longer rows: equal? It is not if padding is attended to",
    "cache_quantization": "the same prompts with the cache in bfloat16",
}
