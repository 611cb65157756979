"""The page of a verdict."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from mismatchctl.api.gate.power import SampleSizePlan
from mismatchctl.api.gate.verdict import (
    FIRST_BASELINE_HEADLINE,
    Check,
    Verdict,
    check_statement,
    count_outcomes,
    describe_basis,
    describe_k3_parts,
    group_by_rule,
    is_first_baseline,
    outcome_label,
    select_checks,
    verdict_headline,
)
from mismatchctl.core.formatting import escape_terminal, format_number
from mismatchctl.report.document import (
    TERMINAL_AND_PAGE,
    Card,
    ColumnHeader,
    DeferredSection,
    Document,
    DocumentPart,
    Facts,
    Figures,
    Headline,
    Note,
    Section,
    Table,
    TableColumns,
    add_heading,
)


def document(verdict: Verdict) -> Document:
    """Build the page of a verdict: what rose, what to do, and a section per rule and run with a card per check."""
    headline = FIRST_BASELINE_HEADLINE if is_first_baseline(verdict) else verdict_headline(verdict)
    doc = Document(Headline(headline, level=verdict.outcome, subtitle="gate"))
    doc.page_title = lambda: headline[:1].upper() + headline[1:]
    several = len({check.run for check in verdict.checks}) > 1
    grown = [
        Note(f"{f'{escape_terminal(run)}: ' if several else ''}K3 {growth.text}")
        for run, growth in verdict.growth.items()
        if growth.changed
    ]
    notes = (Note(escape_terminal(note), "alarm") for note in verdict.notes)
    doc.add(DeferredSection(lambda: _answer(verdict)))
    doc.add(Section("Notes", "gate-notes", heading=False).add(*notes, *grown))
    for place, ((run, rule), checks) in enumerate(group_by_rule(verdict.checks)):
        shown, hidden = select_checks(checks)
        section = Section(escape_terminal(rule), f"gate-{place}", note=escape_terminal(run) if several else "").add(
            *map(_check_card, shown)
        )
        if hidden:
            section.add(Note(f"and {hidden} more: {count_outcomes(checks)} in all"))
        doc.add(section)
    return doc


def _answer(verdict: Verdict) -> Iterator[DocumentPart]:
    """Yield what to do, the values next to the baseline, and the parts of K3 that rose."""
    from mismatchctl.report.figures.bars import parts_figure, verdict_figure  # slow import, only needed for HTML

    action = advise_next(verdict)
    yield Section("", "what-to-do").add(Facts(list(add_heading("what to do", action))))
    risen = [check for check in verdict.checks if any(part.rise is not None for part in check.parts)]
    parts = [parts_figure(check, f"parts-{place}") for place, check in enumerate(risen[:1])]
    yield Figures([verdict_figure(verdict.checks, "checks"), *parts])


def advise_next(verdict: Verdict) -> list[str]:
    """Return what to do after a verdict, most useful first."""
    failed = [check for check in verdict.checks if check.outcome == "failed"]
    if not failed:
        doubt = any(check.outcome == "undecided" for check in verdict.checks)
        return ["Record more prompts, or plan the number with mismatchctl gate --plan."] if doubt else []
    risen = {part.name for check in failed for part in check.parts if part.interval and part.interval[0] > 0}
    texts = []
    if risen == {"tail"}:
        texts.append("Only rare tokens rose: look at MoE routing and at the tail of the distribution first.")
    elif risen:
        texts.append("Typical tokens rose: look for a changed dtype, kernel or sampling setting first.")
    compare = (
        f"mismatchctl compare {shlex.quote(verdict.baseline)} DUMP" if verdict.baseline else "mismatchctl diagnose DUMP"
    )
    texts.append(f"See what changed: {escape_terminal(compare)}")
    texts.append(
        "If the change is intended, accept it as the new baseline: mismatchctl gate DUMP --save-baseline FILE --accept"
    )
    return texts


def _check_card(check: Check) -> Card:
    below = filter(None, (escape_terminal(check.reason), describe_k3_parts(check), describe_basis(check)))
    return Card(outcome_label(check), check.outcome, check_statement(check), lines=[("", line, 0) for line in below])


def plan_document(needs: Sequence[SampleSizePlan]) -> Document:
    """Build the page of the sample sizes that a gate needs."""
    doc = Document(Headline(""))
    if not needs:
        note = Note("No rule limits a rise of a mean, so no number of sequences can be planned.")
        return doc.add(Section("", "plan").add(note))
    columns: TableColumns[SampleSizePlan] = (
        ("run and metric", lambda need: f"{need.run} {need.metric}"),
        (ColumnHeader("rise", drop=0), lambda need: f"+{format_number(need.regression, 'fraction')}"),
        (ColumnHeader("needs sequences", drop=0), lambda need: format_number(need.sequences, "sequences")),
        (ColumnHeader("needs clusters", drop=1), lambda need: format_number(need.clusters, "clusters")),
        (ColumnHeader("has clusters", drop=2), lambda need: format_number(need.have, "clusters")),
        (
            ColumnHeader("compared", numeric=False, drop=3),
            lambda need: "the same clusters" if need.paired else "with others",
        ),
    )
    section = Section("", "plan")
    section.add(Table.of("Data on each side to find a rise in 4 of 5 dumps", needs, columns, reach=TERMINAL_AND_PAGE))
    for need in needs:
        if need.status != "ok":
            section.add(Note(f"{need.run} {need.metric}: {need.status}", "alarm"))
    if any("allows" in need.status for need in needs):
        rule, rise = f"{needs[0].metric}:increase={50 * needs[0].regression:g}%", f"{100 * needs[0].regression:g}%"
        section.add(Note(f"To plan for a rise of {rise}, name a smaller tolerance: --rule {rule} --plan {rise}"))
    return doc.add(section)
