"""What `metrics`, `presets` and `schema` print: definitions, corrections, the contract."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.contract import COLUMNS
from mismatchctl.correction import Correction, Gate
from mismatchctl.correction.presets import Preset
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.framework import Framework, Meaning
from mismatchctl.frameworks.meanings import relatives
from mismatchctl.frameworks.said import said
from mismatchctl.measure import PAIRS
from mismatchctl.measure.metrics import MISMATCH_METRICS, Metric, correction_metrics, pair_metrics
from mismatchctl.measure.metrics.facets import FACET_METRICS, SECTIONS
from mismatchctl.render.grid import ruled_table
from mismatchctl.texts.yaml_written import dump_yaml

Sections = dict[str, list[Metric]]
"""Metrics by what they are about."""

_EXAMPLE = Correction(name="example", gates=(Gate(level="min", keep=(1e-4, None)),))
_FACTS = ("unit", "definition", "meaning", "source")


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
        {"key": metric.key, "about": about, "title": _title(metric)}
        | {fact: getattr(metric, fact) for fact in _FACTS}
        | {"names": [asdict(relative) for relative in relatives(metric)]}
        for about, metrics in found.items()
        for metric in metrics
    ]


def render_metrics(found: Sections, console: Console) -> None:
    """List metrics: key, unit, definition."""
    for title, metrics in found.items():
        table = _table(console, title, "key", "unit", "definition")
        for metric in metrics:
            table.add_row(metric.key, metric.unit, metric.definition)
        console.print(table, "")


def render_metric(found: Sections, console: Console) -> None:
    """Everything about metrics of one key."""
    for about, metrics in found.items():
        for metric in metrics:
            console.print(Text.assemble((metric.key, "bold"), f": {_title(metric)}"))
            rows = _facts()
            for fact in _FACTS:
                rows.add_row(fact, getattr(metric, fact))
            rows.add_row("about", about)
            for label, names in name_lines(metric).items():
                rows.add_row(label, Text("\n".join(names)))
            console.print(rows, "")


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


def render_meanings(found: Mapping[Meaning, Sequence[str]], console: Console) -> None:
    """Everything about a name that frameworks log."""
    for meaning, frameworks in found.items():
        does = "documented, not logged," if meaning.logged_as else "logged"
        console.print(Text.assemble((meaning.name, "bold"), f": {does} by {', '.join(frameworks)}"))
        rows = _facts()
        for fact in ("quantity", "over", "reduction", "basis", "when"):
            rows.add_row(fact, getattr(meaning, fact) or "always")
        console.print(rows, "")


def _facts() -> Table:
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    return rows


def _title(metric: Metric) -> str:
    """A gate's title without the words of the example."""
    return re.sub(r"^gate 0 \(.*\)", "gate 0", metric.title)


def presets_data(presets: Mapping[str, Preset]) -> list[dict[str, Any]]:
    """Presets as plain data."""
    return [
        {
            "name": name,
            "framework": preset.framework,
            "version": preset.version,
            "source": preset.source,
            "alias_of": preset.alias_of,
            "documented": preset.documented,
            "correction": preset.correction.to_mapping(),
        }
        for name, preset in presets.items()
    ]


def render_presets(presets: Mapping[str, Preset], console: Console) -> None:
    """List presets with what each does."""
    table = _table(console, "Presets", "name", "from", "what it does")
    for name, preset in presets.items():
        what = f"another name of {preset.alias_of}" if preset.alias_of else preset.correction.about
        what += f" ({preset.documented})" if preset.documented else ""
        table.add_row(name, f"{preset.framework} {preset.version}".strip() or "-", what)
    console.print(table, "")
    console.print("`mismatchctl presets show NAME` prints one as YAML, to edit and to name with --correction FILE.")


def preset_yaml(preset: Preset) -> str:
    """A preset as YAML that `--correction FILE` reads, with its source as a comment."""
    facts = (f"{preset.framework} {preset.version}".strip(), preset.source, preset.documented)
    head = [f"# {text}" for text in facts if text]
    mapping = preset.correction.to_mapping()
    body = dump_yaml(mapping, inner=True)
    return "\n".join([*head, body])


def native_yaml(correction: Correction, framework: Framework, *, nearest: bool = False) -> str:
    """A Correction as YAML of a framework, which reads it back as the same; `nearest`: or what comes near, with how.

    Raises:
        ConfigError: the framework cannot say it.
    """
    head = [f"# {correction.name} as {framework.dated} reads it"]
    keys, unsaid = framework.native(correction) if nearest else (said(correction, framework), [])
    if unsaid:
        head += [f"# What {framework.title} cannot say, or says otherwise:", *(f"# - {text}" for text in unsaid)]
    for key in reversed(framework.block):
        keys = {key: keys}
    return "\n".join([*head, dump_yaml(keys)])


def contract_data(aliases: Mapping[str, str]) -> list[dict[str, Any]]:
    """The dump contract as plain data."""
    return [
        {
            "name": column.name,
            "required": column.required,
            "kind": column.kind.value,
            "unit": column.unit,
            "meaning": column.meaning,
            "also": _others(column.name, aliases),
        }
        for column in COLUMNS
    ]


def render_contract(aliases: Mapping[str, str], console: Console) -> None:
    """The dump contract, with the other names under which columns are known."""
    table = _table(console, "The dump contract (* required)", "column", "what it holds")
    for column in COLUMNS:
        others = _others(column.name, aliases)
        also = (f"\nalso: {', '.join(others)}", "dim") if others else ""
        name = f"{column.name}{' *' if column.required else ''}"
        table.add_row(name, Text.assemble(f"{column.kind.value}: {column.meaning}", also))
    console.print(table, "")
    console.print(
        "One row per sequence, or one row per token with sequence_id and position. Columns of other names are mapped "
        "with --column; any other scalar column can be named with --by."
    )


def _others(name: str, aliases: Mapping[str, str]) -> list[str]:
    return sorted(alias for alias, canonical in aliases.items() if canonical == name)


def _table(console: Console, title: str, *headings: str) -> Table:
    console.print(Text(title, style="bold"))
    table = ruled_table(console)
    for index, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=index == 0)
    return table
