"""What the name in a rule stands for: a metric of the registry, or a number that a framework logs once per step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from mismatchctl.correction import Correction, Gate
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.meanings import Resolved, resolve
from mismatchctl.measure.metrics import Metric
from mismatchctl.measure.table import hash_values
from mismatchctl.resample import ClusterSample, TableMetric, find_metric
from mismatchctl.result import RunResult

ANY = Correction(name="any", gates=(Gate(level="min", keep=(1.0, None)),))
"""Stands for a correction where it does not matter which: it has every kind of number."""
PLAINEST = ("none", "token_is")
"""Presets beside which a framework logs what depends on no correction: some log more where tokens have weights."""
_REMEDY = "name a correction beside which it does; what belongs to a loss needs current_log_probs and advantages"
_MEAN_OVER_STEPS = ("value", "steps", "sequences")


@dataclass(frozen=True)
class RuleTarget:
    """The number that a rule judges.

    Attributes:
        key: under which a Result holds it.
        table: how it follows from a table of clusters; of a logged number, from one row per step.
        correction: whose it is; None for the mismatch itself.
        logged_by: the framework, at which version, that logs it once per step; empty for a metric of the registry.
        words: what a framework's name means; empty for a key of the registry.
    """

    key: str
    table: TableMetric = field(repr=False)
    correction: str | None = None
    logged_by: str = ""
    words: str = ""

    @property
    def metric(self) -> Metric:
        """Title, unit, and which way is good."""
        return self.table.metric


def find_target(name: str, framework: str = "", correction: Correction | None = None, also: str = "") -> RuleTarget:
    """The number that a key of the registry or a framework's name stands for.

    Args:
        name: what the rule names.
        framework: whose name it is; empty: of any.
        correction: whose number is asked for.
        also: the framework whose logged numbers are at hand: preferred where the rule names none.

    Raises:
        ConfigError: nothing is called so, or it is a number of a correction and none is named.
    """
    found = resolve(name, framework, correction)
    if found.source == "logged" and not framework and also and also != found.framework:
        with suppress(ConfigError):
            found = resolve(name, also, correction)
    words = _words(found)
    if found.source == "logged":
        return _logged(found, correction, words)
    if found.source == "corrections" and correction is None:
        raise ConfigError(f"{name} is a metric of corrections: say of which, with correction=NAME")
    if correction is not None and (found.source == "corrections" or not found.framework):
        return RuleTarget(found.key, find_metric(found.key, correction), correction.name, words=words)
    return RuleTarget(found.key, find_metric(found.key), words=words)


def _words(found: Resolved) -> str:
    if not found.framework:
        return ""
    documented = f", {found.status}: judged by the documented formula" if found.status != "ok" else ""
    same = f"{found.name} of {found.framework} is {found.key}"
    return f"{same if found.key != found.name else f'{found.name} of {found.framework}'}{documented}"


def _logged(found: Resolved, correction: Correction | None, words: str) -> RuleTarget:
    name = None if correction is None else correction.name
    metric = Metric(
        key=found.key,
        title=f"Mean over steps of {found.key}",
        unit="",
        definition=found.meanings[0].quantity,
        meaning="what the framework logs",
        formula=lambda sums: sums["value"] / sums["steps"],
        better="",
    )
    beside = "" if name is None else f" beside correction {name}"
    return RuleTarget(found.key, TableMetric(metric), name, found.framework, f"{words}, as it is logged{beside}")


def logged_values(target: RuleTarget, run: RunResult) -> list[float | None]:
    """What is logged in each step of a run.

    Raises:
        DataError: the Result does not hold it.
    """
    found = run.logged.get(target.correction or "", {}).get(target.key)
    if found is None:
        problem = f"{target.logged_by} logs no {target.key} beside correction {target.correction or 'none'}"
        raise DataError(problem, remedy=_REMEDY)
    return found


def logged_sample(target: RuleTarget, run: RunResult, index: int | None = None) -> ClusterSample:
    """The steps of a run, or one of them by its index, as clusters; what is not finite makes every total undefined."""
    values = np.array(logged_values(target, run), np.float64)
    labels = hash_values(np.array([str(label) for label in run.groups.labels], dtype=str))
    sizes = run.groups.metrics.get("sequences")
    sequences = np.zeros(len(values)) if sizes is None else np.array(sizes.value, np.float64)
    rows = np.argsort(labels) if index is None else np.array([index])
    sums = np.stack([values, np.ones(len(values)), np.nan_to_num(sequences)], axis=1)
    return ClusterSample(labels[rows], _MEAN_OVER_STEPS, sums[rows])
