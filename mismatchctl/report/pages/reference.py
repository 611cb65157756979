"""Pages of `metrics`, `presets` and `schema`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mismatchctl.core.formatting import list_names
from mismatchctl.core.schema import COLUMNS, list_aliases
from mismatchctl.corrections.presets import TRAIT_TITLES, Preset, list_traits
from mismatchctl.frameworks.adapter import LoggedMetric
from mismatchctl.frameworks.glossary import FACT_FIELDS, Sections, describe_names, metric_title
from mismatchctl.report import document as doc

_SHOWN_NAMES, _SHOWN_TRAITS = 2, 3
_NAMES_LENGTH, _NAMES_PER_FRAMEWORK, _SHOWN_COLUMNS = 28, 44, 14


def metrics_document(found: Sections) -> doc.Document:
    heads = ("key", "unit", "definition")
    return _make_document(
        *(_table(title, heads, ((one.key, one.unit, one.definition) for one in own)) for title, own in found.items())
    )


def metrics_screen(found: Sections) -> doc.Document:
    rows = [
        (title, list_names([one.key for one in every], _NAMES_LENGTH if place else 4 * _NAMES_LENGTH))
        for place, (title, every) in enumerate(found.items())
    ]
    title = f"{sum(map(len, found.values()))} metrics; you can also look up a name that a framework logs"
    return _make_screen(title, rows, "mismatchctl metrics k3")


def presets_screen(found: Mapping[str, Preset]) -> doc.Document:
    names: dict[str, list[str]] = {}
    for name, preset in found.items():
        if not preset.alias_of:
            names.setdefault(preset.framework or "general", []).append(name)
    rows = [(framework, list_names(own, _NAMES_PER_FRAMEWORK)) for framework, own in names.items()]
    title = f"{len(found)} presets of {len(names) - 1} frameworks; use one with: analyze DUMPS -c NAME"
    return _make_screen(title, rows, "mismatchctl presets show token_tis")


def contract_screen(aliases: Mapping[str, str]) -> doc.Document:
    ordered = sorted(COLUMNS, key=lambda column: not column.required)
    rows = [
        (f"{column.name}{' *' * column.required}", column.meaning.partition(". ")[0])
        for column in ordered[:_SHOWN_COLUMNS]
    ]
    rest = [column.name for column in COLUMNS if column in ordered[_SHOWN_COLUMNS:]]
    rows.append(("optional", list_names(rest, _NAMES_PER_FRAMEWORK)))
    known = sum(len(list_aliases(column.name, aliases)) for column in COLUMNS)
    required = " and ".join(column.name for column in COLUMNS if column.required)
    title = f"a dump needs {required}, marked with * below; mismatchctl also knows {known} other column names"
    return _make_screen(title, rows, "mismatchctl schema --check DUMPS")


def _make_screen(title: str, rows: Sequence[tuple[str, str]], following: str) -> doc.Document:
    screen = doc.Document(doc.Headline(title)).add(doc.Section("", "list").add(doc.Facts(rows)))
    screen.commands = [("Details", "-v"), ("Next", following)]
    return screen


def metric_document(
    found: Sections, meanings: Mapping[LoggedMetric, Sequence[str]], *, whole: bool = True
) -> doc.Document:
    """Build the page of one metric, or of a name in a framework's log. Without `whole`, cut long lists."""
    made = doc.Document(doc.Headline(""))
    made.commands = [*([] if whole else [("Details", "-v")]), ("Next", "mismatchctl analyze DUMPS")]
    for about, every in found.items():
        for one in every:
            rows = [*((fact, getattr(one, fact)) for fact in FACT_FIELDS), ("about", about)]
            for name, lines in describe_names(one).items():
                rows += doc.add_heading(name, lines if whole else lines[:_SHOWN_NAMES])
            made.add(doc.Section(f"{one.key}: {metric_title(one)}", one.key).add(doc.Facts(rows)))
    for meaning, frameworks in meanings.items():
        does = "documented, not logged," if meaning.logged_as else "logged"
        does = f"until {meaning.until} logged" if meaning.until else does
        facts = ("quantity", "over", "reduction", "basis", "when")
        section = doc.Section(f"{meaning.name}: {does} by {', '.join(frameworks)}", meaning.name)
        made.add(section.add(doc.Facts([(fact, getattr(meaning, fact) or "always") for fact in facts])))
    return made


def presets_document(found: Mapping[str, Preset]) -> doc.Document:
    rows = []
    for name, preset in found.items():
        what = f"another name of {preset.alias_of}" if preset.alias_of else preset.correction.about
        what += f" ({preset.documented})" if preset.documented else ""
        rows.append((name, f"{preset.framework} {preset.version}".strip() or "-", what))
    hint = "`mismatchctl presets show NAME` prints a preset as YAML, which you can edit and pass as --correction FILE."
    return _make_document(_table("Presets", ("name", "from", "what it does"), rows), doc.Note(hint))


def methods_document(found: Mapping[str, Preset]) -> doc.Document:
    name, *keys = TRAIT_TITLES
    groups = [(name, *keys[start : start + _SHOWN_TRAITS]) for start in range(0, len(keys), _SHOWN_TRAITS)]
    rows, title = list_traits(found), "Effect, cost and assumptions of each preset"
    made: list[doc.Table] = []
    for group in groups:
        values = [[row[key] for key in group] for row in rows]
        made.append(_table("" if made else title, [TRAIT_TITLES[key] for key in group], values))
    return _make_document(*made)


def frameworks_document(found: Sequence[Mapping[str, Any]], *, whole: bool = True) -> doc.Document:
    heads = ["framework", "newest", "presets", "logged names", *["versions, newest first", "files"] * whole]
    rows = [
        [row["name"], row["versions"][0], row["presets"], row["logged_names"]]
        + [", ".join(row["versions"]), ", ".join(row["files"])] * whole
        for row in found
    ]
    page = _make_document(_table("", heads, rows))
    page.headline = doc.Headline(f"{len(found)} frameworks")
    page.commands = [*([] if whole else [("Details", "-v")]), ("Next", "mismatchctl presets")]
    return page


def contract_document(aliases: Mapping[str, str]) -> doc.Document:
    rows = []
    for column in COLUMNS:
        also = ", ".join(list_aliases(column.name, aliases))
        rows.append((f"{column.name}{' *' * column.required}", f"{column.kind.value}: {column.meaning}"))
        rows += [("", f"also: {also}")] if also else []
    hint = (
        "A dump has one row per sequence, or one row per token with sequence_id and position. To read a column with "
        "another name, use --column. To split the metrics by another column, use --by."
    )
    return _make_document(_table("The dump format (* required)", ("column", "contents"), rows), doc.Note(hint))


def _table(title: str, heads: Iterable[str], rows: Iterable[Iterable[object]]) -> doc.Table:
    columns = [doc.Column(text, kind="text") for text in heads]
    cells = [[column.cell(str(text)) for column, text in zip(columns, row, strict=True)] for row in rows]
    return doc.Table("", columns, cells, title=title, prose=True, reach=doc.TERMINAL_AND_PAGE)


def _make_document(*parts: doc.Table | doc.Note) -> doc.Document:
    return doc.Document(doc.Headline("")).add(doc.Section("", "list").add(*parts))
