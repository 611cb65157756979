"""Statistics and formatting that several causes share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.core.formatting import INTERVAL_Z
from mismatchctl.diagnosis.case import Case, cached_on_case
from mismatchctl.results.model import Fact

_BETTER_FACTOR, _MAJORITY, _MAX_DISTANCE = 0.35, 0.5, 5.0
_LIKELY_LOG_PROB, _RARE_LOG_PROB, _MIN_RARE_TOKENS = -0.5, -3.5, 30
_MAX_RARE_SHARE, _MIN_CERTAIN_SHARE = 0.3, 0.1
_MIN_TOKENS = 8
_SIGN_FLIPS = 24
SYSTEMATIC_MEANING = "share of the variance tied to tokens of the vocabulary in every context: weights differ"
FLOAT32_NOISE, BFLOAT16_NOISE = 1e-4, 0.022
"""Upper bounds of the noise of the logits in float32 and bfloat16."""
TOKEN_BOUND_SHARE = 0.15
"""Share of variance tied to tokens above which wrong positions are excluded as the cause. ALiBi reaches 0.07."""
UNRELATED_CORRELATION = 0.6
"""The correlation of the columns stays above this value if only the model weights differ."""
_MIN_RUN_LENGTH = 4
_PROBABILITY_BINS = 16
_LOG_PROB_FLOOR = 8.0
_UNLIKELY_LOG_PROB, _MISSING_SHARE = -3.0, 0.02
_ONE_SIDED_SHARE = 0.7
_UNSURE_RANGE, _CERTAIN_LOG_PROB, _CERTAIN_DISTANCE_SHARE, _MIN_INFORMATIVE_TOKENS = (-2.0, -0.2), 0.02, 0.3, 50


def make_fact(
    name: str, value: float | str | None, meaning: str, *, against: bool = False, interval: Any = None
) -> Fact:
    """Create a fact with a value of four significant digits."""
    ends = None if interval is None else (round_value(interval[0]), round_value(interval[1]))
    shown = value if value is None or isinstance(value, str) else round_value(value)
    return Fact(name=name, value=shown, interval=ends, supports=not against, meaning=meaning)


def make_share_fact(name: str, found: Bools, among: Bools, meaning: str, *, perhaps: Bools | None = None) -> Fact:
    """Create a fact with the share of some sequences [S].

    Its 95% interval also covers the share with the sequences in `perhaps`.
    """
    total, z = max(int(among.sum()), 1), INTERVAL_Z

    def bound(sequences: Bools, sign: int) -> float:
        """Return one end of Wilson's interval."""
        share = int((sequences & among).sum()) / total
        half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
        return min(max((share + z * z / (2 * total) + sign * half) / (1 + z * z / total), 0.0), 1.0)

    ends = bound(found, -1), bound(found if perhaps is None else found | perhaps, 1)
    return make_fact(name, int((found & among).sum()) / total, meaning, interval=ends)


def make_noise_fact(case: Case) -> Fact:
    return make_fact("noise", case.noise, f"of the logits, robust; bfloat16 stays below {BFLOAT16_NOISE:g}")


def format_interval(interval: tuple[float, float] | None) -> str:
    """Format an interval with a trailing space, or return ""."""
    if interval is None:
        return ""
    digits = next((digits for digits in (3, 4, 5) if f"{interval[0]:.{digits}g}" != f"{interval[1]:.{digits}g}"), 3)
    return f"({interval[0]:.{digits}g} to {interval[1]:.{digits}g}) "


def round_value(value: float) -> float | int:
    """Round to four significant digits. Whole numbers stay exact."""
    return int(value) if float(value).is_integer() else float(f"{value:.4g}")


def format_list(values: Iterable[Any], most: int = 8) -> str:
    texts = [str(value) for value in values]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def percent(share: float) -> str:
    value = 100 * share
    return f"{value:.3g}%" if abs(value) < 99.95 else f"{value:,.0f}%"


def find_loudest(case: Case, sequences: Bools | None = None, score: Float64s | None = None) -> Ints:
    """Return up to three of the marked sequences [S], with the highest scores first."""
    found = np.flatnonzero(case.counts > 0 if sequences is None else sequences)
    score = case.means(np.abs(case.x)) if score is None else score
    return found[np.argsort(-score[found], kind="stable")][:3]


def find_better_reading(case: Case, side: str, values: Float64s) -> Bools:
    """Return the sequences [S] whose columns agree three times better with other values [T] on one side."""
    other = case.t if side == "rollout" else case.r
    with np.errstate(invalid="ignore"):
        changed = np.abs(other - values[case.index])
    before, after = (
        case.means(np.minimum(np.nan_to_num(apart, nan=1e3), _MAX_DISTANCE)) for apart in (np.abs(case.x), changed)
    )
    better = (case.counts >= _MIN_TOKENS) & (before > 1e-2) & (after <= _BETTER_FACTOR * before)
    if better.sum() > _MAJORITY * (case.counts >= _MIN_TOKENS).sum():  # then also the rest, unless it is worse
        better |= after < before
    return better


@dataclass(frozen=True)
class ConstantRuns:
    """Runs of one value. `first` and `length` are indices of unexplained tokens, and `off` is the mean |log ratio|."""

    first: Ints
    length: Ints
    sequence: Ints
    value: Float64s
    off: Float64s
    at_start: Bools
    at_end: Bools

    def __getitem__(self, chosen: Bools) -> ConstantRuns:
        return ConstantRuns(*(values[chosen] for values in vars(self).values()))

    def __len__(self) -> int:
        return len(self.first)

    def tokens(self, case: Case) -> Bools:
        """Return flags of the tokens in these runs [T]."""
        marks = np.zeros(len(case.index) + 1, np.int64)
        np.add.at(marks, self.first, 1)
        np.add.at(marks, self.first + self.length, -1)
        return case.marked(np.cumsum(marks[:-1]) > 0)


@cached_on_case
def find_suspicious_runs(case: Case) -> ConstantRuns:
    """Find runs of four or more equal log-probs that differ from the other side.

    A single log-prob of 0 is enough if the trainer's log-prob is below -2.
    """
    found = [_find_constant_runs(case, values) for values in (case.r, case.t)]
    return ConstantRuns(*(np.concatenate([vars(runs)[name] for runs in found]) for name in vars(found[0])))


def _find_constant_runs(case: Case, values: Float64s) -> ConstantRuns:
    new = np.ones(len(values), np.bool_)
    new[1:] = (values[1:] != values[:-1]) | (case.where[1:] != case.where[:-1])
    first = np.flatnonzero(new)
    length = np.diff(np.append(first, len(values)))
    likely = (length >= _MIN_RUN_LENGTH) | (values[first] == 0)
    first, length = first[likely], length[likely]
    size = np.append(0.0, np.cumsum(np.minimum(np.abs(case.x), 20.0)))
    off = (size[first + length] - size[first]) / np.maximum(length, 1)
    denied = ((length >= _MIN_RUN_LENGTH) & (off > 0.5)) | ((values[first] == 0) & (off > 2.0))
    first, length, off = first[denied], length[denied], off[denied]
    sequence, start = case.where[first], case.place[first]
    ends = start + length == case.counts[sequence]
    return ConstantRuns(first, length, sequence, values[first], off, start == 0, ends)


def is_placeholder(value: float) -> bool:
    """Return True for a typed number or a value far below any log-prob."""
    return bool(value == round(value, 2) or value < -100)


def quantile_bins(values: NDArray[Any], number: int) -> Ints:
    """Return the bin of each value. All bins have about the same number of values."""
    return np.searchsorted(np.quantile(values, np.linspace(0, 1, number + 1)[1:-1]), values)


@cached_on_case
def systematic_share(case: Case) -> tuple[float, float]:
    """Return the share of the variance that a token has in every context, and its z-score.

    Different model weights shift each token of the vocabulary, while noise depends on the context. The share comes from
    pairs of equal tokens in different sequences, and its error from random signs.
    """
    ids = case.rows.tokens.get("token_ids")
    if ids is None or len(case.x) < 200:
        return 0.0, 0.0
    size, bins = np.clip(case.standard, -4, 4), quantile_bins((case.r + case.t) / 2, _PROBABILITY_BINS)
    number = np.maximum(np.bincount(bins, minlength=_PROBABILITY_BINS), 1)
    size = size - (np.bincount(bins, size, _PROBABILITY_BINS) / number)[bins]  # effects of the probability
    pairs, inverse = np.unique(ids[case.index].astype(np.int64) * case.size + case.where, return_inverse=True)
    sums = np.bincount(inverse, weights=size).astype(np.float64)
    counts = np.bincount(inverse).astype(np.float64)
    starts = np.flatnonzero(np.append(True, np.diff(pairs // case.size) != 0))  # pairs are sorted by token
    sequence = pairs % case.size

    def product(values: Float64s) -> float:
        return float((np.add.reduceat(values, starts) ** 2).sum() - (values * values).sum())

    others, power = product(counts), float((size * size).mean())
    if others <= 0 or power == 0:
        return 0.0, 0.0
    flips = np.random.default_rng(0).choice([-1.0, 1.0], (_SIGN_FLIPS, case.size))
    scatter = float(np.std([product(sums * flip[sequence]) for flip in flips]))
    value = product(sums)
    return value / others / power, value / scatter if scatter > 0 else 0.0


class Calibration(NamedTuple):
    """E[ratio] - 1 and E[1 / ratio] - 1, with their z-scores. The first is 0 if the rollout column is right."""

    excess: float
    z: float
    inverse: float
    inverse_z: float


@cached_on_case
def calibration(case: Case) -> Calibration:
    values = []
    for sign in (1.0, -1.0):
        excess = np.expm1(np.clip(sign * case.x, -20, 20))
        values += [float(excess.mean()) if len(excess) else 0.0, case.clustered_z(excess)]
    return Calibration(*values)


@cached_on_case
def column_correlation(case: Case) -> float:
    """Return the correlation of the columns. Log-probs below -8 count as -8."""
    one, other = (np.maximum(values, -_LOG_PROB_FLOOR) for values in (case.r, case.t))
    if len(case.x) < 3 or one.std() == 0 or other.std() == 0:
        return 1.0
    return float(np.corrcoef(one, other)[0, 1])


@cached_on_case
def certain_tokens_differ(case: Case) -> bool:
    """Return True if nearly certain tokens differ as much as other tokens.

    Then the log-probs themselves were changed, because a change of logits moves log-probs in proportion to 1 - p.
    """
    size, unsure = np.abs(case.x), (case.t > _UNSURE_RANGE[0]) & (case.t < _UNSURE_RANGE[1])
    if unsure.sum() < _MIN_INFORMATIVE_TOKENS:
        return False
    usual = float(np.median(size[unsure]))
    certain = [size[values > -_CERTAIN_LOG_PROB] for values in (case.t, case.r)]
    return any(
        len(part) >= _MIN_INFORMATIVE_TOKENS and float(np.quantile(part, 0.75)) > _CERTAIN_DISTANCE_SHARE * usual
        for part in certain
    )


@cached_on_case
def is_greedy(case: Case) -> bool:
    """Return True if unlikely tokens are missing. Then neither column belongs to the sampling distribution."""
    doubt = float(-np.expm1(np.minimum(case.r, 0.0)).sum())
    return float((case.r < _UNLIKELY_LOG_PROB).sum()) < _MISSING_SHARE * doubt


def mark_rare_tokens(case: Case) -> Bools:
    """Return flags of tokens [N] that are so unlikely that a temperature moves them in a known direction."""
    found: Bools = case.t < _RARE_LOG_PROB
    if found.sum() < _MIN_RARE_TOKENS and len(case.t):
        found = case.t < np.quantile(case.t, 0.02)
    elif found.mean() > _MAX_RARE_SHARE:  # an uncertain model: only its least likely tokens count
        found = case.t < np.quantile(case.t, _MAX_RARE_SHARE / 2)
    return found


class Coherence(NamedTuple):
    """Mean direction of the log ratios (-1 to 1) of nearly certain and of unlikely tokens, with z-scores."""

    likely: float
    likely_z: float
    unlikely: float
    unlikely_z: float


@cached_on_case
def coherence(case: Case) -> Coherence:
    values, standard = [], np.clip(case.standard, -4, 4)
    certain: Bools = case.t > _LIKELY_LOG_PROB
    if len(case.t) and certain.mean() < _MIN_CERTAIN_SHARE:
        certain = case.t > np.quantile(case.t, 1 - _MIN_CERTAIN_SHARE)
    for chosen in (certain, mark_rare_tokens(case)):
        size = np.abs(standard[chosen]).sum()
        values += [float(standard[chosen].sum() / size) if size > 0 else 0.0]
        values += [case.clustered_z(np.where(chosen, standard, 0.0))]
    return Coherence(*values)


def is_one_sided(case: Case) -> bool:
    """Return True if likely and unlikely tokens all move in one direction, which two distributions cannot do."""
    likely, _, unlikely, _ = coherence(case)
    return likely * unlikely > 0 and min(abs(likely), abs(unlikely)) > _ONE_SIDED_SHARE


@cached_on_case
def drift_correlation(case: Case) -> tuple[float, float]:
    """Return the correlation of the tokens' mean log ratio with the next update of the policy, and its z-score.

    Stale weights differ in the direction of learning, and quantized weights do not. If the columns are missing, the
    result is 0.
    """
    ids, current = (case.rows.tokens.get(name) for name in ("token_ids", "current_log_probs"))
    if ids is None or current is None or not len(case.x):
        return 0.0, 0.0
    ahead = (current[case.index] - case.t) / (1.0 - np.exp(np.minimum(case.t, 0.0)) + 0.02)
    usual = float(np.nanmedian(np.abs(ahead)))
    if not usual > 0:
        return 0.0, 0.0
    ahead = np.nan_to_num(np.clip(ahead / usual, -6, 6))
    _, token, counts = np.unique(ids[case.index], return_inverse=True, return_counts=True)
    often = counts >= 30
    if often.sum() < 10:
        return 0.0, 0.0
    past, future = ((np.bincount(token, values) / counts)[often] for values in (np.clip(case.standard, -4, 4), ahead))
    if past.std() == 0 or future.std() == 0:
        return 0.0, 0.0
    value = float(np.corrcoef(past, future)[0, 1])
    return value, float(np.arctanh(np.clip(value, -0.999, 0.999)) * np.sqrt(often.sum() - 3))


_KINDS_MIN_VARIANCE, _KINDS_MIN_NOISE = 0.6, 1e-4
"""Variance of the rows' log levels beyond chance: at most 0.41 in nine models, 1.5 and more with two kinds."""
_KINDS_MIN_TOKENS, _KINDS_MIN_ROWS, _KINDS_MIN_SIZE = 5, 8, 2


@dataclass(frozen=True)
class RowKinds:
    """Two kinds of rows: the rows with the larger mismatch [S], the difference, and its variance beyond chance."""

    louder: Bools
    times: float
    variance: float
    rows: int


@cached_on_case
def find_row_kinds(case: Case) -> RowKinds | None:
    """Find two kinds of rows, by the covariance of the mismatch in odd and even tokens."""
    if case.noise < _KINDS_MIN_NOISE:
        return None
    odd = case.place % 2 == 1
    halves = [case.doubtful & part for part in (odd, ~odd)]
    counts = [case.sums(half) for half in halves]
    known = np.flatnonzero((counts[0] >= _KINDS_MIN_TOKENS) & (counts[1] >= _KINDS_MIN_TOKENS))
    if len(known) < _KINDS_MIN_ROWS:
        return None
    first, second = (
        case.sums(case.loudness * half)[known] / count[known] for half, count in zip(halves, counts, strict=True)
    )
    variance = float(np.cov(first, second)[0, 1])
    if variance < _KINDS_MIN_VARIANCE:
        return None
    level = (first + second) / 2
    order = np.argsort(level)
    sizes = np.arange(1, len(level))
    sums = np.cumsum(level[order])[:-1]
    apart = (level.sum() - sums) / (len(level) - sizes) - sums / sizes
    between = np.where(
        np.minimum(sizes, len(level) - sizes) >= _KINDS_MIN_SIZE, sizes * (len(level) - sizes) * apart**2, 0.0
    )
    cut = int(between.argmax())
    louder = np.zeros(case.size, np.bool_)
    louder[known[order[cut + 1 :]]] = True
    return RowKinds(louder, float(np.exp(apart[cut])), variance, len(known))


def compute_t(values: Float64s) -> float:
    return float(values.mean() / (values.std(ddof=1) / np.sqrt(len(values)) + 1e-12))


def fit_within_rows(case: Case, values: Float64s, used: Bools) -> tuple[float, float, int]:
    """Return the slope of the log noise by values [N] within rows, its error, and the rows that vary."""
    values = np.where(used, values, 0.0)
    across, up = ((part - case.each(case.part_means(part, used))) * used for part in (values, case.loudness))
    product, square = case.sums(across * up), case.sums(across * across)
    whole = max(float(square.sum()), 1e-12)
    slope = float(product.sum()) / whole
    return slope, float(np.sqrt(((product - slope * square) ** 2).sum())) / whole, int((square > 0).sum())


_TURNS_FEWEST, _TURNS_BESIDE, _TURNS_MOST = 10, 2, 0.6


@cached_on_case
def turns(case: Case) -> Ints | None:
    """Return the turn of each token in its row, from 0 [N], by the column `turn` or by masked gaps."""
    recorded = case.rows.tokens.get("turn")
    new = np.zeros(len(case.index), np.bool_)
    inside = case.where[1:] == case.where[:-1]
    if recorded is not None and recorded.ndim == 1:
        new[1:] = (np.diff(recorded[case.index].astype(np.float64)) != 0) & inside
    else:
        masked = np.append(0, np.cumsum(~case.rows.mask))
        new[1:] = (np.diff(masked[case.index]) > 0) & inside  # explained tokens are no boundary
    if new.sum() < _TURNS_FEWEST:
        return None
    running = np.cumsum(new)
    turn: Ints = running - running[np.minimum(case.each(case.starts), len(running) - 1)]
    return turn


def break_at_turns(case: Case, found: Bools, split: Ints) -> bool:
    """Return True if most rows in `found` [S] change at the start of a turn."""
    turn = turns(case)
    if turn is None or not found.any():
        return False
    begins = np.append(False, (np.diff(turn) > 0) & (case.where[1:] == case.where[:-1]))
    near = np.zeros(len(begins), np.bool_)
    for by in range(-_TURNS_BESIDE, _TURNS_BESIDE + 1):
        near |= np.roll(begins, by)
    at = np.minimum(case.starts + split, len(begins) - 1)[found]
    return bool(near[at].mean() > max(_TURNS_MOST, 4 * near.mean()))
