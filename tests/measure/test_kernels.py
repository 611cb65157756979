"""Every kernel equals the plain kernel: counts and extremes exactly, sums to rounding.

The kernel for GPUs runs on the CPU here, and on a GPU if there is one.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.core.bins import close_layers, new_layer_table
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.columns import TOKEN_MAXIMA, TOKEN_SUMS
from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL
from mismatchctl.measure.kernels.kernel import (
    BREAKDOWN_SUMS,
    BUCKETS,
    NUMPY_KERNEL,
    Kernel,
    PairTables,
    RunTables,
    SequencePlaces,
)
from tests.cli.command import at_once
from tests.paths import SAMPLE_DATA

SAMPLE = SAMPLE_DATA / "moe"
Floats = NDArray[np.float64]
SIGNED = {"log_ratio", "excess", "policy", "reference", "neighbour_product", "neighbour_sum"}
"""Sums whose terms can cancel, so that their error is relative to the sum of absolute terms."""


class Reduced:
    def __init__(
        self, kernel: Kernel, policy: Floats, reference: Floats, lengths: list[int], position: NDArray[np.int64] | None
    ) -> None:
        self.segments = Segments.from_lengths(lengths)
        self.pair, self.run = PairTables(), RunTables(new_layer_table(len(lengths)))
        buckets = np.arange(len(lengths)) * 7 % BUCKETS
        batch = TokenBatch(self.segments, reference, policy, position=position, rows=np.arange(len(lengths)))
        places = SequencePlaces(buckets, buckets, np.arange(len(lengths)) // 2)
        found, outside = [], []
        for start, block in kernel.split_blocks(batch):
            ratios = kernel.compute_ratios(block.train, block.rollout, block.segments)
            within = places.part(start, start + len(block))
            found.append(kernel.reduce_tokens(ratios, block.position, within, self.pair, self.run))
            outside.append(ratios.outside_counts)
        self.sums, self.maxima = (np.concatenate(each, axis=1) for each in zip(*found, strict=True))
        self.outside = np.concatenate(outside, axis=1)


def policies(seed: int, tokens: int, scale: float, dtype: type) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    reference = -rng.exponential(rng.choice([1e-3, 0.4, 5.0, 300.0]), tokens)
    policy = np.minimum(reference + scale * rng.standard_t(2, tokens), 0.0)
    same = rng.random(tokens) < 0.2
    return np.where(same, reference, policy).astype(dtype), reference.astype(dtype)


def compared(
    kernel: Kernel, policy: Floats, reference: Floats, lengths: list[int], position: NDArray[np.int64] | None
) -> None:
    plain, other = (Reduced(kernel, policy, reference, lengths, position) for kernel in (NUMPY_KERNEL, kernel))
    x = policy.astype(np.float64) - reference.astype(np.float64)
    magnitudes = {"log_ratio": x, "excess": np.expm1(np.clip(x, -20, 20)), "policy": policy, "reference": reference}
    magnitudes |= {"neighbour_product": x * x, "neighbour_sum": 2 * x}
    segments = plain.segments
    precision = 1e-13 * np.maximum(1.0, segments.lengths / 10_000)
    for name, expected, value in zip(TOKEN_SUMS, plain.sums, other.sums, strict=True):
        size = segments.sum(np.abs(magnitudes[name])) * (2 if name in SIGNED else 1) if name in SIGNED else expected
        allowed = precision * np.abs(size) + (1e-15 * segments.lengths if "prob" in name else 0)
        with np.errstate(invalid="ignore"):
            close = (np.abs(value - expected) <= allowed) | (value == expected)
        assert close.all(), (name, value, expected)
    for name, expected, value in zip(TOKEN_MAXIMA, plain.maxima, other.maxima, strict=True):
        assert value == pytest.approx(expected, rel=1e-13, abs=1e-15 if name == "prob_diff" else 0)
    np.testing.assert_array_equal(plain.pair.tokens, other.pair.tokens)
    np.testing.assert_array_equal(plain.pair.sums[..., 0], other.pair.sums[..., 0])
    np.testing.assert_allclose(other.pair.sums[..., 1], plain.pair.sums[..., 1], rtol=1e-12)
    np.testing.assert_array_equal(plain.run.joint, other.run.joint)
    np.testing.assert_allclose(
        close_layers(other.run.layers), close_layers(plain.run.layers), rtol=1e-6
    )  # the last bit decides for tokens near an edge
    for name in ("surprisal", "position"):
        expected_table, table = plain.run.breakdowns[name], other.run.breakdowns[name]
        np.testing.assert_array_equal(expected_table[..., 0], table[..., 0])
        np.testing.assert_allclose(table[..., :BREAKDOWN_SUMS], expected_table[..., :BREAKDOWN_SUMS], rtol=1e-12)
        np.testing.assert_allclose(
            table[..., BREAKDOWN_SUMS:], expected_table[..., BREAKDOWN_SUMS:], rtol=1e-12, atol=1e-10
        )


@pytest.mark.slow
@settings(derandomize=True, max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(0, 2500), min_size=1, max_size=8),
    scale=st.sampled_from([0.0, 1e-9, 1e-3, 0.1, 3.0, 40.0]),
    dtype=st.sampled_from([np.float32, np.float64]),
    gaps=st.booleans(),
)
def test_kernels_agree(kernel: Kernel, seed: int, lengths: list[int], scale: float, dtype: type, gaps: bool) -> None:
    policy, reference = policies(seed, sum(lengths), scale, dtype)
    position = None
    if gaps:
        rng = np.random.default_rng(seed)
        position = np.concatenate([np.cumsum(rng.integers(1, 3, length)) - 1 for length in lengths]).astype(np.int64)
    compared(kernel, policy, reference, lengths, position)


@pytest.mark.slow
def test_kernels_agree_on_extreme_log_probs(kernel: Kernel) -> None:
    policy = np.array([0.0, -1.0, -800.0, -1e-9, -0.3, -5.0, -30.0, -700.0, -720.0, -2.0])
    reference = np.array([-1e-12, -800.0, -1.0, 0.0, -0.7, -0.1, -1.0, -1.0, -719.0, -2.0])
    compared(kernel, policy, reference, [3, 0, 7], None)


def test_kernels_accept_only_empty_sequences(kernel: Kernel) -> None:
    compared(kernel, np.zeros(0), np.zeros(0), [0, 0], None)


@pytest.mark.slow
def test_long_batches_are_split(kernel: Kernel) -> None:
    lengths = [300_000, 0, 900_000, 200_000, 1, 70_000]
    compared(kernel, *policies(5, sum(lengths), 0.1, np.float32), lengths, None)


def test_overflowing_ratios_are_infinite(kernel: Kernel) -> None:
    batch = TokenBatch(Segments(np.array([0, 2])), np.array([-3000.0, -2.5]), np.array([-1.0, -2.0]), rows=np.zeros(1))
    for own, (_, block) in ((each, found) for each in (NUMPY_KERNEL, kernel) for found in each.split_blocks(batch)):
        ratios = own.compute_ratios(block.train, block.rollout, block.segments)
        with np.errstate(over="ignore"):
            k3, excess = ratios.k3[np.arange(2)], ratios.excess[np.arange(2)]
        assert k3[0] == math.inf
        assert excess[0] == pytest.approx(math.expm1(20))
        assert k3[1] == pytest.approx(math.expm1(0.5) - 0.5, rel=1e-14)


@settings(derandomize=True)
@given(st.floats(-700, 700))
def test_kernels_agree_on_terms_of_one_token(x: float) -> None:
    reference = -750.0 if x < -100 else -abs(x) - 1.0
    compiled = COMPILED_KERNEL.compute_ratios(
        np.array([reference + x]), np.array([reference]), Segments(np.array([0, 1]))
    )
    own = float(compiled.log_ratio[0])
    with np.errstate(over="ignore"):
        assert compiled.exp_minus_one[0] == pytest.approx(math.expm1(own), rel=4e-16)
    exact_k3 = own * own / 2 + own**3 / 6 if abs(own) < 1e-5 else None
    if exact_k3 is not None:
        assert compiled.k3[0] == pytest.approx(exact_k3, rel=1e-10)
    assert compiled.policy_prob[0] == pytest.approx(math.exp(reference + x), rel=1e-13)
    assert compiled.reference_prob[0] == pytest.approx(math.exp(reference), rel=1e-13, abs=1e-307)


@pytest.mark.slow
@settings(derandomize=True)
@given(seed=st.integers(0, 1000), low=st.floats(-0.5, 0.0), high=st.floats(0.0, 0.5))
def test_tokens_beyond_a_bound_are_found(kernel: Kernel, seed: int, low: float, high: float) -> None:
    policy, reference = policies(seed, 60, 0.1, np.float32)
    offsets, chosen = np.array([0, 10, 10, 35, 60]), np.array([0, 1, 3])
    x = policy.astype(np.float64) - reference.astype(np.float64)
    expected = [j for j in (*range(10), *range(35, 60)) if x[j] <= low or x[j] >= high]
    batch = TokenBatch(Segments(offsets), reference, policy, rows=np.arange(4))
    for own, (_, block) in ((each, found) for each in (NUMPY_KERNEL, kernel) for found in each.split_blocks(batch)):
        ratios = own.compute_ratios(block.train, block.rollout, block.segments)
        found = own.find_outside(ratios, chosen, low, high)
        assert found.tolist() == expected
        np.testing.assert_array_equal(ratios.log_ratio_at(found), x[expected])


@pytest.mark.parametrize("count", [1 << 14, (1 << 14) + 1, 50_000])
def test_all_tokens_beyond_a_bound_are_found(count: int) -> None:
    """In a broken run the search finds nearly every token and must grow its buffer."""
    segments, rng = Segments.from_lengths([7, count, 5]), np.random.default_rng(count)
    policy = np.where(rng.random(segments.tokens) < 0.5, -3.0, -1.0)
    for kernel in (NUMPY_KERNEL, COMPILED_KERNEL):
        ratios = kernel.compute_ratios(policy, np.full(segments.tokens, -2.0), segments)
        assert kernel.find_outside(ratios, np.array([1]), -0.5, 0.5).tolist() == [*range(7, 7 + count)]


@settings(derandomize=True, max_examples=8)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([0.0, 0.01, 1.0]))
def test_tokens_outside_bounds_are_counted(kernel: Kernel, seed: int, scale: float) -> None:
    lengths, tau = [10, 0, 2100, 25], (None, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10)
    low, high = np.log([1 / each if each else 0.999 for each in tau]), np.log([each or 1.002 for each in tau])
    policy, reference = policies(seed, sum(lengths), scale, np.float64)
    policy[[3, 1500]], reference[[3, 1500]] = (0, low[2]), (-high[1], 0)  # a token on the edge is inside
    x, ends = policy - reference, np.cumsum([0, *lengths])
    expected = [
        [sum(not low[k] <= x[j] <= high[k] for j in range(*own)) for own in itertools.pairwise(ends)] for k in range(9)
    ]
    for own in (NUMPY_KERNEL, kernel):
        np.testing.assert_array_equal(Reduced(own, policy, reference, lengths, None).outside, expected)


def test_half_precision_and_strided_arrays_are_read(kernel: Kernel) -> None:
    policy, reference = policies(1, 400, 0.1, np.float32)
    strided = Reduced(kernel, policy[::2], reference[::2], [200], None)
    plain = Reduced(NUMPY_KERNEL, policy[::2], reference[::2], [200], None)
    np.testing.assert_allclose(strided.sums, plain.sums, rtol=1e-12, atol=1e-13)
    half = policy.astype(np.float16), reference.astype(np.float16)
    np.testing.assert_allclose(
        Reduced(kernel, *half, [400], None).sums, Reduced(NUMPY_KERNEL, *half, [400], None).sums, rtol=1e-12, atol=1e-13
    )


def test_threads_do_not_change_results(kernel: Kernel) -> None:
    policy, reference = policies(3, 50_000, 0.1, np.float32)
    alone = Reduced(kernel, policy, reference, [50_000], None).sums
    found: list[Floats] = []
    at_once(*[lambda: found.append(Reduced(kernel, policy, reference, [50_000], None).sums)] * 4)
    assert len(found) == 4
    for sums in found:
        np.testing.assert_array_equal(sums, alone)


@pytest.mark.slow
def test_kernels_give_equal_results(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    corrections = [find_preset(name) for name in ("token_tis", "geo_rs", "miles-moe-2")]
    plain = analyze([str(SAMPLE)], corrections)
    monkeypatch.setattr("mismatchctl.api.analyze.analyze.choose_kernel", lambda *_: kernel)
    found = analyze([str(SAMPLE)], corrections)
    for name, run in plain.runs.items():
        other = found.runs[name]
        values = {"": (run.overall.metrics, other.overall.metrics)}
        values |= {
            key: (run.overall.corrections[key], other.overall.corrections[key]) for key in run.overall.corrections
        }
        for metrics, same in values.values():
            for key, value in metrics.items():
                assert same[key].status == value.status
                for own, expected in ((same[key].value, value.value), (same[key].se, value.se)):
                    assert (own is None) == (expected is None), key
                    assert own is None or own == pytest.approx(expected, rel=1e-7, abs=1e-12), key
        assert [token.model_dump() for token in other.worst_tokens] == [t.model_dump() for t in run.worst_tokens]
        assert other.distribution.tokens == run.distribution.tokens
