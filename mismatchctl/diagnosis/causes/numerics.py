"""Tests for arithmetic and model weights: noise, quantized caches, MoE routing, and weights that differ."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mismatchctl.core.batch import Bools, experts_per_layer
from mismatchctl.core.formatting import format_count
from mismatchctl.core.ratios import DENSE_RANGE, MOE_RANGE
from mismatchctl.diagnosis.case import BFLOAT16_NOISE, FLOAT32_NOISE, UNRELATED_CORRELATION, Case, cached_on_case
from mismatchctl.diagnosis.causes.rows import loudness_rise
from mismatchctl.diagnosis.detection import Detection, make_fact, percent
from mismatchctl.results.model import Confidence

_LIGHT_TAIL, ROUTED_TAIL, _MAX_ROUTED_TAIL = 0.3, 0.7, 0.95
"""Share of K3 from tokens with a logit error above 12 times the noise. Dense models: below 0.3, MoE: 0.7 to 0.95."""
_CACHE_LIKE = (8.0, 35.0)
"""A kurtosis of noise between these values indicates an fp8 cache. Dense models have less, MoE models more."""
MIN_STRUCTURE_TOKENS = 3000
"""Minimum number of tokens to test if the noise depends on the token, its position or other properties."""


@cached_on_case
def tail_shares(case: Case) -> tuple[float, float]:
    """Return the shares of K3 and of tokens in the tail: tokens whose logit error is above 12 times the usual noise."""
    far = np.abs(case.scaled) > 12.0 * max(case.noise, 0.012)
    whole = float(case.k3.sum())
    return (float(case.k3[far].sum()) / whole if whole > 0 else 0.0), float(far.mean()) if len(far) else 0.0


def is_plain_noise(case: Case) -> bool:
    share, _ = tail_shares(case)
    small = case.noise < BFLOAT16_NOISE and case.spread < 0.05
    return small and share < _LIGHT_TAIL and _is_balanced(case, 4.0)


def fits_larger_model(case: Case) -> bool:
    """Return True if the noise is too large for bfloat16 in a small model, but not in a large or more certain model."""
    # BFLOAT16_NOISE was measured in small models. A larger or more certain model may have 3 times this noise.
    small = BFLOAT16_NOISE <= case.noise < 3.0 * BFLOAT16_NOISE
    return small and _is_balanced(case) and float(case.k3.mean()) < MOE_RANGE[1]


def is_near_bound(case: Case) -> bool:
    return BFLOAT16_NOISE <= case.noise < 1.25 * BFLOAT16_NOISE


def _is_balanced(case: Case, most: float = 5.0) -> bool:
    ratio = case.calibration
    return abs(ratio.z) < most or abs(ratio.excess) < 1e-6  # rounding to float32 can cause 1e-6


def detect_numerical_noise(case: Case) -> Detection | None:
    if case.reshaped or case.filled or not len(case.x) or case.noise + case.spread == 0:
        return None
    k3, mean = float(case.k3.mean()), float(np.abs(case.x).mean())
    (share, far), doubtful = tail_shares(case), np.clip(case.standard[case.doubtful], -30, 30)
    square = doubtful * doubtful
    power = float(square.mean()) if len(doubtful) else 0.0
    uneven = float((square * square).mean()) / power**2 if power > 0 else 3.0  # the kurtosis
    balanced, few = _is_balanced(case), len(case.x) < 200
    usual = case.noise < BFLOAT16_NOISE or (fits_larger_model(case) and share >= ROUTED_TAIL)
    tailed, cached = share >= _LIGHT_TAIL, _CACHE_LIKE[0] < uneven < _CACHE_LIKE[1] and case.noise > FLOAT32_NOISE
    confidence: Confidence = "low"
    if is_plain_noise(case) and not few and not cached:
        confidence = "high"
    elif usual and balanced and share < _MAX_ROUTED_TAIL and k3 < MOE_RANGE[1] and not few:
        confidence = "medium"
    place = "below" if k3 < DENSE_RANGE[0] else "above" if k3 >= MOE_RANGE[1] else "within"
    models = "dense models" if k3 < DENSE_RANGE[1] else "mixtures of experts"
    summary = (
        f"the mismatch is {'only' if confidence == 'high' else 'mostly'} noise. The mean |log ratio| is {mean:.2g} "
        f"nats, which is {_describe_arithmetic(case)}. K3 is {k3:.2g}, which is {place} the usual range of {models}"
    )
    if confidence == "medium" and tailed:
        summary += (
            f". However, {percent(far)} of the tokens differ by more than 12 times the noise and cause "
            f"{percent(share)} of K3"
        )
    if confidence != "low":
        summary += _describe_trace(case)
    if cached:
        summary += ". The size of the noise differs between positions, as with an 8-bit cache"
    if few:
        summary += f". {len(case.x):,} tokens are too few to exclude other causes"
    experts = "if the model is a mixture of experts, record rollout_experts and train_experts"
    rivals = {"moe_routing": experts} if tailed else {}
    if cached:
        rivals["cache_quantization"] = "compare the engine's kv_cache_dtype with the dtype of the model"
    if case.noise > FLOAT32_NOISE and confidence != "low":
        rivals["quantized_rollout"] = "check the engine's --quantization. Weights in 8 bits can cause the same noise"
    kurtosis = f"kurtosis of the noise: 3 for Gaussian noise, at most {_CACHE_LIKE[0]:g} for dense models in bfloat16"
    dense, experts = (f"{low:g} to {high:g}" for low, high in (DENSE_RANGE, MOE_RANGE))
    ranges = f"K3: {dense} for dense models, {experts} for mixtures of experts"
    return Detection(
        confidence,
        summary,
        evidence=(
            make_fact("noise", case.noise),
            make_fact("spread", case.spread),
            make_fact("unevenness", uneven, kurtosis, against=cached),
            make_fact("difference", mean, "mean |log ratio|, nats"),
            make_fact("k3", k3, ranges, against=k3 > MOE_RANGE[1]),
            make_fact("tail_k3", share, against=tailed),
            make_fact("ratio_mean_z", case.calibration.z, against=not balanced),
        ),
        rivals=rivals,
        everywhere=True,
    )


def _describe_arithmetic(case: Case) -> str:
    if case.noise < FLOAT32_NOISE and case.spread < 1e-3:
        return "usual for float32 arithmetic"
    if case.noise < BFLOAT16_NOISE:
        return "usual for bfloat16 arithmetic"
    if fits_larger_model(case):
        return (
            "more than bfloat16 arithmetic causes in small models. Possible reasons are a larger or more certain "
            "model, experts, or a cache in low precision"
        )
    return "more than bfloat16 arithmetic causes"


def _describe_trace(case: Case) -> str:
    if case.noise < FLOAT32_NOISE:
        return ""
    shared, z = case.systematic_share
    if shared < 0.004 or z < 4:
        return ". Weights or a cache in 8 bits can cause the same noise, so check the engine's settings"
    return (
        f". {percent(shared)} of the variance depends only on the token, so the two sides round the weights "
        "differently (to bfloat16 or to 8 bits, which look the same at this size)"
    )


_CACHE_MIN_LENGTH = 36
_CACHE_USUAL_NOISE, _CACHE_MAX_NOISE = 0.07, 0.2


def detect_cache_quantization(case: Case) -> Detection | None:
    if case.reshaped or case.filled or not BFLOAT16_NOISE < case.noise < 0.4 or len(case.x) < 200:
        return None
    shared, shared_z = case.systematic_share
    even = abs(shared_z) < 3.0 and case.spread < 1.1 * case.noise  # with dropout, `spread` is 1.2 times the noise
    if case.noise >= _CACHE_MAX_NOISE and not even:
        return None
    if (shared > 0.02 and shared_z > 4) or case.certain_tokens_differ or case.row_kinds is not None:
        return None
    (growth, z), (share, _) = _loudness_growth(case), tail_shares(case)
    ratio_z, grows, times = case.calibration.z, z > 2.5 and growth > 0.05, float(np.exp(growth))
    balanced = abs(ratio_z) < 5.0
    size = case.noise < _CACHE_MAX_NOISE if grows else case.noise < _CACHE_USUAL_NOISE and not is_near_bound(case)
    size |= even and not is_near_bound(case)
    plausible = size and len(case.x) >= MIN_STRUCTURE_TOKENS and share < ROUTED_TAIL  # 8-bit caches change all tokens
    rounded = "low_precision_logging" in case.explained and case.noise < 2.0 * BFLOAT16_NOISE
    confidence: Confidence = "low"
    if balanced and plausible and not rounded:
        confidence = "high" if grows and z > 6.0 and case.noise < _CACHE_USUAL_NOISE else "medium"
    rivals = {
        "numerical_noise": "sample again with kv_cache_dtype=auto. Numerical noise stays the same",
        "random_noise": "score a batch twice with the trainer. With dropout, the results differ",
        "weights_differ": "compare checksums of the weights on the two sides",
    }
    if rounded:
        rivals["low_precision_logging"] = "record the same log-probs with all their digits"
    late = "noise in the last third of a response divided by the noise in its middle third"
    return Detection(
        confidence,
        f"the noise of the logits is {case.noise:.2g}, which is {case.noise / BFLOAT16_NOISE:.2g} times the maximum "
        "for bfloat16, and does not depend on the token"
        + (f". It is {times:.3g} times larger late in the response than in its middle" if grows else "")
        + (". It has the same size in all contexts, as with 8-bit arithmetic" if even else ""),
        evidence=(
            make_fact("noise", case.noise),
            make_fact("late_over_middle", times, late, against=not grows),
            make_fact("z", z, "growth of the noise within responses in standard errors", against=not grows),
            make_fact("systematic", shared),
            make_fact("tail_k3", share, against=share >= ROUTED_TAIL),
            make_fact("ratio_mean_z", ratio_z, against=not balanced),
        ),
        where={"positions": "late in the response" if grows else "everywhere"},
        examples=case.find_loudest(case.counts >= _CACHE_MIN_LENGTH, case.means(np.abs(case.scaled))),
        rivals=rivals,
        everywhere=True,
    )


def _loudness_growth(case: Case) -> tuple[float, float]:
    """Return the mean rise of log(noise) from the middle to the last third of long responses, and its z-score."""
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


def detect_moe_routing(case: Case) -> Detection | None:
    sides = [case.rows.extra_columns.get(name) for name in ("rollout_experts", "train_experts")]
    if sides[0] is not None and sides[1] is not None and sides[0].shape == sides[1].shape and sides[0].ndim == 2:
        return _match_experts(case, sides[0], sides[1])
    return _match_tails(case)


def _match_experts(case: Case, rollout: np.ndarray, train: np.ndarray) -> Detection | None:
    a, b = rollout[case.index], train[case.index]
    if np.isnan(a.sum() + b.sum()):
        return None  # the experts of some sequences are unknown
    width = experts_per_layer(a)
    layers = a.shape[1] // width
    one, other = (np.sort(side.reshape(len(a), layers, width), axis=2) for side in (a, b))
    by_layer = (one != other).any(axis=2)
    flipped = by_layer.any(axis=1)
    if not flipped.any():
        return None
    inside, outside = float(case.k3[flipped].mean()), float(case.k3[~flipped].mean()) if not flipped.all() else 0.0
    share, rate = float(case.k3[flipped].sum() / max(case.k3.sum(), 1e-300)), float(flipped.mean())
    sure, layer_rates = share > 0.3 and inside > 3 * outside and not case.explained, by_layer.mean(axis=0)
    z = case.clustered_z(np.where(flipped, case.k3 - outside, 0.0))
    rates = ", ".join(f"{100 * r:.2g}%" for r in layer_rates[:64])
    return Detection(
        "high" if sure else "medium" if share > 0.1 else "low",
        f"the engine and the trainer chose different experts for {percent(rate)} of the tokens. The mean K3 is "
        f"{inside:.2g} on these tokens and {outside:.2g} on all other tokens",
        share=case.share(case.marked(flipped)),
        k3=share * max(0.0, 1 - outside / inside) if inside > 0 else 0.0,
        evidence=(
            make_fact("disagreement", rate, "share of tokens whose experts differ in some layer"),
            make_fact("k3_where_they_differ", inside, "mean K3 of tokens whose experts differ"),
            make_fact("k3_where_they_agree", outside, "mean K3 of tokens whose experts agree"),
            make_fact("k3_share", share, "share of K3 from tokens whose experts differ"),
            make_fact("z", z, "mean K3 where experts differ minus mean K3 where experts agree, in standard errors"),
            make_fact("by_layer", rates, "share of tokens whose experts differ, by layer"),
        ),
        where={
            "layers": f"most in layer {int(np.argmax(layer_rates))} of {layers}, counted from 0",
            "tokens": percent(rate),
        },
        examples=case.find_loudest(case.counts > 0, case.sums(flipped * case.k3)),
    )


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
    return Detection(
        "low",
        f"{percent(far)} of the tokens differ by more than 12 times the usual noise and cause {percent(share)} of K3. "
        "This is typical if the engine and the trainer choose different experts",
        share=case.share(case.marked(tail)),
        evidence=(
            make_fact("beyond_12", far, "share of tokens above 12 times the noise: below 0.0005 in dense models"),
            make_fact("beyond_20", farther, "share of tokens that differ by more than 20 times the noise"),
            make_fact("k3_share", share, "share of K3 from tokens that differ by more than 12 times the noise"),
        ),
        where={"tokens": percent(far)},
        examples=case.find_loudest(case.counts > 0, case.sums(tail * case.k3)),
        rivals={"numerical_noise": "record rollout_experts and train_experts. The experts of these tokens may agree"},
    )


_TOKEN_BOUND_SHARE = 0.15
"""If the token id explains a larger share of the variance, positions are not the cause (test with ALiBi: 0.07)."""
_POSITION_SETTINGS = "compare rope_theta, ALiBi slopes, attention window and position_ids of the two sides"
_OTHER_MODEL_COHERENCE = 0.9


def detect_other_model(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.noise < 0.1 or len(case.x) < 500:
        return None
    if case.column_correlation < UNRELATED_CORRELATION or case.certain_tokens_differ:
        return None
    ratio, direction = case.calibration, case.coherence
    if ratio.z < 6.0 or abs(ratio.inverse_z) > 4.0:
        return None
    if direction.likely > _OTHER_MODEL_COHERENCE and direction.unlikely < -_OTHER_MODEL_COHERENCE:
        return None
    tell = (
        "check the engine's logprobs mode. A logits processor (penalty, bias, softcap) may change the samples but not "
        "the recorded log-probs"
    )
    return Detection(
        "high" if ratio.z > 10.0 and abs(ratio.inverse_z) < 0.3 * ratio.z else "medium",
        f"the trainer's column belongs to the sampling distribution (E[1 / ratio] - 1 = {ratio.inverse:.2g}), and the "
        f"rollout column does not (E[ratio] - 1 = {ratio.excess:.2g}). The rollout column contains the log-probs of "
        f"another model, with a difference of {case.noise:.2g} in the logits",
        evidence=(
            make_fact("ratio_mean_minus_one", ratio.excess),
            make_fact("z", ratio.z, "E[ratio] - 1 in standard errors"),
            make_fact("inverse_ratio_mean_minus_one", ratio.inverse),
            make_fact("inverse_z", ratio.inverse_z, "E[1 / ratio] - 1 in standard errors"),
        ),
        rivals={"raw_logprobs": tell},
        everywhere=True,
    )


_VOCABULARY_Z = 6.0
_VOCABULARY_MAX_NOISE = 1.5 * BFLOAT16_NOISE


def _match_impossible_tokens(case: Case) -> Detection | None:
    tally = case.evidence.tallies.get("impossible_train")
    if tally is None or "other_vocabulary" in case.explained:
        return None
    share = tally.tokens / max(case.evidence.tokens, 1)
    return Detection(
        "medium",
        f"{format_count(tally.tokens, 'sampled token')} in {format_count(tally.sequences, 'row')} "
        f"{'have' if tally.tokens > 1 else 'has'} probability 0 in the trainer (log-prob -inf). The trainer excludes "
        "tokens that the engine can sample. K3 does not include these tokens",
        share=share,
        evidence=(
            make_fact("tokens", tally.tokens, "number of valid tokens whose train log-prob is -inf"),
            make_fact("share", share, "these tokens as a share of all tokens"),
        ),
        where={"tokens": percent(share), "column": "train_log_probs"},
        examples=np.zeros(0, np.int64),
        places=tally.places,
        rivals={
            "truncated_sampling": "check top_k, top_p and the sampling mask of the trainer",
            "low_precision_logging": "check that log_softmax is not computed in float16, which gives -inf",
        },
        outside_k3=True,
    )


def detect_other_vocabulary(case: Case) -> Detection | None:
    impossible = _match_impossible_tokens(case)
    if impossible is not None:
        return impossible
    if case.reshaped or case.filled or len(case.x) < 500 or case.noise > _VOCABULARY_MAX_NOISE or case.is_greedy:
        return None
    if case.row_kinds is not None:
        return None  # a different vocabulary affects every row
    inner = np.abs(case.standard) < 12.0
    bounded = np.where(inner, np.expm1(np.where(inner, case.x, 0.0)), 0.0)
    lost, z = float(bounded.mean()), case.clustered_z(bounded)
    ratio = case.calibration
    if abs(z) < _VOCABULARY_Z or not 2e-4 < abs(lost) < 0.3 or lost * ratio.excess < 0:
        return None
    fewer, more = ("rollout", "trainer") if lost < 0 else ("trainer", "rollout")
    return Detection(
        "medium",
        f"the mean ratio is not 1 (E[ratio] - 1 = {lost:.2g}, which is {abs(z):.2g} standard errors). "
        f"{percent(abs(lost))} of the {more}'s probability is on tokens that the {fewer} does not have",
        evidence=(
            make_fact("ratio_mean_minus_one", lost, "E[ratio] - 1 within the noise: 0 for equal vocabularies"),
            make_fact("z", z, "E[ratio] - 1 in standard errors"),
            make_fact("ratio_mean_z", ratio.z, against=abs(ratio.z) < _VOCABULARY_Z),
        ),
        rivals={
            "truncated_sampling": "check the engine's top_k, top_p and min_p. A light truncation looks the same",
            "logit_bias": "check bad_words, allowed tokens and structured output on the engine",
        },
        everywhere=True,
    )


_QUANTIZED_SLIGHT_BIAS, _QUANTIZED_MAX_DRIFT, _QUANTIZED_MAX_NOISE = 0.03, 0.6, 0.4
"""Limits for |mean ratio - 1|, correlation of errors with policy updates, and noise. 4-bit weights stay below them."""


def detect_quantized_rollout(case: Case) -> Detection | None:
    small = BFLOAT16_NOISE / 2 < case.noise < _QUANTIZED_MAX_NOISE
    if case.reshaped or case.filled or not small or len(case.x) < MIN_STRUCTURE_TOKENS:
        return None
    if case.certain_tokens_differ or case.is_one_sided:
        return None
    (shared, z), (along, along_z) = case.systematic_share, case.drift_correlation
    if shared < 0.012 or z < 6.0 or not along_z:
        return None
    error = np.arctanh(np.clip(along, -0.999, 0.999)) / along_z
    if np.tanh(np.arctanh(np.clip(along, -0.999, 0.999)) + 2 * error) > _QUANTIZED_MAX_DRIFT:
        return None  # the log ratios may follow the policy's updates, as with stale weights
    ratio = case.calibration
    if abs(ratio.z) > 6.0 and abs(ratio.excess) > _QUANTIZED_SLIGHT_BIAS:
        return None
    if case.noise < BFLOAT16_NOISE and shared < 0.04:
        return None
    bound = shared > _TOKEN_BOUND_SHARE
    rivals = {"weights_differ": "compare checksums of the weights. An adapter on one side looks the same"}
    if not bound:
        rivals["position_mismatch"] = _POSITION_SETTINGS
    return Detection(
        "high" if bound and case.noise < _QUANTIZED_MAX_NOISE / 4 else "medium",
        f"{percent(shared)} of the variance of the log ratio depends only on the token, and this part does not follow "
        "the policy's updates. The engine and the trainer have different weights",
        evidence=(
            make_fact("systematic", shared),
            make_fact("z", z, "share of the variance that depends only on the token, in standard errors"),
            make_fact("noise", case.noise),
            make_fact("along_learning", along),
        ),
        examples=case.find_loudest(case.counts > 0, case.means(np.abs(case.scaled))),
        rivals=rivals,
        everywhere=True,
    )


def detect_weights_differ(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.noise < BFLOAT16_NOISE or case.column_correlation < UNRELATED_CORRELATION:
        return None
    shared, z = case.systematic_share
    if shared < 0.02 or z < 5.0 or case.certain_tokens_differ or case.is_one_sided:
        return None
    ratio, (rise, rise_z, _), (likely, _, unlikely, _) = case.calibration, loudness_rise(case), case.coherence
    sampled = abs(ratio.z) < 6.0 or abs(ratio.excess) < 0.01
    rises, bound = rise > 1.4 and rise_z > 4, shared >= _TOKEN_BOUND_SHARE
    turned = likely * unlikely < 0 and min(abs(likely), abs(unlikely)) > 0.5
    placed = not bound or rises
    sure = z > 8.0 and sampled and len(case.x) >= MIN_STRUCTURE_TOKENS and not placed and not turned
    slight = not bound and is_near_bound(case)  # rounding weights to bfloat16 also shifts each token
    rivals = {"position_mismatch": _POSITION_SETTINGS} if placed else {}
    rivals |= {
        "stale_policy": "record rollout_version and train_version, or current_log_probs",
        "quantized_rollout": "check the engine's --quantization and the dtype of its checkpoint",
        "other_model": "compare checkpoint names, adapters and weight checksums of the two sides",
        "logit_bias": "check the engine's logit_bias and penalties, and whether a few tokens cause the whole mismatch",
    }
    if turned:
        rivals["logit_softcap"] = "compare temperature and softcap: all likely tokens change in one direction"
    return Detection(
        "high" if sure else "low" if rises or slight else "medium",
        f"the two sides have different weights{' or positions' if placed else ''}. {percent(shared)} of the variance "
        f"of the log ratio depends only on the token, and the noise of the logits ({case.noise:.2g}) is "
        f"{case.noise / BFLOAT16_NOISE:.2g} times the maximum for bfloat16",
        evidence=(
            make_fact("systematic", shared),
            make_fact("z", z, "share of the variance that depends only on the token, in standard errors"),
            make_fact("noise", case.noise),
            make_fact("ratio_mean_z", ratio.z, against=not sampled),
            make_fact("late_over_early", rise, against=rises),
            make_fact("likely", likely, against=turned),
        ),
        where={"tokens": "all"},
        examples=case.find_loudest(case.counts > 0, case.means(np.abs(case.scaled))),
        rivals=rivals,
        everywhere=not rises,
    )


_GROSS_DISTANCE, _GROSS_NOISE_FACTOR, _GROSS_MAX_SHARE = 1.2, 30.0, 0.45
"""A token is gross if its |log ratio| exceeds 1.2 nats and 30 times the noise. If 45% of tokens do, they are not."""
_FLIP_SHARE = 0.2
_MIN_K3_SHARE = 0.05
_SURE_ROWS, _SURE_VARIANCE = 32, 1.0
"""Minimum rows, and variance between rows, for high confidence in two kinds of rows (not only two kinds of prompts)."""


def detect_unexplained(case: Case) -> Detection | None:
    if len(case.x) < 200 and not len(mark_gross_tokens(case).nonzero()[0]):
        return None
    return _match_tokens(case) or (
        None if case.filled or case.reshaped else _match_rows(case) or _match_large_noise(case)
    )


def mark_gross_tokens(case: Case) -> Bools:
    """Flag the few tokens whose |log ratio| is very far above the noise of the other tokens [N]."""
    size = np.abs(case.x)
    found: Bools = (size > _GROSS_DISTANCE) & (size > _GROSS_NOISE_FACTOR * max(case.noise, 1e-6))
    tailed = int((np.abs(case.standard) > 12.0).sum()) - int(found.sum()) > 3 * int(found.sum())
    if tailed or case.filled or case.reshaped:  # then these tokens may only be the end of a tail
        found &= size > 3 * _GROSS_DISTANCE
    return found if len(found) and found.mean() < _GROSS_MAX_SHARE else np.zeros(len(found), np.bool_)


def _match_tokens(case: Case) -> Detection | None:
    chosen = mark_gross_tokens(case)
    if not chosen.any():
        return None
    share = float(case.k3[chosen].sum() / max(float(case.k3.sum()), 1e-300))
    if share < _MIN_K3_SHARE or share * float(case.k3.sum()) < _MIN_K3_SHARE * case.whole_k3:
        return None
    rows = np.bincount(case.where[chosen], minlength=case.size)
    count, sequences = int(chosen.sum()), int((rows > 0).sum())
    upward = float((case.x[chosen] > 0).mean())
    flips = abs(case.calibration.z) < 4.0 and _FLIP_SHARE < upward < 1 - _FLIP_SHARE  # other experts look the same
    flips &= count < 0.01 * len(case.x)
    sure = share > 0.3 and sequences > 1 and not case.reshaped and not flips
    more = bool(case.explained) and share * float(case.k3.sum()) < 0.9 * case.whole_k3  # other causes explain the rest
    sure &= count < 0.05 * len(case.x) or case.size >= _SURE_ROWS // 2  # many tokens of few rows may have another cause
    seats = _describe_places(case, chosen)
    seated = "positions" in seats and count >= 5  # not workers or steps: they may have one long row
    far = [int((np.abs(case.standard) > limit).sum()) for limit in (5.0, _GROSS_NOISE_FACTOR)]
    tail = fits_larger_model(case) and far[0] >= 1.5 * far[1] and not seated  # other experts look the same
    examples = case.find_loudest(rows > 0, case.sums(case.k3 * chosen))
    first = {int(case.where[i]): int(case.rows.positions[case.index[i]]) for i in np.flatnonzero(chosen)[::-1]}
    size, probability = np.abs(case.x), float(np.exp(np.median(case.t[chosen])))
    return Detection(
        "low" if tail or more else "high" if sure else "medium",
        f"{format_count(count, 'token')} in {format_count(sequences, 'row')} {'cause' if count > 1 else 'causes'} "
        f"{percent(share)} of K3, and no known cause explains this. The median difference is "
        f"{np.median(size[chosen]):.2g} nats there, and {np.median(size[~chosen]):.2g} nats at all other tokens",
        tokens=case.marked(chosen),
        evidence=(
            make_fact("tokens", count, "number of tokens that differ far more than all others"),
            make_fact("rows", sequences, "number of sequences that contain these tokens"),
            make_fact("k3_share", share, "share of K3, without the K3 of other causes, from these tokens"),
            make_fact("probability", probability, "median trainer probability of these tokens"),
        ),
        where={"tokens": f"{count:,} of {len(case.x):,}", "sequences": f"{sequences:,} of {case.size:,}"} | seats,
        examples=examples,
        positions=np.array([first[int(row)] for row in examples]),
        rivals={
            "padding_or_sentinel": "read both columns at these positions. A constant points to placeholders",
            "edited_response": "decode these rows and compare the text with the engine's output",
        },
    )


def _describe_places(case: Case, chosen: Bools) -> dict[str, str]:
    found = {}
    total = int(chosen.sum())
    left = case.each(case.counts) - case.place
    for name, seat in (("first", case.place == 0), ("last", left == 1)):
        inside = int((chosen & seat).sum())
        if inside > max(1, 0.3 * total) and inside > 4 * seat.mean() * total:
            found["positions"] = f"{inside:,} of {total:,} on the {name} token of their row"
    for column in ("worker", "step"):
        values = case.column(column)
        often = Counter(values[case.where[chosen]].tolist()).most_common(1)[0]
        usual = float((case.each(values) == often[0]).mean())
        if often[0] is not None and often[1] > max(2, 0.6 * total) and often[1] > 2 * usual * total:
            found[column] = f"{often[0]} ({often[1]:,} of {total:,})"
    return found


def _match_rows(case: Case) -> Detection | None:
    found = case.row_kinds
    if found is None:
        return None
    share = float(found.louder.sum()) / found.rows
    return Detection(
        "high" if found.rows >= _SURE_ROWS and found.variance >= _SURE_VARIANCE else "medium",
        f"the rows are of two kinds. In {percent(share)} of the rows, the two sides are {found.times:.3g} times as far "
        "apart as in the other rows, and no column of the dump explains this. These rows were sampled or scored "
        "differently",
        tokens=found.louder[case.sequence],
        evidence=(
            make_fact("sequences", share, "share of the rows whose two sides are farther apart"),
            make_fact("times", found.times),
            make_fact("variance", found.variance, "variance of log |difference| over rows: below 0.6 if all are alike"),
        ),
        where={"sequences": percent(share)},
        examples=case.find_loudest(found.louder),
        rivals={
            "stale_worker": "record the worker, rank or engine of each row. These rows may come from one worker",
            "temperature": "compare the sampling settings of these requests with the other requests",
            "stale_policy": "record rollout_version of each row. These rows may have older weights",
        },
    )


def _match_large_noise(case: Case) -> Detection | None:
    if is_plain_noise(case):
        return None
    (share, _), ratio = tail_shares(case), case.calibration
    if case.column_correlation < UNRELATED_CORRELATION:
        return _match_unrelated(case)
    broken, told = abs(ratio.z) > 8.0 and not case.is_greedy, len(case.x) >= MIN_STRUCTURE_TOKENS
    if case.noise <= BFLOAT16_NOISE and not broken:
        return None  # `detect_numerical_noise` reports this
    sure = told and (case.noise > 0.2 or broken)
    summary = (
        f"the mean |log ratio| is {np.mean(np.abs(case.x)):.2g} nats. The noise of the logits is {case.noise:.2g}, "
        f"which is {case.noise / BFLOAT16_NOISE:.2g} times the maximum for bfloat16. It does not depend on the token, "
        "position, worker or step"
    )
    if case.certain_tokens_differ:
        summary += (
            ". Tokens with a probability near 1 differ like all others. This happens if a number was added to the "
            "log-probs, or if log_softmax was computed in low precision"
        )
    if broken:
        summary += ". The rollout column does not belong to the sampling distribution (E[ratio] is not 1)"
    return Detection(
        "low" if fits_larger_model(case) else "high" if sure else "medium",
        summary,
        evidence=(
            make_fact("noise", case.noise),
            make_fact("spread", case.spread),
            make_fact("tail_k3", share),
            make_fact("ratio_mean_z", ratio.z),
            make_fact("inverse_ratio_mean_z", ratio.inverse_z),
        ),
        rivals=_BROKEN_RIVALS if broken else _NOISE_RIVALS,
        everywhere=True,
    )


def _match_unrelated(case: Case) -> Detection:
    together, ratio = case.column_correlation, case.calibration
    means = (ratio.z, ratio.excess), (ratio.inverse_z, ratio.inverse)
    # E[ratio] - 1 is small if the tokens were sampled from a column, and far larger for unrelated columns
    sampled = any(abs(z) < 3.0 and mean < 2.0 for z, mean in means)
    limit = ", or the weights of the two sides are very different"
    usual = "correlation of the two columns: usually above 0.6, even with different weights or settings"
    return Detection(
        "medium" if sampled else "high",
        f"the two columns are nearly unrelated (correlation {together:.2g}), so they are not log-probs of the same "
        f"tokens in the same order{limit if sampled else ''}",
        evidence=(
            make_fact("correlation", together, usual),
            make_fact("ratio_mean_z", ratio.z, against=sampled),
            make_fact("inverse_ratio_mean_z", ratio.inverse_z, against=sampled),
            make_fact("difference", np.mean(np.abs(case.x)), "mean |log ratio|, nats"),
        ),
        rivals={
            "swapped_rows": "join rollout and trainer rows by a sequence id instead of by position",
            "misaligned": "compare lengths, offsets and padding of each side with token_ids",
            "edited_response": "compare the text of the two sides",
        },
        everywhere=True,
    )


_BROKEN_RIVALS = {
    "other_model": "check whether the rollout column comes from a draft model, or from before a logits processor",
    "mask_wrong": "read token_ids of the valid tokens. The policy must have sampled all of them",
}
_NOISE_RIVALS = {
    "weights_differ": "compare checkpoint names and weight checksums of the two sides, and merge adapters",
    "random_noise": "score a batch twice with the trainer. With dropout or router noise, the results differ",
    "position_mismatch": "compare rope_theta, rope scaling, sliding_window and position_ids of the two sides. Score a "
    "row alone and together with longer rows: the results differ if the attention includes padding",
    "cache_quantization": "sample the same prompts with the cache in bfloat16",
}
