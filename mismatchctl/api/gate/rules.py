"""Rules of the gate: the class `Rule`, how to parse rules, and how to find the metric that a rule judges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mismatchctl.api.gate.verdict import BoundKind
from mismatchctl.core.validation import explain_error
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.errors import ConfigError, wording
from mismatchctl.frameworks.glossary import canonical_name, resolve_metric
from mismatchctl.io.yaml import parse_inline, parse_number, read_data
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.results.model import Result
from mismatchctl.stats.comparison import Allowance
from mismatchctl.stats.samples import TableMetric, find_metric

ANY_CORRECTION = Correction(name="any", gates=(Gate(level="min", keep=(1.0, None)),))
"""Placeholder for a rule's correction. With it, the metric of the rule can be checked before a Result is read."""


@dataclass(frozen=True)
class RuleTarget:
    """The metric that a rule judges."""

    key: str  # key of the metric in a Result, such as `k3`
    table: TableMetric = field(repr=False)
    correction: str | None = None
    words: str = ""  # a framework's name explained: "rollout_corr/kl of NAME@VERSION is k1"

    @property
    def metric(self) -> Metric:
        return self.table.metric


def find_target(name: str, framework: str = "", correction: Correction | None = None) -> RuleTarget:
    """Find a metric by its key (`k3`), or by the name that a framework logs (`rollout_corr/kl`)."""
    found = resolve_metric(name, framework, correction)
    if found.source == "logged":
        problem = f"{found.name} of {found.framework} is not equal to any metric of mismatchctl"
        remedy = "Write a metric such as k3, or pass the run's metrics log to the gate"
        raise ConfigError(f"{problem} (see `mismatchctl metrics {found.name}`). {remedy}")
    words = ""
    if found.framework:
        same = f" is {found.key}" if found.key != found.name else ""
        documented = f", {found.status}: judged by the documented formula" if found.status != "ok" else ""
        words = f"{found.name} of {found.framework}{same}{documented}"
    if found.source == "corrections" and correction is None:
        raise ConfigError(f"{name} is a metric of a correction; add correction=NAME to the rule")
    if correction is not None and (found.source == "corrections" or not found.framework):
        return RuleTarget(found.key, find_metric(found.key, correction), correction.name, words)
    return RuleTarget(found.key, find_metric(found.key), words=words)


RULE_SUFFIXES = (".yaml", ".yml", ".toml")
DEFAULT_TOLERANCE = 0.25
"""A rule without a bound allows the metric to get worse by 25% of the baseline's value (docs/methods/gate.md)."""


def _parse_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    return parse_number(value) if isinstance(value, str) else value


FiniteNumber = Annotated[float, BeforeValidator(_parse_number), Field(allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_parse_number), Field(ge=0)]
_SHARE_UNITS = frozenset({"fraction", "probability", "ratio", "correlation", "0/1", "-", ""})
"""For metrics in these units, `max` and `min` may be percentages: 5% means 0.05."""


class Rule(BaseModel):
    """One rule: a metric, its bounds, and whether it judges a run, each of its steps, or each value of a column."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(default="k3", min_length=1, description="key of a metric, or a framework's name for it")
    framework: str = Field(default="", description="framework that logs `metric`, as NAME or NAME@VERSION; empty: any")
    correction: str | None = Field(default=None, description="correction that the metric describes, such as token_tis")
    per: str = Field(
        default="overall", min_length=1, description="overall (the run), step (each step), or a column (every value)"
    )
    max: FiniteNumber | None = Field(default=None, description="largest value that passes")
    min: FiniteNumber | None = Field(default=None, description="smallest value that passes")
    increase: Allowance | None = Field(default=None, description="allowed rise over the baseline: 20%, 1e-4, 20%+1e-4")
    decrease: Allowance | None = Field(default=None, description="allowed fall below the baseline, such as 20%")
    sequences: Count = Field(default=0, description="if the run, step or column value has fewer sequences: undecided")

    @model_validator(mode="after")
    def _in_order(self) -> Rule:
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self

    @property
    def bounds(self) -> dict[BoundKind, float | Allowance]:
        given = {"max": self.max, "min": self.min, "increase": self.increase, "decrease": self.decrease}
        return {kind: bound for kind, bound in given.items() if bound is not None}  # type: ignore[misc]

    @property
    def text(self) -> str:
        settings: dict[str, Any] = {"framework": self.framework or None, "correction": self.correction}
        settings["per"] = None if self.per == "overall" else self.per
        settings |= self.bounds | {"sequences": self.sequences or None}
        for key, value in settings.items():
            if isinstance(value, float) and float(f"{value:g}") == value:
                settings[key] = f"{value:g}"
        return f"{self.metric}:{','.join(f'{key}={value}' for key, value in settings.items() if value is not None)}"


DEFAULT_RULES = (Rule(increase=Allowance(relative=DEFAULT_TOLERANCE)), Rule(metric="bitwise_all", max=0.0))
"""Default rules: K3 must not rise by more than 25%, and at least one log-prob must differ between rollout and train."""
BITWISE_RULE = Rule(metric="bitwise_all", min=1.0)


def parse_rules(text: str, *, any_name: bool = False) -> list[Rule]:
    """Parse a rule (`k3:max=0.01,per=step` or YAML), or read a file of rules. `any_name` allows unknown metrics."""
    if Path(text).suffix in RULE_SUFFIXES:
        return _read_rules(Path(text), any_name)
    where = wording(python=f"rule {text!r}", command=f"--rule {text}")
    if text.lstrip().startswith("{"):
        return [_validate_rule(parse_inline(text, where, decimal=True), where, any_name)]
    metric, _, settings = text.partition(":")
    needed = "write METRIC:KEY=VALUE, for example k3:max=0.1"
    if not metric.strip() or re.search(r"[=<>]", metric):
        raise ConfigError(f"{where}: {needed}")
    data: dict[str, Any] = {"metric": metric.strip()}
    for part in filter(None, map(str.strip, settings.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"{where}: {part!r} is not KEY=VALUE; {needed}")
        if key in data:
            raise ConfigError(f"{where}: {key} is given twice")
        data[key] = value
    return [_validate_rule(data, where, any_name)]


def _read_rules(path: Path, any_name: bool) -> list[Rule]:
    data = read_data(path, decimal=True)
    items = data.get("rules", data) if isinstance(data, dict) else data
    if isinstance(data, dict) and "rules" in data and (extra := sorted(map(str, data.keys() - {"rules"}))):
        raise ConfigError(f"{path}: unknown key {extra[0]!r}. Write all rules under one key named rules")
    items = items if isinstance(items, list) else [items]
    if not items:
        raise ConfigError(f"{path}: the list of rules is empty. Write a rule such as {{metric: k3, max: 0.01}}")
    return [_validate_rule(item, f"{path}: rule {number}", any_name) for number, item in enumerate(items, 1)]


def _validate_rule(data: Any, where: str, any_name: bool) -> Rule:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected a mapping such as {{metric: k3, max: 0.01}}")
    try:
        rule = Rule.model_validate(dict(data))
    except ValidationError as error:
        hint = "" if "metric" in data else ". Write a rule such as {metric: k3, max: 0.01}"
        raise ConfigError(f"{where}: {explain_error(error, Rule)}{hint}") from None
    rule = rule.model_copy(update={"metric": canonical_name(rule.metric)})
    try:
        metric = find_target(
            rule.metric, rule.framework, ANY_CORRECTION if rule.correction is not None else None
        ).metric
    except ConfigError as error:
        if any_name and rule.bounds:
            return rule
        raise ConfigError(f"{where}: {error}") from None
    _check_unit(rule, metric, data, where)
    return rule if rule.bounds else _add_default_bound(rule, metric, where)


def _check_unit(rule: Rule, metric: Metric, data: Mapping[str, Any], where: str) -> None:
    for key, bound in (("max", rule.max), ("min", rule.min)):
        if bound is None:
            continue
        if metric.unit not in _SHARE_UNITS and str(data[key]).strip().endswith("%"):
            problem = f"{key}={data[key]}: {rule.metric} is measured in {metric.unit}, so a percentage is not allowed"
            remedy = f"Write {key}={bound:g}, or increase={data[key]} for a rise over the baseline"
            raise ConfigError(f"{where}: {problem}. {remedy}")
        if metric.unit == "fraction" and bound > 1:
            is_percent = str(data[key]).strip().endswith("%")
            remedy = "Write at most 100%" if is_percent or bound > 100 else f"Write {key}={bound:g}%"
            raise ConfigError(f"{where}: {key}={data[key]}: {rule.metric} is a share from 0 to 1. {remedy}")


def _add_default_bound(rule: Rule, metric: Metric, where: str) -> Rule:
    if metric.better not in ("low", "high"):
        problem = f"missing bound. {rule.metric} can be too high or too low, so write max, min or both"
        raise ConfigError(f"{where}: {problem}")
    side = "increase" if metric.better == "low" else "decrease"
    return rule.model_copy(update={side: Allowance(relative=DEFAULT_TOLERANCE)})


def find_rule_target(rule: Rule, result: Result) -> RuleTarget:
    found = {correction.name: correction for correction in result.corrections}
    if rule.correction is not None and rule.correction not in found:
        known = ", ".join(found) or "none"
        raise ConfigError(
            f"rule {rule.text}: correction {rule.correction!r} is not in the Result (its corrections: {known})"
        )
    return find_target(rule.metric, rule.framework, found[rule.correction] if rule.correction is not None else None)
