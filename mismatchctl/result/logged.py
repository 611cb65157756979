"""What a run logged itself, beside what its dump says: how the two agree, and how K3 follows the log."""

from __future__ import annotations

from pydantic import Field

from mismatchctl.finite import FiniteModel
from mismatchctl.numbers import counted


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


class AgainstLog(FiniteModel):
    """Names that a framework logs beside the run's log; `missing` are not in it, or in no step of both."""

    names: dict[str, Agreement] = Field(default_factory=dict)
    missing: list[str] = Field(default_factory=list)


class AgainstMetrics(AgainstLog):
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
        how = f"follows it by {counted(count, 'step')}" if self.steps > 0 else "moves with it"
        if self.steps < 0:
            how = f"leads it by {counted(count, 'step')}"
        return f"{how} (rank correlation of changes {self.correlation:.2f})"
