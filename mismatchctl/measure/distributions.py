"""Columns of distributions: the k most likely tokens of the rollout at each place, with both sides' log-probs.

All other tokens together are one more outcome, the rest. What is known then is exact of the coarser distribution, and a
bound on the whole one: merging outcomes can only lower a divergence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, TokenBatch

ROLLOUT_TOP = "rollout_top_log_probs"
OTHERS = ("train_top_log_probs", "reference_top_log_probs")
"""What the rollout is compared with: the trainer; where that recorded none, the scorer, which has its weights."""
NAMES = ("top", "top_kl", "top_tv", "top_tv_most", "top_mass_rollout", "top_mass_train", "top_agrees")
LEAST_REST = 1e-6
"""A rest is at least so likely: float32 does not add up to 1 more exactly."""
LEAST = -700.0
"""Log-probs below count as this, where exp is still above 0."""
MOST = 1e-3
"""Of a log-prob that was rounded; a place where one is larger holds no distribution."""


def distribution_columns(block: TokenBatch) -> dict[str, Float64s]:
    """Tokens with both distributions, and over these the sums of what `compared` gives, per sequence [S] each."""
    rollout, train = block.others.get(ROLLOUT_TOP), other(block.others)
    if rollout is None or train is None or rollout.shape != train.shape:
        return {name: np.zeros(len(block)) for name in NAMES}
    known: NDArray[Any] = np.all((rollout <= MOST) & (train <= MOST), axis=1)  # of NaN, neither is true
    values = {"top": np.ones(len(known)), **compared(rollout, train)}
    segments = block.segments
    return {name: segments.sum(segments.from_host(np.where(known, values[name], 0.0))) for name in NAMES}


def other(tokens: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
    """The log-probs that the rollout's are compared with, of per-token columns by name."""
    return next((tokens[name] for name in OTHERS if name in tokens), None)


def compared(rollout: NDArray[Any], train: NDArray[Any]) -> dict[str, Float64s]:
    """The divergences of two distributions at each place, from the log-probs of k tokens.

    Args:
        rollout: log-probs of the k tokens by the rollout, nats [T, k]; -inf where it cannot choose them.
        train: by the trainer, of the same tokens.

    Returns:
        [T] each: `top_kl`, KL of the rollout to the trainer; `top_tv`, the total variation, and `top_tv_most`, what
        it is at most; `top_mass_rollout` and `top_mass_train`, the mass that the k hold; `top_agrees`, 1 where one
        token is the most likely of these k for both.
    """
    a, b = (np.clip(side.astype(np.float64), LEAST, MOST) for side in (rollout, train))
    p, q = np.where(rollout == -np.inf, 0.0, np.exp(a)), np.exp(b)
    mass_p, mass_q = p.sum(axis=1), q.sum(axis=1)
    rest_p, rest_q = (np.maximum(1 - mass, LEAST_REST) for mass in (mass_p, mass_q))
    apart = np.abs(p - q).sum(axis=1)
    return {
        "top_kl": (p * (a - b)).sum(axis=1) + rest_p * np.log(rest_p / rest_q),
        "top_tv": (apart + np.abs(rest_p - rest_q)) / 2,
        "top_tv_most": (apart + rest_p + rest_q) / 2,
        "top_mass_rollout": mass_p,
        "top_mass_train": mass_q,
        "top_agrees": (np.argmax(a, axis=1) == np.argmax(b, axis=1)).astype(np.float64),
    }
