"""Terminal output and report page of `gate`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from mismatchctl.api.gate import verdict as api
from mismatchctl.api.gate.power import SampleSizePlan
from mismatchctl.core.formatting import format_command, format_count, format_heavy_tail, format_number
from mismatchctl.report import document as doc
from mismatchctl.report.figures.figure import Axis, Figure, Interval, change_axis, rows_figure
from mismatchctl.results.summary import Status

MAX_CHECKS, MAX_DRAWN = 6, 16  # maximum number of checks on a screen, and in the figure
_OUTCOMES = ("failed", "undecided", "passed")
_STATUSES: Mapping[str, Status] = {"passed": "OK", "undecided": "CHECK", "failed": "FAIL"}


def gate_screen(
    verdict: api.Verdict, paths: Sequence[str], *, page: doc.Document | None = None, saved: str = "",
    warnings: Sequence[str] = (),
) -> doc.Document:  # fmt: skip
    """Build the terminal output. If `page` is given (-v), include its sections. `saved`: path of a new baseline."""
    answer = api.verdict_answer(verdict)
    answer = f"undecided: {answer}" if verdict.outcome == "undecided" else answer
    if saved and api.is_first_baseline(verdict):
        screen = doc.Document(doc.Headline(api.FIRST_BASELINE_HEADLINE, status="OK"))
    else:
        screen = doc.Document(doc.Headline(answer, status=_STATUSES[verdict.outcome]))
    if page is None:
        screen.add(doc.Section("", "checks").add(*_verdict_parts(verdict, warnings)))
    else:
        screen.add(doc.Section("", "warnings").add(*doc.alarms(warnings)))
        screen.sections += page.sections
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Next", _next_command(verdict, paths, saved))]
    return screen


def _verdict_parts(verdict: api.Verdict, warnings: Sequence[str]) -> Iterator[doc.DocumentPart]:
    order = sorted(verdict.checks, key=lambda check: _OUTCOMES.index(check.outcome))
    columns = [
        doc.Column("check", lambda check: _name_check(check, verdict), "text"),
        doc.Column("outcome", api.outcome_label, "text", 0),
        doc.Column("value", lambda check: _format_pair(check)[0], drop=0),
        doc.Column("limit", lambda check: _format_pair(check)[1], drop=1),
        doc.Column("baseline", lambda check: format_number(check.baseline, check.unit), drop=2),
    ]
    yield doc.Table.of("", order[:MAX_CHECKS], columns, reach=doc.TERMINAL_AND_PAGE)
    if hidden := order[MAX_CHECKS:]:
        yield doc.Note(f"and {len(hidden)} more checks (total: {api.count_outcomes(verdict.checks)})")
    failed = [check for check in order if check.outcome == "failed" and check.parts]
    rose = [api.describe_k3_parts(check, intervals=False) for check in failed[:1]]
    meanings = dict.fromkeys(check.meaning for check in order if check.meaning)
    notes = [*warnings[:1], *rose, *_list_reasons(verdict, order), *verdict.notes, *meanings, *warnings[1:]]
    decided = [check for check in order if check.outcome != "undecided" and check.covers is not None]
    for check in sorted(decided, key=lambda check: check.covers or 0)[:1]:
        others = f" (and {format_count(len(decided) - 1, 'more check')})" if len(decided) > 1 else ""
        notes.append(f"{api.check_name(check)}{others}: {format_heavy_tail(check.covers)}")
    yield from doc.alarms(notes)
    if first := next((check for check in verdict.checks if check.sequences), None):
        yield doc.Facts([("data", api.describe_data(first))])


def _list_reasons(verdict: api.Verdict, order: Sequence[api.Check]) -> Iterator[str]:
    answer = api.verdict_answer(verdict)
    for check in order:
        first, _, rest = check.reason.partition(". ")
        if check.reason == api.FIRST_BASELINE_REASON or (first in answer and not rest):
            continue
        yield f"{_name_check(check, verdict)}: {rest if first in answer else check.reason}"


def _name_check(check: api.Check, verdict: api.Verdict) -> str:
    several = any(other.run != check.run for other in verdict.checks)
    return f"{f'{check.run}: ' if several else ''}{api.check_name(check)}"


def _format_pair(check: api.Check) -> tuple[str, str]:
    """Format the value and the limit of a check, with enough digits to show which is larger."""
    if check.value is not None and check.limit is not None:
        return api.format_apart(check.value, check.limit, check.unit)
    return format_number(check.value, check.unit), format_number(check.limit, check.unit)


def _next_command(verdict: api.Verdict, paths: Sequence[str], saved: str) -> str:
    if verdict.outcome == "failed":
        return format_command("diagnose", paths)
    if saved:
        return f"mismatchctl gate NEXT_DUMP --baseline {shlex.quote(saved)}"
    if verdict.baseline is None:
        return format_command("gate", paths, "--save-baseline baseline.json --accept")
    if verdict.outcome == "passed":
        return format_command("analyze", paths)
    against = f"--baseline {shlex.quote(verdict.baseline)}"
    noisy = all(check.rule != api.COVERAGE_RULE for check in verdict.checks if check.outcome == "undecided")
    return format_command("gate", paths, f"{against} --plan 25%") if noisy else format_command("diagnose", paths)


def document(verdict: api.Verdict) -> doc.Document:
    status = "OK" if api.is_first_baseline(verdict) else _STATUSES[verdict.outcome]
    made = doc.Document(doc.Headline(api.verdict_headline(verdict), status=status, subtitle="gate"))
    several = len({check.run for check in verdict.checks}) > 1
    answer = doc.Section("", "what-to-do").add(doc.Facts(doc.add_heading("what to do", advise_next(verdict))))
    order = sorted(verdict.checks, key=lambda check: _OUTCOMES.index(check.outcome))
    risen = next((check for check in order if any(abs(part.rise or 0) > 1e-6 for part in check.parts)), None)
    figures = [verdict_figure(verdict, order, "checks"), risen and parts_figure(risen, "parts-0")]
    made.add(answer.add(doc.Figures(figures)))
    notes = doc.Section("", "gate-notes").add(*(doc.Note(note, "alarm") for note in verdict.notes))
    for run, growth in verdict.growth.items():
        if growth.changed:
            notes.add(doc.Note(f"{f'{run}: ' if several else ''}K3 {growth.text}"))
    made.add(notes)
    for place, ((run, rule), checks) in enumerate(api.group_by_rule(verdict.checks)):
        shown, hidden = api.select_checks(checks)
        section = doc.Section(f"{run}: {rule}" if several else rule, f"gate-{place}")
        section.add(*map(_check_card, shown))
        section.add(doc.Note(f"and {hidden} more checks (total: {api.count_outcomes(checks)})") if hidden else None)
        made.add(section)
    return made


def advise_next(verdict: api.Verdict) -> list[str]:
    failed = [check for check in verdict.checks if check.outcome == "failed"]
    if not failed:
        doubts = [check for check in verdict.checks if api.outcome_label(check) == "undecided"]
        if unusable := [check for check in doubts if check.rule == api.COVERAGE_RULE]:
            return [remedy for check in unusable if (remedy := check.reason.partition(". ")[2])][:1]
        return ["Record more prompts, or plan the number with mismatchctl gate --plan."] * bool(doubts)
    risen = {part.name for check in failed for part in check.parts if part.rose}
    texts = []
    if risen == {"tail"}:
        texts.append("K3 rose only for rare tokens. Look at MoE routing and at sampling settings first.")
    elif risen:
        texts.append("K3 rose for typical tokens. Look for a changed dtype, kernel or sampling setting first.")
    compare = f"compare {shlex.quote(verdict.baseline)} DUMP" if verdict.baseline else "diagnose DUMP"
    return [
        *texts,
        f"See what changed: mismatchctl {compare}",
        "If the change is intended, accept it as the new baseline: mismatchctl gate DUMP --save-baseline FILE --accept",
    ]


def _check_card(check: api.Check) -> doc.Card:
    below = filter(None, (check.reason, api.describe_k3_parts(check), api.describe_basis(check)))
    mark = api.outcome_label(check)
    level = "passed" if mark == "recorded" else mark
    return doc.Card(mark, level, api.check_statement(check), lines=[("", line) for line in below])


def plan_document(needs: Sequence[SampleSizePlan], paths: Sequence[str]) -> doc.Document:
    section = doc.Section("", "plan")
    if not needs:
        title = "--plan needs a rule on the increase of a mean, such as k3:increase=25%"
        return doc.Document(doc.Headline(title, status="CHECK"))
    rise, most = f"{100 * needs[0].regression:g}%", max(need.sequences or 0 for need in needs)
    title = f"with {most:,} sequences in each dump, the gate finds a rise of {rise} in at least 4 of 5 cases"
    columns = [
        doc.Column("run and metric", lambda need: f"{need.run} {need.metric}", "text"),
        doc.Column("needs sequences", "sequences", drop=0),
        doc.Column("needs clusters", "clusters", drop=1),
        doc.Column("has clusters", "have", drop=2),
        doc.Column("baseline has", lambda need: f"{'the same' if need.paired else 'other'} clusters", "text", 3),
    ]
    if known := [need for need in needs if need.sequences is not None]:
        clusters = doc.Note("A cluster is a prompt. If the dump lacks prompt ids, a cluster is a sequence.", "quiet")
        section.add(doc.Table.of("", known, columns, reach=doc.EVERYWHERE), clusters)
    refused = [need for need in needs if need.status != "ok"]
    section.add(*(doc.Note(f"{need.run} {need.metric}: {need.status}", "alarm") for need in refused))
    head = doc.Headline(title) if most else doc.Headline(f"cannot plan for a rise of {rise}", status="CHECK")
    following = "--save-baseline baseline.json --accept"
    if any("allows" in need.status for need in needs):
        following = f"--rule {needs[0].metric}:increase={50 * needs[0].regression:g}% --plan {rise}"
    return doc.Document(head, commands=[("Next", format_command("gate", paths, following))]).add(section)


def verdict_figure(verdict: api.Verdict, checks: Sequence[api.Check], name: str) -> Figure | None:
    known = [check for check in checks if (check.value or 0) > 0 and (check.limit or 0) > 0]
    shown = {_name_check(check, verdict): check for check in known[:MAX_DRAWN]}
    if not shown:
        return None

    def scaled(check: api.Check, value: float | None, ends: tuple[float, float] | None) -> Interval:
        limit = check.limit or 1.0
        first, low, high = (part / limit if part and part > 0 else None for part in (value, *(ends or (None, None))))
        return first, low, high

    series = {"new": {row: scaled(own, own.value, own.interval) for row, own in shown.items()}}
    if any(check.baseline for check in shown.values()):
        series["baseline"] = {row: scaled(own, own.baseline, own.baseline_interval) for row, own in shown.items()}
    failed = sum(check.outcome == "failed" for check in checks)
    title = f"{failed} of {len(checks)} checks failed" if failed else "New values and their limits"
    caption = "Each value is divided by the limit of its check. The dotted line at 1 is the limit."
    return rows_figure(name, title, caption, Axis("value / limit", "log"), series, rule=(1.0, "limit"), size="wide")


def parts_figure(check: api.Check, name: str) -> Figure | None:
    texts = {"bulk": "most tokens (bulk)", "tail": "rare tokens (tail)"}
    rises: dict[str, Interval] = {
        texts.get(part.name, part.name): (part.rise, *(part.interval or (None, None)))
        for part in check.parts
        if part.rise is not None
    }
    return rows_figure(
        name, "What rose",
        "If K3 rose only for rare tokens, the cause may be routing or sampling. If K3 rose for most tokens, the cause "
        "may be a dtype or a kernel.",
        change_axis("rise over the baseline", {"rise": rises}), {"rise": rises}, rule=(0.0, ""),
    )  # fmt: skip
