"""Causes that concern whole rows or the context they were scored in: swapped, duplicated, truncated prompts."""

from __future__ import annotations

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.core.formatting import format_count
from mismatchctl.data.blocks import Rows
from mismatchctl.diagnosis.case import Case, cached_on_case
from mismatchctl.diagnosis.cause import Cause, Detection
from mismatchctl.diagnosis.causes.numerics import BFLOAT16_NOISE
from mismatchctl.diagnosis.evidence import TokenMarks
from mismatchctl.diagnosis.levels import normal_z
from mismatchctl.diagnosis.measures import (
    calibration,
    find_better_reading,
    find_loudest,
    format_list,
    is_greedy,
    make_fact,
    make_share_fact,
    percent,
)
from mismatchctl.results.model import Confidence, Fact

_DUPLICATE_MIN_SURPRISE = 14.0
"""Nats: two samples of a sequence less probable than e^-14 do not agree by chance."""


def _test_duplicated_rows(case: Case) -> Detection | None:
    sample = case.evidence.sample
    if sample is None:
        return None
    _, first, number = np.unique(sample.hashes, return_index=True, return_inverse=True)
    surprise = np.zeros(case.size)
    np.subtract.at(surprise, case.where, np.maximum(case.r, -50.0))
    again = np.ones(case.size, np.bool_)
    again[first] = False
    again &= surprise > _DUPLICATE_MIN_SURPRISE
    for row in np.flatnonzero(again).tolist():  # equal hashes are equal rows but for one chance in 2^64
        again[row] = np.array_equal(_row_values(case, row), _row_values(case, int(first[number[row]])))
    long = surprise > _DUPLICATE_MIN_SURPRISE
    count, eligible = int(again.sum()), int(long.sum())
    if count == 0:
        return None
    share = count / eligible
    ids = case.column("sequence_id")
    same_id = np.array([ids[row] is not None and ids[row] == ids[first[number[row]]] for row in np.flatnonzero(again)])
    likeliest = is_greedy(case)
    return Detection(
        "low" if likeliest else "high",
        f"{count} of {eligible} rows long enough to tell ({percent(share)}) repeat another row to the bit",
        share=share,
        k3=0.0,
        evidence=(
            make_share_fact("duplicates", again, long, "share of rows that repeat another one, log-probs and all"),
            make_fact("same_id", float(same_id.mean()), "share of these that carry the same sequence_id"),
        ),
        where={"sequences": percent(share)},
        examples=np.flatnonzero(again)[:3],
        rivals={"numerical_noise": "was sampling greedy? Then equal prompts give equal rows: prompt ids tell"}
        if likeliest
        else {},
        leaves=case.without(again[case.sequence]),
    )


def _row_values(case: Case, row: int) -> np.ndarray:
    start, stop = case.rows.segments.offsets[row : row + 2]
    return np.concatenate([case.rollout[start:stop], case.train[start:stop]])


DUPLICATED_ROWS = Cause(
    id="duplicated_rows",
    title="Rows are there twice",
    shows="Rows with equal log-probs that two samples would share with a probability below e^-14.",
    test=_test_duplicated_rows,
    advice="Look at what writes the dump: every data-parallel rank writing the whole batch, a resumed run "
    "writing a step again, or rows repeated to fill a batch{settings}. Keep one of each.",
    pointless="nothing is wrong with corrections, but standard errors are too small by the repeats",
)
_IDENTICAL_TOKEN_SHARE, _IDENTICAL_ROW_SHARE, _IDENTICAL_MIN_LENGTH, _IDENTICAL_BY_CHANCE_SHARE = 0.999, 0.02, 16, 0.3


def _mark_identical(rows: Rows) -> Bools:
    same: Bools = rows.rollout == rows.train
    return same & rows.mask


def _flag_identical(rows: Rows) -> dict[str, TokenMarks]:
    known = rows.look
    return {
        "identical": TokenMarks.on(rows, _mark_identical)
        if known is None
        else TokenMarks(known.identical, _mark_identical)
    }


def _test_identical(case: Case) -> Detection | None:
    tally = case.evidence.tallies.get("identical")
    if tally is None or case.evidence.tokens == 0:
        return None
    share = tally.tokens / case.evidence.tokens
    evidence: tuple[Fact, ...] = (
        make_fact("identical_share", share, "share of valid tokens whose two log-probs are the same bits"),
    )
    if share >= _IDENTICAL_TOKEN_SHARE:
        return Detection(
            "high",
            f"{percent(share)} of the {case.evidence.tokens:,} valid tokens have the same bits in both columns",
            evidence=evidence,
            rivals={"numerical_noise": "recompute one batch with the trainer: exactly equal again, or a copy?"},
            examples=np.arange(min(3, case.size)),
            leaves=case.without(case.sound),
        )
    same = (case.means(case.x == 0) == 1.0) & (case.counts >= _IDENTICAL_MIN_LENGTH)
    if same.mean() < _IDENTICAL_ROW_SHARE or same.sum() < 3:
        return None
    others = case.x[~case.each(same)]
    if len(others) and float((others == 0).mean()) > _IDENTICAL_BY_CHANCE_SHARE:
        return None  # engines that often agree to the bit do so throughout some rows
    evidence += (
        make_share_fact(
            "identical_sequences",
            same,
            case.counts >= _IDENTICAL_MIN_LENGTH,
            "share of long sequences that agree to the bit",
        ),
    )
    where = {"sequences": percent(float(same.mean()))}
    workers = case.column("worker")
    if len(set(workers[same].tolist())) < len(set(workers.tolist())):
        where["worker"] = format_list(sorted(set(workers[same].tolist()), key=str))
    return Detection(
        "medium",
        f"{percent(float(same.mean()))} of the sequences agree to the bit, the others do not: some rows hold a copy",
        share=0.0,
        evidence=evidence,
        where=where,
        examples=np.flatnonzero(same)[:3],
        rivals={"numerical_noise": "recompute these rows with the trainer"},
        leaves=case.without(same[case.sequence]),
    )


IDENTICAL = Cause(
    id="identical",
    title="Both columns are the same",
    shows="All log ratios are exactly 0; or whole sequences are, among others that are not.",
    test=_test_identical,
    advice="Nothing to correct, if the trainer recomputed these. Often the column is a copy of the engine's log-"
    "probs, taken as the trainer's{settings}; make sure that the dump holds a recomputation. Truly "
    "bitwise engines (batch-invariant kernels) look the same.",
    pointless="every correction: all ratios are 1",
    flags=_flag_identical,
)
_REVERSED_MIN_ROWS, _REVERSED_MIN_SHARE, _REVERSED_MIN_DISTANCE = 3, 0.05, 0.2


def _test_reversed_rows(case: Case) -> Detection | None:
    if (
        not len(case.x)
        or float(np.mean(np.minimum(np.abs(case.x), 1.0))) < _REVERSED_MIN_DISTANCE * _REVERSED_MIN_SHARE
    ):
        return None
    turned = _reverse_rollout(case)
    found = find_better_reading(case, turned, case.train)
    if found.sum() < _REVERSED_MIN_ROWS or found.mean() < _REVERSED_MIN_SHARE:
        return None
    if found.mean() > 0.5:
        found = case.counts > 0
    tokens = found[case.sequence]
    inside = tokens[case.index]
    before = float(np.median(np.abs(case.x[inside])))
    after = float(np.median(np.abs(case.train - turned)[case.index][inside]))
    share = float(found.mean())
    return Detection(
        "high",
        f"read from its end to its start, one column agrees with the other: {after:.2g} nats apart, not {before:.2g}, "
        f"in {percent(share)} of the sequences",
        share=case.share(tokens),
        evidence=(
            make_fact("difference_as_given", before, "median |log ratio| as the columns stand, nats"),
            make_fact("difference_reversed", after, "the same with one column reversed within its row"),
        ),
        where={"sequences": percent(share)},
        examples=find_loudest(case, found),
        leaves=case.repaired(rollout=np.where(tokens, turned, case.rollout)),
    )


def _reverse_rollout(case: Case) -> Float64s:
    """The rollout's log-probs with the sound tokens of each row in the other order [T]."""
    values = case.rollout.copy()
    values[case.index] = case.r[case.each(case.starts) + case.each(case.counts) - 1 - case.place]
    return values


REVERSED_ROWS = Cause(
    id="reversed_rows",
    title="One column is in reverse order",
    shows="The columns agree about three times better when one is read from its end.",
    test=_test_reversed_rows,
    advice="Look at what joins the columns: a flip for left padding that was not undone, or tokens that a trie or a "
    "queue returns last first. Compare the first and the last log-prob of a row on both sides.",
    pointless="every correction: ratios of different tokens",
)
_SWAPPED_MIN_DISTANCE, _SWAPPED_MIN_LENGTH, _SWAPPED_HEAD, _SWAPPED_MAX_ROWS = 0.2, 10, 32, 384
_SWAPPED_MATCH_FACTOR, _SWAPPED_MIN_ROWS, _SWAPPED_SURE_SHARE = 0.35, 2, 0.5


def _test_swapped_rows(case: Case) -> Detection | None:
    off = case.means(np.minimum(np.abs(case.x), 1.0))
    candidates = np.flatnonzero((off > _SWAPPED_MIN_DISTANCE) & (case.counts >= _SWAPPED_MIN_LENGTH))[
        :_SWAPPED_MAX_ROWS
    ]
    if len(candidates) < _SWAPPED_MIN_ROWS:
        return None
    level = _cross_distances(case, candidates)
    own = np.diagonal(level).copy()
    np.fill_diagonal(level, np.inf)
    best = level.argmin(axis=1)
    reached = level[np.arange(len(best)), best]
    usual = np.median(np.where(np.isfinite(level), level, np.nan), axis=1) if len(best) > 2 else own
    matched = (reached < _SWAPPED_MATCH_FACTOR * own) & (
        reached < _SWAPPED_MATCH_FACTOR * np.nan_to_num(usual, nan=np.inf)
    )
    if matched.sum() < _SWAPPED_MIN_ROWS:
        return None
    found = np.zeros(case.size, np.bool_)
    found[candidates[matched]] = True
    if (
        matched.mean() > _SWAPPED_SURE_SHARE and len(candidates) > 4
    ):  # then those without their other row in the sample too
        found = (
            (case.counts > 0)
            if found.mean() > _SWAPPED_SURE_SHARE
            else np.isin(np.arange(case.size), np.flatnonzero(off > _SWAPPED_MIN_DISTANCE))
        )
    tokens = found[case.sequence]
    ids = case.column("sequence_id")
    names = [ids[row] if ids[row] is not None else case.rows.rows[row] for row in range(case.size)]
    pairs = [f"{names[candidates[i]]} holds {names[candidates[best[i]]]}'s" for i in np.flatnonzero(matched)]
    share = float(matched.mean())
    return Detection(
        "high" if matched.sum() > 2 or share > _SWAPPED_SURE_SHARE else "medium",
        f"the rollout log-probs of {format_count(int(matched.sum()), 'row')} fit the trainer's of another row: "
        f"{np.median(reached[matched]):.2g} nats apart there, {np.median(own[matched]):.2g} in their own",
        share=case.share(tokens),
        evidence=(
            make_fact("rows", int(matched.sum()), "rows whose rollout log-probs fit those of another row"),
            make_share_fact(
                "sequences",
                found,
                case.counts >= _SWAPPED_MIN_LENGTH,
                "share of sequences that hold another's; of some the other row may be elsewhere: at most all that "
                "disagree throughout",
                perhaps=off > _SWAPPED_MIN_DISTANCE,
            ),
            make_fact(
                "difference_own", float(np.median(own[matched])), "mean |log ratio| as they stand (at most 1), nats"
            ),
            make_fact("difference_other", float(np.median(reached[matched])), "the same beside the row that they fit"),
            make_fact("pairs", format_list(pairs, 6), "which row holds whose log-probs"),
        ),
        where={"sequences": percent(float(found.mean()))},
        examples=candidates[matched][:3],
        leaves=case.without(tokens),
    )


def _cross_distances(case: Case, candidates: Ints) -> Float64s:
    """Mean difference (at most 1 nat) of the rollout of each candidate and the trainer of each, over their heads."""
    starts = case.starts[candidates]
    place = np.arange(_SWAPPED_HEAD)
    inside = place < case.counts[candidates][:, None]
    at = np.minimum(starts[:, None] + place, len(case.x) - 1)
    rollout, train, weights = case.r[at], case.t[at], inside.astype(np.float64)
    heads = inside.sum(axis=1)
    found = np.empty((len(candidates), len(candidates)))
    for row, head in enumerate(heads.tolist()):
        apart = np.abs(train[:, :head] - rollout[row, :head])
        np.minimum(apart, 1.0, out=apart)
        found[row] = np.einsum("ij,ij->i", apart, weights[:, :head]) / np.minimum(heads, head)
    return found


SWAPPED_ROWS = Cause(
    id="swapped_rows",
    title="Rows hold each other's log-probs",
    shows="Rows that disagree throughout agree with the other column of another row.",
    test=_test_swapped_rows,
    advice="Look at what joins rollout and trainer: sorting or balancing by length on one side, an index that was not "
    "undone, asynchronous requests collected in the order of completion. Join by a sequence id.",
    pointless="every correction: ratios of different texts",
)
_CONTEXT_MIN_LENGTH, _CONTEXT_Z, _CONTEXT_MAX_SLOPE, _CONTEXT_SURE_SLOPE = 24, -7.0, -0.1, -0.15
_CONTEXT_MIN_NOISE = 1e-3
_CONTEXT_MIN_FACTOR, _SURE_FACTOR = 1.7, 2.0
"""The first tokens over late ones: quantized weights make up to 1.4, one lost token of the prompt 2 and more."""


def _test_context_mismatch(case: Case) -> Detection | None:
    if case.reshaped or case.noise < _CONTEXT_MIN_NOISE:
        return None
    for boundary, place in (("response", case.place), ("turn", _tokens_since_turn(case))):
        if place is None:
            continue
        slope, z, halves = loudness_slope(case, place)
        if z < _CONTEXT_Z and slope < _CONTEXT_MAX_SLOPE and halves[1] < halves[0] - 0.1:
            return _match_context(case, boundary, place, slope, z)
    return None


def _tokens_since_turn(case: Case) -> Ints | None:
    """Tokens since the last gap in the positions [N], -1 before the first one; None where there is no gap."""
    position = case.rows.position[case.index]
    gap = np.zeros(len(position), np.bool_)
    gap[1:] = (np.diff(position) > 1) & (case.where[1:] == case.where[:-1])
    if gap.sum() < 10:
        return None
    order = np.arange(len(position))
    last = np.maximum.accumulate(np.where(gap | (case.place == 0), order, 0))
    return np.where(gap[last], order - last, -1)


def loudness_slope(case: Case, place: Ints) -> tuple[float, float, tuple[float, float]]:
    """Slope of the loudness by log2(1 + place) within sequences and its z; mean loudness of both halves."""
    used = (place >= 0) & case.doubtful & (case.each(case.counts) >= _CONTEXT_MIN_LENGTH)
    if used.sum() < 500:
        return 0.0, 0.0, (0.0, 0.0)
    octaves = np.log2(1.0 + np.arange(place.max() + 1))  # of few places, more tokens are at each
    octave = np.where(used, octaves[np.maximum(place, 0)], 0.0)
    number = np.maximum(case.sums(used), 1)
    across: Float64s = (octave - case.each(case.sums(octave) / number)) * used
    up: Float64s = (case.loudness - case.each(case.sums(case.loudness * used) / number)) * used
    product, square = case.sums(across * up), case.sums(across * across)
    slope = float(product.sum() / max(square.sum(), 1e-12))
    error = float(np.sqrt(((product - slope * square) ** 2).sum())) / max(float(square.sum()), 1e-12)
    middle = np.median(place[used])
    halves = tuple(float(case.loudness[used & side].mean()) for side in (place <= middle, place > middle))
    return slope, slope / error if error > 0 else 0.0, (halves[0], halves[1])


def _match_context(case: Case, boundary: str, place: Ints, slope: float, z: float) -> Detection:
    size, told = np.abs(case.scaled), (place >= 0) & case.doubtful
    early, late = told & (place < 8), told & (place >= np.quantile(place, 0.75))
    first, rest = float(np.median(size[early])), float(np.median(size[late]))
    times = first / max(rest, 1e-12)
    clear = times >= _CONTEXT_MIN_FACTOR
    confidence: Confidence = "low"
    if clear:
        confidence = "high" if slope < _CONTEXT_SURE_SLOPE and times >= _SURE_FACTOR else "medium"
    excess, excess_z, _, _ = calibration(case)
    start = case.means(np.where(early, np.abs(case.x), 0.0))
    where = "the first tokens of the response" if boundary == "response" else "the first tokens after a turn boundary"
    return Detection(
        confidence,
        f"the difference is largest at {where} and fades: {times:.3g} times larger there than late in the response. "
        + ("The two sides saw different contexts" if clear else "Other weights, quantized ones say, show as much"),
        evidence=(
            make_fact(
                "slope", slope, "of log |difference| by octave of the distance, within sequences; below 0: it fades"
            ),
            make_fact("z", z, "the same in standard errors"),
            make_fact(
                "early_over_late",
                times,
                f"median difference (in logits) there over that of the last quarter; other contexts: {_SURE_FACTOR:g} "
                "and more",
                against=not clear,
            ),
            make_fact(
                "ratio_mean_minus_one",
                excess,
                "E[ratio] - 1: 0 where both sides are distributions",
                against=abs(excess_z) > 5,
            ),
        ),
        where={"positions": where, "sequences": percent(float((start > np.median(np.abs(case.x))).mean()))},
        examples=find_loudest(case, case.counts >= _CONTEXT_MIN_LENGTH, start),
        rivals={
            "edited_response": "prompt token ids of both sides, compared token by token",
            "stale_prefix": "the engine's prefix cache: is it flushed with every weight update?",
        }
        | ({} if clear else {"weights_differ": "checksums of the weights; the engine's --quantization"}),
        everywhere=clear,
    )


CONTEXT_MISMATCH = Cause(
    id="context_mismatch",
    title="The trainer saw another context",
    shows="Within a response the difference falls with the distance from its start, or from a gap between turns.",
    test=_test_context_mismatch,
    advice="Compare the prompt's token ids of both sides: chat template applied twice or not at all, a system "
    "prompt or BOS missing, truncated prompts{settings}, thinking stripped from earlier turns, images "
    "left out, position ids that count padding.",
    pointless="importance weights: they would train a policy under a context that nobody samples from",
)
_POSITION_MIN_FACTOR, _POSITION_SURE_FACTOR, _POSITION_Z, _POSITION_SURE_Z = 2.0, 4.0, 5.0, 8.0
_POSITION_MIN_LENGTH, _POSITION_MIN_ROWS = 24, 6
_POSITION_MIN_SPREAD, _POSITION_START = 3.0, 4


@cached_on_case
def loudness_rise(case: Case) -> tuple[float, float, tuple[float, float]]:
    """Median difference of the last quarter of responses over that of their first tokens, the z of the rise, and both.

    1 and 0 where there are too few long responses.
    """
    long = case.counts >= _POSITION_MIN_LENGTH
    share = case.place / np.maximum(case.each(case.counts), 1)
    early, late = (case.doubtful & part for part in ((share < 0.1) | (case.place < _POSITION_START), share >= 0.75))
    levels = [case.sums(case.loudness * part) / np.maximum(case.sums(part), 1) for part in (early, late)]
    known = long & (case.sums(early) >= 2) & (case.sums(late) >= 2)
    rise = (levels[1] - levels[0])[known]
    if len(rise) < _POSITION_MIN_ROWS:
        return 1.0, 0.0, (0.0, 0.0)
    z = float(rise.mean() / (rise.std(ddof=1) / np.sqrt(len(rise)) + 1e-12))
    size = [float(np.median(np.abs(case.scaled[part & case.each(known)]))) for part in (early, late)]
    return size[1] / max(size[0], 1e-12), normal_z(z, len(rise) - 1), (size[0], size[1])


def _test_position_mismatch(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.spread < _POSITION_MIN_SPREAD * BFLOAT16_NOISE:
        return None
    factor, z, size = loudness_rise(case)
    if z < _POSITION_Z or factor < _POSITION_MIN_FACTOR or size[1] / 0.6745 < _POSITION_MIN_SPREAD * BFLOAT16_NOISE:
        return None
    _, ratio_z, _, _ = calibration(case)
    return Detection(
        "high" if factor > _POSITION_SURE_FACTOR and z > _POSITION_SURE_Z and abs(ratio_z) < 5 else "medium",
        f"the difference grows {factor:.3g}-fold from the first tokens to the last quarter of the responses (from "
        f"{size[0]:.2g} to {size[1]:.2g} in the logits): both sides agree near the start and not far from it, as "
        "where positions or the reach of attention differ",
        evidence=(
            make_fact(
                "late_over_early", factor, "median difference (in logits) of the last quarter over the first tokens"
            ),
            make_fact("z", z, "rise of the loudness within responses, in standard errors"),
            make_fact("late", size[1], f"median difference late; bfloat16 makes less than {BFLOAT16_NOISE:g}"),
        ),
        where={"positions": "late in the response"},
        examples=find_loudest(case, case.counts >= _POSITION_MIN_LENGTH, case.means(np.abs(case.scaled))),
        rivals={
            "cache_quantization": "the same prompts with the cache in bfloat16: errors of a cache pile up too",
            "edited_response": "token ids of both sides from the middle of the response on",
        },
        everywhere=True,
    )


POSITION_MISMATCH = Cause(
    id="position_mismatch",
    title="Positions or the reach of attention differ",
    shows="Within responses the difference rises several times from the start to the end, beyond what low precision "
    "makes.",
    test=_test_position_mismatch,
    advice="Compare rope_theta, rope scaling (YaRN factor, original_max_position_embeddings), sliding_window and "
    "position_ids of both sides (packed rows restart at 0, left padding does not count), and the attention mask.",
    pointless="importance weights: late tokens of every response would lose theirs",
    in_layers=True,
)
