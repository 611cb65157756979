"""Checks for data that looks better than it can be: repeated, masked, copied, clipped or foreign rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from mismatchctl.api.gate.rules import Rule
from mismatchctl.api.gate.verdict import COVERAGE_RULE, Check
from mismatchctl.core.batch import Float64s
from mismatchctl.core.bins import LAYER_TOKENS
from mismatchctl.core.formatting import format_number
from mismatchctl.errors import option, wording
from mismatchctl.results.model import RunContent, RunResult
from mismatchctl.stats.samples import ClusterSample, build_run_sample

MATCHES = Sequence[tuple[str, RunResult, "RunResult | None"]]
"""Each run with its name and the baseline's run, if any."""

_HIDDEN_RISE, _HIDDEN_FACTOR = 0.005, 1.5
"""More masked tokens than this are hidden: this much more than in the baseline, and by this factor."""
_LOUD_SHARE, _LOUD_HIDDEN = 0.5, 0.002
"""Without a baseline: masked tokens hide the mismatch if half of them are louder than 99.9% of the others."""
_COPIED_SHARE, _IDENTICAL_RISE = 0.99, 0.15
_RARE_IDENTICAL_RISE, _RARE_IDENTICAL_FACTOR = 0.02, 3.0
"""Allowed share of bit-identical tokens above the baseline's. If they are rare, a few more are suspicious."""
_TOO_GOOD_GAP, _TOO_GOOD_K3, _TOO_GOOD_Z = 3.0, 30.0, 4.0
_SCALE, _SCALE_OF_SAME_TOKENS, _PROBABILITY_DISTANCE = 2.0, 1.05, 0.25
_LENGTH_RANGE, _LENGTH_Z = 0.75, 4.0
_CLIPPED_RISE = 1e-3
_VOCABULARY_DISTANCE, _VOCABULARY_FACTOR, _MIN_IDS = 0.35, 3.0, 2_000


def accept_remedy() -> str:
    """Return the remedy if unusual data is right."""
    how = wording(python="save the Result as the new baseline", command="accept it: --save-baseline FILE --accept")
    return f"If this is right, {how}"


def undecided_check(run: str, title: str, reason: str, *, place: str = "overall", rule: str = COVERAGE_RULE) -> Check:
    """Return a check that cannot be judged for a reason."""
    return Check(
        rule=rule, run=run, place=place, metric=COVERAGE_RULE, title=title, unit="", kind="min", outcome="undecided",
        reason=reason,
    )  # fmt: skip


def check_plausibility(
    matches: MATCHES, rules: Sequence[Rule], max_repeated: float, *, allow_different_model: bool
) -> Iterator[Check]:
    """Yield an undecided check for each reason why data may only look good.

    Args:
        matches: runs with their baselines.
        rules: rules of the gate. A rule can require bit-identical log-probs.
        max_repeated: maximum share of repeated sequences.
        allow_different_model: True to compare different models and engines.
    """
    for name, run, accepted in matches:
        old = None if accepted is None else accepted.content
        if old is not None and run.content is None:
            remedy = "Analyze the dump again, or name the dump itself"
            yield undecided_check(name, "content", f"the Result does not describe its rows. {remedy}")
        if run.content is not None:
            yield from _check_repeated(name, run.content, old, max_repeated)
            yield from _check_masks(name, run.content, old)
            if accepted is None or old is not None:  # earlier versions did not record it
                yield from _check_recording(name, run.content, old)
        yield from _check_copies(name, run, accepted, rules)
        if accepted is not None:
            yield from _check_too_good(name, run, accepted)
            yield from _check_scale(name, run, accepted)
            yield from _check_lengths(name, run, accepted)
        if run.content is not None and old is not None and not allow_different_model:
            yield from _check_identity(name, run.content, old)


def plausibility_notes(matches: MATCHES, max_repeated: float) -> list[str]:
    """Return a note for each run with repeated sequences that do not affect the verdict."""
    return [
        f"run {name}: {run.content.repeated:,} of {run.content.sequences:,} sequences repeat another one "
        f"({run.content.example or 'equal log-probs'})"
        for name, run, accepted in matches
        if run.content is not None
        and run.content.repeated
        and not any(_check_repeated(name, run.content, accepted.content if accepted else None, max_repeated))
    ]


def _check_repeated(name: str, new: RunContent, old: RunContent | None, most: float) -> Iterator[Check]:
    """Check the shares of repeated sequences and their tokens against the baseline's."""
    before = _repeated_shares(old) if old is not None else (0.0, 0.0)
    shares = _repeated_shares(new)
    if all(share - known <= most for share, known in zip(shares, before, strict=True)):
        return
    reason = (
        f"{new.repeated:,} of {new.sequences:,} sequences repeat another one, with {_percent(shares[1])} of the tokens "
        f"({new.example or 'equal log-probs'}). Keep one of each, or allow more with {option('max_skipped')}"
    )
    yield undecided_check(name, "repeated sequences", reason)


def _repeated_shares(content: RunContent) -> tuple[float, float]:
    return content.repeated / max(content.sequences, 1), content.repeated_tokens / max(content.tokens, 1)


def _check_masks(name: str, new: RunContent, old: RunContent | None) -> Iterator[Check]:
    """Check the share of masked tokens that have log-probs, and of masked tokens inside responses."""
    remedy = f"Check response_mask. {accept_remedy()}"
    if old is not None:
        for what, share, before in (
            ("tokens with log-probs on both sides are masked", new.hidden, old.hidden),
            ("tokens inside the responses are masked", new.holes, old.holes),
        ):
            if share - before > _HIDDEN_RISE and share > _HIDDEN_FACTOR * before:
                reason = f"{_percent(share)} of the {what}, in the baseline {_percent(before)}. {remedy}"
                yield undecided_check(name, "masked tokens", reason)
                return
    seen = old is not None and old.loud > _LOUD_SHARE / 2 and old.hidden > 0.5 * new.hidden
    if new.loud >= _LOUD_SHARE and new.hidden >= _LOUD_HIDDEN and not seen:
        reason = (
            f"{_percent(new.loud)} of the masked tokens differ more than 99.9% of the valid tokens, so the mask may "
            f"hide the mismatch. {remedy}"
        )
        yield undecided_check(name, "masked tokens", reason)


def _check_recording(name: str, new: RunContent, old: RunContent | None) -> Iterator[Check]:
    """Check for clipped values and for columns with other contents than their name."""
    if new.clipped > (0.0 if old is None else old.clipped) + _CLIPPED_RISE:
        reason = f"{_percent(new.clipped)} of the tokens have exactly the same extreme value, as if values were clipped"
        yield undecided_check(name, "clipped values", f"{reason}. Record them as computed. {accept_remedy()}")
    doubts = [cause for cause in new.doubts if old is None or cause not in old.doubts]
    if doubts:
        reason = f"the dump shows {', '.join(doubts)}, so its log-probs do not meet the rules' assumptions"
        yield undecided_check(name, "recorded columns", f"{reason}. See mismatchctl diagnose")


def _check_copies(name: str, run: RunResult, accepted: RunResult | None, rules: Sequence[Rule]) -> Iterator[Check]:
    """Check for one column that was saved twice: far more bit-identical log-probs than in the baseline."""
    if any(rule.name == "bitwise_all" and rule.min is not None for rule in rules):
        return
    share, before = _value(run, "bitwise_share"), None if accepted is None else _value(accepted, "bitwise_share")
    if share is None:
        return
    if before is not None:
        rise = share - before
        if rise > _IDENTICAL_RISE or (rise > _RARE_IDENTICAL_RISE and share > _RARE_IDENTICAL_FACTOR * before):
            shown = f"{_percent(share)} of the log-probs are bit-identical, in the baseline {_percent(before)}"
            yield undecided_check(name, "suspiciously good", f"{shown}. Was one column saved twice? {accept_remedy()}")
    elif share >= _COPIED_SHARE:
        reason = f"{_percent(share)} of the log-probs are bit-identical. Was one column saved twice?"
        yield undecided_check(name, "suspiciously good", f"{reason} If not, add {option('expect_bitwise')}")


def _check_too_good(name: str, run: RunResult, accepted: RunResult) -> Iterator[Check]:
    """Check for a mismatch far below the baseline's."""
    if _value(run, "bitwise_all") == 1 and _value(accepted, "bitwise_all") == 1:
        return
    for key, title, factor in (("abs_diff_mean", "mean |log ratio|", _TOO_GOOD_GAP), ("k3", "K3", _TOO_GOOD_K3)):
        value, before = _value(run, key), _value(accepted, key)
        if value is None or before is None or before <= 0:
            continue
        if factor * value < before - _TOO_GOOD_Z * (accepted.overall.metrics[key].se or 0.0):
            times = "" if value <= 0 else f" ({format_number(before / value)} times less)"
            shown = f"{title} is {format_number(value)}, in the baseline {format_number(before)}{times}"
            yield undecided_check(name, "suspiciously good", f"{shown}. {accept_remedy()}")
            return


def _check_scale(name: str, run: RunResult, accepted: RunResult) -> Iterator[Check]:
    """Check that log-probs have the scale of the baseline's: nats, not bits or decades."""
    for key, title in (("train_log_ppl", "train"), ("rollout_log_ppl", "rollout")):
        value, before = _value(run, key), _value(accepted, key)
        if value is None or before is None or before <= 0:
            continue
        scale = _SCALE_OF_SAME_TOKENS if _have_same_responses(run, accepted) else _SCALE
        if not 1 / scale <= value / before <= scale:
            reason = (
                f"the mean {title} log-prob is {format_number(-value)}, in the baseline {format_number(-before)}. "
                f"Are these other units, another model or other data? {accept_remedy()}"
            )
            yield undecided_check(name, "scale of the log-probs", reason)
            return
    counts = [_probability_counts(build_run_sample(each)) for each in (run, accepted)]
    if all(each is not None for each in counts):
        here, there = (each / max(each.sum(), 1.0) for each in counts if each is not None)
        distance = float(np.abs(here - there).sum() / 2)
        if distance > _PROBABILITY_DISTANCE:
            reason = (
                f"{_percent(distance)} of the tokens have another probability than in the baseline. "
                f"Are these other units, another model or other data? {accept_remedy()}"
            )
            yield undecided_check(name, "scale of the log-probs", reason)


def _have_same_responses(run: RunResult, accepted: RunResult) -> bool:
    here, there = (each.content.responses if each.content is not None else "" for each in (run, accepted))
    return bool(here) and here == there


def _probability_counts(sample: ClusterSample) -> Float64s | None:
    """Count the tokens by bin of the rollout's probability, None if the table does not have them."""
    if not set(LAYER_TOKENS) <= sample.columns.keys():
        return None
    return np.array([sample.column(name).sum() for name in LAYER_TOKENS])


def _check_lengths(name: str, run: RunResult, accepted: RunResult) -> Iterator[Check]:
    """Check that responses are about as long as in the baseline."""
    here, there = (_mean_length(build_run_sample(each)) for each in (run, accepted))
    if here is None or there is None or not there[0] > 0:
        return
    ratio, z = here[0] / there[0], abs(here[0] - there[0]) / max(np.hypot(here[1], there[1]), 1e-12)
    if not _LENGTH_RANGE <= ratio <= 1 / _LENGTH_RANGE and z > _LENGTH_Z:
        reason = (
            f"{here[0]:.3g} valid tokens per response, in the baseline {there[0]:.3g}. Does a mask or a cut hide some, "
            f"or does padding count? {accept_remedy()}"
        )
        yield undecided_check(name, "length of the responses", reason)


def _mean_length(sample: ClusterSample) -> tuple[float, float] | None:
    """Return the mean number of tokens per response, empty ones included, and its standard error."""
    responses = count_responses(sample)
    total, clusters = responses.sum(), len(sample)
    if total <= 0 or clusters < 2:
        return None
    mean = float(sample.column("tokens").sum() / total)
    spread = sample.column("tokens") - mean * responses
    return mean, float(np.sqrt((spread**2).sum() * clusters / (clusters - 1)) / total)


def count_responses(sample: ClusterSample) -> Float64s:
    """Count the sequences of each cluster, including those without valid tokens [N]."""
    names = (name for name in ("sequences", "empty_sequences") if name in sample.columns)
    return sum((sample.column(name) for name in names), np.zeros(len(sample)))


def _check_identity(name: str, new: RunContent, old: RunContent) -> Iterator[Check]:
    """Check that baseline and dump are of one model and one kind of engine."""
    remedy = f"Compare like with like, or add {option('allow_different_model')}"
    for what, here, there in (
        ("model", set(new.models), set(old.models)),
        ("engine", set(map(_engine_name, new.engines)), set(map(_engine_name, old.engines))),
    ):
        if here and there and here != there:
            shown = f"the {what} is {', '.join(sorted(here))}, in the baseline {', '.join(sorted(there))}"
            yield undecided_check(name, f"another {what}", f"{shown}. {remedy}")
            return
    difference = _compare_vocabularies(new, old)
    if difference:
        yield undecided_check(name, "another model", f"{difference}, so the tokenizers differ. {remedy}")


def _engine_name(text: str) -> str:
    """Return the name of an engine without its version."""
    found = re.match(r"[A-Za-z][A-Za-z_-]*", text)
    return (found.group() if found else text).lower().rstrip("_-v")


def _compare_vocabularies(new: RunContent, old: RunContent) -> str:
    """Describe the difference between the token ids of two dumps, empty if there is none."""
    counts = [np.array(each.vocabulary, np.float64) for each in (new, old)]
    if new.id_p95 is None or old.id_p95 is None or len(counts[0]) != len(counts[1]) or not len(counts[0]):
        return ""
    sizes = [each.sum() for each in counts]
    if min(sizes) < _MIN_IDS:
        return ""
    distance = float(np.abs(counts[0] / sizes[0] - counts[1] / sizes[1]).sum() / 2)
    low, high = sorted((new.id_p95 + 1, old.id_p95 + 1))
    if distance > _VOCABULARY_DISTANCE:
        return f"{_percent(distance)} of the token ids are distributed differently from the baseline"
    if high > _VOCABULARY_FACTOR * low:
        return f"5% of the token ids are above {new.id_p95:,}, in the baseline above {old.id_p95:,}"
    return ""


def _value(run: RunResult, key: str) -> float | None:
    found = run.overall.metrics.get(key)
    return None if found is None else found.value


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
