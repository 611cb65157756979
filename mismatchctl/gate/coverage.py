"""What a verdict rests on: a dump that lacks what the baseline has, or whose bad half was left out, cannot pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.errors import option
from mismatchctl.gate.comparable import matching_run
from mismatchctl.gate.rules import Rule, target_of
from mismatchctl.gate.verdict import Check
from mismatchctl.resample import ClusterSample, sample_of_run
from mismatchctl.result import Result, RunResult

MAX_SKIPPED = 0.01
"""Share of sequences, or of files, that may have been left out of what is judged."""
FAR_BELOW = 0.75
"""A dump that holds less than this share of the baseline's tokens, sequences or steps is said to."""
_FEWER_EVERYWHERE = 8
"""Shared prompts that all hold fewer tokens by chance once in 2^8 dumps."""
_RESPONSES = ("sequences", "empty_sequences")
_COUNTS = ("tokens", "sequences", "squared_length")
RULE = "coverage"
"""What stands in place of a rule in checks that no rule asks for."""
WHOLE_FILE = "file"
"""The reason under which a Result counts files that were left out whole."""


def coverage(result: Result, rules: Sequence[Rule], baseline: Result | None, max_skipped: float) -> list[Check]:
    """Undecided checks of what was left out, of what the baseline has and the Result lacks, and of what hides tokens.

    Args:
        result: what is judged.
        rules: those that look at steps or at values of a column need each of the baseline's.
        baseline: the Result that was accepted last, if there is one.
        max_skipped: share of sequences or files that may have been left out.

    Raises:
        ConfigError: a rule names a metric or a correction that does not exist.
    """
    found = [*_left_out(result, max_skipped), *_uncountable(result)]
    if baseline is not None:
        found += [*_lacking_runs(result, baseline), *_lacking_places(result, rules, baseline)]
        found += _hidden(result, baseline)
    return found


def said(result: Result, baseline: Result | None) -> list[str]:
    """What does not keep a dump from being judged, but should be known: far less data than in the baseline."""
    found = []
    for name, run, accepted in _pairs(result, baseline):
        for what, (here, there) in _sizes(run, accepted).items():
            if here < FAR_BELOW * there:
                found.append(f"run {name}: {here:,.0f} {what}, the baseline has {there:,.0f}")
    if baseline is not None and (skipped := sum(file.skipped for file in baseline.provenance.inputs)):
        found.append(f"the baseline was made without {skipped:,} sequences that were left out as bad")
    return found


def _pairs(result: Result, baseline: Result | None) -> Iterator[tuple[str, RunResult, RunResult]]:
    """Each run, and the baseline's that it is compared with."""
    for name, run in result.runs.items() if baseline is not None else ():
        matching = matching_run(name, baseline) if baseline is not None else None
        if matching is not None:
            yield name, run, matching[1]


def _sizes(run: RunResult, accepted: RunResult) -> dict[str, tuple[float, float]]:
    """Here and in the baseline: tokens, sequences, steps."""
    found = {}
    for key in ("tokens", "sequences"):
        here, there = (each.overall.metrics.get(key) for each in (run, accepted))
        if here is not None and there is not None:
            found[key] = here.value or 0.0, there.value or 0.0
    found["steps"] = float(len(run.groups.labels)), float(len(accepted.groups.labels))
    return found


def _undecided(run: str, title: str, reason: str, *, place: str = "overall", rule: str = RULE) -> Check:
    return Check(
        rule=rule, run=run, place=place, metric=RULE, title=title, unit="", kind="min", outcome="undecided",
        reason=reason,
    )  # fmt: skip


def _left_out(result: Result, most: float) -> Iterator[Check]:
    """Sequences, by run where the files tell runs apart, and files of the whole Result."""
    inputs = result.provenance.inputs
    skipped, runs = skipped_by_file(result), {file.path: file.run for file in inputs}
    apart = all(runs.get(path) in result.runs for path in skipped)
    for name in result.runs:
        lost = sum(number for path, number in skipped.items() if not apart or runs[path] == name)
        kept = sum(_sequences(run) for other, run in result.runs.items() if not apart or other == name)
        if lost:
            yield _share(name, "sequences left out as bad", lost, lost + kept, most)
    files = sum(item.reason == WHOLE_FILE for item in result.provenance.left_out)
    if files:
        yield _share(next(iter(result.runs), ""), "files left out as bad", files, files + len(inputs), most)


def skipped_by_file(result: Result) -> dict[str, int]:
    """Sequences that were left out, by file; of Results that do not say, the faults of a sequence are counted."""
    exact = {file.path: file.skipped for file in result.provenance.inputs if file.skipped}
    if exact:
        return exact
    found: dict[str, int] = {}
    for item in result.provenance.left_out:
        if item.reason != WHOLE_FILE:
            found[item.file] = found.get(item.file, 0) + item.count
    return found


def _sequences(run: RunResult) -> float:
    """All that a run holds, the empty ones too."""
    found = (run.overall.metrics.get(key) for key in _RESPONSES)
    return sum(each.value or 0.0 for each in found if each is not None)


def _share(run: str, title: str, lost: float, total: float, most: float) -> Check:
    share = lost / total
    remedy = f"correct the dump, or give {option('max_skipped')}"
    reason = "" if share <= most else f"what was left out may be what is worse: {remedy}"
    return Check(
        rule=RULE, run=run, place="overall", metric=RULE, title=title, unit="fraction", kind="max", value=share,
        limit=most, outcome="undecided" if reason else "passed", reason=reason,
    )  # fmt: skip


def _uncountable(result: Result) -> Iterator[Check]:
    """What is divided by: infinitely many tokens would make any mean 0."""
    for name, run in result.runs.items():
        sample = sample_of_run(run)
        counts = np.stack([sample.column(column) for column in _COUNTS if column in sample.columns])
        if not (np.isfinite(counts) & (counts >= 0)).all():
            yield _undecided(name, "counts", "the Result's numbers of tokens or sequences are no counts")


def _lacking_runs(result: Result, baseline: Result) -> Iterator[Check]:
    matched = {found[0] for name in result.runs if (found := matching_run(name, baseline)) is not None}
    if matched:  # where nothing matches, each check says so
        for name in baseline.runs:
            if name not in matched:
                yield _undecided(name, f"run {name}", "the baseline has this run, and the dump lacks it")


def _lacking_places(result: Result, rules: Sequence[Rule], baseline: Result) -> Iterator[Check]:
    """Steps and values of columns that a rule judges one by one.

    Steps count where some of them are the baseline's: another stretch of the training has others.
    """
    for rule in rules:
        title = target_of(rule, result).metric.title
        for name, run, accepted in _pairs(result, baseline):
            here, there = (_labels(each, rule.per) for each in (run, accepted))
            if rule.per == "step" and not set(here) & set(there):
                continue
            for label in there:
                if label not in here:
                    place = f"{rule.per} {'(none)' if label is None else label}"
                    reason = f"the baseline has {place}, and the dump lacks it"
                    yield _undecided(name, title, reason, place=place, rule=rule.text)


def _labels(run: RunResult, per: str) -> Sequence[object]:
    if per == "overall":
        return ()
    groups = run.groups if per == "step" else run.by.get(per)
    return () if groups is None else groups.labels


def _hidden(result: Result, baseline: Result) -> Iterator[Check]:
    """Prompts of the baseline's that hold fewer tokens here and never more, which chance does not do and a mask can."""
    for name, run, accepted in _pairs(result, baseline):
        fewer, same, equal, more = _fewer_tokens(sample_of_run(run), sample_of_run(accepted))
        if not more and fewer and (same >= fewer or (fewer >= _FEWER_EVERYWHERE and fewer > equal)):
            reason = (
                f"{fewer:,} of {fewer + equal:,} prompts that the baseline has too hold fewer tokens than there, and "
                "none holds more: see whether response_mask hides any, or save a new baseline"
            )
            yield _undecided(name, "tokens of the same prompts", reason)


def _responses(sample: ClusterSample) -> Float64s:
    """Sequences by cluster, those without a valid token too."""
    return sum((sample.column(name) for name in _RESPONSES if name in sample.columns), np.zeros(len(sample)))


def _fewer_tokens(sample: ClusterSample, other: ClusterSample) -> tuple[int, int, int, int]:
    """Of shared clusters of as many sequences: how many hold fewer tokens; the same ones; as many; more."""
    _, here, there = np.intersect1d(sample.keys, other.keys, assume_unique=True, return_indices=True)
    tokens = sample.column("tokens")[here], other.column("tokens")[there]
    alike = _responses(sample)[here] == _responses(other)[there]
    equal = alike & (tokens[0] == tokens[1])
    same = np.zeros_like(equal)
    for name in ("policy_log_ppl", "reference_log_ppl"):
        if name in sample.columns and name in other.columns:
            same |= equal & np.isclose(sample.column(name)[here], other.column(name)[there], rtol=1e-7, atol=0)
    fewer, more = alike & (tokens[0] < tokens[1]), alike & (tokens[0] > tokens[1])
    found = [int(np.count_nonzero(each)) for each in (fewer, same, equal, more)]
    return found[0], found[1], found[2], found[3]
