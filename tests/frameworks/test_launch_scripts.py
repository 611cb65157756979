"""Launch scripts, flags, overrides and training configurations are read as the framework reads them."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.config_files import read_configurations
from mismatchctl.io.scripts import parse_shell
from mismatchctl.io.yaml import TextError
from tests.cli.command import run
from tests.frameworks.native_config import read_native
from tests.paths import SAMPLE_DATA

OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray \\
   --ref.num_nodes 1 \\
   --algo.advantage.is_correction_enable \\
   --algo.advantage.is_correction_threshold 0.4 4.0 \\
   --algo.advantage.is_correction_type icepop \\
   --actor.adam.lr 5e-7
"""
OPENRLHF_0_9 = """#!/bin/bash
OPTIMIZER_ARGS=(
   --actor_learning_rate 5e-7
   # --critic_learning_rate 9e-6
   --enable_vllm_is_correction
   --vllm_is_truncated_threshold 0.5 3
   --vllm_is_correction_type seq-mask-tis
)
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray ${OPTIMIZER_ARGS[@]}
"""
NEMO = """grpo:
  async_grpo: {enabled: true}
  num_prompts_per_step: 32
  seq_logprob_error_threshold: 2
loss_fn:
  reference_policy_kl_penalty: 0.01
  ratio_clip_min: 0.2
  ratio_clip_c: null
  use_on_policy_kl_approximation: false
  kl_input_clamp_value: 20.0
  use_importance_sampling_correction: ${grpo.async_grpo.enabled}
  truncated_importance_sampling_type: icepop
  truncated_importance_sampling_ratio: 5.0
  truncated_importance_sampling_ratio_min: 0.5
  token_level_loss: true
policy: {model_name: x}
"""
SWIFT = """THRESHOLD="2.5"   # of the ratio
MODE=token_truncate
NPROC_PER_NODE=2 \\
swift rlhf --rlhf_type grpo --use_vllm true \\
    --rollout_importance_sampling_mode ${MODE} \\
    --rollout_importance_sampling_threshold "$THRESHOLD" \\
    --off_policy_sequence_mask_delta 1e-1 --learning_rate 1e-6
"""
TRL = """import os
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    os.environ["OUT"],
    learning_rate=LR,
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.0,
    vllm_importance_sampling_clip_min=0.1,
)
"""
SKYRL = 'uv run -m skyrl trainer.algorithm.use_tis=true trainer.algorithm.tis_imp_ratio_cap="3.0" trainer.epochs=2\n'
VERL = """python3 -m verl.trainer.main_ppo \\
    algorithm.rollout_correction.rollout_is=token \\
    +algorithm.rollout_correction.rollout_rs="seq_mean_k1,token_k3" \\
    algorithm.rollout_correction.rollout_rs_threshold=\\'0.999_1.001,0.5\\' \\
    trainer.logger='["console","wandb"]' $@
"""
AREAL = """python3 train.py --config x.yaml actor.use_decoupled_loss=true \\
    'actor.rejection_sampling={level: sequence, metric: kl_k3, upper: 1e-2}'
"""
VERL_POINTERS = """algorithm:
  low: 0.998
  rollout_correction:
    rollout_is: ${level}
    rollout_is_threshold: ${mine.cap}
    rollout_rs: ${oc.select:mine.none,seq_mean_k1}
    rollout_rs_threshold: ${..low}_${oc.env:HIGH,1.002}
level: ${mine.level}
mine: {level: token, cap: "2.5"}
"""

VERL_ACTOR = """actor_rollout_ref:
  actor: {policy_loss: {loss_mode: bypass_mode, rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0}}}
"""
NEMO_SH = """export TIS_TYPE=${TIS_TYPE:-${TRUNCATED_IMPORTANCE_SAMPLING_TYPE:-tis}}
OVERRIDES=(
  "++grpo.seq_logprob_error_threshold=${LIMIT:-2.0}"
  "loss_fn.use_importance_sampling_correction=true"
  "++loss_fn.truncated_importance_sampling_type=${TIS_TYPE}"
  "++loss_fn.truncated_importance_sampling_ratio=5"
)
uv run examples/run_grpo.py "${OVERRIDES[@]}"
"""
TINKER = """from tinker_cookbook.rl import train
from other import Config

other = Config(seed=3)
config = train.Config(model_name=NAME, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9})
"""
CASES: dict[str, tuple[str, str, str, dict[str, Any] | None, list[dict[str, Any]]]] = {
    "verl, a quoted override": (
        "run.sh", VERL, "verl", {"level": "token", "truncate": 2.0},
        [{"statistic": "k1", "level": "mean"}, {"statistic": "k3", "level": "token", "keep": (None, 0.5)}],
    ),
    "areal, a block in an override": (
        "run.sh", AREAL, "areal", {"truncate": None},
        [{"statistic": "k3_reversed", "level": "mean", "keep": (None, 0.01)}],
    ),
    "openrlhf, dotted flags": (
        "run.sh", OPENRLHF, "openrlhf", {"clip": None}, [{"level": "token", "keep": (0.4, 4.0)}],
    ),
    "openrlhf, two numbers in a variable": (
        "run.sh", 'THR="0.4 3"\npython train.py --algo.advantage.is_correction_enable '
        "--algo.advantage.is_correction_threshold $THR\n",
        "openrlhf@0.11", {"clip": (0.4, 3.0)}, [],
    ),
    "openrlhf, the names of 0.11.2": (
        "run.sh", "python -m openrlhf.cli.train_ppo_ray --algo.advantage.is_correction_level seq \\\n"
        "  --algo.advantage.is_correction_gating binary_kl --algo.advantage.is_correction_threshold 3e-3\n",
        "openrlhf@0.11.2", {"level": "token"}, [{"statistic": "binary_kl", "level": "mean", "keep": (None, 0.003)}],
    ),
    "openrlhf, flags in an array": (
        "run.sh", OPENRLHF_0_9, "openrlhf", {"clip": None}, [{"level": "geometric", "keep": (0.5, 3.0)}],
    ),
    "nemo-rl, a whole file": (
        "grpo.yaml", NEMO, "nemo-rl", {"level": "token"},
        [{"statistic": "mult_error", "keep": (None, 2.0)}, {"level": "token", "keep": (0.5, 5.0)}],
    ),
    "ms-swift, variables": (
        "run.sh", SWIFT, "ms-swift", {"level": "token", "truncate": 2.5}, [{"statistic": "k1", "keep": (None, 0.1)}],
    ),
    "ms-swift, megatron": (
        "run.sh", "megatron rlhf --rollout-importance-sampling-mode=sequence_mask\n", "ms-swift",
        {"level": "token"}, [{"level": "geometric", "keep": (None, 2.0)}],
    ),
    "prime-rl, flags": (
        "run.sh", "uv run rl @ rl.toml --trainer.loss.type ipo --trainer.loss.ipo-threshold 0.2 --ckpt --ckpt.keep 2\n",
        "prime-rl@2026-08", {"truncate": None}, [{"statistic": "abs_prob_diff", "keep": (None, 0.2)}],
    ),
    "prime-rl, a file of the launcher": (
        "rl.toml", '[model]\nname = "x"\n[trainer.loss]\ntype = "icepop"\nratio_low = 0.5\n', "prime-rl@2026-10",
        {"truncate": None}, [{"level": "token", "keep": (0.5, 5.0)}],
    ),
    "prime-rl, a file of the trainer": (
        "train.toml", 'max_steps = 5\n[loss]\ntype = "ipo"\neps = 2e-1\n', "prime-rl@2026-10",
        {"truncate": 1e4}, [{"statistic": "abs_prob_diff", "keep": (None, 0.2)}],
    ),
    "tinker-cookbook, arguments": (
        "run.sh", "python -m tinker_cookbook.recipes.rl_basic loss_fn=importance_sampling model_name=x\n",
        "tinker-cookbook", {"source": "current/rollout", "clip": None}, [],
    ),
    "tinker-cookbook, a block": (
        "config.yaml", "loss_fn: cispo\nloss_fn_config: {clip_low_threshold: 0.0, clip_high_threshold: 5}\n",
        "tinker-cookbook", {"clip": (None, 5.0)}, [],
    ),
    "tinker-cookbook, dotted arguments": (
        "run.sh", "python train.py loss_fn=cispo \\\n  loss_fn_config.clip_high_threshold=1.5 # wide\nloss_fn=ppo\n",
        "tinker-cookbook", {"clip": (None, 1.5)}, [],
    ),
    "trl, in Python": ("train.py", TRL, "trl", {"level": "token", "clip": (0.1, 2.0)}, []),
    "trl, without vLLM": (
        "grpo.yaml", "use_vllm: false\nvllm_importance_sampling_mode: token_mask\n", "trl", None, [],
    ),
    "areal, what only its later version knows": (
        "run.sh", "python train.py actor.rejection_sampling.metric=binary_kl actor.rejection_sampling.upper=2\n",
        "areal@2026-08", {"level": "token"}, [{"statistic": "binary_kl_max", "keep": (None, 2.0)}],
    ),
    "trl, switched off": (
        "run.sh", "accelerate launch train.py --use_vllm --no_vllm_importance_sampling_correction\n", "trl", None, [],
    ),
    "open-instruct, switched off": (
        "run.sh", "python grpo_fast.py --no_use_rho_correction\n", "open-instruct", None, [],
    ),
    "verl, defaults of variables": (
        "run.sh", "is=${1:-token}\nthr=${THR:-${CAP:-3.0}}\nrs=${RS-}\npython3 -m verl.trainer.main_ppo \\\n"
        "  algorithm.rollout_correction.rollout_is=$is algorithm.rollout_correction.rollout_is_threshold=\"${thr}\"\n",
        "verl", {"level": "token", "truncate": 3.0}, [],
    ),
    "verl, values that point to others": (
        "config.yaml", VERL_POINTERS, "verl", {"level": "token", "truncate": 2.5},
        [{"statistic": "k1", "level": "mean", "keep": (math.log(0.998), math.log(1.002))}],
    ),
    "nemo-rl, nested defaults": (
        "run.sh", NEMO_SH, "nemo-rl", {"level": "token", "clip": (None, 5.0)}, [{"statistic": "mult_error"}],
    ),
    "tinker-cookbook, in Python": (
        "train.py", TINKER, "tinker-cookbook", None, [],
    ),
    "verl, overrides in a variable": (
        "run.sh", 'CORR="algorithm.rollout_correction.rollout_is=token"\nCORR+=" trainer.x=1"\n'
        "python3 -m verl.trainer.main_ppo $CORR algorithm.rollout_correction.rollout_is_threshold=3\n",
        "verl", {"level": "token", "truncate": 3.0}, [],
    ),
    "slime, an array that grows": (
        "run.sh", "ARGS=(--use-tis)\nARGS+=(--tis-clip 3)\nMORE='--tis-clip-low 0.5'\n"
        "python3 train.py ${ARGS[@]} $MORE --lr 1\n", "slime", {"level": "token", "clip": (0.5, 3.0)}, [],
    ),
    "verl, files of its own groups": (
        "run.sh", "t.py algorithm@algorithm.rollout_correction=rollout_correction model@critic.model=hf_model \\\n"
        "  algorithm.rollout_correction.rollout_is=token\n", "verl", {"level": "token", "truncate": 2.0}, [],
    ),
    "verl, nothing of its algorithm": ("run.yaml", VERL_ACTOR, "verl", None, []),
    "trl, its defaults in Python": (
        "train.py", "cfg = Config(loss_fn=mine)\nargs = GRPOConfig(output_dir='x', use_vllm=True)\n",
        "trl", {"level": "sequence"},
        [{"level": "sequence", "keep": (None, 3.0)}],
    ),
    "tinker-cookbook, a loss that others have": (
        "train.py", "config = train.Config(log_path=PATH, lr=1e-5, loss_fn='cispo')\n", "tinker-cookbook",
        {"clip": (None, 1.2)}, [],
    ),
    "skyrl, the deprecated switch": ("run.sh", SKYRL, "skyrl", {"level": "token", "truncate": 3.0}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_launch_files_give_the_intended_correction(case: str, tmp_path: Path) -> None:
    name, text, whose, weight, gates = CASES[case]
    (tmp_path / name).write_text(text)
    framework, correction = read_native(tmp_path / name)
    assert whose in (framework.name, framework.title)
    assert (correction.weight is None) == (weight is None)
    assert {key: getattr(correction.weight, key) for key in weight or ()} == (weight or {})
    assert [
        {key: getattr(gate, key) for key in said} for gate, said in zip(correction.gates, gates, strict=True)
    ] == gates


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("train.py", "GRPOConfig('o', vllm_importance_sampling_clip_max=CAP)", "vllm_importance_sampling_clip_max"),
        ("loss.yaml", "loss_fn: {truncated_importance_sampling_typ: tis}", "truncated_importance_sampling_type"),
        (
            "roll.yaml",
            "train_infer_correction: {is_weight: null}",
            "is_weight must be a mapping of keys and values, found None",
        ),
        (
            "trl.yaml",
            "{vllm_importance_sampling_mode: token_truncate, vllm_importance_sampling_clip_max: null}",
            "needs",
        ),
        ("open.yaml", "use_rho_correction: 'false'", "must be true or false, found the text 'false'"),
        (
            "nemo.yaml",
            "loss_fn: {use_importance_sampling_correction: '${grpo.none}'}",
            "use_importance_sampling_correction refers to \\${grpo.none}, which the file does not define",
        ),
        (
            "openrlhf.sh",
            "t.py --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 3",
            "takes two numbers, low and high, not 3",
        ),
        (
            "openrlhf.sh",
            "t.py --algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode clip",
            "clip requires is_correction_level=token",
        ),
        (
            "verl.sh",
            "t.py algorithm.rollout_correction.rollout_is=$LEVEL",
            r"rollout_is refers to \$LEVEL, which the "
            r"file",
        ),
        ("open.yaml", "use_rho_correction: true\nuse_vllm_logprobs: true", "refuses use_vllm_logprobs"),
        ("skyrl.yaml", "off_policy_correction: {strange: 1}", "off_policy_correction.strange"),
        ("skyrl.yaml", "tis_ratio_type: token", "unknown option 'tis_ratio_type': it belongs in off_policy_correction"),
        (
            "skyrl.sh",
            "t.py trainer.algorithm.tis_ratio_type=token",
            "unknown option 'trainer.algorithm.tis_ratio_type': it belongs in off_policy_correction",
        ),
        (
            "nemo.sh",
            "t.py --use_importance_sampling_correction true",
            "unknown option '--use_importance_sampling_correction': it belongs in loss_fn",
        ),
        ("mis.yaml", "{use_tis: true, tis_clip: '${cap}', cap: 2.0}", "which torch does not read as a number$"),
        ("tinker.py", "train.Config(log_path=p, loss_fn=cli.loss_fn)", "loss_fn refers to"),
        ("verl.py", 'RolloutCorrectionConfig(rollout_is="token", **more)', r"line 1: a \*\* argument is not supported"),
        ("trl.py", "GRPOConfig(use_vllm=True, **common)", r"line 1: a \*\* argument is not supported"),
        (
            "areal.yaml",
            "actor: {use_decoupled_loss: true, behav_imp_weight_cap: 5}",
            "no longer supports behav_imp_weight_cap",
        ),
        (
            "skyrl.yaml",
            "off_policy_correction: {tis_ratio_type: seq}",
            "tis_ratio_type takes token, sequence, not 'seq'",
        ),
        ("skyrl.yaml", "off_policy_correction: {tis_ratio_type: [token]}", r"takes token, sequence, not \['token'\]"),
        (
            "areal.yaml",
            "actor: {rejection_sampling: {metric: kl}}",
            "metric takes ratio, kl_k1, kl_k2, kl_k3, binary_kl, not 'kl'",
        ),
        (
            "roll.yaml",
            "train_infer_correction: {is_weight: {enabled: true, weight_type: tokens}}",
            "weight_type takes token, geometric, sequence, segment, not 'tokens'",
        ),
        (
            "roll.yaml",
            "train_infer_correction: {filters: [{enabled: 'true'}]}",
            "filters.enabled must be true or false, found the text 'true'",
        ),
        ("verl.sh", f"run algorithm.rollout_correction.{'a.' * 400}b=1", "a key is nested too deeply"),
        ("slime.sh", f"run --use-tis --{'a.' * 400}b 1", "a key is nested too deeply"),
        ("other.py", "other.Config(seed=3)", "no call of RolloutCorrectionConfig or GRPOConfig or Config "),
        ("verl.yaml", "rollout_is: geometric", r"geometric. Must be one of {'sequence', 'token'}"),
    ],
)
def test_unreadable_launch_files_are_named(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_native(tmp_path / name)


@pytest.mark.parametrize("none", ["rollout_correction", "null"])
def test_an_empty_config_choice_has_no_effect(none: str, tmp_path: Path) -> None:
    found = []
    for choice in ("", f"algorithm/rollout_correction={none}"):
        (tmp_path / "verl.sh").write_text(f"t.py {choice} algorithm.rollout_correction.rollout_is=token")
        _, correction = read_native(tmp_path / "verl.sh")
        found.append(correction)
    assert found[0] == found[1] and found[0].weight is not None


def test_options_removed_in_later_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text('[trainer.loss]\ntype = "ipo"\nipo_threshold = 0.1\n')
    assert read_native(tmp_path / "rl.toml")[0].title == "prime-rl@2026-08"
    with pytest.raises(ConfigError, match=r"ipo_threshold\. Use `type: ipo` with `eps`"):
        read_native(tmp_path / "rl.toml", "prime-rl@2026-10")


def test_shell_words_are_split() -> None:
    script = """
    A=1 B=x python train.py loss_fn=ppo --x.y-z 0.5 5.0 --on --n -1 3 # c=4
    alone=3; if [ 1 ]; then also=3; fi
    export THR="2.5"
    ARGS=(
      q=1
      a.b=${THR}
    )
    echo "several --not-mine
    lines" && run k=${THR} --names a b "${ARGS[@]}" $@
    """
    first, second = parse_shell(script)
    assert first.keys == {"loss_fn": "ppo", "x": {"y-z": [0.5, 5.0]}, "--on": True, "--n": [-1, 3]}
    assert second.keys == {"k": 2.5, "--names": "a", "q": 1, "a": {"b": 2.5}}
    assert (first.line, second.line) == (2, 10)


@pytest.mark.parametrize(
    ("launch", "keys"),
    [
        ("uv run --isolated --extra vllm -m skyrl.main a.b=1", {"--isolated": True, "--extra": "vllm", "a": {"b": 1}}),
        ("srun --nodes=2 torchrun --nproc_per_node=8 train.py --use_vllm", {"--use_vllm": True}),
        ("ray job submit --runtime-env-json='{\"env\": {}}' -- python3 train.py --use-tis", {"--use-tis": True}),
        ("FOO=1 python -m mod --on ${MODEL_ARGS[@]} --clip $CLIP", {"--on": True, "--clip": "$CLIP"}),
        ("python mason.py --env A=1 -- source x.sh \\&\\& python t.py --rho 2", {"--rho": 2}),
        ("python train.py --use-tis \\", {"--use-tis": True}),
        ("python train.py --tis-clip ${1:-3} ${EXTRA:-}", {"--tis-clip": 3}),
        ("python train.py --a 'no\n' --b '5\n'", {"--a": "no\n", "--b": "5\n"}),
        ("ARGS='--use-tis --tis-clip 3'\npython train.py $ARGS", {"--use-tis": True, "--tis-clip": 3}),
    ],
)
def test_launchers_do_not_hide_training_flags(launch: str, keys: dict[str, Any]) -> None:
    found = parse_shell(launch)[-1].keys
    assert {key: found.get(key) for key in keys} == keys


def test_the_files_of_a_launch_are_listed() -> None:
    (found,) = parse_shell("uv run rl @ rl.toml --config other.yaml --data=x.json\n")
    assert found.files == (("", "rl.toml"), ("config", "other.yaml"), ("data", "x.json"))


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("a.b=1 ~a.b", {"a": {}}),
        ("a.b=1 '~a.b=1' a.c=2", {"a": {"c": 2}}),
        ("a.b.c=1 a.d=2 ~a.b", {"a": {"d": 2}}),
        ("~a.b a.b=1", {"a": {"b": 1}}),
        ("a.b=1 ~a.c ~a.b.c ~x.y ~/home", {"a": {"b": 1}}),
        ("b=1 ~b", {}),
        ("a/b=mine ~a/b", {}),
        ("--a 1 ~a", {"--a": 1}),
        ("--load ~alice/ckpt a=1", {"--load": "~alice/ckpt", "a": 1}),
    ],
)
def test_options_removed_by_hydra_are_unset(words: str, keys: dict[str, Any]) -> None:
    (reading,) = parse_shell(f"train.py {words}\n")
    assert reading.keys == keys


@pytest.mark.parametrize(
    ("script", "keys"),
    [
        ("if a; then L=1; else\n L=2\nfi\nrun a.b=$L", {"a": {"b": 2}}),
        ("L=0\nif a; then\n L=1\nfi\nrun a.b=$L c.d=3", {"a": {"b": 1}, "c": {"d": 3}}),
        ("A=(a.b=1)\nif x; then\n A+=(a.b=2)\nfi\nrun ${A[@]}", {"a": {"b": 2}}),
        ("case $1 in\n a|b) L=1 ;;\n *) L=2 ;;\nesac\nrun --clip $L a.b=3", {"--clip": 2, "a": {"b": 3}}),
        ("L=1\nrun a.b=$L # if", {"a": {"b": 1}}),
    ],
)
def test_the_last_value_of_branches_counts(script: str, keys: dict[str, Any]) -> None:
    (found,) = parse_shell(script)
    assert found.keys == keys


def test_launches_in_branches_are_separate_readings() -> None:
    found = parse_shell("if a; then\n run a.b=1\nelse\n run a.b=2\nfi\n")
    assert [(one.line, one.keys["a"]["b"]) for one in found] == [(2, 1), (4, 2)]


@pytest.mark.parametrize("script", ["A=$A$A$A\n" * 30 + "run a.b=$A", "run " + "a.b=1 --x 3 " * 90_000])
def test_growing_scripts_are_read_or_refused_quickly(script: str) -> None:
    began = time.process_time()
    try:
        parse_shell(script)
    except TextError as error:
        assert "too long" in str(error) or "too many words" in str(error)
    assert time.process_time() - began < 20


TWO_CALLS = """GRPOConfig(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0)
GRPOConfig(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=3.0)
"""


@pytest.mark.parametrize(
    ("name", "text", "made"),
    [
        ("two.py", TWO_CALLS.replace(")\n", "); ", 1), {"two-line-1": ("token", 2.0), "two-line-1-2": ("token", 3.0)}),
        ("two.py", TWO_CALLS, {"two-line-1": ("token", 2.0), "two-line-2": ("token", 3.0)}),
        (
            "run.sh",
            "t.py algorithm.rollout_correction.rollout_is=token\n"
            "t.py algorithm.rollout_correction.rollout_is=sequence\n",
            {"run-line-1": ("token", 2.0), "run-line-2": ("sequence", 2.0)},
        ),
    ],
)
def test_configurations_of_one_file_are_compared(
    name: str, text: str, made: dict[str, tuple[str, float]], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    found = [correction for _, correction in read_configurations(tmp_path / name)]
    bounds = {one.name: (one.weight.level, one.weight.bounds[1]) for one in found if one.weight}
    assert bounds == made
    dump = SAMPLE_DATA / "dense"
    done = run("analyze", dump, "--config", tmp_path / name, "--json")
    assert [one["name"] for one in json.loads(done.stdout)["corrections"]] == list(made)
    assert f"{name}: the launches or calls in this file differ; all are compared: {', '.join(made)}" in done.stderr
    assert done.stderr.count("read as") == 1


@pytest.mark.parametrize(("high", "caught"), [("", True), ("epsilon_high: 0.28", True), ("epsilon_high: 5.0", False)])
def test_traps_check_the_bounds_of_the_file(high: str, caught: bool, tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(f"vllm_importance_sampling_mode: token_mask\nloss_type: cispo\n{high}\n")
    done = run("lint", tmp_path / "grpo.yaml", "--json")
    assert any(found["place"] == "epsilon_high" for found in json.loads(done.stdout)["findings"]) == caught


@pytest.mark.parametrize(
    ("text", "level", "place"),
    [
        ("vllm_is_correction_type: tis", "warning", "is_correction_enable"),
        ("is_correction_enable: true\nis_correction_type: tis", "", ""),
        ("vllm_importance_sampling_mode: token_mask", "warning", "use_vllm"),
        ("use_vllm: true\nvllm_importance_sampling_mode: token_mask", "", ""),
        (
            "loss_fn: {use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2}",
            "warning", "loss_fn.truncated_importance_sampling_ratio",
        ),
    ],
)  # fmt: skip
def test_missing_switches_are_reported(text: str, level: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    done = run("lint", tmp_path / "config.yaml", code=0)
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("warning")]
    assert found == ([[level, place]] if level else [])


HERE = {
    "a configuration": "cat > c.yaml <<EOF\n--tis-clip 9\nit's a file\nEOF\n",
    "to a file behind": "cat <<'EOF' > c.yaml\n--tis-clip 9\nEOF\n",
    "in a branch, with tabs": "if true; then\n\tsudo tee c.yaml > /dev/null <<-EOF\n\t\t--tis-clip 9\n\tEOF\nfi\n",
    "another language": "python3 - <<EOF\nprint('--tis-clip 9', x.y=3)\nEOF\n",
    "a shift": "x=$((1<<two))\necho $x  # cat <<EOF\n",
}
COMMANDS = {
    "of a shell": "srun bash <<EOF\n{}\nEOF\n",
    "read into a variable": "read -r -d '' ARGS <<EOF\n{}\nEOF\n",
    "arguments": "ARGS=$(cat <<EOF\n{}\nEOF\n)\n",
    "a script by its name": "cat > run.sh <<EOF\n{}\nEOF\nbash run.sh\n",
    "a script by its first line": "cat > run <<EOF\n#!/bin/bash\n{}\nEOF\nsbatch run\n",
    "piped to a shell": "cat <<EOF | ssh worker bash\n{}\nEOF\n",
}


@pytest.mark.parametrize("which", HERE)
def test_here_documents_written_to_files_are_not_commands(which: str) -> None:
    """The text contains an apostrophe, and a flag that is not an option of the training."""
    (read,) = parse_shell(f"{HERE[which]}python train.py --use-tis --tis-clip 2\n")
    assert read.keys == {"--use-tis": True, "--tis-clip": 2}


@pytest.mark.parametrize("which", COMMANDS)
def test_launched_here_documents_are_read(which: str) -> None:
    (read,) = parse_shell(COMMANDS[which].format("python train.py --use-tis --tis-clip 3"))
    assert read.keys == {"--use-tis": True, "--tis-clip": 3}


def test_line_numbers_include_here_documents() -> None:
    script = "cat > c <<EOF\n1\n2\nEOF\nif a; then\n python t.py --tis-clip 2\nelse\n python t.py --tis-clip 3\nfi\n"
    assert [read.line for read in parse_shell(script)] == [6, 8]
