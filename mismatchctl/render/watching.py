"""What `watch` prints: a line per step, the answer when it changes, what rules say."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.gate.words import sentence
from mismatchctl.numbers import DASH, estimate, label, number
from mismatchctl.render.tables import SHORT
from mismatchctl.render.text import short
from mismatchctl.result import RunResult
from mismatchctl.result.story import story_of
from mismatchctl.watch import Look

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
    named = [
        f"{SHORT.get(key, key)}{f' ({unit})' * (unit == 'nats/token')}".rjust(width)
        for key, (unit, width) in COLUMNS.items()
    ]
    return "  ".join([*(["run".ljust(_RUN)] if several else []), "step".ljust(_STEP), *named])


def lines(look: Look) -> Iterator[str]:
    """A line for each step that is new, or has more data than before."""
    several = len(look.result.runs) > 1
    for run, index in look.steps:
        found = look.result.runs[run]
        cells = [short(run, _RUN).ljust(_RUN)] if several else []
        cells.append(short(label(found.groups.labels[index]), _STEP).ljust(_STEP))
        cells += [_cell(found, key, index, unit).rjust(width) for key, (unit, width) in COLUMNS.items()]
        yield "  ".join(cells) + ("  more data" if (run, index) in look.again else "")


def _cell(run: RunResult, key: str, index: int, unit: str) -> str:
    value = run.groups.series(key).at(index)
    if value.value is None:
        return DASH
    return estimate(value.value, value.se, unit) if key == "k3" else number(value.value, unit)


def answers(look: Look) -> Iterator[str]:
    """The four lines of each run whose answer changed."""
    for run in look.answered:
        if len(look.result.runs) > 1:
            yield short(run, 60)
        for answer in story_of(look.result.runs[run]).answers:
            yield f"  {answer.question}: {short(answer.text, 400)}"


def failures(look: Look) -> list[str]:
    """What rules do not let pass, a sentence each."""
    checks = [] if look.verdict is None else look.verdict.checks
    return [
        f"{short(check.run, 60)}: {sentence(check)} ({check.rule})" for check in checks if check.outcome == "failed"
    ]
