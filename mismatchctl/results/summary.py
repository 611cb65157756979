"""Summary of a run: how bad the mismatch is, since when, why, and what to do. Also the run's status and notes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mismatchctl.core.formatting import (
    DASH,
    INTERVAL_Z,
    ONE_SIDED_Z,
    format_count,
    format_estimate,
    format_label,
    format_number,
)
from mismatchctl.core.ratios import DENSE_RANGE, MOE_RANGE
from mismatchctl.results.growth import Z_LIMIT, Growth, Label, check_outliers, fit_growth
from mismatchctl.results.model import (
    MASKED_TOKENS,
    NOT_RECORDED,
    Answer,
    AnswerLevel,
    BaselineRatio,
    Fact,
    Finding,
    Judgement,
    K3Standing,
    RangeName,
    Result,
    RunResult,
    RunSummary,
    SkippedData,
    Value,
    find_run,
)

MANY_REJECTED = 0.5
"""A correction that rejects more than this share of tokens gets the warning `costly`."""
LOSS_SCALE_RANGE = (0.8, 1.25)
"""A correction whose `loss_scale` is outside this range is reported, because it changes the effective learning rate."""
HARMLESS_CAUSES = frozenset({"identical", "numerical_noise", "log_densities", "batch_dependent_kernels"})
"""Causes that need no action."""
SYMPTOMS = frozenset({"growing_mismatch", "unexplained"})
"""Findings that describe the mismatch instead of its cause. Headlines show causes first."""
MIN_HEADLINE_SHARE = 0.05
"""A finding must explain at least this share of K3 to be in the headline."""
CORRECTABLE_CAUSES = frozenset(
    {"numerical_noise", "moe_routing", "quantized_rollout", "cache_quantization", "weights_differ", "stale_policy",
     "growing_mismatch", "identical", "unexplained"}
)  # fmt: skip
"""Causes that `find_fixable` skips, because they are left to corrections or cannot be fixed, such as `unexplained`."""
CAUSES_WITH_VALID_ROLLOUT = frozenset(
    {"temperature", "truncated_sampling", "low_precision_logging", "stale_step", "logit_penalty"}
)
"""Causes that leave the rollout log-probs valid. Importance weights then help until the cause is fixed."""


def get_summary(run: RunResult) -> RunSummary:
    run.story = run.story or summarize_run(run)
    return run.story


def summarize_run(run: RunResult, baseline: tuple[str, RunResult] | None = None) -> RunSummary:
    k3, growth = run.overall.metrics.get("k3"), fit_run_growth(run)
    standing = classify_k3(k3)
    against = None if baseline is None else _compare_with_baseline(k3, *baseline)
    answers = [
        _answer_how_bad(k3, standing, against),
        _answer_since_when(growth, run),
        _answer_why(run.findings, k3, growth),
    ]
    judgements = [Judgement(key=key, text=JUDGEMENT_TEXTS[key], detail=detail) for key, detail in _find_judgements(run)]
    return RunSummary(
        standing=standing, growth=growth, judgements=judgements, against=against,
        answers=[*answers, answer_what_to_do(run.findings, answers)],
    )  # fmt: skip


def summarize_runs(result: Result, baseline: tuple[str, Result] | None = None) -> None:
    """Store a summary in each run. Compare it with the run of the same name, or the only run, in the baseline."""
    for name, run in result.runs.items():
        chosen = None if baseline is None else find_run(baseline[1], name)
        run.story = summarize_run(
            run, None if baseline is None or chosen is None else (baseline[0], baseline[1].runs[chosen])
        )


def fit_run_growth(run: RunResult) -> Growth:
    metrics, labels = run.groups.metrics, run.groups.labels
    series = metrics.get("k3")
    none: list[float | None] = [None] * len(labels)
    values = series.value if series else none
    growth = fit_growth(labels, values, (series and series.se) or none)
    if not {"abs_diff_p99", "beyond_2", "tokens"} <= metrics.keys():
        return growth
    shares = zip(metrics["beyond_2"].value, metrics["tokens"].value, strict=True)
    outliers = [None if share is None or count is None else share * count for share, count in shares]
    return check_outliers(growth, labels, values, metrics["abs_diff_p99"].value, outliers)


RANGE_TEXTS: dict[RangeName, str] = {
    "identical": "both sides agree to the bit", "below": "very low", "dense": "normal for a dense model",
    "moe": "high for a dense model, normal for an MoE", "above": "high for every kind of model",
    "undefined": "undefined",
}  # fmt: skip


def classify_k3(k3: Value | None) -> K3Standing:
    value = None if k3 is None else k3.value
    ends: dict[RangeName, float] = {"below": DENSE_RANGE[0], "dense": DENSE_RANGE[1], "moe": MOE_RANGE[1]}
    if k3 is None or not value:
        name: RangeName = "undefined" if value is None else "identical"
        return K3Standing(range=name, text=RANGE_TEXTS[name])
    name = next((name for name, end in ends.items() if value < end), "above")
    near = next((end for end in ends.values() if k3.se is not None and not abs(value - end) >= 2 * k3.se), None)
    across = "" if near is None else f"; within noise, K3 may also be {'above' if value < near else 'below'} {near:g}"
    return K3Standing(range=name, sure=near is None, text=f"{RANGE_TEXTS[name]}{across}")


def _compare_with_baseline(k3: Value | None, path: str, run: RunResult) -> BaselineRatio | None:
    before = run.overall.metrics.get("k3")
    now, then = (None if value is None else value.value for value in (k3, before))
    if not now or not then:
        return BaselineRatio(baseline=path, k3=then, text=f"the baseline's K3 is {format_number(then)}")
    parts = [value.se / value.value for value in (k3, before) if value and value.se and value.value]
    error, factor = math.hypot(*parts), now / then
    low, high = ends = factor * math.exp(-INTERVAL_Z * error), factor * math.exp(INTERVAL_Z * error)
    text = f"{format_number(factor)} times the baseline's {format_number(then)}"
    text += f" ({format_number(low)} to {format_number(high)})"
    text += ": no significant change" if abs(math.log(factor)) <= ONE_SIDED_Z * error else ""
    return BaselineRatio(baseline=path, k3=then, factor=factor, interval=ends, text=text)


def k3_interval(k3: Value) -> tuple[float, float] | None:
    """Return the 95% interval of K3. If only the standard error is known, use a symmetric interval."""
    if k3.interval or not k3.se or k3.value is None:
        return k3.interval
    return max(k3.value - INTERVAL_Z * k3.se, 0.0), k3.value + INTERVAL_Z * k3.se


def _answer_how_bad(k3: Value | None, standing: K3Standing, against: BaselineRatio | None) -> Answer:
    value = None if k3 is None else k3.value
    if k3 is None or value is None:
        why = "not measured" if k3 is None else k3.status
        return Answer(question="how bad", key="undefined", level="unknown", text=f"K3 is undefined: {why}")
    facts = [Fact(name="k3", value=value, interval=k3_interval(k3), meaning="nats per token, 95% interval")]
    tail = " (a few prompts dominate)" if k3.tail else ""
    text = f"K3 {format_estimate(value, k3.se, 'nats/token', k3.interval)} nats/token{tail}: {standing.text}"
    worse = False
    if against is not None:
        text += f"; {against.text}"
        if against.factor is not None:
            said = "K3 divided by the baseline's K3, with its 95% interval"
            facts.append(Fact(name="over_baseline", value=against.factor, interval=against.interval, meaning=said))
        worse = against.rose
    levels: dict[RangeName, AnswerLevel] = {"moe": "fair", "above": "bad"}
    may_be_more = not standing.sure and value + 2 * (k3.se or 0.0) > DENSE_RANGE[1]  # then the level must not be "good"
    level = "bad" if worse else levels.get(standing.range, "fair" if may_be_more else "good")
    return Answer(question="how bad", key=standing.range, level=level, text=text, evidence=facts)


def _answer_since_when(growth: Growth, run: RunResult) -> Answer:
    facts = []
    if growth.factor is not None:
        facts.append(Fact(name="growth", value=growth.factor, interval=growth.interval, meaning="K3 after / before"))
    if growth.onset is not None:
        facts.append(Fact(name="onset", value=growth.onset, meaning="first step with another K3 than before"))
    cause = headline_finding(run.findings)
    # With few prompts per step, standard errors are too small, so that even a healthy run looks uneven.
    harmless = cause is not None and cause.cause in HARMLESS_CAUSES and cause.confidence != "low"
    uneven: AnswerLevel = "good" if harmless else "fair"
    levels: dict[str, AnswerLevel] = {"grew": "bad", "uneven": uneven, "unknown": "unknown"}
    text = f"K3 {growth.text}"
    if growth.verdict == "unknown":
        steps = len(run.groups.labels)
        text = "a single step does not show a trend" if steps < 2 else f"K3 is {growth.text}"
    return Answer(
        question="since when", key=growth.verdict, level=levels.get(growth.verdict, "good"), text=text, evidence=facts
    )


def _answer_why(findings: Sequence[Finding], k3: Value | None, growth: Growth) -> Answer:
    if not findings:
        text = "no finding" if k3 is not None else "not tested"
        return Answer(question="why", key="none", level="unknown", text=text)
    first = headline_finding(findings) or findings[0]
    second = next((found for found in findings if found is not first), None)
    share = f", {percent(first.share_k3)} of the K3" if first.share_k3 is not None else ""
    level: AnswerLevel = "good" if first.cause in HARMLESS_CAUSES else "unknown" if first.confidence == "low" else "bad"
    facts = [Fact(name="share_k3", value=first.share_k3, meaning="share of the K3 that the cause explains")]
    summary = first.summary.replace(f" K3 {growth.text}.", "")  # it is the answer to "since when"
    text = f"{first.title} ({first.confidence} confidence{share}): {summary}"
    if second is not None and second.share_k3 and second.confidence != "low":
        text += f" Then: {second.title}, {percent(second.share_k3)}."
    return Answer(question="why", key=first.cause, level=level, text=text, evidence=facts)


def answer_what_to_do(findings: Sequence[Finding], others: Sequence[Answer]) -> Answer:
    fix = find_fixable(findings, MIN_HEADLINE_SHARE)
    if fix is not None:
        hopeless = is_uncorrectable(fix)
        head = "fix this first, no correction can repair it" if hopeless else "fix this first; weights help until then"
        return Answer(
            question="what to do",
            key="fix_first" if hopeless else "fix",
            level="bad",
            text=f"{head}: {first_sentence(fix.advice)}",
        )
    first = findings[0] if findings else None
    calm = first is None or first.cause in HARMLESS_CAUSES or first.confidence == "low"
    if calm and all(answer.level in ("good", "unknown") for answer in others):
        if first is not None and first.confidence == "low":
            tell = f". To find out, {first.rivals[0].tell}" if first.rivals else ""
            text = f"no correction is needed so far, but the cause is uncertain{tell}"
            return Answer(question="what to do", key="nothing", level="unknown", text=text)
        return Answer(question="what to do", key="nothing", level="good", text="no correction is needed")
    advice = "" if first is None or calm else f"{first_sentence(first.advice)} "
    text = f"{advice}Compare corrections and their costs with mismatchctl advise."
    return Answer(question="what to do", key="ask", level="fair", text=text)


def headline_finding(findings: Sequence[Finding]) -> Finding | None:
    """Return the first cause that explains at least 5% of K3, or else a symptom, or else a harmless cause."""
    sure = [found for found in findings if found.confidence != "low"]
    large = [one for one in sure if one.share_k3 is None or one.share_k3 >= MIN_HEADLINE_SHARE]
    ranked = sorted(large, key=lambda found: (found.cause in HARMLESS_CAUSES, found.cause in SYMPTOMS))
    return ranked[0] if ranked else None


def changes_loss_scale(run: RunResult, name: str) -> bool:
    scale = _metric_value(run.overall.corrections[name].get("loss_scale"))
    return scale is not None and not LOSS_SCALE_RANGE[0] <= scale <= LOSS_SCALE_RANGE[1]


def find_fixable(findings: Sequence[Finding], least_share: float = 0.0) -> Finding | None:
    """Return the first cause that can be fixed and explains at least `least_share` of K3."""
    found = (finding for finding in findings if finding.confidence != "low" and finding.cause not in CORRECTABLE_CAUSES)
    return next((one for one in found if one.share_k3 is None or one.share_k3 >= least_share), None)


def find_growth(findings: Sequence[Finding]) -> float | None:
    """Return the growth factor of K3, from the evidence of the first finding that reports growth."""
    for finding in findings:
        facts = {fact.name: fact.value for fact in finding.evidence}
        factor = facts.get("factor")
        if finding.confidence != "low" and "onset" in facts and isinstance(factor, float) and factor > 1:
            return factor
    return None


def is_uncorrectable(finding: Finding) -> bool:
    """Return True if the cause has high confidence and no correction helps against it."""
    return finding.cause not in CAUSES_WITH_VALID_ROLLOUT and finding.confidence == "high"


def first_sentence(advice: str) -> str:
    plain = advice
    while (shorter := re.sub(r" \([^()]*\)", "", plain)) != plain:  # parentheses can be nested
        plain = shorter
    return f"{plain.split('. ')[0].rstrip('.')}."


JUDGEMENT_TEXTS = {
    "wrong_log_probs": f"the mean ratio is more than {Z_LIMIT:g} standard errors away from 1. Either the rollout "
    "column has wrong log-probs, or only the engine uses top-k or top-p. Find the cause before you use a correction",
    "heavy_tokens": "a few tokens dominate the token ratios, so means of these ratios are unreliable",
    "heavy_sequences": "a few sequences dominate the sequence ratios, so means of sequence weights are unreliable",
    "nothing_left": "a correction rejects all tokens of some steps",
    "costly": "a correction rejects more than half of the tokens",
}


def _find_judgements(run: RunResult) -> Iterator[tuple[str, str]]:
    metrics = run.overall.metrics
    z = _metric_value(metrics.get("ratio_mean_z"))
    if z is not None and abs(z) > Z_LIMIT:
        yield "wrong_log_probs", f"mean {format_number(_metric_value(metrics.get('ratio_mean')), 'ratio')}, z {z:+.1f}"
    for level in ("token", "sequence"):
        khat, limit = (_metric_value(metrics.get(f"khat_{level}{end}")) for end in ("", "_limit"))
        if khat is not None and limit is not None and khat > limit:
            yield f"heavy_{level}s", f"Pareto k-hat {format_number(khat)}, limit {format_number(limit)}"
    for name in run.overall.corrections:
        kept = run.groups.corrections.get(name, {}).get("kept_tokens")
        empty = [step for step, left in zip(run.groups.labels, kept.value if kept else (), strict=False) if left == 0]
        if empty:
            yield (
                "nothing_left",
                f"{name}: {len(empty)} of {len(run.groups.labels)} steps, the first is step {format_label(empty[0])}",
            )
    for name, values in run.overall.corrections.items():
        share = _metric_value(values.get("rejected_tokens"))
        if share is not None and share > MANY_REJECTED:
            yield "costly", f"{name}: {format_number(share, 'fraction')}"


def _metric_value(found: Value | None) -> float | None:
    return None if found is None else found.value


SHOWN_PLACES = 4


def data_notes(result: Result) -> list[str]:
    return [*result.warnings, *skipped_data_notes(result.provenance.left_out)]


def left_out_facts(left_out: Sequence[SkippedData]) -> list[str]:
    counts = Counter[tuple[str, str]]()
    for item in left_out:
        if item.reason == MASKED_TOKENS:
            counts["token", "with train probability 0" if item.example.endswith("-inf") else "masked"] += item.count
        else:
            counts["file" if item.reason == "file" else "sequence", "left out"] += item.count
    return [f"{format_count(count, kind)} {what}" for (kind, what), count in counts.items()]


def skipped_data_notes(left_out: Sequence[SkippedData]) -> list[str]:
    return [_skipped_data_note(item) for item in left_out]


def _skipped_data_note(item: SkippedData) -> str:
    if item.reason == "file":
        return f"left out {item.file}: {item.example}"
    if item.reason == MASKED_TOKENS:
        if item.example.endswith("-inf"):
            count = format_count(item.count, "token")
            return f"{item.file}: {count} with train probability 0: means leave these tokens out, vetoes count them"
        return f"masked in {item.file}: {format_count(item.count, 'token')} without a value in {item.example}"
    return f"left out of {item.file}: {format_count(item.count, 'sequence')}, {item.reason} (first: {item.example})"


NO_PROMPTS = "No prompt ids: responses are treated as independent, intervals may be too narrow"


def prompt_notes(runs: Iterable[RunResult]) -> list[str]:
    unnamed = (run.clusters.by != "prompt" and (run.overall.metrics["sequences"].value or 0) > 1 for run in runs)
    return [NO_PROMPTS] if any(unnamed) else []


def names_not_compared(run: RunResult) -> list[str]:
    compared = {name for found in run.against.values() for name in found.names}
    compared |= {*run.against_metrics.names} if run.against_metrics else set()
    return [
        name for name in run.log
        if name not in compared and name.removeprefix("train/").removeprefix("actor/") not in compared
    ]  # fmt: skip


def list_notes(result: Result) -> list[str]:
    found: dict[str, list[str]] = {}
    for name, run in result.runs.items():
        for judged in get_summary(run).judgements:
            place = f"{name}, " if len(result.runs) > 1 else ""
            found.setdefault(judged.key, []).append((place + judged.detail).rstrip(", "))
    return [
        *data_notes(result),
        *prompt_notes(result.runs.values()),
        *(_format_sentence(JUDGEMENT_TEXTS[key], found[key]) for key in JUDGEMENT_TEXTS if key in found),
    ]


def _format_sentence(matter: str, details: list[str]) -> str:
    shown = "; ".join(filter(None, details[:SHOWN_PLACES]))
    more = f" and {len(details) - SHOWN_PLACES} more" if len(details) > SHOWN_PLACES else ""
    return f"{matter} ({shown}{more})" if shown else matter


Status = Literal["OK", "CHECK", "FAIL"]
STATUSES: tuple[Status, ...] = ("FAIL", "CHECK", "OK")
"""The statuses, most severe first."""
DUMP_FAULTS = frozenset(
    {"unmasked_padding", "padding_or_sentinel", "duplicated_rows", "length_mismatch", "low_precision_logging"}
)  # fmt: skip
"""Causes that are errors in the dump, such as duplicated rows, and not in the training run."""
FAILING_GROWTH = 2.0
"""A run fails if K3 grows by at least this factor."""
_NEARLY_ALL = 0.95


@dataclass(frozen=True)
class RunStatus:
    """Status of a run: OK, CHECK or FAIL. `text` is the reason, and `cause` the finding that it mentions."""

    status: Status
    text: str
    cause: Finding | None = None


def run_status(run: RunResult) -> RunStatus:
    summary, cause = get_summary(run), headline_finding(run.findings)
    named = cause is not None and cause.cause not in HARMLESS_CAUSES | SYMPTOMS
    growth, text, status = summary.growth, _describe_level(summary, named=named), _severity(run, summary)
    if growth.verdict == "grew" and growth.factor is not None:
        text = f"mismatch grew {format_number(growth.factor)}x since step {format_label(growth.onset)}"
    if cause is not None and named:
        text = f"{text}: {lower_first(describe_cause(cause))}" if text else describe_cause(cause)
    elif text and (cause is None or cause.cause in SYMPTOMS):
        text += f", {_describe_uncertainty(run.findings)}"
    if not text and status == "OK":
        equal = run.overall.metrics.get("k3", NOT_RECORDED).value == 0
        text = "both sides are identical" if equal else "healthy; no correction needed"
    return RunStatus(status, text or _describe_doubt(run, summary), cause if named else None)


def findings_status(findings: Sequence[Finding]) -> RunStatus:
    cause, fixable = headline_finding(findings), find_fixable(findings)
    if not findings:
        return RunStatus("OK", "no finding")
    shown, unsure = cause or findings[0], findings[0].confidence == "low"
    if shown.cause in HARMLESS_CAUSES and fixable is None and not unsure:
        return RunStatus("OK", f"{shown.title}, no action needed", shown)
    if cause is None or (cause.cause in HARMLESS_CAUSES and unsure):
        return RunStatus("FAIL" if _is_failure(fixable) else "CHECK", _describe_uncertainty(findings))
    sure = (found for found in findings if found.confidence != "low")
    grew = any(fact.name == "onset" for found in sure for fact in found.evidence)
    return RunStatus(
        "FAIL" if grew or _is_failure(fixable) else "CHECK",
        f"{describe_cause(cause)} ({cause.confidence} confidence)", cause,
    )  # fmt: skip


def _describe_uncertainty(findings: Sequence[Finding]) -> str:
    first = findings[0] if findings else None
    if first is None or first.cause in SYMPTOMS:
        return "cause not identified"
    return (
        f"cause uncertain, possibly {lower_first(first.title)}" if first.confidence == "low" else "main cause unknown"
    )


def describe_cause(cause: Finding) -> str:
    """Return the title of a cause. If the cause explains less than 95% of K3, add its share."""
    share = cause.share_k3
    likely = cause.confidence != "high" and cause.cause != "unexplained"
    title = f"probably {lower_first(cause.title)}" if likely else cause.title
    return title if share is None or share >= _NEARLY_ALL else f"{title} ({percent(share)} of K3)"


def lower_first(text: str) -> str:
    """Start a text with a lower-case letter, for use inside a sentence. Abbreviations keep their capitals."""
    first = text.partition(" ")[0]
    return text if first[1:] != first[1:].lower() else text[:1].lower() + text[1:]


def percent(share: float | None) -> str:
    """Format a share as a percentage with three significant digits, but as 100% only if it is at least 99.95%."""
    if share is None:
        return DASH
    if 0 < abs(share) < 1e-5:
        return "<0.001%"
    if abs(share) >= 10:
        return f"{100 * share:,.0f}%"
    return "100%" if 0.9995 <= share <= 1 else f"{100 * share:.3g}%"


def describe_onset(growth: Growth, last_step: Label = None) -> str:
    if growth.factor is None or growth.onset is None:
        return ""
    first, last = map(format_label, growth.onset_interval or (growth.onset, growth.onset))
    at = f"{format_label(growth.onset)}{'' if first == last else f' ({first}–{last})'}"
    end = "" if last_step is None else f" at step {format_label(last_step)}"
    return f"{format_number(growth.before)} → {format_number(growth.value)}{end}, onset at step {at}"


def _describe_level(summary: RunSummary, *, named: bool) -> str:
    """Describe K3 if it is high. A K3 that is only normal for MoE models counts as high if no cause is `named`."""
    against = summary.against
    if against is not None and against.factor is not None and against.rose:
        return f"K3 is {format_number(against.factor)}x the baseline's"
    told = ("above",) if named else ("moe", "above")
    return f"K3 is {RANGE_TEXTS[summary.standing.range]}" if summary.standing.range in told else ""


def _describe_doubt(run: RunResult, summary: RunSummary) -> str:
    if summary.answer("how bad").key == "undefined":
        return summary.answer("how bad").text
    if any(judged.key == "wrong_log_probs" for judged in summary.judgements):
        return "the mean ratio is not 1: wrong rollout log-probs, or top-k or top-p on one side only"
    if run.findings and run.findings[0].confidence == "low":
        return f"possibly {lower_first(run.findings[0].title)}"
    if summary.growth.verdict == "uneven":
        return "K3 is uneven over the steps"
    return "K3 may be higher than usual"


def _severity(run: RunResult, summary: RunSummary) -> Status:
    factor, fixable = summary.growth.factor or 1.0, find_fixable(run.findings)
    if _is_failure(fixable) or summary.answer("how bad").level == "bad":
        return "FAIL"
    if summary.growth.verdict == "grew" and factor >= FAILING_GROWTH:
        return "FAIL"
    calm = all(
        answer.level == "good" or (answer.level, answer.question) in (("unknown", "since when"), ("unknown", "why"))
        for answer in summary.answers
    )  # a single step has no trend, and a run without findings has no cause
    doubtful = any(judged.key == "wrong_log_probs" for judged in summary.judgements)
    return "OK" if calm and not doubtful and fixable is None else "CHECK"


def _is_failure(fixable: Finding | None) -> bool:
    return fixable is not None and is_uncorrectable(fixable) and fixable.cause not in DUMP_FAULTS
