"""verl's calculate_debug_metrics: probabilities of the sampled tokens, rollout against train."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Floats
from mismatchctl.losses import exp


def debug_metrics(train: Floats, rollout: Floats) -> dict[str, float]:
    """Differences of probabilities and their Pearson correlation, over the valid tokens [T].

    Undefined values are nan, as verl logs them: the deviation of one token, the correlation of constants.
    """
    prefix = "training/rollout_"
    if not len(train):
        names = ("probs_diff_max", "probs_diff_mean", "probs_diff_std", "actor_probs_pearson_corr")
        return {f"{prefix}probs_diff_valid": 0} | {prefix + name: float("nan") for name in names}
    ours, theirs = exp(train), exp(rollout)
    differences = np.abs(ours - theirs).astype(np.float64)
    return {
        f"{prefix}probs_diff_valid": 1,
        f"{prefix}probs_diff_max": float(differences.max()),
        f"{prefix}probs_diff_mean": float(differences.mean()),
        f"{prefix}probs_diff_std": float(differences.std(ddof=1)) if len(differences) > 1 else float("nan"),
        f"{prefix}actor_probs_pearson_corr": _pearson(ours.astype(np.float64), theirs.astype(np.float64)),
    }


def _pearson(a: Floats, b: Floats) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")
