"""What a reader should not overlook: sentences judged from a Result, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Sequence

from mismatchctl.numbers import counted
from mismatchctl.result.model import LeftOut, Result
from mismatchctl.result.story import MATTERS, story_of

SHOWN = 4
"""Places named for one matter."""


def data_notes(result: Result) -> list[str]:
    """What the pass warned of, and what was left out."""
    return [*result.warnings, *left_out_notes(result.provenance.left_out)]


def left_out_notes(left_out: Sequence[LeftOut]) -> list[str]:
    """What was left out, file by file."""
    return [
        f"left out {item.file}: {item.example}"
        if item.reason == "file"
        else f"left out of {item.file}: {counted(item.count, 'sequence')}, {item.reason} (first: {item.example})"
        for item in left_out
    ]


def notes(result: Result) -> list[str]:
    """What is to be said of the data, then what the numbers call for: one sentence per matter."""
    found: dict[str, list[str]] = {}
    for name, run in result.runs.items():
        for judged in story_of(run).judgements:
            place = f"{name}, " if len(result.runs) > 1 else ""
            found.setdefault(judged.key, []).append((place + judged.detail).rstrip(", "))
    return [*data_notes(result), *(_sentence(MATTERS[key], found[key]) for key in MATTERS if key in found)]


def _sentence(matter: str, details: list[str]) -> str:
    """A matter with its first few places."""
    shown = "; ".join(filter(None, details[:SHOWN]))
    more = f" and {len(details) - SHOWN} more" if len(details) > SHOWN else ""
    return f"{matter} ({shown}{more})" if shown else matter
