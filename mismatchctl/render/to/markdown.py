"""A Document as Markdown, for a pull request or the summary of a CI run: what reaches everywhere, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from mismatchctl.escape import markdown as safe
from mismatchctl.render.document import BRIEF, Answers, Card, Document, Facts, Note, Part, Section, Table, Tiles

SIGNS = {
    "bad": "🔴", "failed": "🔴", "high": "🔴", "error": "🔴", "fair": "🟡", "medium": "🟡", "undecided": "🟡",
    "alarm": "🟡", "warning": "🟡", "good": "🟢", "passed": "🟢", "calm": "🟢", "advice": "🟢",
}  # fmt: skip
MOST_ROWS = 20


def markdown(document: Document) -> str:
    """The document; ends in a newline."""
    head = document.headline
    facts = f": {safe(', '.join(head.facts))}" if head.facts else ""
    blocks = [f"### mismatchctl{f' {head.what}' if head.what else ''}: {safe(head.title)}{facts}"]
    for section in document.sections:
        blocks += _part(section, 3) if section.reach <= BRIEF else ()
    return "\n\n".join(blocks) + "\n"


def _section(section: Section, level: int) -> Iterator[str]:
    shown = (part for part in section.parts if part.reach <= BRIEF)
    blocks = [block for kind, alike in groupby(shown, type) for block in _alike(kind, alike, level)]
    if not blocks:
        return
    if section.heading and section.title:
        note = f" ({safe(section.note)})" if section.note else ""
        yield f"{'#' * min(level, 6)} {safe(section.title)}{note}"
    yield from blocks


def _alike(kind: type[Part], parts: Iterable[Part], level: int) -> Iterator[str]:
    """Parts of a kind that follow each other: cards, and notes, are one list."""
    if kind in (Card, Note):
        yield "\n".join(map(_item, parts))
    else:
        yield from (block for part in parts for block in _part(part, level))


def _part(part: Part, level: int) -> Iterator[str]:
    if isinstance(part, Section):
        yield from _section(part, level + 1)
    elif isinstance(part, Answers):
        signs = (SIGNS.get(line.level, "⚪") for line in part.lines)
        rows = (f"- {sign} **{line.question}** {safe(line.text)}" for sign, line in zip(signs, part.lines, strict=True))
        yield "\n".join(rows)
    elif isinstance(part, Table):
        yield _table(part)
    elif isinstance(part, Facts):
        yield "\n".join(f"- **{safe(name)}** {safe(text)}" for name, text in part.rows)
    elif isinstance(part, Tiles):
        yield "\n".join(f"- {safe(tile.title)}: {safe(tile.value)}" for tile in part.tiles)


def _item(part: Part) -> str:
    if isinstance(part, Note):
        return f"- {safe(part.text)}"
    assert isinstance(part, Card)
    sign = SIGNS.get(part.level, "⚪")
    said = f": {safe(part.text)}" if part.text else ""
    below = "; ".join(f"{heading} {text}".strip() for heading, text, _ in part.lines)
    return f"- {sign} **{safe(part.mark)}** {safe(part.title)}{said}" + (f" ({safe(below)})" if below else "")


def _table(table: Table) -> str:
    drawn = {place for row in table.rows[:1] for place, cell in enumerate(row) if cell.line}
    chosen = [
        place for place, head in enumerate(table.heads) if place == 0 or (head.drop is not None and place not in drawn)
    ]
    heads = [safe((table.heads[place].short or table.heads[place].text).replace("\n", " ")) for place in chosen]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join('---:' if table.heads[p].numeric else '---' for p in chosen)}|"]
    lines += [f"| {' | '.join(safe(row[place].text) for place in chosen)} |" for row in table.rows[:MOST_ROWS]]
    if len(table.rows) > MOST_ROWS:
        lines.append(f"| and {len(table.rows) - MOST_ROWS} more |{' |' * (len(chosen) - 1)}")
    title = f"**{safe(table.title)}**\n\n" if table.title else ""
    return title + "\n".join(lines)
