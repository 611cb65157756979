"""The smallest rise that a verdict states is detected in simulated dumps."""

from dataclasses import replace

import numpy as np
import pytest

from mismatchctl.api.gate.gate import Baseline, judge
from mismatchctl.api.gate.power import _MAX_FACTOR, _find_smallest, detectable_factor, required_sample_size
from mismatchctl.api.gate.rules import parse_rules
from mismatchctl.stats.comparison import Allowance, compare_samples
from mismatchctl.stats.samples import ClusterSample, K3Layers, find_metric
from tests.factories.cluster_samples import K3, NONE, layered, sample

TOLERATED = Allowance(relative=0.25)
LEVEL = 0.05


def dump(seed: int, clusters: int, factor: float = 1.0, first: int = 0, shared: int | None = None) -> ClusterSample:
    """Write normal log ratios whose size differs by prompt. `shared` names the prompts."""
    rng = np.random.default_rng([7, seed])
    rollout = -rng.exponential(0.6, (clusters, 60))
    size = np.exp(0.2 * np.random.default_rng([8, seed if shared is None else shared]).normal(size=(clusters, 1)))
    x = 0.01 * np.sqrt(factor) * size * rng.normal(size=(clusters, 60)) * np.sqrt(0.01 - rollout)
    return sample(rollout, x, first)


def failing(new: int, old: int, factor: float, dumps: int, *, paired: bool = False) -> float:
    failed = 0
    for seed in range(dumps):
        prompts = 500 + seed if paired else None
        worse = dump(2 * seed, new, factor, shared=prompts)
        base = dump(2 * seed + 1, old, first=0 if paired else 1000, shared=prompts)
        failed += compare_samples(worse, base, K3, TOLERATED).p <= LEVEL
    return failed / dumps


@pytest.mark.slow
@pytest.mark.parametrize(("new", "old", "paired"), [(6, 6, False), (20, 20, False), (6, 24, False), (10, 10, True)])
def test_the_stated_rise_is_found_in_at_least_80_percent(new: int, old: int, paired: bool) -> None:
    said = []
    for seed in range(1000, 1012):
        prompts = 500 + seed if paired else None
        one = dump(2 * seed, new, shared=prompts)
        other = dump(2 * seed + 1, old, first=0 if paired else 1000, shared=prompts)
        found = detectable_factor(one, other, K3, TOLERATED, LEVEL)
        assert found is not None
        said.append(found)
    powers = [failing(new, old, 1 + share * (float(np.median(said)) - 1), 60, paired=paired) for share in (1.0, 0.7)]
    assert powers[0] >= 0.75  # the binomial standard error is 0.05, and the stated rise varies
    assert powers[1] < 0.8


@pytest.mark.slow
def test_planned_sizes_find_the_rise() -> None:
    need = required_sample_size("run", K3, dump(1, 40), None, 0.5, TOLERATED, LEVEL)
    assert need.clusters is not None and not need.paired
    assert 0.65 <= failing(need.clusters, need.clusters, 1.5, 60) <= 0.97


def test_plans_respect_absolute_allowances() -> None:
    of = dump(1, 40)
    value = of.column("k3").sum() / of.column("tokens").sum()
    beyond = [Allowance(absolute=share * value) for share in (0.1, 0.25, 0.51, 400.0)]
    plain, near, *never = (required_sample_size("run", K3, of, None, 0.5, each, LEVEL).clusters for each in beyond)
    assert plain is not None and near is not None and plain < near and never == [None, None]


def test_no_power_is_stated_for_rules_that_cannot_fail() -> None:
    one, other = dump(0, 4), dump(1, 4, first=50)
    assert detectable_factor(one, other, K3, NONE, 0.01) is None  # 1 in 70 relabelings at least
    assert detectable_factor(one, other, K3, NONE, LEVEL) is not None
    assert required_sample_size("run", K3, dump(1, 20), None, 0.2, TOLERATED, LEVEL).clusters is None


def test_observed_rises_do_not_count_as_noise() -> None:
    base = dump(1, 24, first=50)
    healthy, worse = (detectable_factor(dump(0, 24, factor), base, K3, NONE, LEVEL) for factor in (1.0, 4.0))
    assert healthy is not None and worse is not None
    assert worse == pytest.approx(healthy, rel=0.35)  # the noise is four times as large, and the rise three times K3


def test_failed_checks_state_no_power() -> None:
    base, rules = layered(dump(101, 16, first=1000)), parse_rules("k3:increase=25%")
    failed, passed = (
        judge(layered(dump(1, 16, factor)), rules, Baseline("it", base)).checks[0] for factor in (5.0, 1.0)
    )
    assert failed.outcome == "failed" and failed.detectable is None
    assert passed.outcome == "passed" and passed.detectable is not None


def test_merging_many_clusters_does_not_change_the_power() -> None:
    many, base = dump(3, 300), dump(4, 300, first=1000)
    fewer = [replace(each, keys=each.keys[:127], sums=each.sums[:127]) for each in (many, base)]  # not a sum
    sure, less = detectable_factor(many, base, K3, NONE, LEVEL), detectable_factor(*fewer, K3, NONE, LEVEL)
    assert sure is not None and less is not None
    assert (less - 1) / (sure - 1) == pytest.approx(np.sqrt(300 / 127), rel=0.15)


def test_power_of_other_metrics_scales_their_values() -> None:
    plain = find_metric("k3")
    names = ("tokens", "sequences", "k3")
    one, other = (
        ClusterSample(each.keys, names, np.column_stack([each.column(name) for name in names]))
        for each in (dump(5, 20), dump(6, 20, first=50))
    )
    assert K3Layers.from_sample(one) is None
    factor = detectable_factor(one, other, plain, NONE, LEVEL)
    ratio = one.column("k3") / one.column("tokens"), other.column("k3") / other.column("tokens")
    variances = [np.var(each, ddof=1) / len(each) / ratio[1].mean() ** 2 for each in ratio]
    expected = 1.0
    for _ in range(50):  # normal theory with equal tokens: a rise also raises the noise
        spread = np.sqrt(np.mean(variances) * (expected**2 + 1))
        expected = 1 + (1.685 + 1.282) * spread
    assert factor is not None and factor - 1 == pytest.approx(expected - 1, rel=0.15)


def test_scaled_layers_match_scaled_tokens() -> None:
    rng = np.random.default_rng(3)
    rollout, x = -rng.exponential(0.6, (30, 200)), 0.01 * rng.standard_t(3, (30, 200))
    layers = K3Layers.from_sample(sample(rollout, x))
    assert layers is not None
    for factor in (1.3, 2.0, 5.0):
        expected = K3Layers.from_sample(sample(rollout, np.sqrt(factor) * x))
        assert expected is not None
        found, wanted = (each.capped.sum(axis=(0, 1)) for each in (layers.scale(factor), expected))
        assert found == pytest.approx(wanted, rel=0.04)


@pytest.mark.parametrize("limit", [1.0, 1.7, 2.0, 50.0, 80.0, 100.0])
def test_the_search_reaches_every_factor_up_to_its_limit(limit: float) -> None:
    assert _find_smallest(lambda factor: factor >= limit, _MAX_FACTOR) == pytest.approx(limit, rel=0.005)
    assert _find_smallest(lambda factor: factor > _MAX_FACTOR, _MAX_FACTOR) is None
