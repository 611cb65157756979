"""Causes in arithmetic and model weights: noise, a quantized cache, MoE routing, other or quantized weights."""

from __future__ import annotations

import numpy as np

from mismatchctl.core.formatting import format_count
from mismatchctl.core.ratios import DENSE_RANGE, MOE_RANGE
from mismatchctl.diagnosis.case import Case, Detection, cached_on_case
from mismatchctl.diagnosis.causes.rows import loudness_rise
from mismatchctl.diagnosis.measures import (
    BFLOAT16_NOISE,
    FLOAT32_NOISE,
    SYSTEMATIC_MEANING,
    TOKEN_BOUND_SHARE,
    UNRELATED_CORRELATION,
    calibration,
    certain_tokens_differ,
    coherence,
    column_correlation,
    drift_correlation,
    find_loudest,
    find_row_kinds,
    is_greedy,
    is_one_sided,
    make_fact,
    make_noise_fact,
    percent,
    systematic_share,
)
from mismatchctl.results.model import Confidence

_NOISE_MIN_TOKENS = 200
_FLOAT32_SPREAD, _BFLOAT16_SPREAD = 1e-3, 0.05
"""Upper bounds of `Case.spread` for float32 and bfloat16."""
_TAIL_FACTOR, _TAIL_MIN_NOISE = 12.0, 0.012
_LIGHT_TAIL, ROUTED_TAIL, _MAX_ROUTED_TAIL = 0.3, 0.7, 0.95
"""Share of K3 beyond the tail: dense models below, mixtures of experts from and to."""
_LARGER_MODEL_FACTOR = 3.0
"""Larger or more certain models may have this multiple of the bound, which comes from small models."""
_NEAR_BOUND_FACTOR = 1.25
_NOISE_TRACE_SHARE = 0.004
_CACHE_LIKE = (8.0, 35.0)
"""Kurtosis of the noise of fp8 caches (3 to 22). Dense models have up to 8, mixtures of experts 42 and more."""
_FITTING_Z = 4.0
_ROUNDING_BIAS = 1e-6
"""E[ratio] - 1 that rounding to float32 can cause."""
MIN_STRUCTURE_TOKENS = 3000
"""Minimum tokens to detect structure in the noise."""


@cached_on_case
def tail_shares(case: Case) -> tuple[float, float]:
    """Return the shares of K3 and of tokens with differences above 12 times the noise."""
    far = np.abs(case.scaled) > _TAIL_FACTOR * max(case.noise, _TAIL_MIN_NOISE)
    whole = float(case.k3.sum())
    return (float(case.k3[far].sum()) / whole if whole > 0 else 0.0), float(far.mean()) if len(far) else 0.0


def is_plain_noise(case: Case) -> bool:
    share, _ = tail_shares(case)
    small = case.noise < BFLOAT16_NOISE and case.spread < _BFLOAT16_SPREAD
    return small and share < _LIGHT_TAIL and _is_balanced(case, _FITTING_Z)


def may_be_larger(case: Case) -> bool:
    """Return True if bfloat16 may cause the noise in a larger model or in a model that is more certain."""
    small = BFLOAT16_NOISE <= case.noise < _LARGER_MODEL_FACTOR * BFLOAT16_NOISE
    return small and _is_balanced(case) and float(case.k3.mean()) < MOE_RANGE[1]


def is_near_bound(case: Case) -> bool:
    """Return True if the noise is so close to a bound that its size alone is no evidence."""
    return BFLOAT16_NOISE <= case.noise < _NEAR_BOUND_FACTOR * BFLOAT16_NOISE


def _is_balanced(case: Case, most: float = 5.0) -> bool:
    ratio = calibration(case)
    return abs(ratio.z) < most or abs(ratio.excess) < _ROUNDING_BIAS


def detect_numerical_noise(case: Case) -> Detection | None:
    if case.reshaped or case.filled or not len(case.x) or case.noise + case.spread == 0:
        return None
    k3, mean = float(case.k3.mean()), float(np.abs(case.x).mean())
    (share, far), uneven = tail_shares(case), _unevenness(case)
    balanced, few = _is_balanced(case), len(case.x) < _NOISE_MIN_TOKENS
    usual = case.noise < BFLOAT16_NOISE or (may_be_larger(case) and share >= ROUTED_TAIL)
    tailed, cached = share >= _LIGHT_TAIL, _CACHE_LIKE[0] < uneven < _CACHE_LIKE[1] and case.noise > FLOAT32_NOISE
    confidence: Confidence = "low"
    if is_plain_noise(case) and not few and not cached:
        confidence = "high"
    elif usual and balanced and share < _MAX_ROUTED_TAIL and k3 < MOE_RANGE[1] and not few:
        confidence = "medium"
    place = "below" if k3 < DENSE_RANGE[0] else "above" if k3 >= MOE_RANGE[1] else "within"
    models = "dense models" if k3 < DENSE_RANGE[1] else "mixtures of experts"
    summary = (
        f"{'only noise' if confidence == 'high' else 'mostly noise'}: mean |log ratio| {mean:.2g} nats, "
        f"{_describe_arithmetic(case)}; K3 {k3:.2g} is {place} what {models} usually show"
    )
    if confidence == "medium" and tailed:
        summary += f", but {percent(far)} of the tokens cause {percent(share)} of the K3, beyond the tail of the noise"
    if confidence != "low":
        summary += _describe_trace(case)
    if cached:
        summary += ". Its size differs between positions, as with an 8-bit cache"
    if few:
        summary += f". {len(case.x):,} tokens are too few to exclude other causes"
    rivals = {"moe_routing": "is this a mixture of experts? Record rollout_experts and train_experts"} if tailed else {}
    if cached:
        rivals["cache_quantization"] = "the engine's kv_cache_dtype and the dtype of the model"
    if case.noise > FLOAT32_NOISE and confidence != "low":
        rivals["quantized_rollout"] = "the engine's --quantization: weights in 8 bits can make the same noise"
    bounds = f"of the logits, robust; float32 stays below {FLOAT32_NOISE:g}, bfloat16 below {BFLOAT16_NOISE:g}"
    kurtosis = f"kurtosis of the noise: 3 if it is normal, {_CACHE_LIKE[0]:g} at most in dense models in bfloat16"
    ranges = f"dense models: {DENSE_RANGE[0]:g} to {DENSE_RANGE[1]:g}, mixtures of experts: to {MOE_RANGE[1]:g}"
    beyond, z = "share of the K3 on tokens beyond 12 times the noise", calibration(case).z
    return Detection(
        confidence,
        summary,
        evidence=(
            make_fact("noise", case.noise, bounds),
            make_fact("spread", case.spread, "noise of the logits that would cause the whole K3, its tail included"),
            make_fact("unevenness", uneven, kurtosis, against=cached),
            make_fact("difference", mean, "mean |log ratio|, nats"),
            make_fact("k3", k3, ranges, against=k3 > MOE_RANGE[1]),
            make_fact("tail_k3", share, beyond, against=tailed),
            make_fact(
                "ratio_mean_z",
                z,
                "E[ratio] - 1 in standard errors: near 0 if the rollout column is the sampling distribution",
                against=not balanced,
            ),
        ),
        rivals=rivals,
        everywhere=True,
    )


def _unevenness(case: Case) -> float:
    """Return the kurtosis of the noise of uncertain tokens, at most 30."""
    values = np.clip(case.standard[case.doubtful], -30, 30)
    power = float((values**2).mean()) if len(values) else 0.0
    return float((values**4).mean()) / power**2 if power > 0 else 3.0


def _describe_arithmetic(case: Case) -> str:
    if case.noise < FLOAT32_NOISE and case.spread < _FLOAT32_SPREAD:
        return "as float32 arithmetic makes it"
    if case.noise < BFLOAT16_NOISE:
        return "as bfloat16 arithmetic makes it"
    if may_be_larger(case):
        return (
            "more than bfloat16 arithmetic causes in small models; larger or more certain models, experts or a cache "
            "in low precision can cause it"
        )
    return "above what bfloat16 arithmetic makes"


def _describe_trace(case: Case) -> str:
    if case.noise < FLOAT32_NOISE:
        return ""
    shared, z = systematic_share(case)
    if shared < _NOISE_TRACE_SHARE or z < 4:
        return ". Weights or a cache in 8 bits can make the same noise: check the engine's settings"
    return (
        f". {percent(shared)} of the variance depends on the token alone: the sides round the weights differently, "
        "to bfloat16 or to 8 bits; both look the same at this size"
    )


_CACHE_MIN_LENGTH, _CACHE_Z, _CACHE_SURE_Z, _CACHE_FAR_Z = 36, 2.5, 6.0, 5.0
_CACHE_SYSTEMATIC_SHARE = 0.02
_CACHE_ROUNDED_FACTOR = 2.0
_EVEN_Z, _EVEN_SPREAD, _EVEN_MAX_NOISE = 3.0, 1.1, 0.4
"""Noise that is not tied to tokens and has no tail. Dropout has 1.2 times the spread."""
_CACHE_USUAL_NOISE, _CACHE_MAX_NOISE = 0.07, 0.2


def detect_cache_quantization(case: Case) -> Detection | None:
    if case.reshaped or case.filled or not BFLOAT16_NOISE < case.noise < _EVEN_MAX_NOISE or len(case.x) < 200:
        return None
    shared, shared_z = systematic_share(case)
    even = abs(shared_z) < _EVEN_Z and case.spread < _EVEN_SPREAD * case.noise
    if case.noise >= _CACHE_MAX_NOISE and not even:
        return None
    if (shared > _CACHE_SYSTEMATIC_SHARE and shared_z > 4) or certain_tokens_differ(case):
        return None
    if find_row_kinds(case) is not None:
        return None
    (growth, z), (share, _) = _loudness_growth(case), tail_shares(case)
    ratio_z, grows, times = calibration(case).z, z > _CACHE_Z and growth > 0.05, float(np.exp(growth))
    balanced = abs(ratio_z) < _CACHE_FAR_Z
    size = case.noise < _CACHE_MAX_NOISE if grows else case.noise < _CACHE_USUAL_NOISE and not is_near_bound(case)
    size |= even and not is_near_bound(case)
    plausible = size and len(case.x) >= MIN_STRUCTURE_TOKENS and share < ROUTED_TAIL  # a cache moves every token
    rounded = "low_precision_logging" in case.explained and case.noise < _CACHE_ROUNDED_FACTOR * BFLOAT16_NOISE
    confidence: Confidence = "low"
    if balanced and plausible and not rounded:
        confidence = "high" if grows and z > _CACHE_SURE_Z and case.noise < _CACHE_USUAL_NOISE else "medium"
    rivals = {
        "numerical_noise": "the same prompts with the cache in bfloat16 (kv_cache_dtype=auto): is the noise smaller?",
        "random_noise": "score a batch twice with the trainer: with dropout, the results differ",
        "weights_differ": "checksums of the weights on both sides",
    }
    if rounded:
        rivals["low_precision_logging"] = "the same log-probs with all their digits"
    meanings = {
        "late": "noise in the last third of a response over the noise in its middle third",
        "shared": "share of the variance tied to tokens of the vocabulary: small, so the weights agree",
        "tail": "share of the K3 on tokens beyond 12 times the noise: a quantized cache has most of the K3 below",
        "ratio": "E[ratio] - 1 in standard errors: near 0 for noise",
    }
    return Detection(
        confidence,
        f"noise of {case.noise:.2g} in the logits, {case.noise / BFLOAT16_NOISE:.2g} times the most that bfloat16 "
        "makes, not tied to tokens of the vocabulary"
        + (f" and {times:.3g} times larger late in the response than in its middle" if grows else "")
        + (", and of one size in all contexts, as with 8-bit arithmetic" if even else ""),
        evidence=(
            make_noise_fact(case),
            make_fact("late_over_middle", times, meanings["late"], against=not grows),
            make_fact("z", z, "the value above, in standard errors", against=not grows),
            make_fact("systematic", shared, meanings["shared"]),
            make_fact("tail_k3", share, meanings["tail"], against=share >= ROUTED_TAIL),
            make_fact("ratio_mean_z", ratio_z, meanings["ratio"], against=not balanced),
        ),
        where={"positions": "late in the response" if grows else "everywhere"},
        examples=find_loudest(case, case.counts >= _CACHE_MIN_LENGTH, case.means(np.abs(case.scaled))),
        rivals=rivals,
        everywhere=True,
    )


def _loudness_growth(case: Case) -> tuple[float, float]:
    """Return how much the log noise grows from the middle to the last third of responses, and its z-score."""
    long = case.counts >= _CACHE_MIN_LENGTH
    share = case.place / np.maximum(case.each(case.counts), 1)
    thirds = [case.doubtful & (share >= low) & (share < high) for low, high in ((1 / 3, 2 / 3), (2 / 3, 1.0))]
    middle, late = (case.part_means(case.loudness, third) for third in thirds)
    rises = (late - middle)[long]
    if len(rises) < 10:
        return 0.0, 0.0
    return float(rises.mean()), float(rises.mean() / (rises.std() / np.sqrt(len(rises)) + 1e-12))


_ROUTING_NOISE_RANGE = (1e-3, 0.05)
_ROUTING_FAR, _ROUTING_FARTHER = (12.0, 1.2e-3), (20.0, 3e-4)
_MAX_EXPERTS_PER_TOKEN = 8


def detect_moe_routing(case: Case) -> Detection | None:
    sides = [case.rows.tokens.get(name) for name in ("rollout_experts", "train_experts")]
    if sides[0] is not None and sides[1] is not None and sides[0].shape == sides[1].shape and sides[0].ndim == 2:
        return _match_experts(case, sides[0], sides[1])
    return _match_tails(case)


def _match_experts(case: Case, rollout: np.ndarray, train: np.ndarray) -> Detection | None:
    a, b = rollout[case.index], train[case.index]
    if np.isnan(a.sum() + b.sum()):
        return None  # the experts of some sequences are unknown
    width = _experts_per_layer(a)
    layers = a.shape[1] // width
    one, other = (np.sort(side.reshape(len(a), layers, width), axis=2) for side in (a, b))
    by_layer = (one != other).any(axis=2)
    flipped = by_layer.any(axis=1)
    if not flipped.any():
        return None
    inside, outside = float(case.k3[flipped].mean()), float(case.k3[~flipped].mean()) if not flipped.all() else 0.0
    share, rate = float(case.k3[flipped].sum() / max(case.k3.sum(), 1e-300)), float(flipped.mean())
    sure, layer_rates = share > 0.3 and inside > 3 * outside and not case.explained, by_layer.mean(axis=0)
    z, rates = (
        case.clustered_z(np.where(flipped, case.k3 - outside, 0.0)),
        [f"{100 * r:.2g}%" for r in layer_rates[:64]],
    )
    return Detection(
        "high" if sure else "medium" if share > 0.1 else "low",
        f"both sides chose different experts for {percent(rate)} of the tokens, which cause {percent(share)} of the K3 "
        f"(mean K3 {inside:.2g} on these tokens, {outside:.2g} on others)",
        share=case.share(case.marked(flipped)),
        k3=share * max(0.0, 1 - outside / inside) if inside > 0 else 0.0,
        evidence=(
            make_fact("disagreement", rate, "share of tokens whose experts differ in some layer"),
            make_fact("k3_where_they_differ", inside, "mean K3 of these tokens"),
            make_fact("k3_where_they_agree", outside, "mean K3 of other tokens"),
            make_fact("k3_share", share, "share of the K3 on these tokens"),
            make_fact("z", z, "K3 of these tokens minus K3 of other tokens, in standard errors"),
            make_fact("by_layer", ", ".join(rates), "tokens whose experts differ, by layer"),
        ),
        where={
            "layers": f"most in layer {int(np.argmax(layer_rates))} of {layers}, counted from 0",
            "tokens": percent(rate),
        },
        examples=find_loudest(case, case.counts > 0, case.sums(flipped * case.k3)),
    )


def _experts_per_layer(experts: np.ndarray) -> int:
    """Return the number of experts per layer: the largest group without a repeated expert."""
    some = experts[:: max(1, len(experts) // 512)]
    best = 1
    for width in range(2, _MAX_EXPERTS_PER_TOKEN + 1):
        if experts.shape[1] % width == 0:
            groups = np.sort(some.reshape(-1, width), axis=1)
            if (np.diff(groups, axis=1) != 0).all():
                best = width
    return best


def _match_tails(case: Case) -> Detection | None:
    small = _ROUTING_NOISE_RANGE[0] < case.noise < _ROUTING_NOISE_RANGE[1]
    if case.reshaped or case.filled or "context_mismatch" in case.explained or not small or len(case.x) < 2000:
        return None
    size = np.abs(case.standard)
    tail = size > _ROUTING_FAR[0]
    far, farther = float(tail.mean()), float((size > _ROUTING_FARTHER[0]).mean())
    if far < _ROUTING_FAR[1] or farther < _ROUTING_FARTHER[1]:
        return None
    share = float(case.k3[tail].sum() / max(case.k3.sum(), 1e-300))
    meaning = "share of tokens beyond 12 times the noise; dense models at this noise: below 0.0005"
    return Detection(
        "low",
        f"{percent(far)} of the tokens differ by more than 12 times the usual noise and cause {percent(share)} of the "
        "K3, as they do if the two sides choose different experts",
        share=case.share(case.marked(tail)),
        evidence=(
            make_fact("beyond_12", far, meaning),
            make_fact("beyond_20", farther, "share beyond 20 times the noise"),
            make_fact("k3_share", share, "share of the K3 on tokens beyond 12 times the noise"),
        ),
        where={"tokens": percent(far)},
        examples=find_loudest(case, case.counts > 0, case.sums(tail * case.k3)),
        rivals={"numerical_noise": "rollout_experts and train_experts: do the experts of these tokens differ?"},
    )


_POSITION_SETTINGS = "rope_theta, ALiBi slopes, window and position_ids of the two sides"
_OTHER_MODEL_MIN_NOISE, _OTHER_MODEL_Z, _OTHER_MODEL_SURE_Z, _OTHER_MODEL_ZERO_Z = 0.1, 6.0, 10.0, 4.0
_OTHER_MODEL_COHERENCE = 0.9


def detect_other_model(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.noise < _OTHER_MODEL_MIN_NOISE or len(case.x) < 500:
        return None
    if column_correlation(case) < UNRELATED_CORRELATION or certain_tokens_differ(case):
        return None
    ratio, direction = calibration(case), coherence(case)
    if ratio.z < _OTHER_MODEL_Z or abs(ratio.inverse_z) > _OTHER_MODEL_ZERO_Z:
        return None
    if direction.likely > _OTHER_MODEL_COHERENCE and direction.unlikely < -_OTHER_MODEL_COHERENCE:
        return None
    meaning, inverse = (
        "E[ratio] - 1, 0 if the rollout column is the sampling distribution",
        "E[1 / ratio] - 1, 0 if the trainer's column is the sampling distribution",
    )
    tell = (
        "a logits processor (penalty, bias, softcap) that acts before sampling and not before recording: the engine's "
        "logprobs mode"
    )
    return Detection(
        "high" if ratio.z > _OTHER_MODEL_SURE_Z and abs(ratio.inverse_z) < 0.3 * ratio.z else "medium",
        f"the trainer's column is the distribution that sampled (E[1 / ratio] - 1 = {ratio.inverse:.2g}), the "
        f"rollout's is not (E[ratio] - 1 = {ratio.excess:.2g}): it contains another model's log-probs, off by "
        f"{case.noise:.2g} in the logits",
        evidence=(
            make_fact("ratio_mean_minus_one", ratio.excess, meaning),
            make_fact("z", ratio.z, "the value above, in standard errors"),
            make_fact("inverse_ratio_mean_minus_one", ratio.inverse, inverse),
            make_fact("inverse_z", ratio.inverse_z, "the value above, in standard errors"),
        ),
        rivals={"raw_logprobs": tell},
        everywhere=True,
    )


_VOCABULARY_Z, _VOCABULARY_MIN_LOSS, _VOCABULARY_MAX_LOSS = 6.0, 2e-4, 0.3
_VOCABULARY_MAX_NOISE, _VOCABULARY_INNER_Z = 1.5 * BFLOAT16_NOISE, 12.0


def _match_impossible_tokens(case: Case) -> Detection | None:
    """Find sampled tokens with probability 0 in the trainer."""
    tally = case.evidence.tallies.get("impossible_train")
    if tally is None or "other_vocabulary" in case.explained:
        return None
    share = tally.tokens / max(case.evidence.tokens, 1)
    return Detection(
        "medium",
        f"{format_count(tally.tokens, 'sampled token')} in {format_count(tally.sequences, 'row')} "
        f"{'have' if tally.tokens > 1 else 'has'} probability 0 in the trainer (log-prob -inf): the trainer "
        f"masks tokens that "
        "the engine can sample. K3 does not include these tokens",
        share=share,
        evidence=(
            make_fact("tokens", tally.tokens, "valid tokens whose train log-prob is -inf"),
            make_fact("share", share, "share of valid tokens"),
        ),
        where={"tokens": percent(share), "column": "train_log_probs"},
        examples=np.zeros(0, np.int64),
        places=tally.places,
        rivals={
            "truncated_sampling": "top_k, top_p and the sampling mask of the trainer",
            "low_precision_logging": "is log_softmax done in float32, or the logarithm of a probability in float16?",
        },
        outside_k3=True,
    )


def detect_other_vocabulary(case: Case) -> Detection | None:
    impossible = _match_impossible_tokens(case)
    if impossible is not None:
        return impossible
    if case.reshaped or case.filled or len(case.x) < 500 or case.noise > _VOCABULARY_MAX_NOISE or is_greedy(case):
        return None
    if find_row_kinds(case) is not None:
        return None  # a different vocabulary affects every row
    inner = np.abs(case.standard) < _VOCABULARY_INNER_Z
    bounded = np.where(inner, np.expm1(np.where(inner, case.x, 0.0)), 0.0)
    lost, z = float(bounded.mean()), case.clustered_z(bounded)
    ratio = calibration(case)
    if abs(z) < _VOCABULARY_Z or not _VOCABULARY_MIN_LOSS < abs(lost) < _VOCABULARY_MAX_LOSS or lost * ratio.excess < 0:
        return None
    fewer, more = ("rollout", "trainer") if lost < 0 else ("trainer", "rollout")
    meaning = "E[ratio] - 1 over the tokens within the noise: 0 for equal vocabularies"
    return Detection(
        "medium",
        f"the ratios do not average to 1 (E[ratio] - 1 = {lost:.2g}, {abs(z):.2g} standard errors): "
        f"{percent(abs(lost))} of the {more}'s probability is on tokens that the {fewer} does not have",
        evidence=(
            make_fact("ratio_mean_minus_one", lost, meaning),
            make_fact("z", z, "the value above, in standard errors"),
            make_fact(
                "ratio_mean_z", ratio.z, "of all tokens, in standard errors", against=abs(ratio.z) < _VOCABULARY_Z
            ),
        ),
        rivals={
            "truncated_sampling": "the engine's top_k, top_p and min_p: a light truncation looks the same",
            "logit_bias": "bad_words, allowed tokens and masks of structured output on the engine",
        },
        everywhere=True,
    )


_QUANTIZED_MIN_SHARE, _QUANTIZED_TRACE_SHARE, _QUANTIZED_Z, _QUANTIZED_FAR_Z = 0.012, 0.04, 6.0, 6.0
_QUANTIZED_SLIGHT_BIAS, _QUANTIZED_MAX_DRIFT, _QUANTIZED_MAX_NOISE = 0.03, 0.6, 0.4
"""Limits for quantized weights, which quantization to 4 bits does not reach."""


def detect_quantized_rollout(case: Case) -> Detection | None:
    small = BFLOAT16_NOISE / 2 < case.noise < _QUANTIZED_MAX_NOISE
    if case.reshaped or case.filled or not small or len(case.x) < MIN_STRUCTURE_TOKENS:
        return None
    if certain_tokens_differ(case) or is_one_sided(case):
        return None
    (shared, z), (along, along_z) = systematic_share(case), drift_correlation(case)
    if shared < _QUANTIZED_MIN_SHARE or z < _QUANTIZED_Z or not along_z:
        return None
    error = np.arctanh(np.clip(along, -0.999, 0.999)) / along_z
    if np.tanh(np.arctanh(np.clip(along, -0.999, 0.999)) + 2 * error) > _QUANTIZED_MAX_DRIFT:
        return None  # stale weights look the same unless learning is excluded
    ratio = calibration(case)
    if abs(ratio.z) > _QUANTIZED_FAR_Z and abs(ratio.excess) > _QUANTIZED_SLIGHT_BIAS:
        return None
    if case.noise < BFLOAT16_NOISE and shared < _QUANTIZED_TRACE_SHARE:
        return None
    bound = shared > TOKEN_BOUND_SHARE
    rivals = {"weights_differ": "checksums of the weights; an adapter that one side has not merged looks the same"}
    if not bound:
        rivals["position_mismatch"] = _POSITION_SETTINGS
    direction = "correlation with the next weight update: near 0 for quantization"
    return Detection(
        "high" if bound and case.noise < _QUANTIZED_MAX_NOISE / 4 else "medium",
        f"{percent(shared)} of the variance of the log ratio depends on the token alone, at every position, and not "
        "along the policy's direction of learning: the engine and the trainer have different weights",
        evidence=(
            make_fact("systematic", shared, SYSTEMATIC_MEANING),
            make_fact("z", z, "the value above, in standard errors"),
            make_fact("noise", case.noise, "of the logits, robust"),
            make_fact("along_learning", along, direction),
        ),
        examples=find_loudest(case, case.counts > 0, case.means(np.abs(case.scaled))),
        rivals=rivals,
        everywhere=True,
    )


_WEIGHTS_MIN_SHARE, _WEIGHTS_Z, _WEIGHTS_SURE_Z = 0.02, 5.0, 8.0
_WEIGHTS_FAR_Z, _WEIGHTS_SLIGHT_BIAS = 6.0, 0.01
_WEIGHTS_MIN_RISE, _WEIGHTS_COHERENCE = 1.4, 0.5


def detect_weights_differ(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.noise < BFLOAT16_NOISE or column_correlation(case) < UNRELATED_CORRELATION:
        return None
    shared, z = systematic_share(case)
    if shared < _WEIGHTS_MIN_SHARE or z < _WEIGHTS_Z or certain_tokens_differ(case) or is_one_sided(case):
        return None
    ratio, (rise, rise_z, _), (likely, _, unlikely, _) = calibration(case), loudness_rise(case), coherence(case)
    sampled = abs(ratio.z) < _WEIGHTS_FAR_Z or abs(ratio.excess) < _WEIGHTS_SLIGHT_BIAS
    rises, bound = rise > _WEIGHTS_MIN_RISE and rise_z > 4, shared >= TOKEN_BOUND_SHARE
    turned = likely * unlikely < 0 and min(abs(likely), abs(unlikely)) > _WEIGHTS_COHERENCE
    placed = not bound or rises
    sure = z > _WEIGHTS_SURE_Z and sampled and len(case.x) >= MIN_STRUCTURE_TOKENS and not placed and not turned
    slight = not bound and is_near_bound(case)  # bfloat16 rounds weights too, each token's in its own way
    meanings = {
        "ratio": "E[ratio] - 1 in standard errors: 0 if the rollout column is the sampling distribution",
        "late": "median difference late in responses over that at the start",
        "likely": "coherence of log ratios of likely tokens: 0 for noise, +-1 if all have one sign",
    }
    rivals = {"position_mismatch": _POSITION_SETTINGS} if placed else {}
    rivals |= {
        "stale_policy": "rollout_version and train_version of each side, or current_log_probs",
        "quantized_rollout": "the engine's --quantization, and the dtype of the checkpoint that it loads",
        "other_model": "checkpoint names, adapters and weight checksums of the two sides",
        "logit_bias": "the engine's logit_bias and penalties: do a few tokens explain the whole mismatch?",
    }
    if turned:
        rivals["logit_softcap"] = "temperature and softcap of each side: all likely tokens move one way"
    return Detection(
        "high" if sure else "low" if rises or slight else "medium",
        f"the two sides have different weights{', or positions' if placed else ''}: {percent(shared)} of the variance "
        f"of the log ratio depends on the token alone, at every position, and the noise ({case.noise:.2g} in the "
        f"logits) is {case.noise / BFLOAT16_NOISE:.2g} times the most that bfloat16 causes",
        evidence=(
            make_fact("systematic", shared, SYSTEMATIC_MEANING),
            make_fact("z", z, "the value above, in standard errors"),
            make_noise_fact(case),
            make_fact("ratio_mean_z", ratio.z, meanings["ratio"], against=not sampled),
            make_fact("late_over_early", rise, meanings["late"], against=rises),
            make_fact("likely", likely, meanings["likely"], against=turned),
        ),
        where={"tokens": "all"},
        examples=find_loudest(case, case.counts > 0, case.means(np.abs(case.scaled))),
        rivals=rivals,
        everywhere=not rises,
    )
