"""Rows of some forward passes agree to the bit, and those of others differ by noise."""

from __future__ import annotations

import numpy as np

from mismatchctl.core.batch import Bools
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.cause import Cause, Detection
from mismatchctl.diagnosis.causes.numerics import BFLOAT16_NOISE
from mismatchctl.diagnosis.measures import make_fact, make_share_fact, percent

_LONG, _SOME, _ROWS, _OFTEN = 8, 0.02, 4, 0.5
_PURE, _GROUPS, _Z = 0.95, 3, -4.0


def _test(case: Case) -> Detection | None:
    long = case.counts >= _LONG
    if long.sum() < 2 * _ROWS:
        return None
    same = (case.means(case.x == 0) == 1.0) & long
    other = long & ~same
    if min(same.sum(), other.sum()) < max(_ROWS, _SOME * long.sum()):
        return None
    rest = case.without(~other[case.sequence])
    if rest.noise > BFLOAT16_NOISE or float((rest.x == 0).mean()) > _OFTEN:
        return None
    pure, groups = _by_micro_batch(case, same, long)
    z = _clumping(case, same, long)
    recorded = pure is not None and pure >= _PURE and groups >= _GROUPS
    if not recorded and z > _Z:
        return None
    share = float(same.sum() / long.sum())
    how = (
        "the rows of one micro-batch are alike in this"
        if recorded
        else "rows that follow one another in the dump are alike in this"
    )
    evidence = [
        make_share_fact("identical_sequences", same, long, "share of rows that agree to the bit"),
        make_fact(
            "noise_of_the_rest", rest.noise, f"of the logits in the other rows; bfloat16 stays below {BFLOAT16_NOISE:g}"
        ),
        make_fact(
            "clumping_z",
            z,
            "runs of alike rows in the order of the dump, in standard errors: below 0 if they clump",
            against=z > _Z,
        ),
    ]
    if pure is not None:
        evidence.append(
            make_fact(
                "micro_batches", pure, "share of rows that are as the most of their micro-batch", against=not recorded
            )
        )
    return Detection(
        "high" if recorded else "medium",
        f"{percent(share)} of the rows agree to the bit, and the others differ by noise alone ({rest.noise:.2g} in the "
        f"logits); {how}: the kernels give other results for another batch",
        share=case.share(other[case.sequence]),
        k3=float(rest.k3.sum() / case.k3.sum()) if case.k3.sum() > 0 else 0.0,
        evidence=tuple(evidence),
        where={"sequences": f"{percent(1 - share)}, those that differ"},
        examples=np.flatnonzero(other)[:3],
        rivals={"identical": "recompute the rows that agree: are they a copy of the other column?"},
        leaves=case.without(long[case.sequence]),
    )


def _by_micro_batch(case: Case, same: Bools, long: Bools) -> tuple[float | None, int]:
    """Share of rows that are as the majority of their micro-batch, and groups; None where no column says."""
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


def _clumping(case: Case, same: Bools, long: Bools) -> float:
    """Wald and Wolfowitz: how far the number of runs in the order of the dump is from chance."""
    rows = np.flatnonzero(long)
    order = rows[np.lexsort((case.rows.rows[rows], case.rows.file[rows]))]
    flags = same[order]
    one, two = float(flags.sum()), float((~flags).sum())
    number = one + two
    runs = 1 + int((flags[1:] != flags[:-1]).sum())
    expected = 1 + 2 * one * two / number
    variance = (expected - 1) * (expected - 2) / (number - 1)
    return float((runs - expected) / np.sqrt(variance)) if variance > 0 else 0.0


BATCH_DEPENDENT_KERNELS = Cause(
    id="batch_dependent_kernels",
    title="Kernels depend on the batch",
    shows="Whole rows agree to the bit, the others differ by noise, and it is the micro-batch that decides.",
    test=_test,
    advice="Nothing is wrong with the data. If bitwise agreement is wanted, use batch-invariant kernels{settings}, or "
    "score with the same micro-batches as before.",
    columns=("micro_batch",),
)
