"""The state of a diagnosis (sampled tokens and the tokens that are explained), and the result of a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, Segments
from mismatchctl.core.ratios import compute_k3
from mismatchctl.data.blocks import Rows
from mismatchctl.diagnosis.evidence import Evidence, read_column
from mismatchctl.results.growth import Growth
from mismatchctl.results.model import Confidence, Fact

_MAX_LOG_RATIO = 20.0
_SMALLEST_DOUBT = 0.02  # keeps the noise of near-certain tokens from being scaled up without end
_NORMAL_MEDIAN = 0.6745


@dataclass(frozen=True)
class Case:
    """The sampled tokens of a run and their statistics, as the next test sees them.

    Tokens that an earlier test explains are left out.

    `rollout` and `train` are float64 [T]. An earlier cause may have repaired them. `sound` has flags of the tokens that
    are valid, finite and not yet explained [T]. `reshaped` is true if a cause changes every token, so that the
    remaining mismatch is not plain noise. `filled` is true if a cause explains the size of the remaining mismatch.
    `left_out` maps a column to the values whose rows are explained. `explained` contains the causes that were found
    with more than low confidence. `growth` returns the change of K3 over the steps of the whole run.
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
        """Create the case with the whole sample."""
        rollout, train = rows.rollout.astype(np.float64), rows.train.astype(np.float64)
        case = cls(evidence, rows, rollout, train, rows.mask & np.isfinite(rollout) & np.isfinite(train))
        return case.relabelled(whole_k3=float(case.k3.sum()))

    def without(self, tokens: Bools) -> Case:
        """Return the case without some tokens [T]."""
        return replace(self, sound=self.sound & ~tokens) if tokens.any() else self

    def relabelled(self, **labels: Any) -> Case:
        """Return the case with other labels and the same cached statistics."""
        other = replace(self, **labels)
        measured = {name: value for name, value in self.__dict__.items() if name not in _FIELD_NAMES}
        other.__dict__.update(measured)
        return other

    def repaired(self, *, rollout: Float64s | None = None, train: Float64s | None = None) -> Case:
        """Return the case with other log-probs. Tokens that are not finite are then no longer used."""
        rollout = self.rollout if rollout is None else rollout
        train = self.train if train is None else train
        return replace(self, rollout=rollout, train=train, sound=self.sound & np.isfinite(rollout) & np.isfinite(train))

    @property
    def size(self) -> int:
        return len(self.rows)

    @cached_property
    def sequence(self) -> Ints:
        """Return the index of the sequence of each token [T]."""
        return self.rows.segments.spread(np.arange(self.size))

    @cached_property
    def index(self) -> Ints:
        return np.flatnonzero(self.sound)

    def _sound(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values [N] of the unexplained valid tokens, from values of all tokens [T]."""
        return values if len(self.index) == len(values) else values[self.index]

    @cached_property
    def where(self) -> Ints:
        """Return the index of the sequence of each unexplained token [N]."""
        return self._sound(self.sequence)

    @cached_property
    def x(self) -> Float64s:
        """Return the log ratio of each unexplained token [N]."""
        return self.t - self.r

    @cached_property
    def t(self) -> Float64s:
        """Return the trainer's log-prob of each unexplained token [N]."""
        return self._sound(self.train)

    @cached_property
    def r(self) -> Float64s:
        """Return the rollout's log-prob of each unexplained token [N]."""
        return self._sound(self.rollout)

    @property
    def sides(self) -> tuple[tuple[str, Float64s, Float64s], ...]:
        """Return the name of each side, its log-probs, and the log-probs of the other side [N]."""
        return ("rollout", self.r, self.t), ("train", self.t, self.r)

    def reread(self, side: str, values: Float64s, sequences: Bools) -> Case:
        """Return the case with other values [T] on one side of some sequences [S]."""
        column = np.where(sequences[self.sequence], values, getattr(self, side))
        return self.repaired(rollout=column) if side == "rollout" else self.repaired(train=column)

    def distance(self, sequences: Bools) -> float:
        """Return the median |log ratio| of some sequences [S]."""
        return float(np.median(np.abs(self.x[self.each(sequences)])))

    @cached_property
    def counts(self) -> Ints:
        """Return the number of unexplained tokens per sequence [S]."""
        return np.bincount(self.where, minlength=self.size)

    @cached_property
    def segments(self) -> Segments:
        return Segments.from_lengths(self.counts)

    @property
    def starts(self) -> Ints:
        """Return the first unexplained token of each sequence [S]."""
        return self.segments.offsets[:-1]

    @cached_property
    def place(self) -> Ints:
        """Return the rank of each unexplained token in its sequence [N]."""
        return self.segments.places

    @cached_property
    def scaled(self) -> Float64s:
        """Return the log ratio divided by 1 - p [N]. Noise in the logits changes a log-prob in proportion to 1 - p."""
        return self.x / (1.0 - np.exp(np.minimum(self.t, 0.0)) + _SMALLEST_DOUBT)

    @cached_property
    def noise(self) -> float:
        """Return the robust standard deviation of `scaled`, which estimates the noise in the logits."""
        return float(np.median(np.abs(self.scaled))) / _NORMAL_MEDIAN if len(self.x) else 0.0

    @cached_property
    def standard(self) -> Float64s:
        """Return `scaled` divided by its noise [N]."""
        return self.scaled / max(self.noise, 1e-12)

    @cached_property
    def k3(self) -> Float64s:
        return compute_k3(np.clip(self.x, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))

    @cached_property
    def spread(self) -> float:
        """Return the standard deviation of normal logit noise that would have the same K3.

        This value exceeds `noise` if the tails are heavy.
        """
        doubt = -np.expm1(np.minimum(self.t, 0.0))
        power = float((doubt * doubt).sum())
        return float(np.sqrt(2 * self.k3.sum() / power)) if power > 0 else 0.0

    @cached_property
    def loudness(self) -> Float64s:
        """Return log |`standard`| [N]. Its mean is robust to tails."""
        return np.log(np.abs(self.standard) + 0.05)

    @cached_property
    def doubtful(self) -> Bools:
        """Return the unexplained tokens that are not nearly certain [N]."""
        found: Bools = self.t < np.log1p(-_SMALLEST_DOUBT)
        return found

    def each(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeat values per sequence [S] for the unexplained tokens [N]."""
        return self.segments.spread(values)

    def marked(self, chosen: Any) -> Bools:
        """Convert flags or indices of unexplained tokens [N] to flags of all tokens [T]."""
        found = np.zeros(len(self.sound), np.bool_)
        found[self.index[chosen]] = True
        return found

    def sums(self, values: NDArray[Any]) -> Float64s:
        return self.segments.sum(values)

    def means(self, values: NDArray[Any]) -> Float64s:
        """Return the mean over the unexplained tokens of each sequence [S], or 0 for a sequence without such tokens."""
        return self.sums(values) / np.maximum(self.counts, 1)

    def part_means(self, values: NDArray[Any], part: Bools) -> Float64s:
        """Return the mean over some unexplained tokens of each sequence [S], or 0 if there are no such tokens."""
        return self.sums(values * part) / np.maximum(self.sums(part), 1)

    def token_column(self, name: str) -> Float64s | None:
        """Return a numeric column at the unexplained tokens [N]."""
        values = self.rows.tokens.get(name)
        if values is not None:
            return np.asarray(values, np.float64)[self.index] if values.ndim == 1 else None
        column = self.rows.columns.get(name)
        return None if column is None or column.dtype == object else self.each(np.asarray(column, np.float64))

    def clustered_z(self, values: NDArray[Any]) -> float:
        """Return the mean of values [N], divided by its cluster-robust standard error."""
        if not len(values):
            return 0.0
        centre = values.mean()
        sums = np.bincount(self.clusters, weights=self.sums(values - centre))
        used = int((np.bincount(self.clusters, weights=self.counts) > 0).sum())
        error = np.sqrt((sums * sums).sum() * used / max(used - 1, 1))
        return float(centre * len(values) / error) if error > 0 and used > 1 else 0.0

    @cached_property
    def clusters(self) -> Ints:
        """Return the cluster of each sequence [S]: its prompt and step, or the sequence."""
        prompts = self.rows.columns.get("prompt_id")
        if prompts is None:
            return np.arange(self.size)
        names: dict[Any, int] = {}
        keys = zip(self.column("step").tolist(), prompts.tolist(), range(self.size), strict=True)
        apart = [(step, index if prompt is None else prompt, prompt is None) for step, prompt, index in keys]
        return np.array([names.setdefault(key, len(names)) for key in apart], np.int64)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column with one value per sequence [S] (`read_column`)."""
        return read_column(self.rows, name)

    def share(self, tokens: Bools) -> float:
        """Return the share of the summed |log ratio| that some tokens [T] have."""
        size = np.minimum(np.abs(self.x), _MAX_LOG_RATIO)
        return float(size[tokens[self.index]].sum()) / self.weight if self.weight > 0 else 0.0

    @cached_property
    def weight(self) -> float:
        """Return the summed |log ratio| of the unexplained tokens."""
        return float(np.minimum(np.abs(self.x), _MAX_LOG_RATIO).sum())

    @property
    def complete(self) -> bool:
        return self.size == self.evidence.sequences


_FIELD_NAMES = frozenset(field.name for field in fields(Case))

Found = TypeVar("Found")


def cached_on_case(measure: Callable[[Case], Found]) -> Callable[[Case], Found]:
    """Cache a statistic with its case. The statistic may only depend on tokens and log-probs, not on labels."""
    key = f"_{measure.__name__}"

    @wraps(measure)
    def kept(case: Case) -> Found:
        if key not in case.__dict__:
            case.__dict__[key] = measure(case)
        found: Found = case.__dict__[key]
        return found

    return kept


Place = tuple[int, int, int]
"""File, row and position. A negative position means the whole row."""


@dataclass(frozen=True)
class Detection:
    """Result of a test for a cause.

    `tokens` has flags of the explained tokens [T], which determine `share` and `leaves`. Without `tokens`, `share` is
    the explained share of the summed |log ratio|, and `leaves` is the remaining case. `k3` is the explained share of
    K3, if it differs from `share`. If the cause acts `everywhere`, `where` is all tokens by default. `examples` are
    sampled sequences with `positions` [N], and `places` are examples from the whole dump. `rivals` maps another
    possible cause to the measurement that distinguishes it. `outside_k3` is true if K3 does not include this data. If
    the cause `symptom_of` was found, it gets the evidence.
    """

    confidence: Confidence
    summary: str
    share: float = 1.0
    evidence: tuple[Fact, ...] = ()
    where: Mapping[str, str] | None = None
    examples: Ints | None = None
    positions: Ints | None = None
    places: tuple[Place, ...] = ()
    rivals: Mapping[str, str] = field(default_factory=dict)
    tokens: Bools | None = None
    leaves: Case | None = None
    k3: float | None = None
    everywhere: bool = False
    outside_k3: bool = False
    symptom_of: str = ""
