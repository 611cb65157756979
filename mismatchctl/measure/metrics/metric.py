"""What a metric is: a definition in words, and how its value follows from sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mismatchctl.measure import PairSums
from mismatchctl.measure.metrics.quantity import Measure

Number = Any
"""A float, an array of them, or complex ones while a gradient is taken: formulas use arithmetic, np.sqrt, np.exp and
np.where only."""


class Totals(Protocol):
    """Sums of columns by name; a name is looked up with the pair's or correction's prefix first."""

    def __getitem__(self, name: str) -> Number: ...


@dataclass(frozen=True)
class Estimate:
    """A value with its uncertainty, or the reason why there is none."""

    value: float | None
    se: float | None = None
    interval: tuple[float, float] | None = None
    status: str = "ok"


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
