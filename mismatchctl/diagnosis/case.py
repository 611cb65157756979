"""The case of a run (sampled tokens, which of them are explained, statistics of the rest), and the result of a test."""

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
    """Sample of a run and its statistics, for the next test. Tokens that a test explains are left out for later tests.

    `rollout` and `train` are float64 [T]; a cause may have repaired them. `sound` marks tokens that are valid, finite
    and not yet explained [T]. `reshaped` is true if a cause acts on every token, so that the rest is not plain
    noise. `filled` is true if a cause accounts for the size of the rest. `left_out` maps a column to the values whose
    rows are explained. `explained` are the ids of causes found so far above low confidence. `growth` returns the change
    of K3 over the steps of the whole run.
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
        """Create the case of a whole sample."""
        rollout, train = rows.rollout.astype(np.float64), rows.train.astype(np.float64)
        case = cls(evidence, rows, rollout, train, rows.mask & np.isfinite(rollout) & np.isfinite(train))
        return case.relabelled(whole_k3=float(case.k3.sum()))

    def without(self, tokens: Bools) -> Case:
        """Remove some tokens [T]. Without any, return the case itself, with its cached statistics."""
        return replace(self, sound=self.sound & ~tokens) if tokens.any() else self

    def relabelled(self, **labels: Any) -> Case:
        """Return the case with other labels and the same cached statistics."""
        other = replace(self, **labels)
        measured = {name: value for name, value in self.__dict__.items() if name not in _FIELD_NAMES}
        other.__dict__.update(measured)
        return other

    def repaired(self, *, rollout: Float64s | None = None, train: Float64s | None = None) -> Case:
        """Return the case with other log-probs. Tokens that are not finite stop being sound."""
        rollout = self.rollout if rollout is None else rollout
        train = self.train if train is None else train
        return replace(self, rollout=rollout, train=train, sound=self.sound & np.isfinite(rollout) & np.isfinite(train))

    @property
    def size(self) -> int:
        return len(self.rows)

    @cached_property
    def sequence(self) -> Ints:
        """Sequence of each token [T]."""
        return self.rows.segments.spread(np.arange(self.size))

    @cached_property
    def index(self) -> Ints:
        return np.flatnonzero(self.sound)

    def _sound(self, values: NDArray[Any]) -> NDArray[Any]:
        """Select the sound tokens [N] of values [T]."""
        return values if len(self.index) == len(values) else values[self.index]

    @cached_property
    def where(self) -> Ints:
        """Sequence of each sound token [N]."""
        return self._sound(self.sequence)

    @cached_property
    def x(self) -> Float64s:
        """Log ratio of each sound token [N]."""
        return self.t - self.r

    @cached_property
    def t(self) -> Float64s:
        """Log-prob of the trainer [N]."""
        return self._sound(self.train)

    @cached_property
    def r(self) -> Float64s:
        """Log-prob of the rollout [N]."""
        return self._sound(self.rollout)

    @property
    def sides(self) -> tuple[tuple[str, Float64s, Float64s], ...]:
        """Name of each side, its log-probs and those of the other side [N]."""
        return ("rollout", self.r, self.t), ("train", self.t, self.r)

    def reread(self, side: str, values: Float64s, sequences: Bools) -> Case:
        """Return the case with other values [T] of one side in some sequences [S]."""
        column = np.where(sequences[self.sequence], values, getattr(self, side))
        return self.repaired(rollout=column) if side == "rollout" else self.repaired(train=column)

    def distance(self, sequences: Bools) -> float:
        """Return the median |log ratio| of some sequences [S]."""
        return float(np.median(np.abs(self.x[self.each(sequences)])))

    @cached_property
    def counts(self) -> Ints:
        """Sound tokens per sequence [S]."""
        return np.bincount(self.where, minlength=self.size)

    @cached_property
    def segments(self) -> Segments:
        return Segments.from_lengths(self.counts)

    @property
    def starts(self) -> Ints:
        """First sound token of each sequence [S]."""
        return self.segments.offsets[:-1]

    @cached_property
    def place(self) -> Ints:
        """Position of each sound token in its sequence, counting sound tokens [N]."""
        return self.segments.places

    @cached_property
    def scaled(self) -> Float64s:
        """Log ratio over 1 - p [N]: noise in the logits changes a log-prob about in proportion to 1 - p."""
        return self.x / (1.0 - np.exp(np.minimum(self.t, 0.0)) + _SMALLEST_DOUBT)

    @cached_property
    def noise(self) -> float:
        """Robust standard deviation of `scaled`, roughly the noise in the logits."""
        return float(np.median(np.abs(self.scaled))) / _NORMAL_MEDIAN if len(self.x) else 0.0

    @cached_property
    def standard(self) -> Float64s:
        """`scaled` in units of its noise [N]."""
        return self.scaled / max(self.noise, 1e-12)

    @cached_property
    def k3(self) -> Float64s:
        return compute_k3(np.clip(self.x, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))

    @cached_property
    def spread(self) -> float:
        """Standard deviation of normal logit noise with the same K3. It exceeds `noise` if the tails are heavy."""
        doubt = -np.expm1(np.minimum(self.t, 0.0))
        power = float((doubt * doubt).sum())
        return float(np.sqrt(2 * self.k3.sum() / power)) if power > 0 else 0.0

    @cached_property
    def loudness(self) -> Float64s:
        """Log of |`standard`| [N]. Its mean compares scales and is robust to tails."""
        return np.log(np.abs(self.standard) + 0.05)

    @cached_property
    def doubtful(self) -> Bools:
        """Sound tokens that are not near-certain [N]."""
        found: Bools = self.t < np.log1p(-_SMALLEST_DOUBT)
        return found

    def each(self, values: NDArray[Any]) -> NDArray[Any]:
        """Spread values per sequence [S] over the sound tokens [N]."""
        return self.segments.spread(values)

    def marked(self, chosen: Any) -> Bools:
        """Mark tokens [T] from flags or indices of sound tokens [N]."""
        found = np.zeros(len(self.sound), np.bool_)
        found[self.index[chosen]] = True
        return found

    def sums(self, values: NDArray[Any]) -> Float64s:
        return self.segments.sum(values)

    def means(self, values: NDArray[Any]) -> Float64s:
        """Return the mean over the sound tokens of each sequence [S], 0 for sequences without any."""
        return self.sums(values) / np.maximum(self.counts, 1)

    def part_means(self, values: NDArray[Any], part: Bools) -> Float64s:
        """Return the mean over a part [N] of the sound tokens of each sequence [S], 0 for sequences without any."""
        return self.sums(values * part) / np.maximum(self.sums(part), 1)

    def token_column(self, name: str) -> Float64s | None:
        """Return a numeric column at the sound tokens [N], from its rows if it is recorded per row."""
        values = self.rows.tokens.get(name)
        if values is not None:
            return np.asarray(values, np.float64)[self.index] if values.ndim == 1 else None
        column = self.rows.columns.get(name)
        return None if column is None or column.dtype == object else self.each(np.asarray(column, np.float64))

    def clustered_z(self, values: NDArray[Any]) -> float:
        """Return the mean of values [N] in cluster-robust standard errors."""
        if not len(values):
            return 0.0
        centre = values.mean()
        sums = np.bincount(self.clusters, weights=self.sums(values - centre))
        used = int((np.bincount(self.clusters, weights=self.counts) > 0).sum())
        error = np.sqrt((sums * sums).sum() * used / max(used - 1, 1))
        return float(centre * len(values) / error) if error > 0 and used > 1 else 0.0

    @cached_property
    def clusters(self) -> Ints:
        """Cluster of each sequence [S]: its prompt and step, otherwise the sequence."""
        prompts = self.rows.columns.get("prompt_id")
        if prompts is None:
            return np.arange(self.size)
        names: dict[Any, int] = {}
        keys = zip(self.column("step").tolist(), prompts.tolist(), range(self.size), strict=True)
        apart = [(step, index if prompt is None else prompt, prompt is None) for step, prompt, index in keys]
        return np.array([names.setdefault(key, len(names)) for key in apart], np.int64)

    def column(self, name: str) -> NDArray[Any]:
        """Read a per-sequence column [S], see `read_column`."""
        return read_column(self.rows, name)

    def share(self, tokens: Bools) -> float:
        """Return the share of the summed |log ratio| on some tokens [T]."""
        size = np.minimum(np.abs(self.x), _MAX_LOG_RATIO)
        return float(size[tokens[self.index]].sum()) / self.weight if self.weight > 0 else 0.0

    @cached_property
    def weight(self) -> float:
        """Summed |log ratio| of the sound tokens."""
        return float(np.minimum(np.abs(self.x), _MAX_LOG_RATIO).sum())

    @property
    def complete(self) -> bool:
        return self.size == self.evidence.sequences


_FIELD_NAMES = frozenset(field.name for field in fields(Case))

Found = TypeVar("Found")


def cached_on_case(measure: Callable[[Case], Found]) -> Callable[[Case], Found]:
    """Cache a statistic with its case. It must depend on tokens and log-probs only, not on labels."""
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
    """Result of a test.

    `tokens` marks tokens that the cause explains [T], which determine `share` and `leaves`. Otherwise `share` is the
    explained part of the summed |log ratio|, and `leaves` the rest of the case. `k3` is the explained part of K3 if it
    differs. `where` defaults to all tokens if the cause acts `everywhere`. `examples` are sequences of the sample [N]
    (default: the largest differences) with `positions` [N], and `places` are examples of the whole dump. `rivals` maps
    a cause to the measurement that distinguishes it. `outside_k3` is true if K3 does not measure this data.
    `symptom_of` is the cause that gets the evidence if it was found.
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
