"""Distributions over tokens, and sampler settings that change them."""

from collections.abc import Callable

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def top(rollout: np.ndarray, train: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids of the k most likely tokens of the rollout, and the log-probs of both sides."""
    ids = np.argsort(-rollout, axis=-1, kind="stable")[..., :k]
    return ids, np.take_along_axis(rollout, ids, -1), np.take_along_axis(train, ids, -1)


Policy = Callable[[np.ndarray], np.ndarray]


def tempered(temperature: float) -> Policy:
    return lambda logits: log_softmax(logits / temperature)


def truncated(*, k: float = np.inf, p: float = 1.0, least: float = 0.0) -> Policy:
    def policy(logits: np.ndarray) -> np.ndarray:
        whole = log_softmax(logits)
        order = np.argsort(-whole, axis=-1, kind="stable")
        ranked = np.exp(np.take_along_axis(whole, order, -1))
        stays = (np.cumsum(ranked, axis=-1) - ranked < p) & (ranked >= least * ranked[:, :1])
        stays &= np.arange(logits.shape[-1]) < k
        kept = np.zeros_like(stays)
        np.put_along_axis(kept, order, stays, -1)
        return log_softmax(np.where(kept, whole, -np.inf))

    return policy
