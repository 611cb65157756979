"""The verdict of `gate` and its checks, and functions that describe them in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mismatchctl.core.formatting import escape_terminal, format_count, format_heavy_tail, format_label, format_number
from mismatchctl.core.validation import FiniteModel
from mismatchctl.results.growth import Growth
from mismatchctl.results.views import TableText, View, format_cell, json_text, make_frame
from mismatchctl.stats.comparison import ROUNDING_TOLERANCE, K3Part

if TYPE_CHECKING:
    import polars as pl

Outcome = Literal["passed", "undecided", "failed"]
BoundKind = Literal["max", "min", "increase", "decrease"]
Pairing = Literal["none", "some clusters", "same clusters", "same tokens"]
Interval = tuple[float, float]

LOWER_KINDS: tuple[BoundKind, ...] = ("min", "decrease")
"""A check with one of these bounds fails below its limit. A check with `max` or `increase` fails above its limit."""
COVERAGE_RULE = "coverage"
"""Value of `Check.rule` for checks that need no rule, such as the check for missing steps."""
FIRST_BASELINE_REASON = "no baseline existed. This dump is now the baseline for later dumps"
FIRST_BASELINE_HEADLINE = "baseline recorded. Commit the file, so that later dumps are compared with it"
STATISTIC_REASONS = {
    "bulk": "K3 of most tokens (the bulk) is beyond its limit",
    "shoulder": "K3 of many tokens (the shoulder) is beyond its limit",
    "evened": "K3 with more weight on tokens with a probability near 1 (evened) is beyond its limit",
    "lost": "more tokens than in the baseline have a very large log ratio, and the rules do not allow this",
}
"""Statistic of K3 -> the reason why a check fails if this statistic exceeds its limit, but the mean of K3 does not."""

_OUTCOME_ORDER: tuple[Outcome, ...] = ("passed", "undecided", "failed")


class Check(FiniteModel):
    """The result of one check, such as `k3: {max: 0.01}`, for one run, step or column value."""

    rule: str
    run: str
    place: str  # `overall`, `step 3` or `worker 2` (a value of a column)
    metric: str  # as named in the rule
    title: str
    unit: str
    kind: BoundKind
    meaning: str = ""  # which metric it is, if `metric` is a framework's name
    value: float | None = None
    interval: Interval | None = None  # 95% confidence interval of `value`
    limit: float | None = None  # for increase and decrease: value of the baseline plus or minus the allowance
    allowance: str = ""
    baseline: float | None = None
    baseline_interval: Interval | None = None
    covers: float | None = None  # if the tail is heavy: share of such intervals that contain the true value
    baseline_covers: float | None = None
    p: float | None = None  # one-sided p-value of "the limit is not exceeded", adjusted for the number of checks
    clusters: int = 0
    clustered_by: str = ""
    sequences: int = 0
    pairing: Pairing = "none"  # clusters that dump and baseline have in common
    detectable: float | None = None  # smallest value that would fail in 4 of 5 dumps of this size
    statistic: str = ""  # the statistic of K3 with the smallest p-value, such as "bulk"
    parts: list[K3Part] = Field(default_factory=list)
    outcome: Outcome = "undecided"
    reason: str = ""  # why the outcome is undecided, or a remark on a passed or failed check
    says: str = ""


class Verdict(View, FiniteModel):
    """All checks, and the worst outcome among them.

    - `outcome`: "passed", "failed" or "undecided".
    - `checks`: one check per bound of a rule, for each run, step or column value, then the checks of the data.
    - `level`: accepted probability that any check fails by chance.
    - `baseline`: path of the baseline, or null.
    - `notes`: messages that do not change the outcome, for example that the dump is much smaller than the baseline.
    - `growth`: how K3 grew over the steps, for each run with more than one step.
    - `says`: the first line of the summary.
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
        """Return JSON without NaN and infinity, as `mismatchctl gate --json` prints it."""
        return json_text(self.model_dump(mode="json"))

    @property
    def passed(self) -> bool:
        """Return True if every check passed, and False if a check failed or is undecided."""
        return self.outcome == "passed"

    def __bool__(self) -> bool:
        return self.passed

    def to_polars(self) -> pl.DataFrame:
        """Return a table with one row per check."""
        names = ("String", "rule run place metric outcome reason"), ("Float64", "value limit baseline p")
        return make_frame(map(vars, self.checks), *names)

    def _lines(self) -> list[str]:
        return [self.says or f"{self.outcome}: {len(self.checks)} checks"]

    def _table(self) -> TableText:
        names = ["rule", "run", "place", "metric", "value", "limit", "outcome", "reason"]
        return names, [[format_cell(getattr(check, name)) for name in names] for check in self.checks]


def worst_outcome(outcomes: list[Outcome]) -> Outcome:
    return max(outcomes, key=_OUTCOME_ORDER.index, default="undecided")


_PAIRING_TEXTS = {
    "none": "",
    "some clusters": ", some of them also in the baseline",
    "same clusters": ", the same as in the baseline",
    "same tokens": ", the same tokens as in the baseline",
}
MAX_SHOWN_CHECKS = 8
"""Maximum number of checks that are shown for each rule and run."""


def add_sentences(verdict: Verdict) -> Verdict:
    verdict.says = verdict_headline(verdict)
    for check in verdict.checks:
        check.says = check_sentence(check)
    return verdict


def format_apart(value: float, limit: float, unit: str = "") -> tuple[str, str]:
    """Format a value and a limit with enough digits to show which is larger."""
    percent = unit == "fraction"
    for digits in range(3, 18):
        shown = tuple(_format_digits(each, digits, percent) for each in (value, limit))
        read = tuple(float(text.removesuffix("%").replace(",", "")) for text in shown)
        if (value > limit) == (read[0] > read[1]) and (value < limit) == (read[0] < read[1]):
            break
    return shown[0], shown[1]


def _format_digits(value: float, digits: int, percent: bool) -> str:
    shown, sign = (100 * value, "%") if percent else (value, "")
    if shown == 0 or 1e-3 <= abs(shown) < 1e6:
        return f"{shown:.{digits}g}{sign}" if abs(shown) < 10**digits else f"{shown:,.0f}{sign}"
    mantissa, exponent = f"{shown:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}{sign}"


def check_sentence(check: Check) -> str:
    reason = f", {escape_terminal(check.reason)}" if check.reason else ""
    return f"{check_statement(check)}: {outcome_label(check)}{reason}"


def check_statement(check: Check) -> str:
    """Summarize a check without the outcome, for example `K3 = 0.0155 nats/token (max 0.01)`."""
    head = f"{metric_label(check)}{_place_text(check)}"
    if check.value is None:
        return head
    if check.limit is None:
        return f"{head} = {format_number(check.value, check.unit)}{_unit_text(check)}"
    value, limit = format_apart(check.value, check.limit, check.unit)
    return f"{head} = {value}{_unit_text(check)} ({_describe_limit(check, limit)})"


def check_name(check: Check) -> str:
    """Describe the requirement of a check, for example `K3 within 25% of baseline`."""
    label = metric_label(check)
    if check.rule == COVERAGE_RULE:
        return label
    if check.allowance:
        allowed = check.allowance.replace("+", " + ")
        return f"{label} within {allowed} of baseline{_place_text(check)}"
    if check.metric == "bitwise_all" and check.place == "overall":  # the value is 0 or 1
        return "all log-probs identical" if check.kind in LOWER_KINDS else "not all log-probs identical"
    side = "at least" if check.kind in LOWER_KINDS else "at most"
    bound = "" if check.limit is None else f" {side} {_plain_number(check.limit, check.unit)}"
    return f"{label}{bound}{_place_text(check)}"


def metric_label(check: Check) -> str:
    """Return the checked metric and its correction, such as `ess_token of geo_rs`, or the title of a data check."""
    if check.rule == COVERAGE_RULE:
        return check.title
    label = re.sub(r"(?<![a-z])k(?=[123]$)", "K", check.metric)
    correction = re.search(r"[:,]correction=([^,]+)", check.rule)
    return escape_terminal(f"{label} of {correction[1]}" if correction else label)


def _place_text(check: Check) -> str:
    return "" if check.place == "overall" else f" in {escape_terminal(check.place)}"


def _unit_text(check: Check) -> str:
    return f" {check.unit}" if check.unit in ("nats/token", "nats") else ""


def _plain_number(value: float, unit: str) -> str:
    return format_number(value, unit) if unit == "fraction" else format_label(value)


def _describe_limit(check: Check, limit: str) -> str:
    if check.kind in ("max", "min"):
        return f"{check.kind} {limit if check.limit is None else _plain_number(check.limit, check.unit)}"
    allowance = check.allowance.replace("+", " + ")
    side = "above" if check.kind == "increase" else "below"
    return f"limit {limit}, {allowance} {side} the baseline's {format_number(check.baseline, check.unit)}"


def exceeds_limit(check: Check) -> bool:
    if check.value is None or check.limit is None:
        return False
    return check.value < check.limit if check.kind in LOWER_KINDS else check.value > check.limit


def describe_data(check: Check) -> str:
    parts = [format_count(check.sequences, "sequence")] if check.sequences else []
    if check.clusters:
        word = check.clustered_by if check.clustered_by in ("prompt", "step") else "cluster"
        parts.append(f"{format_count(check.clusters, word)}{_PAIRING_TEXTS[check.pairing]}")
    return ", ".join(parts)


def describe_basis(check: Check) -> str:
    parts = [escape_terminal(check.meaning)] if check.meaning else []
    for name, ends in (("95% interval", check.interval), ("95% interval of the baseline", check.baseline_interval)):
        if ends is not None:
            parts.append(f"{name} {format_number(ends[0], check.unit)} to {format_number(ends[1], check.unit)}")
    if data := describe_data(check):
        parts.append(data)
    if check.p is not None and exceeds_limit(check):
        parts.append(f"p = {format_number(check.p)}")
    if covers := [each for each in (check.covers, check.baseline_covers) if each is not None]:
        parts.append(format_heavy_tail(min(covers)))
    if check.detectable is not None:
        least = format_number(check.detectable, check.unit)
        if check.kind == "increase" and check.baseline:
            least += f" (+{format_number(check.detectable / check.baseline - 1, 'fraction')})"
        below = check.limit is not None and check.detectable < check.limit
        other = " (with a statistic other than the mean of K3)" if below else ""
        parts.append(f"the gate would find a rise to {least} in at least 4 of 5 dumps{other}")
    return "; ".join(parts)


_PART_NAMES = {"bulk": "bulk (most tokens)", "shoulder": "shoulder (many tokens)", "tail": "tail (a few tokens)"}


def describe_k3_parts(check: Check, *, intervals: bool = True) -> str:
    """Describe how each part of K3 changed: bulk (most tokens), shoulder (many tokens) and tail (a few tokens)."""
    found = []
    for part in check.parts:
        if part.rise is not None:
            ends = "" if part.interval is None or not intervals else " to ".join(map(_format_rise, part.interval))
            found.append(f"{_PART_NAMES[part.name]} {_format_rise(part.rise)}{f' ({ends})' if ends else ''}")
    if not found:
        return ""
    risen = [part.name for part in check.parts if part.rose]
    head = (
        f"{' and '.join(filter(None, (', '.join(risen[:-1]), risen[-1])))} rose significantly"
        if risen
        else "no part rose significantly"
    )
    return f"K3 by part, compared with the baseline: {', '.join(found)}; {head}"


def _format_rise(rise: float) -> str:
    """Format a relative change: 0.5 as `+50%`. A rise above 100% becomes a factor, such as `4x` for 3."""
    rise = 0.0 if abs(rise) < ROUNDING_TOLERANCE else rise
    if rise > 1:
        return f"{format_number(1 + rise)}x"
    digits = 0 if rise == 0 or abs(rise) >= 0.1 else 1 if abs(rise) >= 1e-3 else 2
    return f"{100 * rise:+.{digits}f}%"


def verdict_headline(verdict: Verdict) -> str:
    return FIRST_BASELINE_HEADLINE if is_first_baseline(verdict) else f"{verdict.outcome}: {verdict_answer(verdict)}"


def is_first_baseline(verdict: Verdict) -> bool:
    """Return True if the dump becomes the first baseline, and all checks that need no baseline passed."""
    return {outcome_label(check) for check in verdict.checks} - {"passed"} == {"recorded"}


def outcome_label(check: Check) -> str:
    """Return the outcome of a check, or "recorded" if no baseline existed and the dump is now the baseline."""
    return "recorded" if check.reason == FIRST_BASELINE_REASON else check.outcome


def verdict_answer(verdict: Verdict) -> str:
    checks = verdict.checks
    if not checks:
        return "no check was made"
    chosen = [check for check in checks if outcome_label(check) == verdict.outcome] or checks
    first = max(chosen, key=_excess) if verdict.outcome == "failed" else chosen[0]
    several = len({check.run for check in checks}) > 1 and metric_label(first) != f"run {first.run}"
    where = f"{escape_terminal(first.run)}: " if several and verdict.outcome != "passed" else ""
    if verdict.outcome == "passed":
        alike = [each for each in chosen if (each.rule, each.kind, each.title) == (first.rule, first.kind, first.title)]
        name, others = check_name(first), len(chosen) - len(alike)
        if len(alike) > 1:
            noun = "run" if first.place == "overall" else first.place.split()[0]
            name = f"{check_name(first.model_copy(update={'place': 'overall'}))} in all {len(alike)} {noun}s"
        return name + (f" and {format_count(others, 'more check')} passed" if others else "")
    rest = f" ({len(chosen) - 1:,} more {verdict.outcome})" if len(chosen) > 1 else ""
    return where + (_describe_failure(first) if verdict.outcome == "failed" else _describe_doubt(first)) + rest


def _excess(check: Check) -> float:
    if not check.value or not check.limit or check.value * check.limit <= 0:
        return 0.0
    return check.limit / check.value if check.kind in LOWER_KINDS else check.value / check.limit


def _describe_failure(check: Check) -> str:
    label = f"{metric_label(check)}{_place_text(check)}"
    if check.metric == "bitwise_all" and check.value is not None:
        if check.kind == "max":
            return "all log-probs are bit-identical, as if one column was saved twice"
        return f"not all log-probs are bit-identical{f': {check.reason}' if check.reason else ''}"
    if check.value is None or check.limit is None:
        return f"{label} is beyond its limit"
    allowance = check.allowance.replace("+", " + ")
    if not allowance or not check.baseline or check.value / check.baseline <= 0:
        value, limit = format_apart(check.value, check.limit, check.unit)
        bound = f"limit {limit}" if allowance else _describe_limit(check, limit)
        return f"{label} is {value}{_unit_text(check)} ({bound})"
    end, factor = "above" if check.kind == "increase" else "below", check.value / check.baseline
    if not exceeds_limit(check):
        return f"{label}: {STATISTIC_REASONS.get(check.statistic, 'beyond its limit')} (limit {allowance})"
    change = f"{100 * abs(factor - 1):.3g}% {'above' if factor > 1 else 'below'}"
    return f"{label} is {f'{format_number(factor)}x' if factor >= 2 else change} the baseline (limit {allowance} {end})"


def _describe_doubt(check: Check) -> str:
    reason = escape_terminal(check.reason).partition(". ")[0]
    if check.rule == COVERAGE_RULE and check.value is not None:
        return check_statement(check)
    name = check_name(check)
    if reason.startswith("no baseline: "):
        return reason
    return f"{name}: {reason}" if reason else name


def select_checks(checks: Sequence[Check]) -> tuple[list[Check], int]:
    """Return the checks to show, and the number of hidden checks. If more than MAX_SHOWN_CHECKS, hide passed checks."""
    if len(checks) <= MAX_SHOWN_CHECKS:
        return list(checks), 0
    shown = sorted(checks, key=lambda check: -_OUTCOME_ORDER.index(check.outcome))
    bad = sum(check.outcome != "passed" for check in checks)
    shown = shown[: max(min(bad, MAX_SHOWN_CHECKS), 1)]
    return shown, len(checks) - len(shown)


def count_outcomes(checks: Iterable[Check]) -> str:
    outcomes = list(map(outcome_label, checks))
    return ", ".join(f"{outcomes.count(name)} {name}" for name in (*_OUTCOME_ORDER, "recorded") if name in outcomes)


def group_by_rule(checks: Iterable[Check]) -> list[tuple[tuple[str, str], list[Check]]]:
    return [(key, list(found)) for key, found in groupby(checks, key=lambda check: (check.run, check.rule))]
