"""Tests for whole rows: duplicated, swapped or copied rows, and rows with another prompt, context or position."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.core.formatting import format_count
from mismatchctl.diagnosis.case import BFLOAT16_NOISE, UNRELATED_CORRELATION, Case, cached_on_case
from mismatchctl.diagnosis.causes.staleness import keep_first_version
from mismatchctl.diagnosis.detection import Detection, format_list, make_fact, make_share_fact, percent
from mismatchctl.measure.metrics.metric import normal_z
from mismatchctl.results.model import Fact


def compute_t(values: Float64s) -> float:
    return float(values.mean() / (values.std(ddof=1) / np.sqrt(len(values)) + 1e-12))


def detect_duplicated_rows(case: Case) -> Detection | None:
    sample = case.evidence.sample
    if sample is None:
        return None
    _, first, number = np.unique(sample.hashes, return_index=True, return_inverse=True)
    original, surprise = first[number], -case.sums(np.maximum(case.r, -50.0))
    long = surprise > 14.0
    again = long & (original != np.arange(case.size))
    for row in np.flatnonzero(again).tolist():
        again[row] = np.array_equal(_row_values(case, row), _row_values(case, int(original[row])))
    count, eligible, ids = int(again.sum()), int(long.sum()), case.column("sequence_id")
    if count == 0:
        return None
    share, likeliest = percent(count / eligible), case.is_greedy
    rivals = {"numerical_noise": "compare prompt ids. With greedy sampling, equal prompts give equal rows"}
    same_id = np.mean([ids[row] is not None and ids[row] == ids[original[row]] for row in np.flatnonzero(again)])
    return Detection(
        "low" if likeliest else "high",
        f"{count} of {eligible} rows ({share}) have exactly the log-probs of another row. Short rows are not tested",
        share=count / eligible,
        outside_k3=True,
        evidence=(
            make_share_fact("duplicates", again, long, "share of rows with the same log-probs as another row"),
            make_fact("same_id", same_id, "share of the repeated rows that have the same sequence_id"),
        ),
        where={"sequences": share},
        examples=np.flatnonzero(again)[:3],
        rivals=rivals if likeliest else {},
        leaves=case.without(again[case.sequence]),
    )


def _row_values(case: Case, row: int) -> np.ndarray:
    start, stop = case.rows.segments.offsets[row : row + 2]
    return np.concatenate([case.rollout[start:stop], case.train[start:stop]])


_IDENTICAL_TOKEN_SHARE = 0.999


def detect_identical(case: Case) -> Detection | None:
    tally = case.evidence.tallies.get("identical")
    if tally is None or case.evidence.tokens == 0:
        return None
    share = tally.tokens / case.evidence.tokens
    fact = make_fact("identical_share", share, "share of valid tokens whose two log-probs are bit-identical")
    if share >= _IDENTICAL_TOKEN_SHARE:
        return _match_identical(case, tally.tokens, fact)
    long = case.counts >= 16
    same = (case.means(case.x == 0) == 1.0) & long
    if same.mean() < 0.02 or same.sum() < 3:
        return None
    others = case.x[~case.each(same)]
    if len(others) and float((others == 0).mean()) > 0.3:
        return None  # if single tokens are often identical, some rows are identical by chance
    where, workers = {"sequences": percent(same.mean())}, case.column("worker")
    if len(set(workers[same].tolist())) < len(set(workers.tolist())):
        where["worker"] = format_list(sorted(set(workers[same].tolist()), key=str))
    return Detection(
        "medium",
        f"{where['sequences']} of the sequences are bit-identical on the two sides, and the others are not. Some rows "
        "contain a copy of the other column",
        share=0.0,
        evidence=(
            fact,
            make_share_fact("identical_sequences", same, long, "share of long sequences that are bit-identical"),
        ),
        where=where,
        examples=np.flatnonzero(same)[:3],
        rivals={"numerical_noise": "recompute these rows with the trainer. If they differ, the rows contain a copy"},
        leaves=case.without(same[case.sequence]),
    )


def _match_identical(case: Case, same: int, fact: Fact) -> Detection:
    tokens = case.evidence.tokens
    other, away = tokens - same, np.abs(case.x[case.x != 0])
    text = f"all {tokens:,} valid tokens are bit-identical in the two columns"
    if other:
        text = f"{same:,} of {tokens:,} valid tokens are bit-identical in the columns. {format_count(other, 'token')} "
        text += f"differ{'s' * (other == 1)}" + (f" (by up to {away.max():.2g} nats)" if len(away) else "")
    different = case.evidence.tallies.get("different") if other else None
    evidence = [fact, make_fact("differing_tokens", other, "number of valid tokens whose two log-probs differ")]
    if different is not None:
        evidence.append(make_fact("differing_rows", different.sequences, "number of rows that contain these tokens"))
    return Detection(
        "high",
        text,
        evidence=tuple(evidence),
        where={"tokens": f"all but {other:,} of {tokens:,}" if other else "all"},
        rivals={"numerical_noise": "recompute one batch with the trainer. If the results differ, the column is a copy"},
        examples=np.arange(0 if other else min(3, case.size)),
        places=() if different is None else different.places,
        leaves=case.without(case.sound),
    )


_SWAPPED_MIN_DISTANCE = 0.2
_SWAPPED_MIN_ROWS, _SWAPPED_SURE_SHARE = 2, 0.5


def detect_swapped_rows(case: Case) -> Detection | None:
    off, long = case.means(np.minimum(np.abs(case.x), 1.0)), case.counts >= 10
    candidates = np.flatnonzero((off > _SWAPPED_MIN_DISTANCE) & long)[:384]
    if len(candidates) < _SWAPPED_MIN_ROWS:
        return None
    level = _cross_distances(case, candidates)
    own = np.diagonal(level).copy()
    np.fill_diagonal(level, np.inf)
    best = level.argmin(axis=1)
    reached = level[np.arange(len(best)), best]
    usual = np.median(np.where(np.isfinite(level), level, np.nan), axis=1) if len(best) > 2 else own
    matched = reached < 0.35 * np.minimum(own, np.nan_to_num(usual, nan=np.inf))
    if matched.sum() < max(_SWAPPED_MIN_ROWS, 0.03 * len(candidates)):
        return None
    found = np.isin(np.arange(case.size), candidates[matched])
    most = len(candidates) > _SWAPPED_SURE_SHARE * long.sum() and case.column_correlation < UNRELATED_CORRELATION
    if (matched.mean() > _SWAPPED_SURE_SHARE and len(candidates) > 4) or most:  # the partner may be outside the sample
        found = case.counts > 0 if found.mean() > _SWAPPED_SURE_SHARE else off > _SWAPPED_MIN_DISTANCE
    ids = case.column("sequence_id")
    names = [ids[row] if ids[row] is not None else case.rows.rows[row] for row in range(case.size)]
    pairs = [f"{names[candidates[i]]} contains {names[candidates[best[i]]]}'s" for i in np.flatnonzero(matched)]
    there, here, count = float(np.median(reached[matched])), float(np.median(own[matched])), int(matched.sum())
    meaning = "share of sequences with another row's log-probs (at most: all sequences that disagree throughout)"
    return Detection(
        "high" if (count > 2 and not most) or matched.mean() > _SWAPPED_SURE_SHARE else "medium",
        f"the rollout log-probs of {format_count(count, 'row')} fit the train log-probs of another row. The mean "
        f"difference is {there:.2g} nats from the other row and {here:.2g} nats from their own row",
        tokens=found[case.sequence],
        evidence=(
            make_fact("rows", count, "number of rows whose rollout log-probs fit another row"),
            make_share_fact("sequences", found, long, meaning, perhaps=off > _SWAPPED_MIN_DISTANCE),
            make_fact("difference_own", here, "mean |log ratio| from their own row, nats (at most 1 per token)"),
            make_fact("difference_other", there, "mean |log ratio| from the row that fits, nats"),
            make_fact("pairs", format_list(pairs, 6), "rows that contain the log-probs of another row"),
        ),
        where={"sequences": percent(found.mean())},
        examples=candidates[matched][:3],
    )


def _cross_distances(case: Case, candidates: Ints) -> Float64s:
    """Return the mean |rollout of row i - train of row j| [rows, rows] of the first 32 tokens, each at most 1 nat."""
    place = np.arange(32)
    inside = place < case.counts[candidates][:, None]
    at = np.minimum(case.starts[candidates][:, None] + place, len(case.x) - 1)
    rollout, train, weights, heads = case.r[at], case.t[at], inside.astype(np.float64), inside.sum(axis=1)
    found = np.empty((len(candidates), len(candidates)))
    for row, head in enumerate(heads.tolist()):
        apart = np.minimum(np.abs(train[:, :head] - rollout[row, :head]), 1.0)
        found[row] = np.einsum("ij,ij->i", apart, weights[:, :head]) / np.minimum(heads, head)
    return found


_CONTEXT_MIN_LENGTH = 24
_LIKE_WEIGHTS = "Different weights, for example quantized weights, look the same"
_CONTEXT_MIN_FACTOR, _SURE_FACTOR = 1.7, 2.0
"""Minimum ratio of early to late logit differences. Quantized weights cause up to 1.4, a lost prompt token over 2."""

_TOKENS, _NEAR = 4, 16
_LARGE, _NEARLY_ALL = 1.0, 0.8


def detect_context_mismatch(case: Case) -> Detection | None:
    if case.reshaped or case.noise < 1e-3:
        return None
    if "context_mismatch" in case.explained:
        return None  # there is already a finding for a jump at a turn
    case = keep_first_version(case)
    for boundary, place in (("response", case.place), ("turn", _tokens_since_turn(case))):
        if place is None:
            continue
        slope, z, halves = _loudness_slope(case, place)
        if z < -7.0 and slope < -0.1 and halves[1] < halves[0] - 0.1:
            return _match_context(case, boundary, place, slope, z)
    return None


def _tokens_since_turn(case: Case) -> Ints | None:
    """Return the index of each token in its turn (-1 in the first turn). A gap in the positions begins a new turn."""
    position = case.rows.positions[case.index]
    gap = np.zeros(len(position), np.bool_)
    gap[1:] = (np.diff(position) > 1) & (case.where[1:] == case.where[:-1])
    if gap.sum() < 10:
        return None
    order = np.arange(len(position))
    last = np.maximum.accumulate(np.where(gap | (case.place == 0), order, 0))
    return np.where(gap[last], order - last, -1)


def detect_context_at_turn(case: Case) -> Detection | None:
    turn = None if case.reshaped or case.noise == 0 else case.turns
    if turn is None:
        return None
    used = case.doubtful
    best: tuple[Float64s, float, int, Ints] | None = None
    for boundary in range(1, min(int(turn.max()), 8) + 1):
        near = [_mark_nearest(case, used & (turn == boundary - last), last=last) for last in (True, False)]
        counts = [case.sums(part) for part in near]
        rows = np.flatnonzero((counts[0] >= _TOKENS) & (counts[1] >= _TOKENS))
        if len(rows) < 6:
            continue
        before, after = (case.part_means(case.loudness, part)[rows] for part in near)
        jump = after - before
        z = max(normal_z(compute_t(jump), len(rows) - 1), _outlier_z(jump))
        if best is None or z > best[1] + 1:  # keep the first of equally clear turn boundaries
            best = jump, z, boundary, rows
    if best is None or best[1] < 5.0:
        return None
    jump, z, first, rows = best
    concerned = np.zeros(case.size, np.bool_)
    concerned[rows[jump > _LARGE / 2]] = True
    share = float(concerned.sum()) / len(rows)
    if share > _NEARLY_ALL:  # assume that it also affects rows that are too short to test
        concerned[:] = True
    late = concerned[case.where] & (turn >= first)
    early = concerned[case.where] & (turn < first)
    mean = float(jump[jump > _LARGE / 2].mean()) if (jump > _LARGE / 2).any() else 0.0
    parts = [case.loudness[used & part] for part in (early, late)]
    if mean < 0.35 or min(len(part) for part in parts) < _TOKENS:
        return None
    drift = _rise_within_turns(case, turn, used & concerned[case.where])
    stays = float(parts[1].mean() - parts[0].mean())
    if drift > 0.5 * mean or stays < 0.4 * mean:
        return None  # the difference also rises within turns, or falls again
    sizes = [float(np.median(np.abs(case.scaled[used & part]))) for part in (early, late)]
    ratio, everywhere = float(np.exp(np.clip(case.x[late], -20, 7)).mean()), share > _NEARLY_ALL
    return Detection(
        "high" if z > 7.0 else "medium",
        f"{'' if everywhere else f'in {percent(share)} of the rows, '}the difference becomes "
        f"{sizes[1] / max(sizes[0], 1e-12):.3g} times larger at the start of turn {int(first) + 1} and stays at this "
        "level. The two sides saw different contexts from this turn on",
        share=case.share(case.marked(late)),
        evidence=(
            make_fact("jump", mean, "rise of log |difference| at the turn boundary"),
            make_fact("z", z, "rise at the turn boundary, in standard errors over rows"),
            make_fact("drift", drift, "rise of log |difference| within turns: large if positions differ"),
            make_fact("stays", stays, "log |difference| of later turns minus log |difference| of earlier turns"),
            make_fact("ratio_mean", ratio, "E[ratio] after the turn boundary: 1 if the engine sampled these tokens"),
        ),
        where={"positions": f"from turn {int(first) + 1} on", "sequences": percent(share)},
        examples=case.find_loudest(concerned, case.means(np.where(late, np.abs(case.scaled), 0.0))),
        rivals={
            "engine_state": "sample again without the engine's prefix cache",
            "edited_response": "compare the token ids of the observation between the turns on the two sides",
        },
        leaves=None if everywhere else case.without(case.marked(late)),
        everywhere=everywhere,
    )


def _mark_nearest(case: Case, tokens: Bools, *, last: bool) -> Bools:
    running = np.append(0, np.cumsum(tokens))
    starts = case.each(case.starts)
    before = running[:-1] - running[starts]
    own = case.each(case.sums(tokens)).astype(np.int64)
    near: Bools = tokens & ((own - before <= _NEAR) if last else (before < _NEAR))
    return near


def _outlier_z(jump: Float64s) -> float:
    """Return a z-score that is high if at least 3 values in `jump` are far above the others, and few are far below."""
    scatter = 1.4826 * float(np.median(np.abs(jump - np.median(jump))))
    limit = max(_LARGE, 5.0 * scatter)
    up, down = int((jump > limit).sum()), int((jump < -limit).sum())
    return 3.0 * math.sqrt(up - down) if up >= 3 and down <= 0.2 * up else 0.0


def _rise_within_turns(case: Case, turn: Ints, used: Bools) -> float:
    key = case.where * (int(turn.max()) + 1) + turn
    number = np.bincount(key, used)
    place = np.cumsum(used)
    starts = np.flatnonzero(np.append(True, np.diff(key) != 0))
    first: Ints = np.repeat(place[starts] - used[starts], np.diff(np.append(starts, len(key))))
    late = (place - first) > number[key] / 2
    parts = [used & ~late, used & late]
    counts = [np.bincount(key, part, minlength=len(number)) for part in parts]
    means = [
        np.bincount(key, case.loudness * part, minlength=len(number)) / np.maximum(count, 1)
        for part, count in zip(parts, counts, strict=True)
    ]
    known = (counts[0] >= 3) & (counts[1] >= 3)
    return float(np.mean((means[1] - means[0])[known])) if known.any() else 0.0


def _loudness_slope(case: Case, place: Ints) -> tuple[float, float, tuple[float, float]]:
    """Fit a line to the log mismatch over log2(1 + `place`) within rows. Return slope, z-score, (early, late) means."""
    used = (place >= 0) & case.doubtful & (case.each(case.counts) >= _CONTEXT_MIN_LENGTH)
    if used.sum() < 500:
        return 0.0, 0.0, (0.0, 0.0)
    middle = np.median(place[used])
    early, late = used & (place <= middle), used & (place > middle)
    if not late.any():  # no token is after the median
        return 0.0, 0.0, (0.0, 0.0)
    slope, error, _ = case.fit_within_rows(np.log2(1.0 + np.maximum(place, 0)), used)
    halves = float(case.loudness[early].mean()), float(case.loudness[late].mean())
    return slope, slope / error if error > 0 else 0.0, halves


def _match_context(case: Case, boundary: str, place: Ints, slope: float, z: float) -> Detection:
    size, told = np.abs(case.scaled), (place >= 0) & case.doubtful
    early, late = told & (place < 8), told & (place >= np.quantile(place, 0.75))
    first, rest = float(np.median(size[early])), float(np.median(size[late]))
    times = first / max(rest, 1e-12)
    clear = times >= _CONTEXT_MIN_FACTOR
    sure = slope < -0.15 and times >= _SURE_FACTOR
    ratio = case.calibration
    start = case.means(np.where(early, np.abs(case.x), 0.0))
    removed = [cause for cause in case.explained if cause in ("unsampled_tokens", "edited_response")]
    fades = f"median difference of first tokens / of late tokens: at least {_SURE_FACTOR:g} for different contexts"
    where = "the first tokens of the response" if boundary == "response" else "the first tokens after a turn boundary"
    return Detection(
        "low" if not clear else "high" if sure else "medium",
        f"the difference fades: it is {times:.3g} times larger at {where} than late in the response. "
        + ("The two sides saw different contexts" if clear else _LIKE_WEIGHTS),
        evidence=(
            make_fact("slope", slope, "change of log |difference| per doubled distance: below 0 if it fades"),
            make_fact("z", z, "this change, in standard errors"),
            make_fact("early_over_late", times, fades, against=not clear),
            make_fact("ratio_mean_minus_one", ratio.excess, against=abs(ratio.z) > 5),
        ),
        where={"positions": where, "sequences": percent((start > np.median(np.abs(case.x))).mean())},
        examples=case.find_loudest(case.counts >= _CONTEXT_MIN_LENGTH, start),
        rivals={
            "edited_response": "compare the prompt token ids of the two sides token by token",
            "stale_prefix": "check whether the engine flushes its prefix cache with every weight update",
        }
        | ({} if clear else {"weights_differ": "compare weight checksums, and check the engine's --quantization"}),
        everywhere=clear,
        symptom_of=removed[0] if removed and boundary == "turn" and case.turns is None else "",
    )


def detect_context_by_prompt(case: Case) -> Detection | None:
    """Find prompts whose rows all have a larger mismatch than the rows of other prompts."""
    if case.reshaped or case.filled or case.rows.columns.get("prompt_id") is None:
        return None
    found = case.row_kinds
    if found is None:
        return None
    used = case.counts >= _KIND_TOKENS
    rows, louder = np.bincount(case.clusters[used]), np.bincount(case.clusters[used], weights=found.louder[used])
    several = rows >= _KIND_ROWS
    if several.sum() < _KIND_PROMPTS:
        return None
    share = float(louder[several].sum() / rows[several].sum())
    majority = np.maximum(louder, rows - louder)[several]
    whole = int((majority >= _KIND_PURE * rows[several]).sum())
    expected = float(np.sum(share ** rows[several] + (1 - share) ** rows[several]))
    prompts = int(several.sum())
    if whole < _KIND_PURE * prompts or whole - expected < 3 * np.sqrt(max(expected * (1 - expected / prompts), 1.0)):
        return None
    loud = int((louder[several] > rows[several] / 2).sum())
    return Detection(
        "medium",
        f"the mismatch depends on the prompt. For {loud} of {prompts} prompts, the two sides are {found.times:.3g} "
        f"times as far apart as for the others. For {whole} of all prompts, the two sides are far apart in nearly all "
        "rows or in nearly none. The two sides treat some prompts differently, for example in padding or positions",
        tokens=found.louder[case.sequence],
        evidence=(
            make_fact("prompts", prompts, "number of prompts with several rows"),
            make_fact("alike", whole / prompts, "share of these prompts whose rows are all far apart or all close"),
            make_fact("expected", expected / prompts, "this share as expected by chance"),
            make_fact("times", found.times),
        ),
        where={"sequences": percent(float(found.louder.sum()) / found.rows), "prompts": f"{loud} of {prompts}"},
        examples=case.find_loudest(found.louder),
        rivals={
            "position_mismatch": "check whether position_ids count left padding. Score such a prompt alone",
            "stale_prefix": "check whether the engine flushes its prefix cache with every weight update",
            "temperature": "compare the sampling settings of the prompts or data sources",
        },
    )


_KIND_TOKENS, _KIND_ROWS, _KIND_PROMPTS, _KIND_PURE = 10, 2, 6, 0.9
"""Minima for the test: 10 tokens per row, 2 rows per prompt, 6 prompts. In 90% of the prompts (_KIND_PURE), at least
90% of the rows must be of the same kind (large or small mismatch)."""

_POSITION_MIN_LENGTH = 24
_POSITION_MIN_SPREAD = 3.0


@cached_on_case
def loudness_rise(case: Case) -> tuple[float, float, tuple[float, float]]:
    """Return (late / early, z-score of the rise, (early, late)), where early and late are median logit differences."""
    long = case.counts >= _POSITION_MIN_LENGTH
    share = case.place / np.maximum(case.each(case.counts), 1)
    early, late = (case.doubtful & part for part in ((share < 0.1) | (case.place < 4), share >= 0.75))
    levels = [case.part_means(case.loudness, part) for part in (early, late)]
    known = long & (case.sums(early) >= 2) & (case.sums(late) >= 2)
    rise = (levels[1] - levels[0])[known]
    if len(rise) < 6:
        return 1.0, 0.0, (0.0, 0.0)
    size = [float(np.median(np.abs(case.scaled[part & case.each(known)]))) for part in (early, late)]
    return size[1] / max(size[0], 1e-12), normal_z(compute_t(rise), len(rise) - 1), (size[0], size[1])


def detect_position_mismatch(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.spread < _POSITION_MIN_SPREAD * BFLOAT16_NOISE:
        return None
    case = keep_first_version(case)
    factor, z, size = loudness_rise(case)
    if z < 5.0 or factor < 2.0 or size[1] / 0.6745 < _POSITION_MIN_SPREAD * BFLOAT16_NOISE:
        return None
    sure = factor > 4.0 and z > 8.0 and abs(case.calibration.z) < 5
    return Detection(
        "high" if sure else "medium",
        f"the difference grows {factor:.3g}x from the first tokens to the last quarter of the responses (from "
        f"{size[0]:.2g} to {size[1]:.2g} in the logits). This is typical if positions or the attention window differ",
        evidence=(
            make_fact("late_over_early", factor),
            make_fact("z", z, "growth of the difference within responses, in standard errors"),
            make_fact("late", size[1], f"median difference (in logits) late: below {BFLOAT16_NOISE:g} for bfloat16"),
        ),
        where={"positions": "late in the response"},
        examples=case.find_loudest(case.counts >= _POSITION_MIN_LENGTH, case.means(np.abs(case.scaled))),
        rivals={
            "cache_quantization": "sample again with the cache in bfloat16. Errors of a cache accumulate too",
            "edited_response": "compare the token ids of the two sides from the middle of the response on",
        },
        everywhere=True,
    )
