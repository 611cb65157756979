"""Pareto k-hat compared with arviz-stats, and edge cases."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from arviz_stats.base import array_stats
from numpy.random import Generator
from numpy.typing import NDArray

from mismatchctl.measure.metrics.metric import khat, khat_limit, tail_length
from mismatchctl.measure.sums import TAIL_VALUES

Logs = NDArray[np.float64]
DISTRIBUTIONS: dict[str, Callable[[Generator, int], Logs]] = {
    "narrow": lambda rng, n: rng.normal(0, 0.01, n),
    "normal": lambda rng, n: rng.normal(0, 1, n),
    "wide": lambda rng, n: rng.normal(0, 6, n),
    "sequences of thousands of tokens": lambda rng, n: rng.normal(0, 100, n),
    "pareto 0.3": lambda rng, n: 0.3 * rng.exponential(1, n),
    "pareto 0.7": lambda rng, n: 0.7 * rng.exponential(1, n),
    "pareto 1.5": lambda rng, n: 1.5 * rng.exponential(1, n),
    "laplace": lambda rng, n: rng.laplace(0, 0.2, n),
    "uniform": lambda rng, n: np.log(rng.uniform(0.5, 1.5, n)),
    "cauchy": lambda rng, n: np.clip(rng.standard_cauchy(n), -40, 40),
    "bfloat16": lambda rng, n: np.round(rng.normal(0, 0.5, n) * 64) / 64,
}
# Sizes for which 0.2 S or 3 sqrt S is whole: arviz-stats rounds the length of the tail down, PSIS and we round it up.
SIZES = (25, 100, 225, 400, 10_000, 250_000)


def largest(logs: Logs) -> Logs:
    return np.sort(logs)[-TAIL_VALUES:]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_khat_matches_arviz(name: str, size: int) -> None:
    logs = DISTRIBUTIONS[name](np.random.default_rng(size), size)
    ordered, length = np.sort(logs), tail_length(size)
    if ordered[-length - 1] == ordered[-length] or ordered[-1] == ordered[-length]:
        pytest.skip("ties at the cut: the original PSIS, and we, leave them out of the fit; arviz-stats does not")
    theirs = float(array_stats.psislw(-logs)[1])
    # 1e-6, because arviz-stats subtracts exponentials and loses digits for narrow ratios. mismatchctl uses expm1.
    assert khat(largest(logs), size) == pytest.approx(theirs, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("size", [26, 99, 230, 5_000, 5_000_000])
def test_tail_fit_matches_arviz(size: int) -> None:
    """Only the fit is compared, on a tail of the same length."""
    length = tail_length(size)
    assert length == min(math.ceil(min(size / 5, 3 * math.sqrt(size))), TAIL_VALUES - 1)
    ordered = np.sort(np.random.default_rng(size).exponential(0.8, min(size, 2 * TAIL_VALUES)))
    ratios = np.exp(ordered[-length - 1 :] - ordered[-1])
    theirs, _ = array_stats._gpdfit(ratios[1:] - ratios[0])
    assert khat(largest(ordered), size) == pytest.approx(float(theirs), rel=1e-9)


@pytest.mark.parametrize("shape", [0.2, 0.5, 1.0])
def test_khat_finds_the_shape_of_a_pareto(shape: float) -> None:
    logs = shape * np.random.default_rng(5).exponential(1, 100_000)
    assert khat(largest(logs), len(logs)) == pytest.approx(shape, abs=0.1)


def test_khat_ignores_a_shift() -> None:
    logs = np.random.default_rng(1).normal(0, 1, 1_000)
    assert khat(largest(logs + 300), 1_000) == pytest.approx(khat(largest(logs), 1_000), rel=1e-9)


def test_ties_at_the_cut_are_excluded() -> None:
    above = np.random.default_rng(2).exponential(1, 8) + 0.1
    logs = np.concatenate([np.zeros(92), above])
    ratios = np.exp(np.sort(above))
    theirs, _ = array_stats._gpdfit(ratios - 1)
    assert khat(np.sort(logs), 100) == pytest.approx(float(theirs), rel=1e-9)


@pytest.mark.parametrize("count", [1, 5, 24])
def test_too_few_ratios_have_no_khat(count: int) -> None:
    assert math.isnan(khat(np.linspace(0, 1, count), count)) or tail_length(count) >= 5


def test_equal_ratios_have_no_khat() -> None:
    assert math.isnan(khat(np.full(1_000, 0.3), 1_000))


def test_khat_limit_depends_on_the_count() -> None:
    assert math.isnan(khat_limit(1))
    assert khat_limit(10) == 0.0
    assert khat_limit(100) == 0.5
    assert khat_limit(10**9) == 0.7
