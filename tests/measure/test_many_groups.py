"""Thousands of small groups give the same numbers together as alone, with memory in proportion to their tokens."""

import math

import numpy as np
import pytest

from mismatchctl.core.batch import TokenBatch
from mismatchctl.core.bins import MAGNITUDE_BINS, SIGNED_BINS, magnitude_bin, magnitude_edges, signed_bin
from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.kernels.kernel import BUCKETS, PairTables
from mismatchctl.measure.metrics.evaluation import Accumulator
from mismatchctl.measure.reduction import MeasurePlan, reduce_batch
from mismatchctl.measure.sums import MAX_ROWS, ClusterTable, Histogram, hash_values, number_rows, read_histograms
from tests.factories.batches import batch_of

CORRECTIONS: list[Correction] = [find_preset(name) for name in ("token_tis", "geo_rs")]


def only(batch: TokenBatch, step: int) -> TokenBatch:
    return batch.take(np.flatnonzero(batch.columns["step"] == step))


@pytest.mark.parametrize("values", [[10, 2, 2, -1, 10, 0], [3, 3, 3, 3, 3, 3], [2**62, 7, -(2**62), 7, 70, 700]])
def test_numbers_are_ordered_like_their_text(values: list[int]) -> None:
    numbers, before = np.array(values), np.array([1, 0, 1, 0, 1, 0])
    texts = numbers.astype(str).astype(object)
    ranks = {text: rank for rank, text in enumerate(sorted(set(zip(before.tolist(), texts.tolist(), strict=True))))}
    expected = [ranks[key] for key in zip(before.tolist(), texts.tolist(), strict=True)]
    assert number_rows([numbers], before).tolist() == number_rows([texts], before).tolist() == expected
    assert hash_values(numbers).tolist() == hash_values(texts).tolist()


@pytest.mark.parametrize("columns", [3, 40, 600])
@pytest.mark.parametrize("clusters", [2, 30, 1000])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_rows_of_a_cluster_are_summed_for_any_table_shape(columns: int, clusters: int, layout: str) -> None:
    rng, rows = np.random.default_rng(0), 300
    names = rng.integers(0, clusters, rows).astype(np.uint64)
    values = np.asarray(rng.normal(size=(rows, columns)), order=layout)  # type: ignore[call-overload]
    table = ClusterTable.from_rows(names, np.zeros_like(names), values, values[:, :2])
    assert table.clusters.tolist() == sorted(set(names.tolist()))
    for name, sums, maxima in zip(table.clusters, table.sums, table.maxima, strict=True):
        own = values[names == name]
        np.testing.assert_allclose(sums, [math.fsum(column) for column in own.T], rtol=1e-13, atol=1e-14)
        assert maxima.tolist() == [max(column) for column in own[:, :2].T]


@pytest.mark.slow
def test_groups_reduce_equally_together_and_alone() -> None:
    groups = 2 * MAX_ROWS
    batch, plan = batch_of(groups, 6), MeasurePlan(tuple(CORRECTIONS))
    together = reduce_batch(batch, "run", plan)
    assert len(together.cells) == groups
    for (_, cell), sums in together.cells.items():
        assert isinstance(cell[0], int)
        (alone,) = reduce_batch(only(batch, cell[0]), "run", plan).cells.values()
        np.testing.assert_array_equal(sums.table.clusters, alone.table.clusters)
        np.testing.assert_allclose(sums.table.sums, alone.table.sums, rtol=1e-13, atol=1e-15)
        np.testing.assert_array_equal(sums.table.maxima, alone.table.maxima)
        own, other = sums.pairs["mismatch"], alone.pairs["mismatch"]
        for name in ("places", "tokens", "bins", "counts"):
            np.testing.assert_array_equal(getattr(own.histogram, name), getattr(other.histogram, name))
        np.testing.assert_allclose(own.histogram.k3, other.histogram.k3, rtol=1e-13)
        np.testing.assert_array_equal(own.token_tail, other.token_tail)
        np.testing.assert_allclose(own.sequence_tail, other.sequence_tail, rtol=1e-12, atol=1e-15)


def test_groups_close_equally_together_and_alone() -> None:
    batch, plan = batch_of(40, 8), MeasurePlan(tuple(CORRECTIONS))
    together, alone = Accumulator(plan), Accumulator(plan)
    together.add(reduce_batch(batch, "run", plan))
    together.finish()
    for step in range(40):
        alone.add(reduce_batch(only(batch, step), "run", plan))
        alone.finish()
    (rows,) = together.runs["run"].groups
    place = {step: number for number, step in enumerate(together.runs["run"].steps)}
    for step, row in zip(alone.runs["run"].steps, alone.runs["run"].groups, strict=True):
        found = zip([row.metrics, *row.corrections], [rows.metrics, *rows.corrections], strict=True)
        for own, others in found:
            for key, estimate in own.items():
                value, error, interval, status = estimate.at(0)
                same = others[key].at(place[step])
                assert same[3] == status, key
                for one, other in ((value, same[0]), (error, same[1])):
                    assert other == (None if one is None else pytest.approx(one, rel=1e-9, abs=1e-12)), key
                assert (same[2] is None) == (interval is None), key


def test_group_sizes_follow_the_number_of_tokens() -> None:
    batch = batch_of(300, 5)
    for (_, (step, _)), sums in reduce_batch(batch, "run", MeasurePlan()).cells.items():
        assert isinstance(step, int)
        histogram = sums.pairs["mismatch"].histogram
        assert len(histogram.places) <= only(batch, step).tokens == histogram.tokens.sum() == histogram.counts.sum()
        assert histogram.places.base is None or histogram.places.base.size <= BUCKETS * batch.tokens


def histogram_of(size: int, seed: int) -> Histogram:
    rng = np.random.default_rng(seed)
    places, signed = (np.unique(rng.integers(0, most, size)) for most in (BUCKETS * MAGNITUDE_BINS, SIGNED_BINS))
    tokens, counts = (rng.integers(1, 9, len(own)) for own in (places, signed))
    return Histogram(places, tokens, signed, counts, rng.random(len(signed)))


@pytest.mark.parametrize("size", [10, 20_000])
def test_histograms_are_added(size: int) -> None:
    one, other = (histogram_of(size, seed) for seed in (1, 2))
    both = one + other
    for where, what, most in (
        ("places", "tokens", BUCKETS * MAGNITUDE_BINS),
        ("bins", "counts", SIGNED_BINS),
        ("bins", "k3", SIGNED_BINS),
    ):
        expected = np.zeros(most)
        for own in (one, other):
            for place, value in zip(getattr(own, where), getattr(own, what), strict=True):
                expected[place] += value
        np.testing.assert_array_equal(getattr(both, where), np.flatnonzero(expected))
        np.testing.assert_array_equal(getattr(both, what), expected[getattr(both, where)])
    nothing, zeros = np.zeros(0, np.int64), np.zeros(0)
    assert (one + Histogram(nothing, nothing, nothing, nothing, zeros)).places is one.places


def test_histograms_count_tokens_by_bucket_and_bin() -> None:
    rng = np.random.default_rng(7)
    x, bucket = rng.standard_t(2, 500) * rng.choice([0.0, 1e-3, 1.0], 500), rng.choice([3, 17, 63], 500)
    tables, own = PairTables(), signed_bin(x)
    np.add.at(tables.tokens, (bucket, magnitude_bin(own)), 1)
    np.add.at(tables.sums[0, :, 0], own, 1.0)
    filled, tokens = read_histograms(tables)[0].by_bucket()
    magnitudes = np.searchsorted(magnitude_edges(), np.abs(x.astype(np.float32)), side="right") - 1
    np.testing.assert_array_equal(filled, np.unique(magnitudes))
    for place, each in enumerate((3, 17, 63)):
        np.testing.assert_array_equal(tokens[place], [np.sum(magnitudes[bucket == each] == bin_) for bin_ in filled])
