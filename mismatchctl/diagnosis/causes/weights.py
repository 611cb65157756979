"""Causes in the weights: another model or vocabulary, quantized weights, other differences."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.cause import Detection
from mismatchctl.diagnosis.causes.numerics import (
    BFLOAT16_NOISE,
    MIN_STRUCTURE_TOKENS,
    UNRELATED_CORRELATION,
    is_near_bound,
)
from mismatchctl.diagnosis.causes.rows import loudness_rise
from mismatchctl.diagnosis.measures import (
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
    percent,
    systematic_share,
)
from mismatchctl.results.model import Confidence

_OTHER_MODEL_MIN_NOISE, _OTHER_MODEL_Z, _OTHER_MODEL_SURE_Z, _OTHER_MODEL_ZERO_Z = 0.1, 6.0, 10.0, 4.0
_OTHER_MODEL_COHERENCE = 0.9


def detect_other_model(case: Case) -> Detection | None:
    if (
        case.reshaped
        or case.filled
        or case.noise < _OTHER_MODEL_MIN_NOISE
        or len(case.x) < 500
        or column_correlation(case) < UNRELATED_CORRELATION
    ):
        return None
    if certain_tokens_differ(case):
        return None
    excess, z, inverse, inverse_z = calibration(case)
    likely, _, unlikely, _ = coherence(case)
    if (
        z < _OTHER_MODEL_Z
        or abs(inverse_z) > _OTHER_MODEL_ZERO_Z
        or (likely > _OTHER_MODEL_COHERENCE and unlikely < -_OTHER_MODEL_COHERENCE)
    ):
        return None
    return Detection(
        "high" if z > _OTHER_MODEL_SURE_Z and abs(inverse_z) < 0.3 * z else "medium",
        f"the trainer's column is the distribution that sampled (E[1 / ratio] - 1 = {inverse:.2g}), the rollout's is "
        f"not (E[ratio] - 1 = {excess:.2g}): it holds the log-probs of another model, a noise of {case.noise:.2g} in "
        "the logits away",
        evidence=(
            make_fact(
                "ratio_mean_minus_one", excess, "E[ratio] - 1, 0 if the rollout column is the sampling distribution"
            ),
            make_fact("z", z, "the same in standard errors"),
            make_fact(
                "inverse_ratio_mean_minus_one",
                inverse,
                "E[1 / ratio] - 1, 0 if the trainer's column is the sampling distribution",
            ),
            make_fact("inverse_z", inverse_z, "the same in standard errors"),
        ),
        rivals={"raw_logprobs": "a logits processor (penalty, bias, softcap) that acts before sampling and not before "
                "recording: the engine's logprobs mode"},
        everywhere=True,
    )  # fmt: skip


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
    excess, ratio_z, _, _ = calibration(case)
    if abs(z) < _VOCABULARY_Z or not _VOCABULARY_MIN_LOSS < abs(lost) < _VOCABULARY_MAX_LOSS or lost * excess < 0:
        return None
    fewer, more = ("rollout", "trainer") if lost < 0 else ("trainer", "rollout")
    return Detection(
        "medium",
        f"the ratios do not average to 1 (E[ratio] - 1 = {lost:.2g}, {abs(z):.2g} standard errors): "
        f"{percent(abs(lost))} of the {more}'s probability is on tokens that the {fewer} does not have",
        evidence=(
            make_fact(
                "ratio_mean_minus_one", lost, "E[ratio] - 1, of tokens within the noise: 0 for equal vocabularies"
            ),
            make_fact("z", z, "the same in standard errors"),
            make_fact("ratio_mean_z", ratio_z, "of all ratios as they are", against=abs(ratio_z) < _VOCABULARY_Z),
        ),
        rivals={
            "truncated_sampling": "the engine's top_k, top_p and min_p: a light truncation looks the same",
            "logit_bias": "bad_words, allowed tokens and masks of structured output on the engine",
        },
        everywhere=True,
    )


_QUANTIZED_MIN_SHARE, _QUANTIZED_TRACE_SHARE, _QUANTIZED_Z, _QUANTIZED_FAR_Z, _QUANTIZED_SLIGHT_BIAS = (
    0.012,
    0.04,
    6.0,
    6.0,
    0.03,
)
_QUANTIZED_MAX_DRIFT = 0.6
_QUANTIZED_MAX_NOISE = 0.4
"""Quantization to 4 bits makes less."""


def detect_quantized_rollout(case: Case) -> Detection | None:
    if (
        case.reshaped
        or case.filled
        or not BFLOAT16_NOISE / 2 < case.noise < _QUANTIZED_MAX_NOISE
        or len(case.x) < MIN_STRUCTURE_TOKENS
    ):
        return None
    if certain_tokens_differ(case) or is_one_sided(case):
        return None
    shared, z = systematic_share(case)
    along, along_z = drift_correlation(case)
    if (
        shared < _QUANTIZED_MIN_SHARE
        or z < _QUANTIZED_Z
        or not along_z
        or _upper_correlation(along, along_z) > _QUANTIZED_MAX_DRIFT
    ):
        return None  # only where learning is excluded is it told from other weights
    excess, ratio_z, _, _ = calibration(case)
    if (abs(ratio_z) > _QUANTIZED_FAR_Z and abs(excess) > _QUANTIZED_SLIGHT_BIAS) or (
        case.noise < BFLOAT16_NOISE and shared < _QUANTIZED_TRACE_SHARE
    ):
        return None
    return Detection(
        "high" if shared > TOKEN_BOUND_SHARE and case.noise < _QUANTIZED_MAX_NOISE / 4 else "medium",
        f"{percent(shared)} of the variance of the log ratio depends on the token alone, at every position, and not "
        "along the policy's direction of learning: the engine and the trainer have different weights",
        evidence=(
            make_fact(
                "systematic", shared, "share of the variance that is the same for a token everywhere: weights differ"
            ),
            make_fact("z", z, "the same in standard errors"),
            make_fact("noise", case.noise, "of the logits, robust"),
            make_fact("along_learning", along, "correlation with the next weight update: near 0 for quantization"),
        ),
        examples=find_loudest(case, case.counts > 0, case.means(np.abs(case.scaled))),
        rivals={"weights_differ": "checksums of the weights; an adapter that one side has not merged looks the same"}
        | (
            {}
            if shared > TOKEN_BOUND_SHARE
            else {"position_mismatch": "rope_theta, ALiBi slopes, window and position_ids of the two sides"}
        ),
        everywhere=True,
    )


def _upper_correlation(along: float, z: float) -> float:
    """Return the correlation with learning plus two standard errors."""
    error = np.arctanh(np.clip(along, -0.999, 0.999)) / z
    return float(np.tanh(np.arctanh(np.clip(along, -0.999, 0.999)) + 2 * error))


_WEIGHTS_MIN_SHARE, _WEIGHTS_Z, _WEIGHTS_SURE_Z = 0.02, 5.0, 8.0
_WEIGHTS_FAR_Z, _WEIGHTS_SLIGHT_BIAS = 6.0, 0.01
_WEIGHTS_MIN_RISE, _WEIGHTS_COHERENCE = 1.4, 0.5
_POSITION_SETTINGS = "rope_theta, ALiBi slopes, window and position_ids of the two sides"


def detect_weights_differ(case: Case) -> Detection | None:
    if case.reshaped or case.filled or case.noise < BFLOAT16_NOISE or column_correlation(case) < UNRELATED_CORRELATION:
        return None
    shared, z = systematic_share(case)
    if shared < _WEIGHTS_MIN_SHARE or z < _WEIGHTS_Z or certain_tokens_differ(case) or is_one_sided(case):
        return None
    excess, ratio_z, _, _ = calibration(case)
    sampled = abs(ratio_z) < _WEIGHTS_FAR_Z or abs(excess) < _WEIGHTS_SLIGHT_BIAS
    rise, rise_z, _ = loudness_rise(case)
    likely, _, unlikely, _ = coherence(case)
    rises = rise > _WEIGHTS_MIN_RISE and rise_z > 4
    turned = likely * unlikely < 0 and min(abs(likely), abs(unlikely)) > _WEIGHTS_COHERENCE
    placed = shared < TOKEN_BOUND_SHARE or rises
    sure = z > _WEIGHTS_SURE_Z and sampled and len(case.x) >= MIN_STRUCTURE_TOKENS and not placed and not turned
    slight = shared < TOKEN_BOUND_SHARE and is_near_bound(
        case
    )  # bfloat16 rounds weights too, each token's in its own way
    confidence: Confidence = "high" if sure else "low" if rises or slight else "medium"
    return Detection(
        confidence,
        f"the two sides have different weights{', or positions' if placed else ''}: {percent(shared)} of the variance "
        "of the log ratio depends on the token alone, at every position, and the noise "
        f"({case.noise:.2g} in the logits) is {case.noise / BFLOAT16_NOISE:.2g} times the most that bfloat16 makes",
        evidence=(
            make_fact(
                "systematic", shared, "share of the variance that is the same for a token everywhere: weights differ"
            ),
            make_fact("z", z, "the same in standard errors"),
            make_fact("noise", case.noise, f"of the logits, robust; bfloat16 stays below {BFLOAT16_NOISE:g}"),
            make_fact(
                "ratio_mean_z",
                ratio_z,
                "E[ratio] - 1 in standard errors: 0 if the rollout column is the sampling distribution",
                against=not sampled,
            ),
            make_fact(
                "late_over_early", rise, "median difference late in responses over that at the start", against=rises
            ),
            make_fact(
                "likely", likely, "coherence of log ratios of likely tokens: 0 for noise, +-1 one way", against=turned
            ),
        ),
        where={"tokens": "all"},
        examples=find_loudest(case, case.counts > 0, case.means(np.abs(case.scaled))),
        rivals=({"position_mismatch": _POSITION_SETTINGS} if placed else {})
        | {
            "stale_policy": "rollout_version and train_version of each side, or current_log_probs",
            "quantized_rollout": "the engine's --quantization, and the dtype of the checkpoint that it loads",
            "other_model": "checkpoint names, adapters and weight checksums of the two sides",
            "logit_bias": "the engine's logit_bias and penalties: are a few tokens all of it?",
        }
        | ({"logit_softcap": "temperature and softcap of each side: all likely tokens move one way"} if turned else {}),
        everywhere=not rises,
    )
