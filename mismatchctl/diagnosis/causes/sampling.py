"""Tests for the sampling distribution: temperature, top-p and other truncation, logit softcap, bias and penalties."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.core.batch import Float64s, Ints
from mismatchctl.core.formatting import INTERVAL_Z
from mismatchctl.diagnosis.case import Case, cached_on_case, quantile_bins
from mismatchctl.diagnosis.detection import Detection, format_interval, format_list, make_fact, percent
from mismatchctl.diagnosis.distributions import (
    SAME_SURE_EXPLAINED,
    Truncation,
    compare_same_contexts,
    estimate_kept_mass,
    estimate_temperature,
    estimate_truncation,
)
from mismatchctl.measure.metrics.metric import t_quantile
from mismatchctl.results.model import Fact

_STEEPNESS = "how the log-probs of unlikely tokens scale: 1 for a temperature, 0 for a softcap"
_WORST_CONTEXT = "largest E[ratio] - 1 over groups of contexts, in standard errors: 0 for a temperature"
_TOP_P = "top-p of the sampler, from the probability mass that it keeps"
_CUT_MASS = "E[ratio] - 1: minus the probability mass that the sampler removed, 0 without truncation"


def detect_temperature(case: Case) -> Detection | None:
    found = None if {"logit_penalty", "logit_bias"} & {*case.explained} else estimate_temperature(case)
    truncated = "truncated_sampling" in case.explained
    if truncated and compare_same_contexts(case) is not None:
        return None  # the finding for the truncation contains the temperature
    if found is None or (found.likely_sampler == "train" and not truncated) or not (found.scaled or truncated):
        return None
    told, steep = found.likely_sampler == "rollout" and not truncated, truncated or found.clearly_scaled
    rivals = {}
    if not told:
        rivals["raw_logprobs"] = "check the engine's logprobs mode, or record more tokens to cut the error of E[ratio]"
    if not steep:
        rivals["logit_softcap"] = "compare final_logit_softcapping of the two configurations. A softcap looks similar"
    if not found.sure:
        rivals["stale_policy"] = "compare rollout_version with train_version. A policy of lower entropy looks similar"
    ways = ("lower", "higher") if case.coherence.likely < 0 else ("higher", "lower")
    context = [make_fact("worst_context_z", found.misfit_z, _WORST_CONTEXT, against=found.refuted)]
    context = context if found.misfit_z else []
    one, interval = "temperature of the rollout relative to the trainer", found.interval
    return Detection(
        "high" if (found.sure and steep and (told or found.listed)) or truncated else "medium",
        f"relative to the trainer, the rollout has temperature {found.temperature:.4g} {format_interval(interval)}"[:-1]
        + f". Likely tokens have a {ways[0]} log-prob in the trainer, and unlikely tokens have a {ways[1]} log-prob",
        evidence=(
            make_fact("temperature", found.temperature, one, interval=interval),
            make_fact("steepness", found.steepness, f"{_STEEPNESS} or a constant offset", against=not steep),
            *context,
            make_fact("likely", case.coherence.likely),
            make_fact("unlikely", case.coherence.unlikely),
            make_fact("ratio_mean_minus_one", case.calibration.excess, against=not told),
            make_fact("inverse_ratio_mean_minus_one", case.calibration.inverse),
        ),
        rivals=rivals,
        leaves=case.with_fields(reshaped=True),
        everywhere=True,
    )


_TRUNCATED_STRAY_RATIO = 0.5
_TRUNCATED_Z = -6.0
_TRUNCATED_QUANTILE = 0.005
_KEPT_MIN_PLACES, _KEPT_LENGTH_Z = 30, 4.0
_UNLIKELY_P, _LEAST_P, _SAME_MASS, _MOST_SPREAD = 0.02, 0.45, 0.025, 0.3
"""For `_find_top_p`: maximum probability of an unlikely token, minimum top-p, limits on how far kept masses differ."""
_MIN_P_NOTE = "the value of min-p needs the likeliest token's probability, which only rollout_top_log_probs contain"


def detect_truncated_sampling(case: Case) -> Detection | None:
    if len(case.x) < 100 or "logit_penalty" in case.explained:
        return None
    read = estimate_truncation(case)
    if read is not None:
        return _match_truncation(case, read)
    ratio, direction = case.calibration, case.coherence
    excess, z, likely = ratio.excess, ratio.z, direction.likely
    if max(likely, direction.unlikely) < -0.7:
        bounded = np.expm1(np.minimum(case.x, _TRUNCATED_STRAY_RATIO))
        excess, z = float(bounded.mean()), case.clustered_z(bounded)
    # with less than 1e-6, rounding may be the cause
    if z > _TRUNCATED_Z or -excess < 1e-6:
        return None
    above = case.rollout[case.rows.mask]
    # log-probs above 0 do not come from a renormalized distribution
    if float(((above > 1e-3) & (above < _TRUNCATED_STRAY_RATIO)).mean()) > 0.01:
        return None
    unsure = case.r[case.r < 0]
    certain = (case.r == 0) & (case.t < min(-1e-4, float(unsure.max()) if len(unsure) else 0.0))
    zeros = float(certain.mean())
    one_sided = max(likely, direction.unlikely) < -0.4 or (not case.reshaped and _gains_only(case))
    power = compare_same_contexts(case)
    one_sided |= power is not None and power[2] > SAME_SURE_EXPLAINED  # a temperature alone does not change E[ratio]
    nucleus = zeros > 0.005
    # at nearly all positions, a sampler keeps more than 1e-6 of the mass
    if not (one_sided or nucleus) or float(np.quantile(case.x, 0.05)) < math.log(1e-6):
        return None
    if nucleus and not one_sided and float(np.exp(np.quantile(case.t[certain], 0.05))) < 0.3:
        return None  # top-p would not keep only these tokens, which the trainer finds unlikely
    if power is None:
        setting, told = _describe_setting(case, case.t[certain] if nucleus else None)
    else:
        setting, told = _describe_tempered_setting(case, *power, nucleus)
    kept, below = float(np.exp(np.quantile(case.x, _TRUNCATED_QUANTILE))), float((case.x < 0).mean())
    plain = nucleus or kept < 0.8
    rival = {"other_vocabulary": "compare the two vocabulary sizes. Padding or banned tokens look the same"}
    return Detection(
        "high" if plain and (one_sided or likely < -0.8) else "medium",
        f"{percent(below)} of the tokens have a higher log-prob in the rollout than in the trainer, because the "
        f"sampler removed {percent(-excess)} of the probability mass. Estimated setting: {setting}",
        share=_share_below(case),
        evidence=(
            make_fact("ratio_mean_minus_one", excess, _CUT_MASS),
            make_fact("z", z, "E[ratio] - 1 in standard errors"),
            make_fact("one_sided", below, "share of tokens with a lower log-prob in the trainer: 0.5 for noise"),
            make_fact("exact_zeros", zeros, "share of tokens with a rollout log-prob of 0", against=not nucleus),
            make_fact("kept_mass", kept, "estimate of the smallest probability mass that the sampler kept"),
            *told,
        ),
        where={"tokens": percent(below)},
        rivals={} if plain else rival,
        leaves=case.with_fields(reshaped=True),
        everywhere=True,
    )


def _gains_only(case: Case) -> bool:
    losses = case.scaled[case.x > 0]
    if len(losses) < 50:  # too few tokens to estimate the noise
        return False
    limit = max(7.5 * float(np.median(losses)), 0.02)
    gain, loss = float((case.scaled < -limit).mean()), float((case.scaled > limit).mean())
    return gain > 0.05 and loss < 0.02 * gain


def _share_below(case: Case) -> float:
    return min(1.0, float(np.abs(case.x[case.x < 0]).sum() / max(np.abs(case.x).sum(), 1e-300)))


def _match_truncation(case: Case, read: Truncation) -> Detection:
    ratio, kept = case.calibration, "mean probability mass that the sampler kept, at positions with removed tokens"
    return Detection(
        "high" if read.name else "medium",
        "rollout_top_log_probs lacks tokens to which the trainer gives a probability. At such positions, "
        f"the rollout keeps {percent(read.mass)} of the probability mass. Estimated setting: {read.setting}",
        share=_share_below(case),
        evidence=(
            make_fact(read.name or "kept_mass", read.value, "setting, from the lists", interval=read.interval),
            make_fact("kept_mass", read.mass, kept),
            make_fact("ratio_mean_minus_one", ratio.excess, _CUT_MASS, against=ratio.z > _TRUNCATED_Z),
        ),
        rivals={} if read.name else {"other_vocabulary": "check whether the excluded tokens are banned on the engine"},
        leaves=case.with_fields(reshaped=True),
        everywhere=True,
    )


def _describe_setting(case: Case, certain: Float64s | None) -> tuple[str, list[Fact]]:
    """Estimate which truncation the sampler used. Return a description and the evidence.

    `certain` contains the trainer's log-probs of tokens that were the sampler's only choice. The ratio of a token shows
    how much probability mass the sampler kept: top-p keeps a mass of p or slightly more at every position, and top-k
    keeps k tokens.
    """
    mass, p = np.exp(np.minimum(case.x, 0.0)), np.exp(np.minimum(case.t, 0.0))
    ends = float(np.quantile(mass - p, 1 - _TRUNCATED_QUANTILE)), float(np.quantile(mass, _TRUNCATED_QUANTILE))
    length, drift = _estimate_kept_tokens(case, 1 - mass)
    nucleus = ends[0] - ends[1] < 0.15
    if certain is not None and nucleus:
        low, p_low, high = (float(np.exp(value)) for value in _estimate_nucleus(certain))
        said = f"top-p of about {p_low:.3g} (a token above this probability is the only choice, with log-prob 0)"
        meaning = "top-p of the sampler, from the least probable token that was the only choice"
        return said, [make_fact("top_p", p_low, meaning, interval=(low, high))]
    level = _find_top_p(case)
    if level is not None:
        value, interval = level
        said = f"top-p of about {value:.3g} (all positions with an unlikely token keep the same probability mass)"
        return said, [make_fact("top_p", value, _TOP_P, interval=interval)]
    if nucleus and drift < -_KEPT_LENGTH_Z:
        least, most = sorted(ends)
        said = f"top-p between {least:.3g} and {most:.3g}"
        return said, [make_fact("top_p", (least + most) / 2, _TOP_P, interval=(least, most))]
    if drift > _KEPT_LENGTH_Z:
        return f"min-p (positions that keep more tokens lose less probability mass; {_MIN_P_NOTE})", []
    if certain is not None:
        return f"top-p or min-p (not distinguishable, because some positions keep one token; {_MIN_P_NOTE})", []
    return _describe_top_k(length)


def _describe_top_k(length: tuple[int, int, int] | None) -> tuple[str, list[Fact]]:
    if length is None:
        return "top-k (too few positions lose a tenth of the probability mass to estimate k)", []
    fewest, k, most_kept = length
    said = f"{fewest:,} to {most_kept:,}; all positions keep the same number of tokens"
    meaning = "top-k of the sampler, from the number of tokens that it keeps"
    return f"top-k of about {k:,} ({said})", [make_fact("top_k", k, meaning, interval=(fewest, most_kept))]


def _describe_tempered_setting(
    case: Case, b: float, ends: tuple[float, float], explained: float, nucleus: bool = False
) -> tuple[str, list[Fact]]:
    meaning = "temperature of the rollout relative to the trainer, from different tokens after the same prefix"
    if explained < SAME_SURE_EXPLAINED:
        said = f"a temperature of about {1 / b:.2g} together with other settings (top-p, top-k, min-p, penalties)"
        return said, [make_fact("temperature", 1 / b, f"estimated {meaning}")]
    interval = 1 / ends[1], 1 / ends[0]
    facts = [make_fact("temperature", 1 / b, meaning, interval=interval)]
    said = f"temperature {1 / b:.3g} {format_interval(interval)}and "
    mass, flat = estimate_kept_mass(case, b)
    if len(flat) > 1:
        low, value, high = (float(end) for end in np.quantile(flat, (0.25, 0.5, 0.75)))
        # With min-p, `flat` has a larger quartile range. A recorded entropy makes the estimates of top-p more precise.
        error = (0.05, 0.02)["entropy" in case.rows.extra_columns]
        if high - low < 0.045 and value < 1:
            half = max(high - low, error)
            ends = value - half, min(value + half, 1.0)
            facts.append(make_fact("top_p", value, f"{_TOP_P} at this temperature", interval=ends))
            return f"{said}top-p of about {value:.3g} {format_interval(ends)}".rstrip(), facts
    length, drift = _estimate_kept_tokens(case, 1 - mass)
    if nucleus or abs(drift) > _KEPT_LENGTH_Z:
        return f"{said}top-p or min-p (not distinguishable)", facts
    setting, told = _describe_top_k(length)
    return said + setting, facts + told


def _find_top_p(case: Case) -> tuple[float, tuple[float, float]] | None:
    """Return top-p and its interval, or `None` if the kept mass does not look like top-p.

    The kept mass is the trainer's probability of all tokens that the sampler could choose. If an unlikely token was
    sampled, the mass that top-p kept is close to top-p. With top-k or min-p, the kept mass varies.
    """
    small = np.flatnonzero(case.t < math.log(_UNLIKELY_P))
    if len(small) < _KEPT_MIN_PLACES * 3:
        return None
    order = small[np.argsort(case.t[small], kind="stable")]
    parts = np.array_split(order, 3)
    medians = [float(np.exp(np.median(case.x[part]))) for part in parts]
    value = float(np.exp(np.median(case.x[small])))
    quartiles = np.exp(np.quantile(case.x[small], (0.25, 0.75)))
    error = 1.25 / 1.35 * float(np.ptp(quartiles)) / math.sqrt(len(small) / 3)
    if not _LEAST_P < value < 1 or max(medians) - min(medians) > max(_SAME_MASS, min(4 * error, 2 * _SAME_MASS)):
        return None
    if 1 - value < 3 * error or float(np.ptp(quartiles)) > _MOST_SPREAD:
        return None
    half = max(2 * error, 0.003) + _UNLIKELY_P / 4
    return value, (max(value - half, 0.0), min(value + half, 1.0))


def _estimate_kept_tokens(case: Case, cut: Float64s) -> tuple[tuple[int, int, int] | None, float]:
    """Estimate how many tokens the sampler keeps (low, estimate, high), and a z-score that shows if the number varies.

    On average, 1 / (rollout probability) is the number of kept tokens. Positions are weighted by the square of `cut`,
    the removed mass. The z-score is positive if positions with less removed mass keep more tokens.
    """
    length = _estimate_mean_kept(case, np.maximum(cut - 0.1, 0.0) ** 2)
    weights = np.where(cut > 0.03, cut, 0.0) ** 2
    order = np.argsort(-cut)
    half = np.zeros(len(cut), np.bool_)
    half[order[: np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2) + 1]] = True
    more, less = _estimate_mean_kept(case, weights * half), _estimate_mean_kept(case, weights * ~half)
    drift = 0.0
    if more is not None and less is not None and (error := math.hypot(less[1], more[1])):
        drift = (less[0] - more[0]) / error
    if length is None:
        return None, drift
    low, high = max(1, math.floor(length[0] - length[2])), math.ceil(length[0] + length[2])
    return ((low, round(length[0]), high) if high < 3.0 * low else None), drift


def _estimate_mean_kept(case: Case, weights: Float64s) -> tuple[float, float, float] | None:
    """Return the weighted mean of 1 / (rollout probability), its standard error, and half the width of its interval."""
    chosen = weights > 0
    clusters = len(np.unique(case.clusters[case.where[chosen]]))
    if chosen.sum() < _KEPT_MIN_PLACES or clusters < 2:
        return None
    kept = np.exp(-case.r)
    value = float((weights * kept).sum() / weights.sum())
    left = weights * (kept - value)
    sums = np.bincount(case.clusters, case.sums(left))
    error = math.sqrt(max(float(sums @ sums) * clusters / (clusters - 1), float(left @ left))) / float(weights.sum())
    return value, error, error * t_quantile(INTERVAL_Z, clusters - 1)


def _estimate_nucleus(certain: Float64s) -> tuple[float, float, float]:
    """Estimate log(top-p) and its interval (low, estimate, high) from tokens that were the sampler's only choice.

    `certain` contains the trainer's log-probs of these tokens. Each is log(top-p) or more, so the smallest is a good
    estimate. The interval assumes that log-probs just above log(top-p) are evenly distributed.
    """
    ordered = np.sort(certain)
    count = max(1, min(max(len(ordered) // 20, 6), len(ordered) - 1))
    reach = (0.05 ** (-1 / count) - 1) * float(ordered[min(count, len(ordered) - 1)] - ordered[0])
    estimate, above = ordered[len(ordered) // 500], ordered[len(ordered) // 100]
    return float(ordered[0]) - reach, float(estimate), float(above) + reach


def detect_raw_logprobs(case: Case) -> Detection | None:
    found = None if {"logit_penalty", "logit_bias"} & {*case.explained} else estimate_temperature(case)
    if found is None:
        return _compare_entropy(case)
    if found.likely_sampler != "train" or case.reshaped or not (found.scaled or found.sure):
        return None
    interval = found.interval and (1 / max(found.interval[1], 1e-9), 1 / max(found.interval[0], 1e-9))
    own, ratio = 1 / found.temperature, case.calibration
    known = "temperature of the trainer relative to the rollout column"
    return Detection(
        "high" if found.sure and found.clearly_scaled else "medium",
        f"the trainer's log-probs belong to the sampling distribution. Relative to the rollout column, they have "
        f"temperature {own:.4g} {format_interval(interval)}"[:-1]
        + ". The engine reports log-probs from before its temperature",
        evidence=(
            make_fact("temperature", own, known, interval=interval),
            make_fact("ratio_mean_minus_one", ratio.excess),
            make_fact("inverse_ratio_mean_minus_one", ratio.inverse),
            make_fact("z", ratio.z, "E[ratio] - 1 in standard errors"),
            make_fact("inverse_z", ratio.inverse_z, "E[1 / ratio] - 1 in standard errors"),
        ),
        rivals={"temperature": "check the engine's logprobs mode. With a wrong trainer temperature, E[ratio] is 1"},
        leaves=case.with_fields(reshaped=True),
        everywhere=True,
    )


def _compare_entropy(case: Case) -> Detection | None:
    """Compare the mean negative log-prob with the mean recorded entropy, which are equal for sampled tokens."""
    entropy = case.token_column("entropy")
    filled = case.filled and {*case.explained} != {"low_precision_logging"}  # rounding keeps the mean
    if entropy is None or case.reshaped or filled or case.noise > 0.1:
        return None
    known, surprise = np.isfinite(entropy), -(case.r + case.t) / 2
    if known.sum() < 500:
        return None
    apart = np.where(known, surprise - entropy, 0.0)
    mean, usual, own = (float(values[known].mean()) for values in (apart, entropy, surprise))
    z = case.clustered_z(apart)
    if usual <= 0 or abs(z) < 6.0 or abs(mean) < 0.02 * usual:
        return None
    colder = mean < 0
    kind = (
        "the sampling distribution is sharper (a lower temperature, top-p, top-k or greedy decoding)"
        if colder
        else "the sampling distribution is flatter, or the entropy belongs to other tokens or to another temperature"
    )
    return Detection(
        "high" if colder and abs(z) > 8.0 and own / usual < 0.95 else "medium",
        "the two columns agree but do not belong to the sampling distribution. The mean negative log-prob is "
        f"{own:.3g} nats and the mean recorded entropy is {usual:.3g} nats, and sampling makes the two equal. "
        f"Therefore, {kind}",
        k3=0.0,
        evidence=(
            make_fact("surprise", own, "mean negative log-prob of the tokens, nats"),
            make_fact("entropy", usual, "mean recorded entropy of the same tokens, nats"),
            make_fact("surprise_over_entropy", own / usual, "surprise / entropy: 1 for the sampling distribution"),
            make_fact("z", z, "mean negative log-prob minus recorded entropy, in standard errors"),
        ),
        rivals={"low_entropy": "check which temperature and tokens the recorded entropy belongs to"},
        everywhere=True,
    )


def detect_logit_softcap(case: Case) -> Detection | None:
    if {"logit_penalty", "logit_bias", "truncated_sampling"} & {*case.explained} or case.reshaped:
        return None
    found = estimate_temperature(case)
    if found is None or not found.bounded or not found.sure or found.likely_sampler == "train":
        return None
    side = "rollout" if case.coherence.likely > 0 else "trainer"
    why = "no temperature fits all contexts" if found.refuted else "unlikely tokens keep their differences"
    return Detection(
        "medium",
        f"in the {side}, likely tokens have lower log-probs and unlikely tokens have higher log-probs, as with another "
        f"temperature. However, {why}. The {side} bounds large logits, and the other side does not",
        evidence=(
            make_fact("steepness", found.steepness, _STEEPNESS),
            make_fact("steepness_error", found.steepness_error, "standard error of the steepness"),
            make_fact("worst_context_z", found.misfit_z, _WORST_CONTEXT),
            make_fact("likely", case.coherence.likely),
            make_fact("unlikely", case.coherence.unlikely),
        ),
        where={"tokens": "all", "side": side},
        rivals={
            "temperature": "compare the sampling temperatures of the two sides",
            "weights_differ": "compare checksums of the weights. A sharper policy looks similar",
        },
        leaves=case.with_fields(reshaped=True),
        everywhere=True,
    )


_BIAS_MIN_COUNT = 6


def detect_logit_bias(case: Case) -> Detection | None:
    ids = case.rows.extra_columns.get("token_ids")
    if ids is None or case.reshaped or len(case.x) < 300:
        return None
    logits = [values - np.log(-np.expm1(np.minimum(values, -1e-9))) for values in (case.r, case.t)]
    apart = logits[0] - logits[1]
    names, index, counts = np.unique(ids[case.index], return_inverse=True, return_counts=True)
    mean = np.bincount(index, apart) / counts
    spread = np.sqrt(np.maximum(np.bincount(index, apart * apart) / counts - mean * mean, 0.0))
    steady = (counts >= _BIAS_MIN_COUNT) & (np.abs(mean) > 0.15) & (spread < 0.35 * np.abs(mean))
    steady &= np.abs(mean) > 8.0 * np.maximum(spread, case.noise) / np.sqrt(counts)
    known = counts >= _BIAS_MIN_COUNT
    if not steady.any() or steady.sum() > 0.2 * known.sum():
        return None
    chosen = steady[index]
    held = float(case.k3[chosen].sum() / max(float(case.k3.sum()), 1e-300))
    rest = float(np.median(np.abs(apart[~chosen])))
    size = float(np.median(mean[steady]))
    if held < 0.4 or rest > 0.3 * abs(size):
        return None
    ratio = case.calibration
    sampled = min(abs(ratio.z), abs(ratio.inverse_z)) < 6.0  # with a bias, one side has the sampler's log-probs
    return Detection(
        "high" if held > 0.6 and steady.sum() >= 2 and sampled else "medium",
        f"{int(steady.sum())} of {len(names)} tokens of the vocabulary are {abs(size):.2g} "
        f"{'higher' if size > 0 else 'lower'} in the rollout's logits at every position, and cause {percent(held)} of "
        f"K3. The other tokens differ by {rest:.2g}. One side has a logit bias on some tokens",
        share=case.share(case.marked(chosen)),
        evidence=(
            make_fact("bias", size, "median offset of the biased tokens in the logits, rollout minus train"),
            make_fact("tokens", format_list(names[steady].tolist(), 8), "ids of the biased tokens"),
            make_fact("k3_share", held, "share of K3 from the biased tokens"),
            make_fact("others", rest, "median offset of all other tokens"),
        ),
        where={"tokens": f"ids {format_list(names[steady].tolist(), 4)}"},
        examples=case.find_loudest(case.counts > 0, case.sums(case.k3 * chosen)),
        rivals={"weights_differ": "check the engine's logit_bias, bad_words, allowed tokens, and new embedding rows"},
        everywhere=True,
    )


_PENALTY_MIN_TOKENS = 100


@cached_on_case
def count_earlier(case: Case) -> Ints:
    ids = case.rows.extra_columns["token_ids"][case.index].astype(np.int64)
    pairs = case.where * (ids.max(initial=0) + 1) + ids
    order = np.argsort(pairs, kind="stable")
    sorted_pairs = pairs[order]
    first = np.append(True, sorted_pairs[1:] != sorted_pairs[:-1])
    starts = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    counts = np.empty(len(order), np.int64)
    counts[order] = np.arange(len(order)) - starts
    return counts


def detect_logit_penalty(case: Case) -> Detection | None:
    ids = case.rows.extra_columns.get("token_ids")
    if ids is None or case.reshaped or len(case.x) < 2 * _PENALTY_MIN_TOKENS or case.noise < 1e-3:
        return None
    before = count_earlier(case)
    fresh, again = before == 0, before > 0
    if min(fresh.sum(), again.sum()) < _PENALTY_MIN_TOKENS:
        return None
    up, down = float(np.median(case.scaled[again])), float(np.median(case.scaled[fresh]))
    one, other = sorted((abs(up), abs(down)))  # a penalty changes repeated and new tokens in opposite directions
    small = abs(up - down) < 0.3 * case.noise or one < 0.1 * other
    apart, z = _repetition_difference(case, np.clip(case.standard, -4, 4), again)
    plain = abs(z) > 20.0 and abs(apart) > 1.5 and up * apart > 0
    if (up * down >= 0 or small) and not plain:
        return None
    if abs(z) < 6.0 or abs(apart) < 0.4:
        return None
    often, facts = before > 2, []
    if often.sum() > _PENALTY_MIN_TOKENS and up:
        meaning = "offset after 3 earlier occurrences / offset of repeated tokens: above 1 for a frequency penalty"
        facts = [make_fact("after_two", float(np.median(case.scaled[often])) / up, meaning)]
    side, way = "rollout" if apart > 0 else "trainer", "higher" if up * down < 0 else "lower"
    sure = abs(z) > 10.0 and abs(apart) > 0.6
    return Detection(
        "high" if sure else "low",  # other weights can cause such a small change too
        f"in the logits of the {side}, tokens that occurred earlier in the response are {abs(up):.2g} lower, and all "
        f"other tokens are {abs(down):.2g} {way}. The {side} has a repetition, presence or frequency penalty, and the "
        "other side does not",
        evidence=(
            make_fact("apart", apart, "mean difference between repeated and new tokens / noise of the logits"),
            make_fact("z", z, "difference between repeated and new tokens, in standard errors over sequences"),
            make_fact("repeated", up, "median difference of repeated tokens, in logits (train minus rollout)"),
            make_fact("fresh", down, "median difference of new tokens, in logits: the opposite sign for a penalty"),
            *facts,
        ),
        where={"tokens": "tokens that occurred earlier in their response", "side": side},
        examples=case.find_loudest(case.counts > 0, case.sums(np.abs(case.x) * again)),
        rivals={"weights_differ": f"check the penalties and logit_bias of the {side}"},
        everywhere=sure,
    )


def _repetition_difference(case: Case, size: Float64s, again: np.ndarray) -> tuple[float, float]:
    """Return how much larger `size` is for repeated than for new tokens (similar probability and place), and z."""
    bins = np.zeros(len(size), np.int64)
    for values, parts in ((case.t, 8), (case.place, 4)):
        bins = bins * parts + quantile_bins(values, parts)
    number = np.maximum(np.bincount(bins), 1)
    share, mean = (np.bincount(bins, values) / number for values in (again, size))
    across = again - share[bins]
    spread = float((across * across).sum())
    if spread == 0:
        return 0.0, 0.0
    value = float((across * (size - mean[bins])).sum()) / spread
    sums = case.sums(across * (size - mean[bins] - value * across))
    error = float(np.sqrt((sums * sums).sum())) / spread
    return value, value / error if error > 0 else 0.0


def detect_sampling_settings(case: Case) -> Detection | None:
    """Report several sampler settings as one cause, because one configuration file can set all of them."""
    names = [name for name in ("temperature", "truncated_sampling", "logit_penalty") if name in case.explained]
    power = compare_same_contexts(case) if "truncated_sampling" in names else None
    if len(names) + (power is not None) < 2 or "sampling_settings" in case.explained:
        return None
    facts, parts = [], []
    if "temperature" in names:
        found = estimate_temperature(case)
        if found is not None:
            meaning = "estimated temperature of the rollout relative to the trainer"
            facts.append(make_fact("temperature", found.temperature, meaning))
            parts.append(f"a temperature of about {found.temperature:.2g}")
    if "truncated_sampling" in names:
        said, told = _describe_setting(case, None) if power is None else _describe_tempered_setting(case, *power)
        facts += told
        parts.append(said)
    if "logit_penalty" in names:
        parts.append("a penalty on repeated tokens")
    if len(parts) + (power is not None) < 2:
        return None
    return Detection(
        "medium",
        f"several sampler settings act on the rollout only: {'; '.join(parts)}. With several settings, each estimate "
        "is less precise. The model's generation_config.json can set all of them",
        evidence=tuple(facts),
        where={"tokens": "all"},
        rivals={"temperature": "check the sampling parameters of a request in the engine's log"},
    )
