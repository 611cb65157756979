"""All metrics by what they are about, and what frameworks call each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mismatchctl.correction import Correction, Gate
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.framework import Meaning
from mismatchctl.frameworks.meanings import relatives
from mismatchctl.measure import PAIRS
from mismatchctl.measure.metrics import MISMATCH_METRICS, Metric, correction_metrics, pair_metrics
from mismatchctl.measure.metrics.facets import FACET_METRICS, SECTIONS

Sections = dict[str, list[Metric]]
"""Metrics by what they are about."""

FACTS = ("unit", "definition", "meaning", "source")
_EXAMPLE = Correction(name="example", gates=(Gate(level="min", keep=(1e-4, None)),))


def find_metrics(name: str | None = None) -> Sections:
    """All metrics, or those of one key; a gate's metric is found under any gate's number.

    Raises:
        ConfigError: no metric has that key.
    """
    sections: Sections = {
        "The mismatch": list(MISMATCH_METRICS),
        **{pair.section: list(pair_metrics(pair)) for pair in PAIRS[1:]},
        **{SECTIONS[name]: list(metrics) for name, metrics in FACET_METRICS.items()},
        "Each correction (gate0 stands for any gate)": list(correction_metrics(_EXAMPLE)),
    }
    if name is None:
        return sections
    key = re.sub(r"^gate\d+_", "gate0_", name)
    found = {title: [metric for metric in metrics if metric.key == key] for title, metrics in sections.items()}
    if not any(found.values()):
        known = [metric.key for metrics in sections.values() for metric in metrics]
        raise ConfigError(f"no metric is called {name!r}{suggestion(name, known)}; `mismatchctl metrics` lists them")
    return {title: metrics for title, metrics in found.items() if metrics}


def metrics_data(found: Sections) -> list[dict[str, Any]]:
    """The same as plain data, each with the names that frameworks have for it."""
    return [
        {"key": metric.key, "about": about, "title": title_of(metric)}
        | {fact: getattr(metric, fact) for fact in FACTS}
        | {"names": [asdict(relative) for relative in relatives(metric)]}
        for about, metrics in found.items()
        for metric in metrics
    ]


def name_lines(metric: Metric) -> dict[str, list[str]]:
    """What frameworks call a metric: names that are exactly it, and those that are not with what sets them apart."""
    found: dict[tuple[str, ...], list[str]] = {}
    for relative in relatives(metric):
        found.setdefault(relative.differences, []).append(f"{relative.name} ({_versions(relative.frameworks)})")
    exact = found.pop((), [])
    unlike = [f"{', '.join(names)}: {'; '.join(differences)}" for differences, names in found.items()]
    return {label: lines for label, lines in (("known as", exact), ("unlike it", unlike)) if lines}


def _versions(titles: Sequence[str]) -> str:
    """a@2026-08, a@2025-10, b@2026-08 as "a 2026-08 2025-10, b 2026-08"."""
    by_framework: dict[str, list[str]] = {}
    for title in titles:
        framework, _, version = title.partition("@")
        by_framework.setdefault(framework, []).append(version)
    return ", ".join(f"{framework} {' '.join(versions)}" for framework, versions in by_framework.items())


def meanings_data(found: Mapping[Meaning, Sequence[str]]) -> list[dict[str, Any]]:
    """Frameworks' names as plain data."""
    return [asdict(meaning) | {"frameworks": list(frameworks)} for meaning, frameworks in found.items()]


def title_of(metric: Metric) -> str:
    """A gate's title without the words of the example."""
    return re.sub(r"^gate 0 \(.*\)", "gate 0", metric.title)
