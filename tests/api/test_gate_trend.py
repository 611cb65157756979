"""Slow rises in a history of baselines: the statistics match their definitions, and false failures are rare."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from mismatchctl.api.gate.judgement import AcceptedResults, judge
from mismatchctl.api.gate.rules import parse_rules
from mismatchctl.api.gate.trend import detect_change
from mismatchctl.core.validation import LARGEST_SUM
from mismatchctl.stats.comparison import Allowance
from mismatchctl.stats.samples import ClusterSample
from tests.factories.cluster_results import result, table
from tests.factories.cluster_samples import K3, by_hand, sample, tokens

NONE = Allowance()


def nights(levels: NDArray[np.float64] | list[float], clusters: int = 8):  # type: ignore[no-untyped-def]
    """Make one result per level of K3 (in units of 1%), each with other prompts and without layers."""
    return [by_hand([level] * clusters, first=100 * index) for index, level in enumerate(levels)]


def test_scatter_is_a_change_at_the_level_of_the_test() -> None:
    random = np.random.default_rng(3)
    p = np.array(
        [
            [(found := detect_change(nights(np.exp(0.05 * random.normal(size=7))), K3, NONE)).p, found.p_last]
            for _ in range(600)
        ]
    )
    for column in p.T:  # uniform under the null
        assert stats.kstest(column, "uniform").pvalue > 0.01


def test_the_last_result_is_tested_with_students_t() -> None:
    levels = [1.0, 1.1, 0.9, 1.05, 0.98, 1.3]
    logs = np.log(levels)
    error = logs[:-1].std(ddof=1) * np.sqrt(1 + 1 / 5)
    expected = stats.t.sf((logs[-1] - logs[:-1].mean()) / error, df=4)
    assert detect_change(nights(levels), K3, NONE).p_last == pytest.approx(expected, abs=2e-3)


def test_trend_p_values_below_the_number_of_draws_are_reached() -> None:
    """The jump after 20 results is larger than 32,768 draws can resolve."""
    levels = np.exp(0.02 * np.random.default_rng(0).normal(size=22)) * np.repeat([1.0, 1.5], [20, 2])
    logs = np.log(levels)
    split = stats.ttest_ind(logs[20:], logs[:20], alternative="greater")
    found = detect_change(nights(levels), K3, NONE)
    assert split.pvalue < 1e-12 and found.first == 20
    assert split.pvalue <= found.p <= 50 * split.pvalue


def test_steps_and_lines_name_their_first_result() -> None:
    random = np.random.default_rng(1)
    noise = 1 + 0.02 * random.normal(size=10)
    step = detect_change(nights(noise * np.repeat([1.0, 1.3], [6, 4])), K3, Allowance(relative=0.1))
    assert (step.first, step.p < 1e-3) == (6, True)
    assert step.rise == pytest.approx(3e-3, abs=5e-4) and step.room == pytest.approx(1e-3, abs=1e-4)
    line = detect_change(nights(noise * 1.05 ** np.arange(10)), K3, NONE)
    assert (line.first, line.p < 1e-3) == (0, True)
    assert detect_change(nights(noise * 1.05 ** np.arange(10)), K3, NONE, lower=True).p > 0.5
    assert detect_change(nights(noise[::-1] / 1.05 ** np.arange(10)), K3, NONE, lower=True).p < 1e-3


def test_allowed_rises_are_not_a_change() -> None:
    levels = np.repeat([1.0, 1.2], [5, 5]) * (1 + 0.01 * np.random.default_rng(2).normal(size=10))
    assert detect_change(nights(levels), K3, Allowance(relative=0.25)).p > 0.5
    assert detect_change(nights(levels), K3, Allowance(absolute=3e-3)).p > 0.5
    assert detect_change(nights(levels), K3, Allowance(absolute=1e-3)).p < 1e-3


def test_a_change_of_most_tokens_is_found_behind_a_noisy_k3() -> None:
    random = np.random.default_rng(4)

    def night(index: int, factor: float):  # type: ignore[no-untyped-def]
        rollout, x = tokens(index, clusters=16)
        return sample(rollout, np.where(random.random(x.shape) < 0.01, -2.0, factor * x), first=100 * index)

    found = detect_change([night(index, 1.0 if index < 5 else 1.3) for index in range(9)], K3, NONE)
    assert found.part is not None and found.part.name == "bulk" and found.first == 5 and found.p < 0.01
    assert found.part.rise is not None and 0.1 < found.part.rise < 1.3**2 - 1  # values above the cap do not rise


@pytest.mark.parametrize(
    ("allowance", "fails"),
    [(Allowance(relative=0.25), True), (Allowance(relative=0.8), False), (Allowance(absolute=1.0), False)],
)
def test_most_tokens_are_allowed_a_common_rise(allowance: Allowance, fails: bool) -> None:
    random = np.random.default_rng(4)

    def night(index: int) -> ClusterSample:
        rollout, x = tokens(index, clusters=16)
        factor = 1.3 if index >= 5 else 1.0
        return sample(rollout, np.where(random.random(x.shape) < 0.01, -2.0, factor * x), first=100 * index)

    assert (detect_change([night(index) for index in range(9)], K3, allowance).p < 0.02) == fails


def test_differences_between_results_do_not_fail() -> None:
    """The last result differs from all earlier results, but not by more than the scatter of results."""
    accepted = [result(table([level] * 8, hashes=range(50 * n, 50 * n + 8)))
                for n, level in enumerate([1.0, 1.3, 0.8, 1.2, 0.9])]  # fmt: skip
    tonight = result(table([1.35] * 8, hashes=range(900, 908)))
    rules = parse_rules("k3:increase=0%")
    assert judge(tonight, rules, AcceptedResults("b", accepted[-1:])).outcome == "failed"
    found = judge(tonight, rules, AcceptedResults("history", accepted, names=[f"{n}.json" for n in range(5)]))
    assert [check.outcome for check in found.checks] == ["undecided", "passed"]
    worse = judge(result(table([9.0] * 8, hashes=range(900, 908))), rules, AcceptedResults("history", accepted))
    assert worse.checks[0].outcome == "failed" and worse.checks[1].since == "night 6 of 6"


def test_the_verdict_names_the_first_changed_result() -> None:
    levels = [1.0, 1.01, 0.99, 1.5, 1.49]
    accepted = [result(table([level] * 8, hashes=range(50 * n, 50 * n + 8))) for n, level in enumerate(levels)]
    tonight = result(table([1.51] * 8, hashes=range(900, 908)))
    names = [f"{n:04d}.json" for n in range(5)]
    found = judge(tonight, parse_rules("k3:increase=25%"), AcceptedResults("history", accepted, names))
    compared, over_nights = found.checks
    assert (compared.outcome, over_nights.outcome) == ("passed", "failed")
    assert over_nights.since == "night 4 of 6 (0003.json)"


def test_identical_or_non_finite_results_have_no_trend() -> None:
    rollout, x = tokens(1, clusters=8)
    equal = [sample(rollout, 0 * x, first=100 * index) for index in range(5)]
    assert detect_change(equal, K3, NONE).p > 0.5
    assert detect_change([*equal[:-1], sample(rollout, x, first=900)], K3, NONE).p < 1e-3
    assert np.isnan(detect_change([*nights([1.0, 1.1, 1.2]), *nights([np.inf])], K3, NONE).p)
    accepted = [result(table([level] * 8, hashes=range(50 * n, 50 * n + 8))) for n, level in enumerate([1.0, 1.1, 0.9])]
    odd = result(table([LARGEST_SUM] * 8, hashes=range(900, 908)))
    found = judge(odd, parse_rules("k3:increase=25%"), AcceptedResults("history", accepted))
    assert found.outcome != "passed" and all(check.outcome != "passed" for check in found.checks)
    assert found.checks[1].outcome == "undecided"
