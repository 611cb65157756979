"""What a Comparison says, in sentences: kept in it, the same in every medium."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mismatchctl.compare.model import (
    Carrier,
    Change,
    Comparison,
    Contrast,
    Contribution,
    Decomposition,
    GrowthContrast,
    PairedTokens,
)
from mismatchctl.numbers import label, number
from mismatchctl.result import Growth, Value

UNMEASURED = Change(reference=Value(value=None), other=Value(value=None), status="not measured on both sides")
MAIN = (
    "k3", "abs_diff_mean", "abs_diff_p99", "abs_diff_max", "ratio_mean", "chi2_token", "ess_token", "ess_sequence",
    "prob_corr", "khat_token", "bitwise_share", "drift_k3",
)  # fmt: skip
"""Metrics that always have a row; those that changed significantly come after them."""
MATRIX = {"k3": "nats/token", "ess_sequence": "fraction", "abs_diff_mean": "nats", "abs_diff_max": "nats"}
"""What a matrix shows of each pair of engines, and its unit."""
MOST_LABELS = 6
"""Values that a sentence names."""
EFFECTS = ("rejected_tokens", "weight_bounded_high", "weight_bounded_low", "rejected_sequences")
"""What a correction that does nothing leaves at zero."""
MIX_MATTERS = 0.1
"""From this share of the change on, a change of mix is told."""
TOP = 100
"""Tokens of which the sentence says what they carry."""


def k3_change(contrast: Contrast) -> Change:
    """The headline's change."""
    return contrast.changes.get("k3", UNMEASURED)


def headline(contrast: Contrast, confidence: float) -> str:
    """One sentence: whether K3 changed, by how much, and what carries it."""
    change = k3_change(contrast)
    before, after = change.reference.value, change.other.value
    if before is None or after is None or change.difference is None:
        return f"K3 cannot be compared: {change.status}"
    if change.difference == 0:
        return f"K3 is the same: {number(before)}"
    size = _size(change, confidence)
    moved = f"from {number(before)} to {number(after)} ({size})"
    if not change.significant:
        return f"K3 did not change beyond the noise: {moved}"
    where = next(carriers(contrast), None)
    verb = "rose" if change.difference > 0 else "fell"
    return f"K3 {verb} {moved}" + (f"; {where}" if where else "; no part of the data carries it alone")


def _size(change: Change, confidence: float) -> str:
    relative = change.relative is not None
    size = signed_percent(change.relative) if relative else with_sign(change.difference)
    ends = change.relative_interval if relative else change.interval
    if ends is None:
        return f"{size}, {change.status}"
    low, high = (signed_percent(end) if relative else with_sign(end) for end in ends)
    tail = " (heavy_tail: it may cover less)" if change.reference.tail or change.other.tail else ""
    return f"{size}, {100 * confidence:.0f} % interval {low} to {high}{tail}, {significance(change)}"


def significance(change: Change) -> str:
    """Whether a change is significant, or why that is not known."""
    if change.p is None:
        return "not tested"
    if not change.significant:
        return "not significant"
    low, high = change.interval or (0.0, 0.0)
    # K3 is tested by its layers too: most tokens may have moved where the few that it hangs on scatter
    return "significant by what most tokens do" if low < 0 < high else "significant"


def main_metrics(contrast: Contrast) -> list[str]:
    """Keys of the metrics that are read first, then of those that changed significantly."""
    main = [key for key in MAIN if key in contrast.changes]
    return [*main, *(key for key, change in contrast.changes.items() if change.significant and key not in main)]


def correction_rows(contrast: Contrast) -> Iterator[tuple[str, Mapping[str, Change]]]:
    """Each correction with its changes, those that do anything."""
    for name, changes in contrast.corrections.items():
        if any(change.reference.value or change.other.value for key, change in changes.items() if key in EFFECTS):
            yield name, changes


def verdict(change: Change) -> str:
    """A word on a change for a table: better or worse where it is significant."""
    if change.difference == 0:
        return "same"
    if change.p is None:
        return ""
    if not change.significant:
        return "n.s."
    return "changed" if change.better is None else "better" if change.better else "worse"


def details(contrast: Contrast) -> list[str]:
    """What stands below the headline: what is paired, what else carries the change, and the tokens one by one."""
    more = [*list(carriers(contrast))[1:], *mixes(contrast)] if k3_change(contrast).significant else []
    return [contrast.paired, *more, *growth_sentences(contrast.growth), tokens_sentence(contrast)]


def growth_sentences(growth: GrowthContrast) -> Iterator[str]:
    """Whether K3 grows otherwise than the reference's over the steps, and since when each does."""
    if growth.quotient.verdict == "unknown":
        return
    yield f"K3 over the reference's, step by step: {growth.quotient.text}"
    if growth.onsets_differ is not None:
        begun = "began at another step" if growth.onsets_differ else "may have begun at the same step"
        yield f"the growth {begun}: {_onset(growth.other)} against {_onset(growth.reference)}"


def _onset(side: Growth) -> str:
    low, high = (label(end) for end in side.onset_interval or (side.onset, side.onset))
    return f"step {label(side.onset)}" + ("" if low == high else f" ({low} to {high})")


def carriers(contrast: Contrast) -> Iterator[str]:
    """What carries the change of K3, what stands out most first."""
    found = [(d, d.carrier) for d in contrast.decompositions if d.carrier is not None]
    for decomposition, carrier in sorted(found, key=lambda pair: -pair[1].carried / max(pair[1].weight, 1e-9)):
        is_one = len(carrier.labels) == 1
        own = f"{number(round(carrier.weight, 4), 'fraction')} of the reference's K3 and "
        yield (
            f"{carrier_name(decomposition, carrier)} {'carries' if is_one else 'carry'} {_whole(carrier.carried)} of it"
            f", with {own if k3_change(contrast).reference.value else ''}"
            f"{number(round(carrier.tokens, 4), 'fraction')} of tokens"
        )


def carrier_name(decomposition: Decomposition, carrier: Carrier) -> str:
    """What a carrier is: `positions from 512`, `steps 4 to 8`, `worker 3`."""
    if not carrier.labels:
        nouns = {"surprisal": "probabilities", "position": "positions", "length": "response lengths"}
        low, high = _open_ended(decomposition, carrier)
        return (
            f"{nouns.get(decomposition.quantity, decomposition.quantity)} {_bounds(decomposition.quantity, low, high)}"
        )
    names = [label(one) for one in carrier.labels]
    many = "s" if len(names) > 1 else ""
    if decomposition.ordered and len(names) > 2:
        return f"{decomposition.quantity}s {names[0]} to {names[-1]}"
    shown = ", ".join(names[:MOST_LABELS]) + (f" and {len(names) - MOST_LABELS} more" * (len(names) > MOST_LABELS))
    return f"{decomposition.quantity}{many if decomposition.ordered else ''} {shown}"


def part_name(decomposition: Decomposition, part: Contribution) -> str:
    """A bin, step or value in a table."""
    if part.low is None:
        return f"{decomposition.quantity} {label(part.label)}"
    nouns = {"surprisal": "probability", "position": "position", "length": "length"}
    noun = nouns.get(decomposition.quantity, decomposition.quantity)
    return f"{noun} {_bounds(decomposition.quantity, part.low, part.high)}"


def _open_ended(decomposition: Decomposition, carrier: Carrier) -> tuple[float, float | None]:
    """The bounds of a carrier; open where no token lies beyond."""
    lowest = min(part.low or 0.0 for part in decomposition.parts)
    last = max(decomposition.parts, key=lambda part: part.low or 0.0)
    return 0.0 if carrier.low == lowest else carrier.low or 0.0, None if carrier.high == last.high else carrier.high


def _bounds(quantity: str, low: float, high: float | None) -> str:
    """The bounds of a bin; positions count from 1, surprisals read as probabilities."""
    if quantity == "surprisal":
        bottom, top = None if high is None else number(math.exp(-high)), number(math.exp(-low))
        if low == 0:
            return f"above {bottom}"
        return f"below {top}" if bottom is None else f"{bottom} to {top}"
    first, last = max(math.ceil(low), 1), None if high is None else math.ceil(high) - 1
    if last is None:
        return f"from {first:,}"
    return f"{first:,}" if last <= first else f"{first:,} to {last:,}"


def mixes(contrast: Contrast) -> Iterator[str]:
    """Where a change of mix matters: how the change splits, by what shows it most."""
    most = max(contrast.decompositions, key=lambda found: abs(found.mix), default=None)
    if most is not None and abs(most.mix) >= MIX_MATTERS * abs(most.difference) > 0:
        yield (
            f"by {most.quantity}, {with_sign(most.mix)} of the change is mix (more or fewer tokens in place), "
            f"{with_sign(most.level)} is level (larger or smaller K3 in place)"
        )


def tokens_sentence(contrast: Contrast) -> str:
    """What the same tokens on both sides tell, or why they were not paired."""
    paired = contrast.tokens
    if paired is None:
        return f"tokens are not paired: {contrast.tokens_status}"
    parts = [
        f"paired token by token ({matched(paired)}): {paired.tokens:,} tokens of {paired.sequences:,} sequences"
        + (", {:,} and {:,} sequences have no partner".format(*paired.unmatched) if any(paired.unmatched) else "")
    ]
    if paired.moved == 0:
        return f"{parts[0]}; every log ratio is the same"
    change = paired.k3_change
    error = "" if change.se is None else f" ± {number(change.se)}"
    parts.append(
        f"the log ratio differs in {number(paired.moved, 'fraction')} of them, "
        f"by {number(paired.abs_log_ratio_change)} on average; K3 changes by {with_sign(change.value)}{error} per token"
    )
    if paired.correlation is not None:
        parts.append(f"log ratios correlate {number(paired.correlation, 'correlation')}")
    share = max((share for share in paired.shares if share.tokens <= TOP), key=lambda s: s.tokens, default=None)
    if share is not None:
        net = "" if share.of_change is None else f"{_whole(share.of_change)} of the change and "
        parts.append(f"the {share.tokens} that moved most make {net}{_whole(share.of_movement)} of all movement")
    return "; ".join(parts)


def matched(paired: PairedTokens) -> str:
    """What tokens were recognized by, and which side was computed once."""
    by = {"token_ids": "the same token ids", "rollout_log_probs": "", "train_log_probs": ""}[paired.matched_by]
    if paired.same_rollout and paired.same_train:
        what = "identical log-probs"
    elif paired.same_rollout:
        what = "one rollout, two trainers"
    elif paired.same_train:
        what = "one trainer, two rollout engines"
    else:
        what = "both computed anew"
    return ", ".join(filter(None, (by, what)))


def method(comparison: Comparison) -> str:
    """How significance was decided."""
    level = f"{100 * (1 - comparison.confidence):.0f} %"
    several = " of all comparisons" if len(comparison.contrasts) > 1 else ""
    return (
        f"Intervals are {100 * comparison.confidence:.0f} % percentile intervals over resampled clusters, "
        f"each for itself. Significant is what keeps the family-wise error below {level} by Holm: "
        f"K3{several} is one family, all other metrics together another, those of corrections a third."
    )


def with_sign(value: float | None) -> str:
    """A difference with its sign."""
    text = number(value)
    return text if value is None or value <= 0 else f"+{text}"


def signed_percent(value: float | None) -> str:
    """A relative difference with its sign; large ones as a factor."""
    if value is None:
        return number(None)
    if value >= 9:
        return f"{number(value + 1)}-fold"
    return f"{'+' if value > 0 else ''}{number(value, 'fraction')}"


def _whole(share: float) -> str:
    """A share as whole percent; more than all where others go the other way."""
    return f"{100 * share:.0f} %"
