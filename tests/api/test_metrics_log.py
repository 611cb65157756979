"""Metrics logs without a dump: recognized names, trend, order of changes, level, and the gate on a log."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mismatchctl.api.metrics_log import analyze_logs, change_text, is_run_log
from mismatchctl.errors import DataError
from tests.cli.command import run
from tests.factories.format_files import FORMATS, make_rows, write_truth

NAMES = {
    "verl": "rollout_corr/k3_kl",
    "slime": "train/train_rollout_logprob_abs_diff",
    "trl": "sampling/sampling_logp_difference/mean",
    "nemo-rl": "train/gen_kl_error",
    "prime-rl": "mismatch_kl/all/mean",
    "openrlhf": "vllm_kl",
    "skyrl": "policy/rollout_train_logprobs_abs_diff_mean",
    "ms-swift": "rollout_correction/k3_kl",
    "tinker-cookbook": "optim/kl_sample_train_v1",
    "roll": "actor/train_infer_diff_token_mean@sum",
}


def write_log(path: Path, series: dict[str, list[float]], step: int = 2) -> Path:
    count = len(next(iter(series.values())))
    rows = [{"step": step * place} | {name: values[place] for name, values in series.items()} for place in range(count)]
    if path.suffix == ".csv":
        heads = ["Step", *(f"run-a - {name}" for name in series)]
        lines = [",".join(map(str, row.values())) for row in rows]
        path.write_text("\n".join([",".join(f'"{head}"' for head in heads), *lines]) + "\n")
    elif path.suffix == "":
        writer = EventFileWriter(str(path))
        for place in range(count):
            values = [Summary.Value(tag=name, simple_value=series[name][place]) for name in series]
            writer.add_event(Event(step=step * place, summary=Summary(value=values)))
        writer.close()
    elif path.name == "trainer_state.json":
        path.write_text(json.dumps({"log_history": rows}))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def planted(seed: int = 0, steps: int = 40) -> dict[str, list[float]]:
    """Write a log: the gradient norm falls at step 30, K3 rises from 36 on, the reward falls at 50."""
    random = np.random.default_rng(seed)
    rise = np.clip(np.arange(steps) - 18, 0, None)
    return {
        "actor/grad_norm": [0.07 if place < 15 else 0.02 for place in range(steps)],
        "rollout_corr/k3_kl": (4e-4 * np.exp(0.2 * rise + 0.05 * random.normal(size=steps))).tolist(),
        "critic/rewards/mean": [0.6 if place < 25 else 0.1 for place in range(steps)],
        "actor/entropy": (0.5 + 0.01 * random.normal(size=steps)).tolist(),
        "perf/throughput": [1000.0] * steps,
    }


@pytest.mark.parametrize("name", ["run.csv", "run.jsonl", "trainer_state.json", "tensorboard"])
def test_trend_and_order_are_found(name: str, tmp_path: Path) -> None:
    (found,) = analyze_logs([write_log(tmp_path / name, planted())]).runs
    assert found.framework == "verl"
    assert [one.name for one in found.order] == ["actor/grad_norm", "rollout_corr/k3_kl", "critic/rewards/mean"]
    assert found.lead.name == "rollout_corr/k3_kl"
    assert found.lead.growth.verdict == "grew"
    assert abs(float(str(found.lead.growth.onset)) - 38) <= 4
    assert {one.role: one.growth.changed for one in found.health} == {
        "gradient norm": True, "reward": True, "entropy": False,
    }  # fmt: skip
    assert found.lead.level == "high for a dense model, normal for an MoE"
    assert change_text(found.order[0]) == "falls at step 30"
    assert "4 logged steps later" in found.lag_text(found.order[0]) or "logged steps later" in found.lag_text(
        found.order[0]
    )


@pytest.mark.parametrize("framework", NAMES)
def test_names_of_every_framework_are_recognized(framework: str, tmp_path: Path) -> None:
    values = [0.01 + 0.0001 * place for place in range(20)]
    found = analyze_logs([write_log(tmp_path / "a.jsonl", {NAMES[framework]: values, "reward": values})])
    assert [one.name for one in found.runs[0].mismatch] == [NAMES[framework]]
    assert framework in found.runs[0].lead.meaning


@pytest.mark.parametrize("width", ["80", "120"])
def test_the_first_screen_answers_and_names_the_next_command(width: str, tmp_path: Path) -> None:
    done = run("analyze", write_log(tmp_path / "run.csv", planted()), code=0, COLUMNS=width)
    lines = done.stdout.splitlines()
    assert re.match(r"FAIL   run: rollout_corr/k3_kl grew \S+x since step 3\d$", lines[0])
    assert len(lines) <= 24 and max(map(len, lines)) <= int(width)
    assert lines[-1].startswith("Details: -v   Next: mismatchctl init verl")
    steady = {name: values[:18] for name, values in planted().items()}
    calm = run("analyze", write_log(tmp_path / "calm.csv", steady), code=0, COLUMNS=width).stdout
    assert calm.startswith("OK     calm: no growth; K3 is normal for a dense model")


def test_details_explain_the_metrics_and_the_recording(tmp_path: Path) -> None:
    done = run("analyze", write_log(tmp_path / "run.csv", planted()), "-v", code=0, COLUMNS="120")
    for words in ("rises", "falls at step 30", "high for a dense model", "order", "lag to reward",
                  "Next step", "recorder.write(", "docs/integrations/verl.md"):  # fmt: skip
        assert words in done.stdout
    data = json.loads(run("analyze", tmp_path / "run.csv", "--json", code=0).stdout)
    assert data["runs"]["run"]["mismatch"][0]["growth"]["verdict"] == "grew"
    page = tmp_path / "page.html"
    run("analyze", tmp_path / "run.csv", "--html", page, "-q", code=0)
    assert "rollout_corr/k3_kl" in page.read_text()


def test_runs_of_one_export_are_separated(tmp_path: Path) -> None:
    lines = ['"Step","a - train/k3","b - train/k3"'] + [
        f"{step},0.001,{0.001 * 2 ** (step // 10)}" for step in range(40)
    ]
    path = tmp_path / "two.csv"
    path.write_text("\n".join(lines).replace("train/k3", "rollout_corr/k3_kl") + "\n")
    found = {one.name: one.lead.growth.verdict for one in analyze_logs([path]).runs}
    assert found == {"a": "steady", "b": "grew"}


def test_logs_are_distinguished_from_dumps(tmp_path: Path) -> None:
    rows = make_rows()
    for name, write in FORMATS.items():
        write(tmp_path / name, rows)
        assert not is_run_log(tmp_path / name), name
    assert not is_run_log(write_truth(tmp_path / "a.parquet", rows))
    run("analyze", tmp_path / "a.parquet", "-o", tmp_path / "result.json", "-q", code=0)
    assert not is_run_log(tmp_path / "result.json")
    assert not is_run_log(tmp_path / "none.csv")


def test_logs_without_known_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="this log contains no known mismatch metric; it contains reward, loss"):
        analyze_logs([write_log(tmp_path / "a.jsonl", {"reward": [1.0, 2.0], "loss": [1.0, 2.0]})])
    failed = run("analyze", write_log(tmp_path / "b.csv", planted()), "-c", "token_tis", code=2)
    assert "is a metrics log without tokens; leave out --correction" in failed.stderr
    write_truth(tmp_path / "a.parquet", make_rows())
    failed = run("analyze", tmp_path / "a.parquet", tmp_path / "b.csv", code=2)
    assert "pass only logs or only dumps" in failed.stderr


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        (["k3:max=1"], 0),
        (["rollout_corr/k3_kl:max=1"], 0),
        (["k3_kl:max=1"], 0),
        (["k3:max=0.001"], 3),
        (["k3:max=20%"], 2),
        (["rollout_corr/k3_kl:max=20%"], 2),
        (["k3:max=1", "critic/rewards/mean:min=0.2"], 3),
        (["critic/rewards/mean:min=0.05"], 0),
        (["nope:max=1"], 4),
        (["k3:increase=20%"], 2),
        (["k3:max=1,per=worker"], 2),
        ([], 2),
    ],
)
def test_the_gate_checks_bounds_of_a_log(rules: list[str], code: int, tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.csv", planted())
    done = run("gate", path, *(word for rule in rules for word in ("--rule", rule)), code=code)
    if rules == ["k3:max=0.001"]:
        assert "in step 78" in done.stdout
    if rules == ["nope:max=1"]:
        assert "the log does not contain nope" in done.stdout


def test_the_gate_of_a_log_refuses_a_level_of_zero(tmp_path: Path) -> None:
    path = write_log(tmp_path / "run.csv", planted())
    done = run("gate", path, "--rule", "k3:max=1", "--level", "0", code=2)
    assert done.stderr == "error: level must be above 0 and at most 0.5, found 0\n"


@pytest.mark.parametrize("name", ["run.jsonl", "trainer_state.json", "tensorboard"])
def test_commands_read_logs_in_every_format(name: str, tmp_path: Path) -> None:
    path = write_log(tmp_path / name, planted())
    assert json.loads(run("analyze", path, "--json", code=0).stdout)
    run("gate", path, "--rule", "k3:max=1", code=0)
    run("gate", path, "--rule", "k3:max=0.001", code=3)


def test_non_finite_values_never_pass(tmp_path: Path) -> None:
    series = planted()
    series["rollout_corr/k3_kl"][7] = math.nan
    path = write_log(tmp_path / "run.jsonl", series)
    assert " are NaN or infinite" in run("gate", path, "--rule", "k3:max=1", code=4).stdout
    run("gate", path, "--rule", "k3:max=0.001", code=3)
    assert "was NaN or infinite 1 time" in run("analyze", path, code=0).stdout
