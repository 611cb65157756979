"""Pages of `metrics`, `presets` and `schema`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mismatchctl.core.schema import COLUMNS, list_aliases
from mismatchctl.corrections.presets import TRAIT_TITLES, Preset, list_traits
from mismatchctl.frameworks.adapter import Meaning
from mismatchctl.frameworks.glossary import FACT_FIELDS, Sections, describe_names, metric_title
from mismatchctl.report.document import (
    TERMINAL_AND_PAGE,
    ColumnHeader,
    Document,
    Facts,
    Headline,
    Note,
    Section,
    Table,
    add_heading,
)
from mismatchctl.report.tables import text_cell


def metrics_document(found: Sections) -> Document:
    """Build the list of metrics."""
    tables = (
        _plain_table(title, ("key", "unit", "definition"), ((one.key, one.unit, one.definition) for one in every))
        for title, every in found.items()
    )
    return Document(Headline("")).add(Section("", "metrics").add(*tables))


def metric_document(found: Sections, meanings: Mapping[Meaning, Sequence[str]]) -> Document:
    """Build the page of one metric, or of a name that frameworks log."""
    doc = Document(Headline(""))
    for about, every in found.items():
        for one in every:
            rows = [*((fact, getattr(one, fact)) for fact in FACT_FIELDS), ("about", about)]
            rows += [line for name, lines in describe_names(one).items() for line in add_heading(name, lines)]
            doc.add(Section(f"{one.key}: {metric_title(one)}", one.key).add(Facts(rows)))
    for meaning, frameworks in meanings.items():
        does = "documented, not logged," if meaning.logged_as else "logged"
        does = f"until {meaning.until} logged" if meaning.until else does
        facts = ("quantity", "over", "reduction", "basis", "when")
        section = Section(f"{meaning.name}: {does} by {', '.join(frameworks)}", meaning.name)
        doc.add(section.add(Facts([(fact, getattr(meaning, fact) or "always") for fact in facts])))
    return doc


def presets_document(found: Mapping[str, Preset]) -> Document:
    """Build the list of presets."""
    rows = []
    for name, preset in found.items():
        what = f"another name of {preset.alias_of}" if preset.alias_of else preset.correction.about
        what += f" ({preset.documented})" if preset.documented else ""
        rows.append((name, f"{preset.framework} {preset.version}".strip() or "-", what))
    hint = "`mismatchctl presets show NAME` prints one as YAML, to edit and to name with --correction FILE."
    return _make_document(_plain_table("Presets", ("name", "from", "what it does"), rows), Note(hint))


def methods_document(found: Mapping[str, Preset]) -> Document:
    """Build the table that compares the presets."""
    rows = (asdict(row).values() for row in list_traits(found))
    return _make_document(_plain_table("What each preset does, costs and assumes", TRAIT_TITLES.values(), rows))


def frameworks_document(found: Sequence[Mapping[str, Any]]) -> Document:
    """Build the table of frameworks."""
    rows = (
        (row["name"], ", ".join(row["versions"]), row["presets"], row["logged_names"], ", ".join(row["files"]))
        for row in found
    )
    return _make_document(
        _plain_table("", ("framework", "versions, newest first", "presets", "logged names", "files"), rows)
    )


def contract_document(aliases: Mapping[str, str]) -> Document:
    """Build the table of the dump's columns and their aliases."""
    rows = []
    for column in COLUMNS:
        also = ", ".join(list_aliases(column.name, aliases))
        rows.append((f"{column.name}{' *' if column.required else ''}", f"{column.kind.value}: {column.meaning}"))
        rows += [("", f"also: {also}")] if also else []
    hint = (
        "One row per sequence, or one row per token with sequence_id and position. Columns of other names are mapped "
        "with --column; any other scalar column can be named with --by."
    )
    return _make_document(_plain_table("The dump contract (* required)", ("column", "what it holds"), rows), Note(hint))


def _plain_table(title: str, heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table of strings."""
    table = Table(
        "", [ColumnHeader(text, numeric=False) for text in heads], title=title, prose=True, reach=TERMINAL_AND_PAGE
    )
    table.rows = [[text_cell(str(text)) for text in row] for row in rows]
    return table


def _make_document(*parts: Table | Note) -> Document:
    return Document(Headline("")).add(Section("", "list").add(*parts))
