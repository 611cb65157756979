"""Small groups, constant version lags and few steps do not raise a false alarm."""

import re
from pathlib import Path

import numpy as np
import pytest

from mismatchctl.results.model import Finding
from tests.cli.command import run
from tests.diagnosis.findings import alarms, found
from tests.factories import planted_causes as planted
from tests.factories.planted_causes import Planted, healthy


def named(findings: list[Finding], cause: str) -> Finding:
    return next(finding for finding in findings if finding.cause == cause)


def some(rows: int, seed: int, kind: str = "dense") -> Planted:
    dump = healthy(kind)
    return dump.rows(np.sort(np.random.default_rng(seed).permutation(len(dump))[:rows]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("rows", "workers"), [(32, 32), (32, 16), (64, 24)])
def test_workers_with_few_rows_raise_no_alarm(rows: int, workers: int, seed: int, tmp_path: Path) -> None:
    dump = some(rows, seed)
    dump.columns["worker"] = np.arange(rows) % workers
    assert "stale_worker" not in {finding.cause for finding in found(dump, tmp_path)}


def test_rollouts_of_zeros_are_a_constant_column(tmp_path: Path) -> None:
    """Greedy decoding gives the same zeros, but missing log-probs are more common."""
    dump = healthy()
    dump.tokens["rollout_log_probs"] = np.zeros(int(dump.lengths.sum()))
    assert alarms(found(dump, tmp_path)) == ["constant_column"]


def test_many_zeros_are_truncated_sampling(tmp_path: Path) -> None:
    """After greedy decoding of a certain model, half of the tokens have a log-prob of 0."""
    dump, rng = healthy(), np.random.default_rng(0)
    train = -np.minimum(rng.exponential(0.2, int(dump.lengths.sum())), 1.5)
    dump.tokens["train_log_probs"] = train
    dump.tokens["rollout_log_probs"] = np.where(rng.random(len(train)) < 0.5, 0.0, 0.9 * train)
    finding = named(found(dump, tmp_path), "truncated_sampling")
    assert finding.confidence == "high" and "top-k" not in finding.summary


def test_biased_rounding_is_not_truncation(tmp_path: Path) -> None:
    """Log-probs are rounded down by less than the resolution of float32."""
    dump, rng = healthy(), np.random.default_rng(0)
    rollout = dump.tokens["rollout_log_probs"].astype(np.float64)
    dump.tokens["train_log_probs"] = rollout - rng.uniform(0, 1e-9, len(rollout))
    dump.tokens["rollout_log_probs"] = rollout
    assert alarms(found(dump, tmp_path)) == ["numerical_noise"]


def test_estimates_keep_at_least_the_likeliest_token(tmp_path: Path) -> None:
    dump, rng = healthy(), np.random.default_rng(0)
    rollout = dump.tokens["rollout_log_probs"].astype(np.float64)
    dump.tokens["train_log_probs"] = rollout - rng.exponential(50.0, len(rollout))
    findings = found(dump, tmp_path)
    assert "truncated_sampling" not in {finding.cause for finding in findings}
    assert findings[0].cause == "unexplained"


def test_a_deviating_worker_is_found_among_small_ones(tmp_path: Path) -> None:
    dump = healthy()
    rows = np.arange(len(dump))
    dump.columns["worker"] = np.where(rows % 8 == 2, 2, 100 + rows // 3)
    assert found(planted.stale_worker(dump, 5), tmp_path)[0].cause == "stale_worker"


@pytest.mark.parametrize("lags", [(0, 1), (0, 1, 2), (-1, 0), (-1,), (3, 4, 5)])
def test_lags_without_effect_have_low_confidence(lags: tuple[int, ...], tmp_path: Path) -> None:
    dump = healthy()
    dump.columns["train_version"] = dump.columns["rollout_version"] + np.resize(np.array(lags), len(dump))
    findings = found(dump, tmp_path)
    assert alarms(findings) == ["numerical_noise"]
    stale = [finding for finding in findings if finding.cause == "stale_policy"]
    assert not stale or "-1 versions older" not in stale[0].summary


def test_one_row_per_step_gives_no_onset(tmp_path: Path) -> None:
    dump = some(24, 0)
    dump.columns["step"] = np.arange(24)
    assert not {"growing_mismatch", "stale_step"} & {finding.cause for finding in found(dump, tmp_path)}


@pytest.mark.parametrize("rows", [8, 32, 288])
@pytest.mark.parametrize("far", [0.8, 1.5])
def test_slightly_noisier_expert_tails_raise_no_alarm(far: float, rows: int, tmp_path: Path) -> None:
    findings = found(planted.sure_experts(some(rows, 1), 0.05, 0.02, far), tmp_path)
    assert set(alarms(findings)) <= {"numerical_noise"}
    if rows > 8:
        assert "larger or more certain" in findings[0].summary


def test_wrong_ends_are_found_despite_expert_tails(tmp_path: Path) -> None:
    dump = planted.wrong_ends(planted.sure_experts(healthy(), 0.05, 0.02, 0.8), 0.2)
    assert {"unexplained", "padding_or_sentinel"} & set(alarms(found(dump, tmp_path)))


def test_weights_that_differ_more_at_the_start_are_not_a_lost_prompt(tmp_path: Path) -> None:
    findings = found(planted.fading_weights(planted.cut(healthy(), 40), 0.3, 0.25), tmp_path)
    assert findings[0].cause in {"quantized_rollout", "weights_differ"}
    fading = named(findings, "context_mismatch")
    assert fading.confidence == "low"
    assert "weights_differ" in {rival.cause for rival in fading.rivals}


def test_penalties_lower_repeated_tokens(tmp_path: Path) -> None:
    findings = found(planted.penalized(healthy(), 0.002, freed=25), tmp_path)
    assert "logit_penalty" not in {finding.cause for finding in findings}


@pytest.mark.parametrize("digits", ["1", "2", "3"])
def test_decimal_rounding_is_named_before_bfloat16(digits: str, tmp_path: Path) -> None:
    first = named(found(planted.rounded(healthy(), "rollout", digits), tmp_path), "low_precision_logging")
    assert f"{digits} decimal" in first.summary


PLANTS = {
    "healthy": lambda d: d,
    "shifted": lambda d: planted.shifted(d, 1, 0.2),
    "tools": lambda d: planted.unsampled_tokens(d, 12),
    "tools and temperature": lambda d: planted.unsampled_tokens(planted.temperature(d, 0.8), 12),
    "worker": lambda d: planted.stale_worker(d, 3),
    "ends": lambda d: planted.wrong_ends(d, 0.05),
    "identical": planted.identical,
    "bfloat16": lambda d: planted.rounded(d, "train", "bfloat16"),
    "routing": lambda d: planted.routing(d, 0.03),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_shares_of_k3_sum_to_one(plant: object, tmp_path: Path) -> None:
    findings = found(plant(healthy()), tmp_path)  # type: ignore[operator]
    assert sum(finding.share_k3 or 0.0 for finding in findings) == pytest.approx(1.0, abs=1e-3)
    assert all(0 <= (finding.share_k3 or 0) <= 1 for finding in findings)


def test_the_explained_share_is_measured_by_k3(tmp_path: Path) -> None:
    dump = planted.wrong_ends(healthy(), 0.05)
    x = (dump.tokens["train_log_probs"] - dump.tokens["rollout_log_probs"]).astype(np.float64)
    k3 = np.expm1(x) - x
    ends = dump.tokens["train_log_probs"] == -6.0
    share = named(found(dump, tmp_path), "unexplained").share_k3
    assert share == pytest.approx(k3[ends].sum() / k3.sum(), abs=0.02)


def test_rows_of_gross_tokens_are_named(tmp_path: Path) -> None:
    dump = planted.wrong_ends(healthy(), 0.03)
    rows = set(dump.row[dump.tokens["train_log_probs"] == -6.0].tolist())
    finding = named(found(dump, tmp_path), "unexplained")
    assert {example.row for example in finding.examples} <= rows
    assert "last token" in finding.where["positions"]


def test_two_shifted_rows_are_named(tmp_path: Path) -> None:
    dump = some(32, 1)
    values, starts = dump.tokens["rollout_log_probs"], np.cumsum(dump.lengths) - dump.lengths
    chosen = np.argsort(-dump.lengths)[:2]
    for row in chosen:
        part = slice(starts[row], starts[row] + dump.lengths[row])
        values[part] = np.roll(values[part], 1)
    first = found(dump, tmp_path)[0]
    assert first.cause == "misaligned"
    assert {example.row for example in first.examples} == set(chosen.tolist())


def test_findings_are_short_and_verbose_adds_evidence(tmp_path: Path) -> None:
    planted.unsampled_tokens(planted.temperature(healthy(), 0.8), 12).write(tmp_path / "one.parquet")
    healthy().write(tmp_path / "other.parquet")
    planted.shifted(healthy(), 1, 0.2).write(tmp_path / "shifted.parquet")
    paths = [tmp_path / f"{name}.parquet" for name in ("one", "other", "shifted")]
    brief = run("diagnose", *paths, COLUMNS="100").stdout
    whole = run("diagnose", *paths, "--verbose", COLUMNS="100").stdout
    rows = [line.split() for line in brief.splitlines() if re.match(r"(one|other|shifted) ", line)]
    assert [row[:2] for row in rows] == [["one", "FAIL"], ["shifted", "FAIL"], ["other", "OK"]]
    assert len(brief.splitlines()) <= 14  # the paths in the last command can take several lines
    assert "strongest first" in whole
    assert ("standard errors" in brief, "standard errors" in whole) == (False, True)
    assert "1 finding;" in whole and "e+02%" not in whole


@pytest.mark.parametrize(("tied", "confidence"), [(0.08, "medium"), (0.5, "high")])
def test_weights_differ_is_certain_only_if_positions_cannot_explain_it(
    tied: float, confidence: str, tmp_path: Path
) -> None:
    """Noise that depends on the token can also come from wrong positions."""
    dump = healthy()
    rollout, ids = dump.tokens["rollout_log_probs"].astype(np.float64), dump.tokens["token_ids"]
    random = np.random.default_rng(3)
    own = random.standard_normal(ids.max() + 1)[ids] * np.sqrt(tied)
    noise = 0.08 * (own + random.standard_normal(len(ids)) * np.sqrt(1 - tied)) * -np.expm1(rollout)
    dump.tokens["train_log_probs"] = np.minimum(rollout + noise, 0).astype(np.float32)
    del dump.tokens["current_log_probs"]
    finding = named(found(dump, tmp_path), "weights_differ")
    assert finding.confidence == confidence
    assert ("position_mismatch" in {rival.cause for rival in finding.rivals}) == (confidence == "medium")
