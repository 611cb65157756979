"""Tests for log-probs that belong to other tokens: shifts, wrong masks, padding, and text changed after sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints, Segments
from mismatchctl.core.formatting import format_count
from mismatchctl.core.schema import POSITIVE_TOLERANCE
from mismatchctl.data.blocks import Rows
from mismatchctl.diagnosis.case import BFLOAT16_NOISE, Case, cached_on_case, is_placeholder
from mismatchctl.diagnosis.detection import Detection, format_list, make_fact, make_share_fact, percent
from mismatchctl.diagnosis.evidence import Tally
from mismatchctl.results.model import Confidence

_EDIT_MIN_SIDE = 4
_EDIT_GROSS_DISTANCE, _EDIT_MAX_DISTANCE = 1.0, 5.0
_EDIT_SURE_SHARE, _EDIT_MOST = 0.03, 0.5


@dataclass(frozen=True)
class _Breaks:
    """Sequences (`found`) whose rollout and train log-probs agree before the token `split`, but not from there on."""

    found: Bools
    split: Ints
    after: Bools
    level: Float64s
    position: Ints
    tokens_left: int
    at_turn: bool

    @property
    def at_one_place(self) -> bool:
        begins = self.split[self.found]
        return len(begins) >= _ROWS and float(np.mean(np.abs(begins - np.median(begins)) <= 3)) >= _SAME


@cached_on_case
def _find_breaks(case: Case) -> _Breaks | None:
    if not len(case.x) or case.noise == 0:
        return None
    size = np.minimum(np.abs(case.x), _EDIT_MAX_DISTANCE)
    found, split = np.zeros(case.size, np.bool_), np.zeros(case.size, np.int64)
    # First search for a jump of the loudness. Then search for large differences, which a temperature rarely causes.
    gross = size > _EDIT_GROSS_DISTANCE
    searches = [(case.loudness, 2.3)]
    if case.sums(gross).max() > 0.3 * _EDIT_MIN_SIDE:  # otherwise, no mean rises by more than 0.3
        searches.append((gross.astype(np.float64), 0.3))
    for values, jump in searches:
        at, score, difference = _best_splits(case, values)
        new = (score > 6.0) & (difference > jump) & ~found
        if new.any():
            new &= _check_breaks(case, size, at)
            found, split = found | new, np.where(new, at, split)
    if found.sum() < (2 if case.noise < BFLOAT16_NOISE else 3):
        return None
    after = (case.place >= case.each(split)) & case.each(found)
    level = case.part_means(size, after)
    position = case.rows.positions[case.index[np.minimum(case.starts + split, len(case.index) - 1)]]
    left = int(np.median((case.counts - split)[found]))
    return _Breaks(found, split, after, level, position, left, case.breaks_at_turns(found, split))


def detect_edited_response(case: Case) -> Detection | None:
    breaks = _find_breaks(case)
    if breaks is None:
        return _match_edited_spans(case)
    if breaks.at_turn:
        return None  # another test finds contexts that changed at a turn
    found, level = breaks.found, float(breaks.level[breaks.found].mean())
    long = case.counts >= 2 * _EDIT_MIN_SIDE
    share, examples = float(found.sum() / max(long.sum(), 1)), case.find_loudest(found, breaks.level)
    agrees = float(np.median(np.abs(case.x[~breaks.after & case.each(found)])))
    rest = case.without(case.marked(breaks.after))
    # if the other tokens are noisy, a rise within a row proves little
    noisy = rest.spread > 0.12 and "truncated_sampling" not in case.explained
    noisy &= not (share > _EDIT_MOST and breaks.at_one_place)
    confidence: Confidence = "high" if share > _EDIT_SURE_SHARE else "medium"
    if noisy:
        confidence = "medium" if 3 * _EDIT_SURE_SHARE < share < _EDIT_MOST and level > 1 else "low"
    if case.filled or case.reshaped:  # a cause that affects all tokens can cause such a rise too
        confidence = "low" if noisy else "medium"
    return Detection(
        confidence,
        f"in {percent(share)} of the sequences, the two sides agree up to a position (median difference {agrees:.2g} "
        f"nats) and disagree after it (mean difference {level:.2g} nats). The response was changed after sampling",
        share=case.share(case.marked(breaks.after)),
        evidence=(
            make_share_fact("sequences", found, long, "share of sequences that agree up to a position, then differ"),
            make_fact("difference_before", agrees, "median |log ratio| before this position, nats"),
            make_fact("difference_after", level, "mean |log ratio| after this position, nats"),
            make_fact("tokens_after", breaks.tokens_left, "median number of tokens from this position to the end"),
            make_fact("spread_of_the_rest", rest.spread, "noise of the logits in all other tokens", against=noisy),
        ),
        where=_describe_breaks(breaks, share, examples),
        examples=examples,
        positions=breaks.position[examples],
        rivals={"unsampled_tokens": "read token_ids from this position on: text of another model looks the same"},
        leaves=None if confidence == "low" else rest,
    )


_SPAN_MIN_LENGTH, _SPAN_MIN_DENSITY = 6, 0.4


def _match_edited_spans(case: Case) -> Detection | None:
    """Find rows whose two sides agree, except in one span with very large differences."""
    if case.reshaped or case.filled or not len(case.x) or not 0 < case.noise < 0.1:
        return None
    gross = np.abs(case.x) > max(_EDIT_GROSS_DISTANCE, 12 * case.noise)
    if np.count_nonzero(case.sums(gross) >= _SPAN_MIN_DENSITY * _SPAN_MIN_LENGTH) < 2:
        return None
    first, length = _densest_spans(case, gross)
    inside = (case.place >= case.each(first)) & (case.place < case.each(first + length))
    hits, others = case.sums(gross & inside), case.sums(gross & ~inside)
    rest = np.maximum(case.counts - length, 1)
    usual = (others.sum() + 1) / (rest.sum() + 1)
    # Upper bound of log p. p is the probability that any span of the row has this number of hits by chance.
    luck = hits * np.log(usual * np.e * np.maximum(length, 1) / np.maximum(hits, 1)) + 2 * np.log(case.counts + 1.0)
    found = (length >= _SPAN_MIN_LENGTH) & (hits >= _SPAN_MIN_DENSITY * length) & (luck < -12.0)
    found &= (others <= 0.05 * rest) & (first >= _EDIT_MIN_SIDE)
    found &= case.counts - first - length >= _EDIT_MIN_SIDE
    if found.sum() < 2 or case.breaks_at_turns(found, first):
        return None
    inside &= case.each(found)
    tokens, rows, used = case.marked(inside), int(found.sum()), case.counts >= _SPAN_MIN_LENGTH + 2 * _EDIT_MIN_SIDE
    size = np.minimum(np.abs(case.x), _EDIT_MAX_DISTANCE)
    agrees, level = float(np.median(size[case.each(found) & ~inside])), float(size[inside].mean())
    examples = case.find_loudest(found, case.part_means(size, inside))
    at = case.rows.positions[case.index[np.minimum(case.starts + first, len(case.index) - 1)]]
    share, span = percent(rows / max(used.sum(), 1)), int(np.median(length[found]))
    return Detection(
        "high" if rows >= 8 else "medium",
        f"in {share} of the sequences, the two sides disagree in a span of about {span} tokens (mean difference "
        f"{level:.2g} nats) and agree before and after this span (median difference {agrees:.2g} nats). The span was "
        "changed after sampling",
        tokens=tokens,
        evidence=(
            make_share_fact("sequences", found, used, "share of sequences that disagree in one span only"),
            make_fact("difference_before", agrees, "median |log ratio| outside the span, nats"),
            make_fact("difference_inside", level, "mean |log ratio| in the span, nats"),
            make_fact("tokens_inside", span, "median number of tokens in the span"),
        ),
        where={"sequences": share, "positions": f"in the examples, from token {format_list(at[examples], 3)} on"},
        examples=examples,
        positions=at[examples],
        rivals={"unsampled_tokens": "read token_ids of the span. Tool output or forced text looks the same"},
    )


def _densest_spans(case: Case, gross: Bools) -> tuple[Ints, Ints]:
    """Return start and length of one span per sequence [S], with many `gross` tokens and few other tokens."""
    scores = gross - _SPAN_MIN_DENSITY
    after = np.cumsum(scores)
    before = after - scores
    drop = 2.0 * (np.abs(after).max(initial=0.0) + 1)  # so that a row's minimum is below all earlier rows
    lowest = np.minimum.accumulate(before - drop * case.where)
    gain = after - drop * case.where - lowest
    best, ends = case.segments.max(gain), np.zeros(case.size, np.int64)
    last = np.flatnonzero(gain == case.each(best))[::-1]
    ends[case.where[last]] = last
    order = np.arange(len(after))
    begins = np.maximum.accumulate(np.where(before - drop * case.where == lowest, order, 0))[
        np.minimum(ends, len(order) - 1)
    ]
    return begins - case.starts, np.where(case.counts > 0, ends - begins + 1, 0)


def _describe_breaks(breaks: _Breaks, share: float, examples: Ints) -> dict[str, str]:
    first = format_list(breaks.position[examples], 3)
    return {"sequences": percent(share), "positions": f"in the examples, from token {first} on"}


def _check_breaks(case: Case, size: Float64s, split: Ints) -> Bools:
    after = case.place >= case.each(split)
    half = case.place >= case.each((case.counts + split) // 2)
    level, later = (case.part_means(size, part) for part in (after, half))
    stray = case.part_means(size > 0.5 * case.each(level), ~after)
    position = case.rows.positions[case.index]
    # True if the token right before the split is masked or already explained
    apart = np.append(False, np.diff(position) != 1) & (case.place == case.each(split))
    found: Bools = (level > 0.4) & (stray < 0.2) & (later > 0.4 * level)
    found &= case.sums(apart) == 0
    return found


def _best_splits(case: Case, values: Float64s) -> tuple[Ints, Float64s, Float64s]:
    """Split each sequence in two, so that the mean of `values` rises most. Return index, t statistic, rise [S]."""
    floor = max(0.3 * float(values.var()), 0.03)
    n = case.each(case.counts.astype(np.float64))
    running = np.append(0.0, np.cumsum(values))
    before = running[:-1] - case.each(running[case.starts])
    total = case.each(case.sums(values))
    k = case.place.astype(np.float64)
    inside = (k >= _EDIT_MIN_SIDE) & (n - k >= _EDIT_MIN_SIDE)
    with np.errstate(invalid="ignore", divide="ignore"):
        jump = (total - before) / (n - k) - before / k
        gain = jump * np.sqrt(k * (n - k) / n)
    gain = np.where(inside, gain, -np.inf)
    best = case.segments.max(gain)
    chosen = np.flatnonzero(np.isfinite(gain) & (gain == case.each(best)))[::-1]
    split, difference = np.zeros(case.size, np.int64), np.zeros(case.size)
    split[case.where[chosen]], difference[case.where[chosen]] = case.place[chosen], jump[chosen]
    mean = case.means(values)
    spread = case.means((values - case.each(mean)) ** 2) * case.counts
    left = np.maximum(spread - np.where(np.isfinite(best), best, 0.0) ** 2, 1e-9) / np.maximum(case.counts - 2, 1)
    return split, np.where(np.isfinite(best), best, 0.0) / np.sqrt(np.maximum(left, floor)), difference


MAX_SHIFT = 32
_SHIFTED_MAX_DISTANCE, _SHIFTED_MIN_LENGTH = 1.0, 12
_SHIFTED_MIN_ROWS, _SHIFTED_CLEAR_AGREEMENT, _OWN = 2, 0.15, 3


def _find_shifts(case: Case, candidates: Ints, farthest: int = MAX_SHIFT) -> tuple[Ints, Float64s]:
    """Find the shift k of each row: rollout[i + k] is near train[i]. Return k and the misfit (no match: 0 and 1)."""
    tokens = case.segments.token_indices(candidates)
    r, t, lengths = case.r[tokens], case.t[tokens], case.counts[candidates]
    starts = np.cumsum(lengths) - lengths
    steps = [0, *(sign * k for k in range(1, min(farthest, len(tokens) - 1) + 1) for sign in (1, -1))]
    level = np.full((len(steps), case.size), np.nan)
    for row, k in enumerate(steps):
        pairs = lengths - abs(k)
        told = pairs >= _SHIFTED_MIN_LENGTH
        apart = np.abs(r[max(k, 0) : len(r) + min(k, 0)] - t[max(-k, 0) : len(t) - max(k, 0)])
        running = np.append(0.0, np.cumsum(np.minimum(apart, _SHIFTED_MAX_DISTANCE, out=apart)))
        first, number = starts[told], pairs[told]
        level[row, candidates[told]] = (running[first + number] - running[first]) / number
    number = np.isfinite(level).sum(axis=0)
    known = number > 2
    level[:, ~known], number[~known] = 1.0, len(steps)
    ordered, every = np.sort(level, axis=0), np.arange(case.size)  # NaN comes last
    chance = (ordered[(number - 1) // 2, every] + ordered[number // 2, every]) / 2
    best = np.where(np.isnan(level), np.inf, level).argmin(axis=0)
    agreement = level[best, every] / np.maximum(chance, 1e-9)
    # in unrelated columns of n tokens, the best of 64 shifts is about 2.1 / sqrt(n) better than the median shift
    limit = np.minimum(0.65, 1 - 2.1 / np.sqrt(np.maximum(case.counts, 1)))
    found = known & (level[0] > 0.6 * chance) & (agreement < limit)
    return np.where(found, np.array(steps)[best], 0), np.where(found, agreement, 1.0)


def detect_misaligned(case: Case) -> Detection | None:
    bad = case.means(np.minimum(np.abs(case.x), _SHIFTED_MAX_DISTANCE)) > 0.25
    candidates = np.flatnonzero(bad & (case.counts > _SHIFTED_MIN_LENGTH))
    if not len(candidates):
        return None
    shift, agreement = _find_shifts(case, candidates)
    found, breaks = shift != 0, _find_breaks(case)
    if found.sum() < _SHIFTED_MIN_ROWS:
        return None
    if breaks is not None and (found & breaks.found).sum() > 0.5 * found.sum():
        return None  # the sides agree at first, and are shifted only after a position
    values, counts = np.unique(shift[found], return_counts=True)
    order = np.argsort(-counts)
    own = bool(counts.max() < max(_SHIFTED_MIN_ROWS, 0.5 * found.sum()))
    limit = _SHIFTED_CLEAR_AGREEMENT if found.sum() >= _OWN else _SHIFTED_CLEAR_AGREEMENT / 2
    if own and float(np.median(agreement[found])) > limit:
        return None  # each row has another shift, and no shift fits well
    long = case.counts > _SHIFTED_MIN_LENGTH
    share = float(found.sum() / long.sum())
    if counts.max() > 0.8 * long.sum():  # assume that rows too short to test are shifted too
        shift[~found], found = values[order[0]], case.counts > 0
    whole = "every sequence" if share > 0.95 else f"{percent(share)} of the sequences"
    common, fit = int(values[order[0]]), float(np.median(agreement[found]))
    rows = format_list(f"{values[i]:+d}: {format_count(int(counts[i]), 'row')}" for i in order)
    shifts = format_list(f"{values[i]:+d}: {counts[i]}" for i in order)
    where = f"{format_count(abs(common), 'position')} {'later' if common > 0 else 'earlier'} in rollout_log_probs"
    where = f"{where} than" if not own else f"shifted in rollout_log_probs ({rows}) compared with"
    moved, source = np.full(len(case.rollout), np.nan), case.place + case.each(shift)
    inside = (source >= 0) & (source < case.each(case.counts))
    moved[case.index[inside]] = case.r[(case.each(case.starts) + source)[inside]]
    clear = (counts.max() > 0.8 * found.sum() and not own) or found.sum() >= _OWN
    clear = clear and fit < _SHIFTED_CLEAR_AGREEMENT
    return Detection(
        "high" if share > 0.1 or clear else "low" if share < 0.02 else "medium",
        f"in {whole}, the log-prob of a token is {where} in train_log_probs. Without the shift, the difference "
        f"between the two sides is {1 / max(fit, 1e-3):.3g} times smaller",
        share=case.share(found[case.sequence]),
        evidence=(
            make_fact("shift", common, "shift of the rollout column: rollout[i + shift] belongs to train[i]"),
            make_fact("shifts", shifts, "each shift, and its number of sequences"),
            make_fact("agreement", fit, "mean difference after / before undoing the shift"),
            make_share_fact("sequences", found, long, "share of shifted sequences among the long sequences"),
        ),
        where={"sequences": "all" if share > 0.95 else percent(share)},
        examples=case.find_loudest(found),
        leaves=case.with_log_probs(rollout=moved),
    )


_RETOKENIZED_MIN_ROWS = 2


def detect_retokenized(case: Case) -> Detection | None:
    breaks = _find_breaks(case)
    if breaks is None:
        return None
    found, after = breaks.found, case.marked(breaks.after)
    shift, agreement = _find_shifts(case.without(~after), np.flatnonzero(found), 12)
    moved = found & (shift != 0)
    if moved.sum() < max(_RETOKENIZED_MIN_ROWS, 0.5 * found.sum()):
        return None
    values, counts = np.unique(shift[moved], return_counts=True)
    examples, fit = case.find_loudest(moved, case.sums(after[case.index])), float(np.median(agreement[moved]))
    shifts = format_list(f"{values[i]:+d}: {counts[i]}" for i in np.argsort(-counts))
    used = case.counts > 0
    return Detection(
        "high" if moved.sum() > _RETOKENIZED_MIN_ROWS else "medium",
        f"in {percent(found.sum() / max(used.sum(), 1))} of the sequences, the two sides agree up to a position. After "
        "this position, they only agree if one column is shifted: one side split the same text into other tokens",
        tokens=after,
        evidence=(
            make_share_fact("sequences", found, used, "share of sequences that disagree from a position on"),
            make_fact("shifts", shifts, "each shift after the position, and its number of sequences"),
            make_fact("agreement", fit, "mean difference after / before undoing the shift"),
        ),
        where=_describe_breaks(breaks, float(found.mean()), examples),
        examples=examples,
        positions=breaks.position[examples],
        rivals={"misaligned": "compare the number of token ids on each side. One side may drop or repeat tokens"},
    )


def detect_mask_wrong(case: Case) -> Detection | None:
    return _match_inverted_mask(case) or _match_prompt_in_mask(case) or _match_shared_prefix(case)


def _match_inverted_mask(case: Case) -> Detection | None:
    if case.rows.mask.all():
        return None
    finite = np.isfinite(case.rollout) & np.isfinite(case.train)
    masked = ~case.rows.mask & finite & (case.rollout < 0) & (case.train < 0)
    if masked.sum() < 20 or not len(case.x):
        return None
    outside, inside = float(np.median(np.abs(case.train - case.rollout)[masked])), float(np.median(np.abs(case.x)))
    if np.std(case.rollout[masked]) < 0.05 or outside > 0.2 * inside or inside < 0.2:
        return None
    rows = np.bincount(case.sequence[masked], minlength=case.size) > 0
    return Detection(
        "high",
        f"the two sides agree on masked tokens (median difference {outside:.3g} nats) and disagree on valid tokens "
        f"({inside:.3g} nats). The mask is inverted",
        evidence=(
            make_fact("difference_masked", outside, "median |log ratio| on masked tokens, nats"),
            make_fact("difference_valid", inside, "median |log ratio| on valid tokens, nats"),
            make_fact("masked_share", masked.sum() / (masked.sum() + len(case.x)), "share of tokens that are masked"),
        ),
        examples=case.find_loudest(rows),
        leaves=case.without(case.sound),
    )


def _match_prompt_in_mask(case: Case) -> Detection | None:
    """Find responses that start with a constant log-prob. Some engines write a constant for prompt tokens."""
    every = case.suspicious_runs
    runs = every[every.at_start & ~every.at_end]
    sequences = np.isin(np.arange(case.size), runs.sequence)
    elsewhere = int((~every.at_start).sum()) / max(len(case.index), 1)
    if sequences.sum() < 4.0 * elsewhere * (case.counts > 0).sum():
        return None  # constants occur elsewhere too, such as 0 if top-p keeps one token
    if sequences.sum() < max(3, 0.05 * (case.counts > 0).sum()):
        return None
    return Detection(
        "high",
        f"{percent(sequences.mean())} of the sequences begin with tokens (on average {runs.length.mean():.3g}) that "
        f"have the constant log-prob {runs.value[0]:g} on one side. The mask counts the prompt as response",
        tokens=runs.tokens(case),
        evidence=(
            make_share_fact("sequences", sequences, case.counts > 0, "share of sequences that begin with a constant"),
            make_fact("tokens_each", runs.length.mean(), "mean number of tokens with the constant"),
            make_fact("difference", runs.off.mean(), "mean |log ratio| of the tokens with the constant, nats"),
        ),
        where={"positions": "the beginning of the response"},
        examples=case.find_loudest(sequences),
        rivals={"unsampled_tokens": "read the first token_ids. A forced prefix of the response looks the same"},
    )


def _match_shared_prefix(case: Case) -> Detection | None:
    """Find prompts whose responses all start with the same unlikely tokens. Such tokens must belong to the prompt."""
    ids = case.rows.extra_columns.get("token_ids")
    if ids is None or case.rows.columns.get("prompt_id") is None:
        return None
    members: dict[int, list[int]] = {}
    for sequence in np.flatnonzero(case.counts > 0).tolist():
        members.setdefault(int(case.clusters[sequence]), []).append(sequence)
    pairs = [sequences[:2] for sequences in members.values() if len(sequences) > 1]
    prefix, hits, lengths = np.zeros(len(case.sound), np.bool_), [], []
    for pair in pairs:
        one, two = (case.index[slice(*case.segments.offsets[sequence : sequence + 2])] for sequence in pair)
        shorter = min(len(one), len(two))
        differ = np.flatnonzero(ids[one[:shorter]] != ids[two[:shorter]])
        common = int(differ[0]) if len(differ) else 0
        surprise = -np.maximum(case.train, case.rollout)[one[:common]].sum()
        if surprise > _PREFIX_MIN_SURPRISE:
            hits.append(pair[0])
            lengths.append(common)
            prefix[one[:common]] = prefix[two[:common]] = True
    if len(hits) < max(3, 0.5 * len(pairs)):
        return None
    return Detection(
        "medium",
        f"for {len(hits)} of {len(pairs)} prompts, all responses begin with the same tokens (on average "
        f"{np.mean(lengths):.0f}). The mask counts the prompt as response",
        share=case.share(prefix),
        evidence=(
            make_fact("prompts", len(hits) / len(pairs), "share of prompts whose responses begin with the same tokens"),
            make_fact("tokens_each", np.mean(lengths), "mean number of shared tokens"),
            make_fact("nats", _PREFIX_MIN_SURPRISE, "limit of -log-prob for tokens that samples share by chance"),
        ),
        where={"positions": f"the first {int(np.median(lengths))} tokens"},
        examples=np.array(hits[:3]),
        rivals={"unsampled_tokens": "read the first token_ids. A forced prefix of the response looks the same"},
    )


_PREFIX_MIN_SURPRISE, MIN_LOG_PROB = 20.0, -200.0
_LAST_TOKEN_MIN_LENGTH, _LAST_TOKEN_MIN_DISTANCE, _LAST_TOKEN_FACTOR = 3, 1.0, 20.0
"""The last of more than 3 tokens is wrong if |log ratio| is above 1 nat and above 20 times the row's median."""
_REPAIRING = {
    "wrong_log_base", "wrong_sign", "probabilities_not_logs", "cumulative", "log_densities", "unmasked_padding",
    "constant_column",
}  # fmt: skip
"""If an earlier test found one of these causes, only NaN, infinite and null log-probs count as placeholders."""
_IMPOSSIBLE, _MIN_PADDING_RUN, _DENIED = "impossible", 4, 2.0
"""A token with train log-prob -inf is "impossible". `_MIN_PADDING_RUN` or more adjacent such tokens are padding."""
_PLACEHOLDER_KINDS = {
    "nonfinite": "NaN, infinite or null",
    "positive": "above 0",
    "sentinel": f"below {MIN_LOG_PROB:g}",
}


def flag_placeholders(rows: Rows) -> dict[str, Tally]:
    sides = [side for side in ("rollout", "train") if not rows.is_within(side, MIN_LOG_PROB, POSITIVE_TOLERANCE)]
    return {
        f"{kind}_{side}": Tally.of(rows, _mark_placeholders(rows, kind, side))
        for side in sides
        for kind in (*_PLACEHOLDER_KINDS, *([_IMPOSSIBLE] if side == "train" else []))
    }


def _mark_placeholders(rows: Rows, kind: str, side: str) -> Bools:
    values = rows.rollout if side == "rollout" else rows.train
    with np.errstate(invalid="ignore"):
        impossible = np.isneginf(values) & np.isfinite(rows.rollout) & rows.mask & (side == "train")
        if kind == _IMPOSSIBLE:
            return impossible & ~_mark_runs(impossible, rows.segments)
        if kind == "nonfinite":
            return ~np.isfinite(values) & rows.mask & (~impossible | _mark_runs(impossible, rows.segments))
        if kind == "positive":
            return (values > POSITIVE_TOLERANCE) & (values < np.inf) & rows.mask
        return (values < MIN_LOG_PROB) & (values > -np.inf) & rows.mask


def _mark_runs(marks: Bools, segments: Segments) -> Bools:
    """Keep only marks in groups of at least `_MIN_PADDING_RUN` adjacent marks in one sequence."""
    at = np.flatnonzero(marks)
    row = np.searchsorted(segments.offsets, at, side="right")
    run = np.cumsum(np.diff(at, prepend=-2) * (np.diff(row, prepend=-1) == 0) != 1)
    found = np.zeros(len(marks), np.bool_)
    found[at[np.bincount(run)[run] >= _MIN_PADDING_RUN]] = True
    return found


def detect_padding_or_sentinel(case: Case) -> Detection | None:
    repaired = bool(_REPAIRING & {*case.explained})
    open_kinds = {"nonfinite"} if repaired else {*_PLACEHOLDER_KINDS}
    tallies = {name: found for name, found in case.evidence.tallies.items() if name.partition("_")[0] in open_kinds}
    off = (case.rollout > POSITIVE_TOLERANCE) | (case.train > POSITIVE_TOLERANCE)
    off |= (case.rollout < MIN_LOG_PROB) | (case.train < MIN_LOG_PROB)
    sentinels = {} if repaired else _find_sentinels(case)
    for tokens in sentinels.values():
        off |= tokens
    cleaned = case.without(off & case.sound)
    runs = cleaned.suspicious_runs
    # Not padding: repeated text also has equal log-probs, and a token that top-p keeps alone has log-prob 0.
    typed = np.array([is_placeholder(value) for value in runs.value], np.bool_)
    runs = runs[runs.at_end & typed & ((runs.value != 0) | (runs.off > _DENIED))]
    tail = runs.tokens(cleaned) | _find_bad_ends(cleaned)
    ended = np.bincount(cleaned.sequence[tail], minlength=case.size) > 0
    if ended.sum() < max(3, 0.01 * case.size):
        tail[:] = ended[:] = False
    if not tallies and not ended.any() and not sentinels:
        return None
    evidence, phrases, some = [], [], bool(ended.any())
    for name, tally in sorted(tallies.items()):
        kind, _, side = name.partition("_")
        what = f"a {side} log-prob that is {_PLACEHOLDER_KINDS[kind]}"
        evidence.append(make_fact(name, tally.tokens, f"number of valid tokens with {what}"))
        phrases.append(f"{format_count(tally.tokens, 'valid token')} {'has' if tally.tokens == 1 else 'have'} {what}")
    for (side, value), tokens in sentinels.items():
        count, what = int(tokens.sum()), f"the {side} log-prob {value:g}"
        evidence.append(make_fact(f"constant_{side}", count, f"number of valid tokens with {what}"))
        phrases.append(f"{count:,} valid tokens have {what}, far from the other side's log-prob")
    if some:
        used = case.counts > 0
        evidence.append(make_share_fact("ends", ended, used, "share of sequences whose last tokens lack a log-prob"))
        values = cleaned.rollout[tail]
        constant = f" (rollout: {values[0]:g})" if np.all(values == values[0]) else ""
        share = percent(ended.sum() / max(used.sum(), 1))
        phrases.append(f"in {share} of the sequences, the last tokens have a log-prob on one side only{constant}")
    counted = sum(tally.tokens for tally in tallies.values()) / max(case.evidence.tokens, 1)
    return Detection(
        "high",
        "; ".join(phrases),
        share=max(case.share(~cleaned.sound | tail), min(1.0, counted)),
        evidence=tuple(evidence),
        where={"positions": "the end of the response"} if some else {},
        examples=cleaned.find_loudest(ended),
        places=tuple(place for tally in tallies.values() for place in tally.places)[:3],
        rivals={"mask_wrong": "compare the mask with token_ids. The mask may count padding as valid"} if some else {},
        leaves=cleaned.without(tail),
    )


def _find_sentinels(case: Case) -> dict[tuple[str, float], Bools]:
    """Find placeholders. Return {(side, value): flags of the tokens with this value [T]}."""
    found = {}
    if "low_precision_logging" not in case.explained:  # rounded values all look like placeholders
        # A value is a placeholder if 6 or more tokens and 40% of the far tokens have it, and 90% of these are far.
        far = np.abs(case.x) > 5.0
        for side, own, _ in case.sides:
            values, counts = np.unique(own[far], return_counts=True)
            for value in values[counts >= max(6, 0.4 * far.sum())].tolist():
                at = own == value
                if is_placeholder(value) and value < 0 and far[at].mean() > 0.9:
                    found[side, value] = case.marked(at)
    return found


def _find_bad_ends(case: Case) -> Bools:
    """Flag the last token of a response if its |log ratio| is very far above the median of the response [T]."""
    size, none = np.abs(case.x), np.zeros(len(case.sound), np.bool_)
    long = np.flatnonzero(case.counts > _LAST_TOKEN_MIN_LENGTH)
    least, ends = 0.1 * len(long), case.segments.offsets[1:][long]
    if (size[ends - 1] > _LAST_TOKEN_MIN_DISTANCE).sum() < least:
        return none
    some = long[np.maximum(size[ends - 1], size[ends - 2]) > _LAST_TOKEN_MIN_DISTANCE]
    usual = np.array([np.median(size[slice(*case.segments.offsets[row : row + 2])]) for row in some.tolist()])
    ends = case.segments.offsets[1:][some]
    last, before = (size[ends - k] > np.maximum(_LAST_TOKEN_FACTOR * usual, _LAST_TOKEN_MIN_DISTANCE) for k in (1, 2))
    difference = int(last.sum()) - int(before.sum())
    if difference < least or difference < 5.0 * np.sqrt(last.sum() + before.sum()):
        return none
    return case.marked(ends[last] - 1)


_UNSAMPLED_FAR, _UNSAMPLED_MIN_FAR_SHARE = 0.5, 0.6
"""A token is far if its log-probs differ by over 0.5 nats. At least 67% of the tokens in real tool output are far."""


def detect_unsampled_tokens(case: Case) -> Detection | None:
    runs = case.suspicious_runs
    runs = runs[~runs.at_end & ~runs.at_start & ~(case.reshaped & (runs.value == 0))]  # top-p can cause 0
    if float((case.x < 0).sum()) > 0.85 * len(case.x):  # top-p may keep only one token, with log-prob 0
        runs = runs[(runs.value != 0) | ((runs.length >= 8) & (runs.off > 3.0))]
    far = np.append(0, np.cumsum(np.abs(case.x) > _UNSAMPLED_FAR))
    denied = (far[runs.first + runs.length] - far[runs.first]) > _UNSAMPLED_MIN_FAR_SHARE * runs.length
    typed = np.array([is_placeholder(value) for value in runs.value], np.bool_)
    runs = runs[denied & typed]  # repeated text also has a constant log-prob
    tokens = runs.tokens(case)
    sequences = np.bincount(case.sequence[tokens], minlength=case.size) > 0
    long = runs[runs.length >= 4]
    quiet = case.noise < BFLOAT16_NOISE  # with so little noise, other weights do not explain such tokens
    if tokens.sum() < (2 if quiet else 8) or sequences.sum() < (2 if quiet else max(2, 0.002 * case.size)):
        return None
    share = float(tokens.sum() / len(case.index))
    values, counts = np.unique(runs.value, return_counts=True)
    value = float(values[np.argmax(counts)])
    # Include single tokens with this constant. Otherwise, later tests would explain these tokens by top-p.
    constant = case.marked((case.r == value) & (len(long) >= 2))
    tokens |= constant & case.marked(np.abs(case.x) > _UNSAMPLED_FAR)
    start = np.zeros(case.size, np.int64)
    start[runs.sequence[::-1]] = case.rows.positions[case.index[runs.first[::-1]]]
    examples = case.find_loudest(sequences, case.sums(tokens[case.index]))
    rival = {"padding_or_sentinel": "check in the code whether 0 is written for missing log-probs"}
    # below 1%, these tokens may come from a large change of the policy
    return Detection(
        "high" if len(long) >= 2 else "medium" if share > 0.01 or quiet else "low",
        f"{percent(share)} of the valid tokens have the constant rollout log-prob {value:g}, which is "
        f"{runs.off.mean():.3g} nats above the trainer's log-prob. The policy did not sample these tokens",
        tokens=tokens,
        evidence=(
            make_fact("tokens", share, "share of valid tokens with a constant far above the trainer's log-prob"),
            make_share_fact("sequences", sequences, case.counts > 0, "share of sequences that contain such tokens"),
            make_fact("constant", value, "this constant log-prob, nats"),
            make_fact("run_length", runs.length.mean(), "mean number of adjacent tokens with the constant"),
            make_fact("difference", runs.off.mean(), "mean |log ratio| of the tokens with the constant, nats"),
        ),
        where={"sequences": percent(sequences.mean()), "positions": "inside the response"},
        examples=examples,
        positions=start[examples],
        rivals={} if len(long) >= 2 else rival,
        leaves=case.without(tokens | constant),
    )


_LEAST, _MOST, _MOST_PLACED, _ENOUGH = 0.3, 1.6, 4.0, 60
"""Mean ratio of the tokens after a break: 0.3 to 1.6 if they were sampled, up to 4 if all breaks are at one place."""
_SAME, _ROWS = 0.8, 5


def detect_engine_state(case: Case) -> Detection | None:
    breaks = _find_breaks(case)
    if breaks is None or breaks.at_turn:
        return None  # another test finds contexts that changed at a turn
    found, split, after = breaks.found, breaks.split, breaks.after
    at_limit, by_prompt = _is_at_limit(case, found, split), _is_by_prompt(case, found, split)
    ratio, count, rows = np.where(after, np.exp(np.minimum(case.x, 7.0)), 0.0), int(after.sum()), int(found.sum())
    mean = float(ratio[after].mean())
    error = float(np.sqrt(((case.sums(ratio) - mean * case.sums(after))[found] ** 2).sum())) / max(count, 1)
    related, placed = _correlation(case, after) > 0.2, by_prompt or breaks.at_one_place
    sampled = _LEAST < mean < _MOST and abs(mean - 1) < max(4 * error, 0.3)
    possible = mean < (_MOST_PLACED if placed and related else _MOST) and (placed or (mean > _LEAST and related))
    if not (at_limit or (possible and count >= _ENOUGH)):
        return None
    tokens = case.marked(after)
    # if the other tokens are noisy, a rise within a row proves little
    if case.without(tokens).noise > 0.04 and not (at_limit or by_prompt):
        return None  # the other rows also differ, perhaps late in the response
    sure = (at_limit and rows >= _ROWS) or (possible and placed and count >= _ENOUGH)
    # also sure: E[ratio] is near 1 with a small error
    sure |= sampled and count >= 300 and 4 * error < 0.6
    doubtful = not sure and (case.filled or case.reshaped)  # a cause that affects all tokens can cause such a rise too
    used, left = case.counts > 0, f"the last {breaks.tokens_left:,} tokens"
    share, examples = float(rows / max(used.sum(), 1)), case.find_loudest(found, breaks.level)
    place = (
        f"{left} of the longest rows ({int(case.counts.max()):,} tokens)"
        if at_limit
        else f"{'all samples of some prompts' if by_prompt else f'{percent(share)} of the rows'}, from a position on"
    )
    proof = (
        f". E[ratio] of these tokens is {mean:.2g}. If the text had been changed after sampling, E[ratio] would be far "
        "above 1"
    )
    rivals = {"edited_response": "check whether the two sides have the same token_ids in these rows"}
    if not at_limit:
        rivals["context_mismatch"] = "compare the prompt's token ids and positions on the two sides"
    return Detection(
        "high" if sure else "low" if doubtful else "medium",
        f"one side is wrong in {place}. There, the mean difference is {breaks.level[found].mean():.2g} nats"
        f"{proof if sampled else ''}",
        share=case.share(tokens),
        leaves=None if doubtful else case.without(tokens),
        evidence=(
            make_share_fact("sequences", found, used, "share of rows that agree up to a position, then differ"),
            make_fact("ratio_mean", mean, "E[ratio] after it: 1 if the engine sampled them", against=not sampled),
            make_fact("tokens_after", breaks.tokens_left, "median number of tokens from this position to the end"),
            make_fact("at_limit", at_limit, "1 if nearly all affected rows have the maximum length"),
            make_fact("by_prompt", by_prompt, "1 if the affected rows are all samples of some prompts"),
        ),
        where={"sequences": percent(share), "positions": left if at_limit else "from a position on"},
        examples=examples,
        positions=breaks.position[examples],
        rivals=rivals,
    )


def _correlation(case: Case, chosen: Bools) -> float:
    r, t = case.r[chosen], case.t[chosen]
    return float(np.corrcoef(r, t)[0, 1]) if len(r) > 2 and r.std() > 0 and t.std() > 0 else 0.0


def _is_at_limit(case: Case, found: Bools, split: Ints) -> bool:
    """Return True if nearly all breaks are near the end of the longest rows, at the same distance from the end."""
    longest = case.counts == case.counts.max()
    left = (case.counts - split)[found]
    _, counts = np.unique(left, return_counts=True)
    same = counts.max() >= _SAME * len(left) or float(np.ptp(np.quantile(left, (0.1, 0.9)))) <= 2
    return bool(
        found.sum() >= 3
        and (found & longest).sum() >= _SAME * found.sum()
        and (found & longest).sum() >= 0.3 * longest.sum()
        and longest.sum() < 0.9 * (case.counts > 0).sum()
        and same
        and np.median(left) <= max(16, 0.1 * case.counts.max())
    )


def _is_by_prompt(case: Case, found: Bools, split: Ints) -> bool:
    """Return True if breaks affect nearly all rows of some prompts and no rows of others, more often than by chance."""
    if case.rows.columns.get("prompt_id") is None:
        return False
    used = case.counts > np.median(split[found]) + 6  # shorter rows end before the break
    if not used.any():
        return False
    clusters = case.clusters[used]
    rows, broken_rows = np.bincount(clusters), np.bincount(clusters, weights=found[used])
    share = float(found[used].mean())
    touched = (broken_rows > 0) & (rows >= 3)
    if not touched.any() or share > 0.9:
        return False
    whole = broken_rows[touched] >= _SAME * rows[touched]
    chance = float(np.sum(rows[touched][whole]) * math.log(max(share, 1e-9)))
    return bool(whole.sum() >= _SAME * touched.sum() and chance + math.log(len(rows)) < math.log(1e-4))
