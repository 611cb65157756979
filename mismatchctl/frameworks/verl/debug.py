"""verl's calculate_debug_metrics: probabilities of the sampled tokens, rollout against train."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Floats
from mismatchctl.frameworks.framework import Meaning
from mismatchctl.measure.metrics.quantity import TOKENS, Quantity
from mismatchctl.surrogates import exp

_PREFIX, _WHEN, _DIFF = "training/rollout_", "not in bypass mode", "distance of the token's two probabilities"
DEBUG: tuple[Meaning, ...] = (
    Meaning(f"{_PREFIX}probs_diff_valid", _WHEN, "1 where any token is valid, else 0", TOKENS, "max"),
    Meaning(f"{_PREFIX}probs_diff_max", _WHEN, _DIFF, TOKENS, "max", Quantity.PROB_DIFF),
    Meaning(f"{_PREFIX}probs_diff_mean", _WHEN, _DIFF, TOKENS, "mean", Quantity.PROB_DIFF),
    Meaning(f"{_PREFIX}probs_diff_std", _WHEN, _DIFF, TOKENS, "standard deviation (n - 1)", Quantity.PROB_DIFF),
    Meaning(f"{_PREFIX}actor_probs_pearson_corr", _WHEN, "probabilities of the token under train and rollout", TOKENS,
            "Pearson correlation", Quantity.PROBS),
)  # fmt: skip
"""What calculate_debug_metrics logs, before any rejection."""


def debug_metrics(train: Floats, rollout: Floats) -> dict[str, float]:
    """Differences of probabilities and their Pearson correlation, over the valid tokens [T].

    Undefined values are nan, as verl logs them: the deviation of one token, the correlation of constants.
    """
    if not len(train):
        return {item.name: float("nan") for item in DEBUG} | {f"{_PREFIX}probs_diff_valid": 0}
    ours, theirs = exp(train), exp(rollout)
    differences = np.abs(ours - theirs).astype(np.float64)
    return {
        f"{_PREFIX}probs_diff_valid": 1,
        f"{_PREFIX}probs_diff_max": float(differences.max()),
        f"{_PREFIX}probs_diff_mean": float(differences.mean()),
        f"{_PREFIX}probs_diff_std": float(differences.std(ddof=1)) if len(differences) > 1 else float("nan"),
        f"{_PREFIX}actor_probs_pearson_corr": _pearson(ours.astype(np.float64), theirs.astype(np.float64)),
    }


def _pearson(a: Floats, b: Floats) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")
