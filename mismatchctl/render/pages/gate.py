"""A verdict as a page: the outcome, then every rule with what was found and what that rests on."""

from __future__ import annotations

from collections.abc import Sequence

from mismatchctl.gate import Check, Need, Verdict
from mismatchctl.gate.words import anatomy, basis, by_rule, chosen, headline, statement, tally
from mismatchctl.numbers import DASH, number
from mismatchctl.render.document import USUAL, Card, Columns, Document, Head, Headline, Note, Section, Table
from mismatchctl.render.text import clean


def document(verdict: Verdict) -> Document:
    """The page of a verdict: a section per rule and run, a card per check."""
    made = Document(Headline(headline(verdict), level=verdict.outcome, what="gate"))
    several = len({check.run for check in verdict.checks}) > 1
    grown = [
        Note(f"{f'{clean(run)}: ' if several else ''}K3 {growth.text}")
        for run, growth in verdict.growth.items()
        if growth.changed
    ]
    notes = (Note(clean(note), "alarm") for note in verdict.notes)
    made.add(Section("Notes", "gate-notes", heading=False).add(*notes, *grown))
    for place, ((run, rule), checks) in enumerate(by_rule(verdict.checks)):
        shown, hidden = chosen(checks)
        section = Section(clean(rule), f"gate-{place}", note=clean(run) if several else "").add(*map(_card, shown))
        if hidden:
            section.add(Note(f"and {hidden} more: {tally(checks)} in all"))
        made.add(section)
    return made


def _card(check: Check) -> Card:
    below = filter(None, (clean(check.reason), anatomy(check), basis(check)))
    return Card(check.outcome, check.outcome, statement(check), lines=[("", line, 0) for line in below])


def plan_document(needs: Sequence[Need]) -> Document:
    """How much data finds a regression."""
    made = Document(Headline(""))
    if not needs:
        note = Note("No rule bounds a mean from above: there is nothing to plan.")
        return made.add(Section("", "plan").add(note))
    columns: Columns[Need] = (
        ("run and metric", lambda need: f"{need.run} {need.metric}"),
        (Head("rise", drop=0), lambda need: f"+{number(need.regression, 'fraction')}"),
        (Head("needs sequences", drop=0), lambda need: number(need.sequences, "sequences")),
        (Head("needs clusters", drop=1), lambda need: number(need.clusters, "clusters")),
        (Head("has clusters", drop=2), lambda need: number(need.have, "clusters")),
        (Head("compared", numeric=False, drop=3), lambda need: "the same clusters" if need.paired else "with others"),
    )
    section = Section("", "plan")
    section.add(Table.of("Data on each side to find a rise in four of five dumps", needs, columns, reach=USUAL))
    if any(need.clusters is None for need in needs):
        section.add(Note(f"{DASH}: no number is enough, as where the rule allows that much"))
    return made.add(section)
