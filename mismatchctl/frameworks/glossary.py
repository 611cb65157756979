"""The meaning of metric names in frameworks and in mismatchctl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from mismatchctl.core.formatting import COUNT_UNITS
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.adapter import LoggedMetric
from mismatchctl.frameworks.registry import load_adapters, load_framework
from mismatchctl.measure.columns import PAIRS
from mismatchctl.measure.metrics.evaluation import other_metrics, pair_metrics
from mismatchctl.measure.metrics.metric import BOUNDED_WEIGHTS, FINAL_WEIGHTS, Measure, Metric
from mismatchctl.measure.metrics.registry import FACETS, MISMATCH_METRICS, correction_metrics

NEVER_LOGGED_STATUS = "no code ever logged this"

_EXAMPLE_METRICS = correction_metrics(Correction(name="example", gates=(Gate(level="min", keep=(1e-4, None)),)))
"""Metrics of a correction with one veto, as an example. In their keys, `gate0` (the first gate) represents any gate."""


@dataclass(frozen=True)
class RelatedName:
    """A name that frameworks log for a metric, or for a metric with a slightly different definition."""

    name: str  # the name as logged
    frameworks: tuple[str, ...]  # framework versions that use the name with this meaning, newest first
    when: tuple[str, ...]  # the configurations that log it. Empty: all.
    differences: tuple[str, ...]  # how its value differs from the metric. Empty: they are equal.


@dataclass(frozen=True)
class MetricLookup:
    """The place of a metric's value in a Result: `source` is the part of the Result, `key` the key in it."""

    name: str  # the requested name
    framework: str  # the framework and version. Empty: the name is mismatchctl's own key.
    meanings: tuple[LoggedMetric, ...]  # one meaning for each type of configuration. Empty: the name is our own key.
    # `metrics` or `corrections` (in a run of a Result), or `logged` if only the framework computes the value
    source: Literal["metrics", "corrections", "logged"]
    key: str  # the key in `source`. Empty if `source` is `logged`.
    status: str = "ok"  # `ok`, or for example "logged until 2026-01" if the version of `framework` does not log it


def find_meanings(name: str) -> dict[LoggedMetric, list[str]]:
    """Map each meaning of a logged name to the newest version per framework that logs it. A prefix may be missing."""
    found: dict[LoggedMetric, list[str]] = {}
    for adapter in load_adapters():
        for title, meanings in _find_newest(adapter.titles, name):
            for meaning in meanings:
                found.setdefault(meaning, []).append(title)
    return found


def find_certain_metric(name: str) -> str | None:
    """Return the key of a mismatch metric if `name` means this metric in all frameworks."""
    if "/" not in name:  # names without a prefix are ambiguous, except for keys of mismatchctl that are not counts
        return next((own.key for own in MISMATCH_METRICS if own.key == name and own.unit not in COUNT_UNITS), None)
    named = {item.measure for _, meanings in _iterate_meanings() for item in meanings if item.name == name}
    measure = named.pop() if len(named) == 1 else None
    return next((metric.key for metric in MISMATCH_METRICS if measure is not None and metric.measure == measure), None)


def find_related_names(metric: Metric) -> list[RelatedName]:
    """Return the names that frameworks log for a metric. Names with exactly the same definition come first."""
    if metric.measure is None:
        return []
    found: dict[tuple[str, tuple[str, ...]], list[tuple[str, str]]] = {}
    for title, meanings in _iterate_meanings():
        for item in meanings:
            if item.measure is not None and not item.logged_as and item.measure.is_like(metric.measure):
                differences = tuple(item.measure.differences(metric.measure))
                found.setdefault((item.name, differences), []).append((title, item.when))
    named = []
    for (name, differences), places in found.items():
        titles, conditions = (tuple(filter(None, dict.fromkeys(part))) for part in zip(*places, strict=True))
        named.append(RelatedName(name, titles, conditions, differences))
    return sorted(named, key=lambda relative: bool(relative.differences))


def resolve_metric(name: str, framework: str = "", correction: Correction | None = None) -> MetricLookup:
    """Find the location of a metric in a Result. `name` is a key of mismatchctl or a name that a framework logs."""
    keys = _index_sources()
    name = canonical_name(name)
    of_any_gate = re.sub(r"^gate\d+_", "gate0_", name)
    if not framework and of_any_gate in keys:
        return MetricLookup(name, "", (), keys[of_any_gate], name)
    groups = [[load_framework(framework).title]] if framework else [adapter.titles for adapter in load_adapters()]
    candidates = [found for titles in groups for found in _find_newest(titles, name)]
    if not candidates:
        known = [meaning.name for _, meanings in _iterate_meanings() for meaning in meanings]
        raise ConfigError(
            f"no metric is called {name!r}{suggestion(name, [*keys, *known])}; `mismatchctl metrics` lists them"
        )
    # The exact name is preferred, then the name with the prefix train/.
    title, meanings = max(candidates, key=lambda found: (found[1][0].name == name, found[1][0].name == f"train/{name}"))
    until = f"logged until {meanings[0].until}" if meanings[0].until else NEVER_LOGGED_STATUS
    status = until if meanings[0].logged_as else "ok"
    metric = _find_metric(meanings, correction)
    if metric is not None:
        return MetricLookup(name, title, meanings, keys[metric.key], metric.key, status)
    return MetricLookup(name, title, meanings, "logged", "", status)


def canonical_name(name: str) -> str:
    """Return the correct spelling of a key, for example `k3` for `K3`."""
    lower = name.lower()
    return lower if re.sub(r"^gate\d+_", "gate0_", lower) in _index_sources() else name


def _find_metric(meanings: tuple[LoggedMetric, ...], correction: Correction | None) -> Metric | None:
    """Return the metric that all `meanings` define, or `None`. Bounded weights are final if they are not normalized."""
    measures = {meaning.measure for meaning in meanings}
    measure = measures.pop()
    if measures or measure is None:
        return None
    if correction is not None:
        if correction.loss != "ppo" and measure.basis == "train/rollout":
            return None
        if (correction.weight is None or correction.weight.normalize == "none") and measure.basis == BOUNDED_WEIGHTS:
            measure = replace(measure, basis=FINAL_WEIGHTS)
    return _index_by_measure().get(measure)


@cache
def _index_by_measure() -> dict[Measure, Metric]:
    registry = (*_EXAMPLE_METRICS, *other_metrics(), *MISMATCH_METRICS)
    return {metric.measure: metric for metric in registry if metric.measure is not None}


@cache
def _index_sources() -> dict[str, Literal["metrics", "corrections"]]:
    """Map each metric's key to the part of a Result that contains it: `metrics` or else `corrections`."""
    found: dict[str, Literal["metrics", "corrections"]] = {each.key: "corrections" for each in _EXAMPLE_METRICS}
    return found | {each.key: "metrics" for each in (*MISMATCH_METRICS, *other_metrics())}


def _find_newest(titles: Sequence[str], name: str) -> list[tuple[str, tuple[LoggedMetric, ...]]]:
    """Return [(title, meanings of `name`)] for the newest version in `titles` that logs it, or an empty list."""
    return next(([(title, found)] for title in titles if (found := _find_by_name(title, name))), [])


def _find_by_name(title: str, name: str) -> tuple[LoggedMetric, ...]:
    """Find the meanings of a logged name. Also accept a name without its prefix, or with an extra `/all/`."""
    meanings = _load_meanings(title)
    same = tuple(item for item in meanings if item.name == name)
    found = same or tuple(item for item in meanings if item.name.endswith(f"/{name}"))
    return _find_by_name(title, name.replace("/all/", "/")) if not found and "/all/" in name else found


def _iterate_meanings() -> Iterator[tuple[str, tuple[LoggedMetric, ...]]]:
    for adapter in load_adapters():
        for title in adapter.titles:
            yield title, _load_meanings(title)


@cache
def _load_meanings(title: str) -> tuple[LoggedMetric, ...]:
    return tuple(load_framework(title).meanings())


Sections = dict[str, list[Metric]]
"""Title of a section -> its metrics."""

FACT_FIELDS = ("unit", "definition", "meaning", "source")


def find_metrics(name: str | None = None) -> Sections:
    """Return metrics by section. `name`: a key, or a word that occurs in keys. Without `name`, return all."""
    sections: Sections = {
        "The mismatch": list(MISMATCH_METRICS),
        **{pair.section: list(pair_metrics(pair)) for pair in PAIRS[1:]},
        **{facet.section: list(facet.metrics) for facet in FACETS},
        "Each correction (gate0 stands for any gate)": list(_EXAMPLE_METRICS),
    }
    if name is None:
        return sections
    key = re.sub(r"^gate\d+_", "gate0_", name.lower())
    known = [metric.key for metrics in sections.values() for metric in metrics]
    wanted = {key} & set(known) or {other for other in known if key in other.split("_")}
    if not wanted:
        raise ConfigError(f"no metric is called {name!r}{suggestion(name, known)}; `mismatchctl metrics` lists them")
    found = {title: [metric for metric in metrics if metric.key in wanted] for title, metrics in sections.items()}
    return {title: metrics for title, metrics in found.items() if metrics}


def metrics_as_data(found: Sections) -> list[dict[str, Any]]:
    return [
        {"key": metric.key, "about": about, "title": metric_title(metric)}
        | {fact: getattr(metric, fact) for fact in FACT_FIELDS}
        | {"names": [asdict(relative) for relative in find_related_names(metric)]}
        for about, metrics in found.items()
        for metric in metrics
    ]


def describe_names(metric: Metric) -> dict[str, list[str]]:
    """Return frameworks' names of the metric ("known as"), and of similar metrics with the differences ("similar")."""
    found: dict[tuple[str, ...], list[str]] = {}
    for relative in find_related_names(metric):
        found.setdefault(relative.differences, []).append(f"{relative.name} ({_format_versions(relative.frameworks)})")
    exact = found.pop((), [])
    unlike = [f"{', '.join(names)}: {'; '.join(differences)}" for differences, names in found.items()]
    return {label: lines for label, lines in (("known as", exact), ("similar", unlike)) if lines}


def _format_versions(titles: Sequence[str]) -> str:
    """Shorten versions: a@2026-08, a@2025-10, b@2026-08 becomes "a 2026-08 2025-10, b 2026-08"."""
    by_framework: dict[str, list[str]] = {}
    for title in titles:
        framework, _, version = title.partition("@")
        by_framework.setdefault(framework, []).append(version)
    return ", ".join(f"{framework} {' '.join(versions)}" for framework, versions in by_framework.items())


def meanings_as_data(found: Mapping[LoggedMetric, Sequence[str]]) -> list[dict[str, Any]]:
    rows = ((asdict(metric), frameworks) for metric, frameworks in found.items())
    return [{key: row[key] for key in row if key != "values"} | {"frameworks": list(titles)} for row, titles in rows]


def metric_title(metric: Metric) -> str:
    """Return the title of a metric, without the description of its example gate: "gate 0 (...)" becomes "gate 0"."""
    return re.sub(r"^gate 0 \(.*\)", "gate 0", metric.title)
