"""Causes in the weights: another model or vocabulary, quantized weights, other differences."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.cause import Detection
from mismatchctl.diagnosis.causes.numerics import (
    MIN_STRUCTURE_TOKENS,
    UNRELATED_CORRELATION,
    is_near_bound,
)
from mismatchctl.diagnosis.causes.rows import loudness_rise
from mismatchctl.diagnosis.measures import (
    BFLOAT16_NOISE,
    SYSTEMATIC_MEANING,
    TOKEN_BOUND_SHARE,
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

_POSITION_SETTINGS = "rope_theta, ALiBi slopes, window and position_ids of both sides"
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
        f"rollout's is not (E[ratio] - 1 = {ratio.excess:.2g}): it holds the log-probs of another model, a noise of "
        f"{case.noise:.2g} in the logits away",
        evidence=(
            make_fact("ratio_mean_minus_one", ratio.excess, meaning),
            make_fact("z", ratio.z, "the same in standard errors"),
            make_fact("inverse_ratio_mean_minus_one", ratio.inverse, inverse),
            make_fact("inverse_z", ratio.inverse_z, "the same in standard errors"),
        ),
        rivals={"raw_logprobs": tell},
        everywhere=True,
    )


_VOCABULARY_Z, _VOCABULARY_MIN_LOSS, _VOCABULARY_MAX_LOSS = 6.0, 2e-4, 0.3
_VOCABULARY_MAX_NOISE, _VOCABULARY_INNER_Z = 1.5 * BFLOAT16_NOISE, 12.0


def detect_other_vocabulary(case: Case) -> Detection | None:
    if case.reshaped or case.filled or len(case.x) < 500 or case.noise > _VOCABULARY_MAX_NOISE or is_greedy(case):
        return None
    if find_row_kinds(case) is not None:
        return None  # another vocabulary is one in every row
    inner = np.abs(case.standard) < _VOCABULARY_INNER_Z
    bounded = np.where(inner, np.expm1(np.where(inner, case.x, 0.0)), 0.0)
    lost, z = float(bounded.mean()), case.clustered_z(bounded)
    ratio = calibration(case)
    if abs(z) < _VOCABULARY_Z or not _VOCABULARY_MIN_LOSS < abs(lost) < _VOCABULARY_MAX_LOSS or lost * ratio.excess < 0:
        return None
    fewer, more = ("rollout", "trainer") if lost < 0 else ("trainer", "rollout")
    meaning = "E[ratio] - 1, of tokens within the noise: 0 for equal vocabularies"
    return Detection(
        "medium",
        f"the ratios do not average to 1 (E[ratio] - 1 = {lost:.2g}, {abs(z):.2g} standard errors): "
        f"{percent(abs(lost))} of the {more}'s probability is on tokens that the {fewer} does not have",
        evidence=(
            make_fact("ratio_mean_minus_one", lost, meaning),
            make_fact("z", z, "the same in standard errors"),
            make_fact("ratio_mean_z", ratio.z, "of all ratios as they are", against=abs(ratio.z) < _VOCABULARY_Z),
        ),
        rivals={
            "truncated_sampling": "the engine's top_k, top_p and min_p: a light truncation looks the same",
            "logit_bias": "bad_words, allowed tokens and masks of structured output on the engine",
        },
        everywhere=True,
    )


_QUANTIZED_MIN_SHARE, _QUANTIZED_TRACE_SHARE, _QUANTIZED_Z, _QUANTIZED_FAR_Z = 0.012, 0.04, 6.0, 6.0
_QUANTIZED_SLIGHT_BIAS, _QUANTIZED_MAX_DRIFT, _QUANTIZED_MAX_NOISE = 0.03, 0.6, 0.4
"""Quantization to 4 bits makes less."""


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
    direction = "correlation with where the weights move next: near 0 for quantization"
    return Detection(
        "high" if bound and case.noise < _QUANTIZED_MAX_NOISE / 4 else "medium",
        f"{percent(shared)} of the variance of the log ratio belongs to the token alone, wherever it stands, and not "
        "along the direction in which the policy is learning: the engine's weights are not the trainer's",
        evidence=(
            make_fact("systematic", shared, SYSTEMATIC_MEANING),
            make_fact("z", z, "the same in standard errors"),
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
        "ratio": "E[ratio] - 1 in standard errors: 0 where the rollout column is what sampled",
        "late": "median difference late in responses over that at the start",
        "likely": "coherence of log ratios of likely tokens: 0 for noise, +-1 one way",
    }
    rivals = {"position_mismatch": _POSITION_SETTINGS} if placed else {}
    rivals |= {
        "stale_policy": "rollout_version and train_version, as each side knows them; current_log_probs tell too",
        "quantized_rollout": "the engine's --quantization, and the dtype of the checkpoint that it loads",
        "other_model": "checkpoint names and adapters of both sides: checksums of the weights tell",
        "logit_bias": "the engine's logit_bias and penalties: are a few tokens all of it?",
    }
    if turned:
        rivals["logit_softcap"] = "temperature and softcap of both sides: likely tokens all go one way"
    return Detection(
        "high" if sure else "low" if rises or slight else "medium",
        f"the two sides have different weights{', or positions' if placed else ''}: {percent(shared)} of the variance "
        "of the log ratio depends on the token alone, at every position, and the noise "
        f"({case.noise:.2g} in the logits) is {case.noise / BFLOAT16_NOISE:.2g} times the most that bfloat16 makes",
        evidence=(
            make_fact("systematic", shared, SYSTEMATIC_MEANING),
            make_fact("z", z, "the same in standard errors"),
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
