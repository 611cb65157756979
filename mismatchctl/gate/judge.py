"""Judging: what exceeds its limit beyond noise has failed, what exceeds it within noise is undecided.

A rise over a baseline is judged by permuting clusters (`comparison`); a bound by percentiles of random halves, which
are monotone in every value of the metric, with weights and numbers of clusters that no value changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mismatchctl import __version__
from mismatchctl.errors import ConfigError, DataError, option, wording
from mismatchctl.gate.comparable import first_difference, matching_run
from mismatchctl.gate.comparison import compare, is_layered
from mismatchctl.gate.coverage import MAX_SKIPPED, coverage, said
from mismatchctl.gate.facts import judge_fact, limits_of
from mismatchctl.gate.measure import Place, counterpart, places
from mismatchctl.gate.names import RuleTarget
from mismatchctl.gate.nights import LEAST, LevelChange, change
from mismatchctl.gate.power import LEAST_CLUSTERS, detectable, least_clusters
from mismatchctl.gate.rules import Allowance, Rule, target_of
from mismatchctl.gate.verdict import (
    A_FEW_TOKENS,
    COMPARED,
    LOWER,
    NOT_FINITE,
    STATISTICS,
    TRENDS,
    WITHIN_NIGHTS,
    WITHIN_NOISE,
    Check,
    Kind,
    Pairing,
    Verdict,
    worst,
)
from mismatchctl.gate.words import exceeds, told
from mismatchctl.resample import ClusterSample, Draws, Exchange, Layers, holm, interval_of, p_above_zero, resample
from mismatchctl.result import Result, RunResult
from mismatchctl.result.story import growth_of_run

LEVEL, MOST_LEVEL = 0.05, 0.5
"""The chance of any false failure that is allowed for, and the largest that may be."""
OTHER_TOKENS = "the dump does not hold the baseline's tokens: score the same prompts and responses again"
FIRST = "there was no baseline: this becomes the first, which later dumps are compared with"
ACCEPTED = "saved as the baseline by --accept, whatever the verdict: later dumps are compared with it"


@dataclass(frozen=True)
class AcceptedResults:
    """Accepted Results, the oldest first; the last is the baseline.

    Attributes:
        name: where they lie.
        results: themselves.
        names: what each of them is called.
        nights: how many verdicts in a row share the level.
        fixed_tokens: whether they must hold the same prompts and responses, scored again.
        accept: whether what is judged becomes the next of them, whatever the verdict.
    """

    name: str | None = None
    results: Sequence[Result] = ()
    names: Sequence[str] = ()
    nights: int = 1
    fixed_tokens: bool = False
    accept: bool = False


@dataclass
class _Case:
    """A bound to check at a place, what was accepted there, the newest last; `reason` if it cannot be judged."""

    rule: Rule
    run: str
    target: RuleTarget
    kind: Kind
    bound: float | Allowance
    place: Place | None
    accepted: list[Place] = field(default_factory=list)
    reason: str = ""

    @property
    def is_resampled(self) -> bool:
        """Whether noise is taken into account; a number that is logged is a fact, unless a baseline is at hand."""
        if self.kind == "max" and self.bound == 0 and self.target.metric.unit == "fraction":
            return False  # a share that may not be above 0 is refuted by a single token, whatever its noise
        return self.target.table.is_resampled and (not self.target.logged_by or isinstance(self.bound, Allowance))


def judge(
    result: Result,
    rules: Sequence[Rule],
    against: AcceptedResults | None = None,
    level: float = LEVEL,
    max_skipped: float = MAX_SKIPPED,
) -> Verdict:
    """Judge every run of a Result by every rule, and what the verdict rests on.

    Raises:
        ConfigError: a rule names a metric or a correction that does not exist; `level` is no chance of a false alarm.
    """
    if not 0 < level <= MOST_LEVEL:
        raise ConfigError(f"level is a chance above 0 and at most {MOST_LEVEL}, not {level}")
    against = against or AcceptedResults()
    cases = [case for rule in rules for case in _cases(rule, result, against)]
    level /= against.nights
    judging = _Judging(level / max(sum(case.is_resampled for case in cases), 1), against)
    with np.errstate(all="ignore"):  # what overflows is judged as what is not finite
        checks = [judging.check(case) for case in cases]
    noisy = [check for check in checks if check.p is not None]
    for check, p in zip(noisy, holm([check.p or 0.0 for check in noisy]), strict=True):
        check.p = p
        if check.outcome == "failed" and p <= level:
            check.reason = _beside_k3(check)
        elif check.outcome == "failed" and (check.value is None or check.limit is None):
            check.outcome, check.reason = "undecided", NOT_FINITE
        elif check.outcome == "failed" and check.kind in TRENDS:
            check.outcome = "passed"
        elif check.outcome == "failed":
            beyond = f"{_beside_k3(check)}, but within noise" if _beside_k3(check) else WITHIN_NOISE
            check.outcome, check.reason = ("passed" if check.reason else "undecided"), check.reason or beyond
    baseline = against.results[-1] if against.results else None
    checks += coverage(result, rules, baseline, max_skipped)
    outcome = worst([check.outcome for check in checks])
    notes = [*said(result, baseline), *dict.fromkeys(judging.notes)]
    notes += [ACCEPTED] if against.accept and outcome != "passed" else []
    growth = {name: growth_of_run(run) for name, run in result.runs.items() if len(run.groups.labels) > 1}
    found = Verdict(
        version=__version__, outcome=outcome, level=level, baseline=against.name, checks=checks, notes=notes,
        growth=growth,
    )  # fmt: skip
    return told(found)


def _cases(rule: Rule, result: Result, against: AcceptedResults) -> Iterator[_Case]:
    target = target_of(rule, result)
    lacking = _lacks_logged(target, result)
    for name, run in result.runs.items():
        accepted, incomparable = _comparable(target, name, result, against)
        try:
            found: list[Place | None] = [*places(rule, target, run)]
            missing = ""
        except DataError as error:
            found, missing = [None], str(error)
        if lacking:
            found, missing = [None], lacking
        for place in found:
            for kind, bound in rule.bounds.items():
                case = _Case(rule, name, target, kind, bound, place, reason=missing)
                if isinstance(bound, Allowance) and place is not None:
                    yield from _compared(case, place, accepted, incomparable)
                else:
                    yield case


def _compared(case: _Case, place: Place, accepted: list[RunResult], incomparable: str) -> Iterator[_Case]:
    """The comparison with the baseline, and with the trend of enough accepted results."""
    case.reason = incomparable
    history: list[Place] = []
    for run in reversed(accepted):
        try:
            history.insert(0, counterpart(case.rule, case.target, place, run))
        except DataError as error:
            case.reason = "" if history else str(error)
            break
    case.accepted = history if case.rule.per != "step" else history[-1:]  # a step is no night
    yield case
    if len(case.accepted) >= LEAST and case.is_resampled:
        yield replace(case, kind="rising trend" if case.kind == "increase" else "falling trend")


def no_baseline() -> str:
    """Say that there is no baseline, and how to get one."""
    remedy = wording(
        python="give a Result, or the file of one, as baseline",
        command="save one with --save-baseline FILE --accept",
    )
    return f"there is no baseline: {remedy}"


def _lacks_logged(target: RuleTarget, result: Result) -> str:
    """Why a Result cannot hold a number that a framework logs."""
    if not target.logged_by or result.provenance.framework == target.logged_by:
        return ""
    return (
        f"the Result holds no numbers as {target.logged_by} logs them "
        f"(analyze with {option('framework', target.logged_by)}, or name the dump itself)"
    )


def _comparable(target: RuleTarget, name: str, result: Result, against: AcceptedResults) -> tuple[list[RunResult], str]:
    """The accepted runs to compare with, the newest last, as far back as they are comparable; or why there is none."""
    found: list[RunResult] = []
    for accepted in reversed(against.results):
        matching = matching_run(name, accepted)
        if matching is None:
            difference: str | None = f"it has no run {name} (it has: {', '.join(accepted.runs)})"
        else:
            difference = first_difference(target, name, result, matching[0], accepted)
        if difference is not None or matching is None:
            return found[::-1], "" if found else f"the baseline is not comparable: {difference}"
        found.append(matching[1])
    return found[::-1], "" if found else FIRST if against.accept else no_baseline()


class _Judging:
    """Checks one case after the other, of so many that share a level."""

    def __init__(self, level: float, against: AcceptedResults) -> None:
        self._level, self._against = level, against
        self._kept: dict[tuple[int, str, RuleTarget], tuple[ClusterSample, Draws]] = {}
        self._changes: dict[tuple[str, str, str, bool], LevelChange] = {}
        self.notes: list[str] = []

    def check(self, case: _Case) -> Check:
        """The check, not yet adjusted for the others beside it."""
        check = Check(
            rule=case.rule.text,
            run=case.run,
            place=case.place.name if case.place is not None else case.rule.per,
            metric=case.rule.metric,
            title=case.target.metric.title,
            unit=case.target.metric.unit,
            kind=case.kind,
            allowance=str(case.bound) if isinstance(case.bound, Allowance) else "",
            reason=case.reason,
            meaning=case.target.words,
        )
        if case.place is None:
            return check
        check.clustered_by = "step" if case.target.logged_by else case.place.run.clusters.by
        try:
            (self._resampled if case.is_resampled else _recorded)(check, case, case.place)
        except DataError as error:
            check.outcome, check.reason = "undecided", check.reason or str(error)
        return check

    def _resampled(self, check: Check, case: _Case, place: Place) -> None:
        sample, value = _drawn(place, case.target)
        others = [self._baseline(each, case.target) for each in case.accepted]
        if case.kind in TRENDS:
            self._over_nights(check, case, [*(other for other, _ in others), sample])
            return
        check.clusters, check.sequences = len(sample), int(sample.column("sequences").sum())
        if others:
            check.baseline = _finite(others[-1][1].value)
            check.baseline_interval, check.baseline_covers = interval_of(others[-1][0], case.target.table)
            check.pairing = _pairing(sample, others[-1][0])
        check.value = _finite(value.value)
        check.interval, check.covers = interval_of(sample, case.target.table)
        if check.reason:
            return
        limit = _limit(case, others[-1][1] if others else None)
        check.limit = _finite(limit.value)
        excess = limit - value if case.kind in LOWER else value - limit
        exchange = Exchange(sample.keys, others[-1][0].keys, self._level) if case.kind in COMPARED else None
        check.reason = _too_little(check, case.rule, len(sample) if exchange is None else None)
        if self._against.fixed_tokens and exchange is not None and check.pairing != "same tokens":
            check.reason = check.reason or OTHER_TOKENS
        if exchange is not None and not check.reason:
            check.reason = _cannot_fail(exchange, self._level)
        if math.isnan(excess.value) and not check.reason:
            status = place.value(case.target).status
            check.reason = "undefined" if status == "ok" else status
        if check.reason:
            return
        if exchange is not None:
            self._compared(check, case, sample, [other for other, _ in others])
        else:
            check.p = p_above_zero(excess)
            check.outcome = "failed" if excess.value > 0 else "passed"
        if check.outcome == "passed" and (check.value is None or check.limit is None):
            check.outcome, check.reason = "undecided", NOT_FINITE

    def _over_nights(self, check: Check, case: _Case, samples: Sequence[ClusterSample]) -> None:
        """A change over the accepted nights and this one."""
        check.clusters, check.sequences = len(samples[-1]), int(samples[-1].column("sequences").sum())
        check.reason = check.reason or _too_little(check, case.rule, None)
        if check.reason:
            return
        found = self._change(case, samples)
        if math.isnan(found.p):
            check.reason = NOT_FINITE
            return
        check.value, check.limit, check.p = _finite(found.rise), _finite(found.room), found.p
        check.parts = [found.part] if found.part else []
        name = dict(enumerate(self._against.names[1 - len(samples) :])).get(found.first)
        check.since = f"night {found.first + 1} of {len(samples)}" + (f" ({name})" if name else "")
        check.outcome = "failed" if found.p < 1 else "passed"
        beyond = found.rise < found.room if case.kind in LOWER else found.rise > found.room
        check.reason = WITHIN_NIGHTS if beyond else ""

    def _compared(self, check: Check, case: _Case, sample: ClusterSample, nights: Sequence[ClusterSample]) -> None:
        """A rise or fall against the baseline, the last of the nights, by permuting clusters."""
        assert isinstance(case.bound, Allowance)
        metric, lower, baseline = case.target.table, case.kind in LOWER, nights[-1]
        found = compare(sample, baseline, metric, case.bound, lower=lower, level=self._level)
        check.p, check.parts, check.statistic = found.p, found.parts, found.surest
        if len(nights) >= LEAST:  # what runs differ by beside their prompts
            last = self._change(case, [*nights, sample]).p_last
            check.p = check.p if math.isnan(last) else max(check.p, last)
        if is_layered(metric, lower=lower) and not found.parts:
            self.notes.append(_unlayered(case.run, sample))
        check.outcome = "failed" if any(each.exceeds for each in found.statistics) else "passed"
        check.reason = A_FEW_TOKENS if check.outcome == "failed" and not found.by_most else ""
        if not lower:
            risen = check.outcome == "failed" and (check.p or 0.0) <= self._level
            factor = detectable(sample, baseline, metric, case.bound, self._level, risen=risen)
            check.detectable = None if factor is None or check.baseline is None else factor * check.baseline
            if risen and check.detectable is not None and check.value is not None and check.detectable > check.value:
                check.detectable = None  # what has just failed was smaller: another rise than one of every token

    def _change(self, case: _Case, samples: Sequence[ClusterSample]) -> LevelChange:
        """Over the nights, once for the comparison with the last of them and for the trend."""
        assert isinstance(case.bound, Allowance) and case.place is not None
        lower = case.kind in LOWER
        key = case.rule.text, case.run, case.place.name, lower
        if key not in self._changes:
            self._changes[key] = change(samples, case.target.table, case.bound, lower=lower)
        return self._changes[key]

    def _baseline(self, place: Place, target: RuleTarget) -> tuple[ClusterSample, Draws]:
        key = id(place.run), place.name, target
        if key not in self._kept:
            self._kept[key] = _drawn(place, target)
        return self._kept[key]


def _beside_k3(check: Check) -> str:
    """What is beyond its limit where K3 as it is is not, whose value says nothing of it."""
    return "" if exceeds(check) else STATISTICS.get(check.statistic, "")


def _unlayered(run: str, sample: ClusterSample) -> str:
    """Why K3 was judged as it is alone, and what helps."""
    lacking, remedy = ("the baseline", "save a new one") if Layers.of(sample) else ("the Result", "name its dump")
    return (
        f"{run}: K3 is judged as it is, by which a rise of most tokens is seen late: {lacking} does not tell its "
        f"layers apart (made by an earlier version, or of more clusters than a Result keeps): {remedy}"
    )


def _drawn(place: Place, target: RuleTarget) -> tuple[ClusterSample, Draws]:
    sample = place.sample()
    return sample, resample([sample], [target.table])[0][0]


def _limit(case: _Case, baseline: Draws | None) -> Draws:
    """What a value may reach; with the baseline's own error."""
    if not isinstance(case.bound, Allowance):
        return Draws(case.bound, np.array(case.bound))
    assert baseline is not None
    room = abs(baseline) * case.bound.relative + case.bound.absolute
    return baseline + (-room if case.kind in LOWER else room)


def _recorded(check: Check, case: _Case, place: Place) -> None:
    """Judge a value that the Result holds without knowing how it scatters."""
    found = place.value(case.target)
    check.value, check.interval, check.covers = found.value, found.interval, found.covers
    check.sequences = int(place.recorded("sequences", None).value or 0)
    check.clusters = len(place.sample()) if case.target.logged_by else int(place.recorded("prompts", None).value or 0)
    baseline = case.accepted[-1].value(case.target) if case.accepted else None
    is_quantile = case.target.metric.quantile is not None
    limits = limits_of(check, case.kind, case.bound, baseline, is_quantile=is_quantile)
    check.reason = check.reason or _too_little(check, case.rule, None)
    if limits is not None and not check.reason:
        judge_fact(check, found, limits)


def _too_little(check: Check, rule: Rule, clusters: int | None) -> str:
    """What there is too little of; only counts are looked at, never values."""
    if check.sequences < rule.sequences:
        return f"needs {rule.sequences:,} sequences, has {check.sequences:,}"
    if clusters is not None and clusters < LEAST_CLUSTERS:
        return f"needs {LEAST_CLUSTERS} clusters on either side, has {clusters}"
    return ""


def _cannot_fail(exchange: Exchange, level: float) -> str:
    """Why no data of these sizes could fail."""
    if exchange.least_p <= level:
        return ""
    n, m, paired = len(exchange.new), len(exchange.old), exchange.shared
    if paired:
        return f"{paired} clusters that both hold cannot tell: needs {least_clusters(level)} of them"
    return f"{n} clusters against {m} cannot tell: needs {least_clusters(level, max(m, 2))} against {max(m, 2)}"


def _pairing(sample: ClusterSample, other: ClusterSample) -> Pairing:
    if sample.has_same_tokens(other):
        return "same tokens"
    shared = sample.shared(other)
    return "none" if not shared else "same clusters" if shared == len(sample) == len(other) else "some clusters"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
