"""Rules on a metrics log without a dump: the worst step of each metric against `max` and `min`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mismatchctl import __version__
from mismatchctl.api.gate.rules import Rule
from mismatchctl.api.gate.verdict import BoundKind, Check, Verdict, add_sentences, worst_outcome
from mismatchctl.api.metrics_log import LoggedValues, read_logged_values
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.glossary import find_certain_metric

_KINDS: tuple[BoundKind, ...] = ("max", "min")


def judge_logs(paths: Sequence[str | Path], rules: Sequence[Rule], level: float) -> Verdict:
    """Judge each rule at its worst step in each run of the logs.

    Raises:
        ConfigError: a rule takes more than a log has.
        DataError: a log cannot be read.
    """
    if not rules:
        raise ConfigError(f"{paths[0]}: is a metrics log: give rules with max or min, as in --rule k3:max=0.01")
    for rule in rules:
        _require_bounds(rule)
    checks = [
        check for path in paths for run in read_logged_values(path) for rule in rules for check in _judge(rule, run)
    ]
    verdict = Verdict(
        version=__version__,
        outcome=worst_outcome([check.outcome for check in checks]),
        level=level,
        baseline=None,
        checks=checks,
        notes=["judged on logged values alone, without intervals: the worst step decides"],
    )
    return add_sentences(verdict)


def _require_bounds(rule: Rule) -> None:
    if rule.increase is not None or rule.decrease is not None or not rule.bounds:
        raise ConfigError(f"rule {rule.text}: a metrics log takes max and min only; a baseline takes dumps or Results")
    if rule.per not in ("overall", "step") or rule.correction is not None or rule.pair or rule.sequences:
        raise ConfigError(f"rule {rule.text}: a metrics log has values by step alone: give a metric with max or min")


def _judge(rule: Rule, run: LoggedValues) -> Iterator[Check]:
    name = _find_name(rule.metric, run)
    for kind, limit in rule.bounds.items():
        assert kind in _KINDS and isinstance(limit, float)
        check = Check(rule=rule.text, run=run.name, place="overall", metric=rule.metric, title=name or rule.metric,
                      unit="", kind=kind, limit=limit)  # fmt: skip
        if name is None:
            check.reason = f"no name in the log is {rule.metric}"
            yield check
            continue
        known = [(value, step) for value, step in zip(run.values[name], run.steps, strict=True) if value is not None]
        if not known:
            check.reason = "the log does not contain it"
            yield check
            continue
        check.value, step = (
            max(known, key=lambda pair: pair[0]) if kind == "max" else min(known, key=lambda pair: pair[0])
        )
        check.place = f"step {step}"
        beyond = check.value > limit if kind == "max" else check.value < limit
        lost = run.not_finite.get(name, 0)
        check.outcome = "failed" if beyond else "undecided" if lost else "passed"
        check.reason = f"{lost} values are NaN or infinite" if lost else ""
        yield check


def _find_name(metric: str, run: LoggedValues) -> str | None:
    """Find the logged name of a rule's metric: the same name, the name without its panel, or the same quantity."""
    if metric in run.values:
        return metric
    same = [name for name in run.values if name.rpartition("/")[2] == metric]
    same = same or [name for name in run.values if find_certain_metric(name) == metric]
    return same[0] if len(same) == 1 else None
