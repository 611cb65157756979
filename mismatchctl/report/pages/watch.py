"""The lines that `watch` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mismatchctl.api.gate.verdict import check_sentence
from mismatchctl.api.watch import Snapshot
from mismatchctl.core.formatting import format_estimate, format_label, shorten
from mismatchctl.report.tables import SHORT_TITLES
from mismatchctl.results.summary import get_summary

LINE_COLUMNS = {
    "tokens": ("tokens", 10),
    "k3": ("nats/token", 20),
    "abs_diff_mean": ("nats", 11),
    "abs_diff_max": ("nats", 14),
    "ess_token": ("fraction", 10),
    "ess_sequence": ("fraction", 13),
}
"""(unit, width) per metric."""
_STEP_WIDTH, _RUN_WIDTH = 8, 14


def format_header(several: bool) -> str:
    """Return the header line."""
    named = (
        f"{SHORT_TITLES.get(key, key)}{f' ({unit})' * (unit == 'nats/token')}"
        for key, (unit, _) in LINE_COLUMNS.items()
    )
    return _format_line("run" if several else "", "step", named)


def _format_line(run: str, step: str, cells: Iterable[str]) -> str:
    placed = [cell.rjust(width) for cell, (_, width) in zip(cells, LINE_COLUMNS.values(), strict=True)]
    return "  ".join(
        [
            *([shorten(run, _RUN_WIDTH).ljust(_RUN_WIDTH)] if run else []),
            shorten(step, _STEP_WIDTH).ljust(_STEP_WIDTH),
            *placed,
        ]
    )


def format_new_steps(look: Snapshot) -> Iterator[str]:
    """Yield a line for each step that is new or has more data."""
    several = len(look.result.runs) > 1
    for run, index in look.steps:
        groups = look.result.runs[run].groups
        values = ((groups.series(key).value_at(index), unit, key == "k3") for key, (unit, _) in LINE_COLUMNS.items())
        cells = (format_estimate(value.value, value.se if errors else None, unit) for value, unit, errors in values)
        line = _format_line(run if several else "", format_label(groups.labels[index]), cells)
        yield line + ("  more data" if (run, index) in look.again else "")


def format_changed_answers(look: Snapshot) -> Iterator[str]:
    """Yield the summary of each run whose answers changed."""
    for run in look.answered:
        if len(look.result.runs) > 1:
            yield shorten(run, 60)
        for answer in get_summary(look.result.runs[run]).answers:
            yield f"  {answer.question}: {shorten(answer.text, 400)}"


def format_failures(look: Snapshot) -> list[str]:
    """Return one line per failed check."""
    checks = [] if look.verdict is None else look.verdict.checks
    return [
        f"{shorten(check.run, 60)}: {check_sentence(check)} ({check.rule})"
        for check in checks
        if check.outcome == "failed"
    ]
