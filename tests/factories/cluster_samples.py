"""Samples of clusters with known values."""

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Segments
from mismatchctl.core.bins import LAYER_COLUMNS, close_layers, layer_bin, new_layer_table
from mismatchctl.results.model import Result
from mismatchctl.stats.comparison import Allowance
from mismatchctl.stats.samples import ClusterSample, find_metric
from tests.factories.cluster_results import result, table

K3 = find_metric("k3")
NONE = Allowance()


def k3(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(np.expm1(x) - x, 0.0)


def layer_columns(reference: NDArray[np.float64], k3: NDArray[np.float64], segments: Segments) -> NDArray[np.float64]:
    """Return the LAYER_COLUMNS [columns, S] of sequences from rollout log-probs and K3 per token."""
    table, where = new_layer_table(len(segments)), layer_bin(reference, k3, segments)
    for sums, values in zip(table.reshape(len(segments), -1, 2).T, (np.ones_like(k3), k3), strict=True):
        np.add.at(sums, (where, segments.spread(np.arange(len(segments)))), values)
    return close_layers(table)


def tokens(seed: int, clusters: int = 12, each: int = 80) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rollout log-probs and heavy-tailed log ratios [clusters, each]."""
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(0.6, (clusters, each))
    return rollout, 0.01 * rng.standard_t(2.5, (clusters, each)) * np.sqrt(-rollout + 0.01)


def sample(rollout: NDArray[np.float64], x: NDArray[np.float64], first: int = 0) -> ClusterSample:
    number, each = x.shape
    segments = Segments(np.arange(number + 1) * each)
    layers = layer_columns(rollout.ravel(), k3(x).ravel(), segments)
    sums = np.column_stack([np.full(number, float(each)), np.ones(number), k3(x).sum(axis=1), layers.T])
    keys = np.arange(first, first + number, dtype=np.uint64)
    return ClusterSample(keys, ("tokens", "sequences", "k3", *LAYER_COLUMNS), sums)


def by_hand(values: list[float], first: int = 0) -> ClusterSample:
    keys = np.arange(first, first + len(values), dtype=np.uint64)
    sums = np.column_stack([np.full(len(values), 100.0), np.ones(len(values)), values])
    return ClusterSample(keys, ("tokens", "sequences", "k3"), sums)


def layered(each: ClusterSample) -> Result:
    found = result(table(each.column("k3").tolist(), each.column("tokens").tolist(), each.keys.tolist()))
    clusters = found.runs["run"].clusters
    clusters.columns = [*clusters.columns, *LAYER_COLUMNS]
    beside = each.sums[:, [each.columns[name] for name in LAYER_COLUMNS]].tolist()
    clusters.sums = [[*sums, *more] for sums, more in zip(clusters.sums, beside, strict=True)]
    return found
