"""What is judged: each place of a rule in a run, its value there, and the same of a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mismatchctl.errors import DataError, option
from mismatchctl.gate.names import RuleTarget, logged_sample, logged_values
from mismatchctl.gate.rules import Rule
from mismatchctl.resample import ClusterSample, sample_of_run, sample_of_step, sample_of_value
from mismatchctl.result import Groups, RunResult, Series, Value

Label = str | int | float | bool | None


@dataclass(frozen=True)
class Place:
    """Where a rule is judged: a whole run, one of its steps, or one value of a `--by` column."""

    run: RunResult
    name: str
    groups: Groups | None = None
    index: int = 0
    sampled: Callable[[], ClusterSample] | None = None

    def sample(self) -> ClusterSample:
        """Its clusters.

        Raises:
            DataError: the Result does not tell them apart.
        """
        return sample_of_run(self.run) if self.sampled is None else self.sampled()

    def recorded(self, key: str, correction: str | None) -> Value:
        """The value that the Result holds there."""
        if self.groups is None:
            overall = self.run.overall
            known = overall.metrics if correction is None else overall.corrections.get(correction, {})
            return known.get(key, Value(value=None, status="not recorded"))
        series = self.groups.metrics if correction is None else self.groups.corrections.get(correction, {})
        return _at(series.get(key), self.index)

    def value(self, target: RuleTarget) -> Value:
        """The value of what is judged there; of a logged number, its mean over the steps.

        Raises:
            DataError: nothing is logged under that name.
        """
        if not target.logged_by:
            return self.recorded(target.key, target.correction)
        values = logged_values(target, self.run)
        there = values if self.groups is None else values[self.index : self.index + 1]
        finite = [value for value in there if value is not None]
        if len(finite) < len(there) or not there:
            return Value(value=None, status="nothing finite is logged in some step")
        return Value(value=math.fsum(value / len(finite) for value in finite))  # the sum itself may be too large


def _at(series: Series | None, index: int) -> Value:
    if series is None:
        return Value(value=None, status="not recorded")
    return Value(
        value=series.value[index],
        interval=None if series.interval is None else series.interval[index],
        status=series.status_at(index),
    )


def places(rule: Rule, target: RuleTarget, run: RunResult) -> Iterator[Place]:
    """Every place of a rule in a run.

    Raises:
        DataError: the Result is not broken down by the rule's column, or nothing is logged by it.
    """
    if rule.per == "overall":
        yield _overall(target, run)
        return
    if target.logged_by and rule.per != "step":
        problem = f"{target.logged_by} logs {target.key} once per step, not by {rule.per}"
        raise DataError(problem, remedy="judge it overall or per=step")
    groups = run.groups if rule.per == "step" else run.by.get(rule.per)
    if groups is None:
        problem = f"the Result is not broken down by {rule.per}"
        raise DataError(problem, remedy=f"analyze with {option('by', rule.per)}, or name the dump itself")
    for index, label in enumerate(groups.labels):
        yield _place(rule, target, run, groups, index, label)


def _overall(target: RuleTarget, run: RunResult) -> Place:
    return Place(run, "overall", sampled=(lambda: logged_sample(target, run)) if target.logged_by else None)


def _place(rule: Rule, target: RuleTarget, run: RunResult, groups: Groups, index: int, label: Label) -> Place:
    def sampled() -> ClusterSample:
        if target.logged_by:
            return logged_sample(target, run, index)
        return sample_of_step(run, index) if rule.per == "step" else sample_of_value(run, rule.per, index)

    name = f"{rule.per} {'(none)' if label is None else label}"
    return Place(run, name, groups, index, sampled)


def counterpart(rule: Rule, target: RuleTarget, place: Place, baseline: RunResult) -> Place:
    """What a place is compared with: the same value of a column; for a step, the baseline's overall.

    Raises:
        DataError: the baseline has no such value.
    """
    if rule.per in ("overall", "step") or place.groups is None:
        return _overall(target, baseline)
    groups, label = baseline.by.get(rule.per), place.groups.labels[place.index]
    if groups is None or label not in groups.labels:
        problem = f"the baseline has no {place.name}"
        raise DataError(problem, remedy=f"save one from a gate with a rule per={rule.per}")
    return _place(rule, target, baseline, groups, groups.labels.index(label), label)
