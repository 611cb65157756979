"""Typical misreadings of the documents of verl, slime and Miles, and the documents' own examples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.config_files import is_same, write_keys
from mismatchctl.frameworks.registry import find_adapter, find_preset, load_framework, load_presets
from mismatchctl.io.yaml import parse_toml
from mismatchctl.recorder.recorder import Recorder
from tests.cli.command import run
from tests.frameworks.native_config import read_native
from tests.paths import FIXTURES, ROOT

pytestmark = pytest.mark.slow
EXAMPLES = FIXTURES / "framework_configs"


def lint(*words: str | Path) -> list[dict[str, Any]]:
    done = run("lint", *words, "--json")
    assert done.exit_code in (0, 3), done.stderr
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return findings


def analyzed(*words: str | Path) -> dict[str, Any]:
    done = run("analyze", *words, "--json", code=0)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def overall(result: dict[str, Any], correction: str) -> dict[str, float]:
    (found,) = result["runs"].values()
    return {name: metric["value"] for name, metric in found["overall"]["corrections"][correction].items()}


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("documents"), np.random.default_rng(7)
    with Recorder(folder / "d") as recorder:
        for step in range(3):
            rollout = [-rng.exponential(1.0, int(n)) - 1.5 for n in rng.integers(20, 60, 12)]
            train = [values + rng.normal(0, 0.2, len(values)).clip(-1, 1) for values in rollout]
            train[0][3] -= 12.0
            current = [values + rng.normal(0, 0.05, len(values)).clip(-1, 1) for values in rollout]
            recorder.write(step=step, rollout_log_probs=rollout, train_log_probs=train, current_log_probs=current)
    return folder


def test_scalars_and_versions_are_recognized(dump: Path) -> None:
    """1e-4 is a number, as in Hydra. The keys determine the version, which is named by its date."""
    flat = "rollout_is: true\nrollout_is_threshold: 2.0\nrollout_is_veto_threshold: 1e-4\n"
    for text in (flat, f"algorithm:\n{''.join(f'  {line}' for line in flat.splitlines(keepends=True))}"):
        path = written(dump, text)
        framework, correction = read_native(path)
        assert (framework.title, correction.gates[0].keep) == ("verl@2025-10", (1e-4, None))
        assert {finding["level"] for finding in lint(path)} <= {"info"}
        assert overall(analyzed(dump / "d", "--config", path), "mine")["rejected_sequences"] == pytest.approx(1 / 12)
    for framework, words in (("verl", 0), ("verl@2026-08", 2)):  # without a version, the keys determine it
        run("analyze", dump / "d", "--config", path, "--framework", framework, code=words)
    old = written(dump, "rollout_correction: {rollout_is: token, rollout_token_veto_threshold: 1e-5}")
    assert read_native(old)[0].title == "verl@2025-11-25"
    with pytest.raises(ConfigError, match=r"verl@2026-08: unknown key .*: verl@2025-11-07 to verl@2025-11-25 do"):
        load_framework("verl@2026-08").correction(yaml.safe_load(old.read_text()))
    assert load_framework("verl@d").title == "verl@2026-08" and load_framework("slime@seed").title == "slime@2026-01"


def test_unread_keys_are_errors(dump: Path) -> None:
    """Names that only the document uses are errors that list the real keys, in every version."""
    for name in ("level", "mode", "lower_bound", "upper_bound", "veto_threshold", "batch_normalize"):
        path = written(dump, f"use_tis: true\nmis_{name}: 1\n")
        (found,) = [finding for finding in lint(path) if finding["place"] == f"mis_{name}"]
        assert found["level"] == "error"
        assert "the code reads" in found["consequence"]
        done = run("analyze", dump / "d", "--config", path, code=2)
        assert f"mis_{name}" in done.stderr and "the code reads" in done.stderr
    mis = yaml.safe_load((EXAMPLES / "slime-mis.yaml").read_text())
    done = run("analyze", dump / "d", "--config", written(dump, yaml.safe_dump(mis)), "--framework", "verl", code=2)
    assert "this is a configuration of slime" in done.stderr
    for title in find_adapter("verl").titles:
        misspelt = {"algorithm": {"rollout_correction": {}, "rollout_is_treshold": 2}, "lr": 1}
        places = [found.place for found in load_framework(title).lint(misspelt) if found.level == "error"]
        assert "algorithm.rollout_is_treshold" in places
    for title in (*find_adapter("slime").titles, *find_adapter("miles").titles):
        with pytest.raises(ConfigError, match="did you mean 'tis_upper_bound'"):
            load_framework(title).correction(mis | {"tis_uper_bound": 2})
        assert "my_own" not in {found.place for found in load_framework(title).lint(mis | {"my_own": 2})}
    done = run("analyze", dump / "d", "--config", written(dump, "use_tis: true\nmy_own: 3"), code=0)
    assert "my_own" not in done.stderr


def test_written_presets_are_read_back(dump: Path) -> None:
    """Every preset is read back from every framework and version, or refused with a reason."""
    refused = 0
    for framework in ("verl", "slime", "miles"):
        for title in (framework, *find_adapter(framework).titles):
            for name in load_presets():
                try:
                    keys = write_keys(find_preset(name), load_framework(title))
                except ConfigError as error:
                    refused += 1
                    assert f" cannot express {name}: " in str(error)
                    continue
                assert is_same(load_framework(title).correction(keys), find_preset(name)), (title, name)
    assert refused
    for title in ("slime", "miles", "verl", "verl@2025-11-07"):
        done = run("presets", "show", "ppo_is_bypass", "--as", title, code=0)
        path = written(dump, done.stdout)
        assert is_same(read_native(path)[1], find_preset("ppo_is_bypass"))
        assert analyzed(dump / "d", "--config", path)
    done = run("presets", "show", "slime-mis", "--as", "slime")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "denominators; slime@2026-01 can express it" in done.stderr


def test_bypass_mode_never_weights(dump: Path) -> None:
    """PPO in bypass mode has no weights, for every spelling of the option."""
    for keys in ("bypass_old_logprob_for_rollout: true", "bypass_mode: true", "bypass_mode: true, loss_type: ppo_clip"):
        path = written(dump, f"rollout_correction: {{rollout_is: token, rollout_is_threshold: 2.0, {keys}}}")
        found = overall(analyzed(dump / "d", "--config", path, "-c", "ppo_is_bypass"), "mine")
        assert found == overall(analyzed(dump / "d", "-c", "ppo_is_bypass"), "ppo_is_bypass")
        assert found["weight_mean"] == 1


def test_presets_follow_the_code_and_not_the_document(dump: Path) -> None:
    """seq_mis and geo_mis keep the tokens that verl's code keeps. `lint` and `presets` describe the document's rule."""
    for name, lower in (("seq_mis", "0.5"), ("geo_mis", "0.999001")):
        assert "verl's document" in run("presets", "show", name).stdout
        path = written(dump, run("presets", "show", name, "--as", "verl@2025-11").stdout)
        (found,) = [finding for finding in lint(path) if "verl's document" in finding["consequence"]]
        assert lower in found["consequence"]


def test_presets_of_miles_match_the_post() -> None:
    """The preset has no veto, and a second preset has the veto."""
    for number in "123":
        plain, vetoed = find_preset(f"miles-moe-{number}"), find_preset(f"miles-moe-{number}-veto")
        assert [gate.is_veto for gate in plain.gates] == [False]
        assert [gate.is_veto for gate in vetoed.gates] == [False, True]
        assert plain.weight == vetoed.weight
        assert is_same(read_native(EXAMPLES / f"miles-moe-{number}.yaml", "miles@2026-01")[1], plain)
    assert is_same(read_native(EXAMPLES / "miles-moe-4.yaml")[1], find_preset("miles-moe-4"))


def test_micro_batches_of_the_flag_and_of_the_dump_agree(dump: Path) -> None:
    """A dump without micro-batches gives a warning. With the flag, N rows of a step are normalized together."""
    words = (dump / "d", "-c", "miles-moe-1")
    warned = analyzed(*words)
    assert any("--micro-batch-size N" in text for text in warned["warnings"])
    assert not analyzed(dump / "d", "-c", "token_tis")["warnings"]
    sequences = dump / "sequences.parquet"
    alone = run("analyze", *words, "--micro-batch-size", "1", "--sequences", sequences, "--force", "--json", code=0)
    assert not json.loads(alone.stdout)["warnings"]
    import polars as pl

    assert pl.read_parquet(sequences)["miles-moe-1.weight"].to_list() == pytest.approx([1] * 36, rel=1e-12)
    four = overall(analyzed(*words, "--micro-batch-size", "4"), "miles-moe-1")
    with Recorder(dump / "named") as recorder:
        rows = pl.read_parquet(str(dump / "d" / "**" / "*.parquet")).to_dicts()
        for step in range(3):
            chosen = [found for found in rows if found["step"] == step]
            recorder.write(
                step=step, rollout_log_probs=[found["rollout_log_probs"] for found in chosen],
                train_log_probs=[found["train_log_probs"] for found in chosen], micro_batch=np.arange(12) // 4,
            )  # fmt: skip
    named = overall(analyzed(dump / "named", "-c", "miles-moe-1"), "miles-moe-1")
    for name in ("weight_std", "normalization_factor", "ess_token"):
        assert four[name] == pytest.approx(named[name], rel=1e-7)


def test_verl_before_pr_3915_zeroes_weights(dump: Path) -> None:
    """Rejection sets weights to zero and does not change the mask. The veto is on by default."""
    old, new = load_framework("verl@3694"), load_framework("verl@3915")
    assert (old.title, new.title) == ("verl@2025-10-14", "verl@2025-10")
    keys = {"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_mode": "mask"}
    before, after = old.correction(keys), new.correction(keys)
    assert [(gate.keep, gate.effect) for gate in before.gates] == [((0.5, 2.0), "zero"), ((1e-4, None), "zero")]
    assert [(gate.keep, gate.effect) for gate in after.gates] == [((0.5, 2.0), "mask")]
    assert len(old.correction(keys | {"rollout_is_veto_threshold": None}).gates) == 1
    unapplied = old.correction(keys | {"rollout_is": False})
    assert (unapplied.weight, unapplied.gates) == (None, ())  # without weights, no weight can be set to zero
    import pyarrow as pa

    log_ratio = np.log([[1.5, 3.0, 1.0], [1.0, 1e-5, 1.0], [1.0, 1.2, 1.0]])
    table = pa.table({
        "rollout_log_probs": np.full((3, 3), -20.0).tolist(), "train_log_probs": (log_ratio - 20.0).tolist(),
    })  # fmt: skip
    out = old.replay(table, before)
    assert out.weights is not None
    expected = [[1.5, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.2, 1.0]]
    np.testing.assert_allclose(np.array(out.weights), expected, rtol=1e-12)
    assert [kept.tolist() for kept in out.keep] == [[True, False, True], [False] * 3, [True] * 3]
    path = written(dump, yaml.safe_dump(keys))
    values = overall(analyzed(dump / "d", "--config", path, "--framework", "verl@2025-10-14"), "mine")
    assert values["rejected_tokens"] > overall(analyzed(dump / "d", "--config", path), "mine")["rejected_tokens"]


def test_the_table_of_presets_matches_verls_document() -> None:
    rows = {found["name"]: found for found in json.loads(run("presets", "--table", "--json").stdout)}
    expected = {
        "token_is": ("token", "-", "current/train", "no", "recomputed", "yes"),
        "seq_is": ("sequence", "-", "current/train", "no", "recomputed", "yes"),
        "seq_is_rs": ("sequence", "product", "current/train", "no", "recomputed", "yes"),
        "geo_rs": ("-", "geometric", "current/train", "no", "recomputed", "yes"),
        "ppo_is_bypass": ("-", "-", "current/rollout", "yes", "= rollout", "none"),
        "pure_is": ("sequence", "-", "-", "yes", "none", "none"),
    }
    for name, wanted in expected.items():
        found = rows[name]
        facts = [found[key] for key in ("weight", "rejection", "clip", "bypass", "old_policy", "forward_pass")]
        assert all(part in fact for part, fact in zip(wanted, facts, strict=True)), (name, facts)
        assert found["assumes"]
    assert "| preset | IS weight | rejection |" in (ROOT / "docs/reference/presets.md").read_text()
    assert "recomputed" in run("presets", "--table").stdout


def test_project_urls_belong_to_the_repository() -> None:
    """All addresses of the project are pages of its repository."""
    urls = parse_toml((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls.keys() >= {"Homepage", "Issues", "Changelog"}
    assert [url for url in urls.values() if not url.startswith(urls["Homepage"])] == []


def test_small_differences_from_a_log_are_reported(dump: Path) -> None:
    """K3 of 1e-12 differs from a logged 9e-7, and K3 times 1.0001 differs from K3."""
    for name, scale, factor in (("tiny", 1.5e-6, 7e5), ("usual", 0.05, 1.0001)):
        rng, made = np.random.default_rng(1), dump / f"log-{name}"
        rollout = [-0.6 - rng.exponential(1.0, 100) for _ in range(8)]
        train = [values + rng.normal(0, scale, 100) for values in rollout]
        made.mkdir()
        columns = {"rollout_log_probs": rollout, "train_log_probs": train, "step": [0] * 8}
        pq.write_table(pa.table(columns), made / "a.parquet")  # float64, so that rounding does not matter
        x = np.concatenate(train) - np.concatenate(rollout)
        true = float(np.mean(np.expm1(x) - x))
        for value, agrees in ((true, True), (true * factor, False)):
            log = written(dump, json.dumps({"step": 0, "rollout_corr/k3_kl": value}), "log.jsonl")
            found = analyzed(made, "-c", "none", "--framework", "verl", "--against", log)
            (each,) = found["runs"].values()
            item = each["against"]["none"]["names"]["rollout_corr/k3_kl"]
            assert item["agrees"] is agrees
            assert item["difference"] == pytest.approx(abs(value - item["dump"]) / max(value, item["dump"]), rel=1e-6)


READ_AS: dict[str, list[str]] = {
    "slime-custom-args.sh": ["slime-mis"],
    "slime-mis.yaml": ["slime-mis"],
    "slime-true-on-policy.sh": ["none"],
    "miles-moe-1.yaml": ["miles-moe-1"],
    "miles-moe-2.yaml": ["miles-moe-2"],
    "miles-moe-3.yaml": ["miles-moe-3"],
    "miles-moe-4.yaml": ["miles-moe-4"],
    "verl-token-is.py": ["token_is"],
    "verl-seq-is.py": ["seq_is"],
    "verl-seq-is-rs.py": ["seq_is_rs", "seq_mis"],
    "verl-geo-rs.py": ["geo_rs"],
    "verl-ppo-is-bypass.py": ["ppo_is_bypass"],
    "verl-pure-is.py": ["pure_is"],
    "verl-veto.py": [],
    "verl-pr-3915.yaml": ["none"],  # the threshold that enables corrections is missing
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir()))
def test_documented_examples_give_the_documented_corrections(name: str, dump: Path) -> None:
    """The examples run through lint and `analyze --config` and match the preset of their name."""
    run("lint", EXAMPLES / name, code=0)
    framework = "slime@2026-01" if name.startswith("slime") else "miles@2026-01" if name.startswith("miles") else ""
    result = analyzed(dump / "d", "--config", EXAMPLES / name, *(["--framework", framework] if framework else []))
    found = [Correction.model_validate(item) for item in result["corrections"]]
    for one, wanted in zip(found, READ_AS[name], strict=bool(READ_AS[name])):
        assert is_same(one, find_preset(wanted)), (name, wanted)
