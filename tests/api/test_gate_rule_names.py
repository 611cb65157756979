"""Rules that name a metric of a framework, compared with the framework's own numbers."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.gate.gate import load_result, make_baseline, write_baseline
from mismatchctl.api.gate.judgement import Baseline, judge
from mismatchctl.api.gate.rules import parse_rules
from mismatchctl.api.gate.verdict import Check
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import find_preset, load_framework
from mismatchctl.recorder.recorder import Recorder
from mismatchctl.results.model import Result
from mismatchctl.results.reader import read_result
from tests.cli.command import run

STEPS = 8


def dump(folder: Path, noise: float = 0.05, seed: int = 0, steps: int = STEPS) -> str:
    rng = np.random.default_rng(seed)
    with Recorder(folder) as recorder:
        for step in range(steps):
            lengths = rng.integers(5, 40, 8)
            rollout = [-rng.exponential(1.0, n) for n in lengths]
            train = [np.minimum(x + rng.normal(0, noise, len(x)), 0) for x in rollout]
            advantages = [np.ones(n) for n in lengths]
            recorder.write(
                step=step, rollout_log_probs=rollout, train_log_probs=train, current_log_probs=train,
                advantages=advantages,
            )  # fmt: skip
    return str(folder)


def replayed(path: str, title: str, name: str, correction: str) -> list[float]:
    rows = pa.concat_tables([pq.read_table(file) for file in sorted(Path(path).glob("*.parquet"))])
    framework, chosen = load_framework(title), find_preset(correction)
    found = []
    for step in sorted(set(rows["step"].to_pylist())):
        table = rows.filter(pa.compute.equal(rows["step"], step))
        out = framework.replay(table, chosen).logged
        found.append(out[name])
    return found


def checks(path: str, *texts: str, base: Result | None = None) -> list[Check]:
    rules = [rule for text in texts for rule in parse_rules(text)]
    against = Baseline() if base is None else Baseline("base", base)
    return judge(load_result([path], rules), rules, against).checks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dump(tmp_path_factory.mktemp("names") / "dump")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "title", "key", "correction"),
    [
        ("mis_k3_kl", "slime@2026-08", "mis_k3_kl", "token_is"),
        ("train/mis_kl", "slime@2026-08", "mis_kl", "token_is"),
        ("mismatch_k3_kl", "slime@2026-08", "mis_k3_kl", "token_is"),
        ("train_rollout_logprob_abs_diff", "slime@2026-08", "train_rollout_logprob_abs_diff", "none"),
        ("rollout_corr/chi2_seq", "verl@2026-08", "rollout_corr/chi2_seq", "none"),
    ],
)
def test_logged_names_are_means_of_the_replay_over_steps(
    place: str, name: str, title: str, key: str, correction: str
) -> None:
    expected = replayed(place, title, key, correction)
    (overall,) = checks(place, f"{name}:max=1e9")
    assert overall.value == pytest.approx(np.mean(expected), rel=1e-9)
    assert title in overall.meaning and correction in overall.meaning
    assert (overall.outcome, overall.clusters, overall.clustered_by) == ("passed", STEPS, "step")
    steps = checks(place, f"{name}:max={max(expected) * 0.999},per=step")
    assert [check.value for check in steps] == pytest.approx(expected, rel=1e-9)
    assert [check.outcome for check in steps].count("failed") == 1


def test_miles_names_select_miles(place: str) -> None:
    (found,) = checks(place, "mis_k3_kl:framework=miles,max=1")
    assert found.value == pytest.approx(np.mean(replayed(place, "miles", "mis_k3_kl", "token_is")), rel=1e-9)
    assert "miles@" in found.meaning
    (own,) = checks(place, "train_rollout_kl:max=1")
    assert own.value == pytest.approx(np.mean(replayed(place, "miles", "train_rollout_kl", "none")), rel=1e-9)


def test_logged_names_of_metrics_are_judged_as_the_metric(place: str) -> None:
    named, own = checks(place, "rollout_corr/k3_kl:max=1", "k3:max=1")
    assert named.p is not None and (named.value, named.interval, named.p) == (own.value, own.interval, own.p)
    assert named.metric == "rollout_corr/k3_kl" and "is k3" in named.meaning and own.meaning == ""
    of_weights, by_key = checks(
        place, "rollout_corr/rollout_is_mean:correction=token_is,max=2", "weight_mean:correction=token_is,max=2"
    )
    assert of_weights.value == by_key.value
    steps = replayed(place, "verl@2026-08", "rollout_corr/rollout_is_mean", "token_is")
    per_step = checks(place, "rollout_corr/rollout_is_mean:correction=token_is,max=2,per=step")
    assert [check.value for check in per_step] == pytest.approx(steps, rel=1e-6)


def test_names_never_logged_are_reported(place: str) -> None:
    assert "no code ever logged this" in checks(place, "mismatch_k3_kl:max=1")[0].meaning


@pytest.mark.slow
def test_baselines_keep_logged_metrics(place: str, tmp_path: Path) -> None:
    rules = parse_rules("mis_k3_kl:increase=25%")
    result = load_result([place], rules)
    written = write_baseline(make_baseline(result, judge(result, rules), rules, by_hand=True), tmp_path / "base.json")
    base = read_result(written)
    (same,) = checks(place, "mis_k3_kl:increase=25%", base=base)
    assert (same.outcome, same.pairing, same.value) == ("passed", "same clusters", same.baseline)
    (worse,) = checks(dump(tmp_path / "worse", noise=0.15, seed=1), "mis_k3_kl:increase=25%", base=base)
    assert worse.outcome == "failed" and worse.p is not None and worse.p < 0.05
    few, *missing = checks(dump(tmp_path / "few", seed=2, steps=3), "mis_k3_kl:increase=25%", base=base)
    assert [check.outcome for check in missing] == ["undecided"] * len(missing)
    assert few.outcome == "undecided" and "3 common clusters are too few: 5 are needed" in few.reason


def test_metrics_missing_in_a_result_are_undecided(place: str, tmp_path: Path) -> None:
    rules = parse_rules("mis_k3_kl:max=1")
    plain = analyze([place], [find_preset("token_is")])
    (check,) = judge(plain, rules).checks
    assert check.outcome == "undecided" and "framework='slime@2026-08'" in check.reason
    (other,) = judge(analyze([place], [find_preset("none")], framework=load_framework("slime")), rules).checks
    assert other.outcome == "undecided" and "correction" in other.reason
    with_framework = load_result([place], rules)
    (compared,) = judge(with_framework, parse_rules("mis_k3_kl:increase=0%"), Baseline("b", plain)).checks
    assert compared.outcome == "undecided" and "baseline" in compared.reason
    (by_worker,) = judge(with_framework, parse_rules("mis_k3_kl:max=1,per=worker")).checks
    assert by_worker.outcome == "undecided" and "once per step" in by_worker.reason


@pytest.mark.slow
@pytest.mark.parametrize("per", ["overall", "step"])
def test_non_finite_steps_never_pass(place: str, per: str) -> None:
    rules = parse_rules(f"mis_k3_kl:max=1e9,increase=1000%,per={per}")
    good, bad = load_result([place], rules), load_result([place], rules)
    bad.runs["dump"].logged["token_is"]["mis_k3_kl"][2] = None
    found = judge(bad, rules, Baseline("b", good)).checks
    assert any(check.outcome == "undecided" and check.value is None for check in found)
    assert {check.outcome for check in judge(good, rules, Baseline("b", bad)).checks if check.kind == "increase"} == {
        "undecided"
    }


def test_a_worse_step_never_improves_a_verdict(place: str) -> None:
    order = ["passed", "undecided", "failed"]
    rules = parse_rules("mis_k3_kl:max=0.002,increase=25%")
    base, new = load_result([place], rules), load_result([place], rules)
    before = [0] * 2
    for worse in (0.0, 1e-4, 1e-2, 1.0, 1e6, 1e300, 1.7e308):
        new.runs["dump"].logged["token_is"]["mis_k3_kl"][5] = 1e-3 + worse
        after = [order.index(check.outcome) for check in judge(new, rules, Baseline("b", base)).checks]
        assert all(one <= two for one, two in zip(before, after, strict=True)), worse
        before = after


def test_names_of_two_frameworks_are_refused(place: str) -> None:
    with pytest.raises(ConfigError, match="One gate can only compute the metrics of one framework"):
        load_result([place], parse_rules("mis_k3_kl:max=1") + parse_rules("rollout_corr/chi2_seq:max=1"))
    with pytest.raises(ConfigError, match="did you mean"):
        parse_rules("mis_k3_klx:max=1")


def test_gate_explains_logged_names(place: str) -> None:
    found = run("gate", place, "--rule", "mismatch_k3_kl:max=1")
    assert found.exit_code == 0 and "no code ever logged this" in found.stdout


def test_metrics_without_a_bound_use_their_worse_direction() -> None:
    (rule,) = parse_rules("ess_token:correction=token_is")
    assert rule.decrease is not None and rule.increase is None
    (rule,) = parse_rules("rejected_tokens:correction=geo_rs")
    assert rule.increase is not None and rule.decrease is None


def test_results_are_recognized_by_content(place: str, tmp_path: Path) -> None:
    unnamed = tmp_path / "result"
    unnamed.write_text(analyze([place], [find_preset("none")]).to_json())
    (found,) = checks(str(unnamed), "k3:max=1")
    assert found.outcome == "passed"


def test_huge_logged_values_fail_without_overflow(place: str) -> None:
    rules = parse_rules("mis_k3_kl:max=1")
    result = load_result([place], rules)
    result.runs["dump"].logged["token_is"]["mis_k3_kl"] = [1.7e308] * STEPS
    (check,) = judge(result, rules).checks
    assert check.outcome == "failed" and check.value == pytest.approx(1.7e308)


def test_corrections_a_framework_lacks_are_reported(place: str) -> None:
    words = ["gate", place, "--rule", "rollout_corr/chi2_seq:correction=geo_rs,framework=verl,max=1"]
    shown = " ".join(run(*words, code=4).stdout.split())
    assert "does not replay geo_rs" in shown and "name a correction" in shown
