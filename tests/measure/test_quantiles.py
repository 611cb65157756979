"""Quantiles from fixed histograms are within 1%, and their intervals have the stated coverage."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mismatchctl.core.batch import Segments
from mismatchctl.core.bins import MAGNITUDE_BINS, magnitude_edges, signed_bin
from mismatchctl.core.formatting import INTERVAL_LEVEL
from mismatchctl.core.ratios import Ratios
from mismatchctl.measure.kernels.kernel import BUCKETS, NUMPY_KERNEL, PairTables, SequencePlaces
from mismatchctl.measure.metrics.metric import compute_quantiles, worst_share
from mismatchctl.measure.sums import PairCollector, PairSums, hash_values

Floats = NDArray[np.float64]
SHARES = (0.5, 0.9, 0.99, 0.999)


def collected(log_ratios: list[Floats], clusters: NDArray[np.int64] | None = None) -> PairSums:
    """Collect one sequence per array, with clusters in buckets by their hash."""
    lengths = [len(own) for own in log_ratios]
    x = np.concatenate(log_ratios)
    ids = np.arange(len(lengths)) if clusters is None else clusters
    collector = PairCollector(NUMPY_KERNEL, PairTables())
    buckets = (hash_values(ids) % np.uint64(BUCKETS)).astype(np.int64)
    ratios = Ratios(np.minimum(x, 0.0), -np.maximum(x, 0.0), Segments.from_lengths(lengths))  # log-probs, below 0
    with np.errstate(over="ignore"):
        collector.reduce(ratios, None, SequencePlaces(buckets, buckets, np.arange(len(buckets))))
    return collector.sums()[0]


def quantiles(pair: PairSums, shares: tuple[float, ...], largest: float) -> Floats:
    return np.array([value for value, *_ in compute_quantiles(pair, shares, largest)])


def quantile_intervals(pair: PairSums, shares: tuple[float, ...], largest: float) -> Floats:
    return np.array([interval for _, interval, _ in compute_quantiles(pair, shares, largest)])


def exact(x: Floats, share: float) -> float:
    return float(np.sort(np.abs(x))[max(math.ceil(round(share * len(x), 9)), 1) - 1])


@pytest.mark.parametrize("scale", [10.0**power for power in range(-10, 2)])
@pytest.mark.parametrize("name", ["normal", "laplace", "cauchy", "exponential", "constant"])
def test_quantiles_are_within_one_percent(scale: float, name: str) -> None:
    rng = np.random.default_rng(3)
    x = (
        scale
        * {
            "normal": rng.normal(size=5_000),
            "laplace": rng.laplace(size=5_000),
            "cauchy": np.clip(rng.standard_cauchy(5_000), -10, 10),
            "exponential": rng.exponential(size=5_000) ** 3,
            "constant": np.full(5_000, 1.2345),
        }[name]
    )
    found = quantiles(collected([x]), SHARES, float(np.abs(x).max()))
    for share, value in zip(SHARES, found, strict=True):
        expected = exact(x, share)
        assert value == pytest.approx(expected, rel=0.01, abs=2.0**-40), share


@settings(derandomize=True, max_examples=300)
@given(st.floats(2.0**-40, 2.0**13))
def test_bins_contain_their_values(value: float) -> None:
    edges = magnitude_edges()
    inside = int(signed_bin(np.array([value]))[0]) - MAGNITUDE_BINS
    low, high = edges[inside], edges[inside + 1]
    assert low * (1 - 1e-7) <= value <= high * (1 + 1e-7)  # a float32 may round up to the next edge
    assert abs((low + high) / 2 - value) <= 0.0079 * value
    mirrored = int(signed_bin(np.array([-value]))[0])
    assert mirrored == MAGNITUDE_BINS - 1 - inside


def test_quantiles_handle_zeros_and_extremes() -> None:
    x = np.array([0.0] * 60 + [1e-14] * 30 + [700.0] * 10)
    found = quantiles(collected([x]), (0.5, 0.9, 0.99), 700.0)
    assert found[:2].tolist() == [0.0, 0.0]  # values below 2^-40 share a bin
    assert found[2] == pytest.approx(700, rel=0.01)
    assert found[2] <= 700.0
    assert np.isnan(quantiles(collected([np.zeros(0)]), SHARES, 0.0)).all()


def test_quantile_intervals_have_their_coverage() -> None:
    """The 95% interval of the median of clustered data contains the true median in about 95% of draws."""
    rng, truth, covered, trials = np.random.default_rng(11), math.exp(-2.0), 0, 60
    for _ in range(trials):
        centres = rng.normal(-2.0, 0.5, 200)  # of log |x|, one per cluster
        sequences = [np.exp(centre + rng.normal(0, 0.5, 10)) for centre in centres]
        low, high = quantile_intervals(collected(sequences), (0.5,), math.inf)[0]
        covered += bool(low <= truth * 1.008 and truth * 0.992 <= high)
    assert abs(covered / trials - INTERVAL_LEVEL) < 0.1  # binomial: a standard error of 0.03


def test_quantile_intervals_respect_clusters() -> None:
    """Ten copies of each sequence in its cluster carry no more information than one."""
    rng = np.random.default_rng(12)
    own = [np.exp(rng.normal(-2, 0.5) + rng.normal(0, 0.1, 20)) for _ in range(100)]
    once = quantile_intervals(collected(own), (0.5,), math.inf)[0]
    ids = np.arange(100)
    copied = quantile_intervals(collected(own * 10, np.tile(ids, 10)), (0.5,), math.inf)[0]
    apart = quantile_intervals(collected(own * 10, np.arange(1_000)), (0.5,), math.inf)[0]
    assert copied.tolist() == once.tolist()
    assert np.ptp(apart) < 0.75 * np.ptp(once)


def test_one_cluster_gives_no_interval() -> None:
    assert np.isnan(quantile_intervals(collected([np.ones(10)]), SHARES, 1.0)).all()


def test_few_values_beyond_a_quantile_are_a_heavy_tail() -> None:
    rng = np.random.default_rng(13)
    own = [np.abs(rng.normal(size=100)) for _ in range(20)]

    def heavy(x: list[Floats]) -> list[bool]:
        found = compute_quantiles(collected(x), (0.5, 0.99, 0.999), math.inf)
        return [math.isfinite(covers) for *_, covers in found]

    assert heavy(own) == [False, False, True]  # two of 2,000 tokens are beyond the last bin
    assert heavy([*own[1:], own[0] + 10]) == [True, True, True]  # most tokens beyond the quantile belong to one cluster
    assert heavy([np.zeros(100)] * 20) == [False, False, False]  # no scatter


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0])
def test_the_worst_share_matches_numpy(scale: float) -> None:
    x = scale * np.random.default_rng(4).standard_t(3, 20_000)
    k3 = np.sort(np.expm1(x) - x) if scale == 1.0 else np.sort(x**2 / 2 + x**3 / 6 + x**4 / 24)
    expected = k3[-20:].sum() / k3.sum()
    # Twenty tokens. A token in the last bin counts as the mean of the bin, with an error of at most 3% of one token.
    assert worst_share(collected([x]), 0.001) == pytest.approx(expected, rel=0.03)
