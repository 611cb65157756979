"""What `watch` prints: a line per step, the answer when it changes, what rules say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mismatchctl.gate.words import sentence
from mismatchctl.numbers import estimate, label
from mismatchctl.render.tables import SHORT
from mismatchctl.render.text import short
from mismatchctl.result.story import story_of
from mismatchctl.watch import Snapshot

COLUMNS = {
    "tokens": ("tokens", 10),
    "k3": ("nats/token", 20),
    "abs_diff_mean": ("nats", 11),
    "abs_diff_max": ("nats", 14),
    "ess_token": ("fraction", 10),
    "ess_sequence": ("fraction", 13),
}
"""(unit, width) of each."""
_STEP, _RUN = 8, 14


def head(several: bool) -> str:
    """The names of the columns."""
    named = (f"{SHORT.get(key, key)}{f' ({unit})' * (unit == 'nats/token')}" for key, (unit, _) in COLUMNS.items())
    return _line("run" if several else "", "step", named)


def _line(run: str, step: str, cells: Iterable[str]) -> str:
    placed = [cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS.values(), strict=True)]
    return "  ".join([*([short(run, _RUN).ljust(_RUN)] if run else []), short(step, _STEP).ljust(_STEP), *placed])


def lines(look: Snapshot) -> Iterator[str]:
    """A line for each step that is new, or has more data than before."""
    several = len(look.result.runs) > 1
    for run, index in look.steps:
        groups = look.result.runs[run].groups
        values = ((groups.series(key).at(index), unit, key == "k3") for key, (unit, _) in COLUMNS.items())
        cells = (estimate(value.value, value.se if errors else None, unit) for value, unit, errors in values)
        line = _line(run if several else "", label(groups.labels[index]), cells)
        yield line + ("  more data" if (run, index) in look.again else "")


def answers(look: Snapshot) -> Iterator[str]:
    """The four lines of each run whose answer changed."""
    for run in look.answered:
        if len(look.result.runs) > 1:
            yield short(run, 60)
        for answer in story_of(look.result.runs[run]).answers:
            yield f"  {answer.question}: {short(answer.text, 400)}"


def failures(look: Snapshot) -> list[str]:
    """What rules do not let pass, a sentence each."""
    checks = [] if look.verdict is None else look.verdict.checks
    return [
        f"{short(check.run, 60)}: {sentence(check)} ({check.rule})" for check in checks if check.outcome == "failed"
    ]
