"""Notes on a Result: warnings about the data and the metrics, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence

from mismatchctl.core.formatting import format_count
from mismatchctl.results.model import Result, SkippedData
from mismatchctl.results.summary import JUDGEMENT_TEXTS, get_summary

SHOWN_PLACES = 4
"""Places named for one matter."""


def data_notes(result: Result) -> list[str]:
    """What the pass warned of, and what was left out."""
    return [*result.warnings, *skipped_data_notes(result.provenance.left_out)]


def skipped_data_notes(left_out: Sequence[SkippedData]) -> list[str]:
    """What was left out, file by file."""
    return [
        f"left out {item.file}: {item.example}"
        if item.reason == "file"
        else f"left out of {item.file}: {format_count(item.count, 'sequence')}, {item.reason} (first: {item.example})"
        for item in left_out
    ]


def list_notes(result: Result) -> list[str]:
    """What is to be said of the data, then what the numbers call for: one sentence per matter."""
    found: dict[str, list[str]] = {}
    for name, run in result.runs.items():
        for judged in get_summary(run).judgements:
            place = f"{name}, " if len(result.runs) > 1 else ""
            found.setdefault(judged.key, []).append((place + judged.detail).rstrip(", "))
    return [
        *data_notes(result),
        *(_format_sentence(JUDGEMENT_TEXTS[key], found[key]) for key in JUDGEMENT_TEXTS if key in found),
    ]


def _format_sentence(matter: str, details: list[str]) -> str:
    """A matter with its first few places."""
    shown = "; ".join(filter(None, details[:SHOWN_PLACES]))
    more = f" and {len(details) - SHOWN_PLACES} more" if len(details) > SHOWN_PLACES else ""
    return f"{matter} ({shown}{more})" if shown else matter
