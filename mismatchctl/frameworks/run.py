"""One step under one configuration of a framework: what its losses and logged numbers are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Segments, TokenBatch
from mismatchctl.correction import Applied, Correction, Gate, apply
from mismatchctl.frameworks.step import Step
from mismatchctl.ratios import Ratios, SingleRatios
from mismatchctl.surrogates import Array

Options = dict[str, Any]


@dataclass
class Run:
    """One step under one configuration, on the valid tokens [T] in the dtype of the training.

    Attributes:
        step: the rows.
        options: all of them, defaults filled in.
        correction: the rules.
        trained: the column that stands for the trainer's recomputation.
        anchored: the column that stands for the sampler.
        unknown: what stands for a log-prob of the sampler that is NaN; None: it stays.
        single: whether statistics are taken in float32 where the training is.
    """

    step: Step
    options: Options
    correction: Correction
    trained: str = "train_log_probs"
    anchored: str = "rollout_log_probs"
    single: bool = True
    unknown: float | None = None

    @cached_property
    def segments(self) -> Segments:
        """One segment per row."""
        return self.step.segments

    @cached_property
    def rollout(self) -> Array:
        """Log-probs of the sampler."""
        values = self.step.values(self.anchored)
        return values if self.unknown is None else np.where(np.isnan(values), self.unknown, values).astype(values.dtype)

    @cached_property
    def train(self) -> Array:
        """Log-probs of the trainer's recomputation."""
        return self.step.values(self.trained)

    @cached_property
    def current(self) -> Array:
        """Log-probs of the policy that is updated; the recomputation's where there are none."""
        return self.step.values("current_log_probs" if self.has_loss else self.trained)

    @cached_property
    def advantages(self) -> Array:
        """Advantages of tokens; zeros where there are none."""
        return self.step.values("advantages") if self.step.has("advantages") else np.zeros_like(self.rollout)

    @property
    def has_loss(self) -> bool:
        """Whether there is what a loss needs."""
        return self.step.has("current_log_probs") and self.step.has("advantages")

    @cached_property
    def d(self) -> Array:
        """Recomputation minus sampler: the mismatch."""
        return self._difference(self.train, self.rollout)

    @cached_property
    def u(self) -> Array:
        """Current minus recomputation: the update."""
        return self._difference(self.current, self.train)

    @cached_property
    def v(self) -> Array:
        """Current minus sampler: both."""
        return self._difference(self.current, self.rollout)

    @staticmethod
    def _difference(a: Array, b: Array) -> Array:
        with np.errstate(invalid="ignore"):
            found: Array = a - b
        return found

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Valid tokens of each row [S]."""
        return self.segments.lengths

    @property
    def tokens(self) -> int:
        """Valid tokens of the step."""
        return self.segments.tokens

    @cached_property
    def width(self) -> int:
        """Positions to which rows are padded."""
        return int(self.step.rows.lengths.max(initial=0))

    @cached_property
    def batch(self) -> TokenBatch:
        """The step as the core has it."""
        mask = self.step.mask
        places = self.step.rows.places[mask]
        return TokenBatch(
            self.segments, self.rollout, self.train, self.current, places.astype(np.int64), self.advantages
        )

    @cached_property
    def applied(self) -> Applied:
        """The correction applied; in float32 its statistics are taken so."""
        single = self.single and self.step.dtype == np.float32
        kind, rules = Ratios, self.correction
        if single:
            kind = SingleRatios
            gates = tuple(gate.model_copy(update={"precision": "float32"}) for gate in rules.gates)
            rules = Correction(name=rules.name, weight=rules.weight, gates=gates, loss=rules.loss)
        policies = {"train": self.train, "proximal": self.train, "rollout": self.rollout, "current": self.current}
        made = {}
        for source in self.correction.sources:
            policy, _, reference = source.partition("/")
            made[source] = kind(policies[policy], policies[reference], self.segments)
        with np.errstate(all="ignore"):
            return apply(rules, made, self.batch)

    @cached_property
    def keep(self) -> Bools:
        """Which tokens no gate rejects."""
        return self.applied.kept.expanded()

    @cached_property
    def counted(self) -> Bools:
        """Which tokens stay in denominators."""
        return self.applied.counted.expanded()

    def passed(self, chosen: Callable[[Gate], bool]) -> Bools:
        """Which tokens none of the chosen gates rejects."""
        flags = np.ones(self.tokens, np.bool_)
        for outcome in self.applied.gates:
            if chosen(outcome.gate):
                flags &= ~outcome.rejected
        return flags

    @cached_property
    def raw_weights(self) -> Array:
        """Weights after their bound, rejected tokens' too; ones without a rule."""
        with np.errstate(all="ignore"):
            return self.applied.token_weights().astype(self.step.dtype)

    @cached_property
    def weights(self) -> Array:
        """What multiplies the loss of each token: 0 where it is rejected."""
        return np.where(self.keep, self.raw_weights, 0).astype(self.step.dtype)

    def mean(self, values: Array, where: Bools | None = None) -> float:
        """Mean over tokens; 0 where there are none."""
        chosen = values if where is None else values[where]
        with np.errstate(invalid="ignore", over="ignore"):
            return float(np.mean(chosen, dtype=np.float64)) if len(chosen) else 0.0

    def row_means(self, values: Array, where: Bools | None = None) -> Array:
        """Mean of each row over some of its tokens [S]; 0 where it has none."""
        where = np.ones(self.tokens, np.bool_) if where is None else where
        with np.errstate(invalid="ignore", over="ignore"):
            totals = self.segments.sum(np.where(where, values, 0.0))
        return totals / np.maximum(self.segments.sum(where), 1)

    def each(self, value: float) -> Array:
        """The same factor for every token."""
        return np.full(self.tokens, value)

    def by_rows(self, rows: float | None = None, where: Bools | None = None) -> Array:
        """Factors that make of losses a mean over rows of the mean over the row's tokens."""
        counts = self.lengths if where is None else self.segments.sum(where)
        return self.segments.spread(1.0 / np.maximum(counts, 1)) / (len(self.step) if rows is None else rows)


def k3(x: Array) -> Array:
    """e^x - 1 - x [T], as frameworks compute it."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = np.expm1(x.astype(np.float64)) - x
    return found
