"""Writers for CI systems: Markdown, JUnit XML and GitHub annotations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from xml.etree import ElementTree as Xml

from mismatchctl.api.gate import verdict as api
from mismatchctl.core.formatting import escape_github, escape_terminal
from mismatchctl.core.formatting import escape_markdown as escape
from mismatchctl.report import document as doc
from mismatchctl.report.tables import ERRORS

LEVEL_SIGNS = {
    "bad": "🔴", "failed": "🔴", "high": "🔴", "error": "🔴", "fair": "🟡", "medium": "🟡", "undecided": "🟡",
    "alarm": "🟡", "warning": "🟡", "good": "🟢", "passed": "🟢", "calm": "🟢",
}  # fmt: skip
MAX_MARKDOWN_ROWS = 20


def render_markdown(document: doc.Document) -> str:
    head = document.headline
    blocks = [f"### mismatchctl{f' {head.subtitle}' if head.subtitle else ''}: {escape(head.title)}"]
    blocks += [escape(", ".join(head.facts))] if head.facts else []
    blocks += _render_parts(document.sections, 4)
    blocks += [f"{ERRORS}."] if any("±" in block for block in blocks) else []
    return "\n\n".join(blocks) + "\n"


def _render_parts(parts: Iterable[doc.DocumentPart], level: int) -> Iterator[str]:
    """Render parts as Markdown. Consecutive cards become one list, and so do consecutive notes."""
    for kind, alike in groupby((part for part in parts if doc.is_shown(part, doc.EVERYWHERE)), type):
        if kind in (doc.Card, doc.Note):
            yield "\n".join(map(_render_item, alike))
        else:
            yield from (block for part in alike for block in _render_part(part, level))


def _render_part(part: doc.DocumentPart, level: int) -> Iterator[str]:
    if isinstance(part, doc.Section):
        if part.title:
            note = f" ({escape(part.note)})" if part.note else ""
            yield f"{'#' * min(level, 6)} {escape(part.title)}{note}"
        yield from _render_parts(part.parts, level + 1)
    elif isinstance(part, doc.Answers):
        yield "\n".join(
            f"- {LEVEL_SIGNS.get(line.level, '⚪')} **{line.question}** {escape(line.text)}" for line in part.lines
        )
    elif isinstance(part, doc.Table):
        yield _render_table(part)
    elif isinstance(part, doc.Facts):
        yield "\n".join(f"- **{escape(name)}** {escape(text)}" for name, text in part.rows)


def _render_item(part: doc.DocumentPart) -> str:
    if isinstance(part, doc.Note):
        return f"- {escape(part.text)}"
    assert isinstance(part, doc.Card)
    sign = LEVEL_SIGNS.get(part.level, "⚪")
    text = f": {escape(part.text)}" if part.text else ""
    below = "; ".join(f"{heading} {text}".strip() for heading, text in part.lines)
    return f"- {sign} **{escape(part.mark)}** {escape(part.title)}{text}" + (f" ({escape(below)})" if below else "")


def _render_table(table: doc.Table) -> str:
    drawn = {place for row in table.rows[:1] for place, cell in enumerate(row) if cell.series}
    chosen = [
        place for place, head in enumerate(table.heads) if place == 0 or (head.drop is not None and place not in drawn)
    ]
    heads = [escape((table.heads[place].short or table.heads[place].text).replace("\n", " ")) for place in chosen]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join('---:' if table.heads[p].numeric else '---' for p in chosen)}|"]
    for row in table.rows[:MAX_MARKDOWN_ROWS]:
        lines.append(f"| {' | '.join(escape(row[place].text) for place in chosen)} |")
    if len(table.rows) > MAX_MARKDOWN_ROWS:
        lines.append(f"| and {len(table.rows) - MAX_MARKDOWN_ROWS} more |{' |' * (len(chosen) - 1)}")
    title = f"**{escape(table.title)}**\n\n" if table.title else ""
    return title + "\n".join(lines)


_JUNIT_ELEMENTS = {"failed": "failure", "undecided": "error"}
"""An undecided check becomes a JUnit `error`, because JUnit uses `error` for tests that could not run."""


def junit_xml(verdict: api.Verdict) -> bytes:
    """Return the verdict as JUnit XML: a test suite per run, and a test case per check."""
    root = Xml.Element("testsuites", {"name": "mismatchctl gate"} | _outcome_counts(verdict.checks))
    for run, found in groupby(sorted(verdict.checks, key=lambda check: check.run), key=lambda check: check.run):
        checks = list(found)
        suite = Xml.SubElement(root, "testsuite", {"name": escape_terminal(run)} | _outcome_counts(checks))
        for check in checks:
            classname, name = f"gate.{escape_terminal(run)}", escape_terminal(api.check_name(check))
            case = Xml.SubElement(suite, "testcase", {"classname": classname, "name": name, "time": "0"})
            basis = api.describe_basis(check)
            if kind := _JUNIT_ELEMENTS.get(api.outcome_label(check)):
                words = {"message": api.check_sentence(check), "type": check.outcome}
                Xml.SubElement(case, kind, words).text = basis
            else:
                Xml.SubElement(case, "system-out").text = f"{api.check_sentence(check)}\n{basis}"
    first = root.find("testsuite/testcase")
    if verdict.notes and first is not None:
        notes = "\n".join(f"warning: {escape_terminal(note)}" for note in verdict.notes)
        Xml.SubElement(first, "system-err").text = notes
    Xml.indent(root)
    return bytes(Xml.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _outcome_counts(checks: list[api.Check]) -> dict[str, str]:
    found = Counter(map(api.outcome_label, checks))
    return {
        "tests": str(len(checks)), "failures": str(found["failed"]), "errors": str(found["undecided"]), "skipped": "0",
        "time": "0",
    }  # fmt: skip


def workflow_commands(verdict: api.Verdict) -> list[str]:
    """Return GitHub errors for failed checks, and GitHub warnings for undecided checks and notes."""
    words = {"failed": "error", "undecided": "warning"}
    notes = [f"::warning title=mismatch::{escape_github(note)}" for note in verdict.notes]
    judged = [
        f"::{words[check.outcome]} title={escape_github(f'mismatch: {api.check_name(check)}', of_property=True)}::"
        f"{escape_github(f'{check.run}: {api.check_sentence(check)}')}"
        for _, checks in api.group_by_rule(verdict.checks)
        for check in api.select_checks(checks)[0]
        if api.outcome_label(check) in words
    ]
    return judged + notes
