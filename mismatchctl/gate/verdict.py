"""What the gate says: one check per rule, bound and place, and what they come to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mismatchctl.finite import FiniteModel
from mismatchctl.result import Growth
from mismatchctl.views import VerdictViews

Outcome = Literal["passed", "undecided", "failed"]
Kind = Literal["max", "min", "increase", "decrease", "rising trend", "falling trend"]
Pairing = Literal["none", "some clusters", "same clusters", "same tokens"]
Interval = tuple[float, float]

LOWER: tuple[Kind, ...] = ("min", "decrease", "falling trend")
"""Kinds of bounds that a value may not fall below."""
COMPARED: tuple[Kind, ...] = ("increase", "decrease")
"""Kinds of bounds that a baseline gives."""
TRENDS: tuple[Kind, ...] = ("rising trend", "falling trend")
"""Kinds of bounds that a history gives."""
WITHIN_NOISE = "beyond the limit, but within noise"
NOT_FINITE = "the value or its limit is not finite"
WITHIN_NIGHTS = "no more than nights differ by"
A_FEW_TOKENS = "beyond the limit by a few tokens alone, which a sample of this size cannot judge"
STATISTICS = {
    "bulk": "K3 of most tokens (the bulk) is beyond its limit",
    "shoulder": "K3 up to the shoulder is beyond its limit",
    "evened": "evened K3, in which sure tokens count more, is beyond its limit",
    "lost": "more tokens are lost (far off) than the baseline's, for which there is no allowance",
}
"""What is beyond its limit where K3 as it is is not."""

_WORST_LAST: tuple[Outcome, ...] = ("passed", "undecided", "failed")


class K3Part(FiniteModel):
    """One part of K3: what most tokens do (bulk), what the largest do up to a cap (shoulder), and beyond it (tail).

    Attributes:
        share: of the baseline's K3.
        rise: relative, per token at the same probabilities; None where the baseline has nothing there.
        interval: a 90 % interval of the rise.
    """

    name: Literal["bulk", "shoulder", "tail"]
    share: float | None = None
    rise: float | None = None
    interval: Interval | None = None


class Check(FiniteModel):
    """One bound at one place.

    Attributes:
        rule: the rule's text.
        run: which run; `place` is `overall`, `step 3` or `worker 2`.
        metric: as the rule names it, with its `title` and `unit`; `meaning` says what a framework's name stands for.
        kind: which bound of the rule, or the trend over the accepted results of the history, `since` one of them.
        value: None where undefined, for a trend its rise; `interval` is a 90 % interval.
        limit: what the value may reach, the baseline's allowance counted in.
        allowance: as the rule gives it.
        baseline: the baseline's value and its interval.
        covers: what the interval was seen to cover in place of 90 %, where its tail is heavy, and the baseline's.
        p: one-sided p-value that the limit is exceeded, adjusted for all checks; None where nothing was resampled.
        clusters: number of clusters, prompts or steps if they are `clustered_by` those, and `sequences`; `pairing` says
            how far the baseline has the same.
        detectable: the smallest value that would have failed in four of five such dumps.
        statistic: which of those of K3 is beyond its limit most surely: bulk, shoulder, evened, lost or whole.
        parts: which part of K3 rose, where both Results tell its layers apart.
        reason: why it is undecided, or what limits the judgement.
        says: all of it in a sentence, as every medium has it.
    """

    rule: str
    run: str
    place: str
    metric: str
    title: str
    unit: str
    kind: Kind
    meaning: str = ""
    value: float | None = None
    interval: Interval | None = None
    limit: float | None = None
    allowance: str = ""
    baseline: float | None = None
    baseline_interval: Interval | None = None
    covers: float | None = None
    baseline_covers: float | None = None
    p: float | None = None
    clusters: int = 0
    clustered_by: str = ""
    sequences: int = 0
    pairing: Pairing = "none"
    detectable: float | None = None
    statistic: str = ""
    parts: list[K3Part] = Field(default_factory=list)
    since: str = ""
    outcome: Outcome = "undecided"
    reason: str = ""
    says: str = ""


class Verdict(VerdictViews, FiniteModel):
    """Every check, and the worst outcome among them.

    Attributes:
        level: the chance of any false failure that was allowed for.
        baseline: the file compared with; None without one.
        notes: what does not change the outcome but should be known: far less data than in the baseline.
        growth: how K3 changed over the steps of each run, as its story has it; runs of one step are left out.
        says: the outcome in a sentence.
    """

    format: Literal[1] = 1
    tool: str = "mismatchctl"
    version: str = ""
    outcome: Outcome
    level: float
    baseline: str | None
    checks: list[Check]
    notes: list[str] = Field(default_factory=list)
    growth: dict[str, Growth] = Field(default_factory=dict)
    says: str = ""


def worst(outcomes: list[Outcome]) -> Outcome:
    """What several outcomes come to; nothing judged is undecided."""
    return max(outcomes, key=_WORST_LAST.index, default="undecided")
