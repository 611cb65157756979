"""First screen and page of a verdict."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from mismatchctl.api.gate.power import SampleSizePlan
from mismatchctl.api.gate.verdict import (
    COVERAGE_RULE,
    FIRST_BASELINE_HEADLINE,
    FIRST_BASELINE_REASON,
    Check,
    Verdict,
    check_name,
    check_statement,
    count_outcomes,
    describe_basis,
    describe_data,
    describe_k3_parts,
    format_apart,
    group_by_rule,
    is_first_baseline,
    outcome_label,
    select_checks,
    verdict_answer,
    verdict_headline,
)
from mismatchctl.core.formatting import (
    escape_terminal,
    format_command,
    format_count,
    format_heavy_tail,
    format_number,
)
from mismatchctl.report.document import (
    EVERYWHERE,
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
from mismatchctl.results.summary import Status

MAX_CHECKS, MAX_REASONS = 8, 3
_REASON_LENGTH = 150
_OUTCOMES = ("failed", "undecided", "passed")
_STATUSES: Mapping[str, Status] = {"passed": "OK", "undecided": "CHECK", "failed": "FAIL"}


def gate_screen(verdict: Verdict, paths: Sequence[str], *, page: Document | None = None, saved: str = "") -> Document:
    """Build the first screen of a verdict, or the whole `page` of it below the answer.

    `saved` is the path of the new baseline if the dump was accepted regardless of the verdict.
    """
    answer = verdict_answer(verdict)
    answer = f"undecided: {answer}" if verdict.outcome == "undecided" else answer
    if saved and is_first_baseline(verdict):
        screen = Document(Headline(FIRST_BASELINE_HEADLINE, status="OK"))
    else:
        screen = Document(Headline(answer, status=_STATUSES[verdict.outcome]))
    if page is None:
        screen.add(Section("", "checks").add(*_verdict_parts(verdict)))
    else:
        screen.sections += page.sections
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Next", _next_command(verdict, paths, saved))]
    return screen


def _verdict_parts(verdict: Verdict) -> Iterator[DocumentPart]:
    """Yield the table of checks, the reasons of those that did not pass, notes, and the data."""
    order = sorted(verdict.checks, key=lambda check: _OUTCOMES.index(check.outcome))
    several = len({check.run for check in verdict.checks}) > 1
    columns: TableColumns[Check] = (
        ("check", lambda check: f"{f'{escape_terminal(check.run)}: ' if several else ''}{check_name(check)}"),
        (ColumnHeader("outcome", numeric=False, drop=0), outcome_label),
        (ColumnHeader("value", drop=0), lambda check: _format_pair(check)[0]),
        (ColumnHeader("limit", drop=1), lambda check: _format_pair(check)[1]),
        (ColumnHeader("baseline", drop=2), lambda check: format_number(check.baseline, check.unit)),
    )
    yield Table.of("", order[:MAX_CHECKS], columns, reach=TERMINAL_AND_PAGE)
    if hidden := order[MAX_CHECKS:]:
        yield Note(f"and {len(hidden)} more: {count_outcomes(verdict.checks)} in all")
    rose = [describe_k3_parts(check, intervals=False) for check in order if check.outcome == "failed" and check.parts]
    notes = [*rose[:1], *_list_reasons(verdict, order), *map(escape_terminal, verdict.notes)]
    decided = [check for check in order if check.outcome != "undecided" and check.covers is not None]
    for check in sorted(decided, key=lambda check: check.covers or 0)[:1]:
        others = f" (and {format_count(len(decided) - 1, 'more check')})" if len(decided) > 1 else ""
        notes.append(f"{check_name(check)}{others}: {format_heavy_tail(check.covers)}")
    for note in notes[:MAX_REASONS]:
        yield Note(note if len(note) <= _REASON_LENGTH else f"{note[: _REASON_LENGTH - 1].rstrip()}…", "alarm")
    if len(notes) > MAX_REASONS:
        yield Note(f"and {format_count(len(notes) - MAX_REASONS, 'more note')}")
    if first := next((check for check in verdict.checks if check.sequences), None):
        yield Facts([("data", describe_data(first))])


def _list_reasons(verdict: Verdict, order: Sequence[Check]) -> Iterator[str]:
    """Yield the reasons of checks, without the sentence that the headline has."""
    answer = verdict_answer(verdict)
    for check in order:
        reason = escape_terminal(check.reason)
        first, _, rest = reason.partition(". ")
        if reason == FIRST_BASELINE_REASON:
            continue
        if first and first in answer:
            if rest:
                yield rest
        elif reason:
            yield f"{check_name(check)}: {reason}"
    yield from dict.fromkeys(escape_terminal(check.meaning) for check in order if check.meaning)


def _format_pair(check: Check) -> tuple[str, str]:
    """Format value and limit of a check with enough digits to show their order."""
    if check.value is not None and check.limit is not None:
        return format_apart(check.value, check.limit, check.unit)
    return format_number(check.value, check.unit), format_number(check.limit, check.unit)


def _next_command(verdict: Verdict, paths: Sequence[str], saved: str) -> str:
    if verdict.outcome == "failed":
        return format_command("diagnose", paths)
    if saved:
        return f"mismatchctl gate NEXT_DUMP --baseline {shlex.quote(escape_terminal(saved))}"
    if verdict.baseline is None:
        return format_command("gate", paths, "--save-baseline baseline.json --accept")
    if verdict.outcome == "passed":
        return format_command("analyze", paths)
    against = f"--baseline {shlex.quote(escape_terminal(verdict.baseline))}"
    noisy = all(check.rule != COVERAGE_RULE for check in verdict.checks if check.outcome == "undecided")
    return format_command("gate", paths, f"{against} --plan 25%") if noisy else format_command("diagnose", paths)


def document(verdict: Verdict) -> Document:
    """Build the page of a verdict: what to do, what rose, and a card per check."""
    headline, level = verdict_headline(verdict), "passed" if is_first_baseline(verdict) else verdict.outcome
    doc = Document(Headline(headline, level=level, subtitle="gate"))
    several = len({check.run for check in verdict.checks}) > 1
    doc.add(DeferredSection(lambda: _answer(verdict)))
    notes = Section("", "gate-notes").add(*(Note(escape_terminal(note), "alarm") for note in verdict.notes))
    for run, growth in verdict.growth.items():
        if growth.changed:
            notes.add(Note(f"{f'{escape_terminal(run)}: ' if several else ''}K3 {growth.text}"))
    doc.add(notes)
    for place, ((run, rule), checks) in enumerate(group_by_rule(verdict.checks)):
        shown, hidden = select_checks(checks)
        section = Section(escape_terminal(rule), f"gate-{place}", note=escape_terminal(run) if several else "")
        section.add(*map(_check_card, shown))
        section.add(Note(f"and {hidden} more: {count_outcomes(checks)} in all") if hidden else None)
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
        doubt = any(outcome_label(check) == "undecided" for check in verdict.checks)
        return ["Record more prompts, or plan the number with mismatchctl gate --plan."] if doubt else []
    risen = {part.name for check in failed for part in check.parts if part.interval and part.interval[0] > 0}
    texts = []
    if risen == {"tail"}:
        texts.append("Only rare tokens rose: look at MoE routing and at the tail of the distribution first.")
    elif risen:
        texts.append("Typical tokens rose: look for a changed dtype, kernel or sampling setting first.")
    compare = f"compare {shlex.quote(verdict.baseline)} DUMP" if verdict.baseline else "diagnose DUMP"
    return [
        *texts,
        f"See what changed: mismatchctl {escape_terminal(compare)}",
        "If the change is intended, accept it as the new baseline: mismatchctl gate DUMP --save-baseline FILE --accept",
    ]


def _check_card(check: Check) -> Card:
    below = filter(None, (escape_terminal(check.reason), describe_k3_parts(check), describe_basis(check)))
    mark = outcome_label(check)
    level = "passed" if mark == "recorded" else mark
    return Card(mark, level, check_statement(check), lines=[("", line) for line in below])


def plan_document(needs: Sequence[SampleSizePlan]) -> Document:
    """Build the page of the sample sizes that a gate needs."""
    section = Section("", "plan")
    if not needs:
        section.add(Note("No rule limits a rise of a mean, so no number of sequences can be planned."))
        return Document(Headline("")).add(section)
    columns: TableColumns[SampleSizePlan] = (
        ("run and metric", lambda need: f"{need.run} {need.metric}"),
        (ColumnHeader("rise", drop=0), lambda need: f"+{format_number(need.regression, 'fraction')}"),
        (ColumnHeader("needs sequences", drop=0), lambda need: format_number(need.sequences, "sequences")),
        (ColumnHeader("needs clusters", drop=1), lambda need: format_number(need.clusters, "clusters")),
        (ColumnHeader("has clusters", drop=2), lambda need: format_number(need.have, "clusters")),
        (ColumnHeader("compared", numeric=False, drop=3),
         lambda need: "the same clusters" if need.paired else "with others"),
    )  # fmt: skip
    section.add(Table.of("Data on each side to find a rise in 4 of 5 dumps", needs, columns, reach=EVERYWHERE))
    section.add(*(Note(f"{need.run} {need.metric}: {need.status}", "alarm") for need in needs if need.status != "ok"))
    if any("allows" in need.status for need in needs):
        rule, rise = f"{needs[0].metric}:increase={50 * needs[0].regression:g}%", f"{100 * needs[0].regression:g}%"
        section.add(Note(f"To plan for a rise of {rise}, name a smaller tolerance: --rule {rule} --plan {rise}"))
    return Document(Headline("")).add(section)
