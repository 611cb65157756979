"""Check that a Result covers the data of its baseline and that the two are comparable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mismatchctl.api.gate.rules import Rule, RuleTarget, find_rule_target
from mismatchctl.api.gate.verdict import Check
from mismatchctl.core.batch import Float64s
from mismatchctl.errors import option
from mismatchctl.results.model import MASKED_TOKENS, Result, RunResult, storage_types
from mismatchctl.stats.samples import ClusterSample, build_run_sample


def find_matching_run(name: str, baseline: Result) -> tuple[str, RunResult] | None:
    """Return the baseline's run with this name, or its only run."""
    if name in baseline.runs:
        return name, baseline.runs[name]
    return next(iter(baseline.runs.items())) if len(baseline.runs) == 1 else None


def find_incompatibility(
    target: RuleTarget, run: str, result: Result, baseline_run: str, baseline: Result
) -> str | None:
    """Return the first reason why a metric is not comparable with the baseline, if any.

    Metric definitions belong to the Result's format, which is checked on reading.
    """
    stored = storage_types(baseline, baseline_run)
    for column, here in storage_types(result, run).items():
        if here != stored[column]:
            return f"{column} is stored as {here} here, as {stored[column]} in the baseline"
    if target.correction is not None:
        found = [
            next((item for item in each.corrections if item.name == target.correction), None)
            for each in (result, baseline)
        ]
        if found[1] is None:
            return f"the baseline has no correction {target.correction}"
        if found[0] != found[1]:
            return f"correction {target.correction} is defined otherwise in the baseline"
    version_here, version_there = result.provenance.framework, baseline.provenance.framework
    if version_here and version_there and version_here != version_there:
        return f"framework version: {version_here} here, {version_there} in the baseline"
    if target.logged_by and version_there is None:
        return f"the baseline holds no numbers as {target.logged_by} logs them: save it from a gate with such a rule"
    if target.logged_by and result.provenance.replay != baseline.provenance.replay:
        return f"{target.logged_by} is replayed in another way in the baseline"
    return None


MAX_SKIPPED = 0.01
"""Maximum share of sequences or files left out."""
MUCH_SMALLER_SHARE = 0.75
"""Share of the baseline's tokens, sequences or steps below which a note says so."""
_MIN_SMALLER_PROMPTS = 8
"""Number of shared prompts that by chance all have fewer tokens once in 2^8 dumps."""
_RESPONSE_COLUMNS = ("sequences", "empty_sequences")
_COUNT_COLUMNS = ("tokens", "sequences", "squared_length")
COVERAGE_RULE = "coverage"
"""Rule name of checks that do not belong to a rule."""
WHOLE_FILE_REASON = "file"
"""Reason under which a Result counts skipped files."""


def check_coverage(result: Result, rules: Sequence[Rule], baseline: Result | None, max_skipped: float) -> list[Check]:
    """Return checks of skipped data, of runs and places missing from the Result, and of hidden tokens.

    Args:
        result: the Result to judge.
        rules: rules per step or per value, which need each step or value of the baseline.
        baseline: the last accepted Result, if any.
        max_skipped: maximum share of sequences or files left out.

    Raises:
        ConfigError: a rule names a metric or a correction that does not exist.
    """
    found = [*_check_left_out(result, max_skipped), *_check_finite_counts(result)]
    if baseline is not None:
        found += [*_check_missing_runs(result, baseline), *_check_missing_places(result, rules, baseline)]
        found += _check_hidden_tokens(result, baseline)
    return found


def coverage_notes(result: Result, baseline: Result | None) -> list[str]:
    """Return notes that do not affect the verdict, such as far less data than in the baseline."""
    found = []
    for name, run, accepted in _matched_runs(result, baseline):
        for what, (here, there) in _compare_sizes(run, accepted).items():
            if here < MUCH_SMALLER_SHARE * there:
                found.append(f"run {name}: {here:,.0f} {what}, the baseline has {there:,.0f}")
    if baseline is not None and (skipped := sum(file.skipped for file in baseline.provenance.inputs)):
        found.append(f"the baseline was made without {skipped:,} sequences that were left out as bad")
    return found


def _matched_runs(result: Result, baseline: Result | None) -> Iterator[tuple[str, RunResult, RunResult]]:
    """Yield each run with the baseline's run to compare with."""
    for name, run in result.runs.items() if baseline is not None else ():
        matching = find_matching_run(name, baseline) if baseline is not None else None
        if matching is not None:
            yield name, run, matching[1]


def _compare_sizes(run: RunResult, accepted: RunResult) -> dict[str, tuple[float, float]]:
    """Return the numbers of tokens, sequences and steps here and in the baseline."""
    found = {}
    for key in ("tokens", "sequences"):
        here, there = (each.overall.metrics.get(key) for each in (run, accepted))
        if here is not None and there is not None:
            found[key] = here.value or 0.0, there.value or 0.0
    found["steps"] = float(len(run.groups.labels)), float(len(accepted.groups.labels))
    return found


def _undecided_check(run: str, title: str, reason: str, *, place: str = "overall", rule: str = COVERAGE_RULE) -> Check:
    return Check(
        rule=rule, run=run, place=place, metric=COVERAGE_RULE, title=title, unit="", kind="min", outcome="undecided",
        reason=reason,
    )  # fmt: skip


def _check_left_out(result: Result, most: float) -> Iterator[Check]:
    """Check the share of sequences left out, by run if possible, and of tokens and files left out."""
    inputs = result.provenance.inputs
    skipped, runs = count_skipped_by_file(result), {file.path: file.run for file in inputs}
    apart = all(runs.get(path) in result.runs for path in skipped)
    for name in result.runs:
        lost = sum(number for path, number in skipped.items() if not apart or runs[path] == name)
        kept = sum(_count_sequences(run) for other, run in result.runs.items() if not apart or other == name)
        if lost:
            yield _check_share(name, "sequences left out as bad", lost, lost + kept, most)
    masked = sum(item.count for item in result.provenance.left_out if item.reason == MASKED_TOKENS)
    if masked:
        tokens = sum(run.overall.metrics["tokens"].value or 0.0 for run in result.runs.values())
        yield _check_share(next(iter(result.runs), ""), "tokens left out of means", masked, masked + tokens, most)
    files = sum(item.reason == WHOLE_FILE_REASON for item in result.provenance.left_out)
    if files:
        yield _check_share(next(iter(result.runs), ""), "files left out as bad", files, files + len(inputs), most)


def count_skipped_by_file(result: Result) -> dict[str, int]:
    """Count skipped sequences by file. Older Results only have counts of faults."""
    exact = {file.path: file.skipped for file in result.provenance.inputs if file.skipped}
    if exact:
        return exact
    found: dict[str, int] = {}
    for item in result.provenance.left_out:
        if item.reason not in (WHOLE_FILE_REASON, MASKED_TOKENS):
            found[item.file] = found.get(item.file, 0) + item.count
    return found


def _count_sequences(run: RunResult) -> float:
    """Count the sequences of a run, including empty ones."""
    found = (run.overall.metrics.get(key) for key in _RESPONSE_COLUMNS)
    return sum(each.value or 0.0 for each in found if each is not None)


def _check_share(run: str, title: str, lost: float, total: float, most: float) -> Check:
    share = lost / total
    remedy = f"correct the dump, or give {option('max_skipped')}"
    reason = "" if share <= most else f"what was left out may be what is worse: {remedy}"
    return Check(
        rule=COVERAGE_RULE, run=run, place="overall", metric=COVERAGE_RULE, title=title, unit="fraction", kind="max",
        value=share, limit=most, outcome="undecided" if reason else "passed", reason=reason,
    )  # fmt: skip


def _check_finite_counts(result: Result) -> Iterator[Check]:
    """Check denominators: infinitely many tokens would make any mean 0."""
    for name, run in result.runs.items():
        sample = build_run_sample(run)
        counts = np.stack([sample.column(column) for column in _COUNT_COLUMNS if column in sample.columns])
        if not (np.isfinite(counts) & (counts >= 0)).all():
            yield _undecided_check(name, "counts", "the Result's numbers of tokens or sequences are no counts")


def _check_missing_runs(result: Result, baseline: Result) -> Iterator[Check]:
    matched = {found[0] for name in result.runs if (found := find_matching_run(name, baseline)) is not None}
    if matched:  # without any match, each check reports it
        for name in baseline.runs:
            if name not in matched:
                yield _undecided_check(name, f"run {name}", "the baseline has this run, and the dump lacks it")


def _check_missing_places(result: Result, rules: Sequence[Rule], baseline: Result) -> Iterator[Check]:
    """Check that the Result has every step or value of the baseline that a rule judges.

    Steps are only required if some of them match: another part of the training has other steps.
    """
    for rule in rules:
        title = find_rule_target(rule, result).metric.title
        for name, run, accepted in _matched_runs(result, baseline):
            here, there = (_place_labels(each, rule.per) for each in (run, accepted))
            if rule.per == "step" and not set(here) & set(there):
                continue
            for label in there:
                if label not in here:
                    place = f"{rule.per} {'(none)' if label is None else label}"
                    reason = f"the baseline has {place}, and the dump lacks it"
                    yield _undecided_check(name, title, reason, place=place, rule=rule.text)


def _place_labels(run: RunResult, per: str) -> Sequence[object]:
    if per == "overall":
        return ()
    groups = run.groups if per == "step" else run.by.get(per)
    return () if groups is None else groups.labels


def _check_hidden_tokens(result: Result, baseline: Result) -> Iterator[Check]:
    """Find prompts with fewer tokens than in the baseline. If no prompt has more, a mask probably hides them."""
    for name, run, accepted in _matched_runs(result, baseline):
        fewer, same, equal, more = _count_smaller_clusters(build_run_sample(run), build_run_sample(accepted))
        if not more and fewer and (same >= fewer or (fewer >= _MIN_SMALLER_PROMPTS and fewer > equal)):
            reason = (
                f"{fewer:,} of {fewer + equal:,} prompts that the baseline has too hold fewer tokens than there, and "
                "none holds more: see whether response_mask hides any, or save a new baseline"
            )
            yield _undecided_check(name, "tokens of the same prompts", reason)


def _responses_per_cluster(sample: ClusterSample) -> Float64s:
    """Count the sequences of each cluster, including those without valid tokens."""
    return sum((sample.column(name) for name in _RESPONSE_COLUMNS if name in sample.columns), np.zeros(len(sample)))


def _count_smaller_clusters(sample: ClusterSample, other: ClusterSample) -> tuple[int, int, int, int]:
    """Count shared clusters of equal size: with fewer tokens, equal content, equal tokens, more tokens."""
    _, here, there = np.intersect1d(sample.keys, other.keys, assume_unique=True, return_indices=True)
    tokens = sample.column("tokens")[here], other.column("tokens")[there]
    alike = _responses_per_cluster(sample)[here] == _responses_per_cluster(other)[there]
    equal = alike & (tokens[0] == tokens[1])
    same = np.zeros_like(equal)
    for name in ("policy_log_ppl", "reference_log_ppl"):
        if name in sample.columns and name in other.columns:
            same |= equal & np.isclose(sample.column(name)[here], other.column(name)[there], rtol=1e-7, atol=0)
    fewer, more = alike & (tokens[0] < tokens[1]), alike & (tokens[0] > tokens[1])
    found = [int(np.count_nonzero(each)) for each in (fewer, same, equal, more)]
    return found[0], found[1], found[2], found[3]
