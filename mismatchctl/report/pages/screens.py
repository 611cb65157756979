"""First screens of `analyze`, `diagnose` and `sweep`: the answer, its reasons, and the next command."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mismatchctl.api.gate.verdict import (
    COVERAGE_RULE,
    FIRST_BASELINE_HEADLINE,
    FIRST_BASELINE_REASON,
    Check,
    Verdict,
    check_name,
    count_outcomes,
    describe_data,
    describe_k3_parts,
    format_apart,
    is_first_baseline,
    outcome_label,
    verdict_answer,
)
from mismatchctl.api.scan import NO_MICRO_BATCHES
from mismatchctl.api.sweep.result import Sweep, SweepRow, group_by_target, sort_by_cost, thin_rows
from mismatchctl.api.sweep.study import Study
from mismatchctl.core.formatting import (
    DASH,
    escape_terminal,
    format_command,
    format_count,
    format_heavy_tail,
    format_label,
    format_number,
)
from mismatchctl.corrections.labels import correction_label, threshold_label
from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.diagnosis.causes.registry import CAUSES
from mismatchctl.diagnosis.diagnosis import Diagnosis
from mismatchctl.frameworks.adapter import CLAMP_DIFFERENCE
from mismatchctl.frameworks.config_files import format_native
from mismatchctl.frameworks.registry import load_adapters
from mismatchctl.report.document import (
    TERMINAL_AND_PAGE,
    Answers,
    Code,
    ColumnHeader,
    Document,
    DocumentPart,
    Facts,
    Headline,
    Note,
    Section,
    Table,
    TableCell,
    TableColumns,
)
from mismatchctl.report.pages.diagnose import common_folder, format_example
from mismatchctl.results.model import NOT_RECORDED, Finding, Result, RivalCause, RunResult, Value
from mismatchctl.results.status import (
    STATUSES,
    RunStatus,
    Status,
    describe_range,
    findings_status,
    lower_first,
    percent,
    run_status,
)
from mismatchctl.results.summary import (
    HARMLESS_CAUSES,
    changes_loss_scale,
    data_notes,
    find_fixable,
    first_sentence,
    get_summary,
    headline_finding,
    left_out_facts,
    names_not_compared,
    prompt_notes,
)

MAX_RUNS = 14
"""Runs in the table of several runs."""
MAX_CORRECTIONS, MAX_NOTES = 5, 4
Z_95 = 1.96
"""Half width of a 95% interval in standard errors."""
_SUMMARY_LENGTH, _ADVICE_LENGTH, _NOTE_LENGTH = 200, 130, 140
_Row = tuple[str, str]


def analyze_screen(
    result: Result,
    paths: Sequence[str],
    *,
    asked: bool = True,
    page: Document | None = None,
    following: str = "",
    report: str = "--html report.html",
) -> Document:
    """Build the first screen of a Result, or the whole `page` of it below the answer.

    `asked` is false if the corrections are the default ones. `following` is the next command, by default one that
    reads the dump in `paths`. `report` is the file of the report, or the option that writes one.
    """
    judged = {name: run_status(run) for name, run in result.runs.items()}
    worst = min(judged.values(), key=lambda one: STATUSES.index(one.status))
    if len(judged) > 1:
        screen = Document(Headline(count_statuses(judged), status=worst.status))
        screen.add(Section("", "runs").add(*_runs_parts(result, judged)) if page is None else None)
    else:
        ((name, run),) = result.runs.items()
        screen = Document(Headline(f"{escape_terminal(name)}: {worst.text}", status=worst.status))
        screen.add(Section("", "facts").add(_run_facts(result, run, causes=page is None)))
        if page is None:
            screen.add(Section("", "corrections").add(*_correction_parts(result, run, asked=asked)))
    if page is not None:
        screen.sections += _without_answers(result, page)
    more = [("Details", "-v")] if page is None and report.startswith("--") else []
    first = min(judged, key=lambda name: (STATUSES.index(judged[name].status), -_level(result.runs[name])))
    following = following or _next_command(result.runs[first], worst, _run_paths(result, first, paths))
    written = [("Report", report)] if "--html" not in following else []
    screen.commands = [*more, *written, ("Next", following)]
    return screen


def _without_answers(result: Result, page: Document) -> Iterator[DocumentPart]:
    """Yield the sections of a page. Facts of each run replace its answers, which repeat K3 and the findings."""
    runs = {f"run-{index}": run for index, run in enumerate(result.runs.values())}
    for section in page.sections:
        anchor = getattr(section, "anchor", "")
        if isinstance(section, Section) and anchor in runs:
            facts = _run_facts(result, runs[anchor], causes=False)
            yield replace(section, note="", parts=[facts, *(p for p in section.parts if not isinstance(p, Answers))])
        elif anchor != "answer":
            yield section


def _next_command(run: RunResult, worst: RunStatus, paths: Sequence[str]) -> str:
    if worst.status == "OK":
        return format_command("gate", paths, "--save-baseline ok.json --accept")
    return format_command("diagnose" if find_fixable(run.findings) is not None else "advise", paths)


def _run_paths(result: Result, name: str, paths: Sequence[str]) -> Sequence[str]:
    """Return the file of a run, if it is one of several paths."""
    files = [file.path for file in result.provenance.inputs if file.run == name]
    return files if len(paths) > 1 and len(files) == 1 and files[0] in paths else paths


def count_statuses(judged: Mapping[str, RunStatus]) -> str:
    """Count the runs that are not OK."""
    bad = sum(one.status != "OK" for one in judged.values())
    if not bad:
        return f"all {len(judged)} runs are healthy; no correction needed"
    return f"{bad} of {len(judged)} runs need{'s' * (bad == 1)} attention"


def _runs_parts(result: Result, judged: Mapping[str, RunStatus]) -> Iterator[DocumentPart]:
    """Yield the table of runs, most severe first, and the rejected share of each correction for a few runs."""
    order = sorted(judged, key=lambda name: (STATUSES.index(judged[name].status), -_level(result.runs[name])))
    shown = order[: MAX_RUNS + (len(order) == MAX_RUNS + 1)]
    steps = any(len(run.groups.labels) > 1 for run in result.runs.values())

    def k3(name: str) -> TableCell:
        return TableCell(_number(result.runs[name].overall.metrics.get("k3", NOT_RECORDED).value))

    def trend(name: str) -> TableCell:
        return TableCell("", kind="line", series=tuple(result.runs[name].groups.series("k3").value))

    columns: TableColumns[str] = (
        ("run", lambda name: TableCell(escape_terminal(name), kind="name")),
        (ColumnHeader("status", numeric=False, drop=0), lambda name: judged[name].status),
        (ColumnHeader("K3", drop=0), k3),
        (ColumnHeader("K3 by step", numeric=False, drop=2 if steps else None), trend),
        (ColumnHeader("answer", numeric=False, drop=1, flexible=True), lambda name: judged[name].text),
    )
    yield Table.of("", shown, columns, reach=0)
    rest = order[len(shown) :]
    if rest:
        counts = [f"{sum(judged[name].status == one for name in rest)} {one}" for one in STATUSES]
        left = ", ".join(text for text in counts if not text.startswith("0 "))
        yield Note(f"{format_count(len(rest), 'more run')}: {left}")
    yield from _cut_notes(_data_notes(result), MAX_NOTES)


def _level(run: RunResult) -> float:
    return _or_infinite(run.overall.metrics.get("k3", NOT_RECORDED).value)


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _number(value: float | None) -> str:
    return format_number(value)


def _run_facts(result: Result, run: RunResult, *, causes: bool) -> Facts:
    """Return K3, its trend, the `causes` and the size of one run."""
    summary, k3 = get_summary(run), run.overall.metrics.get("k3", NOT_RECORDED)
    rows: list[_Row] = [("K3", _describe_k3(k3, describe_range(summary.standing)))]
    if summary.against is not None:
        rows.append(("base", summary.against.text))
    over = list(run.groups.series("k3").value)
    if len(over) > 1:
        rows.append(("trend", _describe_trend(run)))
    cause = headline_finding(run.findings) or (run.findings[0] if run.findings else None)
    rows += _cause_rows(cause, run.findings) if causes else ()
    rows += [("log", text) for text in _describe_log(run)]
    rows.append(("data", ", ".join(_describe_data(result, run))))
    return Facts(rows, series={"trend": over} if len(over) > 1 else {})


def _describe_log(run: RunResult) -> Iterator[str]:
    """Yield how the run's log compares with the dump, and which series changed first."""
    compared = [*run.against.values(), *([run.against_metrics] if run.against_metrics else [])]
    for found in compared:
        wrong = [name for name, agreement in found.names.items() if not agreement.agrees]
        verb = "agrees" if len(found.names) == 1 else "agree"
        text = f"{len(found.names) - len(wrong)} of {format_count(len(found.names), 'name')} {verb} with the run's log"
        text += f"; different: {', '.join(wrong[:3])}" if wrong else ""
        yield f"{text}; not in the log: {', '.join(found.missing[:2])}" if found.missing else text
    if others := names_not_compared(run):
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        yield f"kept, not compared: {', '.join(map(escape_terminal, others[:5]))}{more}"
    if run.order:
        yield _cut(run.order, _NOTE_LENGTH)


def _describe_k3(k3: Value, usual: str) -> str:
    if k3.value is None:
        return f"undefined: {k3.status}"
    if k3.value == 0:
        return f"0   {usual}"
    interval = ""
    if k3.se:
        low, high = max(k3.value - Z_95 * k3.se, 0.0), k3.value + Z_95 * k3.se
        interval = f" (95% interval {format_number(low)} to {format_number(high)}{', too narrow' if k3.tail else ''})"
    return f"{format_number(k3.value)} nats/token{interval}   {usual}"


def _describe_trend(run: RunResult) -> str:
    growth = get_summary(run).growth
    if growth.factor is None or growth.onset is None:
        return growth.text
    at = format_label(growth.onset)
    if growth.onset_interval and growth.onset_interval[0] != growth.onset_interval[1]:
        at += f" ({format_label(growth.onset_interval[0])}–{format_label(growth.onset_interval[1])})"
    last = format_label(run.groups.labels[-1])
    return f"{format_number(growth.before)} → {format_number(growth.value)}, onset at step {at}, last step {last}"


def _cause_rows(cause: Finding | None, findings: Sequence[Finding]) -> Iterator[_Row]:
    """Yield the main finding, what to do about it, and the titles of the other findings."""
    if cause is None:
        return
    sure = f"{cause.confidence} confidence"
    if cause.cause == "growing_mismatch":  # the headline and the trend describe the growth
        yield "cause", "unknown" + "".join(f"; possibly {_rival_text(rival)}" for rival in cause.rivals[:1])
    elif cause.cause in HARMLESS_CAUSES:
        yield "cause", f"{lower_first(cause.title)} ({sure})"
    else:
        yield "cause", f"{_cut(cause.summary.rstrip('.'), _SUMMARY_LENGTH)} ({sure})"
    if cause.cause not in HARMLESS_CAUSES:
        yield "do", _cut(first_sentence(cause.advice), _ADVICE_LENGTH)
    others = [found for found in findings if found is not cause and found.confidence != "low"]
    titles = [
        f"{found.title}{'' if found.share_k3 is None else f' ({percent(found.share_k3)} of K3)'}"
        for found in others
        if found.cause != "growing_mismatch"
    ]
    if titles:
        yield "also", "; ".join(titles[:3]) + (f"; {len(titles) - 3} more" if len(titles) > 3 else "")


def _rival_text(rival: RivalCause) -> str:
    """Return the title of a rival cause and the data or experiment that distinguishes it."""
    titles = {cause.id: cause.title for cause in CAUSES}
    return f"{lower_first(titles.get(rival.cause, rival.cause))} (to tell: {rival.tell.rstrip('.')})"


def _cut(text: str, length: int) -> str:
    """Cut a text after a whole word."""
    if len(text) <= length:
        return text
    return f"{text[:length].rsplit(' ', 1)[0].rstrip(',;:')} …"


def _cut_middle(text: str, length: int) -> str:
    """Cut the middle of a note, which is often a path, and keep the reason at its end."""
    if len(text) <= length:
        return text
    return f"{text[: length // 3]} … {text[-(length - length // 3) :]}"


def _describe_data(result: Result, run: RunResult) -> Iterator[str]:
    for key in ("sequence", "token"):
        yield format_count(int(run.overall.metrics.get(f"{key}s", NOT_RECORDED).value or 0), key)
    yield format_count(len(run.groups.labels), "step")
    yield format_count(len(result.provenance.inputs), "file")
    yield from left_out_facts(result.provenance.left_out) if len(result.runs) == 1 else ()
    if prompt_notes([run]):
        yield "no prompt ids (intervals may be too narrow)"


def _correction_parts(result: Result, run: RunResult, *, asked: bool) -> Iterator[DocumentPart]:
    """Yield the table of corrections and short notes about them."""
    rules = {one.name: one for one in result.corrections if one.weight is not None or one.gates}
    names = [name for name in run.overall.corrections if name in rules]
    if names:
        yield _corrections_table(run, {name: correction_label(rules[name]) for name in names[:MAX_CORRECTIONS]})
    notes = _loss_scale_notes(run, names) if asked else []
    notes += [f"{len(names) - MAX_CORRECTIONS} more corrections: -v"] if len(names) > MAX_CORRECTIONS else []
    notes += _correction_notes(result, run, names, asked=asked)
    yield from _cut_notes([*_data_notes(result), *notes], MAX_NOTES)


def _corrections_table(run: RunResult, labels: Mapping[str, str]) -> Table:
    def metric(key: str, form: Callable[[float | None], str]) -> Callable[[str], str]:
        return lambda name: form(run.overall.corrections[name].get(key, NOT_RECORDED).value)

    changed = any(changes_loss_scale(run, name) for name in labels)

    def loss_scale(name: str) -> str:
        text = metric("loss_scale", format_number)(name)
        return f"! x{text}" if changes_loss_scale(run, name) else text

    columns: TableColumns[str] = (
        ("correction", lambda name: TableCell(escape_terminal(name), kind="name")),
        (ColumnHeader("what it does", numeric=False, drop=1, flexible=True), lambda name: labels[name]),
        *([(ColumnHeader("loss", drop=0), loss_scale)] if changed else []),
        (ColumnHeader("drops", drop=0), metric("rejected_tokens", percent)),
        (ColumnHeader("ESS", drop=0), metric("ess_token", percent)),
        (ColumnHeader("K3 left", drop=0), metric("k3_kept", format_number)),
    )
    return Table.of("", labels, columns, reach=0)


def _loss_scale_notes(run: RunResult, names: Sequence[str]) -> list[str]:
    """Warn about corrections that change the effective learning rate."""
    found = []
    for name in filter(lambda name: changes_loss_scale(run, name), names):
        scale = format_number(run.overall.corrections[name]["loss_scale"].value)
        found.append(f"{escape_terminal(name)} multiplies the loss by {scale}, which changes the learning rate")
    return found


def _correction_notes(result: Result, run: RunResult, names: Sequence[str], *, asked: bool) -> Iterator[str]:
    """Yield one short note per problem of a correction."""
    steps, empties = run.groups.labels, []
    for name in names:
        kept = run.groups.corrections.get(name, {}).get("kept_tokens")
        empty = [step for step, left in zip(steps, kept.value if kept else (), strict=False) if left == 0]
        if empty:
            empties.append(f"{escape_terminal(name)} {len(empty)} (first: {format_label(empty[0])})")
    if empties:
        yield f"steps without a kept token, of {len(steps)}: {', '.join(empties[:3])}"
    for warning in result.warnings:
        if NO_MICRO_BATCHES not in warning:
            continue
        text = f"{warning.partition(':')[0]}: normalized over the whole step, no micro_batch column"
        yield f"{text}; add --micro-batch-size N" if asked else text


def _data_notes(result: Result) -> list[str]:
    return [note for note in data_notes(result) if NO_MICRO_BATCHES not in note]


def _cut_notes(notes: Sequence[str], most: int) -> Iterator[Note]:
    """Yield the first notes, shortened, and the number of the others."""
    for note in notes[: most if len(notes) <= most else most - 1]:
        yield Note(escape_terminal(_cut_middle(note, _NOTE_LENGTH)), "alarm")
    if len(notes) > most:
        yield Note(f"{len(notes) - most + 1} more notes: -v", "alarm")


def diagnose_screen(
    found: Diagnosis, paths: Sequence[str], page: Document | None = None, notes: Sequence[str] = ()
) -> Document:
    """Build the first screen of a diagnosis, or the whole `page` of it below the answer."""
    judged = {name: findings_status(findings) for name, findings in found.runs.items()}
    worst = min(judged.values(), key=lambda one: STATUSES.index(one.status))
    if len(judged) > 1:
        screen = Document(Headline(_count_causes(judged), status=worst.status))
        parts = _causes_parts(judged)
    else:
        ((name, findings),) = found.runs.items()
        screen = Document(Headline(f"{escape_terminal(name)}: {worst.text}", status=worst.status))
        parts = iter([Facts(list(_finding_rows(found, name, findings)))])
    if page is None:
        screen.add(Section("", "answer").add(*parts))
    else:
        screen.sections += page.sections
    screen.add(Section("", "notes").add(*_cut_notes(notes, MAX_NOTES if page is None else len(notes))))
    verb = "gate" if worst.status == "OK" else "analyze"
    options = "--save-baseline ok.json --accept" if worst.status == "OK" else ""
    more = [("Details", "-v")] if page is None else []
    if len(paths) == len(judged) > 1:
        names = list(found.runs)
        paths = [paths[min(range(len(names)), key=lambda at: STATUSES.index(judged[names[at]].status))]]
    screen.commands = [*more, ("Report", "--html report.html"), ("Next", format_command(verb, paths, options))]
    return screen


def _count_causes(judged: Mapping[str, RunStatus]) -> str:
    bad = sum(one.status != "OK" for one in judged.values())
    if not bad:
        return f"no fault found in {len(judged)} runs"
    return f"{bad} of {len(judged)} runs {'has' if bad == 1 else 'have'} a cause to look at"


def _causes_parts(judged: Mapping[str, RunStatus]) -> Iterator[DocumentPart]:
    order = sorted(judged, key=lambda name: STATUSES.index(judged[name].status))
    columns: TableColumns[str] = (
        ("run", lambda name: TableCell(escape_terminal(name), kind="name")),
        (ColumnHeader("status", numeric=False, drop=0), lambda name: judged[name].status),
        (ColumnHeader("cause", numeric=False, drop=0, flexible=True), lambda name: judged[name].text),
    )
    yield Table.of("", order[:MAX_RUNS], columns, reach=0)
    if len(order) > MAX_RUNS:
        yield Note(f"{format_count(len(order) - MAX_RUNS, 'more run')}: -v")


def _finding_rows(found: Diagnosis, name: str, findings: Sequence[Finding]) -> Iterator[_Row]:
    """Yield the main finding with its evidence, its rivals, and the other findings in one line each."""
    first = headline_finding(findings) or (findings[0] if findings else None)
    if first is None:
        return
    folder = common_folder([findings])
    yield "found", _cut(first.summary, 2 * _SUMMARY_LENGTH)
    if first.examples:
        yield "see", _cut(format_example(first.examples[0], folder), _NOTE_LENGTH)
    yield "do", _cut(first.advice, _SUMMARY_LENGTH)
    if first.rivals:
        yield "or", _cut(_rival_text(first.rivals[0]), _SUMMARY_LENGTH)
    if first.pointless:
        yield "note", _cut(f"until then, {first.pointless}", _ADVICE_LENGTH)
    sides = found.sides.get(name)
    if sides is not None:
        yield "side", _cut(sides.summary, _NOTE_LENGTH)
    others = [one for one in findings if one is not first]
    for one in others[:4]:
        share = "" if one.share_k3 is None else f", {percent(one.share_k3)} of K3"
        yield "also", f"{one.title} ({one.confidence} confidence{share})"
    if len(others) > 4:
        yield "", f"{len(others) - 4} more findings: -v"


MAX_CHECKS, MAX_REASONS = 8, 3
_VERDICT_STATUSES: Mapping[str, Status] = {"passed": "OK", "undecided": "CHECK", "failed": "FAIL"}
_REASON_LENGTH = 150


def gate_screen(verdict: Verdict, paths: Sequence[str], *, page: Document | None = None, saved: str = "") -> Document:
    """Build the first screen of a verdict, or the whole `page` of it below the answer.

    `saved` is the path of the new baseline if the dump was accepted regardless of the verdict.
    """
    answer = verdict_answer(verdict)
    answer = f"undecided: {answer}" if verdict.outcome == "undecided" else answer
    if saved and is_first_baseline(verdict):
        screen = Document(Headline(FIRST_BASELINE_HEADLINE, status="OK"))
    else:
        screen = Document(Headline(answer, status=_VERDICT_STATUSES[verdict.outcome]))
    if page is not None:
        screen.sections += page.sections
    else:
        screen.add(Section("", "checks").add(*_verdict_parts(verdict)))
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Next", _gate_command(verdict, paths, saved))]
    return screen


def _verdict_parts(verdict: Verdict) -> Iterator[DocumentPart]:
    """Yield the table of checks, the reasons of those that did not pass, notes, and the data."""
    order = sorted(verdict.checks, key=lambda check: ("failed", "undecided", "passed").index(check.outcome))
    shown = order[:MAX_CHECKS]
    several = len({check.run for check in verdict.checks}) > 1
    columns: TableColumns[Check] = (
        ("check", lambda check: f"{f'{escape_terminal(check.run)}: ' if several else ''}{check_name(check)}"),
        (ColumnHeader("outcome", numeric=False, drop=0), outcome_label),
        (ColumnHeader("value", drop=0), lambda check: _format_pair(check)[0]),
        (ColumnHeader("limit", drop=1), lambda check: _format_pair(check)[1]),
        (ColumnHeader("baseline", drop=2), lambda check: format_number(check.baseline, check.unit)),
    )
    yield Table.of("", shown, columns, reach=TERMINAL_AND_PAGE)
    if hidden := order[MAX_CHECKS:]:
        yield Note(f"and {len(hidden)} more: {count_outcomes(verdict.checks)} in all")
    rose = [describe_k3_parts(check, intervals=False) for check in order if check.outcome == "failed" and check.parts]
    notes = [*rose[:1], *_list_reasons(verdict, order), *map(escape_terminal, verdict.notes)]
    notes += _heavy_tail_notes(order)
    for note in notes[:MAX_REASONS]:
        yield Note(note if len(note) <= _REASON_LENGTH else f"{note[: _REASON_LENGTH - 1].rstrip()}…", "alarm")
    if len(notes) > MAX_REASONS:
        yield Note(f"and {format_count(len(notes) - MAX_REASONS, 'more note')}")
    first = next((check for check in verdict.checks if check.sequences), None)
    if first is not None:
        yield Facts([("data", describe_data(first))])


def _heavy_tail_notes(checks: Sequence[Check]) -> Iterator[str]:
    """Yield a note on the decided check whose interval has the lowest coverage, and count the others."""
    decided = [check for check in checks if check.outcome in ("passed", "failed") and check.covers is not None]
    for check in sorted(decided, key=lambda check: check.covers or 0)[:1]:
        others = f" (and {format_count(len(decided) - 1, 'more check')})" if len(decided) > 1 else ""
        yield f"{check_name(check)}{others}: {format_heavy_tail(check.covers)}"


def _list_reasons(verdict: Verdict, order: Sequence[Check]) -> Iterator[str]:
    """Yield the reasons of checks, without the sentence that the headline has."""
    answer = verdict_answer(verdict)
    for check in order:
        reason = escape_terminal(check.reason)
        first, stop, rest = reason.partition(". ")
        if reason == FIRST_BASELINE_REASON:
            continue
        if first and first in answer:
            reason = rest if stop else ""
            if reason:
                yield reason
        elif reason:
            yield f"{check_name(check)}: {reason}"
    yield from dict.fromkeys(escape_terminal(check.meaning) for check in order if check.meaning)


def _format_pair(check: Check) -> tuple[str, str]:
    """Format value and limit of a check with enough digits to show their order."""
    if check.value is not None and check.limit is not None:
        return format_apart(check.value, check.limit, check.unit)
    return format_number(check.value, check.unit), format_number(check.limit, check.unit)


def _gate_command(verdict: Verdict, paths: Sequence[str], saved: str) -> str:
    """Return the command that helps next."""
    if verdict.outcome == "failed":
        return format_command("diagnose", paths)
    if saved:
        return f"mismatchctl gate NEXT_DUMP --baseline {shlex.quote(escape_terminal(saved))}"
    if verdict.baseline is None:
        return format_command("gate", paths, "--save-baseline baseline.json --accept")
    against = f"--baseline {shlex.quote(escape_terminal(verdict.baseline))}"
    if verdict.outcome == "passed":
        return format_command("analyze", paths)
    noisy = all(check.rule != COVERAGE_RULE for check in verdict.checks if check.outcome == "undecided")
    return format_command("gate", paths, f"{against} --plan 25%") if noisy else format_command("diagnose", paths)


POINTS = 5
"""Points of a table, in addition to the frameworks' default."""
MAX_STUDIES = 4


def sweep_screen(sweep: Sweep, paths: Sequence[str], page: Document | None = None) -> Document:
    """Build the first screen of a sweep without targets, or the whole `page` of it below the answer."""
    several = len(sweep.runs) > 1
    name = f"{len(sweep.runs)} runs" if several else escape_terminal(sweep.runs[0])
    screen = Document(Headline(f"{name}: {_describe_range(sweep)}"))
    if page is not None:
        screen.sections = [part for part in page.sections if getattr(part, "anchor", "") != "sweep-answer"]
    elif several:
        screen.add(Section("", "runs").add(_runs_table(sweep)))
    else:
        screen.add(Section("", "studies").add(*_study_parts(sweep, sweep.runs[0])))
        screen.add(*_predictions(sweep))
    more = [("Details", "-v")] if page is None else []
    screen.commands = [*more, ("Next", format_command("sweep", paths, "--target-rejection 5%"))]
    return screen


def _describe_range(sweep: Sweep) -> str:
    """Describe the rejected tokens at the usual thresholds, or over all points."""
    usual = [row for study in sweep.studies for row in _usual_rows(sweep, study)]
    rows = usual or [row for study in sweep.studies for run in sweep.runs for row in _rows(sweep, run, study)]
    lost = [row["rejected_tokens"] for row in rows if row["rejected_tokens"] is not None]
    if not lost:
        return "no threshold could be evaluated"
    least, most = percent(min(lost)), percent(max(lost))
    what = "the frameworks' usual thresholds drop" if usual else "the thresholds drop"
    return f"{what} {least if least == most else f'{least} to {most}'} of the tokens"


def _rows(sweep: Sweep, run: str, study: Study) -> list[SweepRow]:
    return list(sweep.rows(run, study.name).to_dicts())


def _usual_point(study: Study) -> int | None:
    """Return the point at which a study equals its own correction."""
    return next((point for point in range(len(study.points)) if study.correction_at(point) == study.correction), None)


def _usual_rows(sweep: Sweep, study: Study) -> Iterator[SweepRow]:
    point = _usual_point(study)
    for run in sweep.runs if point is not None else ():
        yield next(row for row in _rows(sweep, run, study) if row["point"] == point)


def _study_parts(sweep: Sweep, run: str) -> Iterator[DocumentPart]:
    marked = False
    for study in sweep.studies[:MAX_STUDIES]:
        rows = _rows(sweep, run, study)
        if len(study.axes) == 1 and study.axes[0].is_numeric:
            usual = _usual_point(study)
            marked |= usual is not None
            yield _threshold_table(study, rows, usual)
        else:
            yield _points_table(study, rows)
    left = len(sweep.studies) - MAX_STUDIES
    if left > 0:
        yield Note(f"{left} more corrections: -v")
    if marked:
        yield Note("* usual default of the frameworks")


def _threshold_table(study: Study, rows: Sequence[SweepRow], usual: int | None) -> Table:
    """Return a table with one column per threshold and one row per metric."""
    points = {row["point"] for row in thin_rows(rows, POINTS)} | ({usual} if usual is not None else set())
    chosen = [row for row in rows if row["point"] in points]
    labels = [threshold_label(study.correction_at(row["point"]), study.axes[0].path) for row in chosen]
    shared = _shared_words(labels)
    headings = [
        f"{label[len(shared) :].strip()}{'*' if row['point'] == usual else ''}"
        for label, row in zip(labels, chosen, strict=True)
    ]
    last = ("K3 left", "k3_kept") if study.correction.gates else ("mean weight", "weight_mean")
    metrics = [("drops", "rejected_tokens"), ("ESS", "ess_token"), last]
    if all(not row["rejected_tokens"] for row in rows):
        metrics = metrics[1:]
    table = Table("", [ColumnHeader(shared.strip() or study.name, numeric=False)], compact=True, reach=0)
    table.heads += [ColumnHeader(heading, short=heading, drop=0) for heading in headings]
    for title, key in metrics:
        form = {"k3_kept": format_number, "weight_mean": _format_mean}.get(key, percent)
        cells = [TableCell(form(row[key])) for row in chosen]
        table.rows.append([TableCell(f"  {title}", kind="name"), *cells])
    return table


def _format_mean(value: float | None) -> str:
    """Format a mean weight with three decimals."""
    return DASH if value is None else f"{value:.3f}"


def _shared_words(labels: Sequence[str]) -> str:
    """Return the words with which all labels begin."""
    shared = labels[0]
    for label in labels:
        while not label.startswith(shared) or (shared and not shared.endswith(" ")):
            shared = shared[: shared.rstrip(" ").rfind(" ") + 1]
            if not shared:
                return ""
    return shared


def _points_table(study: Study, rows: Sequence[SweepRow]) -> Table:
    """Return the Pareto front of a study with several axes, thinned."""
    best = sort_by_cost([row for row in rows if row["pareto"]]) or list(rows)

    def form(key: str) -> Any:
        return lambda row: DASH if row[key] is None else percent(row[key])

    columns: TableColumns[Any] = (
        (
            ColumnHeader(escape_terminal(study.name), numeric=False),
            lambda row: TableCell(correction_label(study.correction_at(row["point"])), kind="name"),
        ),
        (ColumnHeader("drops", drop=0), form("rejected_tokens")),
        (ColumnHeader("ESS", drop=0), form("ess_token")),
        (ColumnHeader("K3 left", drop=1), lambda row: format_number(row["k3_kept"])),
    )
    return Table.of("", thin_rows(best, POINTS), columns, compact=True, reach=0)


def _runs_table(sweep: Sweep) -> Table:
    """Return the rejected tokens of each run at the usual or the strictest threshold of each study."""
    studies = sweep.studies[:MAX_STUDIES]

    def cell(study: Study) -> Any:
        point = _usual_point(study) or 0
        return lambda run: percent(
            next(row["rejected_tokens"] for row in _rows(sweep, run, study) if row["point"] == point)
        )

    heads = [correction_label(study.correction_at(_usual_point(study) or 0)) for study in studies]
    columns: list[Any] = [("drops at", lambda run: TableCell(escape_terminal(run), kind="name"))]
    columns += [(ColumnHeader(head, drop=0), cell(study)) for head, study in zip(heads, studies, strict=True)]
    table = Table.of("", sweep.runs[:MAX_RUNS], columns, reach=0)
    table.left_out = f"{len(sweep.runs) - MAX_RUNS} more runs: -v" if len(sweep.runs) > MAX_RUNS else ""
    return table


def _predictions(sweep: Sweep) -> Iterator[Section]:
    if sweep.forecasts:
        from mismatchctl.report.pages.sweep import document

        for section in document(sweep).sections:
            if isinstance(section, Section) and section.anchor.endswith("-predictions"):
                yield section


def target_screen(sweep: Sweep, paths: Sequence[str], prices: Sequence[Mapping[str, Any]]) -> Document:
    """Build the screen of solved targets: the rules, best first, and the lines to paste. Each target has a price."""
    price = dict(zip(map(id, sweep.targets), prices, strict=True))
    wishes = group_by_target(sweep.targets)
    first, name = next(iter(wishes)), escape_terminal(sweep.runs[0]) if len(sweep.runs) == 1 else ""
    screen, ranked = Document(Headline("")), list[Correction]()
    for (key, wanted), targets in wishes.items():
        solved = [target for target in targets if target.correction is not None]
        solved.sort(key=lambda target: _or_infinite(price[id(target)]["k3_kept"]))
        corrections = [parse_correction(target.correction or {}, "target") for target in solved]
        ranked = ranked or corrections
        section = Section("", f"target-{len(screen.sections)}")
        section.add(Note(f"{_describe_wish(key, wanted)}:") if len(wishes) > 1 else None)
        rows = [
            (target, correction, price[id(target)], place == 0 and bool(name))
            for place, (target, correction) in enumerate(zip(solved, corrections, strict=True))
        ]
        if len(sweep.runs) > 1:  # the best rule of each run
            rows = list({row[0].run: row for row in reversed(rows)}.values())[::-1]
        section.add(_target_table(rows[:MAX_RUNS], several=len(sweep.runs) > 1))
        section.add(Note(f"{len(rows) - MAX_RUNS} more runs: -v") if len(rows) > MAX_RUNS else None)
        missed = [target for target in targets if target.correction is None]
        section.add(*(Note(f"{target.rule}: {target.status}") for target in missed[:2]))
        screen.add(section)
    answer = correction_label(ranked[0]) if ranked else "no threshold meets it"
    title = f"{_describe_wish(*first)} of {name or f'each of {len(sweep.runs)} runs'}"
    screen.headline.title = f"{title}: {answer if name else 'one threshold per run'}"
    if name:
        screen.add(Section("", "usual").add(*_usual_notes(sweep)))
        screen.add(Section("", "paste").add(_paste_lines(ranked)))
    screen.commands = [("Details", "-v"), ("Next", format_command("advise", paths))]
    return screen


def _describe_wish(key: str, wanted: float) -> str:
    if key == "ess_token":
        return f"To keep an effective sample size of {percent(wanted)}"
    return f"To drop {percent(wanted)} of the {'tokens' if key == 'rejected_tokens' else 'sequences'}"


def _target_table(rows: Iterable[tuple[Any, Correction, Mapping[str, Any], bool]], *, several: bool) -> Table:
    def rule(row: tuple[Any, Correction, Mapping[str, Any], bool]) -> TableCell:
        run = f"{escape_terminal(row[0].run)}: " if several else ""
        return TableCell(f"{'>' if row[3] else ' '} {run}{correction_label(row[1])}", kind="name")

    columns: TableColumns[tuple[Any, Correction, Mapping[str, Any], bool]] = (
        (ColumnHeader("  rule", numeric=False), rule),
        (ColumnHeader("drops tokens", short="drops\ntokens", drop=0), lambda row: percent(row[2]["rejected_tokens"])),
        (ColumnHeader("sequences", drop=1), lambda row: percent(row[2]["rejected_sequences"])),
        (ColumnHeader("ESS", drop=2), lambda row: percent(row[2]["ess_token"])),
        (ColumnHeader("K3 left", drop=0), lambda row: format_number(row[2]["k3_kept"])),
    )
    return Table.of("", rows, columns, reach=0)


def _usual_notes(sweep: Sweep) -> Iterator[Note]:
    """Yield what the usual thresholds of the swept gates would drop."""
    found = [
        f"{correction_label(study.correction)} drops {percent(row['rejected_tokens'])}"
        for study in sweep.studies
        if study.correction.gates
        for row in list(_usual_rows(sweep, study))[:1]
    ]
    if found:
        yield Note(f"Frameworks' usual thresholds: {', '.join(found)}")


def _round_bound(match: re.Match[str]) -> str:
    """Round a number to three significant digits, a ratio between 0.5 and 2 in its distance from 1."""
    value = float(match[0])
    return f"{1 + float(f'{value - 1:.3g}'):.12g}" if 0.5 < value < 2 else f"{value:.3g}"


def _paste_lines(ranked: Sequence[Correction]) -> Code | None:
    """Return the configuration of the best correction that the framework supports."""
    framework = load_adapters()[0].load("")
    for correction in ranked:
        keys, differences = framework.native(correction)
        if not keys or not all(CLAMP_DIFFERENCE in text for text in differences):
            continue
        text = re.sub(r"\d+\.\d{4,}", _round_bound, format_native(correction, framework, nearest=True))
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return Code(f"Paste into {framework.title} ({correction_label(correction)}):", "\n".join(lines), reach=0)
    return None
