"""Tests for faults in the form of the columns: lengths, sign, range, constants, padding and gaps."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.core.formatting import format_number
from mismatchctl.core.schema import POSITIVE_TOLERANCE
from mismatchctl.diagnosis.case import BFLOAT16_NOISE, Case, cached_on_case, is_placeholder
from mismatchctl.diagnosis.detection import Detection, make_fact, make_share_fact, percent

_FEWEST = 20
_RUN = 3
_MOST, _FEW_ROWS, _FITS_FEW = 0.5, 0.02, 0.1
"""`_FITS_FEW`: if removing gaps improves only a few rows, their mean |log ratio| must fall by 90%."""


def detect_length_mismatch(case: Case) -> Detection | None:
    unfit = case.evidence.unfit
    if unfit is None or not unfit.count:
        return None
    rows = unfit.count + case.evidence.sequences
    share = unfit.count / rows
    parts = "; ".join(part for part in (unfit.describe_odd_column(), unfit.pattern(), unfit.overlap()) if part)
    return Detection(
        "high" if unfit.count > 1 or share > _MOST else "medium",
        f"in {unfit.count:,} of {rows:,} rows, the lists have different lengths: {parts}. All other results leave "
        "these rows out",
        share=share,
        outside_k3=True,
        evidence=(
            make_fact("rows", unfit.count, "number of rows whose lists have different lengths"),
            make_fact("share", share, "these rows as a share of all rows"),
            *(
                make_fact(f"{name}_differs", count, f"number of rows in which {name} has another length")
                for name, count in sorted(unfit.columns.items())
            ),
        ),
        where={"sequences": percent(share)},
        examples=np.zeros(0, np.int64),
        places=tuple((row.file, row.row, -1) for row in unfit.examples[:3]),
    )


def detect_constant_column(case: Case) -> Detection | None:
    if len(case.x) < _FEWEST:
        return None
    found = {}
    for side, own, _ in case.sides:
        if np.count_nonzero(own[1:] == own[:-1]) < 0.98 * len(own) - 1:  # a fast check before the slow median
            continue
        value = float(np.median(own))
        share = float((own == value).mean())
        masked = getattr(case, side)[~case.rows.mask]
        masked = masked[np.isfinite(masked)]
        # If the values of masked tokens vary, the column is correct and the mask is wrong.
        wrong_mask = len(masked) >= _FEWEST and len(np.unique(masked)) > len(masked) / 4
        if share >= 0.995 and not wrong_mask:
            found[side] = value, share
    if not found:
        return None
    names = " and ".join(f"{side}_log_probs" for side in found)
    value, share = next(iter(found.values()))
    return Detection(
        "high",
        f"{names} {'is' if len(found) == 1 else 'are'} {value:g} at {percent(share)} of the tokens. "
        "No log-probs were recorded for these tokens",
        k3=1.0,
        evidence=tuple(
            make_fact(f"constant_{side}", value, f"constant value of {percent(share)} of {side}_log_probs")
            for side, (value, share) in found.items()
        ),
        where={"column": names},
        leaves=case.without(case.sound),
    )


def detect_unmasked_padding(case: Case) -> Detection | None:
    at_end = _find_padding_run(case, last=True)
    found, end = (at_end, "end") if at_end is not None else (_find_padding_run(case, last=False), "start")
    if found is None:
        return None
    tokens, r, t = found
    rest = case.without(tokens)
    count, rows = int(tokens.sum()), np.bincount(case.sequence[tokens], minlength=case.size) > 0
    share = count / max(len(case.index), 1)
    before, after = float(case.k3.mean()), float(rest.k3.mean()) if len(rest.x) else 0.0
    values = f"log-probs of both sides are {r:g}" if r == t else f"rollout log-probs are {r:g}, train log-probs {t:g}"
    diluted = before > 0 and abs(math.log(max(after / before, 1e-9))) > 0.02
    change = f". Without the padding, K3 is {format_number(after)} instead of {format_number(before)}"
    return Detection(
        "high",
        f"{percent(share)} of the valid tokens are padding that is not masked. At the {end} of {int(rows.sum()):,} of "
        f"{case.size:,} rows, the {values}" + (change if diluted else ""),
        share=share,
        evidence=(
            make_fact("padding", share, "share of valid tokens that are padding"),
            make_share_fact("sequences", rows, case.counts > 0, "share of rows that are padded"),
            make_fact("constant_rollout", r, "value of rollout_log_probs on padding"),
            make_fact("constant_train", t, "value of train_log_probs on padding"),
            make_fact("k3_with_padding", before, "mean K3 of all valid tokens"),
            make_fact("k3_without_padding", after, "mean K3 of the valid tokens without padding"),
        ),
        where={"sequences": percent(rows.mean()), "positions": f"the {end} of the row"},
        examples=case.find_loudest(rows, case.sums(tokens[case.index])),
        leaves=rest,
        outside_k3=True,
    )


def _find_padding_run(case: Case, *, last: bool) -> tuple[Bools, float, float] | None:
    """Find padding at the end (`last`) or start of rows. Return its tokens [T], rollout log-prob and train log-prob."""
    if len(case.x) < _FEWEST:
        return None
    used = np.flatnonzero(case.counts > 0)
    edge = np.zeros(case.size, np.int64)
    edge[used] = case.segments.offsets[1:][used] - 1 if last else case.starts[used]
    values = np.stack([case.r[edge], case.t[edge]])
    same: Bools = (case.r == case.each(values[0])) & (case.t == case.each(values[1]))
    place = case.place if last else case.each(case.counts) - 1 - case.place
    other = np.zeros(case.size)
    other[used] = case.segments.max(np.where(same, -1, place))[used]
    run = np.where(case.counts > 0, case.counts - 1 - other, 0).astype(np.int64)
    padded = run >= _RUN
    if not padded.any():
        return None
    pairs, which = np.unique(values[:, padded], axis=1, return_inverse=True)
    weight = np.bincount(which.reshape(-1), run[padded])
    best = int(weight.argmax())
    r, t = (float(value) for value in pairs[:, best])
    chosen = padded & (values == pairs[:, [best]]).all(axis=0)
    tail = chosen[case.where] & (place > other[case.where])
    inside = ~tail & ~(~chosen & padded)[case.where]
    usual = float(((case.r == r) & (case.t == t))[inside].mean()) if inside.any() else 0.0
    least = _RUN
    if usual > 0:
        least = max(_RUN, math.ceil(math.log(1e-6 / max(case.size, 1)) / math.log(min(usual, 0.999))))
    if r == 0 and t == 0:  # repeated text also has runs of 0 on both sides
        least = max(least, 8)
        longest = case.counts[used].max()
        if usual > 0.02 and float((case.counts[chosen] == longest).mean()) < _MOST:
            return None
    if not is_placeholder(r) or not is_placeholder(t):
        return None  # repeated text also has a constant log-prob
    chosen &= run >= least
    tail &= chosen[case.where]
    # require two or three padded rows, or one with at least 24 tokens of padding
    if chosen.sum() < (2 if r != 0 or usual > 0 else 3) and run[chosen].max(initial=0) < 24:
        return None
    return case.marked(tail), r, t


@cached_on_case
def find_positive_kind(case: Case) -> str:
    """Return what two positive columns contain: "negated" log-probs, "probabilities", "densities" or "" (unclear)."""
    sides = case.r, case.t
    if len(case.x) < _FEWEST or min(np.std(values) for values in sides) == 0:
        return ""
    if min(float((values > POSITIVE_TOLERANCE).mean()) for values in sides) < 0.01:
        return ""
    close = float(np.median(np.abs(case.x))) < 0.1 * float(sum(np.median(np.abs(values)) for values in sides))
    if float(np.corrcoef(*sides)[0, 1]) <= 0.5 and not close:
        return ""
    kinds = {"negated": _are_negated, "probabilities": _are_probabilities}
    return next((kind for kind, test in kinds.items() if all(test(values) for values in sides)), "densities")


def _are_negated(values: Float64s) -> bool:
    low, middle, high = float(values.min()), float(np.median(values)), float(values.max())
    # negative log-likelihoods are not below 0, and the smallest ones are near 0
    above = float((values < -POSITIVE_TOLERANCE).mean()) <= 1e-3 and low <= 0.1 * middle
    return above and high > 1 + POSITIVE_TOLERANCE and high - middle >= middle - low


def _are_probabilities(values: Float64s) -> bool:
    within = ((values >= 0) & (values <= 1 + POSITIVE_TOLERANCE)).all()
    return bool(within) and float(np.quantile(values, 0.99)) >= 0.5


def detect_log_densities(case: Case) -> Detection | None:
    if find_positive_kind(case) != "densities":
        return None
    above = float(((case.r > POSITIVE_TOLERANCE) & (case.t > POSITIVE_TOLERANCE)).mean())
    apart = float(np.median(np.abs(case.x)))
    spread = float(np.std(case.r))
    sure = above > 0.05 and apart < 0.1 * max(spread, 0.1)
    return Detection(
        "high" if sure else "medium",
        f"both columns contain log-densities instead of log-probs. On both sides, {percent(above)} of the values are "
        f"above 0, and the two sides agree (median |log ratio| {apart:.2g}). Values above 0 are correct for a "
        "continuous policy, but the limits and causes for token probabilities do not apply to such values",
        k3=1.0,
        evidence=(
            make_fact("above_zero", above, "share of values above 0 on both sides"),
            make_fact("difference", apart, "median |log ratio|, nats"),
            make_fact("spread", spread, "standard deviation of rollout_log_probs"),
        ),
        where={"column": "rollout_log_probs and train_log_probs"},
        rivals={} if sure else {"wrong_sign": "check whether the code stores log-probs or losses"},
        leaves=case.without(case.sound),
    )


def detect_wrong_sign(case: Case) -> Detection | None:
    if find_positive_kind(case) != "negated":
        return None
    below, apart = float((case.r < 0).mean()), float(np.median(np.abs(case.x)))
    return Detection(
        "high",
        "both columns contain negative log-likelihoods. All values are between 0 and "
        f"{max(float(case.r.max()), float(case.t.max())):.3g}. The two columns agree (median difference {apart:.2g} "
        "nats), but every ratio is inverted",
        k3=1.0,
        evidence=(
            make_fact("below_zero", below, "share of rollout_log_probs below 0: 1 for log-probs"),
            make_fact("difference", apart, "median difference of the two columns, nats"),
        ),
        where={"column": "rollout_log_probs and train_log_probs"},
        leaves=case.with_log_probs(rollout=-case.rollout, train=-case.train),
    )


def detect_packed_columns(case: Case) -> Detection | None:
    gapped = _find_gaps(case)
    if gapped is None:
        return None
    best = None
    for side, _, _ in case.sides:
        for start, place in (("the first valid token", gapped[1]), ("the start of the row", gapped[2])):
            given = getattr(case, side)
            values = np.where(case.rows.mask, given[np.minimum(place, len(given) - 1)], given)
            better = case.find_better_reading(side, values) & gapped[0]
            if not better.any():
                continue
            few = better.sum() < 3 or better.sum() < _FEW_ROWS * gapped[0].sum()
            left, others = case.with_reading(side, values, better), ~better[case.sequence]
            before, after = (float(np.mean(np.minimum(np.abs(one.without(others).x), 5.0))) for one in (case, left))
            if after < (_FITS_FEW if few else 0.5) * before and (best is None or after / before < best[0]):
                best = after / before, before, after, side, start, better, left
    if best is None:
        return None
    _, before, after, side, start, better, left = best
    share = float(better.sum() / gapped[0].sum())
    return Detection(
        "high" if share > 0.1 or better.sum() > 10 else "medium",
        f"in {percent(share)} of the rows that have masked tokens between valid tokens, {side}_log_probs lack the "
        f"masked tokens: from {start} on, the values follow each other without a gap. If each value is moved to its "
        f"valid token, the mean difference is {after:.2g} nats instead of {before:.2g} nats",
        share=case.share(better[case.sequence]),
        evidence=(
            make_fact("difference_as_given", before, "mean |log ratio| of the columns as they are (capped at 5 nats)"),
            make_fact("difference_unpacked", after, "mean |log ratio| if the values are moved to the valid tokens"),
            make_share_fact("sequences", better, gapped[0], "share of rows with gaps that agree better after the move"),
        ),
        where={"sequences": percent(share), "column": f"{side}_log_probs", "positions": "after a masked gap"},
        examples=case.find_loudest(better),
        leaves=left,
    )


def _find_gaps(case: Case) -> tuple[Bools, Ints, Ints] | None:
    """Find rows with masked tokens between valid tokens.

    Return flags of these rows. Also return the index [T] that each valid token would have without gaps, in two arrays:
    if the first valid token of the row keeps its place, and if it moves to the start of the row.
    """
    mask, segments = case.rows.mask, case.rows.segments
    if mask.all():
        return None
    starts = segments.spread(segments.offsets[:-1])
    running = np.append(0, np.cumsum(mask))
    rank, some = running[:-1] - running[starts], np.flatnonzero(mask)
    row = case.sequence[some]
    first, last = np.full(case.size, 0), np.full(case.size, -1)
    first[row[::-1]], last[row] = some[::-1], some
    valid = np.bincount(row, minlength=case.size)
    gapped: Bools = (last - first + 1 > valid) & (valid > 0)
    if not gapped.any():
        return None
    return gapped, segments.spread(first) + rank, starts + rank


_BATCH_ROWS = 4
_BATCH_Z = -4.0


def detect_batch_dependent_kernels(case: Case) -> Detection | None:
    long = case.counts >= 8
    if long.sum() < 2 * _BATCH_ROWS:
        return None
    same = (case.means(case.x == 0) == 1.0) & long
    other = long & ~same
    if min(same.sum(), other.sum()) < max(_BATCH_ROWS, 0.02 * long.sum()):
        return None
    rest = case.without(~other[case.sequence])
    if rest.noise > BFLOAT16_NOISE or float((rest.x == 0).mean()) > 0.5:
        return None
    pure, groups = _micro_batch_majority(case, same, long)
    z = _clumping_z(case, same, long)
    recorded = pure is not None and pure >= 0.95 and groups >= 3
    if not recorded and z > _BATCH_Z:
        return None
    share = float(same.sum() / long.sum())
    how = "The rows of one micro-batch" if recorded else "Neighboring rows of the dump"
    evidence = [
        make_share_fact("identical_sequences", same, long, "share of rows that are bit-identical on the two sides"),
        make_fact("noise_of_the_rest", rest.noise, "noise of the logits in the other rows"),
        make_fact("clumping_z", z, "streaks of identical rows minus chance, in standard errors", against=z > _BATCH_Z),
    ]
    if pure is not None:
        meaning = "share of rows of the same kind (identical or different) as most rows of their micro-batch"
        evidence.append(make_fact("micro_batches", pure, meaning, against=not recorded))
    return Detection(
        "high" if recorded else "medium",
        f"{percent(share)} of the rows are bit-identical on the two sides, and the other rows differ by noise "
        f"({rest.noise:.2g} in the logits). {how} are mostly all identical or all different, so the kernels' "
        "results depend on the batch",
        share=case.share(other[case.sequence]),
        k3=float(rest.k3.sum() / case.k3.sum()) if case.k3.sum() > 0 else 0.0,
        evidence=tuple(evidence),
        where={"sequences": f"{percent(1 - share)}, the rows that differ"},
        examples=np.flatnonzero(other)[:3],
        rivals={"identical": "recompute the identical rows with the trainer. They may be copies of the other column"},
        leaves=case.without(long[case.sequence]),
    )


def _micro_batch_majority(case: Case, same: Bools, long: Bools) -> tuple[float | None, int]:
    """Return the share of rows whose `same` is the majority in their micro-batch, and the number of micro-batches."""
    if case.rows.columns.get("micro_batch") is None:
        return None, 0
    keys = list(zip(case.column("step")[long].tolist(), case.column("micro_batch")[long].tolist(), strict=True))
    names = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    group = np.array([names[key] for key in keys])
    size, count = np.bincount(group), np.bincount(group, weights=same[long])
    several = size > 1
    if not several.any():
        return None, 0
    majority = np.maximum(count, size - count)[several].sum() / size[several].sum()
    return float(majority), int(several.sum())


def _clumping_z(case: Case, same: Bools, long: Bools) -> float:
    """Return a Wald-Wolfowitz z-score. The z-score is negative if identical rows are often neighbors in the dump."""
    rows = np.flatnonzero(long)
    order = rows[np.lexsort((case.rows.rows[rows], case.rows.file[rows]))]
    flags = same[order]
    one, two = float(flags.sum()), float((~flags).sum())
    number = one + two
    runs = 1 + int((flags[1:] != flags[:-1]).sum())
    expected = 1 + 2 * one * two / number
    variance = (expected - 1) * (expected - 2) / (number - 1)
    return float((runs - expected) / np.sqrt(variance)) if variance > 0 else 0.0
