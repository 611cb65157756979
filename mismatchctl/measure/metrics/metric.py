"""What a metric is: a definition in words, and how its value follows from sums; of losses, how these are aggregated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.measure import PairSums
from mismatchctl.measure.metrics.intervals import LINEAR, ODDS, IntervalScale
from mismatchctl.measure.metrics.quantity import Measure

Number = Any
"""An array of floats, one per cell, or of complex ones while a gradient is taken: formulas use arithmetic, np.sqrt,
np.exp and np.where only, never `if`."""


class Totals(Protocol):
    """Sums of columns by name; a name is looked up with the pair's or correction's prefix first."""

    def __getitem__(self, name: str) -> Number: ...


NO_TOKEN = "no valid token"


def status_of(value: float, undefined: str, *, empty: bool) -> str:
    """Why a value is not finite, in a cell that holds no token if it is `empty`; else ok."""
    if math.isfinite(value):
        return "ok"
    if empty:
        return NO_TOKEN
    return "overflow: not a finite number" if math.isinf(value) else undefined


@dataclass(frozen=True)
class Estimate:
    """A metric in some cells: its values with their uncertainty, and the reason where there is none.

    Attributes:
        value: [G]; not finite where it is undefined.
        undefined: why it can be.
        empty: whether the cell holds no token [G], which then is why.
        se: standard errors [G], NaN where there is none.
        interval: [G, 2], NaN where there is none.
        covers: what the interval was seen to cover in place of 90 %, where its tail is heavy [G]; else NaN.
    """

    value: Float64s
    undefined: str
    empty: Bools
    se: Float64s | None = None
    interval: Float64s | None = None
    covers: Float64s | None = None

    @classmethod
    def joined(cls, parts: Sequence[Estimate]) -> Estimate:
        """The cells of all parts, one after the other."""
        errors = [part.se for part in parts if part.se is not None]
        intervals = [part.interval for part in parts if part.interval is not None]
        covers = [part.covers for part in parts if part.covers is not None]
        return cls(
            np.concatenate([part.value for part in parts]),
            parts[0].undefined,
            np.concatenate([part.empty for part in parts]),
            np.concatenate(errors) if errors else None,
            np.concatenate(intervals) if intervals else None,
            np.concatenate(covers) if covers else None,
        )

    def covers_at(self, cell: int) -> float | None:
        """What the interval in one cell covers where its tail is heavy."""
        covers = math.nan if self.covers is None else float(self.covers[cell])
        return covers if math.isfinite(covers) and math.isfinite(self.value[cell]) else None

    def status(self, cell: int) -> str:
        """Whether the value in one cell is ok, or why it is not there."""
        return status_of(float(self.value[cell]), self.undefined, empty=bool(self.empty[cell]))

    def at(self, cell: int) -> tuple[float | None, float | None, tuple[float, float] | None, str]:
        """Value, standard error, interval and status in one cell; None for what is undefined."""
        value, status = float(self.value[cell]), self.status(cell)
        if status != "ok":
            return None, None, None, status
        error = math.nan if self.se is None else float(self.se[cell])
        low, high = (math.nan, math.nan) if self.interval is None else self.interval[cell].tolist()
        return (
            value, error if math.isfinite(error) else None, (low, high) if math.isfinite(low) else None, status,
        )  # fmt: skip


@dataclass(frozen=True)
class Tails:
    """What metrics read beside sums: the extremes by name, and the histograms of the pair."""

    maxima: Mapping[str, float]
    pair: PairSums | None


@dataclass(frozen=True)
class Metric:
    """One metric of the registry. Exactly one of `formula`, `extreme`, `quantile` and `tail` computes it.

    Attributes:
        key: stable name in JSON, tables and flags.
        title: a few words for people.
        unit: "nats", "fraction", "ratio", "tokens", ...
        definition: the formula in plain text; x is the log ratio train minus rollout of a token, w = exp(x).
        meaning: what a reader should take from the number.
        source: where the definition comes from.
        undefined: why it can be undefined, for the status.
        formula: a function of sums; its standard error follows by the delta method over clusters.
        uncertain: whether a standard error is meaningful (not for counts).
        extreme: a function of the maxima.
        quantile: the share of tokens below it.
        tail: a function of sums and tails, without a standard error.
        better: which way is good: "low", "high", "one", or "" for neither.
        own_scale: where its interval is symmetric, if not where its unit says.
        measure: the definition in parts, where others give the same or a similar number another name.
    """

    key: str
    title: str
    unit: str
    definition: str
    meaning: str
    source: str = "mismatchctl"
    undefined: str = "undefined"
    formula: Callable[[Totals], Number] | None = None
    uncertain: bool = True
    extreme: Callable[[Mapping[str, Any]], Any] | None = None
    quantile: float | None = None
    tail: Callable[[Totals, Tails], float] | None = None
    better: Literal["low", "high", "one", ""] = "low"
    measure: Measure | None = None
    own_scale: IntervalScale | None = None

    @property
    def scale(self) -> IntervalScale:
        """Where its interval is symmetric."""
        return self.own_scale or (ODDS if self.unit == "fraction" else LINEAR)


AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
"""How a loss per token becomes one number, as configurations name it."""
SUFFIXES = dict(zip(AGGREGATIONS, ("", "_seq_sum", "_seq_mean"), strict=True))
"""What the key of a metric ends in under each."""
WORDS = {
    "token-mean": "mean over tokens",
    "seq-mean-token-sum": "sum over tokens of a sequence, mean over sequences with a token",
    "seq-mean-token-mean": "mean over tokens of a sequence, mean over sequences with a token",
}
"""The same in words."""


def aggregated(name: str, tokens: str, sequences: str, aggregation: str) -> Callable[[Totals], Number]:
    """A sum over tokens aggregated: of column `name`, of which `name_mean` holds the means of sequences."""
    if aggregation == "token-mean":
        return lambda t: t[name] / t[tokens]
    column = name if aggregation == "seq-mean-token-sum" else f"{name}_mean"
    return lambda t: t[column] / t[sequences]
