"""The lines that `watch` prints."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap

from mismatchctl.api.gate.verdict import check_sentence
from mismatchctl.api.watch import Snapshot, StepKey
from mismatchctl.core.formatting import format_label, format_number, shorten
from mismatchctl.report.pages.analyze import calm_title
from mismatchctl.report.tables import SHORT_TITLES, by_severity, runs_headline
from mismatchctl.results.summary import get_summary, percent, run_status

LINE_COLUMNS = {
    "tokens": ("tokens", 9), "k3": ("nats/token", 9), "abs_diff_mean": ("nats", 11), "ess_token": ("fraction", 10),
}  # fmt: skip
_ONE_RUN_ONLY = "abs_diff_mean"  # if lines contain run names, this column is left out to fit 80 columns
MAX_FIRST_STEPS, MAX_FIRST_RUNS = 12, 5  # maximum lines: for steps before the start (except jumps), for runs
_WIDTH = 140
_STEP_WIDTH, _RUN_WIDTH = 8, 14


def format_header(several: bool) -> str:
    return _format_line("run" if several else "", "step", (SHORT_TITLES.get(key, key) for key in LINE_COLUMNS))


def _format_line(run: str, step: str, cells: Iterable[str]) -> str:
    columns = zip(cells, LINE_COLUMNS.items(), strict=True)
    placed = [cell.rjust(width) for cell, (key, (_, width)) in columns if not run or key != _ONE_RUN_ONLY]
    names = [shorten(run, _RUN_WIDTH).ljust(_RUN_WIDTH)] if run else []
    return " ".join([*names, shorten(step, _STEP_WIDTH).ljust(_STEP_WIDTH), *placed])


def format_new_steps(look: Snapshot, *, first: bool = False) -> Iterator[str]:
    """Yield a line per step with new data. Mark the steps where K3 starts to grow."""
    several, jumps = len(look.result.runs) > 1, _find_jumps(look)
    last = look.steps[-(MAX_FIRST_STEPS // (1 + several)) :] if first else look.steps
    shown = [key for key in look.steps if key in jumps or key in last]
    if len(shown) < len(look.steps):
        yield f"({len(look.steps) - len(shown):,} earlier steps are not shown)"
    for run, index in shown:
        groups = look.result.runs[run].groups
        values = ((groups.series(key).value[index], unit) for key, (unit, _) in LINE_COLUMNS.items())
        cells = (percent(value) if unit == "fraction" else format_number(value, unit) for value, unit in values)
        line = _format_line(run if several else "", format_label(groups.labels[index]), cells)
        mark = f"  <- {jumps[run, index]}" if (run, index) in jumps else ""
        yield f"{line}{mark}{'  more data' if (run, index) in look.again else ''}"


def _find_jumps(look: Snapshot) -> Mapping[StepKey, str]:
    found = {}
    for name, run in look.result.runs.items():
        growth = get_summary(run).growth
        if growth.verdict == "grew" and growth.factor is not None:
            onset = [*map(format_label, run.groups.labels)].index(format_label(growth.onset))
            found[name, onset] = f"K3 {'jumps' if growth.shape == 'jump' else 'grows'} {format_number(growth.factor)}x"
    return found


def format_answers(look: Snapshot, runs: Iterable[str]) -> Iterator[str]:
    """Yield a line with status and reason for each run. If there are many, yield a headline and only the worst runs."""
    found = {run: run_status(look.result.runs[run]) for run in runs}
    if len(found) > MAX_FIRST_RUNS:
        head = runs_headline(found, calm_title(found))
        yield f"{head.status:<5}  {head.title}"
        found = {run: found[run] for run in by_severity(found)[:MAX_FIRST_RUNS] if found[run].status != "OK"}
    for run, judged in found.items():
        line = f"{judged.status:<5}  {shorten(run, 60)}: {shorten(judged.text, 300)}"
        yield from wrap(line, shutil.get_terminal_size((_WIDTH, 24)).columns, subsequent_indent=" " * 7)


def format_failures(look: Snapshot) -> list[str]:
    checks = [] if look.verdict is None else look.verdict.checks
    return [
        f"{shorten(check.run, 60)}: {check_sentence(check)} ({check.rule})"
        for check in checks
        if check.outcome == "failed"
    ]
