"""What a name on somebody's dashboard means, what else is called so, and where its value is found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from mismatchctl.correction import Correction, Gate
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks import load, shelves
from mismatchctl.frameworks.framework import Meaning, Shelf
from mismatchctl.measure.metrics import MISMATCH_METRICS, Measure, Metric, correction_metrics, other_metrics
from mismatchctl.measure.metrics.quantity import BOUNDED_WEIGHTS, FINAL_WEIGHTS
from mismatchctl.numbers import COUNTS

NEVER_LOGGED = "no code ever logged this"

_OF_ANY = correction_metrics(Correction(gates=(Gate(level="min", keep=(1.0, None)),)))
"""The metrics of a correction with a gate and a veto."""


@dataclass(frozen=True)
class Relative:
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
class Resolved:
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
    for shelf in shelves():
        for title, meanings in _newest_with(shelf, name):
            for meaning in meanings:
                found.setdefault(meaning, []).append(title)
    return found


def certain_metric(name: str) -> str | None:
    """The key of the metric of the mismatch that a name is, whoever logs it, however configured; None: unsure.

    A word without a panel before it (`kl`) may be anybody's, unless it is a key of the registry (`k3`); counts
    (`tokens`) may be of anything.
    """
    if "/" not in name:
        return next((own.key for own in MISMATCH_METRICS if own.key == name and own.unit not in COUNTS), None)
    named = {item.measure for _, meanings in _all_meanings() for item in meanings if item.name == name}
    measure = named.pop() if len(named) == 1 else None
    return next((metric.key for metric in MISMATCH_METRICS if measure is not None and metric.measure == measure), None)


def relatives(metric: Metric) -> list[Relative]:
    """The names that frameworks have for a metric: first those that mean exactly it, then those that nearly do.

    Near is the same statistic of the same quantity: over other tokens, reduced otherwise, of weights at another stage.
    """
    if metric.measure is None:
        return []
    found: dict[tuple[str, tuple[str, ...]], list[tuple[str, str]]] = {}
    for title, meanings in _all_meanings():
        for item in meanings:
            if item.measure is not None and not item.logged_as and item.measure.is_like(metric.measure):
                differences = tuple(item.measure.differences(metric.measure))
                found.setdefault((item.name, differences), []).append((title, item.when))
    named = [
        Relative(name, _distinct(title for title, _ in places), _distinct(when for _, when in places), differences)
        for (name, differences), places in found.items()
    ]
    return sorted(named, key=lambda relative: bool(relative.differences))


def _distinct(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for word in dict.fromkeys(words) if word)


def resolve(name: str, framework: str = "", correction: Correction | None = None) -> Resolved:
    """Where a number is found that is asked for by a key of the registry or by a framework's name.

    Args:
        name: a key; or a name as logged or documented, its prefix (`train/`, `rollout_corr/`) may be left out.
        framework: whose name it is, as `load` takes it; empty: of any, the newest version that has it.
        correction: what it is asked for: some names are a metric of the registry without normalization only.

    Raises:
        ConfigError: nothing is called so.
    """
    keys = _sources()
    of_any_gate = re.sub(r"^gate\d+_", "gate0_", name)
    if not framework and of_any_gate in keys:
        return Resolved(name, "", (), keys[of_any_gate], name)
    candidates = _candidates(name, framework)
    if not candidates:
        known = [meaning.name for _, meanings in _all_meanings() for meaning in meanings]
        raise ConfigError(
            f"no metric is called {name!r}{suggestion(name, [*keys, *known])}; `mismatchctl metrics` lists them"
        )
    title, meanings = max(candidates, key=lambda found: _nearness(found[1][0], name))
    status = NEVER_LOGGED if meanings[0].logged_as else "ok"
    metric = _metric_of(meanings, correction)
    if metric is not None:
        return Resolved(name, title, meanings, keys[metric.key], metric.key, status)
    code = meanings[0].logged_as or meanings[0].name
    return Resolved(name, title, meanings, "logged", load(title).logged_key(code), status)


def _candidates(name: str, framework: str) -> list[tuple[str, tuple[Meaning, ...]]]:
    """What a name means in one framework at one version, or in the newest of each that has it."""
    if not framework:
        return [found for shelf in shelves() for found in _newest_with(shelf, name)]
    title = load(framework).title
    meanings = _called(title, name)
    return [(title, meanings)] if meanings else []


def _nearness(meaning: Meaning, name: str) -> int:
    """2 for a name as it stands, 1 without the panel that it is shown in, 0 without a prefix of its own."""
    return 2 if meaning.name == name else 1 if meaning.name == f"train/{name}" else 0


def _metric_of(meanings: tuple[Meaning, ...], correction: Correction | None) -> Metric | None:
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
    return _by_measure().get(measure)


@cache
def _by_measure() -> dict[Measure, Metric]:
    return {metric.measure: metric for metric in _registry() if metric.measure is not None}


@cache
def _sources() -> dict[str, Literal["metrics", "corrections"]]:
    """Keys of the registry, and whether they belong to a run or to each correction; what both have is the run's."""
    of_corrections: dict[str, Literal["metrics", "corrections"]] = {metric.key: "corrections" for metric in _OF_ANY}
    return of_corrections | {metric.key: "metrics" for metric in (*MISMATCH_METRICS, *other_metrics())}


def _registry() -> Iterator[Metric]:
    yield from (*_OF_ANY, *other_metrics(), *MISMATCH_METRICS)


def _newest_with(shelf: Shelf, name: str) -> list[tuple[str, tuple[Meaning, ...]]]:
    """The newest version that has a name, with what it means there; empty if none has."""
    return next(([(title, found)] for title in shelf.titles if (found := _called(title, name))), [])


def _called(title: str, name: str) -> tuple[Meaning, ...]:
    """What a name means in one version: as it stands, else behind a prefix."""
    meanings = _meanings(title)
    same = tuple(item for item in meanings if item.name == name)
    return same or tuple(item for item in meanings if item.name.endswith(f"/{name}"))


def _all_meanings() -> Iterator[tuple[str, tuple[Meaning, ...]]]:
    for shelf in shelves():
        for title in shelf.titles:
            yield title, _meanings(title)


@cache
def _meanings(title: str) -> tuple[Meaning, ...]:
    return tuple(load(title).meanings())
