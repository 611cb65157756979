"""Top-k or top-p renormalized on the rollout side alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.distributions import COLUMNS, Cut, cut
from mismatchctl.diagnose.measures import calibration, coherence, fact, percent

_STRAY = 0.5
"""Where nearly all goes one way, a log ratio above this comes from something else and may not outweigh that."""
_LIGHT, _LEAST_MASS = 0.8, 0.3
"""Mass kept above which other causes look alike; and what a sampler keeps at least of it."""
_Z, _ONE_SIDED, _PLAINLY, _ZEROS = -6.0, -0.4, -0.7, 0.005
_NEAR, _LEAST_NEAR, _MISSED = 20, 6, 0.05


def _test(case: Case) -> Diagnosis | None:
    if len(case.x) < 100 or "logit_penalty" in case.explained:
        return None
    read = cut(case)
    if read is not None:
        return _read(case, read)
    excess, z, _, _ = calibration(case)
    likely, _, unlikely, _ = coherence(case)
    if max(likely, unlikely) < _PLAINLY:
        bounded = np.expm1(np.minimum(case.x, _STRAY))
        excess, z = float(bounded.mean()), case.clustered_z(bounded)
    certain = (case.r == 0) & (case.t < -1e-4)
    zeros = float(certain.mean())
    one_sided = likely < _ONE_SIDED and unlikely < _ONE_SIDED
    if z > _Z or not (one_sided or zeros > _ZEROS):
        return None
    nucleus = zeros > _ZEROS
    if nucleus and not one_sided and float(np.exp(np.quantile(case.t[certain], 0.05))) < _LEAST_MASS:
        return None  # zeros on tokens that no nucleus would have been cut down to
    low, bound, high = _nucleus(case.t[certain]) if nucleus else np.quantile(case.x, (0.005, 0.005, 0.05)).tolist()
    kept = float(np.exp(bound))
    below = float((case.x < 0).mean())
    evidence = [
        fact(
            "ratio_mean_minus_one",
            excess,
            "E[ratio] - 1: minus the mass that the sampler cut off; 0 without truncation",
        ),
        fact("z", z, "the same in standard errors"),
        fact("one_sided", below, "share of tokens that the trainer gives less; 0.5 for noise"),
        fact("exact_zeros", zeros, "share of tokens with a rollout log-prob of exactly 0", against=not nucleus),
        fact(
            "kept_mass",
            kept,
            "smallest probability mass that was kept",
            interval=(float(np.exp(low)), float(np.exp(high))),
        ),
    ]
    if nucleus:
        setting = f"top-p of about {kept:.3g} (a nucleus of one token has log-prob 0, down to probability {kept:.3g})"
    else:
        setting = (
            f"top-k (no exact zeros; the mass kept goes down to {kept:.3g}); k itself cannot be told from these columns"
        )
    plain = nucleus or kept < _LIGHT
    return Diagnosis(
        "high" if plain and (one_sided or likely < -0.8) else "medium",
        f"{percent(below)} of the tokens have a higher log-prob in the rollout, as if {percent(-excess)} of the "
        f"probability "
        f"had been cut off and the rest renormalized: {setting}",
        share=min(1.0, float(np.abs(case.x[case.x < 0]).sum() / max(np.abs(case.x).sum(), 1e-300))),
        evidence=tuple(evidence),
        where={"tokens": percent(below)},
        examples=np.argsort(-case.means(np.abs(case.x)), kind="stable")[:3],
        rivals={}
        if plain
        else {"other_vocabulary": "the sizes of both logits: a padded vocabulary or banned tokens look the same"},
        leaves=replace(case, reshaped=True),
        everywhere=True,
    )


def _read(case: Case, read: Cut) -> Diagnosis:
    """What the lists of the rollout's most likely tokens say: it cannot choose some that the trainer can."""
    excess, z, _, _ = calibration(case)
    setting = fact(read.name or "kept_mass", read.value, "of the sampler, from its lists", interval=read.interval)
    return Diagnosis(
        "high" if read.name else "medium",
        f"the rollout's lists give no probability to tokens that the trainer could choose; it keeps "
        f"{percent(read.mass)} of the mass where it cuts: {read.setting}",
        share=min(1.0, float(np.abs(case.x[case.x < 0]).sum() / max(np.abs(case.x).sum(), 1e-300))),
        evidence=(
            setting,
            fact("kept_mass", read.mass, "mean of the probability that is kept where something is cut, by the trainer"),
            fact(
                "ratio_mean_minus_one", excess, "E[ratio] - 1: minus the mass that the sampler cut off", against=z > _Z
            ),
        ),
        where={"tokens": "all"},
        examples=np.argsort(-case.means(np.abs(case.x)), kind="stable")[:3],
        rivals={} if read.name else {"other_vocabulary": "which tokens have no probability: banned ones look the same"},
        leaves=replace(case, reshaped=True),
        everywhere=True,
    )


def _nucleus(certain: Float64s) -> tuple[float, float, float]:
    """log p of a nucleus, from the trainer's log-probs of tokens that were alone in it: an end, the estimate, an end.

    They reach down to log p and end there. Where they lie evenly near the end, the smallest is above it by no more than
    some three of their mean distances in 95 of 100 cases: (1 + r / n)^-n is 0.05 of the mean of n. The trainer's own
    noise puts some below the end, less than 1 %.
    """
    ordered = np.sort(certain)
    count = max(1, min(max(len(ordered) // _NEAR, _LEAST_NEAR), len(ordered) - 1))
    reach = (_MISSED ** (-1 / count) - 1) * float(ordered[min(count, len(ordered) - 1)] - ordered[0])
    estimate, above = ordered[len(ordered) // 500], ordered[len(ordered) // 100]
    return float(ordered[0]) - reach, float(estimate), float(above) + reach


CAUSE = Cause(
    columns=COLUMNS,
    id="truncated_sampling",
    title="Top-k or top-p on the rollout side only",
    shows="Nearly all log ratios below 0, E[ratio] below 1 by the mass cut off; with top-p, exact zeros down to log p.",
    test=_test,
    advice="Sample with top_p=1 and top_k=-1 while training{settings}, or have the trainer apply the same "
    "truncation. vLLM logprobs_mode=raw_logprobs only hides it: the samples stay truncated.",
    pointless="truncated importance sampling and geometric rejection: all ratios are below 1 by construction",
)
