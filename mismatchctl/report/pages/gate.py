"""First screen and page of a verdict."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from mismatchctl.api.gate import verdict as api
from mismatchctl.api.gate.power import SampleSizePlan
from mismatchctl.core.formatting import (
    escape_terminal,
    format_command,
    format_count,
    format_heavy_tail,
    format_number,
)
from mismatchctl.report import document as doc
from mismatchctl.results.summary import Status

MAX_CHECKS, MAX_REASONS = 8, 3
_REASON_LENGTH = 150
_OUTCOMES = ("failed", "undecided", "passed")
_STATUSES: Mapping[str, Status] = {"passed": "OK", "undecided": "CHECK", "failed": "FAIL"}


def gate_screen(
    verdict: api.Verdict, paths: Sequence[str], *, page: doc.Document | None = None, saved: str = ""
) -> doc.Document:
    """Build the first screen of a verdict, or the whole `page` of it below the answer.

    `saved` is the path of the new baseline if the dump was accepted regardless of the verdict.
    """
    answer = api.verdict_answer(verdict)
    answer = f"undecided: {answer}" if verdict.outcome == "undecided" else answer
    if saved and api.is_first_baseline(verdict):
        screen = doc.Document(doc.Headline(api.FIRST_BASELINE_HEADLINE, status="OK"))
    else:
        screen = doc.Document(doc.Headline(answer, status=_STATUSES[verdict.outcome]))
    if page is None:
        screen.add(doc.Section("", "checks").add(*_verdict_parts(verdict)))
    else:
        screen.sections += page.sections
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Next", _next_command(verdict, paths, saved))]
    return screen


def _verdict_parts(verdict: api.Verdict) -> Iterator[doc.DocumentPart]:
    order = sorted(verdict.checks, key=lambda check: _OUTCOMES.index(check.outcome))
    several = len({check.run for check in verdict.checks}) > 1
    columns: doc.TableColumns[api.Check] = (
        ("check", lambda check: f"{f'{escape_terminal(check.run)}: ' if several else ''}{api.check_name(check)}"),
        (doc.ColumnHeader("outcome", numeric=False, drop=0), api.outcome_label),
        (doc.ColumnHeader("value", drop=0), lambda check: _format_pair(check)[0]),
        (doc.ColumnHeader("limit", drop=1), lambda check: _format_pair(check)[1]),
        (doc.ColumnHeader("baseline", drop=2), lambda check: format_number(check.baseline, check.unit)),
    )
    yield doc.Table.of("", order[:MAX_CHECKS], columns, reach=doc.TERMINAL_AND_PAGE)
    if hidden := order[MAX_CHECKS:]:
        yield doc.Note(f"and {len(hidden)} more: {api.count_outcomes(verdict.checks)} in all")
    rose = [
        api.describe_k3_parts(check, intervals=False) for check in order if check.outcome == "failed" and check.parts
    ]
    notes = [*rose[:1], *_list_reasons(verdict, order), *map(escape_terminal, verdict.notes)]
    decided = [check for check in order if check.outcome != "undecided" and check.covers is not None]
    for check in sorted(decided, key=lambda check: check.covers or 0)[:1]:
        others = f" (and {format_count(len(decided) - 1, 'more check')})" if len(decided) > 1 else ""
        notes.append(f"{api.check_name(check)}{others}: {format_heavy_tail(check.covers)}")
    for note in notes[:MAX_REASONS]:
        yield doc.Note(note if len(note) <= _REASON_LENGTH else f"{note[: _REASON_LENGTH - 1].rstrip()}…", "alarm")
    if len(notes) > MAX_REASONS:
        yield doc.Note(f"and {format_count(len(notes) - MAX_REASONS, 'more note')}")
    if first := next((check for check in verdict.checks if check.sequences), None):
        yield doc.Facts([("data", api.describe_data(first))])


def _list_reasons(verdict: api.Verdict, order: Sequence[api.Check]) -> Iterator[str]:
    """Yield the reasons of checks, without the sentence that is already in the headline."""
    answer = api.verdict_answer(verdict)
    for check in order:
        reason = escape_terminal(check.reason)
        first, _, rest = reason.partition(". ")
        if reason == api.FIRST_BASELINE_REASON:
            continue
        if first and first in answer:
            if rest:
                yield rest
        elif reason:
            yield f"{api.check_name(check)}: {reason}"
    yield from dict.fromkeys(escape_terminal(check.meaning) for check in order if check.meaning)


def _format_pair(check: api.Check) -> tuple[str, str]:
    """Format value and limit of a check with enough digits to show their order."""
    if check.value is not None and check.limit is not None:
        return api.format_apart(check.value, check.limit, check.unit)
    return format_number(check.value, check.unit), format_number(check.limit, check.unit)


def _next_command(verdict: api.Verdict, paths: Sequence[str], saved: str) -> str:
    if verdict.outcome == "failed":
        return format_command("diagnose", paths)
    if saved:
        return f"mismatchctl gate NEXT_DUMP --baseline {shlex.quote(escape_terminal(saved))}"
    if verdict.baseline is None:
        return format_command("gate", paths, "--save-baseline baseline.json --accept")
    if verdict.outcome == "passed":
        return format_command("analyze", paths)
    against = f"--baseline {shlex.quote(escape_terminal(verdict.baseline))}"
    noisy = all(check.rule != api.COVERAGE_RULE for check in verdict.checks if check.outcome == "undecided")
    return format_command("gate", paths, f"{against} --plan 25%") if noisy else format_command("diagnose", paths)


def document(verdict: api.Verdict) -> doc.Document:
    """Build the page of a verdict: what to do, what rose, and a card per check."""
    headline, level = api.verdict_headline(verdict), "passed" if api.is_first_baseline(verdict) else verdict.outcome
    made = doc.Document(doc.Headline(headline, level=level, subtitle="gate"))
    several = len({check.run for check in verdict.checks}) > 1
    made.add(doc.DeferredSection(lambda: _answer(verdict)))
    notes = doc.Section("", "gate-notes").add(*(doc.Note(escape_terminal(note), "alarm") for note in verdict.notes))
    for run, growth in verdict.growth.items():
        if growth.changed:
            notes.add(doc.Note(f"{f'{escape_terminal(run)}: ' if several else ''}K3 {growth.text}"))
    made.add(notes)
    for place, ((run, rule), checks) in enumerate(api.group_by_rule(verdict.checks)):
        shown, hidden = api.select_checks(checks)
        section = doc.Section(escape_terminal(rule), f"gate-{place}", note=escape_terminal(run) if several else "")
        section.add(*map(_check_card, shown))
        section.add(doc.Note(f"and {hidden} more: {api.count_outcomes(checks)} in all") if hidden else None)
        made.add(section)
    return made


def _answer(verdict: api.Verdict) -> Iterator[doc.DocumentPart]:
    from mismatchctl.report.figures.bars import parts_figure, verdict_figure  # slow import, only needed for HTML

    action = advise_next(verdict)
    yield doc.Section("", "what-to-do").add(doc.Facts(list(doc.add_heading("what to do", action))))
    risen = [check for check in verdict.checks if any(part.rise is not None for part in check.parts)]
    parts = [parts_figure(check, f"parts-{place}") for place, check in enumerate(risen[:1])]
    yield doc.Figures([verdict_figure(verdict.checks, "checks"), *parts])


def advise_next(verdict: api.Verdict) -> list[str]:
    """Return what to do after a verdict, most useful first."""
    failed = [check for check in verdict.checks if check.outcome == "failed"]
    if not failed:
        doubt = any(api.outcome_label(check) == "undecided" for check in verdict.checks)
        return ["Record more prompts, or plan the number with mismatchctl gate --plan."] if doubt else []
    risen = {part.name for check in failed for part in check.parts if part.rose}
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


def _check_card(check: api.Check) -> doc.Card:
    below = filter(None, (escape_terminal(check.reason), api.describe_k3_parts(check), api.describe_basis(check)))
    mark = api.outcome_label(check)
    level = "passed" if mark == "recorded" else mark
    return doc.Card(mark, level, api.check_statement(check), lines=[("", line) for line in below])


def plan_document(needs: Sequence[SampleSizePlan]) -> doc.Document:
    """Build the page of the sample sizes that a gate needs."""
    section = doc.Section("", "plan")
    if not needs:
        section.add(doc.Note("No rule limits a rise of a mean, so no number of sequences can be planned."))
        return doc.Document(doc.Headline("")).add(section)
    columns: doc.TableColumns[SampleSizePlan] = (
        ("run and metric", lambda need: f"{need.run} {need.metric}"),
        (doc.ColumnHeader("rise", drop=0), lambda need: f"+{format_number(need.regression, 'fraction')}"),
        (doc.ColumnHeader("needs sequences", drop=0), lambda need: format_number(need.sequences, "sequences")),
        (doc.ColumnHeader("needs clusters", drop=1), lambda need: format_number(need.clusters, "clusters")),
        (doc.ColumnHeader("has clusters", drop=2), lambda need: format_number(need.have, "clusters")),
        (doc.ColumnHeader("compared", numeric=False, drop=3),
         lambda need: "the same clusters" if need.paired else "with others"),
    )  # fmt: skip
    section.add(
        doc.Table.of("Data on each side to find a rise in at least 4 of 5 dumps", needs, columns, reach=doc.EVERYWHERE)
    )
    section.add(
        *(doc.Note(f"{need.run} {need.metric}: {need.status}", "alarm") for need in needs if need.status != "ok")
    )
    if any("allows" in need.status for need in needs):
        rule, rise = f"{needs[0].metric}:increase={50 * needs[0].regression:g}%", f"{100 * needs[0].regression:g}%"
        section.add(doc.Note(f"To plan for a rise of {rise}, name a smaller tolerance: --rule {rule} --plan {rise}"))
    return doc.Document(doc.Headline("")).add(section)
