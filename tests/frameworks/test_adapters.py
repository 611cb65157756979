"""Presets, configurations and names of every framework."""

import json
import re
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import mismatchctl as mm
from mismatchctl.diagnosis.causes.registry import CAUSES
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import take_prompt
from mismatchctl.frameworks.config_files import is_same, write_keys
from mismatchctl.frameworks.glossary import find_meanings
from mismatchctl.frameworks.registry import (
    ADAPTER_MODULES,
    CONFIG_CLASSES,
    find_adapter,
    list_settings,
    load_adapters,
    load_framework,
    load_presets,
    recognize,
)
from tests.cli import command
from tests.conformance.compare_peers import FRAMEWORKS as PEERS
from tests.conformance.compare_peers import cases
from tests.frameworks.native_config import read_native
from tests.paths import ROOT

SHIPPED = {name: item for name, item in load_presets().items() if item.framework}


def run(*arguments: object) -> str:
    done = command.run(*arguments, code=0)
    return done.stdout


@pytest.mark.parametrize("name", SHIPPED)
def test_presets_are_read_back_in_native_syntax(name: str, tmp_path: Path) -> None:
    """Presets are written in the framework's options, in a file, inside a full configuration, and without a hint."""
    item = SHIPPED[name]
    for title in dict.fromkeys((f"{item.framework}@{item.version}", *find_adapter(item.framework).titles)):
        try:
            own = load_framework(title)
            keys = write_keys(item.correction, own)
            break
        except ConfigError:
            continue
    else:
        pytest.fail(f"no version says {name}")
    for place in ((), own.block):
        full = keys
        for key in reversed(place):
            full = {key: full}
        assert is_same(own.correction(full), item.correction)
        path = tmp_path / f"config{len(place)}.yaml"
        path.write_text(yaml.safe_dump(full))
        assert is_same(read_native(path, own.title)[1], item.correction)


@pytest.mark.parametrize(
    ("native", "whose"),
    [
        ({"vllm_importance_sampling_mode": "token_mask", "learning_rate": 1e-6, "beta": 0.0}, "trl"),
        ({"loss_fn": {"use_importance_sampling_correction": True}}, "nemo-rl"),
        ({"grpo": {"seq_logprob_error_threshold": 2.0}}, "nemo-rl"),
        ({"algo": {"advantage": {"is_correction_enable": True, "is_correction_type": "icepop"}}}, "openrlhf@0.11"),
        ({"trainer": {"loss": {"type": "ipo", "ipo_threshold": 0.1}}}, "prime-rl"),
        ({"actor": {"rejection_sampling": {"upper": 5.0}, "path": "x"}}, "areal"),
        ({"trainer": {"algorithm": {"off_policy_correction": {"tis_ratio_type": "token"}}}}, "skyrl"),
        ({"train_infer_correction": {"is_weight": {"enabled": True}}}, "roll"),
        ({"use_rho_correction": True, "rho_clamp_upper_bound": 2.0}, "open-instruct"),
        ({"rollout_importance_sampling_mode": "token_truncate", "num_train_epochs": 1}, "ms-swift"),
        ({"clip_low_threshold": 0.0, "clip_high_threshold": 5.0, "loss_fn": "cispo"}, "tinker-cookbook"),
        ({"vllm_importance_sampling_mode": "token_mask", "loss_type": "dapo"}, "trl"),
        ({"rollout_importance_sampling_mode": "token_truncate", "loss_type": "grpo"}, "ms-swift"),
        ({"rollout_is": "token", "rollout_is_threshold": 2.0}, "verl@2026-08"),
        ({"use_tis": True, "tis_clip": 2.0}, "slime"),
    ],
)
def test_a_configuration_is_recognized(native: dict[str, object], whose: str, tmp_path: Path) -> None:
    assert recognize(native) == whose
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(native))
    framework, correction = read_native(path)
    assert framework.name == whose.partition("@")[0]
    assert correction.weight is not None or correction.gates


def test_unknown_configurations_are_not_assigned_to_a_framework() -> None:
    assert recognize({"loss_type": "dapo", "epsilon": 0.2}) is None
    assert recognize({"learning_rate": 1e-6, "level": "token", "mode": "x", "type": "adam"}) is None
    assert recognize({"weight": {"truncate": 2.0}, "gates": []}) is None


@pytest.mark.parametrize(
    ("asked", "version"),
    [
        ("verl@9.9", "0.9.1"), ("verl@0.10", "0.9.1"), ("verl@0.7.5", "0.7.1"), ("verl@2030-01", "0.9.1"),
        ("verl@2026-07", "0.8.0"), ("verl@2025-12", "2025-11-25"), ("slime@2030-01", "2026-08"),
        ("slime@2026-05", "2026-01"), ("miles@2030-01", "2026-08"),
    ],
)  # fmt: skip
def test_an_unknown_version_is_read_as_an_earlier_one_with_a_warning(asked: str, version: str) -> None:
    framework = load_framework(asked)
    if "-" in asked:
        text = f"{asked} is read as {framework.name}@{version}, the last known version before that date"
    else:
        text = f"{asked} is not known, so it is read as {framework.name}@{version}"
    assert framework.warnings == [text]
    assert framework.version == version and load_framework(framework.title).warnings == []


@pytest.mark.parametrize(
    ("asked", "version"),
    [
        ("verl", "2026-08"), ("verl@0.6", "0.6.1"), ("verl@0.7", "0.7.1"), ("verl@v0.8", "0.8.0"),
        ("verl@0.9", "0.9.1"), ("verl@2025-11", "2025-11-25"), ("slime@0.2", "v0.2.1"), ("slime@0.2.0", "v0.2.0"),
    ],
)  # fmt: skip
def test_a_partial_version_means_the_newest_that_matches(asked: str, version: str) -> None:
    framework = load_framework(asked)
    assert framework.version == version and framework.warnings == []


def test_every_use_of_an_unknown_version_is_reported_once(tmp_path: Path) -> None:
    asked, dump, config = "verl@9.9", tmp_path / "dump.parquet", tmp_path / "verl.yaml"
    rows = {"rollout_log_probs": [[-1.0, -2.0], [-1.5]] * 8, "train_log_probs": [[-1.1, -1.9], [-1.4]] * 8}
    pq.write_table(pa.table(rows), dump)
    config.write_text("algorithm:\n  rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0}\n")
    warning = "verl@9.9 is not known, so it is read as verl@0.9.1"
    rule = "rollout_corr/kl:framework=verl@9.9,max=1"
    for words in (
        ("analyze", dump, "--framework", asked),
        ("analyze", dump, "--framework", asked, "--config", config),
        ("analyze", dump, "--framework", asked, "--json"),
        ("advise", dump, "--for", asked),
        ("advise", dump, "--for", asked, "-v"),
        ("advise", dump, "--for", asked, "--markdown", "-"),
        ("lint", config, "--framework", asked),
        ("presets", "show", "token_tis", "--as", asked),
        ("gate", dump, "--rule", rule),
        ("gate", dump, "--rule", rule, "--rule", f"rollout_corr/k3_kl:framework={asked},max=1"),
        ("watch", dump, "--until-idle", "0s", "--every", "0.1s", "--rule", rule),
    ):
        done = command.run(*words)
        shown = done.stderr if "--json" in words else done.stdout + done.stderr
        assert " ".join(shown.replace("\u200b", "").split()).count(warning) == 1, words  # Markdown mentions nobody
    assert mm.analyze(dump, framework=asked).warnings.count(warning) == 1
    advice = mm.advise(dump, framework=asked)
    assert advice["dump"].warnings == [warning] and str(advice).count(warning) == 1
    assert [one.consequence for one in mm.lint(config, framework=asked)] == [warning]
    assert [one.level for one in mm.lint(config, framework="verl@2026-07")] == ["info"]
    assert mm.read_config(config, framework=asked)[0].about.count(warning) == 1


def test_misspelt_options_are_refused_and_unrelated_ones_ignored() -> None:
    own = load_framework("trl")
    with pytest.raises(ConfigError, match="vllm_importance_sampling_mod"):
        own.correction({"vllm_importance_sampling_mod": "token_mask", "vllm_importance_sampling_clip_max": 2.0})
    config = {"vllm_importance_sampling_mode": "token_mask", "num_generations": 8}
    assert own.correction(config).gates


@pytest.mark.parametrize(
    ("name", "native", "message"),
    [
        ("roll", {"train_infer_correction": {"is_weigth": {"enabled": True}}}, "is_weigth.*did you mean 'is_weight'"),
        ("areal", {"actor": {"rejection_samplng": {"upper": 5.0}, "path": "x"}}, "did you mean 'rejection_sampling'"),
        ("areal", {"actor": {"behave_imp_weight_cap": 5.0}}, "no longer supports behave_imp_weight_cap"),
        ("prime-rl@2026-10", {"trainer": {"loss": {"dppo_mask_low": 0.2}}}, "Use `type: ipo`"),
    ],
)
def test_misspelt_or_removed_options_in_a_block_are_refused(name: str, native: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_framework(name).correction(native)


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("areal", {"rejection_sampling": 3}),
        ("areal", {"rejection_sampling": {"action": "drop"}}),
        ("openrlhf", {"is_correction_threshold": [1, 2, 3]}),
        ("skyrl", {"off_policy_correction": {"tis_ratio_type": "tokens"}}),
        ("prime-rl", {"kl_tau": "much"}),
        ("tinker-cookbook", {"loss_fn": "cispo", "clip_low_threshold": "x"}),
        ("trl", {"loss_type": "cispo", "eps": 3, "off_policy_mask_threshold": 1.0}),
    ],
)
def test_impossible_option_values_are_errors(name: str, native: Any) -> None:
    """The value must not cause a traceback or be replaced silently."""
    own = load_framework(name)
    assert [finding.level for finding in own.lint(native)] == ["error"]


@pytest.mark.parametrize("name", PEERS)
def test_every_logged_name_has_a_meaning_and_every_meaning_is_logged(name: str) -> None:
    own = load_framework(PEERS[name])
    meant = [meaning.name for meaning in own.meanings()]
    assert len(meant) == len(set(meant))
    logged = {key for _, _, case in cases(name) for step in case["per_step"].values() for key in step}
    assert logged <= set(meant)
    assert set(meant) - logged <= {"actor/train_infer_segment_diff_mask_mean@sum"}  # a filter without golden numbers
    assert find_meanings(sorted(logged)[0])


@pytest.mark.parametrize("name", ADAPTER_MODULES)
def test_a_step_without_valid_tokens_gives_no_traceback(name: str) -> None:
    policy, advantages = [[-1.0, -2.0], [-1.0, -0.5], [], []], [[1.0, -1.0], [1.0, 1.0], [], []]
    columns = {"rollout_log_probs": policy, "train_log_probs": policy, "current_log_probs": policy}
    dump = {**columns, "advantages": advantages, "step": [0, 0, 1, 1]}
    result = mm.analyze(dump, framework=name, corrections=["token_tis"], findings=False)
    assert next(iter(result.runs.values())).groups.labels == [0, 1]


def test_the_registry_matches_the_adapters() -> None:
    assert [one.name for one in load_adapters()] == list(ADAPTER_MODULES)
    assert {name: one.name for one in load_adapters() for name in one.classes} == CONFIG_CLASSES


def test_presets_lists_the_frameworks() -> None:
    listed = json.loads(run("presets", "frameworks", "--json"))
    assert [one["name"] for one in listed] == [one.name for one in load_adapters()]
    assert "ms-swift" in run("presets", "frameworks")


def test_advice_uses_option_names_of_frameworks() -> None:
    assert any("actor_rollout_ref.rollout.temperature" in words for words in list_settings("temperature"))
    advice = {cause.id: cause.advice for cause in CAUSES}
    for adapter in load_adapters():
        place = ROOT / "mismatchctl/frameworks" / adapter.name.replace("-", "_") / "advice.yaml"
        for cause, words in (yaml.safe_load(place.read_text()) if place.exists() else {}).items():
            assert words in advice.get(cause, ""), (adapter.name, cause)
    assert not any("{settings}" in text for text in advice.values())


USED = """
import json
import mismatchctl.frameworks.registry as f
from mismatchctl.corrections.model import Correction, Weight
from mismatchctl.frameworks.glossary import find_meanings
from mismatchctl.frameworks.config_files import write_keys
import numpy as np
import pyarrow as pa
rows = pa.table({"rollout_log_probs": [[-1.0, -1.0]], "train_log_probs": [[-1.0, 4.0]]})
own = f.load_framework("stub-rl")
print(json.dumps([
    own.title, f.recognize({"stub_cap": 3.0}), write_keys(Correction(weight=Weight(truncate=3.0)), own),
    own.replay(rows, f.find_preset("stub-default")).logged, f.column_aliases()["stub_logprobs"],
    [m.over for m in find_meanings("stub/ratio")],
]))
"""


@pytest.mark.process
def test_the_recipe_for_a_framework_works(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (adapter_on_page,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (line,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    names, named = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    package = tmp_path / "mismatchctl"
    copytree(ROOT / "mismatchctl", package, ignore=lambda *_: ["__pycache__"])
    folder = package / "frameworks/stub_rl"
    folder.mkdir()
    (folder / "__init__.py").write_text(adapter_on_page)
    (folder / "names.yaml").write_text(names)
    (folder / "presets.yaml").write_text(named)
    register = package / "frameworks/registry.py"
    register.write_text(
        register.read_text().replace(last := '    "ms-swift": "mismatchctl.frameworks.ms_swift",\n', f"{last}{line}")
    )
    done = subprocess.run(
        [sys.executable, "-c", USED], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        "stub-rl@2030-01", "stub-rl", {"stub_cap": 3.0}, {"stub/ratio": 1.5}, "rollout_log_probs", ["tokens"],
    ]  # fmt: skip


def test_a_prompt_without_response_is_kept_whole() -> None:
    tokens, attention = np.arange(6), np.array([0, 1, 1, 1, 1, 1])
    assert take_prompt(tokens, 2, attention).tolist() == [1, 2, 3]
    assert take_prompt(tokens, 0, attention).tolist() == [1, 2, 3, 4, 5]
