"""Rules that name a metric of a framework, compared with the framework's own numbers."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.gate.gate import judge, load_result
from mismatchctl.api.gate.rules import parse_rules
from mismatchctl.api.gate.verdict import Check
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import find_preset, load_framework
from mismatchctl.recorder.recorder import Recorder


def dump(folder: Path) -> str:
    rng = np.random.default_rng(0)
    with Recorder(folder) as recorder:
        for step in range(8):
            lengths = rng.integers(5, 40, 8)
            rollout = [-rng.exponential(1.0, n) for n in lengths]
            train = [np.minimum(x + rng.normal(0, 0.05, len(x)), 0) for x in rollout]
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


def checks(path: str, *texts: str) -> list[Check]:
    rules = [rule for text in texts for rule in parse_rules(text)]
    return judge(load_result([path], rules), rules).checks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dump(tmp_path_factory.mktemp("names") / "dump")


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


@pytest.mark.parametrize("name", ["mis_k3_kl", "train_rollout_logprob_abs_diff", "rollout_corr/chi2_seq"])
def test_logged_names_without_an_equal_metric_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not equal to any metric of mismatchctl .*Write a metric such as k3"):
        parse_rules(f"{name}:max=1")
    with pytest.raises(ConfigError, match="did you mean"):
        parse_rules("mis_k3_klx:max=1")
    assert parse_rules(f"{name}:max=1", any_name=True)[0].metric == name
