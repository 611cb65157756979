"""Causes in the values of a column: probabilities, sums, means, another base, few digits, bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Floats
from mismatchctl.core.formatting import format_count
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.cause import Detection
from mismatchctl.diagnosis.causes.data_shape import are_probabilities
from mismatchctl.diagnosis.distributions import estimate_truncation
from mismatchctl.diagnosis.measures import (
    calibration,
    cannot_be_logs,
    find_better_reading,
    find_loudest,
    make_fact,
    may_read_better,
    percent,
)

_PROBABILITIES_MIN_SHARE, _PROBABILITIES_MIN_ROWS = 0.05, 3
_MIN_PROBABILITY = 1e-30


def detect_probabilities_not_logs(case: Case) -> Detection | None:
    if are_probabilities(case):
        return _both(case)
    for side in ("rollout", "train"):
        given = case.rollout if side == "rollout" else case.train
        sound = given[case.index]
        inside = case.segments.max(((sound < 0) | (sound > 1.0 + 1e-3)).view(np.uint8)) <= 0
        if inside.sum() < _PROBABILITIES_MIN_ROWS:
            continue
        as_logs = np.log(np.clip(given, _MIN_PROBABILITY, None))
        rollout, train = (as_logs, case.train) if side == "rollout" else (case.rollout, as_logs)
        found = find_better_reading(case, rollout, train) & inside
        if cannot_be_logs(sound) and _column_distance(case, rollout, train) < _column_distance(
            case, *_negate_column(case, side)
        ):
            found |= inside & (case.counts > 0)
        if found.sum() >= _PROBABILITIES_MIN_ROWS and found.mean() >= _PROBABILITIES_MIN_SHARE:
            return _match_probabilities(case, side, found, rollout, train)
    return None


def _both(case: Case) -> Detection:
    logs = [np.log(np.clip(values, _MIN_PROBABILITY, None)) for values in (case.rollout, case.train)]
    apart = float(np.median(np.abs(case.x)))
    return Detection(
        "high",
        "both columns are probabilities: all values are between 0 and 1, and the columns agree (median "
        f"difference {apart:.2g})",
        k3=1.0,
        evidence=(
            make_fact("least", min(float(case.r.min()), float(case.t.min())), "smallest value in the two columns"),
            make_fact("largest", max(float(case.r.max()), float(case.t.max())), "largest value in the two columns"),
            make_fact("difference", apart, "median difference of the two columns"),
        ),
        where={"column": "rollout_log_probs and train_log_probs"},
        leaves=case.repaired(rollout=logs[0], train=logs[1]),
    )


def _negate_column(case: Case, side: str) -> tuple[Float64s, Float64s]:
    return (-case.rollout, case.train) if side == "rollout" else (case.rollout, -case.train)


def _column_distance(case: Case, rollout: Float64s, train: Float64s) -> float:
    return float(np.median(np.abs(train - rollout)[case.index]))


def _match_probabilities(case: Case, side: str, found: np.ndarray, rollout: Float64s, train: Float64s) -> Detection:
    tokens = found[case.sequence]
    before = float(np.median(np.abs(case.x[tokens[case.index]])))
    after = _column_distance(case.without(~tokens), rollout, train)
    return Detection(
        "high",
        f"{side}_log_probs are probabilities: their logarithms are {after:.3g} nats from the other side, not "
        f"{before:.3g}",
        share=case.share(tokens),
        evidence=(
            make_fact("difference_as_given", before, "median |log ratio| without a change, nats"),
            make_fact("difference_of_logs", after, f"the same with the logarithm of {side}_log_probs"),
        ),
        where={"sequences": percent(float(found.mean())), "column": f"{side}_log_probs"},
        examples=find_loudest(case, found),
        leaves=case.repaired(
            rollout=np.where(tokens, rollout, case.rollout), train=np.where(tokens, train, case.train)
        ),
    )


_CUMULATIVE_MIN_SHARE, _CUMULATIVE_FALLING_SHARE, _CUMULATIVE_MIN_LENGTH = 0.5, 0.98, 6


def detect_cumulative(case: Case) -> Detection | None:
    for side, values in (("rollout", case.r), ("train", case.t)):
        steps = _row_differences(case, values)
        inner = case.place > 0
        if inner.sum() < _CUMULATIVE_MIN_LENGTH or float((steps[inner] <= 1e-6).mean()) < _CUMULATIVE_FALLING_SHARE:
            continue
        column = (case.rollout if side == "rollout" else case.train).copy()
        column[case.index] = np.minimum(steps, 0.0)
        rollout, train = (column, case.train) if side == "rollout" else (case.rollout, column)
        found = find_better_reading(case, rollout, train)
        if found.sum() < 2 or found.sum() < _CUMULATIVE_MIN_SHARE * (case.counts >= _CUMULATIVE_MIN_LENGTH).sum():
            continue
        after = float(np.median(np.abs(train - rollout)[case.index]))
        return Detection(
            "high",
            f"{side}_log_probs are running sums: their differences are {after:.2g} nats from the other side, not "
            f"{np.median(np.abs(case.x)):.2g}",
            share=1.0,
            evidence=(
                make_fact(
                    "falls", float((steps[inner] <= 1e-6).mean()), "share of tokens no higher than the one before"
                ),
                make_fact("difference_of_steps", after, f"median |log ratio| with the differences of {side}_log_probs"),
            ),
            where={"sequences": percent(float(found.mean())), "column": f"{side}_log_probs"},
            examples=find_loudest(case, found),
            leaves=case.repaired(rollout=rollout, train=train),
        )
    return None


def _row_differences(case: Case, values: Float64s) -> Float64s:
    steps = np.diff(values, prepend=0.0)
    return np.where(case.place == 0, values, steps)


_LOG_BASES = {"base 2": math.log(2), "base 10": math.log(10)}
"""Factors that restore natural log-probs."""
_OPPOSITE_SIGN = "the opposite sign"
_LOG_READINGS = (
    _LOG_BASES
    | {_OPPOSITE_SIGN: -1.0}
    | {f"{base} and {_OPPOSITE_SIGN}": -factor for base, factor in _LOG_BASES.items()}
)
_LOG_BASE_MIN_SHARE, _MUCH_BETTER_FACTOR = 0.05, 0.15
_CLOSE, _QUIET, _LOUD, _CALIBRATED_Z, _CALIBRATED = 0.02, 0.1, 0.3, 4.0, 0.01
"""Limits of a reading that holds: remaining over previous difference, logit noise, z and E[ratio] - 1."""
_MIN_LOG_MULTIPLE, _MAX_MULTIPLE_SPREAD = 0.03, 0.005
_MULTIPLE_CERTAIN, _MULTIPLE_LIKELY, _MULTIPLE_UNLIKELY, _MULTIPLE_MIN_TOKENS = -0.02, -0.7, -1.0, 30
_MULTIPLE_RANGES = (
    (-0.15, _MULTIPLE_CERTAIN),
    (_MULTIPLE_LIKELY, -0.15),
    (-2.5, _MULTIPLE_UNLIKELY),
    (-math.inf, -2.5),
)
"""Log-prob ranges that must agree on the factor."""

LogReading = tuple[str, str, float]
"""Side, name of the reading (empty for a multiple) and factor."""


def detect_wrong_log_base(case: Case) -> Detection | None:
    if estimate_truncation(case) is not None or {"wrong_sign", "probabilities_not_logs"} & {*case.explained}:
        return None  # recorded lists tell what makes rollout log-probs larger
    best, (side, reading, factor) = _find_best_reading(case)
    share = float(best.mean())
    if best.sum() < 3 or share < _LOG_BASE_MIN_SHARE:
        return None
    rollout, train = _apply_reading(case, side, factor)
    tokens = best[case.sequence]
    before = float(np.median(np.abs(case.x[tokens[case.index]])))
    after = float(np.median(np.abs(train - rollout)[case.index][tokens[case.index]]))
    if share < 0.5 and after > _MUCH_BETTER_FACTOR * before:
        return None  # a few rows that agree a little better by chance
    certain = _OPPOSITE_SIGN in reading  # no log-prob is above 0
    if after > _CLOSE * before and not certain and not _calibrated(case, rollout, train, tokens):
        return None  # what remains is far beyond noise, and the tokens were not sampled from what was read so
    return Detection(
        "high",
        f"{_describe(side, reading, 1 / factor)}; read so, the median difference is {after:.3g} nats, not {before:.3g}",
        share=case.share(tokens),
        evidence=(
            make_fact("difference_as_given", before, "median |log ratio| without a change, nats"),
            make_fact("difference_reread", after, f"the same with {side}_log_probs times {factor:.4g}"),
            make_fact(
                "slope", _median_quotient(case), "median of rollout log-prob / train log-prob; 1 for natural logarithms"
            ),
        ),
        where={"sequences": percent(share), "column": f"{side}_log_probs"},
        examples=find_loudest(case, best),
        rivals={} if reading else {"temperature": "the code: is a temperature applied to logits, or to log-probs?"},
        leaves=case.repaired(
            rollout=np.where(tokens, rollout, case.rollout), train=np.where(tokens, train, case.train)
        ),
    )


def _calibrated(case: Case, rollout: Float64s, train: Float64s, tokens: Bools) -> bool:
    """Return True if the columns read this way are sampling distributions."""
    read = case.repaired(rollout=rollout, train=train).without(~tokens)
    excess, z, _, _ = calibration(read)
    sampled = abs(z) < _CALIBRATED_Z or abs(excess) < _CALIBRATED
    return read.noise < _QUIET or (sampled and read.noise < _LOUD)


def _find_best_reading(case: Case) -> tuple[Bools, LogReading]:
    """Return the sequences [S] that agree with the best reading, and the reading."""
    factor = None if case.reshaped else _find_multiple(case)
    if factor is not None:
        found = find_better_reading(case, case.rollout / factor, case.train)
        if found.mean() > 0.5:
            return found, ("rollout", "", 1 / factor)
    best, chosen = np.zeros(case.size, np.bool_), ("", "", 1.0)
    least = min(abs(multiple - 1) for multiple in _LOG_READINGS.values())
    sides = [side for side, values in (("rollout", case.r), ("train", case.t)) if may_read_better(case, least * values)]
    for reading, multiple in _LOG_READINGS.items():
        for side in sides:
            found = find_better_reading(case, *_apply_reading(case, side, multiple))
            if found.sum() > best.sum():
                best, chosen = found, (side, reading, multiple)
    for side, values in (("rollout", case.r), ("train", case.t)):
        if cannot_be_logs(values) and best.mean() < 0.5:
            return case.means(values > 0) > 0.5, (side, _OPPOSITE_SIGN, -1.0)
    return best, chosen


def _find_multiple(case: Case) -> float | None:
    """Return rollout over train log-probs if the quotient is constant and neither 1 nor a log base.

    A temperature or a truncation changes likely and unlikely tokens by different factors.
    """
    unsure = (case.r < _MULTIPLE_CERTAIN) & (case.t < _MULTIPLE_CERTAIN)
    likely, unlikely = (
        np.log(_quotients(case, unsure & part)) for part in (case.t > _MULTIPLE_LIKELY, case.t < _MULTIPLE_UNLIKELY)
    )
    if min(len(likely), len(unlikely)) < _MULTIPLE_MIN_TOKENS:
        return None
    factor = float(np.median(np.append(likely, unlikely)))
    if abs(factor) < _MIN_LOG_MULTIPLE:
        return None
    doubt = _MAX_MULTIPLE_SPREAD + 3 * math.hypot(_median_error(likely), _median_error(unlikely))
    known = (math.log(base) * sign for base in _LOG_BASES.values() for sign in (1, -1))
    if abs(np.median(likely) - np.median(unlikely)) > doubt:
        return None
    for low, high in _MULTIPLE_RANGES:
        part = np.log(_quotients(case, unsure & (case.t > low) & (case.t <= high)))
        if len(part) >= _MULTIPLE_MIN_TOKENS and abs(
            np.median(part) - factor
        ) > _MAX_MULTIPLE_SPREAD + 3 * _median_error(part):
            return None
    return None if min(abs(factor - base) for base in known) < doubt else math.exp(factor)


def _median_quotient(case: Case) -> float:
    quotients = _quotients(case, (np.abs(case.r) > -_MULTIPLE_CERTAIN) & (np.abs(case.t) > -_MULTIPLE_CERTAIN))
    return float(np.median(quotients)) if len(quotients) else 1.0


def _quotients(case: Case, chosen: Bools) -> Float64s:
    return case.r[chosen] / case.t[chosen]


def _median_error(values: Float64s) -> float:
    return 1.86 * float(np.median(np.abs(values - np.median(values)))) / math.sqrt(len(values))


def _apply_reading(case: Case, side: str, factor: float) -> tuple[Float64s, Float64s]:
    return (case.rollout * factor, case.train) if side == "rollout" else (case.rollout, case.train * factor)


def _describe(side: str, reading: str, multiple: float) -> str:
    if not reading:
        return (
            f"rollout_log_probs are {multiple:.4g} times the trainer's at every probability, as if log-probs, not "
            f"logits, had been divided by a temperature: of {1 / multiple:.3g} on the rollout side, or of "
            f"{multiple:.3g} on the trainer's side"
        )
    return f"{side}_log_probs {'have' if reading == _OPPOSITE_SIGN else 'are in'} {reading}"


_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}
_LATTICE_MIN_SHARE, _LATTICE_ALL_SHARE = 0.02, 0.995
_DECIMAL_DIGITS = range(1, 6)
_DECIMALS_PROBE = 2048
_LATTICE_MAX_LOG_PROB = -0.25
"""Log-probs closer to 0 are differences of large logits with few significant bits."""
_ROUNDING_SHARE = 0.25
_LATTICE_MIN_VALUES = 10
"""Fewer values are placeholders."""


def _lies_on_lattice(values: Floats, bits: int) -> Bools:
    single = values.astype(np.float32, copy=False)
    low_bits = np.uint32((1 << (24 - bits)) - 1)
    kept: Bools = ((single.view(np.uint32) & low_bits) == 0) & (single == values)
    return kept


def detect_low_precision_logging(case: Case) -> Detection | None:
    if not len(case.x):
        return None
    for side, values in (("rollout", case.rows.rollout), ("train", case.rows.train)):
        decimals = _find_decimals(case.r if side == "rollout" else case.t)
        if decimals is not None:  # before formats of few bits, which hold many short decimals
            step = np.full(len(case.x), 10.0**-decimals)
            return _match_low_precision(case, side, format_count(decimals, "decimal"), 1.0, 1e-3, step)
        unsure = values[case.sound & (values < _LATTICE_MAX_LOG_PROB)]
        for name, bits in _SIGNIFICANT_BITS.items():
            kept = unsure[_lies_on_lattice(unsure, bits)]
            share = len(kept) / max(len(unsure), 1)
            if share >= _LATTICE_MIN_SHARE and len(np.unique(kept)) >= _LATTICE_MIN_VALUES:
                return _match_low_precision(
                    case, side, name, share, 2.0 ** (bits - 24), _value_spacing(case, side, bits)
                )
    return None


def _value_spacing(case: Case, side: str, bits: int) -> Float64s:
    """Return the distance between neighboring values of a format at each sound token [N]."""
    values = np.abs(case.r if side == "rollout" else case.t)
    return np.asarray(np.ldexp(1.0, np.frexp(np.maximum(values, 1e-30))[1] - bits), np.float64)


def _find_decimals(values: Float64s) -> int | None:
    used = values[values < -1e-3]
    if len(used) < 50:
        return None
    some, stray = used[:_DECIMALS_PROBE], (1 - _LATTICE_ALL_SHARE) * len(used)
    for digits in _DECIMAL_DIGITS:
        if (
            _count_off_decimals(some, digits) <= stray
            and _count_off_decimals(used, digits) <= stray
            and len(np.unique(used)) > 10
        ):
            return digits
    return None


def _count_off_decimals(values: Float64s, digits: int) -> int:
    scaled = values * 10.0**digits
    return int((np.abs(scaled - np.round(scaled)) > np.abs(scaled) * 2.0**-23 + 1e-9).sum())


def _match_low_precision(case: Case, side: str, name: str, share: float, chance: float, spacing: Float64s) -> Detection:
    rounding, seen = float(spacing.mean()) / 4, float(np.abs(case.x).mean()) if len(case.x) else 0.0
    explained = min(1.0, (rounding / seen) ** 2) if seen else 0.0
    partly = share < _LATTICE_ALL_SHARE
    doubt = -np.expm1(np.minimum(case.t, 0.0)) + 0.02
    as_noise = float(np.median(spacing / 4 / doubt)) / 0.6745 if len(case.x) else 0.0
    return Detection(
        "high",
        f"{percent(share)} of the {side} log-probs are exact in {name}: they were stored in it. Rounding alone makes a "
        f"mean difference of {rounding:.2g} nats, of {seen:.2g} seen",
        share=explained * (share if partly else 1.0),
        k3=explained * (share if partly else 1.0),
        everywhere=explained > _ROUNDING_SHARE or as_noise > _ROUNDING_SHARE / 2 * case.noise,
        evidence=(
            make_fact(
                "on_lattice",
                share,
                f"share of {side} log-probs below {_LATTICE_MAX_LOG_PROB:g} that {name} holds exactly",
            ),
            make_fact("by_chance", chance, "the share that would be by chance"),
            make_fact("rounding", rounding, "mean difference that such rounding makes, nats"),
            make_fact("difference", seen, "mean |log ratio|, nats", against=seen > 2 * rounding),
        ),
        where={"column": f"{side}_log_probs"} | ({"tokens": percent(share)} if partly else {}),
        examples=np.flatnonzero(case.counts > 0)[:3],
        rivals={
            "numerical_noise": "log-probs computed in low precision look the same: is log_softmax done in float32?"
        },
    )


_MEANS_MIN_LENGTH, _MEANS_ROW_SHARE, _MEANS_TOLERANCE = 8, 0.9, 0.05


def detect_sequence_means(case: Case) -> Detection | None:
    long = case.counts >= _MEANS_MIN_LENGTH
    if long.sum() < 3 or np.all(case.x == 0):
        return None
    for side, values, other in (("rollout", case.r, case.t), ("train", case.t, case.r)):
        first = values[np.minimum(case.starts, len(values) - 1)]
        one_value = (case.counts > 0) & (case.means(np.abs(values - case.each(first))) == 0)
        constant, least = long & one_value, max(3, _MEANS_ROW_SHARE * long.sum())
        if constant.sum() < least:
            continue
        varies = case.means(np.abs(other - case.each(case.means(other)))) > 0
        if (constant & varies).sum() < least or len(np.unique(first[constant])) < 3:
            continue
        far = np.abs(case.means(other) - first)[constant]
        mean = float(np.median(far)) < _MEANS_TOLERANCE * max(float(np.median(np.abs(first[constant]))), 0.1)
        tokens = one_value[case.sequence]
        return Detection(
            "high",
            f"{side}_log_probs hold one number per sequence, repeated on its tokens"
            + (": the mean of its log-probs" if mean else ""),
            share=case.share(tokens),
            evidence=(
                make_fact(
                    "constant_rows", float(constant.sum() / long.sum()), "share of rows with one value throughout"
                ),
                make_fact("off_the_mean", float(np.median(far)), "median distance from the other column's mean, nats"),
            ),
            where={"sequences": percent(float(constant.mean())), "column": f"{side}_log_probs"},
            examples=find_loudest(case, constant),
            leaves=case.without(tokens),
        )
    return None


_CLAMPED_MIN_TOKENS, _CLAMPED_BEYOND_SHARE, _CLAMPED_MAX_BOUND, _CLAMPED_SLACK = 4, 0.8, -0.05, 0.1


def detect_clamped(case: Case) -> Detection | None:
    if not len(case.x):
        return None
    for side, values, other in (("rollout", case.r, case.t), ("train", case.t, case.r)):
        bound = float(values.min())
        at = values == bound
        count = int(at.sum())
        if (
            count < _CLAMPED_MIN_TOKENS
            or bound > _CLAMPED_MAX_BOUND
            or len(np.unique(values)) < 4 * _CLAMPED_MIN_TOKENS
        ):
            continue
        slack = _CLAMPED_SLACK * abs(bound)
        beyond = float((other[at] <= bound + slack).mean())
        if (
            beyond < _CLAMPED_BEYOND_SHARE
            or len(np.unique(other[at])) < _CLAMPED_MIN_TOKENS
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
                make_fact("bound", bound, f"lowest of the {side} log-probs, nats"),
                make_fact("tokens", count, "tokens exactly there"),
                make_fact("beyond", beyond, "share of these that are not higher on the other side"),
            ),
            where={"tokens": percent(count / len(values)), "column": f"{side}_log_probs"},
            examples=find_loudest(case, rows, case.sums(np.abs(case.x) * at)),
            leaves=case.without(tokens),
        )
    return None


_FEWEST, _FEW, _SURE = 200, 8, 20
_QUANTILE, _NORMAL = 0.2, 0.2533
"""Use the closest 20% of the tokens for the noise, because most tokens may be wrong."""
_NEAR, _FAR, _LEAST, _SMALLEST = 4.0, 12.0, 0.25, 1e-4
_OTHER_WAY, _SLACK, _VIOLATED, _POWER = 0.05, 0.1, 0.04, 0.1
_BETWEEN, _SPIKE = 0.16, 0.5
_UNSURE = (-3.0, -0.3)
_ALIKE = 0.5
_CERTAIN, _TOO_MANY = 0.8, 2.0
_SPOILED = 0.05
"""Share of tokens above which the others are a biased selection."""


@dataclass(frozen=True)
class _Signs:
    """Evidence that one side has the log-probs of likelier tokens.

    `far` marks tokens far below the side [N]; the next five are shares of them. `power` is `violated` after shuffling,
    `spike` the share of unsure tokens that agree over the expected share, and `share` estimates the affected tokens.
    """

    side: str
    far: Bools
    other_way: float
    violated: float
    power: float
    spike: float
    between: float
    share: float
    too_many: float

    @property
    def fits(self) -> bool:
        told = self.power > _POWER or (self.spike > _SPIKE and self.between < _BETWEEN)
        if self.too_many > _TOO_MANY:
            return False
        return self.other_way < _OTHER_WAY and self.violated < _VIOLATED and told and self.between < 0.5


def _signs(case: Case, side: str) -> _Signs | None:
    own, other = (case.r, case.t) if side == "rollout" else (case.t, case.r)
    down = other - own
    doubt = 1.0 - np.exp(np.minimum(own, 0.0))
    doubtful = case.doubtful | (own < -0.02)
    if doubtful.sum() < _FEWEST:
        return None
    scaled = down / (doubt + 0.02)
    noise = max(float(np.quantile(np.abs(scaled[doubtful]), _QUANTILE)) / _NORMAL, _SMALLEST)
    limit = np.maximum(_FAR * noise * (doubt + 0.02), _LEAST)
    far, up = down < -limit, down > limit
    count = int(far.sum())
    if count < _FEW or _one_value(own[far]) or _one_value(other[far]):
        return None
    room = _log1mexp(own[far])
    below = other[far]
    slack = _SLACK + 3 * noise
    shuffled = np.random.default_rng(0).permutation(below)
    possible = shuffled < own[far] - limit[far]
    near = np.abs(scaled) < _NEAR * noise
    unsure = (own > _UNSURE[0]) & (own < _UNSURE[1])
    agree = float(near[unsure].mean()) if unsure.any() else 0.0
    expected = float(np.exp(own[unsure]).mean()) if unsure.any() else 1.0
    return _Signs(
        side,
        far,
        float(up.sum()) / count,
        float((below > room + slack).mean()),
        float((shuffled > room + slack)[possible].mean()) if possible.any() else 0.0,
        agree / max(expected, 1e-9),
        float(((down < 0) & ~near & ~far & doubtful).sum()) / count,
        _affected(own, far),
        _too_many(own, far),
    )


def _log1mexp(values: Float64s) -> Float64s:
    return np.log(-np.expm1(np.minimum(values, -1e-12)))


def _one_value(values: Float64s) -> bool:
    _, counts = np.unique(values, return_counts=True)
    return bool(counts.max() > _ALIKE * len(values))


def _affected(own: Float64s, far: Bools) -> float:
    """Return the share of tokens with the log-prob of the likeliest token, sampled or not.

    Above 1/2 the column is that of the likeliest token. Sampled likeliest tokens have weight 1 / p, and 1 - p are far.
    """
    likely = own > np.log(0.5)
    p = np.exp(np.minimum(own, 0.0))
    expected = float(((1 - p) / p)[likely & ~far].sum())
    return min(1.0, float((far & likely).sum()) / expected) if expected > 0 else 1.0


def _too_many(own: Float64s, far: Bools) -> float:
    """Return far tokens of near-certain places over the number that the side's probabilities allow."""
    certain = own > np.log(_CERTAIN)
    allowed = float(-np.expm1(np.minimum(own[certain], 0.0)).sum())
    count = float((far & certain).sum())
    return max(count - 3 * math.sqrt(count), 0.0) / max(allowed, 1e-9)


def detect_other_token_recorded(case: Case) -> Detection | None:
    if len(case.x) < _FEWEST or case.reshaped:
        return None
    for side in ("rollout", "train"):
        signs = _signs(case, side)
        if signs is not None and signs.fits:
            return _diagnosis(case, signs)
    return None


def _diagnosis(case: Case, signs: _Signs) -> Detection:
    tokens, count = case.marked(signs.far), int(signs.far.sum())
    excess, z, inverse, inverse_z = calibration(case)
    rows = np.bincount(case.where[signs.far], minlength=case.size) > 0
    own, other = (case.r, case.t) if signs.side == "rollout" else (case.t, case.r)
    sums = np.exp(np.minimum(own[signs.far], 0.0)) + np.exp(np.minimum(other[signs.far], 0.0))
    mean, mean_z = (excess, z) if signs.side == "rollout" else (inverse, inverse_z)
    meaning = "E[ratio] - 1" if signs.side == "rollout" else "E[1 / ratio] - 1"
    sure = count >= _SURE and rows.sum() > 1
    return Detection(
        "high" if sure else "medium",
        f"{format_count(count, 'token')} ({percent(count / len(case.x))}) have a {signs.side} log-prob that belongs to "
        f"another, likelier token: it is {np.median((own - other)[signs.far]):.2g} nats higher there and never lower, "
        "while the other tokens agree. About "
        f"{percent(signs.share)} of all tokens are concerned: where the likeliest token was sampled, it does not show",
        share=case.share(tokens),
        evidence=(
            make_fact("tokens", count, f"tokens whose {signs.side} log-prob is far above the other side's"),
            make_fact("share", count / len(case.x), "share of all tokens"),
            make_fact("affected", signs.share, "estimated share of tokens whose log-prob is that of the likeliest one"),
            make_fact(
                "other_way",
                signs.other_way,
                "tokens as far off in the other direction, over these; 0.5 or more for noise",
            ),
            make_fact(
                "sum_of_both",
                float(np.quantile(sums, 0.99)),
                "exp(rollout) + exp(train) there, 99% quantile: two different tokens have 1 at most",
            ),
            make_fact(
                "between", signs.between, "tokens between noise and these, over these: few, as nothing else changed"
            ),
            make_fact("ratio_mean_minus_one", mean, f"{meaning}: 0 where the column is that of the sampled tokens"),
            make_fact("z", mean_z, "the same in standard errors"),
        ),
        where={"tokens": percent(count / len(case.x)), "column": f"{signs.side}_log_probs"},
        examples=find_loudest(case, rows, case.sums(np.abs(case.x) * signs.far)),
        rivals={}
        if sure and signs.power > _POWER
        else {"truncated_sampling": "the token ids beside the recorded log-probs: are they of the same token?"},
        leaves=case.without(tokens).relabelled(reshaped=signs.share > _SPOILED),
    )
