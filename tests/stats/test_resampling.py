"""Resampling compared with hand calculation and enumeration."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.recorder.recorder import Recorder
from mismatchctl.stats.resampling import (
    LEAST_RELABELINGS,
    SampleExchange,
    adjust_fdr,
    adjust_holm,
    bootstrap_weights,
    p_above_zero,
    percentile_interval,
    relabeling_tail,
    resample_metrics,
)
from mismatchctl.stats.samples import (
    ClusterSample,
    build_run_sample,
    build_step_sample,
    build_value_sample,
    find_metric,
)
from tests.factories.cluster_results import result, table

FEW = settings(derandomize=True, max_examples=12)
K3 = find_metric("k3")


def sample(k3: list[float], tokens: list[float] | None = None, keys: list[int] | None = None) -> ClusterSample:
    return build_run_sample(result(table(k3, tokens, keys)).runs["run"])


def test_a_replicate_is_the_ratio_of_sums_of_its_half() -> None:
    k3, tokens = [3.0, 5.0, 1.0], [10.0, 20.0, 5.0]
    made = sample(k3, tokens)
    draws = resample_metrics([made], [K3], 64)[0][0]
    assert K3.of(made) == pytest.approx(9.0 / 35.0)
    for row, found in zip(bootstrap_weights(made.keys, 0, 64), draws, strict=True):
        kept = [index for index in range(3) if row[index]]
        assert set(row) <= {0.0, 2.0}
        if kept:
            assert found == pytest.approx(sum(k3[i] for i in kept) / sum(tokens[i] for i in kept))
        else:
            assert math.isnan(found)


def test_replicates_of_many_metrics_are_ratios_of_sums() -> None:
    made = build_run_sample(analyze(["sample_data/dense"], findings=False).runs["dense"])
    drawn = bootstrap_weights(made.keys, 0, 64)
    total = {name: drawn @ made.sums[:, made.columns[name]] for name in ("tokens", "k3", "abs", "square")}
    expected = {"abs_diff_mean": total["abs"], "k3": total["k3"], "k2": total["square"] / 2}
    for key, draws in zip(
        expected, resample_metrics([made], [find_metric(key) for key in expected], 64)[0], strict=True
    ):
        np.testing.assert_allclose(draws, expected[key] / total["tokens"], rtol=1e-12)


def test_bootstrap_weights_have_mean_one_and_no_correlation() -> None:
    drawn = bootstrap_weights(np.arange(40, dtype=np.uint64), 0, 1 << 15)
    assert drawn.mean() == pytest.approx(1, abs=0.01)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(40)).max() < 0.03
    assert np.abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 0.03
    assert np.array_equal(bootstrap_weights(np.arange(40, dtype=np.uint64), 100, 300), drawn[100:300])


def test_paired_clusters_get_the_p_value_of_the_sign_flip_test() -> None:
    new, old = [3.0, 1.0, 4.5, 2.0, 2.5, 3.0, 0.5], [1.0, 1.5, 2.0, 1.8, 1.0, 3.4, 0.2]
    above, below = resample_metrics([sample(new), sample(old)], [K3])
    flips = [
        sum(sign * (a - b) for sign, a, b in zip(signs, new, old, strict=True))
        for signs in itertools.product((1, -1), repeat=len(new))
    ]
    total = sum(new) - sum(old)
    exact = sum(flip <= -total + 1e-12 for flip in flips) / len(flips)
    assert p_above_zero(above[0] - below[0]) == pytest.approx(exact, abs=0.004)


def test_half_samples_reject_at_their_level() -> None:
    """Two samples of equal skewed clusters differ at 5% in about 5% of 2,000 trials."""
    random = np.random.default_rng(5)
    values = random.lognormal(0, 0.6, (2000, 2, 12))
    drawn = [bootstrap_weights(np.arange(12 * side, 12 * side + 12, dtype=np.uint64), 0, 2048) for side in (0, 1)]
    with np.errstate(invalid="ignore"):
        above, below = (w @ values[:, side].T / w.sum(axis=1)[:, None] for side, w in enumerate(drawn))
    p = (~(above > below)).mean(axis=0)
    assert stats.binomtest(int((p < 0.05).sum()), 2000, 0.05, alternative="greater").pvalue > 0.01
    assert (p < 0.05).mean() > 0.02


def test_only_shared_clusters_are_paired() -> None:
    same = resample_metrics([sample([1.0, 2.0, 3.0]), sample([2.0, 4.0, 6.0])], [K3], 256)
    ratio = same[1][0] / same[0][0]
    assert np.allclose(ratio[~np.isnan(ratio)], 2.0)
    other = resample_metrics([sample([1.0, 2.0, 3.0]), sample([2.0, 4.0, 6.0], keys=[7, 8, 9])], [K3], 256)
    assert np.nanstd(other[1][0] / other[0][0]) > 0.1
    assert sample([1.0, 2.0, 3.0]).count_common(sample([1.0, 1.0], keys=[2, 9])) == 1
    assert sample([1.0, 2.0]).equal_sides(sample([5.0, 7.0]))
    assert not sample([1.0, 2.0]).equal_sides(sample([1.0, 2.0], [100.0, 99.0]))


def test_sequences_cluster_by_step_and_prompts_across_steps() -> None:
    clusters = table([1.0, 2.0, 3.0, 4.0], hashes=[1, 2, 1, 2], groups=[0, 0, 1, 1])
    prompts = build_run_sample(result(clusters, steps=(5, 6)).runs["run"])
    assert prompts.column("k3").tolist() == [4.0, 6.0]
    by_sequence = clusters.model_copy(update={"by": "sequence"})
    sequences = build_run_sample(result(by_sequence, steps=(5, 6)).runs["run"])
    assert sorted(sequences.column("k3").tolist()) == [1.0, 2.0, 3.0, 4.0]
    assert sequences.count_common(build_run_sample(result(by_sequence, steps=(5, 7)).runs["run"])) == 2


@FEW
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.data())
def test_each_replicate_is_monotone_in_each_value(k3: list[float], data: st.DataObject) -> None:
    where = data.draw(st.integers(0, len(k3) - 1))
    worse = list(k3)
    worse[where] += data.draw(st.floats(1e-3, 1e9))
    before, after = (resample_metrics([sample(values)], [K3], 512)[0][0] for values in (k3, worse))
    defined = ~np.isnan(before)
    assert np.array_equal(defined, ~np.isnan(after))
    assert (after[defined] >= before[defined]).all()


@FEW
@given(st.permutations(list(range(8))))
def test_order_of_rows_does_not_matter(order: list[int]) -> None:
    k3, tokens = [float(1 + 3 * i % 7) for i in range(8)], [float(10 + i) for i in range(8)]
    one = resample_metrics([sample(k3, tokens, list(range(8)))], [K3], 256)[0][0]
    two = resample_metrics([sample([k3[i] for i in order], [tokens[i] for i in order], order)], [K3], 256)[0][0]
    assert np.array_equal(one, two, equal_nan=True)


def test_percentile_interval_excludes_one_draw_of_forty_per_side() -> None:
    draws = np.random.default_rng(0).permutation(np.arange(999) / 999)
    assert percentile_interval(draws) == (pytest.approx(24 / 999), pytest.approx(974 / 999))
    assert percentile_interval(np.full(99, np.nan)) is None


def test_holm_adjustment_matches_hand_calculation() -> None:
    assert adjust_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust_holm([]) == []
    assert adjust_holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_false_discovery_rates_match_scipy() -> None:
    p = np.random.default_rng(0).random(40) ** 3
    assert adjust_fdr(p.tolist()) == pytest.approx(stats.false_discovery_control(p).tolist())
    assert adjust_fdr([]) == []


DISTRIBUTIONS = {
    "normal": lambda rng, size: rng.normal(0, 1, size),
    "heavy tail": lambda rng, size: rng.standard_t(2, size),
    "skewed": lambda rng, size: rng.exponential(1, size),
    "skewed down": lambda rng, size: -rng.exponential(1, size),
    "counts": lambda rng, size: rng.poisson(0.3, size).astype(float),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("shift", [0.5, 1.0, 2.0])
def test_tails_match_the_enumeration_of_relabelings(name: str, shift: float) -> None:
    """All relabelings are enumerated. The tail is never below its exact value and at most 6 times as large."""
    rng = np.random.default_rng(4)
    for new, old in ((8, 10), (10, 8), (4, 16)):
        values = DISTRIBUTIONS[name](rng, new + old)
        values[:new] += shift
        chosen = np.array(list(itertools.combinations(range(new + old), new)))
        exact = float(np.mean(values[chosen].sum(axis=1) >= values[:new].sum() - 1e-9))
        tail = relabeling_tail(np.zeros(0), values, new, float(values[:new].sum()))
        assert exact * (1 - 1e-9) <= tail <= 6 * exact or exact > 0.05
        differences = DISTRIBUTIONS[name](rng, 14) + shift
        signs = np.array(list(itertools.product((-1, 1), repeat=14)))
        exact = float(np.mean(signs @ differences >= differences.sum() - 1e-9))
        tail = relabeling_tail(differences, np.zeros(0), 0, float(differences.sum()) / 2)
        assert exact * (1 - 1e-9) <= tail <= 6 * exact or exact > 0.05


def test_tails_of_partly_shared_clusters_match_enumeration() -> None:
    rng = np.random.default_rng(6)
    differences, single = rng.normal(1, 1, 6), rng.normal(0, 1, 11)
    single[:5] += 1
    total = differences.sum() / 2 + single[:5].sum()
    flips = np.array(list(itertools.product((-0.5, 0.5), repeat=6))) @ differences
    labelled = single[np.array(list(itertools.combinations(range(11), 5)))].sum(axis=1)
    exact = float(np.mean(flips[:, None] + labelled[None, :] >= total - 1e-9))
    assert exact < 0.01
    assert exact <= relabeling_tail(differences, single, 5, float(total)) <= 6 * exact


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_the_most_extreme_relabeling_has_the_smallest_tail(scale: float) -> None:
    ones = scale * np.ones(20)
    assert relabeling_tail(ones, ones[:0], 0, float(ones.sum()) / 2) == pytest.approx(2.0**-20)
    apart = np.concatenate([ones, 0 * ones])
    assert relabeling_tail(ones[:0], apart, 20, float(ones.sum())) == pytest.approx(1 / math.comb(40, 20), rel=1e-3)
    assert relabeling_tail(ones[:0], ones, 10, float(ones.sum()) / 2) == 1
    assert relabeling_tail(np.array([np.inf, 1.0]), ones[:0], 0, np.inf) == 1


@pytest.mark.parametrize("shared", [0, 12, 24])
def test_a_large_effect_is_found_among_many_tests(shared: int) -> None:
    """One of 3,000 metrics changed, which drawn relabelings alone could not resolve."""
    rng = np.random.default_rng(2)
    keys = np.arange(48, dtype=np.uint64)
    exchange = SampleExchange(keys[:24], keys[24 - shared : 48 - shared])
    new, old = rng.standard_t(3, (2, 24, 200))
    new[:, 0] += 4.0
    p = exchange.two_sided_p_values(new, old)
    assert p[0] * 3000 < 0.05 < 3000 * 2 / LEAST_RELABELINGS
    assert adjust_fdr(p.tolist())[0] < 0.05
    drawn = exchange.totals(new, old)
    plain = 2 * np.minimum(*(np.mean(sign * drawn >= sign * drawn[0], axis=0) for sign in (1, -1)))
    assert p[1:] == pytest.approx(np.minimum(plain, 1)[1:], abs=6 / LEAST_RELABELINGS)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [0, 1, 20])
def test_false_discoveries_stay_below_five_percent(changed: int) -> None:
    """With correlated, heavy-tailed metrics of equal clusters, at most 5% of the discoveries are false."""
    rng = np.random.default_rng(7)
    keys, false, found = np.arange(32, dtype=np.uint64), [], []
    exchange = SampleExchange(keys[:16], keys[16:])
    for _ in range(150):
        common = rng.standard_t(3, (32, 10))
        values = common @ rng.normal(0, 1, (10, 100)) + rng.standard_t(3, (32, 100))
        values[:16, :changed] += 12.0
        significant = np.array(adjust_fdr(exchange.two_sided_p_values(values[:16], values[16:]).tolist())) < 0.05
        false.append(significant[changed:].sum() / max(significant.sum(), 1))
        found.append(significant[:changed].mean() if changed else 1.0)
    error = np.std(false) / math.sqrt(len(false))
    assert np.mean(false) <= 0.05 + 2 * error
    assert np.mean(found) > 0.8


def test_p_values_below_the_number_of_replicates_are_reached() -> None:
    """Each of 40 clusters exceeds the limit, so only one of 2^40 sign flips is as extreme."""
    (draws,) = resample_metrics([sample([3.0] * 40)], [K3])[0]
    assert p_above_zero(draws - 0.01) == pytest.approx(1 / (1 + len(draws)))
    assert p_above_zero(draws - 0.01, np.full(40, 0.02)) == pytest.approx(2.0**-40)
    assert p_above_zero(draws - 0.04, np.full(40, -0.01)) > 0.5


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump") / "a"
    rng = np.random.default_rng(0)
    with Recorder(folder) as recorder:
        for step in range(3):
            rollout = [-rng.exponential(0.5, int(n)) for n in rng.integers(20, 60, 16)]
            train = [np.minimum(x + rng.normal(0, 0.05, len(x)), 0) for x in rollout]
            recorder.write(
                step=step, rollout_log_probs=rollout, train_log_probs=train, prompt_id=np.arange(16) // 2 + 6 * step,
                worker=np.arange(16) % 3,
            )  # fmt: skip
    return folder


def test_samples_of_parts_give_the_values_of_the_parts(analyzed: Path) -> None:
    run = analyze([str(analyzed)], by=["worker"]).runs["a"]
    whole = build_run_sample(run)
    assert len(whole) == 20  # prompts 6, 7, 12 and 13 occur in two steps: one cluster each
    parts = [(build_step_sample(run, i), run.groups.metrics, i) for i in range(3)]
    parts += [(build_value_sample(run, "worker", i), run.by["worker"].metrics, i) for i in range(3)]
    for key in ("k3", "ess_sequence", "prob_corr", "ratio_mean", "abs_diff_mean", "autocorr_lag1", "prob_diff_std"):
        metric = find_metric(key)
        assert metric.of(whole) == pytest.approx(run.overall.metrics[key].value, rel=1e-6)
        for part, metrics, index in parts:
            assert metric.of(part) == pytest.approx(metrics[key].value[index], rel=1e-6)


def test_the_spread_of_replicates_matches_standard_errors(analyzed: Path) -> None:
    run = analyze([str(analyzed)]).runs["a"]
    for key in ("k3", "abs_diff_mean", "ratio_mean"):
        draws = resample_metrics([build_run_sample(run)], [find_metric(key)], 8192)[0][0]
        assert np.nanstd(draws) == pytest.approx(run.overall.metrics[key].se, rel=0.35)


def test_metrics_of_corrections_need_the_dump(analyzed: Path) -> None:
    correction = find_preset("geo_rs")
    rejected = find_metric("rejected_tokens", correction)
    kept = analyze([str(analyzed)], [correction], every_cluster=True).runs["a"]
    value = kept.overall.corrections["geo_rs"]["rejected_tokens"].value
    assert rejected.of(build_run_sample(kept)) == pytest.approx(value)
    small = analyze([str(analyzed)], [correction]).runs["a"]
    with pytest.raises(DataError, match="pass the dump"):
        resample_metrics([build_run_sample(small)], [rejected], 64)
    with pytest.raises(ConfigError, match="ess_sequence"):
        find_metric("ess_seqence")


def test_folded_clusters_are_reported(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a") as recorder:
        for step in range(2):
            ones, prompts = [np.array([-1.0 - step])] * 700, np.arange(700)
            recorder.write(
                step=step, rollout_log_probs=ones, train_log_probs=ones, prompt_id=prompts, worker=prompts % 2
            )
    folded = analyze([str(tmp_path / "a")], by=["worker"]).runs["a"]
    assert folded.clusters.folded
    assert len(folded.clusters.hashes) <= 1024
    with pytest.raises(DataError, match="pass the dump"):
        build_step_sample(folded, 0)
    with pytest.raises(DataError, match="pass the dump"):
        build_value_sample(folded, "worker", 0)
    whole = analyze([str(tmp_path / "a")], by=["worker"], every_cluster=True).runs["a"]
    assert not whole.clusters.folded
    assert [len(build_step_sample(whole, step)) for step in (0, 1)] == [700, 700]
    assert len(build_run_sample(whole)) == 700
