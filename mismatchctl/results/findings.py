"""Parts of a Result: findings with their evidence, and comparisons with what the run logged."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mismatchctl.core.formatting import format_count
from mismatchctl.core.validation import FiniteModel


class Fact(FiniteModel):
    """A number that speaks for a cause, or (`supports` false) against it; `interval` is a 90 % one."""

    name: str
    value: float | int | str | None
    interval: tuple[float, float] | None = None
    supports: bool = True
    meaning: str


class RivalCause(FiniteModel):
    """A cause that this dump cannot tell apart from the one found, and the column or experiment that would."""

    cause: str
    tell: str


class Example(FiniteModel):
    """A sequence that shows the cause; `position` is where, counted as in the file."""

    file: str
    row: int
    position: int | None = None
    step: str | int | float | bool | None = None
    sequence_id: str | int | None = None
    note: str = ""


Confidence = Literal["high", "medium", "low"]
Side = Literal["rollout", "trainer", "both", "none"]


class Finding(FiniteModel):
    """One cause of the mismatch, as far as the dump shows it.

    `share` is about how much of the summed |log ratio| it explains, `share_k3` its part of the K3: those of a run, with
    what is unexplained and what is noise, add up to 1; null for another reading of what a finding beside it holds.
    `where` are the steps, workers, positions or sequences that it concerns, `pointless` the corrections that make no
    sense until it is fixed.
    """

    cause: str
    confidence: Confidence
    title: str
    summary: str
    share: float | None = None
    share_k3: float | None = None
    evidence: list[Fact]
    where: dict[str, str] = Field(default_factory=dict)
    examples: list[Example] = Field(default_factory=list)
    advice: str
    pointless: str = ""
    rivals: list[RivalCause] = Field(default_factory=list)
    side: Side | None = None


class Agreement(FiniteModel):
    """A name of the run's log in the step where log and replay are farthest apart; `steps` is how many have both.

    `difference` is relative to the larger of both, as it is; up to about `allowed` the log cannot tell: float32, the
    framework's reduction, the digits printed.
    """

    steps: int
    difference: float
    allowed: float
    step: str
    dump: float
    log: float
    agrees: bool


class LogComparison(FiniteModel):
    """Names that a framework logs beside the run's log; `missing` are not in it, or in no step of both."""

    names: dict[str, Agreement] = Field(default_factory=dict)
    missing: list[str] = Field(default_factory=list)


class MetricLogComparison(LogComparison):
    """Names of the run's log that stand for a metric of the run, and for which, though no framework was replayed."""

    metrics: dict[str, str] = Field(default_factory=dict)


class Lag(FiniteModel):
    """By how many steps K3 follows (below 0: leads) something that the run logged; null where that cannot be told.

    `correlation` is that of their changes from step to step, by rank; `compared` steps have both.
    """

    steps: int | None = None
    correlation: float | None = None
    compared: int
    status: str = "ok"

    @property
    def text(self) -> str:
        """In words, of K3."""
        if self.steps is None:
            return self.status
        count = abs(self.steps)
        how = f"follows it by {format_count(count, 'step')}" if self.steps > 0 else "moves with it"
        if self.steps < 0:
            how = f"leads it by {format_count(count, 'step')}"
        return f"{how} (rank correlation of changes {self.correlation:.2f})"
