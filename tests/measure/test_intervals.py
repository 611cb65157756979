"""Intervals of smooth metrics have their coverage, or a warning if the tail is too heavy."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mismatchctl import Result
from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.core.formatting import INTERVAL_LEVEL, INTERVAL_Z
from mismatchctl.measure.metrics.metric import (
    CHI2_SCALE,
    ESS_SCALE,
    LINEAR_SCALE,
    LOG_SCALE,
    ODDS_SCALE,
    compute_intervals,
    t_quantile,
)
from mismatchctl.recorder.recorder import Recorder
from mismatchctl.stats.samples import build_run_sample, compute_interval, find_metric
from tests.cli.command import run


def of_means(values: np.ndarray, scale: object = LOG_SCALE) -> tuple[np.ndarray, np.ndarray]:
    """Return intervals of means [G, 2] over draws of clusters [G, N], and their stated coverage."""
    count = values.shape[1]
    u = (values - values.mean(1, keepdims=True)) / count
    squares = (u**2).sum(1)
    se, effective = np.sqrt(squares * count / (count - 1)), squares**2 / (u**4).sum(1)
    return compute_intervals(scale, values.mean(1), se, effective, np.full(len(values), float(count)))  # type: ignore[arg-type]


@pytest.mark.parametrize("clusters", [16, 64])
def test_intervals_of_skewed_clusters_have_their_coverage(clusters: int) -> None:
    values = np.random.default_rng(clusters).lognormal(0, 1, (4000, clusters))
    ends, _ = of_means(values)
    held = (ends[:, 0] <= np.exp(0.5)) & (np.exp(0.5) <= ends[:, 1])
    assert abs(held.mean() - INTERVAL_LEVEL) < 0.03


def test_one_dominant_cluster_is_a_heavy_tail() -> None:
    values = np.r_[np.full(31, 1.0) + np.arange(31) * 1e-3, 500.0][None]
    assert np.isfinite(of_means(values)[1]).all()
    assert np.isnan(of_means(np.arange(1.0, 33.0)[None])[1]).all()


def test_rare_weights_are_always_a_heavy_tail() -> None:
    ones = np.ones(2)
    for scale, value in ((ESS_SCALE, [0.3, 0.999]), (CHI2_SCALE, [3.0, 0.001])):
        _, covers = compute_intervals(scale, np.array(value), 0.01 * ones, 40.0 * ones, 64.0 * ones)
        assert np.isfinite(covers).tolist() == [True, False]


@pytest.mark.parametrize("scale", [LINEAR_SCALE, LOG_SCALE, ODDS_SCALE, ESS_SCALE, CHI2_SCALE])
def test_intervals_contain_the_value_and_stay_in_range(scale: object) -> None:
    value = np.array([1e-6, 0.2, 0.9, 1 - 1e-9])
    ends, _ = compute_intervals(scale, value, 0.3 * value * (1 - value) + 1e-12, np.full(4, 9.0), np.full(4, 30.0))  # type: ignore[arg-type]
    assert (ends[:, 0] < value).all() and (value < ends[:, 1]).all()
    if scale is not LINEAR_SCALE and scale is not CHI2_SCALE:
        assert (ends > 0).all()
    if scale is ODDS_SCALE or scale is ESS_SCALE:
        assert (ends <= 1).all()


def test_constant_values_have_no_interval() -> None:
    ends, covers = compute_intervals(
        LOG_SCALE, np.array([0.0, 1.0]), np.array([0.0, np.nan]), np.full(2, np.nan), np.full(2, 8.0)
    )
    assert np.isnan(ends).all() and np.isnan(covers).all()


@pytest.mark.parametrize("degrees", [2.0, 3.5, 10.0, 100.0])
def test_t_quantiles_match_scipy(degrees: float) -> None:
    assert t_quantile(stats.norm.ppf(0.95), degrees) == pytest.approx(stats.t.ppf(0.95, degrees), rel=0.02)


def test_intervals_are_two_sided() -> None:
    assert pytest.approx(stats.norm.ppf((1 + INTERVAL_LEVEL) / 2)) == INTERVAL_Z


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write sixteen prompts, one of which has nearly all of K3."""
    folder, rng = tmp_path_factory.mktemp("heavy"), np.random.default_rng(3)
    with Recorder(folder) as recorder:
        rollout = [-rng.exponential(0.5, 40) - 0.6 for _ in range(32)]
        train = [np.minimum(x + rng.normal(0, 0.01 if row < 30 else 0.5, 40), 0) for row, x in enumerate(rollout)]
        recorder.write(
            step=0, rollout_log_probs=rollout, train_log_probs=train, sequence_id=np.arange(32),
            prompt_id=np.arange(32) // 2,
        )  # fmt: skip
    return folder


def test_results_flag_narrow_intervals(dump: Path) -> None:
    result = analyze([str(dump)])
    (run,) = result.runs.values()
    k3 = run.overall.metrics["k3"]
    assert k3.tail == "heavy_tail" and k3.covers is not None and k3.covers < INTERVAL_LEVEL
    assert k3.interval is not None and k3.value is not None and k3.interval[0] < k3.value < k3.interval[1]
    assert run.groups.metrics["k3"].heavy_tail == [0]
    written = json.loads(result.to_json())["runs"]
    (written,) = written.values()
    assert written["overall"]["metrics"]["k3"]["tail"] == "heavy_tail"
    assert "tail" not in written["overall"]["metrics"]["train_log_ppl"]
    assert Result.model_validate_json(result.to_json()) == result


def test_gate_and_result_have_the_same_interval(dump: Path) -> None:
    (run,) = analyze([str(dump)]).runs.values()
    sample = build_run_sample(run)
    for key in ("k3", "ess_token", "chi2_sequence", "ratio_mean"):
        ends, covers = compute_interval(sample, find_metric(key))
        value = run.overall.metrics[key]
        assert ends == pytest.approx(value.interval, rel=1e-3) and covers == value.covers


def test_terminal_and_gate_mention_narrow_intervals_once(dump: Path, tmp_path: Path) -> None:
    shown = run("analyze", dump, COLUMNS="160", NO_COLOR="1")
    assert shown.stdout.count("too narrow") == 1
    base, page = tmp_path / "base.json", tmp_path / "page.html"
    run("analyze", dump, "--html", page)
    assert "rare weights dominate" in page.read_text()
    gate = run("gate", dump, "--save-baseline", base, "--accept", "--rule", "k3:max=1", NO_COLOR="1")
    assert "rare weights dominate" in " ".join(gate.stdout.split())


def test_scales_follow_from_units() -> None:
    assert [find_metric(key).metric.scale for key in ("bitwise_share", "k3", "ratio_mean")] == [
        ODDS_SCALE,
        LOG_SCALE,
        LINEAR_SCALE,
    ]
