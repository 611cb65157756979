"""Top-k or top-p renormalized on the rollout side alone."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.distributions import COLUMNS, Cut, cut
from mismatchctl.diagnose.measures import calibration, coherence, fact, percent
from mismatchctl.measure.metrics.intervals import t_quantile
from mismatchctl.result import Fact

_ABOVE, _OFTEN_ABOVE = 1e-3, 0.01
"""A log-prob above 0, and a share of such, that no renormalized distribution has."""
_STRAY = 0.5
"""Where nearly all goes one way, a log ratio above this comes from something else and may not outweigh that."""
_LIGHT, _LEAST_MASS = 0.8, 0.3
"""Mass kept above which other causes look alike; and what a sampler keeps at least of it."""
_Z, _ONE_SIDED, _PLAINLY, _ZEROS = -6.0, -0.4, -0.7, 0.005
_NEAR, _LEAST_NEAR, _MISSED = 20, 6, 0.05
_OFTEN, _CONTRADICTED = 0.005, 0.15
_CUT, _NOISY, _FEWEST, _NORMAL, _WIDEST, _LENGTHS_DIFFER = 0.1, 0.03, 30, 1.96, 3.0, 4.0
"""Mass cut off beyond which noise does not tell it, and is not all of it; places that it takes; z of lists of different
lengths."""
_LEAST_CUT, _LEAST_KEPT, _FEW = 1e-6, 1e-6, 0.05
"""Less than this no sampler cuts off, but rounding does; and less than a likeliest token has among a million, in more
than a few places, none keeps."""
_NO_FLOOR = "its value is relative to the likeliest token, whose probability only lists hold (rollout_top_log_probs)"


def _test(case: Case) -> Detection | None:
    if len(case.x) < 100 or "logit_penalty" in case.explained:
        return None
    read = cut(case)
    if read is not None:
        return _read(case, read)
    excess, z, _, _ = calibration(case)
    above = case.rollout[case.rows.mask]
    if float(((above > _ABOVE) & (above < _STRAY)).mean()) > _OFTEN_ABOVE:
        return None
    likely, _, unlikely, _ = coherence(case)
    if max(likely, unlikely) < _PLAINLY:
        bounded = np.expm1(np.minimum(case.x, _STRAY))
        excess, z = float(bounded.mean()), case.clustered_z(bounded)
    unsure = case.r[case.r < 0]
    certain = (case.r == 0) & (case.t < min(-1e-4, float(unsure.max()) if len(unsure) else 0.0))
    zeros = float(certain.mean())
    one_sided = likely < _ONE_SIDED and unlikely < _ONE_SIDED
    if z > _Z or not (one_sided or zeros > _ZEROS):
        return None
    if -excess < _LEAST_CUT or float(np.quantile(case.x, _FEW)) < math.log(_LEAST_KEPT):
        return None
    nucleus = zeros > _ZEROS
    if nucleus and not one_sided and float(np.exp(np.quantile(case.t[certain], 0.05))) < _LEAST_MASS:
        return None  # zeros on tokens that no nucleus would have been cut down to
    setting, told = _setting(case, case.t[certain] if nucleus else None)
    kept = float(np.exp(np.quantile(case.x, _OFTEN)))
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
        fact("kept_mass", kept, "smallest probability mass that was kept, about"),
        *told,
    ]
    plain = nucleus or kept < _LIGHT
    return Detection(
        "high" if plain and (one_sided or likely < -0.8) else "medium",
        f"{percent(below)} of the tokens have a higher log-prob in the rollout, as if {percent(-excess)} of the "
        f"probability had been cut off and the rest renormalized: {setting}",
        share=min(1.0, float(np.abs(case.x[case.x < 0]).sum() / max(np.abs(case.x).sum(), 1e-300))),
        evidence=tuple(evidence),
        where={"tokens": percent(below)},
        rivals={}
        if plain
        else {"other_vocabulary": "the sizes of both logits: a padded vocabulary or banned tokens look the same"},
        leaves=case.relabelled(reshaped=True),
        everywhere=True,
    )


def _read(case: Case, read: Cut) -> Detection:
    """What the lists of the rollout's most likely tokens say: it cannot choose some that the trainer can."""
    excess, z, _, _ = calibration(case)
    setting = fact(read.name or "kept_mass", read.value, "of the sampler, from its lists", interval=read.interval)
    return Detection(
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
        rivals={} if read.name else {"other_vocabulary": "which tokens have no probability: banned ones look the same"},
        leaves=case.relabelled(reshaped=True),
        everywhere=True,
    )


def _setting(case: Case, certain: Float64s | None) -> tuple[str, list[Fact]]:
    """Which setting it is, in words, and what is known of its value; `certain`: log p of tokens alone in a nucleus [N].

    A ratio is the mass that was kept at its place. Top-p keeps no less than p, and without the least of its tokens
    less than p: the sampled one is at least as likely. Top-k keeps k at every place, however much it cuts.
    """
    mass, p = np.exp(np.minimum(case.x, 0.0)), np.exp(np.minimum(case.t, 0.0))
    ends = float(np.quantile(mass - p, 1 - _OFTEN)), float(np.quantile(mass, _OFTEN))
    length, drift = _kept_tokens(case, 1 - mass)
    nucleus = ends[0] - ends[1] < _CONTRADICTED
    if certain is not None and nucleus:
        low, p_low, high = (float(np.exp(value)) for value in _nucleus(certain))
        said = f"top-p of about {p_low:.3g} (a nucleus of one token has log-prob 0, down to probability {p_low:.3g})"
        return said, [fact("top_p", p_low, "of the sampler: the least probable token alone", interval=(low, high))]
    if nucleus and drift < -_LENGTHS_DIFFER:
        least, most = sorted(ends)
        said = f"top-p between {least:.3g} and {most:.3g}, as the mass kept says"
        meaning = "of the sampler, from the mass that it keeps"
        return said, [fact("top_p", (least + most) / 2, meaning, interval=(least, most))]
    if drift > _LENGTHS_DIFFER:
        return f"min-p, as it keeps more tokens where it cuts less; {_NO_FLOOR}", []
    if certain is not None:
        return f"top-p or min-p, as it keeps single tokens; which of them is not told; if min-p, {_NO_FLOOR}", []
    if length is None:
        return "top-k (no exact zeros); k cannot be told where so little is cut", []
    fewest, k, most_kept = length
    said = f"{fewest:,} to {most_kept:,}; no exact zeros, as many at every place as far as can be told"
    meaning = "E[1 / p] of the sampled tokens: as many as are kept"
    return f"top-k of about {k:,} ({said})", [fact("top_k", k, meaning, interval=(fewest, most_kept))]


def _kept_tokens(case: Case, cut: Float64s) -> tuple[tuple[int, int, int] | None, float]:
    """How many tokens are kept, with ends; and the z of those kept where less is cut over those where more is.

    Sampled from q, 1 / q averages to the number of tokens that have any. Where little is cut [N] some of these are
    rare, so that the mean is of few, and noise chooses the places: they count by the square of the mass.
    """
    length = _mean_kept(case, np.maximum(cut - _CUT, 0.0) ** 2)
    weights = np.where(cut > _NOISY, cut, 0.0) ** 2
    order = np.argsort(-cut)
    half = np.zeros(len(cut), np.bool_)
    half[order[: np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2) + 1]] = True
    more, less = _mean_kept(case, weights * half), _mean_kept(case, weights * ~half)
    drift = 0.0
    if more is not None and less is not None and (error := math.hypot(less[1], more[1])):
        drift = (less[0] - more[0]) / error
    if length is None:
        return None, drift
    low, high = max(1, math.floor(length[0] - length[2])), math.ceil(length[0] + length[2])
    return ((low, round(length[0]), high) if high < _WIDEST * low else None), drift


def _mean_kept(case: Case, weights: Float64s) -> tuple[float, float, float] | None:
    """Mean of 1 / q by weights [N], its standard error, and half of its interval of 95 %; None: of too few places."""
    chosen = weights > 0
    clusters = len(np.unique(case.clusters[case.where[chosen]]))
    if chosen.sum() < _FEWEST or clusters < 2:
        return None
    kept = np.exp(-case.r)
    value = float((weights * kept).sum() / weights.sum())
    left = weights * (kept - value)
    sums = np.bincount(case.clusters, case.sums(left))
    error = math.sqrt(max(float(sums @ sums) * clusters / (clusters - 1), float(left @ left))) / float(weights.sum())
    return value, error, error * t_quantile(_NORMAL, clusters - 1)


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
