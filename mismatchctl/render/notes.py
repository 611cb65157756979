"""What a reader should not overlook: sentences judged from a Result, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mismatchctl.render.numbers import number
from mismatchctl.render.series import value_at
from mismatchctl.render.text import label
from mismatchctl.render.trend import Z_LIMIT
from mismatchctl.result import LeftOut, Result, RunResult, Value

MANY_REJECTED = 0.5
"""From this share of rejected tokens on, a correction is said to throw most of the data away."""
_MISSING = Value(value=None, status="not recorded")

WRONG_LOG_PROBS = (
    f"E[ratio] is more than {Z_LIMIT:g} standard errors off 1: these are not the log-probs that sampled; "
    "look for the cause before correcting"
)
HEAVY_TOKENS = "Pareto k-hat of tokens is above its limit: means of token ratios cannot be trusted"
HEAVY_SEQUENCES = "Pareto k-hat of sequences is above its limit: sequence-level weights do not converge"
NOTHING_LEFT = "a correction leaves nothing of some steps"
COSTLY = "a correction rejects more than half of the tokens"
MATTERS = (WRONG_LOG_PROBS, HEAVY_TOKENS, HEAVY_SEQUENCES, NOTHING_LEFT, COSTLY)
"""In the order in which they are told."""
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
        else f"left out of {item.file}: {item.count:,} sequence{'s' * (item.count != 1)}, {item.reason} "
        f"(first: {item.example})"
        for item in left_out
    ]


def notes(result: Result) -> list[str]:
    """What is to be said of the data, then what the numbers call for: one sentence per matter."""
    found: dict[str, list[str]] = {}
    for name, run in result.runs.items():
        for matter, detail in _matters(run):
            place = f"{name}, " if len(result.runs) > 1 else ""
            found.setdefault(matter, []).append((place + detail).rstrip(", "))
    return [*data_notes(result), *(_sentence(matter, found[matter]) for matter in MATTERS if matter in found)]


def _sentence(matter: str, details: list[str]) -> str:
    """A matter with its first few places."""
    shown = "; ".join(filter(None, details[:SHOWN]))
    more = f" and {len(details) - SHOWN} more" if len(details) > SHOWN else ""
    return f"{matter} ({shown}{more})" if shown else matter


def run_notes(run: RunResult) -> list[str]:
    """The sentences about one run alone."""
    return [f"{matter} ({detail})" if detail else matter for matter, detail in _matters(run)]


def _matters(run: RunResult) -> Iterator[tuple[str, str]]:
    """(what is the matter, the figures that say so) of one run."""
    metrics = run.overall.metrics
    z = metrics.get("ratio_mean_z", _MISSING).value
    if z is not None and abs(z) > Z_LIMIT:
        yield WRONG_LOG_PROBS, f"mean {number(metrics['ratio_mean'].value, 'ratio')}, z {z:+.1f}"
    for level, matter in (("token", HEAVY_TOKENS), ("sequence", HEAVY_SEQUENCES)):
        khat = metrics.get(f"khat_{level}", _MISSING).value
        limit = metrics.get(f"khat_{level}_limit", _MISSING).value
        if khat is not None and limit is not None and khat > limit:
            yield matter, f"{number(khat)}, limit {number(limit)}"
    for name in run.overall.corrections:
        empty = _steps_without_tokens(run, name)
        if empty:
            yield NOTHING_LEFT, f"{name}: {len(empty)} of {len(run.groups.labels)}, first {empty[0]}"
    for name, values in run.overall.corrections.items():
        share = values.get("rejected_tokens", _MISSING).value
        if share is not None and share > MANY_REJECTED:
            yield COSTLY, f"{name}: {number(share, 'fraction')}"


def _steps_without_tokens(run: RunResult, correction: str) -> list[str]:
    kept = run.groups.corrections.get(correction, {}).get("kept_tokens")
    values = [value_at(kept, index).value for index in range(len(run.groups.labels))]
    return [label(step) for step, tokens in zip(run.groups.labels, values, strict=True) if tokens == 0]
