"""What is judged: each place of a rule in a run, its value there, and the same of a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mismatchctl.errors import DataError
from mismatchctl.gate.rules import Rule
from mismatchctl.resample import Sample, sample_of_run, sample_of_step, sample_of_value
from mismatchctl.result import Groups, RunResult, Series, Value

Label = str | int | float | bool | None


@dataclass(frozen=True)
class Place:
    """Where a rule is judged: a whole run, one of its steps, or one value of a `--by` column."""

    run: RunResult
    name: str
    groups: Groups | None = None
    index: int = 0
    sampled: Callable[[], Sample] | None = None

    def sample(self) -> Sample:
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


def _at(series: Series | None, index: int) -> Value:
    if series is None:
        return Value(value=None, status="not recorded")
    return Value(
        value=series.value[index],
        interval=None if series.interval is None else series.interval[index],
        status=series.status_at(index),
    )


def places(rule: Rule, run: RunResult) -> Iterator[Place]:
    """Every place of a rule in a run.

    Raises:
        DataError: the Result is not broken down by the rule's column.
    """
    if rule.per == "overall":
        yield Place(run, "overall")
        return
    groups = run.groups if rule.per == "step" else run.by.get(rule.per)
    if groups is None:
        problem = f"the Result is not broken down by {rule.per}"
        raise DataError(problem, remedy=f"analyze with --by {rule.per}, or name the dump itself")
    for index, label in enumerate(groups.labels):
        yield _place(rule, run, groups, index, label)


def _place(rule: Rule, run: RunResult, groups: Groups, index: int, label: Label) -> Place:
    def sampled() -> Sample:
        return sample_of_step(run, index) if rule.per == "step" else sample_of_value(run, rule.per, index)

    name = f"{rule.per} {'(none)' if label is None else label}"
    return Place(run, name, groups, index, sampled)


def counterpart(rule: Rule, place: Place, baseline: RunResult) -> Place:
    """What a place is compared with: the same value of a column; for a step, the baseline's overall.

    Raises:
        DataError: the baseline has no such value.
    """
    if rule.per in ("overall", "step") or place.groups is None:
        return Place(baseline, "overall")
    groups, label = baseline.by.get(rule.per), place.groups.labels[place.index]
    if groups is None or label not in groups.labels:
        problem = f"the baseline has no {place.name}"
        raise DataError(problem, remedy=f"save one from a gate with a rule per={rule.per}")
    return _place(rule, baseline, groups, groups.labels.index(label), label)
