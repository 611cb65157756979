"""Check that a Result covers the data of its baseline and that the two are comparable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.api.gate.plausibility import (
    check_plausibility,
    count_responses,
    plausibility_notes,
    undecided_check,
)
from mismatchctl.api.gate.rules import Rule, RuleTarget, find_rule_target
from mismatchctl.api.gate.verdict import COVERAGE_RULE, Check
from mismatchctl.errors import option
from mismatchctl.measure.cluster_table import OVERALL_CAP
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
            return f"the baseline does not have the correction {target.correction}"
        if found[0] != found[1]:
            return f"correction {target.correction} is defined otherwise in the baseline"
    version_here, version_there = result.provenance.framework, baseline.provenance.framework
    if version_here and version_there and version_here != version_there:
        return f"framework version: {version_here} here, {version_there} in the baseline"
    if target.logged_by and version_there is None:
        return f"the baseline lacks the values that {target.logged_by} logs: save it from a gate with such a rule"
    if target.logged_by and result.provenance.replay != baseline.provenance.replay:
        return f"{target.logged_by} is replayed in another way in the baseline"
    return None


@dataclass(frozen=True)
class Tolerances:
    """Limits of the checks that do not belong to a rule.

    Attributes:
        max_skipped: maximum share of sequences, tokens or files left out as bad, and of repeated sequences.
        max_missing: maximum share of the baseline's steps, prompts or responses that the dump lacks.
        allow_different_model: True to compare different models and engines.
    """

    max_skipped: float = 0.01
    max_missing: float = 0.05
    allow_different_model: bool = False


DEFAULT_TOLERANCES = Tolerances()
MUCH_SMALLER_SHARE = 0.75
"""Minimum share of the baseline's tokens, sequences or steps without a note."""
_MIN_SMALLER_PROMPTS = 8
"""Number of shared prompts that by chance all have fewer tokens once in 2^8 dumps."""
_PAIRED_SHARE = 0.5
"""Share of the clusters of one side that the other side must have for a paired baseline."""
_COUNT_COLUMNS = ("tokens", "sequences", "squared_length")
WHOLE_FILE_REASON = "file"
"""Reason for skipped files in a Result."""


def check_coverage(
    result: Result, rules: Sequence[Rule], baseline: Result | None, limits: Tolerances = DEFAULT_TOLERANCES
) -> list[Check]:
    """Return checks of skipped, unread, missing, repeated and masked data, and of data that looks too good.

    Args:
        result: the Result to judge.
        rules: rules per step or per value need each step or value of the baseline.
        baseline: the last accepted Result, if any.
        limits: maximum shares.

    Raises:
        ConfigError: a rule names a metric or a correction that does not exist.
    """
    found = [*_check_left_out(result, limits.max_skipped), *_check_unread(result), *_check_finite_counts(result)]
    matches = [(name, run, _find_accepted(name, baseline)) for name, run in result.runs.items()]
    found += check_plausibility(matches, rules, limits.max_skipped, allow_different_model=limits.allow_different_model)
    if baseline is not None:
        found += [*_check_missing_runs(result, baseline), *_check_missing_places(result, rules, baseline)]
        for name, run, accepted in matches:
            if accepted is not None:
                found += _check_missing_data(name, run, accepted, limits.max_missing)
                found += _check_hidden_tokens(name, run, accepted)
    return found


def check_fixed_tokens(result: Result, baseline: Result | None) -> Iterator[Check]:
    """Check that each run has the responses of its baseline: by their token ids if both have them."""
    for name, run in result.runs.items():
        accepted = _find_accepted(name, baseline)
        here, there = (None if each is None else each.content for each in (run, accepted))
        if accepted is None:
            reason = "no baseline has these tokens"
        elif here is not None and there is not None and here.responses and there.responses:
            reason = "" if here.responses == there.responses else "the token ids differ from the baseline's"
        else:
            sample, other = _build_alike_samples(run, accepted)
            same = np.array_equal(sample.keys, other.keys)
            reason = "" if same else "the prompts differ from the baseline's"
        if reason:
            remedy = f"Score the same prompts and responses again, or leave out {option('fixed_tokens')}"
            yield undecided_check(name, "fixed tokens", f"{reason}. {remedy}")


def coverage_notes(result: Result, baseline: Result | None, limits: Tolerances = DEFAULT_TOLERANCES) -> list[str]:
    """Return notes that do not affect the verdict, such as far less data than in the baseline."""
    matches = [(name, run, _find_accepted(name, baseline)) for name, run in result.runs.items()]
    found = plausibility_notes(matches, limits.max_skipped)
    for name, run, accepted in matches:
        for what, (here, there) in _compare_sizes(run, accepted).items() if accepted is not None else ():
            if here < MUCH_SMALLER_SHARE * there:
                found.append(f"run {name} has {here:,.0f} {what}, the baseline {there:,.0f}")
    lost = sum(file.skipped for file in result.provenance.inputs)
    if lost:
        found.append(f"{lost:,} sequences were left out as bad when the dump was analyzed")
    if baseline is not None and (skipped := sum(file.skipped for file in baseline.provenance.inputs)):
        found.append(f"{skipped:,} sequences of the baseline were left out as bad")
    return found


def _find_accepted(name: str, baseline: Result | None) -> RunResult | None:
    """Return the baseline's run to compare a run with."""
    matching = None if baseline is None else find_matching_run(name, baseline)
    return None if matching is None else matching[1]


def _compare_sizes(run: RunResult, accepted: RunResult) -> dict[str, tuple[float, float]]:
    """Return the numbers of tokens, sequences and steps here and in the baseline."""
    found = {}
    for key in ("tokens", "sequences"):
        here, there = (each.overall.metrics.get(key) for each in (run, accepted))
        if here is not None and there is not None:
            found[key] = here.value or 0.0, there.value or 0.0
    found["steps"] = float(len(run.groups.labels)), float(len(accepted.groups.labels))
    return found


def _check_left_out(result: Result, most: float) -> Iterator[Check]:
    """Check the shares of sequences, tokens and files left out.

    Runs are checked one by one if each file belongs to one. Sequences and tokens of a file that was left out as a whole
    are estimated from its size.
    """
    inputs, left_out = result.provenance.inputs, result.provenance.left_out
    first = next(iter(result.runs), "")
    files = [item for item in left_out if item.reason == WHOLE_FILE_REASON]
    skipped, runs = count_skipped_by_file(result), {file.path: file.run for file in inputs}
    tokens = {file.path: file.skipped_tokens for file in inputs if file.skipped_tokens}
    apart = not files and all(runs.get(path) in result.runs for path in skipped.keys() | tokens.keys())
    kept = {name: (_count_sequences(run), _count_tokens(run)) for name, run in result.runs.items()}
    groups = [[name] for name in kept] if apart else [[*kept]]
    size = sum(file.size for file in inputs)
    known = [item.size for item in files if item.size]
    lost_size = sum(item.size or (size / max(len(inputs), 1)) for item in files)
    for names in groups:
        own = [path for path in skipped.keys() | tokens.keys() if not apart or runs.get(path) in names]
        losses = sum(skipped.get(path, 0) for path in own), sum(tokens.get(path, 0) for path in own)
        for place, what in enumerate(("sequences", "tokens")):
            total = sum(kept[name][place] for name in names) + losses[place]
            estimate = total * lost_size / size if size and files else 0.0
            lost = losses[place] + estimate
            if lost:
                how = " (estimated from the size of the unreadable files)" if files else ""
                yield _check_share(names[0], f"{what} left out as bad{how}", lost, total + estimate, most)
    masked = sum(item.count for item in left_out if item.reason == MASKED_TOKENS)
    if masked:
        total = sum(_count_tokens(run) for run in result.runs.values())
        yield _check_share(first, "tokens left out of means", masked, masked + total, most)
    if files:
        yield _check_share(first, "files left out as bad", len(files), len(files) + len(inputs), most)
        if not known and not size:
            yield undecided_check(first, "files left out as bad", "the size of the files left out is unknown")


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
    found = (run.overall.metrics.get(key) for key in ("sequences", "empty_sequences"))
    return sum(each.value or 0.0 for each in found if each is not None)


def _count_tokens(run: RunResult) -> float:
    found = run.overall.metrics.get("tokens")
    return (found.value or 0.0) if found is not None else 0.0


def _check_share(run: str, title: str, lost: float, total: float, most: float) -> Check:
    share = lost / total
    remedy = f"Correct the dump, or allow more with {option('max_skipped')}"
    reason = "" if share <= most else f"the left-out part may be the worse part. {remedy}"
    return Check(
        rule=COVERAGE_RULE, run=run, place="overall", metric=COVERAGE_RULE, title=title, unit="fraction", kind="max",
        value=share, limit=most, outcome="undecided" if reason else "passed", reason=reason,
    )  # fmt: skip


def _check_unread(result: Result) -> Iterator[Check]:
    """Check for files that look like dumps and were not read because of their names."""
    found = result.provenance.unread
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        verb = "look like dumps and were" if len(found) > 1 else "looks like a dump and was"
        reason = (
            f"{', '.join(found[:3])}{more} {verb} not read because of the name. "
            "Rename what belongs to the dump to NAME.parquet, and move the rest away"
        )
        yield undecided_check(next(iter(result.runs), ""), "files not read", reason)


def _check_finite_counts(result: Result) -> Iterator[Check]:
    """Check denominators: infinitely many tokens would make any mean 0."""
    for name, run in result.runs.items():
        sample = build_run_sample(run)
        counts = np.stack([sample.column(column) for column in _COUNT_COLUMNS if column in sample.columns])
        if not (np.isfinite(counts) & (counts >= 0)).all():
            yield undecided_check(name, "counts", "the Result's numbers of tokens or sequences are not counts")


def _check_missing_runs(result: Result, baseline: Result) -> Iterator[Check]:
    matched = {found[0] for name in result.runs if (found := find_matching_run(name, baseline)) is not None}
    if matched:  # without any match, each check reports it
        for name in baseline.runs:
            if name not in matched:
                yield undecided_check(name, f"run {name}", "the baseline has this run, the dump does not")


def _check_missing_places(result: Result, rules: Sequence[Rule], baseline: Result) -> Iterator[Check]:
    """Check that the Result has every step or value of the baseline that a rule judges.

    Steps are only required if some of them match: another part of the training has other steps.
    """
    for rule in rules:
        title = find_rule_target(rule, result).metric.title
        for name, run in result.runs.items():
            accepted = _find_accepted(name, baseline)
            if accepted is None:
                continue
            here, there = (_place_labels(each, rule.per) for each in (run, accepted))
            if rule.per == "step" and not set(here) & set(there):
                continue
            for label in there:
                if label not in here:
                    place = f"{rule.per} {'(none)' if label is None else label}"
                    reason = f"the baseline has {place}, the dump does not"
                    yield undecided_check(name, title, reason, place=place, rule=rule.text)


def _place_labels(run: RunResult, per: str) -> Sequence[object]:
    if per == "overall":
        return ()
    groups = run.groups if per == "step" else run.by.get(per)
    return () if groups is None else groups.labels


def _check_missing_data(name: str, run: RunResult, accepted: RunResult, most: float) -> Iterator[Check]:
    """Check the shares of the baseline's steps, and of its prompts and responses, that the dump lacks.

    Other steps, or mostly other prompts, are another part of the training and are compared as they are.
    """
    empty = [_empty_share(each) for each in (run, accepted)]
    if empty[0] - empty[1] > most:
        reason = f"{100 * empty[0]:.3g}% of the responses lack a valid token, in the baseline {100 * empty[1]:.3g}%"
        yield undecided_check(name, "empty responses", f"{reason}. Check response_mask")
    remedy = f"Record the missing ones, or allow more with {option('max_missing')}"
    here, there = set(run.groups.labels), accepted.groups.labels
    absent = [label for label in there if label not in here]
    if len(absent) < len(there) and len(absent) > most * len(there):
        shown = ", ".join("(none)" if label is None else str(label) for label in absent[:3])
        reason = f"{len(absent):,} of the baseline's {len(there):,} steps are missing ({shown}, ...). {remedy}"
        yield undecided_check(name, "missing steps", reason)
    sample, other = _build_alike_samples(run, accepted)
    common = sample.count_common(other)
    if not common or common < _PAIRED_SHARE * min(len(sample), len(other)):
        return
    _, own, old = np.intersect1d(sample.keys, other.keys, assume_unique=True, return_indices=True)
    expected = count_responses(other)
    found = np.zeros(len(other))
    found[old] = count_responses(sample)[own]
    lost, total = float(np.maximum(expected - found, 0).sum()), float(expected.sum())
    if lost > most * total:
        prompts = f"{accepted.clusters.by if accepted.clusters.by != 'content' else 'sequence'}s"
        reason = (
            f"{lost:,.0f} of the baseline's {total:,.0f} responses are missing, {len(other) - common:,} of its "
            f"{len(other):,} {prompts} altogether. {remedy}"
        )
        yield undecided_check(name, "missing responses", reason)


def _build_alike_samples(run: RunResult, accepted: RunResult) -> tuple[ClusterSample, ClusterSample]:
    """Return the clusters of the two runs, folded in the same way if the baseline's are folded."""
    sample, other = build_run_sample(run), build_run_sample(accepted)
    if accepted.clusters.folded and not run.clusters.folded and len(other) and int(other.keys.max()) < OVERALL_CAP:
        keys, where = np.unique(sample.keys % np.uint64(OVERALL_CAP), return_inverse=True)
        sums = np.zeros((len(keys), sample.sums.shape[1]))
        np.add.at(sums, where, sample.sums)
        sample = ClusterSample(keys, sample.names, sums)
    return sample, other


def _empty_share(run: RunResult) -> float:
    found = run.overall.metrics.get("empty_sequences")
    return ((found.value or 0.0) if found is not None else 0.0) / max(_count_sequences(run), 1.0)


def _check_hidden_tokens(name: str, run: RunResult, accepted: RunResult) -> Iterator[Check]:
    """Find prompts with fewer tokens than in the baseline. If few have more, a mask probably hides tokens."""
    fewer, same, equal, more = _count_smaller_clusters(*_build_alike_samples(run, accepted))
    if 20 * more <= fewer and fewer and (same >= fewer or (fewer >= _MIN_SMALLER_PROMPTS and fewer > equal)):
        reason = (
            f"{fewer:,} of {fewer + equal + more:,} prompts of the baseline have fewer tokens than there, and {more:,} "
            "have more. Check response_mask, or save a new baseline"
        )
        yield undecided_check(name, "tokens of the same prompts", reason)


def _count_smaller_clusters(sample: ClusterSample, other: ClusterSample) -> tuple[int, int, int, int]:
    """Count shared clusters of equal size: with fewer tokens, equal content, equal tokens, more tokens."""
    _, here, there = np.intersect1d(sample.keys, other.keys, assume_unique=True, return_indices=True)
    tokens = sample.column("tokens")[here], other.column("tokens")[there]
    alike = count_responses(sample)[here] == count_responses(other)[there]
    equal = alike & (tokens[0] == tokens[1])
    same = np.zeros_like(equal)
    for name in ("policy_log_ppl", "reference_log_ppl"):
        if name in sample.columns and name in other.columns:
            same |= equal & np.isclose(sample.column(name)[here], other.column(name)[there], rtol=1e-7, atol=0)
    fewer, more = alike & (tokens[0] < tokens[1]), alike & (tokens[0] > tokens[1])
    found = [int(np.count_nonzero(each)) for each in (fewer, same, equal, more)]
    return found[0], found[1], found[2], found[3]
