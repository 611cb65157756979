"""Errors of the rollout and of the trainer, measured against a third column with log-probs in high precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.formatting import INTERVAL_LEVEL
from mismatchctl.core.ratios import compute_k3
from mismatchctl.core.schema import MIN_LOG_PROB, POSITIVE_TOLERANCE, REFERENCE_COLUMN
from mismatchctl.data.blocks import Rows
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.causes.registry import CAUSES
from mismatchctl.diagnosis.evidence import LAG_COLUMN, MIN_SAMPLE, Evidence, RowSample, gather_evidence
from mismatchctl.diagnosis.findings import find_causes
from mismatchctl.io.files import natural_key
from mismatchctl.results.model import Confidence, Fact, Finding, Side, Sides, SidesGroup, SideShare, Value

WRONG_SIDE_FACTOR = 2.0
SHARED_ERROR_FACTOR = 5.0
LOUD_RMS = 0.05
"""An error (root mean square, in nats) above this value is larger than bfloat16 alone causes in most models."""
OWNER_SHARE = 0.75
_ONE_SIDED = (0.05, 0.95)  # quantiles for decisions: each is a one-sided 95% bound
MIN_CLUSTERS = 8
_NOISE_CAUSES = {
    *("numerical_noise", "moe_routing", "identical", "unexplained"),
    *("cache_quantization", "low_precision_logging"),
}


def measure_sides(case: Case) -> Sides | None:
    """Measure the errors of rollout and trainer against the reference, with 95% bootstrap intervals over clusters."""
    given = case.rows.extra_columns.get(REFERENCE_COLUMN)
    if given is None or given.ndim != 1:
        return None
    reference = given.astype(np.float64)
    sound = case.sound & (reference >= MIN_LOG_PROB) & (reference <= POSITIVE_TOLERANCE)
    if not sound.any():
        return None
    terms = _ErrorSums(case, reference, sound)
    table = terms.sum_by(case.clusters)
    count, draws = len(table), None
    if count >= MIN_CLUSTERS:
        draws = np.random.default_rng(count).multinomial(count, np.full(count, 1 / count), 400) @ table
    rollout, train, gap = np.sqrt(_mean_squares(table.sum(axis=0))).tolist()
    side, confidence = _judge_side(rollout, train, draws)
    correlation, least = terms.correlation(), min(rollout, train)
    share, owner = _estimate_share(table, draws, 3, 4)
    share_k3, _ = _estimate_share(table, draws, 5, 6)
    together = side == "both" and least > SHARED_ERROR_FACTOR * gap
    owner = owner if side == "both" and gap else None
    if confidence == "high" and ((together and least > LOUD_RMS) or owner):
        confidence = "medium"
    column = float(np.expm1(reference[sound] - case.rollout[sound]).mean())
    error = _ratio_error(table)
    groups = {name: _measure_groups(terms, case.rows, name) for name in ("step", "worker")}
    return Sides(
        side=side,
        confidence=confidence,
        summary=_summarize(side, rollout, train, correlation, gap == 0, owner),
        tokens=int(sound.sum()),
        rollout_rms=rollout,
        train_rms=train,
        gap_rms=gap,
        correlation=correlation,
        rollout_share=share,
        rollout_share_k3=share_k3,
        reference_over_rollout=Value(value=1.0 + column, se=error),
        groups={
            **{name: found for name, found in groups.items() if found},
            # The numbers are the borders of the bands.
            "position": _measure_bands(terms, case.rows.segments.places, (16, 64, 256, 1024, 4096)),
            "probability": _measure_bands(terms, np.exp(reference), (0.01, 0.1, 0.5, 0.9, 0.99)),
        },
        notes=_list_notes(case.rows, column, error, least / gap if together and gap else None),
    )


class _ErrorSums:
    """Sums per sequence, to compute the errors of rollout and trainer and their shares of the mismatch."""

    def __init__(self, case: Case, reference: Float64s, sound: Bools) -> None:
        def only(values: Float64s) -> Float64s:
            return np.where(sound, values, 0.0)

        with np.errstate(invalid="ignore", over="ignore"):
            self.rollout, self.train = only(case.rollout - reference), only(case.train - reference)
            gap = self.train - self.rollout
            own = -self.rollout * gap
            k3 = compute_k3(np.clip(gap, -20.0, 20.0))
            part = np.where(gap != 0, own / np.where(gap != 0, gap * gap, 1.0), 0.0)
            ratio = only(np.expm1(np.clip(reference - case.rollout, -20.0, 20.0)))
        self.sound = sound
        each = (sound, self.rollout**2, self.train**2, gap * gap, own, k3, k3 * part, ratio)
        self.sequences = np.stack([case.rows.segments.sum(values) for values in each], axis=1)

    def sum_by(self, groups: NDArray[np.int64]) -> Float64s:
        table = np.zeros((int(groups.max(initial=-1)) + 1, self.sequences.shape[1]))
        np.add.at(table, groups, self.sequences)
        return table

    def correlation(self) -> float | None:
        rollout, train = self.rollout[self.sound], self.train[self.sound]
        if len(rollout) < 2 or rollout.std() == 0 or train.std() == 0:
            return None
        return float(np.corrcoef(rollout, train)[0, 1])


def _mean_squares(sums: Float64s) -> Float64s:
    """Return the mean squares of the rollout's error, the trainer's error, and the log ratio."""
    return sums[..., 1:4] / np.maximum(sums[..., :1], 1)


def _judge_side(rollout: float, train: float, draws: Float64s | None) -> tuple[Side, Confidence]:
    if max(rollout, train) < 1e-4:  # in nats. Rounding to float32 can cause such errors
        return "none", "high"
    if min(rollout, train) == 0:
        return ("rollout" if rollout else "trainer"), "high" if draws is not None else "medium"
    ratio = rollout / train
    side: Side = "rollout" if ratio > WRONG_SIDE_FACTOR else "trainer" if ratio < 1 / WRONG_SIDE_FACTOR else "both"
    if draws is None:
        return side, "low"
    means = _mean_squares(draws)
    low, high = np.quantile(np.sqrt(means[:, 0] / np.maximum(means[:, 1], 1e-300)), _ONE_SIDED)
    inside = {
        "rollout": low > WRONG_SIDE_FACTOR,
        "trainer": high < 1 / WRONG_SIDE_FACTOR,
        "both": low > WRONG_SIDE_FACTOR**-0.5 and high < WRONG_SIDE_FACTOR**0.5,
    }[side]
    return side, "high" if inside else "medium"


def _estimate_share(table: Float64s, draws: Float64s | None, whole: int, part: int) -> tuple[SideShare, Side | None]:
    """Return the rollout's share of the mismatch, and the side that clearly causes most of it, or `None`."""
    owner: Side | None = None
    total, interval, status = table[:, whole].sum(), None, "ok"
    if total <= 0:
        return SideShare(value=None, status="the two sides agree"), owner
    if draws is not None:
        drawn = draws[:, part] / np.maximum(draws[:, whole], 1e-300)
        least, most = np.quantile(drawn, _ONE_SIDED)
        low, high = np.quantile(drawn, [(1 - INTERVAL_LEVEL) / 2, (1 + INTERVAL_LEVEL) / 2])
        interval = (float(low), float(high))
        owner = "rollout" if least > OWNER_SHARE else "trainer" if most < 1 - OWNER_SHARE else None
        if not most - least < 2.0:  # this wide only if shared errors are much larger than the log ratio
            owner = None
            status = "not measurable, because the two sides share nearly all of their error"
    return SideShare(value=float(table[:, part].sum() / total), interval=interval, status=status), owner


def _ratio_error(table: Float64s) -> float | None:
    """Return the clustered standard error of the mean of (reference probability / rollout probability)."""
    if len(table) < 2:
        return None
    tokens = table[:, 0].sum()
    residual = table[:, 7] - table[:, 7].sum() / tokens * table[:, 0]
    return float(np.sqrt(np.square(residual).sum() * len(table) / (len(table) - 1)) / tokens)


def _measure_groups(terms: _ErrorSums, rows: Rows, name: str) -> list[SidesGroup]:
    values = rows.columns.get(name)
    if values is None:
        return []
    known, index = np.unique(values.astype(str), return_inverse=True)
    if not 1 < len(known) <= 64:
        return []
    table = terms.sum_by(index)
    means, tokens = np.sqrt(_mean_squares(table)), table[:, 0]
    return [
        SidesGroup(label=str(known[at]), tokens=int(tokens[at]), rollout_rms=means[at, 0], train_rms=means[at, 1])
        for at in sorted(range(len(known)), key=lambda at: _label_key(str(known[at])))
        if tokens[at]
    ]


def _label_key(label: str) -> tuple[Any, ...]:
    """Return a sort key for group labels: numbers by value, then other labels in natural order."""
    try:
        return 0, float(label)
    except ValueError:
        return 1, natural_key(label)


def _measure_bands(terms: _ErrorSums, values: NDArray[Any], ends: Sequence[float]) -> list[SidesGroup]:
    band = np.searchsorted(ends, values, side="right")
    tokens, rollout, train = (
        np.bincount(band[terms.sound], weights=each[terms.sound], minlength=len(ends) + 1)
        for each in (np.ones(len(band)), terms.rollout**2, terms.train**2)
    )
    texts = [f"{end:g}" for end in ends]
    labels = [f"below {texts[0]}", *(f"{a} to {b}" for a, b in pairwise(texts)), f"from {texts[-1]}"]
    rms = np.sqrt(np.stack([rollout, train]) / np.maximum(tokens, 1))
    return [
        SidesGroup(label=label, tokens=int(tokens[at]), rollout_rms=float(rms[0, at]), train_rms=float(rms[1, at]))
        for at, label in enumerate(labels)
        if tokens[at]
    ]


def _summarize(
    side: Side, rollout: float, train: float, correlation: float | None, identical: bool, owner: Side | None
) -> str:
    figures = (
        f"Compared with reference_log_probs, the root mean square error is {rollout:.2g} nats for the rollout and "
        f"{train:.2g} nats for the trainer"
    )
    if side == "none":
        return f"The two sides differ only by noise. {figures}."
    if identical:
        return f"The two sides are identical, and both are wrong. {figures}."
    if side == "both":
        shared = (
            f". Much of the error is shared (correlation {correlation:.2f})"
            if correlation and correlation > 0.3
            else ""
        )
        gap = f". The difference between the two sides comes from the {owner}" if owner else ""
        return f"Both sides have about the same error. {figures}{shared}{gap}."
    word, own, other = ("rollout", rollout, train) if side == "rollout" else ("trainer", train, rollout)
    how = f". The error of the {word} is {own / other:,.3g} times larger" if other else ""
    return f"The {word} is wrong. {figures}{how}."


def _list_notes(rows: Rows, column: float, error: float | None, likeness: float | None) -> list[str]:
    notes = []
    if likeness is not None:
        notes.append(
            f"the two sides are {likeness:,.2g} times closer to each other than to the reference. Either they share an "
            "error (numerics, quantization or weights), or the reference is wrong (its weights, temperature, prompt or "
            "positions)"
        )
    if error and abs(column) > 4 * error and abs(column) > 1e-3:
        notes.append(
            f"E[reference/rollout] is {1 + column:.4g} instead of 1. Either the rollout column does not belong to the "
            "sampling distribution, or the reference has other weights or another temperature"
        )
    scored, trained = (rows.columns.get(name) for name in ("reference_version", "train_version"))
    if scored is not None and trained is not None and (scored != trained).any():
        notes.append("the reference was scored with other weights than the trainer's")
    return notes


def assign_sides(
    found: Sequence[Finding], evidence: Evidence, files: Mapping[int, str]
) -> tuple[list[Finding], Sides | None]:
    """If the dump has reference log-probs, add the wrong side to each finding, and return the error of each side.

    Each test runs again on two pairs: rollout and reference, then trainer and reference. A cause that is found only in
    the first pair is a fault of the rollout, and a cause that is found only in the second pair a fault of the trainer.
    """
    if evidence.sample is None or REFERENCE_COLUMN not in evidence.sample.rows.extra_columns:
        return list(found), None
    rows = evidence.sample.rows
    sides = measure_sides(Case.of(evidence, rows))
    if sides is None:
        return list(found), None
    # Finding a cause takes fewer rows than measuring its size.
    few = RowSample.of(evidence.sample.hashes, rows, MIN_SAMPLE).rows
    reference = few.extra_columns[REFERENCE_COLUMN]
    few = replace(few, extents={})  # `extents` lacks the minimum and maximum of the reference
    pairs = {"rollout": replace(few, train=reference), "trainer": replace(few, rollout=reference)}
    strongest = sides.confidence == "high"  # if so, the first finding gets the side with the larger error
    least = min(sides.rollout_rms, sides.train_rms)
    alike = sides.side == "both" and least > max(SHARED_ERROR_FACTOR * sides.gap_rms, 0.03)
    rest = found[1:] if strongest else found
    one = strongest and sides.side in ("rollout", "trainer")  # if so, findings with low confidence get it too
    ask = alike or any(finding.confidence != "low" or not one for finding in rest)
    shown = {side: _find_pair_causes(pair, evidence, files) if ask else set() for side, pair in pairs.items()}

    def side_of(finding: Finding, first: bool) -> Side:
        on: list[Side] = [side for side in ("rollout", "trainer") if finding.cause in shown[side]]
        return on[0] if len(on) == 1 and not (first and strongest) else sides.side

    told = [finding.model_copy(update={"side": side_of(finding, place == 0)}) for place, finding in enumerate(found)]
    named = [cause.title for cause in CAUSES if cause.id in shown["rollout"] - _NOISE_CAUSES] if alike else []
    if named or (alike and least > LOUD_RMS):
        told.append(_make_reference_finding(sides, named))
    return told, sides


def _make_reference_finding(sides: Sides, named: Sequence[str]) -> Finding:
    shows = f". Compared with the reference, each side shows: {', '.join(named).lower()}" if named else ""
    far = min(sides.rollout_rms, sides.train_rms)
    return Finding(
        cause="faulty_reference",
        confidence="medium" if named else "low",
        title="The reference, or both sides with the same error",
        summary=f"The reference differs from both sides by {far:.2g} nats (root mean square), and the two sides differ "
        f"from each other by {sides.gap_rms:.2g} nats{shows}. Either the reference is wrong, or both sides have "
        "the same error.",
        evidence=[
            Fact(name="from_reference", value=far, meaning="smaller root mean square error of the two sides, nats"),
            Fact(
                name="from_each_other",
                value=sides.gap_rms,
                meaning="root mean square difference between the two sides, nats",
            ),
        ],
        advice="Score again with the trainer's weights of that step, the sampling temperature and the whole "
        "prompt, and "
        "check that entry t belongs to token t. If the result is the same, look for a shared error of the two sides.",
        side="none",
    )


def _find_pair_causes(pair: Rows, evidence: Evidence, files: Mapping[int, str]) -> set[str]:
    by = tuple({name for name, _, _ in evidence.cells} - {"", LAG_COLUMN, "worker"})
    gathered = gather_evidence(pair, by, [cause.flags for cause in CAUSES], MIN_SAMPLE, {})
    return {
        finding.cause
        for part in gathered.values()
        for finding in find_causes(part, files)
        if finding.confidence != "low"
    }
