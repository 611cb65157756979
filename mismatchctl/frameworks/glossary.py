"""Meaning of metric names: what each framework calls a metric, and where its value is found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

from mismatchctl.core.formatting import COUNT_UNITS
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.adapter import Adapter, Meaning
from mismatchctl.frameworks.registry import load_adapters, load_framework
from mismatchctl.measure.columns import PAIRS
from mismatchctl.measure.metrics.corrections import correction_metrics
from mismatchctl.measure.metrics.evaluation import other_metrics, pair_metrics
from mismatchctl.measure.metrics.facets import FACET_METRICS, FACET_SECTIONS
from mismatchctl.measure.metrics.metric import BOUNDED_WEIGHTS, FINAL_WEIGHTS, Measure, Metric
from mismatchctl.measure.metrics.mismatch import MISMATCH_METRICS

NEVER_LOGGED_STATUS = "no code ever logged this"

_EXAMPLE_METRICS = correction_metrics(Correction(gates=(Gate(level="min", keep=(1.0, None)),)))
"""The metrics of a correction with a gate and a veto."""


@dataclass(frozen=True)
class RelatedName:
    """A framework's name beside a metric of the registry.

    Attributes:
        name: as logged.
        frameworks: which frameworks at which versions give it that meaning, the newest first.
        when: the configurations that log it so; empty: every one.
        differences: in what it is another number than the metric; empty: it means exactly that.
    """

    name: str
    frameworks: tuple[str, ...]
    when: tuple[str, ...]
    differences: tuple[str, ...]


@dataclass(frozen=True)
class MetricLookup:
    """Where the number that a name stands for is found.

    Attributes:
        name: as it was asked for.
        framework: whose name it is, with its version; empty: a key of the registry.
        meanings: what it stands for, one for each kind of configuration; empty for a key of the registry.
        source: `metrics` (of a run of a Result), `corrections` (of each correction there) or `logged` (what the
            framework logs for each step and correction: in a Result made with `framework`, or `Replay.logged`).
            What `logged` does not hold, of a loss, `Framework.loss` computes from a table.
        key: under which it stands there.
        status: `ok`, or that no code ever logged it: the number is that of the documented formula.
    """

    name: str
    framework: str
    meanings: tuple[Meaning, ...]
    source: Literal["metrics", "corrections", "logged"]
    key: str
    status: str = "ok"


def find_meanings(name: str) -> dict[Meaning, list[str]]:
    """What a logged or documented name means, and in which frameworks; its prefix (`train/`) may be left out."""
    found: dict[Meaning, list[str]] = {}
    for shelf in load_adapters():
        for title, meanings in _find_newest(shelf, name):
            for meaning in meanings:
                found.setdefault(meaning, []).append(title)
    return found


def find_certain_metric(name: str) -> str | None:
    """The key of the metric of the mismatch that a name is, whoever logs it, however configured; None: unsure.

    A word without a panel before it (`kl`) may be anybody's, unless it is a key of the registry (`k3`); counts
    (`tokens`) may be of anything.
    """
    if "/" not in name:
        return next((own.key for own in MISMATCH_METRICS if own.key == name and own.unit not in COUNT_UNITS), None)
    named = {item.measure for _, meanings in _iterate_meanings() for item in meanings if item.name == name}
    measure = named.pop() if len(named) == 1 else None
    return next((metric.key for metric in MISMATCH_METRICS if measure is not None and metric.measure == measure), None)


def find_related_names(metric: Metric) -> list[RelatedName]:
    """The names that frameworks have for a metric: first those that mean exactly it, then those that nearly do.

    Near is the same statistic of the same quantity: over other tokens, reduced otherwise, of weights at another stage.
    """
    if metric.measure is None:
        return []
    found: dict[tuple[str, tuple[str, ...]], list[tuple[str, str]]] = {}
    for title, meanings in _iterate_meanings():
        for item in meanings:
            if item.measure is not None and not item.logged_as and item.measure.is_like(metric.measure):
                differences = tuple(item.measure.differences(metric.measure))
                found.setdefault((item.name, differences), []).append((title, item.when))
    named = [
        RelatedName(
            name, _join_versions(title for title, _ in places), _join_versions(when for _, when in places), differences
        )
        for (name, differences), places in found.items()
    ]
    return sorted(named, key=lambda relative: bool(relative.differences))


def _join_versions(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for word in dict.fromkeys(words) if word)


def resolve_metric(name: str, framework: str = "", correction: Correction | None = None) -> MetricLookup:
    """Where a number is found that is asked for by a key of the registry or by a framework's name.

    Args:
        name: a key; or a name as logged or documented, its prefix (`train/`, `rollout_corr/`) may be left out.
        framework: whose name it is, as `load` takes it; empty: of any, the newest version that has it.
        correction: what it is asked for: some names are a metric of the registry without normalization only.

    Raises:
        ConfigError: nothing is called so.
    """
    keys = _index_sources()
    of_any_gate = re.sub(r"^gate\d+_", "gate0_", name)
    if not framework and of_any_gate in keys:
        return MetricLookup(name, "", (), keys[of_any_gate], name)
    candidates = _find_candidates(name, framework)
    if not candidates:
        known = [meaning.name for _, meanings in _iterate_meanings() for meaning in meanings]
        raise ConfigError(
            f"no metric is called {name!r}{suggestion(name, [*keys, *known])}; `mismatchctl metrics` lists them"
        )
    title, meanings = max(candidates, key=lambda found: _name_distance(found[1][0], name))
    until = f"logged until {meanings[0].until}" if meanings[0].until else NEVER_LOGGED_STATUS
    status = until if meanings[0].logged_as else "ok"
    metric = _find_metric(meanings, correction)
    if metric is not None:
        return MetricLookup(name, title, meanings, keys[metric.key], metric.key, status)
    code = meanings[0].logged_as or meanings[0].name
    return MetricLookup(name, title, meanings, "logged", load_framework(title).logged_key(code), status)


def _find_candidates(name: str, framework: str) -> list[tuple[str, tuple[Meaning, ...]]]:
    """What a name means in one framework at one version, or in the newest of each that has it."""
    if not framework:
        return [found for shelf in load_adapters() for found in _find_newest(shelf, name)]
    title = load_framework(framework).title
    meanings = _find_by_name(title, name)
    return [(title, meanings)] if meanings else []


def _name_distance(meaning: Meaning, name: str) -> int:
    """2 for a name as it stands, 1 without the panel that it is shown in, 0 without a prefix of its own."""
    return 2 if meaning.name == name else 1 if meaning.name == f"train/{name}" else 0


def _find_metric(meanings: tuple[Meaning, ...], correction: Correction | None) -> Metric | None:
    """The metric that all of them are exactly, for a correction.

    Bounded weights are final where nothing normalizes them. In bypass mode current stands for train.
    """
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
    return {metric.measure: metric for metric in _iterate_registry() if metric.measure is not None}


@cache
def _index_sources() -> dict[str, Literal["metrics", "corrections"]]:
    """Keys of the registry, and whether they belong to a run or to each correction; what both have is the run's."""
    of_corrections: dict[str, Literal["metrics", "corrections"]] = {
        metric.key: "corrections" for metric in _EXAMPLE_METRICS
    }
    return of_corrections | {metric.key: "metrics" for metric in (*MISMATCH_METRICS, *other_metrics())}


def _iterate_registry() -> Iterator[Metric]:
    yield from (*_EXAMPLE_METRICS, *other_metrics(), *MISMATCH_METRICS)


def _find_newest(shelf: Adapter, name: str) -> list[tuple[str, tuple[Meaning, ...]]]:
    """The newest version that has a name, with what it means there; empty if none has."""
    return next(([(title, found)] for title in shelf.titles if (found := _find_by_name(title, name))), [])


def _find_by_name(title: str, name: str) -> tuple[Meaning, ...]:
    """What a name means in one version: as it stands, else behind a prefix, else without `all`, the mean over environments."""
    meanings = _load_meanings(title)
    same = tuple(item for item in meanings if item.name == name)
    found = same or tuple(item for item in meanings if item.name.endswith(f"/{name}"))
    return _find_by_name(title, name.replace("/all/", "/")) if not found and "/all/" in name else found


def _iterate_meanings() -> Iterator[tuple[str, tuple[Meaning, ...]]]:
    for shelf in load_adapters():
        for title in shelf.titles:
            yield title, _load_meanings(title)


@cache
def _load_meanings(title: str) -> tuple[Meaning, ...]:
    return tuple(load_framework(title).meanings())


Sections = dict[str, list[Metric]]
"""Metrics by what they are about."""

FACT_FIELDS = ("unit", "definition", "meaning", "source")
_EXAMPLE_CORRECTION = Correction(name="example", gates=(Gate(level="min", keep=(1e-4, None)),))


def find_metrics(name: str | None = None) -> Sections:
    """All metrics, or those of one key; a gate's metric is found under any gate's number.

    Raises:
        ConfigError: no metric has that key.
    """
    sections: Sections = {
        "The mismatch": list(MISMATCH_METRICS),
        **{pair.section: list(pair_metrics(pair)) for pair in PAIRS[1:]},
        **{FACET_SECTIONS[name]: list(metrics) for name, metrics in FACET_METRICS.items()},
        "Each correction (gate0 stands for any gate)": list(correction_metrics(_EXAMPLE_CORRECTION)),
    }
    if name is None:
        return sections
    key = re.sub(r"^gate\d+_", "gate0_", name)
    found = {title: [metric for metric in metrics if metric.key == key] for title, metrics in sections.items()}
    if not any(found.values()):
        known = [metric.key for metrics in sections.values() for metric in metrics]
        raise ConfigError(f"no metric is called {name!r}{suggestion(name, known)}; `mismatchctl metrics` lists them")
    return {title: metrics for title, metrics in found.items() if metrics}


def metrics_as_data(found: Sections) -> list[dict[str, Any]]:
    """The same as plain data, each with the names that frameworks have for it."""
    return [
        {"key": metric.key, "about": about, "title": metric_title(metric)}
        | {fact: getattr(metric, fact) for fact in FACT_FIELDS}
        | {"names": [asdict(relative) for relative in find_related_names(metric)]}
        for about, metrics in found.items()
        for metric in metrics
    ]


def describe_names(metric: Metric) -> dict[str, list[str]]:
    """What frameworks call a metric: names that are exactly it, and those that are not with what sets them apart."""
    found: dict[tuple[str, ...], list[str]] = {}
    for relative in find_related_names(metric):
        found.setdefault(relative.differences, []).append(f"{relative.name} ({_format_versions(relative.frameworks)})")
    exact = found.pop((), [])
    unlike = [f"{', '.join(names)}: {'; '.join(differences)}" for differences, names in found.items()]
    return {label: lines for label, lines in (("known as", exact), ("unlike it", unlike)) if lines}


def _format_versions(titles: Sequence[str]) -> str:
    """a@2026-08, a@2025-10, b@2026-08 as "a 2026-08 2025-10, b 2026-08"."""
    by_framework: dict[str, list[str]] = {}
    for title in titles:
        framework, _, version = title.partition("@")
        by_framework.setdefault(framework, []).append(version)
    return ", ".join(f"{framework} {' '.join(versions)}" for framework, versions in by_framework.items())


def meanings_as_data(found: Mapping[Meaning, Sequence[str]]) -> list[dict[str, Any]]:
    """Frameworks' names as plain data."""
    return [asdict(meaning) | {"frameworks": list(frameworks)} for meaning, frameworks in found.items()]


def metric_title(metric: Metric) -> str:
    """A gate's title without the words of the example."""
    return re.sub(r"^gate 0 \(.*\)", "gate 0", metric.title)
