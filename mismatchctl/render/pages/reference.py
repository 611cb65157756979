"""What `metrics`, `presets` and `schema` show: definitions, corrections, frameworks, the contract."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mismatchctl.contract import COLUMNS, aliases_of
from mismatchctl.correction.presets import Preset
from mismatchctl.correction.traits import TITLES, traits_of
from mismatchctl.frameworks.framework import Meaning
from mismatchctl.frameworks.glossary import FACTS, Sections, name_lines, title_of
from mismatchctl.numbers import DASH
from mismatchctl.render.document import USUAL, Document, Facts, Head, Headline, Note, Section, Table, under
from mismatchctl.render.tables import words


def metrics(found: Sections) -> Document:
    """Metrics in brief: key, unit, definition."""
    tables = (
        _listed(title, ("key", "unit", "definition"), ((one.key, one.unit, one.definition) for one in every))
        for title, every in found.items()
    )
    return Document(Headline("")).add(Section("", "metrics").add(*tables))


def metric(found: Sections, meanings: Mapping[Meaning, Sequence[str]]) -> Document:
    """Everything about metrics of one key, and about a name that frameworks log."""
    made = Document(Headline(""))
    for about, every in found.items():
        for one in every:
            rows = [*((fact, getattr(one, fact)) for fact in FACTS), ("about", about)]
            rows += [line for name, lines in name_lines(one).items() for line in under(name, lines)]
            made.add(Section(f"{one.key}: {title_of(one)}", one.key).add(Facts(rows)))
    for meaning, frameworks in meanings.items():
        does = "documented, not logged," if meaning.logged_as else "logged"
        facts = ("quantity", "over", "reduction", "basis", "when")
        section = Section(f"{meaning.name}: {does} by {', '.join(frameworks)}", meaning.name)
        made.add(section.add(Facts([(fact, getattr(meaning, fact) or "always") for fact in facts])))
    return made


def presets(found: Mapping[str, Preset]) -> Document:
    """Presets with what each does."""
    rows = []
    for name, preset in found.items():
        what = f"another name of {preset.alias_of}" if preset.alias_of else preset.correction.about
        what += f" ({preset.documented})" if preset.documented else ""
        rows.append((name, f"{preset.framework} {preset.version}".strip() or "-", what))
    hint = "`mismatchctl presets show NAME` prints one as YAML, to edit and to name with --correction FILE."
    return _one(_listed("Presets", ("name", "from", "what it does"), rows), Note(hint))


def methods(found: Mapping[str, Preset]) -> Document:
    """What each preset does, costs and assumes, side by side."""
    rows = (asdict(row).values() for row in traits_of(found))
    return _one(_listed("What each preset does, costs and assumes", TITLES.values(), rows))


def frameworks(found: Sequence[Mapping[str, Any]]) -> Document:
    """What is known of each framework."""
    rows = (
        (row["name"], ", ".join(row["versions"]), row["presets"], row["logged_names"], ", ".join(row["files"]))
        for row in found
    )
    return _one(_listed("", ("framework", "versions, newest first", "presets", "logged names", "files"), rows))


def contract(aliases: Mapping[str, str]) -> Document:
    """The dump contract, with the other names under which columns are known."""
    rows = []
    for column in COLUMNS:
        also = ", ".join(aliases_of(column.name, aliases))
        rows.append((f"{column.name}{' *' if column.required else ''}", f"{column.kind.value}: {column.meaning}"))
        rows += [("", f"also: {also}")] if also else []
    hint = (
        "One row per sequence, or one row per token with sequence_id and position. Columns of other names are mapped "
        "with --column; any other scalar column can be named with --by."
    )
    return _one(_listed("The dump contract (* required)", ("column", "what it holds"), rows), Note(hint))


_ACROSS = {
    "preset": "preset", "framework": "framework", "rule": "rule", "source": "ratio of", "interval": "kept as it is",
    "outside": "outside it",
}  # fmt: skip


def across(method: str, rows: Sequence[Mapping[str, Any]], results: Mapping[str, Mapping[str, Any]]) -> Document:
    """The presets of a method, then what each does on dumps, run by run."""
    section = Section("", "across")
    section.add(
        _listed(f"{method} across frameworks", _ACROSS.values(), ([row[key] for key in _ACROSS] for row in rows))
    )
    section.add(
        *(Note(f"{row['preset']}: {', '.join(_flat(row['options'])) or 'of no framework'}") for row in rows), Note("")
    )
    for run, measured in results.items():
        done = {name: values for name, values in measured.items() if not isinstance(values, str)}
        keys = list(dict.fromkeys(key for values in done.values() for key in values))
        columns: list[Any] = [("preset", lambda item: words(item[0], "name"))]
        columns += [(Head(key, drop=0), lambda item, key=key: _six_digits(item[1].get(key))) for key in keys]
        table = Table.of(f"{run}: what differs in the result", done.items(), columns, reach=USUAL)
        section.add(table, *(Note(f"{name}: not applied: {why}") for name, why in measured.items() if name not in done))
    return Document(Headline("")).add(section)


def _six_digits(value: float | None) -> str:
    """Enough to tell presets apart."""
    return DASH if value is None else f"{value:.6g}"


def _flat(options: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Options as `block.key=value`."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={value}"


def _listed(title: str, heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Sentences under headings."""
    table = Table("", [Head(text, numeric=False) for text in heads], title=title, prose=True, reach=USUAL)
    table.rows = [[words(str(text)) for text in row] for row in rows]
    return table


def _one(*parts: Table | Note) -> Document:
    return Document(Headline("")).add(Section("", "list").add(*parts))
