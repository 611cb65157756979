"""The page of a metrics log without a dump: status, trends, which trend started first, and the next command."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.api.metrics_log import LogAnalysis, LoggedRun, change_text
from mismatchctl.core.formatting import DASH, format_count, format_number
from mismatchctl.report import document as doc
from mismatchctl.report.tables import runs_headline, runs_table
from mismatchctl.results.model import K3Standing, Value
from mismatchctl.results.summary import FAILING_GROWTH, RANGE_TEXTS, RunStatus, Status, classify_k3, describe_onset

_SHOWN = 5
SNIPPET = """\
from mismatchctl.recorder import Recorder

with Recorder("dumps/", run="NAME") as recorder:
    recorder.write(step=step, rollout_log_probs=..., train_log_probs=..., response_mask=..., prompt_id=...)"""


def document(found: LogAnalysis, *, whole: bool = True) -> doc.Document:
    """Build the page of a metrics log. Without `whole`, build its short terminal output."""
    judged = {run.name: _judge(run) for run in found.runs}
    made = doc.Document(runs_headline(judged, f"all {len(judged)} runs are healthy", "metrics log"))
    if len(judged) > 1:
        made.add(doc.Section("", "runs").add(*runs_table(judged, "result")))
    if whole or len(judged) == 1:
        for index, run in enumerate(found.runs):
            made.add(_run_section(run, f"run-{index}", found, whole=whole))
    framework = next((run.framework for run in found.runs if run.framework), "")
    aim = "to find the cause" if made.headline.status != "OK" else "for a gate with intervals"
    following = f"mismatchctl init {framework or 'FRAMEWORK'}   # record a dump {aim}"
    if whole:
        text = (
            "A log shows that the mismatch changed, but not why. Record a dump of a few steps. Then diagnose finds the "
            "cause, analyze and sweep show how much data each correction rejects, and gate compares the dump with a "
            f"baseline. docs/integrations/{framework and f'{framework}.md'} describes how to record dumps with "
            f"{framework or 'your framework'}. In other code, use these lines:"
        )
        code = doc.Code("record a dump", SNIPPET, reach=doc.EVERYWHERE)
        made.add(doc.Section("Next step", "next").add(doc.Note(text), code))
    made.commands = [*([] if whole else [("Details", "-v")]), ("Next", following)]
    return made


def _judge(run: LoggedRun) -> RunStatus:
    lead, growth = run.lead, run.lead.growth
    standing = _classify_level(run)[1]
    level = "" if standing is None else f"K3 is {RANGE_TEXTS[standing.range]}"
    lost = [one.name for one in run.mismatch if one.not_finite]
    if growth.verdict == "grew" and growth.factor is not None:
        status: Status = "FAIL" if growth.factor >= FAILING_GROWTH else "CHECK"
        return RunStatus(status, f"{lead.name} grew {format_number(growth.factor)}x since step {growth.onset}")
    if standing is not None and standing.range in ("moe", "above"):
        return RunStatus("FAIL" if standing.range == "above" else "CHECK", level)
    if lost:
        return RunStatus("CHECK", f"{lost[0]} is NaN or infinite in some steps")
    return RunStatus("OK", f"no growth; {level}" if level else f"{lead.name} did not grow")


def _classify_level(run: LoggedRun) -> tuple[float | None, K3Standing | None]:
    last = next((one.last for one in run.mismatch if one.level and one.last is not None), None)
    return last, None if last is None else classify_k3(Value(value=last))


def _run_section(run: LoggedRun, anchor: str, found: LogAnalysis, *, whole: bool) -> doc.Section:
    section = doc.Section(run.name if whole else "", anchor)
    over = [value for value in run.lead.values if value is not None]
    facts = doc.Facts(list(_facts(run, found, whole=whole)), series={"trend": over}, reach=doc.EVERYWHERE)
    section.add(facts, _table(run, whole=whole))
    for one in (*run.mismatch, *run.health):
        if one.not_finite:
            text = f"{one.name} was NaN or infinite {format_count(one.not_finite, 'time')}. These values are left out"
            section.add(doc.Note(text, "alarm"))
    return section


def _table(run: LoggedRun, *, whole: bool) -> doc.Table:
    hidden = len(run.mismatch) - _SHOWN
    more = f"{hidden} more mismatch metrics are in --json" if hidden > 0 else ""
    return doc.Table.of("Logged metrics" if whole else "", [*run.mismatch[:_SHOWN], *run.health], [
        doc.Column("metric", "name", "name"), doc.Column("shows", "role", "text", 2),
        doc.Column("first", "first", drop=1), doc.Column("last", "last", drop=0),
        doc.Column("trend", change_text, "text", 0),
    ], reach=doc.EVERYWHERE, left_out=more)  # fmt: skip


def _facts(run: LoggedRun, found: LogAnalysis, *, whole: bool) -> Iterator[tuple[str, str]]:
    lead = run.lead
    last, standing = _classify_level(run)
    if standing is not None:
        yield "K3", f"{format_number(last)} at the last step   {RANGE_TEXTS[standing.range]}"
    yield "trend", describe_onset(lead.growth) or f"{lead.name}: {lead.growth.text}"
    if len(run.order) > 1:
        yield "order", ", then ".join(f"{one.name} (step {one.growth.onset})" for one in run.order)
    logged = f"{len(run.mismatch)} of {format_count(found.names, 'logged name')} are mismatch metrics"
    yield "data", f"{format_count(len(run.steps), 'step')} ({run.steps[0]} to {run.steps[-1]}), {logged}, no dump"
    if whole:
        for one in run.health:
            yield f"lag to {one.role}", run.lag_text(one) or DASH
        yield "measures", f"{lead.name}: {lead.meaning}"
