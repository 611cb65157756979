"""Tests for log-prob columns that contain other values, such as probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Floats
from mismatchctl.core.formatting import format_count
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.causes.data_shape import find_positive_kind
from mismatchctl.diagnosis.detection import Detection, make_fact, percent
from mismatchctl.diagnosis.distributions import estimate_truncation

_PROBABILITIES_MIN_ROWS = 3


def _cannot_be_logs(values: Float64s) -> bool:
    return len(values) > 0 and float(np.mean(values > 0)) > 0.9


def _to_logs(values: Float64s) -> Float64s:
    return np.log(np.clip(values, 1e-30, None))


def detect_probabilities_not_logs(case: Case) -> Detection | None:
    if find_positive_kind(case) == "probabilities":
        return _match_two_probabilities(case)
    everywhere = np.ones(case.size, np.bool_)
    for side, own, _ in case.sides:
        inside = case.segments.max(((own < 0) | (own > 1.0 + 1e-3)).view(np.uint8)) <= 0
        if inside.sum() < _PROBABILITIES_MIN_ROWS:
            continue
        given = getattr(case, side)
        values = _to_logs(given)
        found = case.find_better_reading(side, values) & inside
        if _cannot_be_logs(own):
            as_logs, negated = (case.with_reading(side, column, everywhere) for column in (values, -given))
            if as_logs.distance(everywhere) < negated.distance(everywhere):
                found |= inside & (case.counts > 0)
        if found.sum() >= _PROBABILITIES_MIN_ROWS and found.mean() >= 0.05:
            return _match_reading(
                case, case.with_reading(side, values, found), side, found, f"{side}_log_probs are probabilities. "
                "After taking their logarithm, the median difference between the two sides is {after:.3g} nats instead "
                "of {before:.3g} nats",
                "difference_of_logs", f"median |log ratio| after taking the logarithm of {side}_log_probs",
            )  # fmt: skip
    return None


def _match_reading(case: Case, left: Case, side: str, found: Bools, summary: str, name: str, meaning: str) -> Detection:
    """Report that one side has wrong values in the sequences `found` [S]. `left` is the case with corrected values."""
    before, after = case.distance(found), left.distance(found)
    return Detection(
        "high",
        summary.format(before=before, after=after, share=percent(found.mean())),
        share=case.share(found[case.sequence]),
        evidence=(
            make_fact("difference_as_given", before, "median |log ratio| of the columns as they are, nats"),
            make_fact(name, after, meaning),
        ),
        where={"sequences": percent(found.mean()), "column": f"{side}_log_probs"},
        examples=case.find_loudest(found),
        leaves=left,
    )


def _match_two_probabilities(case: Case) -> Detection:
    apart = float(np.median(np.abs(case.x)))
    return Detection(
        "high",
        "both columns contain probabilities: all values are between 0 and 1, and the columns agree (median difference "
        f"{apart:.2g})",
        k3=1.0,
        evidence=(
            make_fact("least", min(float(case.r.min()), float(case.t.min())), "smallest value in the two columns"),
            make_fact("largest", max(float(case.r.max()), float(case.t.max())), "largest value in the two columns"),
            make_fact("difference", apart, "median difference of the two columns"),
        ),
        where={"column": "rollout_log_probs and train_log_probs"},
        leaves=case.with_log_probs(rollout=_to_logs(case.rollout), train=_to_logs(case.train)),
    )


_REVERSED_MIN_SHARE = 0.05


def detect_reversed_rows(case: Case) -> Detection | None:
    least = 0.2 * _REVERSED_MIN_SHARE
    if not len(case.x) or float(np.mean(np.minimum(np.abs(case.x), 1.0))) < least:
        return None
    values = case.rollout.copy()
    values[case.index] = case.r[case.each(case.starts + case.counts) - 1 - case.place]
    found = case.find_better_reading("rollout", values)
    if found.sum() < 3 or found.mean() < _REVERSED_MIN_SHARE:
        return None
    found = case.counts > 0 if found.mean() > 0.5 else found
    reading = _match_reading(
        case, case.with_reading("rollout", values, found), "rollout", found, "in {share} of the sequences, "
        "one column is in reverse order. After reversing this column, the median difference between the two sides is "
        "{after:.2g} nats instead of {before:.2g} nats",
        "difference_reversed", "median |log ratio| after reversing one column within each row",
    )  # fmt: skip
    return replace(reading, where={"sequences": percent(found.mean())})


_CUMULATIVE_MIN_LENGTH = 6


def detect_cumulative(case: Case) -> Detection | None:
    inner = case.place > 0
    if inner.sum() < _CUMULATIVE_MIN_LENGTH:
        return None
    for side, own, _ in case.sides:
        steps = np.where(inner, np.diff(own, prepend=0.0), own)
        falling = float((steps[inner] <= 1e-6).mean())
        if falling < 0.98:
            continue
        column = getattr(case, side).copy()
        column[case.index] = np.minimum(steps, 0.0)
        found = case.find_better_reading(side, column)
        if found.sum() < 2 or found.sum() < 0.5 * (case.counts >= _CUMULATIVE_MIN_LENGTH).sum():
            continue
        everywhere = np.ones(case.size, np.bool_)
        left = case.with_reading(side, column, everywhere)
        after = left.distance(everywhere)
        return Detection(
            "high",
            f"{side}_log_probs are running sums. The median difference from the other side is {after:.2g} nats for the "
            f"differences of neighboring values, and {np.median(np.abs(case.x)):.2g} nats for the values themselves",
            evidence=(
                make_fact("falls", falling, "share of values that are not above the previous value"),
                make_fact("difference_of_steps", after, f"median |log ratio| of the differences of {side}_log_probs"),
            ),
            where={"sequences": percent(found.mean()), "column": f"{side}_log_probs"},
            examples=case.find_loudest(found),
            leaves=left,
        )
    return None


_LOG_BASES = {"base 2": math.log(2), "base 10": math.log(10)}
_OPPOSITE_SIGN = "the opposite sign"
_LOG_READINGS = (
    _LOG_BASES
    | {_OPPOSITE_SIGN: -1.0}
    | {f"{base} with {_OPPOSITE_SIGN}": -factor for base, factor in _LOG_BASES.items()}
)
"""Wrong log base or sign -> factor that converts the log-probs to natural log-probs."""
_MAX_MULTIPLE_SPREAD = 0.005
_MULTIPLE_CERTAIN, _MULTIPLE_LIKELY, _MULTIPLE_UNLIKELY, _MULTIPLE_MIN_TOKENS = -0.02, -0.7, -1.0, 30
_MULTIPLE_RANGES = (
    *((-0.15, _MULTIPLE_CERTAIN), (_MULTIPLE_LIKELY, -0.15)),
    *((-2.5, _MULTIPLE_UNLIKELY), (-math.inf, -2.5)),
)
"""Ranges of train log-probs. A factor explains the difference only if it is the same in every range."""

LogReading = tuple[str, str, float]
"""(side with wrong values, name of their log base or sign (or ""), factor that converts them to natural logs)."""


def detect_wrong_log_base(case: Case) -> Detection | None:
    if estimate_truncation(case) is not None or {"wrong_sign", "probabilities_not_logs"} & {*case.explained}:
        return None  # another cause already explains the difference
    best, (side, reading, factor) = _find_best_reading(case)
    share = float(best.mean())
    if best.sum() < 3 or share < 0.05:
        return None
    left = case.with_reading(side, getattr(case, side) * factor, best)
    before, after = case.distance(best), left.distance(best)
    if share < 0.5 and after > 0.15 * before:
        return None  # a few rows agree a little better by chance
    signed = _OPPOSITE_SIGN in reading  # sure, because log-probs are never above 0
    read = left.without(~best[case.sequence])
    ratio = read.calibration
    sampled = abs(ratio.z) < 4.0 or abs(ratio.excess) < 0.01
    fits = read.noise < 0.1 or (sampled and read.noise < 0.3)
    if after > 0.02 * before and not signed and not fits:
        return None  # with this factor, the sides still differ much, and E[ratio] is not 1
    found = _match_reading(
        case, left, side, best, _describe_reading(side, reading, 1 / factor)
        + f". If {side}_log_probs are multiplied by {factor:.4g}, the median difference between the two sides is "
        "{after:.3g} nats instead of {before:.3g} nats", "difference_reread",
        f"median |log ratio| if {side}_log_probs are multiplied by {factor:.4g}",
    )  # fmt: skip
    unsure = np.minimum(np.abs(case.r), np.abs(case.t)) > -_MULTIPLE_CERTAIN
    slope = float(np.median(case.r[unsure] / case.t[unsure])) if unsure.any() else 1.0
    fact = make_fact("slope", slope, "median of rollout log-prob divided by train log-prob: 1 for natural logarithms")
    rivals = {} if reading else {"temperature": "check in the code whether a temperature divides logits or log-probs"}
    return replace(found, evidence=(*found.evidence, fact), rivals=rivals)


def _find_best_reading(case: Case) -> tuple[Bools, LogReading]:
    """Find the side and the factor, such as -1 or ln 10, that make most sequences agree, and flag these sequences."""
    factor = None if case.reshaped else _find_multiple(case)
    if factor is not None:
        found = case.find_better_reading("rollout", case.rollout / factor)
        if found.mean() > 0.5:
            return found, ("rollout", "", 1 / factor)
    best, chosen = np.zeros(case.size, np.bool_), ("", "", 1.0)
    for reading, multiple in _LOG_READINGS.items():
        for side, _, _ in case.sides:
            found = case.find_better_reading(side, getattr(case, side) * multiple)
            if found.sum() > best.sum():
                best, chosen = found, (side, reading, multiple)
    for side, own, _ in case.sides:
        if _cannot_be_logs(own) and best.mean() < 0.5:
            return case.means(own > 0) > 0.5, (side, _OPPOSITE_SIGN, -1.0)
    return best, chosen


def _find_multiple(case: Case) -> float | None:
    """Return the factor rollout / train log-prob if it is the same for all tokens, but not 1 or a known log base."""
    unsure = (case.r < _MULTIPLE_CERTAIN) & (case.t < _MULTIPLE_CERTAIN)

    def quotients(chosen: Bools) -> Float64s:
        return np.log(case.r[unsure & chosen] / case.t[unsure & chosen])

    likely, unlikely = quotients(case.t > _MULTIPLE_LIKELY), quotients(case.t < _MULTIPLE_UNLIKELY)
    if min(len(likely), len(unlikely)) < _MULTIPLE_MIN_TOKENS:
        return None
    factor = float(np.median(np.append(likely, unlikely)))
    if abs(factor) < 0.03:
        return None
    doubt = _MAX_MULTIPLE_SPREAD + 3 * math.hypot(_median_error(likely), _median_error(unlikely))
    if abs(np.median(likely) - np.median(unlikely)) > doubt:
        return None
    for low, high in _MULTIPLE_RANGES:
        part = quotients((case.t > low) & (case.t <= high))
        if len(part) < _MULTIPLE_MIN_TOKENS:
            continue
        if abs(np.median(part) - factor) > _MAX_MULTIPLE_SPREAD + 3 * _median_error(part):
            return None
    known = (math.log(base) * sign for base in _LOG_BASES.values() for sign in (1, -1))
    return None if min(abs(factor - base) for base in known) < doubt else math.exp(factor)


def _median_error(values: Float64s) -> float:
    return 1.86 * float(np.median(np.abs(values - np.median(values)))) / math.sqrt(len(values))


def _describe_reading(side: str, reading: str, multiple: float) -> str:
    if reading:
        return f"{side}_log_probs {'have' if reading == _OPPOSITE_SIGN else 'are in'} {reading}"
    return (
        f"rollout_log_probs are {multiple:.4g} times train_log_probs at every probability. This happens if log-probs "
        f"instead of logits are divided by a temperature: of {1 / multiple:.3g} on the rollout side, or of "
        f"{multiple:.3g} on the trainer's side"
    )


_LATTICE_ALL_SHARE = 0.995
_DECIMAL_DIGITS = range(1, 6)
_LATTICE_MAX_LOG_PROB = -0.25
"""Log-probs above this value are not tested, because cancellation leaves them few significant bits in any format."""
_ROUNDING_SHARE = 0.25


def _lies_on_lattice(values: Floats, bits: int) -> Bools:
    single = values.astype(np.float32, copy=False)
    low_bits = np.uint32((1 << (24 - bits)) - 1)
    kept: Bools = ((single.view(np.uint32) & low_bits) == 0) & (single == values)
    return kept


def detect_low_precision_logging(case: Case) -> Detection | None:
    if not len(case.x):
        return None
    for side, own, _ in case.sides:
        values, decimals = getattr(case.rows, side), _find_decimals(own)
        if decimals is not None:  # tested first: many short decimals are exact in bfloat16 and float16
            step = np.full(len(case.x), 10.0**-decimals)
            return _match_low_precision(case, side, format_count(decimals, "decimal"), 1.0, 1e-3, step)
        unsure = values[case.sound & (values < _LATTICE_MAX_LOG_PROB)]
        for name, bits in {"bfloat16": 8, "float16": 11}.items():
            kept = unsure[_lies_on_lattice(unsure, bits)]
            share = len(kept) / max(len(unsure), 1)
            # fewer than 10 different values are placeholders, not rounded log-probs
            if share >= 0.02 and len(np.unique(kept)) >= 10:
                spacing = np.ldexp(1.0, np.frexp(np.maximum(np.abs(own), 1e-30))[1] - bits)
                return _match_low_precision(case, side, name, share, 2.0 ** (bits - 24), spacing)
    return None


def _find_decimals(values: Float64s) -> int | None:
    """Return d if nearly all values are rounded to d decimals."""
    used = values[values < -1e-3]
    most = (1 - _LATTICE_ALL_SHARE) * len(used)

    def count_longer(values: Float64s, digits: int) -> int:
        scaled = values * 10.0**digits
        return int(np.count_nonzero(np.abs(scaled - np.round(scaled)) > np.abs(scaled) * 2.0**-23 + 1e-9))

    for digits in _DECIMAL_DIGITS if len(used) >= 50 else ():
        # checking the first 8,192 values saves time, because they usually show that `digits` is too small
        if count_longer(used[: 1 << 13], digits) <= most and count_longer(used, digits) <= most:
            return digits if len(np.unique(used)) > 10 else None
    return None


def _match_low_precision(case: Case, side: str, name: str, share: float, chance: float, spacing: Float64s) -> Detection:
    rounding, seen = float(spacing.mean()) / 4, float(np.abs(case.x).mean())
    explained = min(1.0, (rounding / seen) ** 2) if seen else 0.0
    partly, bound = share < _LATTICE_ALL_SHARE, f"{_LATTICE_MAX_LOG_PROB:g}"
    doubt = -np.expm1(np.minimum(case.t, 0.0)) + 0.02
    as_noise = float(np.median(spacing / 4 / doubt)) / 0.6745
    return Detection(
        "high",
        f"{percent(share)} of the {side} log-probs are {name} numbers, so they were stored in this format. The "
        f"rounding causes a mean difference of {rounding:.2g} nats. The observed mean difference is {seen:.2g} nats",
        share=explained * (share if partly else 1.0),
        k3=explained * (share if partly else 1.0),
        everywhere=explained > _ROUNDING_SHARE or as_noise > _ROUNDING_SHARE / 2 * case.noise,
        evidence=(
            make_fact("on_lattice", share, f"share of {side} log-probs below {bound} that {name} stores exactly"),
            make_fact("by_chance", chance, "share of exact values expected by chance"),
            make_fact("rounding", rounding, "mean difference that this rounding causes, nats"),
            make_fact("difference", seen, "mean |log ratio|, nats", against=seen > 2 * rounding),
        ),
        where={"column": f"{side}_log_probs"} | ({"tokens": percent(share)} if partly else {}),
        examples=np.flatnonzero(case.counts > 0)[:3],
        rivals={"numerical_noise": "check whether log_softmax is computed in float32. Low precision looks the same"},
    )


def detect_sequence_means(case: Case) -> Detection | None:
    long = case.counts >= 8
    if long.sum() < 3 or np.all(case.x == 0):
        return None
    for side, values, other in case.sides:
        first = values[np.minimum(case.starts, len(values) - 1)]
        one_value = (case.counts > 0) & (case.means(np.abs(values - case.each(first))) == 0)
        constant, least = long & one_value, max(3, 0.9 * long.sum())
        if constant.sum() < least:
            continue
        varies = case.means(np.abs(other - case.each(case.means(other)))) > 0
        if (constant & varies).sum() < least or len(np.unique(first[constant])) < 3:
            continue
        far = np.abs(case.means(other) - first)[constant]
        mean = float(np.median(far)) < 0.05 * max(float(np.median(np.abs(first[constant]))), 0.1)
        return Detection(
            "high",
            f"all tokens of a sequence have the same value in {side}_log_probs"
            + (": the mean log-prob of the sequence" if mean else ""),
            tokens=one_value[case.sequence],
            evidence=(
                make_fact("constant_rows", constant.sum() / long.sum(), "share of rows whose values are all equal"),
                make_fact("off_the_mean", np.median(far), "median distance from the mean of the other column, nats"),
            ),
            where={"sequences": percent(constant.mean()), "column": f"{side}_log_probs"},
            examples=case.find_loudest(constant),
        )
    return None


_CLAMPED_MIN_TOKENS = 4


def detect_clamped(case: Case) -> Detection | None:
    if not len(case.x):
        return None
    for side, values, other in case.sides:
        bound = float(values.min())
        at, slack = values == bound, 0.1 * abs(bound)
        count, beyond = int(at.sum()), float((other[at] <= bound + slack).mean())
        if count < _CLAMPED_MIN_TOKENS or bound > -0.05 or beyond < 0.8:
            continue
        if len(np.unique(values)) < 4 * _CLAMPED_MIN_TOKENS or len(np.unique(other[at])) < _CLAMPED_MIN_TOKENS:
            continue
        if float((other < bound - slack).sum()) < 0.5 * count:
            continue
        rows = np.bincount(case.where[at], minlength=case.size) > 0
        return Detection(
            "high",
            f"{side}_log_probs were clamped at {bound:.6g}. {count:,} tokens ({percent(count / len(values))}) have "
            f"exactly this value, and {percent(beyond)} of these tokens have a similar or lower log-prob on the other "
            "side",
            tokens=case.marked(at),
            evidence=(
                make_fact("bound", bound, f"lowest {side} log-prob, nats"),
                make_fact("tokens", count, "number of tokens with exactly this log-prob"),
                make_fact("beyond", beyond, "share of these tokens whose log-prob is not higher on the other side"),
            ),
            where={"tokens": percent(count / len(values)), "column": f"{side}_log_probs"},
            examples=case.find_loudest(rows, case.sums(np.abs(case.x) * at)),
        )
    return None


_FEWEST, _FEWEST_FAR = 200, 8
_FAR, _POWER = 0.25, 0.1
_UNSURE = (-3.0, -0.3)


def detect_other_token_recorded(case: Case) -> Detection | None:
    if len(case.x) < _FEWEST or case.reshaped:
        return None
    found = (_match_other_token(case, *side) for side in case.sides)
    return next((detection for detection in found if detection is not None), None)


def _match_other_token(case: Case, side: str, own: Float64s, other: Float64s) -> Detection | None:
    """Find tokens whose log-prob on one side belongs to another, more likely token."""
    down = other - own
    loud = np.flatnonzero(np.abs(down) > _FAR)
    if np.count_nonzero(down[loud] < 0) < _FEWEST_FAR:
        return None
    p = np.exp(np.minimum(own, 0.0))
    doubt = 1.0 - p
    doubtful = case.doubtful | (own < -0.02)
    if doubtful.sum() < _FEWEST:
        return None
    scaled = down / (doubt + 0.02)
    # estimate the noise from the 20% of the tokens with the smallest difference, because most may be wrong
    noise = max(float(np.quantile(np.abs(scaled[doubtful]), 0.2)) / 0.2533, 1e-4)
    limit = np.maximum(12.0 * noise * (doubt[loud] + 0.02), _FAR)
    far = np.zeros(len(own), np.bool_)
    far[loud] = down[loud] < -limit
    count = int(far.sum())
    if count < _FEWEST_FAR or _is_constant(own[far]) or _is_constant(other[far]):
        return None
    other_way = np.count_nonzero(down[loud] > limit) / count
    if other_way >= 0.05:
        return None
    near = np.abs(scaled) < 4.0 * noise
    between = float(((down < 0) & ~near & ~far & doubtful).sum()) / count
    # The probabilities of two different tokens add up to at most 1. Shuffled pairs often have a larger sum.
    room, slack = np.log(-np.expm1(np.minimum(own[far], -1e-12))), 0.1 + 3 * noise
    violated, shuffled = float((other[far] > room + slack).mean()), np.random.default_rng(0).permutation(other[far])
    possible = shuffled < own[far] - limit[far[loud]]
    power = float((shuffled > room + slack)[possible].mean()) if possible.any() else 0.0
    unsure = (own > _UNSURE[0]) & (own < _UNSURE[1])
    spike = float(near[unsure].mean()) / max(float(p[unsure].mean()), 1e-9) if unsure.any() else 0.0
    shows = power > _POWER or (spike > 0.5 and between < 0.16)
    if not shows or violated >= 0.04 or between >= 0.5:
        return None
    certain = own > np.log(0.8)
    allowed, known = float(doubt[certain].sum()), float((far & certain).sum())
    if max(known - 3 * math.sqrt(known), 0.0) / max(allowed, 1e-9) > 2.0:
        return None
    # A recorded token with p > 1/2 is the likeliest token, and the sampler chose it with probability p. So for each
    # such token that agrees with the other side, (1 - p) / p tokens are expected to be far off.
    likely = own > np.log(0.5)
    expected = float((doubt / p)[likely & ~far].sum())
    affected = min(1.0, float((far & likely).sum()) / expected) if expected > 0 else 1.0
    tokens, rows, ratio = case.marked(far), np.bincount(case.where[far], minlength=case.size) > 0, case.calibration
    most = float(np.quantile(p[far] + np.exp(np.minimum(other[far], 0.0)), 0.99))
    name, mean, z = "E[ratio] - 1", ratio.excess, ratio.z
    if side == "train":
        name, mean, z = "E[1 / ratio] - 1", ratio.inverse, ratio.inverse_z
    sure = count >= 20 and rows.sum() > 1
    rival = {"truncated_sampling": "check whether the token ids and the recorded log-probs belong to the same tokens"}
    # `reshaped`: if many tokens are wrong, the tokens that agree are a biased selection
    return Detection(
        "high" if sure else "medium",
        f"for {format_count(count, 'token')} ({percent(count / len(case.x))}), {side}_log_probs contain the log-prob "
        f"of another, likelier token. This log-prob is {np.median((own - other)[far]):.2g} nats above the log-prob of "
        f"the other side, and never far below it. All other tokens agree. About {percent(affected)} of all tokens have "
        "this fault, but it is invisible if the likeliest token was sampled",
        evidence=(
            make_fact("tokens", count, f"number of tokens whose {side} log-prob is far above the other side's"),
            make_fact("share", count / len(case.x), "these tokens as a share of all tokens"),
            make_fact("affected", affected, "estimated share of tokens with the log-prob of the likeliest token"),
            make_fact("other_way", other_way, "tokens far below the other side / far above it: 0.5 or more for noise"),
            make_fact("sum_of_both", most, "99% quantile of the sum of both probabilities: at most 1 for two tokens"),
            make_fact("between", between, "tokens just above noise / far above it: small if the other tokens agree"),
            make_fact("ratio_mean_minus_one", mean, f"{name}: 0 if the column belongs to the sampled tokens"),
            make_fact("z", z, f"{name} in standard errors"),
        ),
        where={"tokens": percent(count / len(case.x)), "column": f"{side}_log_probs"},
        examples=case.find_loudest(rows, case.sums(np.abs(case.x) * far)),
        rivals={} if sure and power > _POWER else rival,
        tokens=tokens,
        leaves=case.without(tokens).with_fields(reshaped=affected > 0.05),
    )


def _is_constant(values: Float64s) -> bool:
    _, counts = np.unique(values, return_counts=True)
    return bool(counts.max() > 0.5 * len(values))
