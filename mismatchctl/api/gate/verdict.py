"""The Verdict model and its messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

from pydantic import Field

from mismatchctl.core.formatting import escape_terminal, format_heavy_tail, format_number
from mismatchctl.core.validation import FiniteModel
from mismatchctl.results.growth import Growth
from mismatchctl.results.views import VerdictViews, json_text
from mismatchctl.stats.comparison import K3Part

Outcome = Literal["passed", "undecided", "failed"]
BoundKind = Literal["max", "min", "increase", "decrease", "rising trend", "falling trend"]
Pairing = Literal["none", "some clusters", "same clusters", "same tokens"]
Interval = tuple[float, float]

LOWER_KINDS: tuple[BoundKind, ...] = ("min", "decrease", "falling trend")
"""Bounds that a value must not fall below."""
BASELINE_KINDS: tuple[BoundKind, ...] = ("increase", "decrease")
"""Bounds relative to a baseline."""
TREND_KINDS: tuple[BoundKind, ...] = ("rising trend", "falling trend")
"""Bounds relative to a history."""
COVERAGE_RULE = "coverage"
"""Rule name of checks that do not belong to a rule."""
NOISE_REASON = "beyond the limit, but within noise"
NOT_FINITE_REASON = "the value or its limit is not finite"
NIGHT_NOISE_REASON = "no more than nights differ by"
FEW_TOKENS_REASON = "above the limit because of a few tokens, which a sample of this size cannot judge"
FAR_FACTOR = 3.0
"""A value of more than this many times its limit never passes, whatever it rests on."""
STATISTIC_REASONS = {
    "bulk": "K3 of most tokens (the bulk) is beyond its limit",
    "shoulder": "K3 up to the shoulder is beyond its limit",
    "evened": "evened K3, in which sure tokens count more, is beyond its limit",
    "lost": "more tokens are lost (far off) than the baseline's, for which there is no allowance",
}
"""Reasons for a failure if K3 itself does not exceed its limit."""

_OUTCOME_ORDER: tuple[Outcome, ...] = ("passed", "undecided", "failed")


class Check(FiniteModel):
    """One bound at one place.

    Attributes:
        rule: text of the rule.
        run: name of the run. `place` is `overall`, `step 3` or `worker 2`.
        metric: metric as named in the rule, with its `title` and `unit`. `meaning` explains a framework's name.
        kind: kind of bound, or the trend over the accepted results, `since` one of them.
        value: the value, for a trend its rise, if defined. `interval` is a 90% interval.
        limit: limit of the value, including the baseline and its allowance.
        allowance: allowance as given in the rule.
        baseline: the baseline's value, with its interval.
        covers: actual coverage of the 90% interval if the tail is heavy, also for the baseline.
        p: one-sided p-value of exceeding the limit, adjusted for all checks, if resampled.
        clusters: number of clusters, which are prompts or steps if they are `clustered_by` those, and `sequences`.
            `pairing` describes which of them the baseline has.
        detectable: smallest value that is detected in four of five such dumps.
        statistic: statistic of K3 with the most significant excess: bulk, shoulder, evened, lost or whole.
        parts: parts of K3 and their rise, if the two Results have layers.
        reason: reason for an undecided outcome, or a limitation of the judgement.
        says: the summary.
    """

    rule: str
    run: str
    place: str
    metric: str
    title: str
    unit: str
    kind: BoundKind
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
    """All checks, and the worst outcome among them.

    Attributes:
        level: false-failure rate over all checks.
        baseline: path of the baseline, if any.
        notes: messages that do not change the outcome, such as far less data than in the baseline.
        growth: growth of K3 over the steps of each run, without runs of one step.
        says: the summary.
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

    def to_json(self) -> str:
        """Return strict JSON, as `mismatchctl gate --json` prints it."""
        return json_text(self.model_dump(mode="json"))


def worst_outcome(outcomes: list[Outcome]) -> Outcome:
    """Return the worst outcome. Without any, undecided."""
    return max(outcomes, key=_OUTCOME_ORDER.index, default="undecided")


OUTCOMES = ("passed", "undecided", "failed")
_OUTCOME_MEANINGS = {
    "passed": "nothing is worse than allowed",
    "undecided": "not everything could be judged",
    "failed": "worse than allowed, beyond noise",
}
_PAIRING_TEXTS = {
    "none": "",
    "some clusters": ", some of them the baseline's too",
    "same clusters": ", the same as the baseline's",
    "same tokens": ", the same tokens as the baseline's",
}
_MAX_DIGITS = 17
MAX_SHOWN_CHECKS = 8
"""Maximum number of places shown per rule."""


def add_sentences(verdict: Verdict) -> Verdict:
    """Add the summaries to the verdict and its checks."""
    verdict.says = verdict_headline(verdict)
    for check in verdict.checks:
        check.says = check_sentence(check)
    return verdict


def format_apart(value: float, limit: float, unit: str = "") -> tuple[str, str]:
    """Format a value and a limit with enough digits to show their order."""
    percent = unit == "fraction"
    for digits in range(3, _MAX_DIGITS + 1):
        shown = tuple(_format_digits(each, digits, percent) for each in (value, limit))
        read = tuple(float(text.removesuffix(" %").replace(",", "")) for text in shown)
        if (value > limit) == (read[0] > read[1]) and (value < limit) == (read[0] < read[1]):
            break
    return shown[0], shown[1]


def _format_digits(value: float, digits: int, percent: bool) -> str:
    shown = 100 * value if percent else value
    scientific = shown != 0 and not 1e-3 <= abs(shown) < 1e6
    if not scientific:
        return f"{shown:.{digits}g}{' %' * percent}" if abs(shown) < 10**digits else f"{shown:,.0f}{' %' * percent}"
    mantissa, exponent = f"{shown:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}{' %' * percent}"


def check_sentence(check: Check) -> str:
    """Summarize a check: value, interval, limit, baseline, verdict."""
    reason = f", {escape_terminal(check.reason)}" if check.reason else ""
    return f"{check_statement(check)}; {check.outcome}{reason}"


def check_statement(check: Check) -> str:
    """Summarize a check without the verdict."""
    where = "" if check.place == "overall" else f" in {escape_terminal(check.place)}"
    head = f"{check.title}{where}: "
    if check.value is None:
        return f"{head}no value"
    if check.limit is None:
        return f"{head}{format_number(check.value, check.unit)}{_format_range(check)}"
    value, limit = format_apart(check.value, check.limit, check.unit)
    side = "below" if check.kind in LOWER_KINDS else "above"
    comparison = f"is {side}" if exceeds_limit(check) else f"is not {side}"
    return f"{head}{_value_label(check)}{value}{_format_range(check)} {comparison} {limit}{_describe_limit(check)}"


def _value_label(check: Check) -> str:
    """Return a label for a value that is not the metric itself."""
    return "" if check.kind not in TREND_KINDS else f"its change since {escape_terminal(check.since)}, "


def exceeds_limit(check: Check) -> bool:
    """Return True if the value exceeds its limit, regardless of noise."""
    if check.value is None or check.limit is None:
        return False
    return check.value < check.limit if check.kind in LOWER_KINDS else check.value > check.limit


def _format_range(check: Check) -> str:
    return _format_interval(check.interval, check.covers, check.unit)


def _format_interval(ends: tuple[float, float] | None, covers: float | None, unit: str) -> str:
    if ends is None:
        return ""
    low, high = (format_number(end, unit) for end in ends)
    return f" ({low} to {high}{'' if covers is None else ', heavy_tail'})"


def _describe_limit(check: Check) -> str:
    if check.kind in ("max", "min"):
        return f", the rule's {check.kind}"
    allowance = check.allowance.replace("+", " + ")
    if check.kind in TREND_KINDS:
        return f", {allowance} of what it was"
    side = "above" if check.kind == "increase" else "below"
    interval = _format_interval(check.baseline_interval, check.baseline_covers, check.unit)
    return f", {allowance} {side} the baseline's {format_number(check.baseline, check.unit)}{interval}"


def describe_basis(check: Check) -> str:
    """Describe the basis of a judgement: meaning of the name, amount of data, p-value, power."""
    parts = [escape_terminal(check.meaning)] if check.meaning else []
    if check.sequences:
        parts.append(f"{check.sequences:,} sequences")
    if check.clusters:
        word = f"{check.clustered_by}s" if check.clustered_by in ("prompt", "step") else "clusters"
        parts.append(f"{check.clusters:,} {word}{_PAIRING_TEXTS[check.pairing]}")
    if check.p is not None and exceeds_limit(check):
        parts.append(f"p = {format_number(check.p)}")
    if covers := [each for each in (check.covers, check.baseline_covers) if each is not None]:
        parts.append(format_heavy_tail(min(covers)))
    if check.detectable is not None:
        least = format_number(check.detectable, check.unit)
        below = check.limit is not None and check.detectable < check.limit
        parts.append(
            f"would most likely have failed from {least}{_format_relative(check)} on{_OTHER_STATISTIC * below}"
        )
    return "; ".join(parts)


_OTHER_STATISTIC = ", below the limit: for its lost tokens, or another statistic beside K3 as it is"
_ROUNDING_TOLERANCE = 1e-4  # relative rounding error of a saved Result
_PART_NAMES = {"bulk": "the bulk (most tokens)", "shoulder": "the shoulder", "tail": "the tail (a few tokens)"}


def describe_k3_parts(check: Check) -> str:
    """Describe which part of K3 rose and by how much, with 90% intervals. Empty without layers."""
    found = [f"{_PART_NAMES[part.name]} {_describe_part_rise(part)}" for part in check.parts if part.rise is not None]
    if not found:
        return ""
    sure = check.kind in TREND_KINDS  # a trend only has the part with the change
    risen = [
        _PART_NAMES[part.name]
        for part in check.parts
        if (part.interval is not None and part.interval[0] > _ROUNDING_TOLERANCE) or (sure and part.rise)
    ]
    head = f"what rose is {' and '.join(risen)}: " if risen else "no part rose beyond noise: "
    return head + ", ".join(found)


def _describe_part_rise(part: K3Part) -> str:
    assert part.rise is not None
    rise = _format_rise(part.rise)
    return (
        rise
        if part.interval is None
        else f"{rise} ({_format_rise(part.interval[0])} to {_format_rise(part.interval[1])})"
    )


def _format_rise(rise: float) -> str:
    """Format a relative change, as a factor if it is more than double."""
    rise = 0.0 if abs(rise) < _ROUNDING_TOLERANCE else rise
    if rise > 1:
        return f"x {format_number(1 + rise)}"
    digits = 0 if rise == 0 or abs(rise) >= 0.1 else 1 if abs(rise) >= 1e-3 else 2
    return f"{100 * rise:+.{digits}f} %"


def _format_relative(check: Check) -> str:
    """Format the distance of the detectable value from the baseline."""
    if check.kind != "increase" or not check.baseline or check.detectable is None:
        return ""
    return f" (+{format_number(check.detectable / check.baseline - 1, 'fraction')})"


def verdict_headline(verdict: Verdict) -> str:
    """Summarize the outcome in one line."""
    counts = count_outcomes(verdict.checks)
    against = "" if verdict.baseline is None else f" against {escape_terminal(verdict.baseline)}"
    return f"{verdict.outcome}{against}: {_OUTCOME_MEANINGS[verdict.outcome]} ({counts or 'nothing was judged'})"


def select_checks(checks: Sequence[Check]) -> tuple[list[Check], int]:
    """Select the checks of a rule and run to show, and count the others, which passed."""
    if len(checks) <= MAX_SHOWN_CHECKS:
        return list(checks), 0
    order = sorted(checks, key=lambda check: ("failed", "undecided", "passed").index(check.outcome))
    bad = sum(check.outcome != "passed" for check in checks)
    shown = order[: max(min(bad, MAX_SHOWN_CHECKS), 1)]
    return shown, len(checks) - len(shown)


def count_outcomes(checks: Iterable[Check]) -> str:
    outcomes = [check.outcome for check in checks]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in OUTCOMES if name in outcomes)


def group_by_rule(checks: Iterable[Check]) -> list[tuple[tuple[str, str], list[Check]]]:
    """Group consecutive checks by run and rule."""
    grouped = groupby(checks, key=lambda check: (check.run, check.rule))
    return [(key, list(found)) for key, found in grouped]
