"""Rules of the gate: what may be how large, as text, plain data or files, with errors that say what was meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mismatchctl.errors import ConfigError, wording
from mismatchctl.gate.names import ANY, RuleTarget, find_target
from mismatchctl.gate.verdict import Kind
from mismatchctl.measure.pairs import BY_SOURCE
from mismatchctl.result import Result
from mismatchctl.texts import number, parse_inline, read_data
from mismatchctl.validation import explained

RULE_SUFFIXES = (".yaml", ".yml", ".toml")
TOLERANCE = 0.25
"""Relative increase over the baseline that is allowed where a rule does not say; docs/gate.md says why."""


def _number(value: Any) -> Any:
    return number(value) if isinstance(value, str) else value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]


class _RuleModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Allowance(_RuleModel):
    """How far a value may move from the baseline's: a share of it plus an absolute amount, neither below 0."""

    relative: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    absolute: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """`20%`, `1e-4` or `20% + 1e-4`."""
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"absolute": value}
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in re.split(r"(?<![eE])\+", value)]
        found: dict[str, float] = {}
        for part in parts:
            name = "relative" if part.endswith("%") else "absolute"
            if name in found or not part:
                raise ValueError("write a share, an amount or both: 20%, 1e-4, 20% + 1e-4")
            found[name] = number(part)
        return found

    def __str__(self) -> str:
        parts = [f"{100 * self.relative:g}%"] if self.relative or not self.absolute else []
        return "+".join([*parts, *([f"{self.absolute:g}"] if self.absolute else [])])


class Rule(_RuleModel):
    """One rule: a metric, where it is judged, and at least one bound on it."""

    metric: str = Field(default="k3", min_length=1, description="a key of the registry, or a framework's name")
    framework: str = Field(default="", description="whose name it is, NAME or NAME@VERSION; empty: of any")
    pair: str = Field(default="", description="the two policies: current/train, rollout/reference, ...")
    correction: str | None = Field(default=None, description="the correction whose metric it is")
    per: str = Field(default="overall", min_length=1, description="overall, step, or a column: each of its values")
    max: Number | None = Field(default=None, description="largest value")
    min: Number | None = Field(default=None, description="smallest value")
    increase: Allowance | None = Field(default=None, description="largest rise over the baseline: 20%, 1e-4, 20%+1e-4")
    decrease: Allowance | None = Field(default=None, description="largest fall below the baseline")
    sequences: int = Field(default=0, ge=0, description="fewer sequences than this cannot be judged")

    @model_validator(mode="after")
    def _in_order(self) -> Rule:
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self

    @model_validator(mode="after")
    def _of_one_pair(self) -> Rule:
        if not self.pair:
            return self
        if self.pair not in BY_SOURCE:
            raise ValueError(f"pair: {self.pair!r} is none of {', '.join(BY_SOURCE)}")
        if self.correction is not None or self.framework:
            raise ValueError("pair: a metric of the registry is measured on it, no framework's and no correction's")
        return self

    @property
    def name(self) -> str:
        """What the rule names, as a Result calls it where it is measured on another pair."""
        return BY_SOURCE[self.pair].key(self.metric) if self.pair else self.metric

    @property
    def bounds(self) -> dict[Kind, float | Allowance]:
        """What is given, by kind."""
        given = {"max": self.max, "min": self.min, "increase": self.increase, "decrease": self.decrease}
        return {kind: bound for kind, bound in given.items() if bound is not None}  # type: ignore[misc]

    @property
    def text(self) -> str:
        """The rule as `--rule` takes it."""
        settings: dict[str, Any] = {
            "framework": self.framework or None, "pair": self.pair or None, "correction": self.correction,
        }  # fmt: skip

        settings["per"] = None if self.per == "overall" else self.per
        settings |= self.bounds | {"sequences": self.sequences or None}
        given = [f"{key}={_shown(value)}" for key, value in settings.items() if value is not None]
        return f"{self.metric}:{','.join(given)}"


def _shown(value: Any) -> str:
    """A setting as text; a float in as few digits as say it."""
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return repr(value) if isinstance(value, float) and float(short) != value else short


DEFAULT_RULES = (Rule(increase=Allowance(relative=TOLERANCE)), Rule(metric="bitwise_all", max=0.0))
"""Judged where nobody says what to judge: K3 against the baseline, and that it is not one column dumped twice."""
BITWISE = Rule(metric="bitwise_all", min=1.0)
"""The rule of `--expect-bitwise`."""


def rules_from_text(text: str) -> list[Rule]:
    """Rules as a flag spells them: `k3:max=0.01,increase=20%,per=step`, a YAML mapping, or a file of rules.

    Raises:
        ConfigError: what is none of them, with what was probably meant.
    """
    if Path(text).suffix in RULE_SUFFIXES:
        return _from_file(Path(text))
    where = wording(python=f"rule {text!r}", command=f"--rule {text}")
    if text.lstrip().startswith("{"):
        return [_validated(parse_inline(text, where), where)]
    metric, _, settings = text.partition(":")
    data: dict[str, Any] = {"metric": metric.strip()}
    for part in filter(None, map(str.strip, settings.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"{where}: {part!r} is no KEY=VALUE, as in k3:max=0.01,increase=20%,per=step")
        if key in data:
            raise ConfigError(f"{where}: {key} is given twice")
        data[key] = value
    return [_validated(data, where)]


def _from_file(path: Path) -> list[Rule]:
    data = read_data(path)
    items = data.get("rules", data) if isinstance(data, dict) else data
    items = items if isinstance(items, list) else [items]
    return [_validated(item, f"{path}: rule {number}") for number, item in enumerate(items, 1)]


def _validated(data: Any, where: str) -> Rule:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected a mapping such as {{metric: k3, max: 0.01}}")
    try:
        rule = Rule.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(f"{where}: {explained(error, Rule)}") from None
    return _completed(rule, where)


def _completed(rule: Rule, where: str) -> Rule:
    """A rule without any bound gets the usual tolerance, in the direction that is worse."""
    if rule.bounds and rule.correction is not None:
        return rule
    better = find_target(rule.name, rule.framework, ANY if rule.correction is not None else None).metric.better
    if rule.bounds:
        return rule
    if better not in ("low", "high"):
        raise ConfigError(f"{where}: says no bound; {rule.metric} can be wrong on either side: give max, min or both")
    side = "increase" if better == "low" else "decrease"
    return rule.model_copy(update={side: Allowance(relative=TOLERANCE)})


def target_of(rule: Rule, result: Result) -> RuleTarget:
    """The number of a Result that a rule judges: the one place where names become metrics.

    What is logged beside every correction is taken from the first that has it, where the rule names none.

    Raises:
        ConfigError: there is no such metric, or no such correction.
    """
    found = {correction.name: correction for correction in result.corrections}
    also = result.provenance.framework or ""
    if rule.correction is not None and rule.correction not in found:
        known = ", ".join(found) or "none"
        raise ConfigError(f"rule {rule.text}: the Result has no correction {rule.correction!r} (it has: {known})")
    if rule.correction is not None:
        return find_target(rule.name, rule.framework, found[rule.correction], also)
    target = find_target(rule.name, rule.framework, None, also)
    if target.logged_by:
        for correction in result.corrections:
            each = find_target(rule.name, rule.framework, correction, also)
            if any(each.key in run.logged.get(correction.name, {}) for run in result.runs.values()):
                return each
    return target
