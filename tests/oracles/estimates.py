"""Totals over clusters, and functions of totals with standard errors, in decimals of 60 digits."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

CONTEXT = decimal.Context(prec=60, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[decimal.InvalidOperation])
ZERO, ONE, TWENTY = Decimal(0), Decimal(1), Decimal(20)
EPSILON = Decimal(2) ** -52
ROUNDING = 256 * EPSILON
"""Largest error of a float64 sum, relative to the sum of absolute values."""

Row = dict[str, Decimal]
Sequence_ = Mapping[str, Any]
Formula = Callable[[Mapping[str, Decimal]], Decimal]


class Undefined(Exception):  # noqa: N818
    """Raised if a value is undefined."""


@dataclass
class Truth:
    """An expected value with its relative `accuracy`. `slack` is the rounding error of its sums."""

    value: Decimal | None
    estimate: Estimate | None = None
    accuracy: float = 1e-9
    slack: Callable[[], Decimal] = lambda: ZERO

    @property
    def se(self) -> Decimal | None:
        return None if self.estimate is None else self.estimate.se()


@dataclass
class Estimate:
    formula: Formula
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        if not self.rows:
            raise Undefined
        self.totals = {name: total(row[name] for row in self.rows) for name in self.rows[0]}
        self.names = _names_read(self.formula, self.totals)
        self.sizes = {name: sum((row["#" + name] for row in self.rows), ZERO) for name in self.names}

    def value(self, totals: Mapping[str, Decimal] | None = None) -> Decimal:
        return self.formula(self.totals if totals is None else totals)

    def gradient(self, totals: Mapping[str, Decimal] | None = None) -> Row:
        totals = self.totals if totals is None else totals
        gradient = {}
        for name in self.names:
            step = Decimal("1e-25") * max(self.sizes[name], Decimal("1e-25"))
            up, down = dict(totals), dict(totals)
            up[name] += step
            down[name] -= step
            try:
                gradient[name] = (self.formula(up) - self.formula(down)) / (2 * step)
            except Undefined:
                gradient[name] = Decimal("Infinity")
        return gradient

    def se(self, totals: Mapping[str, Decimal] | None = None) -> Decimal | None:
        count = len(self.rows)
        if count < 2:
            return None
        gradient = self.gradient(totals)
        influences = [sum((gradient[name] * row[name] for name in self.names), ZERO) for row in self.rows]
        return (Decimal(count) / (count - 1) * sum((i * i for i in influences), ZERO)).sqrt()

    def value_slack(self) -> Decimal:
        """Return the change of the value if each total changes by its rounding error."""
        return self._slack(self.value)

    def se_slack(self) -> Decimal:
        count, gradient = len(self.rows), self.gradient()
        terms = [sum((abs(gradient[n]) * row["#" + n] for n in self.names), ZERO) for row in self.rows]
        own = ROUNDING * (Decimal(count) / (count - 1) * sum((t * t for t in terms), ZERO)).sqrt()
        return own + self._slack(lambda totals: self.se(totals) or ZERO)

    def _slack(self, function: Callable[[Mapping[str, Decimal]], Decimal]) -> Decimal:
        middle, slack = function(self.totals), ZERO
        for name in self.names:
            moved = []
            for sign in (1, -1):
                totals = dict(self.totals)
                totals[name] += sign * ROUNDING * self.sizes[name]
                try:
                    moved.append(abs(function(totals) - middle))
                except (Undefined, decimal.DecimalException):
                    return Decimal("Infinity")
            slack += max(moved)
        return slack


def _names_read(formula: Formula, totals: Row) -> list[str]:
    """Return the names of the totals that a formula reads."""
    read: dict[str, None] = {}

    class Spy(dict[str, Decimal]):
        def __getitem__(self, name: str) -> Decimal:
            read[name] = None
            return super().__getitem__(name)

    formula(Spy(totals))
    return list(read)


def truth(formula: Formula, rows: Sequence[Row]) -> Truth:
    try:
        estimate = Estimate(formula, rows)
        return Truth(estimate.value(), estimate, slack=estimate.value_slack)
    except Undefined:
        return Truth(None)


def over(above: Decimal, below: Decimal) -> Decimal:
    if below == 0:
        raise Undefined
    return above / below


def scatter(square: Decimal, first: Decimal, number: Decimal) -> Decimal:
    left = square - over(first**2, number)
    return left if left > square * Decimal("1e-50") else ZERO


def mean(above: str, below: str) -> Formula:
    return lambda t: over(t[above], t[below])


def deviation(name: str, square: str, below: str) -> Formula:
    return lambda t: over(scatter(t[square], t[name], t[below]), t[below]).sqrt()


def effective_share(name: str, square: str, below: str) -> Formula:
    return lambda t: over(t[name] ** 2, t[below] * t[square])


def clamped(x: Decimal) -> Decimal:
    return max(-TWENTY, min(TWENTY, x))


def total(values: Any) -> Decimal:
    return sum(values, ZERO)


class Sums(Row):
    """Sums by name. The rounding error of `name` is relative to `#name`."""

    def add(self, name: str, *values: Decimal | int) -> None:
        self[name] = self.get(name, ZERO) + total(values)
        self["#" + name] = self.get("#" + name, ZERO) + total(abs(v) for v in values)

    def add_ratios(self, name: str, *values: Decimal, factor: Decimal = ONE) -> None:
        """Add ratios that were divided by a factor, and their squares under the doubled name.

        Code that sums ratios minus 1 rounds relative to 1 before and after the division.
        """
        for key, power in ((name, 1), (name * 2, 2)):
            self.add(key, *(v**power for v in values))
            self["#" + key] += len(values) * (1 + 1 / factor**power)


def cluster_rows(sequences: Sequence[Sequence_], sums: Sequence[Sums]) -> list[Row]:
    """Return one row of sums per cluster: a prompt in all steps, or a sequence of one step."""
    rows: dict[Any, Row] = {}
    named = any("prompt_id" in sequence for sequence in sequences)
    for sequence, own in zip(sequences, sums, strict=True):
        row = rows.setdefault((None if named else sequence.get("step"), *cluster_name(sequence)), {})
        for key, value in own.items():
            row[key] = row.get(key, ZERO) + value
    return [row for row in rows.values() if row["n"]]


def cluster_name(sequence: Sequence_) -> tuple[Any, ...]:
    """Return the name of a cluster within its step: the prompt, the sequence id, or the content."""
    for column in ("prompt_id", "sequence_id"):
        if sequence.get(column) is not None:
            return column, sequence[column]
    rollout = log_probs(sequence, "rollout")
    return "content", len(rollout), total(rollout), total(log_probs(sequence, "train"))


def log_probs(sequence: Sequence_, policy: str) -> list[Decimal]:
    return [Decimal(p) for p, valid in zip(sequence[policy], sequence["mask"], strict=True) if valid]


def positions(sequence: Sequence_) -> list[int]:
    return [place for place, valid in enumerate(sequence["mask"]) if valid]
