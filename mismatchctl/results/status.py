"""Status of a run: OK, CHECK or FAIL, with one sentence that answers whether the mismatch is a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mismatchctl.core.formatting import DASH, format_label, format_number
from mismatchctl.results.growth import Growth
from mismatchctl.results.model import NOT_RECORDED, Finding, K3Standing, RunResult, RunSummary
from mismatchctl.results.summary import (
    HARMLESS_CAUSES,
    SYMPTOMS,
    find_fixable,
    get_summary,
    headline_finding,
    headline_share,
    is_uncorrectable,
)

Status = Literal["OK", "CHECK", "FAIL"]
STATUSES: tuple[Status, ...] = ("FAIL", "CHECK", "OK")
"""The statuses, most severe first."""
DUMP_FAULTS = frozenset(
    {"unmasked_padding", "padding_or_sentinel", "duplicated_rows", "length_mismatch", "low_precision_logging"}
)  # fmt: skip
"""Causes that spoil the dump and not the training run."""
FAILING_GROWTH = 2.0
"""Growth of K3 from which a run fails."""
_NEARLY_ALL = 0.95


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, the sentence that explains it, and the finding that the sentence names."""

    status: Status
    text: str
    cause: Finding | None = None


def run_status(run: RunResult) -> RunStatus:
    """Judge a run from its K3, growth and findings."""
    summary, cause = get_summary(run), headline_finding(run.findings)
    parts = list(filter(None, (_describe_growth(summary.growth), _describe_level(summary))))
    named = cause is not None and cause.cause not in HARMLESS_CAUSES | SYMPTOMS
    if cause is not None and named:
        described = describe_cause(cause, run.findings)
        parts = [f"{parts[0]}: {lower_first(described)}"] if parts else [described]
    elif parts and (cause is None or cause.cause in SYMPTOMS):
        parts = [f"{parts[0]}, cause not identified"]
    status = _severity(run, summary)
    if not parts:
        if status == "OK":
            equal = run.overall.metrics.get("k3", NOT_RECORDED).value == 0
            parts = ["both sides are identical" if equal else "healthy; no correction needed"]
        else:
            parts = [_describe_doubt(run, summary)]
    return RunStatus(status, parts[0], cause if named else None)


def findings_status(findings: Sequence[Finding]) -> RunStatus:
    """Judge a run from its findings alone."""
    cause, fixable = headline_finding(findings), find_fixable(findings)
    if cause is None:
        return RunStatus("OK", "no cause found" if findings else "no finding")
    if cause.cause in HARMLESS_CAUSES and fixable is None:
        return RunStatus("OK", f"{cause.title}, no action needed", cause)
    grew = any(found.cause == "growing_mismatch" and found.confidence != "low" for found in findings)
    return RunStatus(
        "FAIL" if grew or _is_failure(fixable) else "CHECK",
        f"{describe_cause(cause, findings)} ({cause.confidence} confidence)", cause,
    )  # fmt: skip


def describe_cause(cause: Finding, findings: Sequence[Finding]) -> str:
    """Return the title of a cause, with its share of K3 if other causes have a large part."""
    share = headline_share(cause, findings)
    title = cause.title if cause.confidence == "high" else f"probably {lower_first(cause.title)}"
    return title if share is None or share >= _NEARLY_ALL else f"{title} ({percent(share)} of K3)"


def lower_first(text: str) -> str:
    """Return a title inside a sentence. Abbreviations keep their capitals."""
    first = text.partition(" ")[0]
    return text if first[1:] != first[1:].lower() else text[:1].lower() + text[1:]


def percent(share: float | None) -> str:
    """Format a share with three significant digits. Only a share of nearly 1 is shown as 100%."""
    if share is None:
        return DASH
    if 0 < abs(share) < 1e-5:
        return "<0.001%"
    return "100%" if 0.9995 <= share <= 1 else f"{100 * share:.3g}%"


def describe_range(standing: K3Standing) -> str:
    """Compare K3 with the usual ranges in a few words."""
    texts = {
        "identical": "both sides agree to the bit", "below": "very low", "dense": "normal for a dense model",
        "moe": "high for a dense model, normal for an MoE", "above": "high for every kind of model",
        "undefined": "undefined",
    }  # fmt: skip
    return texts[standing.range]


def _describe_growth(growth: Growth) -> str:
    if growth.verdict != "grew" or growth.factor is None:
        return ""
    return f"mismatch grew {format_number(growth.factor)}x since step {format_label(growth.onset)}"


def _describe_level(summary: RunSummary) -> str:
    against = summary.against
    if against is not None and against.factor is not None and against.interval is not None and against.interval[0] > 1:
        return f"K3 is {format_number(against.factor)}x the baseline's"
    return f"K3 is {describe_range(summary.standing)}" if summary.standing.range in ("moe", "above") else ""


def _describe_doubt(run: RunResult, summary: RunSummary) -> str:
    if summary.answer("how bad").key == "undefined":
        return summary.answer("how bad").text
    if any(judged.key == "wrong_log_probs" for judged in summary.judgements):
        return "the mean ratio is not 1: these are not the log-probs that sampled the tokens"
    if run.findings and run.findings[0].confidence == "low":
        return f"possibly {lower_first(run.findings[0].title)}"
    if summary.growth.verdict == "uneven":
        return "K3 is uneven over the steps"
    return "K3 may be higher than usual"


def _severity(run: RunResult, summary: RunSummary) -> Status:
    factor, cause = summary.growth.factor or 1.0, headline_finding(run.findings)
    # The errors of steps with few prompts are too small, so that healthy steps look uneven.
    explained = cause is not None and cause.cause in HARMLESS_CAUSES and cause.confidence != "low"
    fixable = find_fixable(run.findings)
    if _is_failure(fixable) or summary.answer("how bad").level == "bad":
        return "FAIL"
    if summary.growth.verdict == "grew" and factor >= FAILING_GROWTH:
        return "FAIL"
    calm = all(
        answer.level == "good"
        or (answer.level, answer.question) in (("unknown", "since when"), ("unknown", "why"))
        or (answer.key == "uneven" and explained)
        for answer in summary.answers
    )  # a single step has no trend, and a run without findings has no cause
    doubtful = any(judged.key == "wrong_log_probs" for judged in summary.judgements)
    return "OK" if calm and not doubtful and fixable is None else "CHECK"


def _is_failure(fixable: Finding | None) -> bool:
    return fixable is not None and is_uncorrectable(fixable) and fixable.cause not in DUMP_FAULTS
