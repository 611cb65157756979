"""Batches of random tokens."""

import numpy as np

from mismatchctl.core.batch import Segments, TokenBatch


def made_batch(seed: int, lengths: list[int], dtype: type, *, gaps: bool = False, scale: float = 0.2) -> TokenBatch:
    """Make heavy-tailed log ratios with equal and very unlikely tokens, and advantages of both signs."""
    rng, tokens = np.random.default_rng(seed), sum(lengths)
    rollout = -rng.exponential(rng.choice([1e-3, 0.4, 5.0, 300.0], tokens), tokens)
    train = np.where(rng.random(tokens) < 0.2, rollout, np.minimum(rollout + scale * rng.standard_t(2, tokens), 0.0))
    current = np.minimum(train + scale / 3 * rng.standard_t(3, tokens), 0.0)
    position = np.concatenate([np.cumsum(rng.choice([1, 1, 1, 4], length)) for length in [*lengths, 0]]) - 1
    advantages = rng.normal(size=tokens) * (rng.random(tokens) < 0.8)
    reward = np.where(rng.random(len(lengths)) < 0.2, np.nan, rng.random(len(lengths)))
    sampled, trained = rng.integers(0, 5, len(lengths)), np.full(len(lengths), 4)
    return TokenBatch(
        Segments.from_lengths(lengths), rollout.astype(dtype), train.astype(dtype), current.astype(dtype),
        position.astype(np.int64) if gaps else None, advantages.astype(dtype), 
        {"reward": reward, "rollout_version": sampled, "train_version": trained},
        rows=np.arange(len(lengths)),
    )  # fmt: skip


def batch_of(groups: int, sequences: int, seed: int = 0) -> TokenBatch:
    """Make sequences of 0 to 9 tokens whose steps alternate."""
    rng = np.random.default_rng(seed)
    number = groups * sequences
    lengths = rng.integers(0, 10, number)
    rollout = -rng.exponential(0.4, lengths.sum())
    train = np.minimum(rollout + 0.05 * rng.standard_t(3, lengths.sum()), 0.0)
    columns = {"step": np.arange(number) % groups, "sequence_id": np.arange(number)}
    segments = Segments.from_lengths(lengths)
    return TokenBatch(segments, rollout, train, columns=columns, rows=np.arange(number))
