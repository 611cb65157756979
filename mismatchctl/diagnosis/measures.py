"""Statistics and formatting that several causes share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.diagnosis.case import Case, cached_on_case
from mismatchctl.results.model import Fact

_BETTER_FACTOR, _MAJORITY, _MAX_DISTANCE = 0.35, 0.5, 5.0
_LIKELY_LOG_PROB, _RARE_LOG_PROB, _MIN_RARE_TOKENS = -0.5, -3.5, 30
_MAX_RARE_SHARE, _MIN_CERTAIN_SHARE = 0.3, 0.1
_MIN_TOKENS = 8
_POSITIVE_SHARE = 0.9
_SIGN_FLIPS = 24
TOKEN_BOUND_SHARE = 0.15
"""Share of the variance tied to tokens, above the effect of another context: other positions made 0.07
under ALiBi, because they have the same effect at every position."""
_MIN_RUN_LENGTH = 4
_PROBABILITY_BINS = 16
_LOG_PROB_FLOOR = 8.0
_UNLIKELY_LOG_PROB, _MISSING_SHARE = -3.0, 0.02
_ONE_SIDED_SHARE = 0.7
_UNSURE_RANGE, _CERTAIN_LOG_PROB, _CERTAIN_DISTANCE_SHARE, _MIN_INFORMATIVE_TOKENS = (-2.0, -0.2), 0.02, 0.3, 50


def make_fact(
    name: str, value: float | str | None, meaning: str, *, against: bool = False, interval: Any = None
) -> Fact:
    """A number with what it means, to four digits."""
    ends = None if interval is None else (round_value(interval[0]), round_value(interval[1]))
    shown = value if value is None or isinstance(value, str) else round_value(value)
    return Fact(name=name, value=shown, interval=ends, supports=not against, meaning=meaning)


def make_share_fact(name: str, found: Bools, among: Bools, meaning: str, *, perhaps: Bools | None = None) -> Fact:
    """How many of some sequences show it, with the interval of 95% of that share in all that were written.

    `perhaps` are those that may be of them unseen: the interval reaches up to where theirs does.
    """
    total = max(int(among.sum()), 1)
    count, most = (int((chosen & among).sum()) for chosen in (found, found if perhaps is None else found | perhaps))
    return make_fact(
        name, count / total, meaning, interval=(_wilson_interval(count, total)[0], _wilson_interval(most, total)[1])
    )


def _wilson_interval(count: int, total: int) -> tuple[float, float]:
    """Wilson's interval of 95% of a share."""
    share, z = count / total, 1.96
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def format_interval(interval: tuple[float, float] | None) -> str:
    """An interval as text, with a space after it; nothing where nothing is known."""
    if interval is None:
        return ""
    digits = next((digits for digits in (3, 4, 5) if f"{interval[0]:.{digits}g}" != f"{interval[1]:.{digits}g}"), 3)
    return f"({interval[0]:.{digits}g} to {interval[1]:.{digits}g}) "


def round_value(value: float) -> float | int:
    """Four significant digits; whole numbers as they are."""
    return int(value) if float(value).is_integer() else float(f"{value:.4g}")


def format_list(values: Iterable[Any], most: int = 8) -> str:
    """Values as text, the first few."""
    texts = [str(value) for value in values]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def format_range(values: Iterable[Any]) -> str:
    """The range of some numbers, as text."""
    known = sorted(values)
    return str(known[0]) if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def percent(share: float) -> str:
    """A share as text."""
    value = 100 * share
    return f"{value:.3g}%" if abs(value) < 99.95 else f"{value:,.0f}%"


def find_loudest(case: Case, sequences: Bools | None = None, score: Float64s | None = None) -> Ints:
    """The first three of the marked sequences [S] by descending score; None: of all that hold tokens, by mean size."""
    found = np.flatnonzero(case.counts > 0 if sequences is None else sequences)
    score = case.means(np.abs(case.x)) if score is None else score
    return found[np.argsort(-score[found], kind="stable")][:3]


def cannot_be_logs(values: Float64s) -> bool:
    """Whether nearly all values lie above 0, whatever the other column says."""
    return len(values) > 0 and float(np.mean(values > 0)) > _POSITIVE_SHARE


def find_better_reading(case: Case, rollout: Float64s, train: Float64s) -> Bools:
    """Sequences [S] whose two columns agree about three times better when read as given, [T] each."""
    with np.errstate(invalid="ignore"):
        changed = np.abs(train[case.index] - rollout[case.index])
    before, after = _mean_distance(case), case.means(np.minimum(np.nan_to_num(changed, nan=1e3), _MAX_DISTANCE))
    better = (case.counts >= _MIN_TOKENS) & (before > 1e-2) & (after <= _BETTER_FACTOR * before)
    if (
        better.sum() > _MAJORITY * (case.counts >= _MIN_TOKENS).sum()
    ):  # then the rest too, but where it is plainly worse
        better |= after < before
    return better


def may_read_better(case: Case, change: Float64s) -> bool:
    """Whether `better_as` could mark any sequence once one side has moved by so much [N].

    By the triangle inequality it moves no farther than the sides were apart before and are after.
    """
    apart, moved = _mean_distance(case), case.means(np.minimum(np.abs(change), _MAX_DISTANCE))
    return bool(np.any((case.counts >= _MIN_TOKENS) & (apart > 1e-2) & (moved <= 1.001 * (1 + _BETTER_FACTOR) * apart)))


@cached_on_case
def _mean_distance(case: Case) -> Float64s:
    """Mean |log ratio| of each sequence, that of each token bounded [S]."""
    return case.means(np.minimum(np.abs(case.x), _MAX_DISTANCE))


@dataclass(frozen=True)
class ConstantRuns:
    """Stretches of sound tokens of one sequence with exactly the same value on one side.

    Attributes:
        first, length: among the sound tokens.
        sequence: whose they are.
        value: the value.
        off: mean |log ratio| in each.
        at_start, at_end: whether they begin, or end, the sound tokens of their sequence.
    """

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
        """The tokens in them [T]."""
        marks = np.zeros(len(case.index) + 1, np.int64)
        np.add.at(marks, self.first, 1)
        np.add.at(marks, self.first + self.length, -1)
        found = np.zeros(len(case.sound), np.bool_)
        found[case.index] = np.cumsum(marks[:-1]) > 0
        return found


@cached_on_case
def find_suspicious_runs(case: Case) -> ConstantRuns:
    """Stretches that no model has sampled: a constant log-prob, four times or more, that the other side denies.

    A log-prob of exactly 0 says that nothing else could have come: a single one is enough where the trainer
    gives the token less than e^-2.
    """
    found = [_find_constant_runs(case, values) for values in (case.r, case.t)]
    return ConstantRuns(*(np.concatenate([vars(runs)[name] for runs in found]) for name in vars(found[0])))


def _find_constant_runs(case: Case, values: Float64s) -> ConstantRuns:
    """Such stretches of one side's log-probs `values` [N]."""
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
    return ConstantRuns(
        first, length, sequence, values[first], off, start == 0, start + length == case.counts[sequence]
    )


def _subtract_usual(case: Case, size: Float64s) -> Float64s:
    """`size` [N] less its mean at tokens of the same probability: what acts by probability is not tied to tokens."""
    middle = (case.r + case.t) / 2
    bins = np.searchsorted(np.quantile(middle, np.linspace(0, 1, _PROBABILITY_BINS + 1)[1:-1]), middle)
    usual = np.bincount(bins, size, _PROBABILITY_BINS) / np.maximum(np.bincount(bins, minlength=_PROBABILITY_BINS), 1)
    return size - usual[bins]


@cached_on_case
def systematic_share(case: Case) -> tuple[float, float]:
    """Share of the variance of the log ratio that is the same for a token wherever it stands, and its z.

    Noise of activations or of a cache falls differently in each context; weights that differ move each token of
    the vocabulary its own way. Counted over pairs of equal tokens in different sequences; the error comes from
    flipping the signs of whole sequences.
    """
    ids = case.rows.tokens.get("token_ids")
    if ids is None or len(case.x) < 200:
        return 0.0, 0.0
    size = _subtract_usual(case, np.clip(case.standard, -4, 4))
    pairs, inverse = np.unique(ids[case.index].astype(np.int64) * case.size + case.where, return_inverse=True)
    sums = np.bincount(inverse, weights=size).astype(np.float64)
    counts = np.bincount(inverse).astype(np.float64)
    starts = np.flatnonzero(np.append(True, np.diff(pairs // case.size) != 0))  # pairs are sorted by token
    sequence = pairs % case.size

    def product(values: Float64s) -> float:
        """Sum over tokens of the products of what different sequences have of them."""
        return float((np.add.reduceat(values, starts) ** 2).sum() - (values * values).sum())

    others, power = product(counts), float((size * size).mean())
    if others <= 0 or power == 0:
        return 0.0, 0.0
    flips = np.random.default_rng(0).choice([-1.0, 1.0], (_SIGN_FLIPS, case.size))
    scatter = float(np.std([product(sums * flip[sequence]) for flip in flips]))
    value = product(sums)
    return value / others / power, value / scatter if scatter > 0 else 0.0


@cached_on_case
def calibration(case: Case) -> tuple[float, float, float, float]:
    """E[ratio] - 1 and its z, then E[1 / ratio] - 1 and its z.

    Where the rollout column is the distribution that sampled, and no token lies outside of the trainer's, the
    first is 0; where it is the trainer's column that sampled, the second is.
    """
    values = []
    for sign in (1.0, -1.0):
        excess = np.expm1(np.clip(sign * case.x, -20, 20))
        values += [float(excess.mean()) if len(excess) else 0.0, case.clustered_z(excess)]
    return values[0], values[1], values[2], values[3]


@cached_on_case
def column_correlation(case: Case) -> float:
    """Correlation of the two columns: what the text makes likely or not, both sides see, whatever their weights."""
    one, other = (np.maximum(values, -_LOG_PROB_FLOOR) for values in (case.r, case.t))
    if len(case.x) < 3 or one.std() == 0 or other.std() == 0:
        return 1.0
    return float(np.corrcoef(one, other)[0, 1])


@cached_on_case
def certain_tokens_differ(case: Case) -> bool:
    """Whether near-certain tokens differ as much as others: so it was added to log-probs, or lost in computing them.

    Whatever moves logits moves the log-prob of a token of probability p by 1 - p times as much: other weights, caches
    and settings leave certain tokens alone.
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
    """Whether tokens that sampling would take now and then are missing: the likeliest is always taken.

    Then neither column sampled, and what ratios average to says nothing.
    """
    doubt = float(-np.expm1(np.minimum(case.r, 0.0)).sum())
    return float((case.r < _UNLIKELY_LOG_PROB).sum()) < _MISSING_SHARE * doubt


def mark_rare_tokens(case: Case) -> Bools:
    """Tokens so unlikely that a temperature must make them likelier or less likely, whatever their context [N]."""
    found: Bools = case.t < _RARE_LOG_PROB
    if found.sum() < _MIN_RARE_TOKENS and len(case.t):
        found = case.t < np.quantile(case.t, 0.02)
    elif found.mean() > _MAX_RARE_SHARE:  # of an unsure model most tokens are unlikely, and the least likely ones tell
        found = case.t < np.quantile(case.t, _MAX_RARE_SHARE / 2)
    return found


def mark_certain_tokens(case: Case) -> Bools:
    """Near-certain tokens, or the likeliest that there are, if hardly any is [N]."""
    found: Bools = case.t > _LIKELY_LOG_PROB
    if len(case.t) and found.mean() < _MIN_CERTAIN_SHARE:
        found = case.t > np.quantile(case.t, 1 - _MIN_CERTAIN_SHARE)
    return found


@cached_on_case
def coherence(case: Case) -> tuple[float, float, float, float]:
    """How much the log ratios of near-certain tokens go one way (-1 to 1) and its z, then those of unlikely tokens."""
    values = []
    standard = np.clip(case.standard, -4, 4)
    for chosen in (mark_certain_tokens(case), mark_rare_tokens(case)):
        size = np.abs(standard[chosen]).sum()
        values += [float(standard[chosen].sum() / size) if size > 0 else 0.0]
        values += [case.clustered_z(np.where(chosen, standard, 0.0))]
    return values[0], values[1], values[2], values[3]


def is_one_sided(case: Case) -> bool:
    """Whether likely and unlikely tokens all move one way: what a distribution gains at some it loses at others."""
    likely, _, unlikely, _ = coherence(case)
    return likely * unlikely > 0 and min(abs(likely), abs(unlikely)) > _ONE_SIDED_SHARE


@cached_on_case
def drift_correlation(case: Case) -> tuple[float, float]:
    """Correlation, over tokens of the vocabulary, of the mean log ratio with the mean step that learning takes next.

    Weights that lag behind differ along the direction of learning; quantized weights do not. 0, 0 where the dump
    lacks current log-probs or token ids.
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
"""Variance of the rows' log levels beyond chance. Rows of one kind had at most 0.41 (nine models, many causes).
If half or a fifth were sampled differently, it was at least 1.5. Below this noise float32 makes its own levels."""
_KINDS_MIN_TOKENS, _KINDS_MIN_ROWS, _KINDS_MIN_SIZE = 5, 8, 2


@dataclass(frozen=True)
class RowKinds:
    """Rows of two kinds.

    Attributes:
        louder: sequences whose tokens are all along farther apart than those of the others [S].
        times: how much, by their mean log levels.
        variance: of the levels beyond chance.
        rows: sequences that were told apart.
    """

    louder: Bools
    times: float
    variance: float
    rows: int


@cached_on_case
def find_row_kinds(case: Case) -> RowKinds | None:
    """Rows of two kinds; None where they are of one, or too few to tell.

    The level of a row is the mean loudness of its doubtful tokens. Every other token gives one of two levels of it,
    whose errors are independent: their covariance is the variance of what the row itself has.
    """
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


_TURNS_FEWEST, _TURNS_BESIDE, _TURNS_MOST = 10, 2, 0.6


@cached_on_case
def turns(case: Case) -> Ints | None:
    """The turn of each sound token within its row, from 0 [N]; None if hardly any row has two.

    Turns are those of the column `turn`, or else parted by masked tokens.
    """
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
    """Whether most of the rows found [S] change at the start of a turn, by the places where they change [S]."""
    turn = turns(case)
    if turn is None or not found.any():
        return False
    begins = np.append(False, (np.diff(turn) > 0) & (case.where[1:] == case.where[:-1]))
    near = np.zeros(len(begins), np.bool_)
    for by in range(-_TURNS_BESIDE, _TURNS_BESIDE + 1):
        near |= np.roll(begins, by)
    at = np.minimum(case.starts + split, len(begins) - 1)[found]
    return bool(near[at].mean() > max(_TURNS_MOST, 4 * near.mean()))
