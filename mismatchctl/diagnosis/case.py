"""Input of the tests for causes: a sample of a run's tokens. Tests flag the tokens that their causes explain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, Segments
from mismatchctl.core.ratios import compute_k3
from mismatchctl.data.blocks import Rows
from mismatchctl.diagnosis.evidence import Evidence, read_column
from mismatchctl.results.growth import Growth

_MAX_LOG_RATIO, _MAX_DISTANCE = 20.0, 5.0
_SMALLEST_DOUBT = 0.02  # nearly certain tokens have a smaller 1 - p. Also added to 1 - p if it is a divisor


@dataclass(frozen=True)
class Case:
    """A sample of the tokens of a run. A test for a cause sees only the tokens that no earlier test explains.

    Arrays have one value per sampled token [T], per sampled sequence [S], or per unexplained token [N].

    Attributes:
        rollout: Log-probs of the rollout [T], as corrected by earlier tests.
        train: Log-probs of the trainer [T], as corrected by earlier tests.
        sound: True for each token [T] that is valid, has two finite log-probs, and is not explained yet.
        reshaped: True if an earlier test found a cause that changes every log-prob, such as a temperature.
        filled: True if an earlier test found a cause that affects all tokens.
        left_out: Column -> values (such as worker names) that tests ignore, because an earlier test blamed them.
        explained: The causes that earlier tests found with medium or high confidence.
        whole_k3: The sum of K3 over all valid tokens of the sample, before the first test.
        growth: A function that returns the growth of K3 over the steps of the whole run.
    """

    evidence: Evidence
    rows: Rows
    rollout: Float64s
    train: Float64s
    sound: Bools
    reshaped: bool = False
    filled: bool = False
    left_out: dict[str, frozenset[Any]] = field(default_factory=dict)
    explained: tuple[str, ...] = ()
    whole_k3: float = 0.0
    growth: Callable[[], Growth | None] | None = None

    @classmethod
    def of(cls, evidence: Evidence, rows: Rows) -> Case:
        rollout, train = rows.rollout.astype(np.float64), rows.train.astype(np.float64)
        case = cls(evidence, rows, rollout, train, rows.mask & np.isfinite(rollout) & np.isfinite(train))
        return case.with_fields(whole_k3=float(case.k3.sum()))

    def without(self, tokens: Bools) -> Case:
        return replace(self, sound=self.sound & ~tokens) if tokens.any() else self

    def with_fields(self, **values: Any) -> Case:
        """Return a copy with other field values. Statistics such as `noise` are copied, not computed again."""
        other = replace(self, **values)
        measured = {name: value for name, value in self.__dict__.items() if name not in _FIELD_NAMES}
        other.__dict__.update(measured)
        return other

    def with_log_probs(self, *, rollout: Float64s | None = None, train: Float64s | None = None) -> Case:
        """Return a copy with other log-probs [T]. Tokens whose new log-prob is infinite or NaN are left out."""
        rollout = self.rollout if rollout is None else rollout
        train = self.train if train is None else train
        return replace(self, rollout=rollout, train=train, sound=self.sound & np.isfinite(rollout) & np.isfinite(train))

    @property
    def size(self) -> int:
        return len(self.rows)

    @cached_property
    def sequence(self) -> Ints:
        return self.rows.segments.spread(np.arange(self.size))

    @cached_property
    def index(self) -> Ints:
        return np.flatnonzero(self.sound)

    def _sound(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if len(self.index) == len(values) else values[self.index]

    @cached_property
    def where(self) -> Ints:  # index of each token's sequence [N]
        return self._sound(self.sequence)

    @cached_property
    def x(self) -> Float64s:  # log ratio [N]
        return self.t - self.r

    @cached_property
    def t(self) -> Float64s:  # log-probs of the trainer [N]
        return self._sound(self.train)

    @cached_property
    def r(self) -> Float64s:  # log-probs of the rollout [N]
        return self._sound(self.rollout)

    @property
    def sides(self) -> tuple[tuple[str, Float64s, Float64s], ...]:
        """Return each side's name, its log-probs [N] and the other side's: ("rollout", r, t) and ("train", t, r)."""
        return ("rollout", self.r, self.t), ("train", self.t, self.r)

    def with_reading(self, side: str, values: Float64s, sequences: Bools) -> Case:
        """Return a copy. In the flagged `sequences` [S], `values` [T] replace the log-probs of `side`."""
        column = np.where(sequences[self.sequence], values, getattr(self, side))
        return self.with_log_probs(rollout=column) if side == "rollout" else self.with_log_probs(train=column)

    def distance(self, sequences: Bools) -> float:
        return float(np.median(np.abs(self.x[self.each(sequences)])))

    @cached_property
    def counts(self) -> Ints:  # number of unexplained tokens per sequence [S]
        return np.bincount(self.where, minlength=self.size)

    @cached_property
    def segments(self) -> Segments:
        return Segments.from_lengths(self.counts)

    @property
    def starts(self) -> Ints:
        return self.segments.offsets[:-1]

    @cached_property
    def place(self) -> Ints:  # index of each token among the unexplained tokens of its sequence [N]
        return self.segments.places

    @cached_property
    def scaled(self) -> Float64s:
        """Return the logit error of each token [N]: the log ratio divided by 1 - p (p: trainer probability)."""
        return self.x / (1.0 - np.exp(np.minimum(self.t, 0.0)) + _SMALLEST_DOUBT)

    @cached_property
    def noise(self) -> float:
        """Estimate the standard deviation of the noise in the logits from the median |logit error|."""
        return float(np.median(np.abs(self.scaled))) / 0.6745 if len(self.x) else 0.0

    @cached_property
    def standard(self) -> Float64s:
        return self.scaled / max(self.noise, 1e-12)

    @cached_property
    def k3(self) -> Float64s:
        return compute_k3(np.clip(self.x, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))

    @cached_property
    def spread(self) -> float:
        """Return the logit noise that would cause the measured K3. A few outliers increase it, but not `noise`."""
        doubt = -np.expm1(np.minimum(self.t, 0.0))
        power = float((doubt * doubt).sum())
        return float(np.sqrt(2 * self.k3.sum() / power)) if power > 0 else 0.0

    @cached_property
    def loudness(self) -> Float64s:
        """Return the mismatch of each token [N] on a log scale, so that a few extreme tokens do not dominate means."""
        return np.log(np.abs(self.standard) + 0.05)

    @cached_property
    def doubtful(self) -> Bools:
        """Return True for tokens whose trainer probability is below 0.98 [N]."""
        found: Bools = self.t < np.log1p(-_SMALLEST_DOUBT)
        return found

    def each(self, values: NDArray[Any]) -> NDArray[Any]:
        return self.segments.spread(values)

    def marked(self, chosen: Any) -> Bools:
        """Flag the `chosen` tokens among all tokens [T]. `chosen`: flags or indices of unexplained tokens [N]."""
        found = np.zeros(len(self.sound), np.bool_)
        found[self.index[chosen]] = True
        return found

    def sums(self, values: NDArray[Any]) -> Float64s:
        return self.segments.sum(values)

    def means(self, values: NDArray[Any]) -> Float64s:
        """Return the mean of `values` [N] per sequence [S]. Sequences without unexplained tokens get 0."""
        return self.sums(values) / np.maximum(self.counts, 1)

    def part_means(self, values: NDArray[Any], part: Bools) -> Float64s:
        """Return the mean of `values` [N] over the tokens flagged in `part` [N], per sequence [S] (0: no tokens)."""
        return self.sums(values * part) / np.maximum(self.sums(part), 1)

    def token_column(self, name: str) -> Float64s | None:
        values = self.rows.extra_columns.get(name)
        if values is not None:
            return np.asarray(values, np.float64)[self.index] if values.ndim == 1 else None
        column = self.rows.columns.get(name)
        return None if column is None or column.dtype == object else self.each(np.asarray(column, np.float64))

    def clustered_z(self, values: NDArray[Any]) -> float:
        """Return the mean of `values` [N] divided by its cluster-robust standard error."""
        if not len(values):
            return 0.0
        centre = values.mean()
        sums = np.bincount(self.clusters, weights=self.sums(values - centre))
        used = int((np.bincount(self.clusters, weights=self.counts) > 0).sum())
        error = np.sqrt((sums * sums).sum() * used / max(used - 1, 1))
        return float(centre * len(values) / error) if error > 0 and used > 1 else 0.0

    @cached_property
    def clusters(self) -> Ints:
        """Return the cluster number of each sequence [S]. Sequences with the same prompt id and step share a number."""
        prompts = self.rows.columns.get("prompt_id")
        if prompts is None:
            return np.arange(self.size)
        names: dict[Any, int] = {}
        keys = zip(self.column("step").tolist(), prompts.tolist(), range(self.size), strict=True)
        apart = [(step, index if prompt is None else prompt, prompt is None) for step, prompt, index in keys]
        return np.array([names.setdefault(key, len(names)) for key in apart], np.int64)

    def column(self, name: str) -> NDArray[Any]:
        return read_column(self.rows, name)

    def share(self, tokens: Bools) -> float:
        size = np.minimum(np.abs(self.x), _MAX_LOG_RATIO)
        return float(size[tokens[self.index]].sum()) / self.weight if self.weight > 0 else 0.0

    @cached_property
    def weight(self) -> float:
        return float(np.minimum(np.abs(self.x), _MAX_LOG_RATIO).sum())

    @property
    def complete(self) -> bool:
        return self.size == self.evidence.sequences

    @cached_property
    def suspicious_runs(self) -> ConstantRuns:
        """Find stretches of 4 or more equal log-probs, or of zeros, on one side, if their log ratios are large."""
        found = [_find_constant_runs(self, values) for values in (self.r, self.t)]
        return ConstantRuns(*(np.concatenate([vars(runs)[name] for runs in found]) for name in vars(found[0])))

    @cached_property
    def systematic_share(self) -> tuple[float, float]:
        """Return how much of the log ratio's variance (0 to 1) depends only on the token id, with a z-score.

        Different model weights give a token similar log ratios in all sequences, but noise does not. For the z-score,
        the share is divided by its standard deviation if the log ratios of whole sequences get random signs.
        """
        ids = self.rows.extra_columns.get("token_ids")
        if ids is None or len(self.x) < 200:
            return 0.0, 0.0
        size, bins = np.clip(self.standard, -4, 4), quantile_bins((self.r + self.t) / 2, _PROBABILITY_BINS)
        number = np.maximum(np.bincount(bins, minlength=_PROBABILITY_BINS), 1)
        size = size - (np.bincount(bins, size, _PROBABILITY_BINS) / number)[bins]  # remove effects of the probability
        pairs, inverse = np.unique(ids[self.index].astype(np.int64) * self.size + self.where, return_inverse=True)
        sums = np.bincount(inverse, weights=size).astype(np.float64)
        counts = np.bincount(inverse).astype(np.float64)
        starts = np.flatnonzero(np.append(True, np.diff(pairs // self.size) != 0))  # sorted by token id
        sequence = pairs % self.size

        def product(values: Float64s) -> float:
            return float((np.add.reduceat(values, starts) ** 2).sum() - (values * values).sum())

        others, power = product(counts), float((size * size).mean())
        if others <= 0 or power == 0:
            return 0.0, 0.0
        flips = np.random.default_rng(0).choice([-1.0, 1.0], (24, self.size))
        scatter = float(np.std([product(sums * flip[sequence]) for flip in flips]))
        value = product(sums)
        return value / others / power, value / scatter if scatter > 0 else 0.0

    @cached_property
    def calibration(self) -> Calibration:
        values = []
        for sign in (1.0, -1.0):
            excess = np.expm1(np.clip(sign * self.x, -20, 20))
            values += [float(excess.mean()) if len(excess) else 0.0, self.clustered_z(excess)]
        return Calibration(*values)

    @cached_property
    def column_correlation(self) -> float:
        """Return the correlation of the two log-prob columns. Log-probs below -8 count as -8."""
        one, other = (np.maximum(values, -8.0) for values in (self.r, self.t))
        if len(self.x) < 3 or one.std() == 0 or other.std() == 0:
            return 1.0
        return float(np.corrcoef(one, other)[0, 1])

    @cached_property
    def certain_tokens_differ(self) -> bool:
        """Return True if tokens above probability 0.98 have large log ratios too. Logit noise cannot cause this."""
        size, unsure = np.abs(self.x), (self.t > _UNSURE_RANGE[0]) & (self.t < _UNSURE_RANGE[1])
        if unsure.sum() < _MIN_INFORMATIVE_TOKENS:
            return False
        usual = float(np.median(size[unsure]))
        certain = [size[values > -0.02] for values in (self.t, self.r)]
        return any(
            len(part) >= _MIN_INFORMATIVE_TOKENS and float(np.quantile(part, 0.75)) > 0.3 * usual for part in certain
        )

    @cached_property
    def is_greedy(self) -> bool:
        """Return True if the rollout has far fewer unlikely tokens than random sampling would give."""
        doubt = float(-np.expm1(np.minimum(self.r, 0.0)).sum())
        return float((self.r < -3.0).sum()) < 0.02 * doubt

    @cached_property
    def coherence(self) -> Coherence:
        values, standard = [], np.clip(self.standard, -4, 4)
        certain: Bools = self.t > -0.5
        if len(self.t) and certain.mean() < _MIN_CERTAIN_SHARE:
            certain = self.t > np.quantile(self.t, 1 - _MIN_CERTAIN_SHARE)
        for chosen in (certain, self.rare):
            size = np.abs(standard[chosen]).sum()
            values += [float(standard[chosen].sum() / size) if size > 0 else 0.0]
            values += [self.clustered_z(np.where(chosen, standard, 0.0))]
        return Coherence(*values)

    @cached_property
    def is_one_sided(self) -> bool:
        """Return True if one side, rollout or trainer, has higher log-probs for likely and for unlikely tokens."""
        likely, _, unlikely, _ = self.coherence
        return likely * unlikely > 0 and min(abs(likely), abs(unlikely)) > 0.7

    @cached_property
    def drift_correlation(self) -> tuple[float, float]:
        """Return the correlation of mean log ratio and mean update (current - train) over token ids, with a z-score."""
        ids, current = (self.rows.extra_columns.get(name) for name in ("token_ids", "current_log_probs"))
        if ids is None or current is None or not len(self.x):
            return 0.0, 0.0
        ahead = (current[self.index] - self.t) / (1.0 - np.exp(np.minimum(self.t, 0.0)) + 0.02)
        usual = float(np.nanmedian(np.abs(ahead)))
        if not usual > 0:
            return 0.0, 0.0
        ahead = np.nan_to_num(np.clip(ahead / usual, -6, 6))
        _, token, counts = np.unique(ids[self.index], return_inverse=True, return_counts=True)
        often = counts >= 30
        if often.sum() < 10:
            return 0.0, 0.0
        past, future = (
            (np.bincount(token, values) / counts)[often] for values in (np.clip(self.standard, -4, 4), ahead)
        )
        if past.std() == 0 or future.std() == 0:
            return 0.0, 0.0
        value = float(np.corrcoef(past, future)[0, 1])
        return value, float(np.arctanh(np.clip(value, -0.999, 0.999)) * np.sqrt(often.sum() - 3))

    @cached_property
    def row_kinds(self) -> RowKinds | None:
        if self.noise < _KINDS_MIN_NOISE:
            return None
        odd = self.place % 2 == 1
        halves = [self.doubtful & part for part in (odd, ~odd)]
        counts = [self.sums(half) for half in halves]
        known = np.flatnonzero((counts[0] >= _KINDS_MIN_TOKENS) & (counts[1] >= _KINDS_MIN_TOKENS))
        if len(known) < 8:
            return None
        first, second = (
            self.sums(self.loudness * half)[known] / count[known] for half, count in zip(halves, counts, strict=True)
        )
        variance = float(np.cov(first, second)[0, 1])
        if variance < _KINDS_MIN_VARIANCE:
            return None
        level = (first + second) / 2
        order = np.argsort(level)
        sizes = np.arange(1, len(level))
        sums = np.cumsum(level[order])[:-1]
        apart = (level.sum() - sums) / (len(level) - sizes) - sums / sizes
        between = np.where(np.minimum(sizes, len(level) - sizes) >= 2, sizes * (len(level) - sizes) * apart**2, 0.0)
        cut = int(between.argmax())
        louder = np.zeros(self.size, np.bool_)
        louder[known[order[cut + 1 :]]] = True
        return RowKinds(louder, float(np.exp(apart[cut])), variance, len(known))

    @property
    def rare(self) -> Bools:
        """Flag the least likely tokens [N], usually with p < 3%. A higher temperature makes them likelier."""
        found: Bools = self.t < -3.5
        if found.sum() < 30 and len(self.t):
            found = self.t < np.quantile(self.t, 0.02)
        elif found.mean() > _MAX_RARE_SHARE:  # many unlikely tokens: take the least likely
            found = self.t < np.quantile(self.t, _MAX_RARE_SHARE / 2)
        return found

    def find_loudest(self, sequences: Bools | None = None, score: Float64s | None = None) -> Ints:
        """Return the indices of up to three `sequences` with the highest score (default: mean |log ratio|)."""
        found = np.flatnonzero(self.counts > 0 if sequences is None else sequences)
        score = self.means(np.abs(self.x)) if score is None else score
        return found[np.argsort(-score[found], kind="stable")][:3]

    @cached_property
    def _distances(self) -> Float64s:
        return self.means(np.minimum(np.abs(self.x), _MAX_DISTANCE))

    def find_better_reading(self, side: str, values: Float64s) -> Bools:
        """Flag the sequences [S] whose mismatch falls to 35% or less if `values` [T] replace log-probs of `side`."""
        other = self.t if side == "rollout" else self.r
        before = self._distances
        with np.errstate(invalid="ignore"):
            after = self.means(np.fmin(np.abs(other - self._sound(values)), _MAX_DISTANCE))  # NaN is far
        better = (self.counts >= _MIN_TOKENS) & (before > 1e-2) & (after <= 0.35 * before)
        if better.sum() > 0.5 * (self.counts >= _MIN_TOKENS).sum():  # then also add slightly better ones
            better |= after < before
        return better

    def fit_within_rows(self, values: Float64s, used: Bools) -> tuple[float, float, int]:
        """Fit a line to `loudness` over `values` within rows. Return slope, standard error and row count."""
        values = np.where(used, values, 0.0)
        across, up = ((part - self.each(self.part_means(part, used))) * used for part in (values, self.loudness))
        product, square = self.sums(across * up), self.sums(across * across)
        whole = max(float(square.sum()), 1e-12)
        slope = float(product.sum()) / whole
        return slope, float(np.sqrt(((product - slope * square) ** 2).sum())) / whole, int((square > 0).sum())

    def breaks_at_turns(self, found: Bools, split: Ints) -> bool:
        """Return True if most of the `found` sequences have a turn that starts near their token `split` [S]."""
        turn = self.turns
        if turn is None or not found.any():
            return False
        begins = np.append(False, (np.diff(turn) > 0) & (self.where[1:] == self.where[:-1]))
        near = np.zeros(len(begins), np.bool_)
        for by in range(-_TURN_WINDOW, _TURN_WINDOW + 1):
            near |= np.roll(begins, by)
        at = np.minimum(self.starts + split, len(begins) - 1)[found]
        return bool(near[at].mean() > max(0.6, 4 * near.mean()))

    @cached_property
    def turns(self) -> Ints | None:
        """Return the turn of each token [N], by column `turn` or mask gaps (`None` with fewer than 10 changes)."""
        recorded = self.rows.extra_columns.get("turn")
        new = np.zeros(len(self.index), np.bool_)
        inside = self.where[1:] == self.where[:-1]
        if recorded is not None and recorded.ndim == 1:
            new[1:] = (np.diff(recorded[self.index].astype(np.float64)) != 0) & inside
        else:
            masked = np.append(0, np.cumsum(~self.rows.mask))
            new[1:] = (np.diff(masked[self.index]) > 0) & inside  # explained tokens do not end a turn
        if new.sum() < 10:
            return None
        running = np.cumsum(new)
        turn: Ints = running - running[np.minimum(self.each(self.starts), len(running) - 1)]
        return turn


_FIELD_NAMES = frozenset(field.name for field in fields(Case))

Found = TypeVar("Found")


def cached_on_case(measure: Callable[[Case], Found]) -> Callable[[Case], Found]:
    """Decorator that caches the result of `measure` per case. Copies made by `with_fields` share the cached result."""
    key = f"_{measure.__name__}"

    @wraps(measure)
    def kept(case: Case) -> Found:
        if key not in case.__dict__:
            case.__dict__[key] = measure(case)
        found: Found = case.__dict__[key]
        return found

    return kept


_MIN_TOKENS, _MAX_RARE_SHARE, _MIN_CERTAIN_SHARE = 8, 0.3, 0.1
FLOAT32_NOISE, BFLOAT16_NOISE = 1e-4, 0.022
"""Usual upper limits of `Case.noise` if the model computes in float32 and in bfloat16."""
UNRELATED_CORRELATION = 0.6
"""With a lower correlation of the two log-prob columns, different model weights cannot be the only cause."""
_MIN_RUN_LENGTH = 4
_PROBABILITY_BINS = 16
_UNSURE_RANGE, _MIN_INFORMATIVE_TOKENS = (-2.0, -0.2), 50


@dataclass(frozen=True)
class ConstantRuns:
    """Stretches of neighboring tokens with equal log-probs on one side. `off` has the mean |log ratio| of each."""

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
        marks = np.zeros(len(case.index) + 1, np.int64)
        np.add.at(marks, self.first, 1)
        np.add.at(marks, self.first + self.length, -1)
        return case.marked(np.cumsum(marks[:-1]) > 0)


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
    """Return True if a log-prob is probably a placeholder: it has at most two decimals or is below -100."""
    return bool(value == round(value, 2) or value < -100)


def quantile_bins(values: NDArray[Any], number: int) -> Ints:
    """Divide the values into `number` bins with about the same number of values. Return the bin index of each value."""
    if not len(values):
        return np.zeros(0, np.int64)
    return np.searchsorted(np.quantile(values, np.linspace(0, 1, number + 1)[1:-1]), values)


class Calibration(NamedTuple):
    """A test of the distribution that tokens come from. `excess` is E[ratio] - 1, and `inverse` is E[1 / ratio] - 1.

    If the tokens were sampled from the rollout's distribution, `excess` is near 0. If they were sampled from the
    trainer's distribution, `inverse` is near 0. `z` and `inverse_z` are z-scores.
    """

    excess: float
    z: float
    inverse: float
    inverse_z: float


class Coherence(NamedTuple):
    """Balance of log ratios of likely and of unlikely tokens: -1 if all are negative, 1 if all are positive."""

    likely: float
    likely_z: float
    unlikely: float
    unlikely_z: float


_KINDS_MIN_VARIANCE, _KINDS_MIN_NOISE = 0.6, 1e-4
"""Minimum variance of the rows' mean `loudness` for two kinds of rows. Runs with one kind had <= 0.41, two >= 1.5."""
_KINDS_MIN_TOKENS = 5


@dataclass(frozen=True)
class RowKinds:
    """Rows of two kinds, one with a larger mismatch by the factor `times`. `louder` [S] flags the rows of this kind."""

    louder: Bools
    times: float
    variance: float
    rows: int


_TURN_WINDOW = 2
