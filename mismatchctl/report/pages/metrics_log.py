"""The page of a metrics log without a dump: levels, trends, their order, and the next step."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.api.metrics_log import LogAnalysis, LoggedRun, change_text
from mismatchctl.core.formatting import DASH, format_count, format_number
from mismatchctl.report.document import (
    EVERYWHERE,
    Code,
    ColumnHeader,
    Document,
    Facts,
    Headline,
    Note,
    Section,
    Table,
    TableCell,
)

_SHOWN = 6
SNIPPET = """\
from mismatchctl.recorder import Recorder

with Recorder("dumps/", run="NAME") as recorder:
    recorder.write(step=step, rollout_log_probs=..., train_log_probs=..., response_mask=..., prompt_id=...)"""


def document(found: LogAnalysis) -> Document:
    """Build the page of a metrics log."""
    doc = Document(Headline("", subtitle="metrics log"))
    for index, run in enumerate(found.runs):
        doc.add(_run_section(run, f"run-{index}", found))
    return doc.add(_next_section(found))


def _run_section(run: LoggedRun, anchor: str, found: LogAnalysis) -> Section:
    logged = f"{format_count(len(run.mismatch), 'mismatch metric')} of {format_count(found.names, 'name')}"
    note = f"{format_count(len(run.steps), 'step')} ({run.steps[0]} to {run.steps[-1]}), {logged}, no dump"
    section = Section(run.name, anchor, note=note).add(_table(run), Facts(list(_facts(run)), reach=EVERYWHERE))
    for one in (*run.mismatch, *run.health):
        if one.not_finite:
            text = f"{one.name} was NaN or infinite {format_count(one.not_finite, 'time')}: these values are left out"
            section.add(Note(text, "alarm"))
    return section


def _table(run: LoggedRun) -> Table:
    def at(value: float | None) -> str:
        return DASH if value is None else format_number(value)

    series = [*run.mismatch[:_SHOWN], *run.health]
    hidden = len(run.mismatch) - _SHOWN
    more = f"{hidden} more mismatch metrics are in --json" if hidden > 0 else ""
    return Table.of("Logged metrics", series, (
        ("metric", lambda one: TableCell(one.name, kind="name")),
        (ColumnHeader("shows", numeric=False, drop=2), lambda one: one.role),
        (ColumnHeader("first", drop=1), lambda one: at(one.first)),
        (ColumnHeader("last", drop=0), lambda one: at(one.last)),
        (ColumnHeader("trend", numeric=False, drop=0), change_text),
    ), reach=EVERYWHERE, left_out=more)  # fmt: skip


def _facts(run: LoggedRun) -> Iterator[tuple[str, str]]:
    lead = run.lead
    yield "trend", f"{lead.name}: {lead.growth.text}"
    level = next((one for one in run.mismatch if one.level), None)
    if level is not None and level.last is not None:
        yield "level", f"{level.name} is {format_number(level.last)} at the last step: {level.level}"
    if len(run.order) > 1:
        yield "order", ", then ".join(f"{one.name} {change_text(one)}" for one in run.order)
    for one in run.health:
        yield f"lag to {one.role}", run.lag_text(one) or DASH
    yield "measures", f"{lead.name}: {lead.meaning}"


def _next_section(found: LogAnalysis) -> Section:
    """Build the section that explains how to record a dump."""
    framework = next((run.framework for run in found.runs if run.framework), "")
    where = f"docs/integrations/{framework}.md has its lines" if framework else "docs/integrations/ has each framework"
    text = (
        "A log shows that something changed, not why. A dump of a few steps adds the cause (diagnose), "
        f"what each correction would reject (analyze, sweep) and a gate with intervals. Record one ({where}):"
    )
    return Section("Next step", "next").add(Note(text), Code("record a dump", SNIPPET, reach=EVERYWHERE))
