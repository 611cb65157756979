"""Checks of the data that the metrics come from: skipped rows, missing steps, copied columns, another model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.api.gate.rules import Rule, RuleTarget, find_rule_target
from mismatchctl.api.gate.verdict import COVERAGE_RULE, Check
from mismatchctl.core.batch import Float64s
from mismatchctl.core.bins import LAYER_TOKENS
from mismatchctl.core.formatting import format_number
from mismatchctl.errors import option, wording
from mismatchctl.measure.sums import OVERALL_CAP
from mismatchctl.results.model import MASKED_TOKENS, Result, RunContent, RunResult, find_run, storage_types
from mismatchctl.stats.samples import ClusterSample, build_run_sample


def find_incompatibility(
    target: RuleTarget, run: str, result: Result, baseline_run: str, baseline: Result
) -> str | None:
    """Return why `target` cannot be compared with the baseline, such as another data type, or `None` if it can."""
    stored = storage_types(baseline, baseline_run)
    for column, dtype in storage_types(result, run).items():
        if dtype != stored[column]:
            return f"{column} is stored as {dtype} in the dump and as {stored[column]} in the baseline"
    if target.correction is not None:
        here, there = (
            [item for item in each.corrections if item.name == target.correction] for each in (result, baseline)
        )
        if not there:
            return f"the baseline does not have the correction {target.correction}"
        if here != there:
            return f"correction {target.correction} has another definition in the baseline"
    version_here, version_there = result.provenance.framework, baseline.provenance.framework
    if version_here and version_there and version_here != version_there:
        return f"the framework is {version_here} in the dump and {version_there} in the baseline"
    return None


@dataclass(frozen=True)
class Tolerances:
    """Limits for the checks in this module. If a limit is exceeded, the check is undecided."""

    max_skipped: float = 0.01  # allowed share of bad sequences, tokens or files, and rise of the share of repeats
    max_missing: float = 0.05  # allowed share of missing steps or responses, and rise of the share of empty ones
    allow_different_model: bool = False  # True: do not check that model, engine and tokenizer are the same


_MUCH_SMALLER_SHARE = 0.75
"""The verdict contains a note if the dump has fewer than 75% of the baseline's tokens, sequences or steps."""
_MIN_SMALLER_PROMPTS = 8
"""response_mask is suspect if at least this number of the common prompts, and more than half, have fewer tokens than
in the baseline. By chance, all of 8 prompts have fewer tokens in 1 of 256 dumps."""
_PAIRED_SHARE = 0.5
"""Missing responses are only reported if dump and baseline share at least half of the clusters of the smaller one."""
_WHOLE_FILE = "file"  # in an entry of `Provenance.left_out`, this `reason` means that a whole file was skipped
Match = tuple[str, RunResult, "RunResult | None"]
"""The name of a run, the run in the new Result, and the run to compare it with in the baseline (or `None`)."""


def check_coverage(
    result: Result, rules: Sequence[Rule], baseline: Result | None, limits: Tolerances
) -> Iterator[Check]:
    """Yield checks of the data: was too much skipped, is data of the baseline missing, do the values look wrong?"""
    yield from _check_left_out(result, limits.max_skipped)
    if unread := result.provenance.unread:
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        verb = "look like dumps, but were" if len(unread) > 1 else "looks like a dump, but was"
        remedy = "Rename files of the dump to NAME.parquet, and move other files away"
        reason = f"{', '.join(unread[:3])}{more} {verb} not read because of the file name. {remedy}"
        yield undecided_check(next(iter(result.runs), ""), "files not read", reason)
    yield from _check_finite_counts(result)
    matches = [*_match_runs(result, baseline)]
    for name, run, accepted in matches:
        yield from _check_plausible(name, run, accepted, rules, limits)
    if baseline is None:
        return
    yield from _check_missing_runs(result, baseline)
    yield from _check_missing_places(result, matches, rules)
    for name, run, accepted in matches:
        if accepted is not None:
            yield from _check_missing_data(name, run, accepted, limits.max_missing)
            yield from _check_hidden_tokens(name, run, accepted)


def _match_runs(result: Result, baseline: Result | None) -> Iterator[Match]:
    for name, run in result.runs.items():
        accepted = None if baseline is None else find_run(baseline, name)
        yield name, run, None if baseline is None or accepted is None else baseline.runs[accepted]


def check_fixed_tokens(result: Result, baseline: Result | None) -> Iterator[Check]:
    """Check that each run has the token ids of the baseline. If token ids are missing, compare the prompts."""
    for name, run, accepted in _match_runs(result, baseline):
        here, there = (None if each is None else each.content for each in (run, accepted))
        if accepted is None:
            reason = "the tokens cannot be compared without a baseline"
        elif here is not None and there is not None and here.responses and there.responses:
            reason = (
                "" if here.responses == there.responses else "the token ids differ from the token ids of the baseline"
            )
        else:
            sample, other = _build_alike_samples(run, accepted)
            same = np.array_equal(sample.keys, other.keys)
            reason = "" if same else "the prompts differ from the prompts of the baseline"
        if reason:
            remedy = f"Score the same prompts and responses again, or leave out {option('fixed_tokens')}"
            yield undecided_check(name, "fixed tokens", f"{reason}. {remedy}")


def coverage_notes(result: Result, baseline: Result | None, limits: Tolerances) -> Iterator[str]:
    matches = [*_match_runs(result, baseline)]
    for name, run, accepted in matches:
        new, old = run.content, None if accepted is None else accepted.content
        if new is not None and new.repeated and not any(_check_repeated(name, new, old, limits.max_skipped)):
            same = f"({new.example or 'equal log-probs'})"
            yield f"run {name}: {new.repeated:,} of {new.sequences:,} sequences repeat another sequence {same}"
    for name, run, accepted in matches:
        if accepted is None:
            continue
        sizes = {key: (_value(run, key) or 0.0, _value(accepted, key) or 0.0) for key in ("tokens", "sequences")}
        sizes["steps"] = float(len(run.groups.labels)), float(len(accepted.groups.labels))
        for what, (here, there) in sizes.items():
            if here < _MUCH_SMALLER_SHARE * there:
                yield f"run {name} has {here:,.0f} {what}, and the baseline has {there:,.0f}"
    if lost := sum(file.skipped for file in result.provenance.inputs):
        yield f"{lost:,} sequences were left out as bad when the dump was analyzed"
    if baseline is not None and (skipped := sum(file.skipped for file in baseline.provenance.inputs)):
        yield f"{skipped:,} sequences of the baseline were left out as bad"


def _check_left_out(result: Result, most: float) -> Iterator[Check]:
    """Check the shares of skipped sequences, tokens and files. The size of an unreadable file estimates its tokens."""
    inputs, left_out = result.provenance.inputs, result.provenance.left_out
    first = next(iter(result.runs), "")
    files = [item for item in left_out if item.reason == _WHOLE_FILE]
    skipped = _list_skipped(result)
    apart = not files and result.runs.keys() >= {run for run, _, _ in skipped}
    size, kept = sum(file.size for file in inputs), {}
    lost_size = sum(item.size or (size / max(len(inputs), 1)) for item in files)
    for name, run in result.runs.items():
        kept[name] = _count_sequences(run), _value(run, "tokens") or 0.0
    for names in [[name] for name in kept] if apart else [[*kept]]:
        own = [counts for run, *counts in skipped if not apart or run in names]
        losses = sum(sequences for sequences, _ in own), sum(tokens for _, tokens in own)
        for place, what in enumerate(("sequences", "tokens")):
            total = sum(kept[name][place] for name in names) + losses[place]
            estimate = total * lost_size / size if size and files else 0.0
            lost = losses[place] + estimate
            if lost:
                how = " (estimated from the size of the unreadable files)" if files else ""
                yield _check_share(names[0], f"{what} left out as bad{how}", lost, total + estimate, most)
    masked = sum(item.count for item in left_out if item.reason == MASKED_TOKENS)
    if masked:
        total = sum(tokens for _, tokens in kept.values())
        yield _check_share(first, "tokens left out of means", masked, masked + total, most)
    if files:
        yield _check_share(first, "files left out as bad", len(files), len(files) + len(inputs), most)
        if not lost_size:
            yield undecided_check(first, "files left out as bad", "the size of the files left out is unknown")


def _list_skipped(result: Result) -> list[tuple[str, int, int]]:
    """Return (run, number of skipped sequences, number of skipped tokens) for each file with skipped rows."""
    inputs, left_out = result.provenance.inputs, result.provenance.left_out
    found = [(file.run, file.skipped, file.skipped_tokens) for file in inputs if file.skipped or file.skipped_tokens]
    if any(sequences for _, sequences, _ in found):
        return found
    # Results of older versions contain these numbers only in `left_out`, by file and reason
    runs = {file.path: file.run for file in inputs}
    reasons = (_WHOLE_FILE, MASKED_TOKENS)
    return found + [(runs.get(item.file, ""), item.count, 0) for item in left_out if item.reason not in reasons]


def _count_sequences(run: RunResult) -> float:
    return sum(_value(run, key) or 0.0 for key in ("sequences", "empty_sequences"))


def _check_share(run: str, title: str, lost: float, total: float, most: float) -> Check:
    share = lost / total
    remedy = f"Correct the dump, or allow more with {option('max_skipped')}"
    reason = "" if share <= most else f"the data that was left out may have a larger mismatch. {remedy}"
    return Check(
        rule=COVERAGE_RULE, run=run, place="overall", metric=COVERAGE_RULE, title=title, unit="fraction", kind="max",
        value=share, limit=most, outcome="undecided" if reason else "passed", reason=reason,
    )  # fmt: skip


def _check_finite_counts(result: Result) -> Iterator[Check]:
    for name, run in result.runs.items():
        sample = build_run_sample(run)
        columns = sample.columns.keys() & {"tokens", "sequences", "squared_length"}
        counts = np.stack([sample.column(column) for column in columns])
        if not (np.isfinite(counts) & (counts >= 0)).all():
            yield undecided_check(
                name, "counts", "the numbers of tokens or sequences in the Result are negative or not finite"
            )


def _check_missing_runs(result: Result, baseline: Result) -> Iterator[Check]:
    matched = {find_run(baseline, name) for name in result.runs}
    if matched != {None}:  # if no run matches, each comparison already reports this
        for name in baseline.runs:
            if name not in matched:
                yield undecided_check(name, f"run {name}", "the dump lacks this run of the baseline")


def _check_missing_places(result: Result, matches: Sequence[Match], rules: Sequence[Rule]) -> Iterator[Check]:
    """Check that the dump has each baseline step or column value that a rule judges. Skip steps if all are new."""
    for rule, (name, run, accepted) in itertools.product(rules, matches):
        if accepted is None or rule.per == "overall":
            continue
        groups = (each.groups if rule.per == "step" else each.by.get(rule.per) for each in (run, accepted))
        here, there = (() if each is None else each.labels for each in groups)
        if rule.per == "step" and not set(here) & set(there):
            continue
        for label in there:
            if label not in here:
                place = f"{rule.per} {'(none)' if label is None else label}"
                title = find_rule_target(rule, result).metric.title
                reason = f"the dump lacks {place} of the baseline"
                yield undecided_check(name, title, reason, place=place, rule=rule.text)


def _check_missing_data(name: str, run: RunResult, accepted: RunResult, most: float) -> Iterator[Check]:
    """Check for empty responses. If the dump overlaps the baseline, also check for missing steps and responses."""
    empty = [(_value(each, "empty_sequences") or 0.0) / max(_count_sequences(each), 1.0) for each in (run, accepted)]
    if empty[0] - empty[1] > most:
        reason = (
            f"{100 * empty[0]:.3g}% of the responses lack a valid token, compared with "
            f"{100 * empty[1]:.3g}% in the baseline"
        )
        yield undecided_check(name, "empty responses", f"{reason}. Check response_mask")
    remedy = f"Record the missing data, or allow more with {option('max_missing')}"
    here, there = set(run.groups.labels), accepted.groups.labels
    absent = [label for label in there if label not in here]
    if len(absent) < len(there) and len(absent) > most * len(there):
        shown = ", ".join("(none)" if label is None else str(label) for label in absent[:3])
        shown += ", ..." * (len(absent) > 3)
        reason = f"the dump lacks {len(absent):,} of the baseline's {len(there):,} steps (missing: {shown}). {remedy}"
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
            f"the dump lacks {lost:,.0f} of the baseline's {total:,.0f} responses. {len(other) - common:,} "
            f"of the baseline's {len(other):,} {prompts} have no response in the dump. {remedy}"
        )
        yield undecided_check(name, "missing responses", reason)


def _build_alike_samples(run: RunResult, accepted: RunResult) -> tuple[ClusterSample, ClusterSample]:
    """Return the clusters of a run and of its baseline. Merge the run's clusters if the baseline's are merged."""
    sample, other = build_run_sample(run), build_run_sample(accepted)
    if accepted.clusters.folded and not run.clusters.folded and len(other) and int(other.keys.max()) < OVERALL_CAP:
        sample = ClusterSample.merge(sample.keys % np.uint64(OVERALL_CAP), sample.names, sample.sums)
    return sample, other


def _check_hidden_tokens(name: str, run: RunResult, accepted: RunResult) -> Iterator[Check]:
    """Check whether many prompts have fewer tokens than in the baseline. If so, response_mask may hide tokens."""
    sample, other = _build_alike_samples(run, accepted)
    _, here, there = np.intersect1d(sample.keys, other.keys, assume_unique=True, return_indices=True)
    alike = count_responses(sample)[here] == count_responses(other)[there]
    rise = (sample.column("tokens")[here] - other.column("tokens")[there])[alike]
    same = np.zeros_like(alike)
    for column in ("policy_log_ppl", "reference_log_ppl"):
        if column in sample.columns and column in other.columns:
            same |= np.isclose(sample.column(column)[here], other.column(column)[there], rtol=1e-7, atol=0)
    fewer, equal, more, same_content = (
        int(np.count_nonzero(each)) for each in (rise < 0, rise == 0, rise > 0, same[alike] & (rise == 0))
    )
    many = same_content >= fewer or (fewer >= _MIN_SMALLER_PROMPTS and fewer > equal)
    if fewer and 20 * more <= fewer and many:
        counts = f"{fewer:,} of {len(rise):,} prompts have fewer tokens than in the baseline"
        reason = f"{counts}, and {more:,} have more. Check response_mask, or save a new baseline"
        yield undecided_check(name, "tokens of the same prompts", reason)


_HIDDEN_RISE, _HIDDEN_FACTOR = 0.005, 1.5
"""The share of masked tokens is suspicious if it exceeds the baseline's by over 0.005, and by a factor over 1.5."""
_LOUD_SHARE, _LOUD_HIDDEN = 0.5, 0.002
"""A mask is suspicious if it masks at least 0.2% of the tokens with log-probs, and at least half of the masked tokens
have a larger |log ratio| than 99.9% of the valid tokens."""
_COPIED_SHARE, _IDENTICAL_RISE = 0.99, 0.15
_RARE_IDENTICAL_RISE, _RARE_IDENTICAL_FACTOR = 0.02, 3.0
"""Bit-identical tokens are suspicious if their share exceeds the baseline's by 0.15, or by 0.02 and a factor of 3."""
_TOO_GOOD_GAP, _TOO_GOOD_K3, _TOO_GOOD_Z = 3.0, 30.0, 4.0
_SCALE, _SCALE_OF_SAME_TOKENS, _PROBABILITY_DISTANCE = 2.0, 1.05, 0.25
_LENGTH_RANGE, _LENGTH_Z = 0.75, 4.0
_CLIPPED_RISE = 1e-3
_VOCABULARY_DISTANCE, _VOCABULARY_FACTOR, _MIN_IDS = 0.35, 3.0, 2_000


def accept_remedy() -> str:
    how = wording(python="save the Result as the new baseline", command="accept it: --save-baseline FILE --accept")
    return f"If this change is intended, {how}"


def undecided_check(run: str, title: str, reason: str, *, place: str = "overall", rule: str = COVERAGE_RULE) -> Check:
    return Check(
        rule=rule, run=run, place=place, metric=COVERAGE_RULE, title=title, unit="", kind="min", outcome="undecided",
        reason=reason,
    )  # fmt: skip


def _check_plausible(
    name: str, run: RunResult, accepted: RunResult | None, rules: Sequence[Rule], limits: Tolerances
) -> Iterator[Check]:
    new, old = run.content, None if accepted is None else accepted.content
    if old is not None and new is None:
        remedy = "Analyze the dump again, or pass the dump itself"
        yield undecided_check(name, "content", f"the Result does not describe its masks and token ids. {remedy}")
    if new is not None:
        yield from _check_repeated(name, new, old, limits.max_skipped)
        yield from _check_masks(name, new, old)
        if accepted is None or old is not None:  # a baseline of an earlier version has no `content`
            yield from _check_recording(name, new, old)
    yield from _check_copies(name, run, accepted, rules)
    if accepted is not None:
        yield from _check_too_good(name, run, accepted)
        yield from _check_scale(name, run, accepted)
        yield from _check_lengths(name, run, accepted)
    if new is not None and old is not None and not limits.allow_different_model:
        yield from _check_identity(name, new, old)


def _check_repeated(name: str, new: RunContent, old: RunContent | None, most: float) -> Iterator[Check]:
    shares, before = _repeated_shares(new), _repeated_shares(old) if old is not None else (0.0, 0.0)
    if all(share - known <= most for share, known in zip(shares, before, strict=True)):
        return
    reason = (
        f"{new.repeated:,} of {new.sequences:,} sequences repeat another sequence, with {_percent(shares[1])} "
        f"of the tokens ({new.example or 'equal log-probs'}). Keep one copy of each sequence, or allow more with "
        f"{option('max_skipped')}"
    )
    yield undecided_check(name, "repeated sequences", reason)


def _repeated_shares(content: RunContent) -> tuple[float, float]:
    return content.repeated / max(content.sequences, 1), content.repeated_tokens / max(content.tokens, 1)


def _check_masks(name: str, new: RunContent, old: RunContent | None) -> Iterator[Check]:
    remedy = f"Check response_mask. {accept_remedy()}"
    if old is not None:
        for what, share, before in (
            ("tokens with log-probs on both sides are masked", new.hidden, old.hidden),
            ("tokens inside the responses are masked", new.holes, old.holes),
        ):
            if share - before > _HIDDEN_RISE and share > _HIDDEN_FACTOR * before:
                reason = f"{_percent(share)} of the {what}, compared with {_percent(before)} in the baseline. {remedy}"
                yield undecided_check(name, "masked tokens", reason)
                return
    seen = old is not None and old.loud > _LOUD_SHARE / 2 and old.hidden > 0.5 * new.hidden
    if new.loud >= _LOUD_SHARE and new.hidden >= _LOUD_HIDDEN and not seen:
        reason = f"{_percent(new.loud)} of the masked tokens have a larger |log ratio| than 99.9% of the valid tokens"
        yield undecided_check(name, "masked tokens", f"{reason}, so the mask may hide the mismatch. {remedy}")


def _check_recording(name: str, new: RunContent, old: RunContent | None) -> Iterator[Check]:
    """Check for clipped log-probs, and for columns with the wrong contents, such as probabilities."""
    if new.clipped > (0.0 if old is None else old.clipped) + _CLIPPED_RISE:
        reason = (
            f"{_percent(new.clipped)} of the tokens have exactly the lowest log-prob or the largest |log ratio|, so "
            "the log-probs were probably clipped"
        )
        yield undecided_check(
            name, "clipped values", f"{reason}. Record the log-probs without a limit. {accept_remedy()}"
        )
    doubts = [cause for cause in new.doubts if old is None or cause not in old.doubts]
    if doubts:
        reason = (
            f"the columns look wrong ({', '.join(doubts).replace('_', ' ')}), so the rules cannot judge the log-probs"
        )
        yield undecided_check(name, "recorded columns", f"{reason}. Run mismatchctl diagnose")


def _check_copies(name: str, run: RunResult, accepted: RunResult | None, rules: Sequence[Rule]) -> Iterator[Check]:
    """Check for too many bit-identical log-probs (one column saved twice?), unless a rule requires that all are."""
    if any(rule.metric == "bitwise_all" and rule.min is not None for rule in rules):
        return
    share, before = _value(run, "bitwise_share"), None if accepted is None else _value(accepted, "bitwise_share")
    if share is None:
        return
    if before is not None:
        rise = share - before
        if rise > _IDENTICAL_RISE or (rise > _RARE_IDENTICAL_RISE and share > _RARE_IDENTICAL_FACTOR * before):
            shown = (
                f"{_percent(share)} of the log-probs are bit-identical, compared with {_percent(before)} in "
                "the baseline"
            )
            yield undecided_check(
                name, "suspiciously good", f"{shown}. Check whether one column was saved twice. {accept_remedy()}"
            )
    elif share >= _COPIED_SHARE:
        reason = f"{_percent(share)} of the log-probs are bit-identical. Check whether one column was saved twice."
        yield undecided_check(
            name, "suspiciously good", f"{reason} If the log-probs are correct, add {option('expect_bitwise')}"
        )


def _check_too_good(name: str, run: RunResult, accepted: RunResult) -> Iterator[Check]:
    if _value(run, "bitwise_all") == 1 and _value(accepted, "bitwise_all") == 1:
        return
    for key, title, factor in (("abs_diff_mean", "mean |log ratio|", _TOO_GOOD_GAP), ("k3", "K3", _TOO_GOOD_K3)):
        value, before = _value(run, key), _value(accepted, key)
        if value is None or before is None or before <= 0:
            continue
        if factor * value < before - _TOO_GOOD_Z * (accepted.overall.metrics[key].se or 0.0):
            times = "" if value <= 0 else f" ({format_number(before / value)} times less)"
            shown = f"{title} is {format_number(value)}, compared with {format_number(before)} in the baseline{times}"
            yield undecided_check(name, "suspiciously good", f"{shown}. {accept_remedy()}")
            return


def _check_scale(name: str, run: RunResult, accepted: RunResult) -> Iterator[Check]:
    """Check that the mean log-probs are close to the baseline's. If not, the dump may use bits instead of nats."""
    here, there = (each.content.responses if each.content is not None else "" for each in (run, accepted))
    scale = _SCALE_OF_SAME_TOKENS if here and here == there else _SCALE
    found = []
    for key, title in (("train_log_ppl", "train"), ("rollout_log_ppl", "rollout")):
        value, before = _value(run, key), _value(accepted, key)
        if value is not None and before is not None and before > 0 and not 1 / scale <= value / before <= scale:
            shown = f"{format_number(-value)}, compared with {format_number(-before)} in the baseline"
            found.append(f"the mean {title} log-prob is {shown}")
    samples = build_run_sample(run), build_run_sample(accepted)
    if all(set(LAYER_TOKENS) <= sample.columns.keys() for sample in samples):
        distance = _shares_distance(*(np.array([each.column(name).sum() for name in LAYER_TOKENS]) for each in samples))
        if distance > _PROBABILITY_DISTANCE:
            found.append(
                f"compared with the baseline, {_percent(distance)} of the tokens are in another range of probability"
            )
    if found:
        doubt = "Check whether the log-probs have other units, or come from another model or other data."
        yield undecided_check(name, "scale of the log-probs", f"{found[0]}. {doubt} {accept_remedy()}")


def _check_lengths(name: str, run: RunResult, accepted: RunResult) -> Iterator[Check]:
    lengths = []
    for sample in (build_run_sample(run), build_run_sample(accepted)):
        responses, clusters = count_responses(sample), len(sample)
        if responses.sum() <= 0 or clusters < 2:
            return
        mean = float(sample.column("tokens").sum() / responses.sum())
        spread = sample.column("tokens") - mean * responses
        lengths.append((mean, float(np.sqrt((spread**2).sum() * clusters / (clusters - 1)) / responses.sum())))
    (here, error_here), (there, error_there) = lengths
    z = abs(here - there) / max(np.hypot(error_here, error_there), 1e-12)
    if there > 0 and not _LENGTH_RANGE <= here / there <= 1 / _LENGTH_RANGE and z > _LENGTH_Z:
        shown = f"{here:.3g} valid tokens per response, compared with {there:.3g} in the baseline"
        doubt = "Check whether tokens are masked or cut, or whether padding counts as tokens."
        yield undecided_check(name, "length of the responses", f"{shown}. {doubt} {accept_remedy()}")


def count_responses(sample: ClusterSample) -> Float64s:
    """Return the number of sequences per cluster [clusters]. Sequences without valid tokens also count."""
    names = (name for name in ("sequences", "empty_sequences") if name in sample.columns)
    return sum((sample.column(name) for name in names), np.zeros(len(sample)))


def _check_identity(name: str, new: RunContent, old: RunContent) -> Iterator[Check]:
    remedy = f"Compare dumps of the same model and engine, or add {option('allow_different_model')}"
    engines = [
        {(re.match("[A-Za-z][A-Za-z_-]*", text) or [text])[0].lower().rstrip("_-v") for text in each.engines}
        for each in (new, old)
    ]
    for what, here, there in (("model", set(new.models), set(old.models)), ("engine", *engines)):
        if here and there and here != there:
            shown = f"the {what} is {', '.join(sorted(here))}, compared with {', '.join(sorted(there))} in the baseline"
            yield undecided_check(name, f"another {what}", f"{shown}. {remedy}")
            return
    difference = _compare_vocabularies(new, old)
    if difference:
        yield undecided_check(name, "another model", f"{difference}, so the tokenizers differ. {remedy}")


def _shares_distance(here: Float64s, there: Float64s) -> float:
    """Return the total variation distance of two histograms: 0 for equal shares in each bin, 1 without a common bin."""
    return float(np.abs(here / max(here.sum(), 1.0) - there / max(there.sum(), 1.0)).sum() / 2)


def _compare_vocabularies(new: RunContent, old: RunContent) -> str:
    counts = [np.array(each.vocabulary, np.float64) for each in (new, old)]
    if new.id_p95 is None or old.id_p95 is None or len(counts[0]) != len(counts[1]) or not len(counts[0]):
        return ""
    if min(each.sum() for each in counts) < _MIN_IDS:
        return ""
    distance = _shares_distance(*counts)
    low, high = sorted((new.id_p95 + 1, old.id_p95 + 1))
    if distance > _VOCABULARY_DISTANCE:
        return f"the frequencies of the token ids differ by {_percent(distance)} from the baseline"
    if high > _VOCABULARY_FACTOR * low:
        return f"5% of the token ids are above {new.id_p95:,}, compared with {old.id_p95:,} in the baseline"
    return ""


def _value(run: RunResult, key: str) -> float | None:
    found = run.overall.metrics.get(key)
    return None if found is None else found.value


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
