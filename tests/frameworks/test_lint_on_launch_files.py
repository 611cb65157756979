"""`lint` on files with the structure of files that frameworks and their forks contain."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from mismatchctl.api.lint import lint
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.config_files import compose, read_native_configs
from tests.cli.command import run
from tests.paths import SAMPLE_DATA

VERL_ASYNC = """
hydra: {searchpath: ["pkg://verl.trainer.config"]}
defaults: [ppo_trainer, _self_]
async_training: {staleness_threshold: 0.1, partial_rollout: true}
rollout: {nnodes: 1, n_gpus_per_node: 8, total_rollout_steps: 100}
algorithm: {rollout_correction: {bypass_mode: true, loss_type: reinforce}}
actor_rollout_ref: {rollout: {calculate_log_probs: true}}
"""
SLIME = """
source "${HERE}/models/small.sh"
ROLLOUT_ARGS=(
   --custom-generate-function-path examples.mine.generate
   --num-rollout 30   # short
   --rollout-temperature 1
)
GRPO_ARGS=( --advantage-estimator grpo --use-tis --tis-clip 3 )
PERF_ARGS=( --mask-offpolicy-in-partial-rollout --ci-train-rollout-logprob-abs-diff-threshold 0.1 )
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"env_vars": {"A": "1"}}' \\
   -- python3 train.py --calculate-per-token-loss \\
   ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} ${PERF_ARGS[@]}
"""
MILES = """
cd /root/miles
python3 train.py --use-tis --rollout-num-gpus 8 --use-indexer-replay --use-rollout-indexer-replay \\
   --recompute-logprobs-via-prefill --keep-old-actor
"""
SKYRL = """
set -x
DATA="$HOME/data"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \\
  data.train_data="['$DATA/train.parquet']" trainer.algorithm.policy_loss_type="{}" \\
  generator.inference_engine.num_engines=4 trainer.epochs=2 $@
"""
OPEN_INSTRUCT = """
python mason.py --cluster ai2/mine --env VLLM_X=1 --preemptible -- source configs/setup.sh \\&\\& \\
  python open_instruct/grpo_fast.py --exp_name x --temperature 1.0 --rho_clamp_upper_bound 3.0 --push_to_hub false
"""
SWIFT = "NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model x --use_vllm true --loss_type grpo --beta 0.04\n"
ROLL = """
defaults: [../config/envs@_here_]
hydra: {run: {dir: .}}
exp_name: x
actor_train: {strategy_args: {strategy_name: megatron_train}}
actor_infer: {generating_args: {temperature: 1.0, top_p: 1.0}}
train_infer_correction: {is_weight: {enabled: true, weight_type: token, upper_bound: 1.5}}
"""
PRIME = """
max_steps = 20
[model]
name = "x"
[trainer.loss]
type = "default"
[orchestrator.train.sampling]
temperature = 1.0
[inference]
"""
AREAL = """
experiment_name: x
trial_name: y
rollout: {max_concurrent_rollouts: 8}
gconfig: {n_samples: 4, temperature: 1.0, top_k: 100000000}
actor: {use_sapo_loss: true, use_decoupled_loss: false, path: m, optimizer: {lr: 1.0e-6}}
"""
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --ref.num_nodes 1 --algo.advantage.estimator reinforce\n"
NEMO = """
grpo: {num_prompts_per_step: 8}
policy: {generation: {temperature: 1.0, top_p: 0.9}}
loss_fn: {use_importance_sampling_correction: true, truncated_importance_sampling_type: tis,
          truncated_importance_sampling_ratio: 2.0, later_option: 3}
"""
SKYPILOT = (
    "resources: {accelerators: H100:8}\nrun: |\n  uv run -m skyrl.main trainer.algorithm.use_tis=true \\\n    "
    "trainer.algorithm.tis_imp_ratio_cap=2.0 generator.n_samples_per_prompt=4\n"
)
FILES = {
    "verl": ("verl", "async.yaml", VERL_ASYNC),
    "slime": ("slime", "run.sh", SLIME),
    "miles": ("miles", "run.sh", MILES),
    "skyrl, a loss by covariance": ("skyrl", "run.sh", SKYRL.replace("{}", "clip_cov")),
    "skyrl, a loss of its own": ("skyrl", "run.sh", SKYRL.replace("{}", "mine")),
    "skyrl, a job file": ("skyrl", "job.yaml", SKYPILOT),
    "open-instruct": ("open-instruct", "run.sh", OPEN_INSTRUCT),
    "ms-swift": ("ms-swift", "run.sh", SWIFT),
    "roll": ("roll", "agentic.yaml", ROLL),
    "prime-rl": ("prime-rl", "rl.toml", PRIME),
    "areal": ("areal", "grpo.yaml", AREAL),
    "openrlhf": ("openrlhf", "run.sh", OPENRLHF),
    "nemo-rl": ("nemo-rl", "grpo.yaml", NEMO),
    "easyr1": ("verl", "run.sh", "python3 -m verl.trainer.main config=c.yaml worker.rollout.n=4\n"),
    "agent-lightning": ("verl", "run.sh", "python -m agentlightning.verl actor_rollout_ref.rollout.n=4\n"),
    "axolotl": ("trl", "a.yaml", "base_model: x\nrl: grpo\ntrl: {use_vllm: true, num_generations: 4}\n"),
    "rllm": ("verl", "run.sh", "python3 -m rllm.train rllm.algorithm.rollout_correction.tis_mode=token "
             "rllm.algorithm.rollout_correction.tis_cap=3 actor_rollout_ref.rollout.n=4\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_shipped_launch_files_pass_lint(case: str, tmp_path: Path) -> None:
    framework, name, text = FILES[case]
    (tmp_path / name).write_text(text)
    chosen, findings = lint(tmp_path / name)
    assert chosen.name == framework
    assert not [finding for finding in findings if finding.level == "error"]
    assert not [finding.place for finding in findings if "later_option" in finding.place]


def test_forks_use_the_names_of_their_framework(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(FILES["rllm"][2])
    (written,) = read_native_configs(tmp_path / "run.sh")
    assert written.descendant == "rLLM"
    weight = written.framework.correction(written.keys).weight
    assert weight is not None and (weight.level, weight.truncate) == ("token", 3.0)
    (tmp_path / "train.py").write_text(
        "from unsloth import FastLanguageModel\nm = FastLanguageModel.from_pretrained('x', fast_inference=True)\n"
        "a = GRPOConfig(vllm_importance_sampling_mode='token_truncate')\n"
    )
    _, findings = lint(tmp_path / "train.py")
    assert not [finding for finding in findings if finding.level == "warning"]


@pytest.mark.parametrize("text", ["import tunix\nx: 1\n", "runner: rlinf\n", "-m apps.grpo.main --x 1\n"])
def test_trainers_without_an_adapter_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text(text)
    with pytest.raises(ConfigError, match="which mismatchctl cannot check"):
        lint(tmp_path / "x.sh")


def test_ambiguous_files_get_the_two_likeliest_frameworks(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text("trl grpo --b 1\npython -m openrlhf.cli.x --a 1\n")
    done = run("lint", tmp_path / "x.sh", code=2)
    assert "Pass --framework trl or --framework openrlhf" in done.stderr
    run("lint", tmp_path / "x.sh", "--framework", "openrlhf", code=0)


TYPOS = [
    ("verl", "algorithm: {rollout_correction: {rollout_is: token, rollout_is_treshold: 2}}"),
    ("verl", "algorithm: {rollout_corection: {rollout_is: token}}\ntrainer: {}"),
    ("slime", "use_tis: true\ntis_uper_bound: 2"),
    ("slime", "use_tsi: true"),
    ("trl", "use_vllm: true\nvllm_importance_sampling_mod: token_mask"),
    ("nemo-rl", "loss_fn: {truncated_importance_sampling_typ: tis}"),
    ("openrlhf", "is_correction_enable: true\nis_correction_treshold: [0.5, 2]"),
    ("areal", "actor: {rejection_samplng: {upper: 5.0}}"),
    ("skyrl", "trainer: {algorithm: {off_policy_corection: {tis_ratio_type: token}}}"),
    ("roll", "train_infer_correction: {is_weigth: {enabled: true}}"),
    ("open-instruct", "rho_clamp_uper_bound: 2.0"),
    ("ms-swift", "rollout_importance_sampling_mdoe: token_mask"),
]


@pytest.mark.parametrize(("framework", "text"), TYPOS)
def test_misspelt_correction_options_are_errors(framework: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert [finding.level for finding in lint(tmp_path / "x.yaml", (), framework)[1]][:1] == ["error"]


def test_parent_configs_are_merged_and_missing_ones_reported(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/grand.yaml").write_text("loss_fn: {use_importance_sampling_correction: true}\n")
    (tmp_path / "base/parent.yaml").write_text(
        "defaults: grand.yaml\nloss_fn: {truncated_importance_sampling_type: tis}\npolicy: {}\ngrpo: {}\n"
    )
    child = tmp_path / "child.yaml"
    child.write_text("defaults: base/parent.yaml\nloss_fn: {truncated_importance_sampling_ratio: 3.0}\n")
    (written,) = read_native_configs(child)
    weight = written.framework.correction(written.keys).weight
    assert (written.framework.name, written.missing) == ("nemo-rl", ())
    assert weight is not None and weight.clip == (None, 3.0)
    child.write_text("defaults: gone.yaml\nloss_fn: {truncated_importance_sampling_ratio: 3.0}\n")
    _, findings = lint(child, (), "nemo-rl")
    assert [(finding.level, "gone.yaml" in finding.consequence) for finding in findings] == [("unknown", True)]


def test_config_groups_are_read_from_their_folder(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm/mine.yaml").write_text("rollout_is: token\nrollout_is_threshold: 4.0\n")
    made, _ = compose({"algorithm@algorithm.rollout_correction": "mine", "trainer": {"x": 1}}, tmp_path)
    assert made["algorithm"]["rollout_correction"] == {"rollout_is": "token", "rollout_is_threshold": 4.0}
    _, missing = compose({"defaults": ["missing_group", {"b": None}], "c": {"_override_": True, "d": 1}}, tmp_path)
    assert missing == ["missing_group"]


def test_config_paths_are_relative_to_the_repository(tmp_path: Path) -> None:
    (tmp_path / "examples/helper").mkdir(parents=True)
    (tmp_path / "examples/helper/mis.yaml").write_text("use_tis: false\n")
    script = tmp_path / "examples/helper/run.sh"
    script.write_text("python3 train.py --use-tis --custom-config-path examples/helper/mis.yaml --num-rollout 3\n")
    (written,) = read_native_configs(script, "slime")
    assert written.framework.correction(written.keys).weight is None
    script.write_text("python3 train.py --use-tis --custom-config-path nowhere/mine.yaml --num-rollout 3\n")
    assert [finding.level for finding in lint(script, (), "slime")[1]][:1] == ["unknown"]


@pytest.mark.parametrize(
    ("framework", "text", "places"),
    [
        ("verl", "algorithm: {rollout_correction: {rollout_is: token}}\n"
         "actor_rollout_ref: {rollout: {top_p: 0.9, temperature: 0.7, top_k: -1}}", ["top_p"]),
        ("verl", "algorithm: {rollout_correction: {}}\nactor_rollout_ref: {rollout: {top_p: 0.9}}", []),
        ("verl", "algorithm: {rollout_correction: {rollout_is: token}}\n"
         "actor_rollout_ref: {rollout: {logprobs_mode: raw_logprobs, temperature: 0.7}}", ["logprobs_mode"]),
        ("nemo-rl", NEMO, []),
        ("roll", ROLL.replace("temperature: 1.0", "temperature: 0.9"), ["temperature"]),
        ("skyrl", "trainer: {algorithm: {off_policy_correction: {tis_ratio_type: token}}}\n"
         "generator: {sampling_params: {min_p: 0.05, repetition_penalty: 1.1}}", ["min_p", "repetition_penalty"]),
        ("skyrl", "trainer: {algorithm: {off_policy_correction: {tis_ratio_type: token}}}\n"
         "generator: {sampling_params: {min_p: 0.05}, return_sampling_mask: true}", []),
        ("trl", "use_vllm: true\ntop_k: 20\n", ["top_k"]),
        ("areal", AREAL.replace("use_decoupled_loss: false", "rejection_sampling: {upper: 5.0}"), []),
        ("slime", "--use-tis: true\n--rollout-top-p: 0.9\n--rollout-top-k: 40\n", ["--rollout-top-k"]),
    ],
)  # fmt: skip
def test_sampling_settings_the_trainer_ignores_are_reported(
    framework: str, text: str, places: list[str], tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    _, findings = lint(tmp_path / "x.yaml", (), framework)
    named = ("top_", "top-", "min_p", "penalty", "temperature", "logprobs")
    warned = [one.place.rpartition(".")[2] for one in findings if one.level == "warning"]
    assert [place for place in warned if any(word in place for word in named)] == places


@pytest.mark.parametrize("order", [1, -1])
def test_deprecated_options_with_null_are_ignored(order: int, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"vllm_importance_sampling_cap": None, "vllm_importance_sampling_clip_max": 3.0}
    keys = dict(list(keys.items())[::order]) | {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}
    (tmp_path / "args.json").write_text(json.dumps(keys))
    (written,) = read_native_configs(tmp_path / "args.json")
    assert written.framework.correction(written.keys).gates[0].keep == (None, 3.0)


def test_refusals_name_the_function_of_the_framework(tmp_path: Path) -> None:
    rules = {
        "{action: clamp, metric: kl_k1, upper: 1.0}": "works with metric ratio",
        "{upper: 0.9}": "above 1",
        "{upper: 2.0, lower: -1}": "must be positive",
        "{metric: kl_k3, upper: -1}": "must be positive",
    }
    for rule, says in rules.items():
        (tmp_path / "a.yaml").write_text(f"actor: {{rejection_sampling: {rule}}}\n")
        errors = [one.consequence for one in lint(tmp_path / "a.yaml")[1] if one.level == "error"]
        assert any("__post_init__" in error and says in error for error in errors), rule
    (tmp_path / "m.sh").write_text(
        "cd /root/miles\npython3 train_async.py --advantage-estimator ppo --num-rollout 3 --skip-actor-forward-only "
        "--true-on-policy-mode\n"
    )
    errors = [one.consequence for one in lint(tmp_path / "m.sh")[1] if one.level == "error"]
    assert "validate_skip_actor_forward_only" in errors[0] and "validate_async_off_policy_correction" in errors[1]


def test_documented_outcomes_are_reported(tmp_path: Path) -> None:
    text = textwrap.dedent("""
        use_tis: true
        use_rs: true
        tis_level: token
        tis_mode: clip
        tis_lower_bound: 0.5
        tis_upper_bound: {}
        tis_batch_normalize: true
        rs_level: {}
        rs_lower_bound: 0.99
        rs_upper_bound: 1.001
        rs_veto_threshold: null
    """)
    (tmp_path / "mis.yaml").write_text(text.format("2.0", "geometric"))
    assert any("collapsed" in one.consequence and one.level == "warning" for one in lint(tmp_path / "mis.yaml")[1])
    (tmp_path / "mis.yaml").write_text(text.format("1.5", "geometric"))
    assert any("which was stable" in one.consequence and one.level == "info" for one in lint(tmp_path / "mis.yaml")[1])
    (tmp_path / "mis.yaml").write_text(text.format("1.5", "sequence"))
    assert any("takes the product" in one.consequence for one in lint(tmp_path / "mis.yaml")[1])
    assert any("denominators" in one.consequence for one in lint(tmp_path / "mis.yaml")[1])


def test_notes_are_printed_only_with_verbose(tmp_path: Path) -> None:
    (tmp_path / "mis.yaml").write_text("use_tis: true\ntis_clip: 2.0\ntrue_on_policy_mode: true\n")
    silent, reported = run("lint", tmp_path / "mis.yaml", code=0), run("lint", tmp_path / "mis.yaml", "-v", code=0)
    assert "1 note (-v prints them)" in silent.stdout and "true_on_policy_mode" not in silent.stdout
    assert "true_on_policy_mode" in reported.stdout


@pytest.mark.parametrize("switch", ["is_correction_level $L --is_correction_mode mask", "is_correction_enable $ON"])
def test_traps_do_not_guess_an_unknown_switch(switch: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{OPENRLHF.strip()} --policy_loss_type gspo --{switch}\n")
    assert [finding.level for finding in lint(script, (), "openrlhf")[1]] == ["unknown"]
    script.write_text(script.read_text().replace("$L", "seq").replace("$ON", "true"))
    found = lint(script, (), "openrlhf")[1]
    assert [(one.level, one.place) for one in found if one.level != "info"] == [("warning", "policy_loss_type")]


@pytest.mark.parametrize(("framework", "says"), [("miles", True), ("miles@2026-01", False)])
def test_results_note_that_rejected_tokens_stay_in_denominators(framework: str, says: bool, tmp_path: Path) -> None:
    (tmp_path / "mis.yaml").write_text(
        "use_tis: true\ntis_level: token\ntis_mode: mask\ntis_lower_bound: 0.5\ntis_upper_bound: 2.0\n"
        "tis_batch_normalize: false\nuse_rs: false\n"
    )
    done = run("analyze", SAMPLE_DATA / "moe", "--config", tmp_path / "mis.yaml", "--framework", framework, code=0)
    assert ("keeps rejected tokens in the denominators" in done.stderr) is says


def test_forks_and_descendants_keep_their_own_names(tmp_path: Path) -> None:
    """The files were not used to develop the reader: a fork's estimator, a Hydra class, and an old Miles file."""
    script = tmp_path / "fork.sh"
    script.write_text("python3 train.py --use-tis --tis-clip 2.0 --advantage-estimator step_wise\n")
    assert [message.level for message in lint(script, (), "slime")[1] if message.level == "error"] == []
    script.write_text("python3 train.py --use-tis --tis-clip 2.0 --advantage-estimator grppo\n")
    assert [message.level for message in lint(script, (), "slime")[1]] == ["error"]
    config = tmp_path / "descendant.yaml"
    section = {"_target_": "mine.RolloutCorrectionConfig", "rollout_is": "token", "rollout_is_threshold": 2.0}
    config.write_text(json.dumps({"algorithm": {"rollout_correction": section}}))
    assert [message.level for message in lint(config, (), "verl")[1] if message.level == "error"] == []
    old = tmp_path / "mis.yaml"
    old.write_text("use_mis: true\nmis_mode: truncate\nmis_level: token\nmis_upper_bound: 2.0\n")
    chosen, _ = lint(old, (), "miles")
    assert chosen.title.startswith("miles@")
