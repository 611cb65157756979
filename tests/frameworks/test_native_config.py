"""Configurations of frameworks are recognized, read as corrections, written back and replayed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import ReplayOptions
from mismatchctl.frameworks.registry import load_framework, recognize
from mismatchctl.recorder.recorder import Recorder
from tests.cli.command import run
from tests.factories.dumps import write_dump
from tests.frameworks.native_config import read_native

VERL = {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0", "rollout_rs": "token_k1", "rollout_rs_threshold": 3.0}
VERL_2025 = {"rollout_is": "token", "rollout_rs": "geometric", "rollout_rs_threshold": 1.01}
FLAT = {"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_level": "sequence", "rollout_is_mode": "mask"}
MIS = {
    "use_tis": True, "tis_level": "token", "tis_mode": "truncate", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0,
    "tis_batch_normalize": False, "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.99,
    "rs_upper_bound": 1.001, "rs_veto_threshold": 1.0e-4,
}  # fmt: skip


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return write_dump(tmp_path / "healthy")


def written(folder: Path, data: Any, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(json.dumps(data) if path.suffix == ".json" else yaml.safe_dump(data))
    return path


@pytest.mark.parametrize(
    ("native", "whose"),
    [
        (VERL, "verl@2026-08"),
        ({"rollout_correction": VERL}, "verl@2026-08"),
        ({"trainer": {"epochs": 1}, "algorithm": {"gamma": 1.0, "rollout_correction": VERL}}, "verl@2026-08"),
        ({"algorithm": {"rollout_correction": VERL_2025}}, "verl@2025-11-25"),
        ({"rollout_correction": VERL_2025 | {"bypass_old_logprob_for_rollout": True}}, "verl@2025-11-07"),
        (FLAT, "verl@2025-10"),
        ({"rollout_is_threshold": 2.0}, "verl@2025-10"),
        ({"algorithm": {"adv_estimator": "grpo", **FLAT}}, "verl@2025-10"),
        ({"algorithm": {"rollout_correction": None}}, "verl@2026-08"),
        (MIS, "slime"),
        ({"use_tis": True, "tis_clip": 2.0, "lr": 1e-6}, "slime"),
        ({"--use-tis": True, "--tis-clip": 2.0}, "slime"),
        ({"actor_rollout_ref": {"actor": {"tis_imp_ratio_cap": 2.0}}}, "verl@2026-08"),
        (
            {"actor_rollout_ref": {"actor": {"tis_imp_ratio_cap": -1}}, "algorithm": FLAT},
            "verl@2025-10",
        ),
        (
            {"algorithm": {"rollout_correction": {"rollout_is_treshold": 2.0}, "rollout_is_level": "token"}},
            "verl@2026-08",
        ),
        ({"algorithm": {"rollout_correction": "none"}}, "verl@2026-08"),
        ({"algorithm": {"gamma": 1.0}}, None),
        ({"weight": {"level": "token"}}, None),
        ({}, None),
    ],
)
def test_configurations_are_recognized(native: Mapping[str, Any], whose: str | None) -> None:
    assert recognize(native) == whose


def test_files_give_the_correction_of_their_framework(tmp_path: Path) -> None:
    nested = written(tmp_path, {"algorithm": {"rollout_correction": VERL}}, "run-7.yaml")
    framework, correction = read_native(nested)
    assert (framework.title, correction.name) == ("verl@2026-08", "run-7")
    assert correction == load_framework("verl@2026-08").correction(VERL).model_copy(
        update={"name": "run-7", "about": correction.about}
    )
    framework, correction = read_native(written(tmp_path, MIS, "mis.json"), "miles")
    assert framework.name == "miles"
    assert correction.gates == load_framework("miles").correction(MIS).gates


@pytest.mark.parametrize(
    ("data", "framework", "says"),
    [
        ({"rollout_correction": {"rollout_is": "tokens"}}, "", "Invalid rollout_is"),
        ({"rollout_correction": {"rollout_is": "token", "rollout_is_treshold": 2.0}}, "", "rollout_is_threshold"),
        (MIS | {"tis_level": "geometric", "tis_batch_normalize": True}, "", "Unsupported tis_level: geometric"),
        (MIS, "verl", "configuration of slime"),
        (VERL, "slime", "configuration of verl@2026-08"),
        (VERL, "verll", "did you mean 'verl'"),
        (VERL, "verl@2025-11-07", "verl@2025-11-07"),
        (
            {"actor_rollout_ref": {"actor": {"tis_imp_ratio_cap": 2}}},
            "",
            "tis_imp_ratio_cap': it was replaced in 2025-10",
        ),
        ({"weight": {"level": "token"}}, "", "framework of this file is unclear"),
        ({"weight": {"level": "token"}}, "trl", "contains no correction key of trl"),
        ([1], "", "keys and values"),
        (MIS | {"tis_upper_bound": 10**400}, "", "more than 64 bits"),
        (
            {"rollout_correction": {"rollout_rs": "token", "rollout_rs_threshold": 0.5}},
            "",
            "cannot read a correction from it",
        ),
    ],
)
def test_configurations_a_framework_rejects_are_rejected(
    dump: Path, tmp_path: Path, data: Any, framework: str, says: str
) -> None:
    words = ["--framework", framework] if framework else []
    done = run("analyze", dump, "--config", written(tmp_path, data), *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_absent_or_invalid_files_are_reported(dump: Path, tmp_path: Path) -> None:
    assert "absent.yaml" in run("analyze", dump, "--config", "absent.yaml").stderr
    (tmp_path / "broken.yaml").write_text("rollout_correction: [")
    done = run("analyze", dump, "--config", tmp_path / "broken.yaml", code=2)
    assert "not valid YAML" in done.stderr
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_native(tmp_path / "broken.json")


def test_analyze_combines_configurations_and_corrections(dump: Path, tmp_path: Path) -> None:
    verl, mis = written(tmp_path, {"rollout_correction": VERL}, "verl.yaml"), written(tmp_path, MIS, "mis.yaml")
    done = run("analyze", dump, "-c", "none", "--config", verl, "--config", mis, "--json", code=0)
    found = json.loads(done.stdout)["corrections"]
    assert [item["name"] for item in found] == ["none", "verl", "mis"]
    assert found[2]["gates"][0]["keep"] == [0.99, 1.001]
    assert "verl.yaml: read as verl@2026-08" in done.stderr
    assert run("analyze", dump, "--config", verl, "-q").stderr == ""


@pytest.mark.parametrize("name", ["mine.yaml", "mine.json"])
def test_a_configuration_given_as_correction_names_the_right_option(dump: Path, tmp_path: Path, name: str) -> None:
    done = run("analyze", dump, "-c", written(tmp_path, {"rollout_correction": VERL}, name), code=2)
    assert "--config" in done.stderr
    assert "verl@2026-08" in done.stderr


@pytest.mark.parametrize("framework", ["verl", "verl@2025-10", "verl@2025-11-25", "slime", "miles"])
def test_presets_in_native_syntax_are_read_back(tmp_path: Path, framework: str) -> None:
    done = run("presets", "show", "token_tis", "--as", framework, code=0)
    path = tmp_path / "native.yaml"
    path.write_text(done.stdout)
    _, again = read_native(path, framework)
    assert again.weight is not None
    assert (again.weight.level, again.weight.truncate, again.gates) == ("token", 2.0, ())


def test_unsupported_fields_are_refused_or_commented() -> None:
    words = ("presets", "show", "miles-moe-2", "--as", "verl@2025-11-25")
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "has truncate 1.5" in done.stderr
    done = run(*words, "--nearest")
    assert "has truncate 1.5" in done.stdout
    assert yaml.safe_load(done.stdout)["algorithm"]["rollout_correction"]["rollout_rs"] == "geometric"
    assert yaml.safe_load(run("presets", "show", "none", "--as", "slime").stdout) == {"use_tis": False}
    done = run("presets", "show", "none", "--as", "slim")
    assert (done.exit_code, "slime" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rollout_corr/kl", ["verl@2026-08", "valid tokens", "rollout minus train"]),
        ("mis_kl", ["slime@", "miles@", "train/mis_kl"]),
        ("mismatch_kl", ["never: only documented", "train/mis_kl", "verl@2025-10"]),
        ("k3", ["nats/token"]),
        ("ois", ["train/ois", "slime@"]),
    ],
)
def test_logged_names_are_explained(name: str, says: list[str]) -> None:
    done = run("metrics", name, code=0)
    for words in says:
        assert words in done.stdout
    assert json.loads(run("metrics", name, "--json").stdout)


def test_analyze_replays_each_step_like_the_framework(tmp_path: Path) -> None:
    folder, rng = tmp_path / "run", np.random.default_rng(3)
    steps: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    for part, chosen in enumerate([(0, 1), (1, 2)]):  # both files contain step 1
        with Recorder(folder / f"part-{part}") as recorder:
            for step in chosen:
                rollout = [-rng.exponential(1.0, int(n)).astype(np.float32) for n in rng.integers(3, 30, 8)]
                rows = [
                    {
                        "rollout_log_probs": row,
                        "train_log_probs": row + rng.normal(0, 0.05, len(row)).astype(np.float32) - np.float32(0.3),
                        "response_mask": (np.arange(len(row)) > 1).astype(np.int64),
                    }
                    for row in rollout
                ]
                steps[step] += rows
                recorder.write(step=step, run=["r"] * 8, **{name: [row[name] for row in rows] for name in rows[0]})
    path = written(tmp_path, {"rollout_correction": VERL}, "mine.yaml")
    done = run(
        "analyze", folder / "part-0", folder / "part-1", "--config", path, "--framework", "verl", "--json", code=0
    )
    result = json.loads(done.stdout)
    assert result["provenance"]["framework"] == "verl@2026-08"
    found = result["runs"]["r"]
    assert found["groups"]["labels"] == [0, 1, 2]
    framework = load_framework("verl")
    for index, rows in steps.items():
        table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
        expected = framework.replay(table, framework.correction(VERL)).logged
        assert found["logged"]["mine"].keys() == expected.keys()
        for name, value in expected.items():
            assert found["logged"]["mine"][name][index] == pytest.approx(value, rel=1e-9)


def test_unsupported_corrections_are_omitted_with_a_reason(dump: Path) -> None:
    done = run("analyze", dump, "-c", "token_tis", "-c", "geo_rs", "--framework", "slime", "--json")
    result = json.loads(done.stdout)
    assert list(result["runs"]["healthy"]["logged"]) == ["token_tis"]
    text = next(text for text in result["warnings"] if text.startswith("geo_rs: "))
    assert "slime@2026-08 cannot apply this correction (geometric mean within 0.1%: it has no such rule" in text
    whole = result["runs"]["healthy"]["logged"]["token_tis"]
    parts = json.loads(
        run("analyze", dump, "-c", "token_tis", "--framework", "slime@seed", "--micro-batch-size", "2", "--json").stdout
    )
    assert parts["runs"]["healthy"]["logged"]["token_tis"].keys() == whole.keys()


def test_no_replay_without_a_framework(dump: Path) -> None:
    result = json.loads(run("analyze", dump, "--json").stdout)
    assert "logged" not in result["runs"]["healthy"]
    assert "framework" not in result["provenance"]


@pytest.fixture
def logged(dump: Path) -> dict[str, list[float]]:
    result = json.loads(run("analyze", dump, "-c", "token_tis", "--framework", "verl", "--json").stdout)
    found: dict[str, list[float]] = result["runs"]["healthy"]["logged"]["token_tis"]
    return found


def rows(path: Path, values: Mapping[str, list[float]], *, nested: bool, prefix: str = "") -> Path:
    lines = []
    for step in range(3):
        data = {prefix + name: series[step] for name, series in values.items()} | {
            "note": "text",
            "broken": float("nan"),
        }
        lines.append(json.dumps({"step": step, "data": data} if nested else {"step": float(step)} | data))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("nested", "prefix"), [(True, ""), (False, ""), (False, "train/"), (True, "actor/")])
def test_matching_logs_agree(
    dump: Path, tmp_path: Path, logged: dict[str, list[float]], nested: bool, prefix: str
) -> None:
    log = rows(tmp_path / "metrics.jsonl", logged, nested=nested, prefix=prefix)
    done = run("analyze", dump, "-c", "token_tis", "--framework", "verl", "--against", log, code=0)
    assert f"{len(logged)} of {len(logged)} metrics agree" in done.stdout
    assert "DIFFERS" not in done.stdout
    assert done.stdout.index("K3") < done.stdout.index("metrics agree")  # after the summary


def test_different_logs_are_reported_by_name(dump: Path, tmp_path: Path, logged: dict[str, list[float]]) -> None:
    changed = {name: list(series) for name, series in logged.items() if name != "rollout_corr/k3_kl"}
    changed["rollout_corr/training_ppl"][1] *= 1.25
    log = rows(tmp_path / "metrics.jsonl", changed, nested=True)
    words = ["analyze", dump, "-c", "token_tis", "--framework", "verl", "--against", log]
    brief = run(*words, code=0).stdout
    assert "different: rollout_corr/training_ppl; not in the log: rollout_corr/k3_kl" in " ".join(brief.split())
    done = run(*words, "-v", code=0)
    (line,) = [line for line in done.stdout.splitlines() if "DIFFERS" in line]
    assert "rollout_corr/training_ppl" in line
    assert "2.0e-01" in line
    assert "not in the log: rollout_corr/k3_kl" in done.stdout
    assert run("analyze", dump, "-c", "token_tis", "--framework", "verl", "--against", log, "-q").stdout == ""


@pytest.mark.parametrize(
    ("text", "words", "code", "says"),
    [
        ("{", ["--framework", "verl"], 4, "row 0: the row is not a JSON object"),
        ("", ["--framework", "verl"], 4, "contains no metric"),
        ('{"loss": 1}', ["--framework", "verl"], 4, "missing step"),
        ('{"step": 9, "loss": 1}', ["--framework", "verl"], 4, "the log has 9, the dump has 0 to 2"),
    ],
)
def test_unusable_logs_are_refused(
    dump: Path, tmp_path: Path, text: str, words: list[str], code: int, says: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    done = run("analyze", dump, "--against", tmp_path / "metrics.jsonl", *words)
    assert (done.exit_code, done.stdout) == (code, "")
    assert says in done.stderr


def test_the_report_shows_the_replayed_metrics(dump: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    run("analyze", dump, "-c", "token_tis", "--framework", "verl", "--html", page, code=0)
    assert "verl@2026-08 would have logged" in page.read_text()
    assert "training_log_ppl" in page.read_text().replace("<wbr>", "")


def test_correction_files_are_shown_in_native_syntax(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("weight: {level: token, truncate: 3.0}\n")
    done = run("presets", "show", str(tmp_path / "mine.yaml"), "--as", "verl", code=0)
    assert yaml.safe_load(done.stdout)["algorithm"]["rollout_correction"]["rollout_is_threshold"] == 3.0


def test_configurations_verl_rejects_are_not_written() -> None:
    done = run("presets", "show", "icepop", "--as", "verl", "--nearest", code=0)
    assert "lower bound must be positive" in done.stdout
    assert yaml.safe_load(done.stdout)["algorithm"]["rollout_correction"]["rollout_is"] is None


def test_replays_average_by_rollout_or_token(tmp_path: Path) -> None:
    rng, own = np.random.default_rng(4), load_framework("slime")
    lengths = [3, 9, 5, 2, 7, 4]
    rollout = [-rng.exponential(1.0, length) for length in lengths]
    table = pa.table(
        {
            "rollout_log_probs": rollout,
            "train_log_probs": [row - rng.exponential(0.1, len(row)) for row in rollout],
            "rollout_ids": [7, 7, 8, None, 8, None],
        }
    )
    path = tmp_path / "dump.parquet"
    pq.write_table(table, path)
    correction = {"name": "mine", "weight": {"level": "token", "clip": [0.5, 1.2]}}
    words = ("analyze", path, "-c", json.dumps(correction), "--framework", "slime", "--json")
    plain = json.loads(run(*words).stdout)
    found = plain["runs"]["dump"]["logged"]["mine"]["tis"][0]
    weights = [
        np.exp(np.array(t) - np.array(q)) for t, q in zip(table[1].to_pylist(), table[0].to_pylist(), strict=True)
    ]
    by_rollout = [[0, 1], [2, 4], [3], [5]]  # a row without a rollout counts as one rollout
    means = [np.concatenate([weights[row] for row in rows]).mean() for rows in by_rollout]
    assert found == pytest.approx(np.mean(means))
    assert "replay" not in plain["provenance"]
    per_token = own.correction({"use_tis": True, "calculate_per_token_loss": True})
    value = own.replay(table, per_token, ReplayOptions(dtype="float32")).logged["tis"]
    assert value == pytest.approx(np.concatenate(weights).mean(), rel=1e-6)


def test_configurations_without_a_correction_are_replayed(dump: Path, tmp_path: Path) -> None:
    """A Correction without weights and gates does not contain these settings."""
    flags = {"use_tis": False, "eps_clip": 0.3, "use_kl_loss": True, "use_opsm": True}
    path = written(tmp_path, MIS | flags, "mis.yaml")
    done = run("analyze", dump, "--config", path, "--framework", "slime", "--json")
    logged = json.loads(done.stdout)["runs"]["healthy"]["logged"]["mis"]
    assert "mis_kl" in logged
    assert not {"kl_loss", "loss", "opsm_clipfrac"} & logged.keys()  # no reference, no masked tokens there
