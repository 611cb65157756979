"""The rejection of a batch yet to come, drawn from the same prompts and steps as the dump."""

from __future__ import annotations

from typing import Literal

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.measure.table import Hashes
from mismatchctl.predict.prediction import Prediction, generator, middle, unknown
from mismatchctl.predict.sample import SequenceSample

Unit = Literal["tokens", "sequences"]
_MOST = 1 << 62
"""Prompts of a batch beyond which no number says more."""
DRAWS = 2000
PERMUTATIONS = 999
SIGNIFICANT = 0.05
_MODEL = (
    "a batch of as many prompts as those of the dump give, each prompt's weight unknown as in the Bayesian bootstrap, "
    "with half a rejected and half a kept sequence added: single sequences give the beta-binomial law"
)


def batch_rejection(sample: SequenceSample, correction: int, sequences: int, unit: Unit = "sequences") -> Prediction:
    """The fraction that the correction of this number rejects of a batch of so many sequences.

    The interval is that of the batch's own fraction: it holds what is unknown of the dump's population and the luck of
    the batch. Where steps differ beyond chance, the batch is one more such step, and the status says so.

    Args:
        sample: of one run.
        correction: which of the sample's corrections.
        sequences: size of the batch.
        unit: whether tokens or whole sequences are counted; a sequence is rejected when nothing of it is kept.
    """
    quantity, question = f"rejected_{unit}", f"a batch of {sequences:,} sequences"
    kept = sample.kept[:, correction]
    size = sample.tokens.astype(np.float64) if unit == "tokens" else np.ones(len(sample))
    rejected = size - kept if unit == "tokens" else (kept == 0).astype(np.float64)
    clusters, steps, table = _by_cluster(sample, np.stack([rejected, size], axis=1))
    if len(clusters) < 2:
        return unknown(question, quantity, "fewer than 2 prompts", _MODEL)
    random = generator(clusters, f"{quantity} {sequences}")
    differ = steps_differ(table, steps, generator(clusters, "permutation"))
    per_cluster = len(sample) / len(clusters)
    draws = _draw(table, steps if differ else np.zeros_like(steps), per_cluster, sequences, random)
    value = float(table[:, 0].sum() / table[:, 1].sum())
    status = "ok" if sample.is_complete else "from a subsample of the prompts"
    if differ:
        status = "not stationary: the steps differ, and the next one may differ again"
    return Prediction(question, quantity, value, middle(draws), status, _MODEL)


def _by_cluster(sample: SequenceSample, columns: Float64s) -> tuple[Hashes, Ints, Float64s]:
    """Clusters, the index of each one's step, and sums of columns by cluster."""
    clusters, first, where = np.unique(sample.cluster, return_index=True, return_inverse=True)
    table = np.zeros((len(clusters), columns.shape[1]))
    np.add.at(table, where, columns)
    return clusters, np.unique(sample.step[first], return_inverse=True)[1], table


def _draw(table: Float64s, steps: Ints, per_cluster: float, sequences: int, random: np.random.Generator) -> Float64s:
    """Fractions of DRAWS batches; each comes from one step, whose clusters have unknown weights."""
    prompts = min(max(round(sequences / per_cluster), 1), _MOST)
    groups = [np.flatnonzero(steps == step) for step in np.unique(steps)]
    which = random.integers(0, len(groups), DRAWS)
    fractions = np.empty(DRAWS)
    for number, members in enumerate(groups):
        own = np.flatnonzero(which == number)
        if not len(own):
            continue
        rejected, size, prior = _with_prior(table[members], per_cluster)
        shape = np.concatenate([np.ones(len(members)), prior])
        weights = random.standard_gamma(shape, (len(own), len(shape)))
        counts = random.multinomial(prompts, weights / weights.sum(axis=1, keepdims=True))
        fractions[own] = (counts @ rejected) / (counts @ size)
    return fractions


def _with_prior(table: Float64s, per_cluster: float) -> tuple[Float64s, Float64s, Float64s]:
    """Rejected and size of clusters, followed by one that is all rejected and one all kept, and those two's weight.

    Each stands for half a sequence; sequences of one prompt that go together count as fewer.
    """
    rejected, size = table.T
    mean, n = size.mean(), len(table)
    fraction = rejected.sum() / size.sum()
    scatter = ((rejected - fraction * size) ** 2).sum() / size.sum() * n / max(n - 1, 1)
    alone = fraction * (1 - fraction) * mean / per_cluster  # the same, were sequences independent
    together = float(np.clip(scatter / alone, 1.0, per_cluster)) if alone > 0 else 1.0
    ends = np.array([mean, 0.0])
    return np.append(rejected, ends), np.append(size, [mean, mean]), np.full(2, 0.5 * together / per_cluster)


def steps_differ(table: Float64s, steps: Ints, random: np.random.Generator) -> bool:
    """Whether steps differ in their fraction by more than chance, or drift with their order: a permutation test.

    Args:
        table: rejected and size by cluster [N, 2].
        steps: index of each cluster's step [N].
        random: for the permutations.
    """
    count = int(steps.max(initial=0)) + 1
    if count < 2:
        return False
    residual = table[:, 0] - table[:, 0].sum() / table[:, 1].sum() * table[:, 1]
    if not residual.any():
        return False
    orders = np.stack([np.arange(len(steps)), *(random.permutation(len(steps)) for _ in range(PERMUTATIONS))])
    shuffled = residual[orders]
    one_hot = np.eye(count)[steps]
    between = ((shuffled @ one_hot) ** 2 / one_hot.sum(axis=0)).sum(axis=1)
    return bool((between >= between[0] * (1 - 1e-12)).mean() < SIGNIFICANT)
