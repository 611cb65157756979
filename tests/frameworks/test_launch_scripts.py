"""Configurations as people launch with them: scripts, flags, overrides and files of a whole training, read as meant."""

from __future__ import annotations

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
        "run.sh", 'THR="0.4 3"\npython train.py --algo.advantage.is_correction_threshold $THR\n',
        "openrlhf", {"clip": (0.4, 3.0)}, [],
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
def test_a_launch_is_read_as_it_was_meant(case: str, tmp_path: Path) -> None:
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
        ("roll.yaml", "train_infer_correction: {is_weight: null}", "is_weight takes keys and values, not None"),
        (
            "trl.yaml",
            "{vllm_importance_sampling_mode: token_truncate, vllm_importance_sampling_clip_max: null}",
            "needs",
        ),
        ("open.yaml", "use_rho_correction: 'false'", "takes true or false, not the text 'false'"),
        ("nemo.yaml", "loss_fn: {use_importance_sampling_correction: '${grpo.none}'}", "takes true or false, not"),
        ("openrlhf.sh", "t.py --algo.advantage.is_correction_threshold 3", "takes two numbers, low and high, not 3"),
        ("open.yaml", "use_rho_correction: true\nuse_vllm_logprobs: true", "refuses use_vllm_logprobs"),
        ("skyrl.yaml", "off_policy_correction: {strange: 1}", "off_policy_correction.strange"),
        ("skyrl.yaml", "tis_ratio_type: token", "no option 'tis_ratio_type': it belongs in off_policy_correction"),
        (
            "skyrl.sh",
            "t.py trainer.algorithm.tis_ratio_type=token",
            "no option 'trainer.algorithm.tis_ratio_type': it belongs in off_policy_correction",
        ),
        (
            "nemo.sh",
            "t.py --use_importance_sampling_correction true",
            "no option '--use_importance_sampling_correction': it belongs in loss_fn",
        ),
        ("mis.yaml", "{use_tis: true, tis_clip: '${cap}', cap: 2.0}", "which torch takes for no number$"),
        ("tinker.py", "train.Config(log_path=p, loss_fn=cli.loss_fn)", "line 1: loss_fn is no plain value"),
        ("verl.py", 'RolloutCorrectionConfig(rollout_is="token", **more)', r"line 1: what \*\* brings is not read"),
        ("trl.py", "GRPOConfig(use_vllm=True, **common)", r"line 1: what \*\* brings is not read"),
        (
            "areal.yaml",
            "actor: {use_decoupled_loss: true, behav_imp_weight_cap: 5}",
            "no behav_imp_weight_cap any more",
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
            "filters.enabled takes true or false, not the text 'true'",
        ),
        ("other.py", "other.Config(seed=3)", "no call of RolloutCorrectionConfig, GRPOConfig, Config says"),
        (
            "verl.sh",
            "t.py algorithm/rollout_correction=mine algorithm.rollout_correction.rollout_is_threshold=2",
            "algorithm/rollout_correction=mine: the keys in that file are not read",
        ),
        (
            "verl.yaml",
            "defaults: [{algorithm@algorithm.rollout_correction: mine}]\nalgorithm: {rollout_correction: {}}",
            "algorithm@algorithm.rollout_correction=mine: the keys in that file are not read",
        ),
        ("verl.yaml", "rollout_is: geometric", r"geometric. Must be one of {'sequence', 'token'}"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_native(tmp_path / name)


@pytest.mark.parametrize("none", ["rollout_correction", "null"])
def test_a_choice_of_no_other_file_changes_nothing(none: str, tmp_path: Path) -> None:
    found = []
    for choice in ("", f"algorithm/rollout_correction={none}"):
        (tmp_path / "verl.sh").write_text(f"t.py {choice} algorithm.rollout_correction.rollout_is=token")
        _, correction = read_native(tmp_path / "verl.sh")
        found.append(correction)
    assert found[0] == found[1] and found[0].weight is not None


def test_what_a_later_version_has_not_any_more_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text('[trainer.loss]\ntype = "ipo"\nipo_threshold = 0.1\n')
    assert read_native(tmp_path / "rl.toml")[0].title == "prime-rl@2026-08"
    with pytest.raises(ConfigError, match=r"ipo_threshold: use type ipo with eps"):
        read_native(tmp_path / "rl.toml", "prime-rl@2026-10")


def test_words_of_a_script() -> None:
    script = """
    A=1 B=x python train.py loss_fn=ppo --x.y-z 0.5 5.0 --on --n -1 3 # c=4
    alone=3; if [ 1 ]; then also=3; fi
    export THR="2.5"
    ARGS=(
      q=1
      a.b=${THR}
    )
    echo "several
    lines" && run k=${THR} --names a b
    """
    (reading,) = parse_shell(script)
    assert reading.keys == {
        "loss_fn": "ppo", "x": {"y-z": [0.5, 5.0]}, "--on": True, "--n": [-1, 3], "q": 1, "a": {"b": 2.5}, "k": 2.5,
        "--names": "a",
    }  # fmt: skip


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
def test_what_hydra_removes_is_not_set(words: str, keys: dict[str, Any]) -> None:
    (reading,) = parse_shell(f"train.py {words}\n")
    assert reading.keys == keys


def test_a_branch_that_removes_something_is_a_reading() -> None:
    found = parse_shell("A=(a.b=1)\nif x; then\n A+=(~a.b)\nfi\ntrain.py ${A[@]}\n")
    assert [(one.line, one.keys) for one in found] == [(2, {"a": {}}), (-2, {"a": {"b": 1}})]


@pytest.mark.parametrize(
    ("script", "readings"),
    [
        ("if a; then L=1; else\n L=2\nfi\nrun a.b=$L", [(1, "1"), (1, "2")]),
        ("# if\nif x # then\nthen # c\n L=1 # fi\nelse\n L=2\nfi\nrun \\\n a.b=$L", [(3, "1"), (5, "2")]),
        ("L=0\nif a; then\n run a.b=1\nfi\nrun c.d=$L", [(2, "1"), (-2, None)]),
        ("if a; then\n if b; then\n  L=1\n else\n  L=2\n fi\nelif c; then L=3\nelse\n L=4\nfi\nrun a.b=$L",
         [(2, "1"), (4, "2"), (7, "3"), (8, "4")]),
        ('case "$(hostname)" in\n a|b) L=1 ;;\n (c) L=2\n ;;\n *) echo usage; exit 1;;\nesac\nrun a.b=$L',
         [(2, "1"), (3, "2")]),
        ("case $1 in\n a) L=1 ;;\n *) L=2 ;;\nesac\nif b; then\n M=1\nelse\n M=1\nfi\nrun a.b=$L",
         [(2, "1"), (3, "2")]),
        ('L=3\nwhile a; do\n case "$1" in\n  --level) L="$2"; shift 2;;\n  *) exit 1;;\n esac\ndone\nrun a.b=$L',
         [(0, "3")]),
        ("L=0\nif a; then\n L=9\n exit\nfi\nif b; then\n L=1\nfi\nrun a.b=$L", [(-2, "1"), (-6, "0")]),
        ("if a; then\n test -f x || exit 1\n L=1\nelse\n L=2\nfi\nrun a.b=$L", [(1, "1"), (4, "2")]),
        ("if a; then\n while b; do\n  exit\n done\n L=1\nelse\n L=2; exit\nfi\nrun a.b=$L", [(1, "1")]),
        ("die() {\n exit 1\n}\nif a; then\n L=1\n ls x && {\n echo no; exit 1; }\nfi\nrun a.b=$L",
         [(4, "1"), (-4, "$L")]),
        ("if a; then\n run a.b=1\n exit 0\nfi\nrun a.b=2", [(1, "1"), (-1, "2")]),
        ('A=(a.b=1)\nif a; then\n run "${A[@]}"; exit\nfi\nA+=(a.b=2)\nrun "${A[@]}"', [(2, "1"), (-2, "2")]),
        ("case $1 in\n a) run a.b=1; exit;;\n b) L=2;;\n *) exit 1;;\nesac\nrun a.b=$L", [(2, "1"), (3, "2")]),
        ("L=1\nif [ $# = 0 ]; then\n echo usage --foo a.b=3; exit 1\nfi\nrun a.b=$L # a.b=4", [(-2, "1")]),
        ('A=(a.b=1)\nif a; then\n pip install --upgrade ray; exit 1\nfi\nrun "${A[@]}"', [(-2, "1")]),
        ("if a; then\n torchrun -n 8 t.py --x 1; exit\nfi\nrun a.b=2", [(1, None), (-1, "2")]),
        ("L=${M#x}\nif [ ${#A[@]} -gt 0 ]; then\n L=1\nfi\nrun a.b=$L", [(2, "1"), (-2, "${M#x}")]),
        ("if a; then L=1\nrun a.b=$L", [(0, "1")]),
        ("if run a.b=1\nfi", [(0, "1")]),
        ("run a.b=1 --name 'if' then\nrun fi", [(0, "1")]),
    ],
)  # fmt: skip
def test_each_branch_that_sets_something_is_a_reading(script: str, readings: list[tuple[int, str | None]]) -> None:
    found = [(one.line, one.keys.get("a", {}).get("b")) for one in parse_shell(script)]
    assert found == [(line, int(value) if value and value.isdigit() else value) for line, value in readings]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("if a; then\n L=1\nfi\n" * 2000, "too many branches set something"),
        ("if a; then\n L=1\nfi\n" * 9 + "run " + "a.b=$L --x 3 " * 40_000, "too many branches set something"),
        ("if a; then\n" * 20_000 + "L=1\n" + "fi\n" * 20_000, "nested too deeply"),
    ],
)
def test_a_script_of_too_many_branches_is_refused(script: str, says: str) -> None:
    began = time.process_time()
    with pytest.raises(TextError, match=says):
        parse_shell(script)
    assert time.process_time() - began < 20


VERL_BRANCHES = """if [ "$MODE" = token ]; then
  LEVEL=token
  THR=2.0
elif [ "$MODE" = sequence ]; then
  LEVEL=sequence
fi
python3 -m verl.trainer.main_ppo algorithm.rollout_correction.rollout_is=$LEVEL \\
  algorithm.rollout_correction.rollout_is_threshold=${THR:-5.0}
"""
TWO_CALLS = """GRPOConfig(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0)
GRPOConfig(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=3.0)
"""

TWO_SWITCHES = """ARGS=(algorithm.rollout_correction.rollout_is=token)
if [ -n "$THR" ]; then
  ARGS+=(algorithm.rollout_correction.rollout_is_threshold=3.0)
fi
if [ -n "$SEQ" ]; then ARGS+=(algorithm.rollout_correction.rollout_is=sequence); fi
python3 -m verl.trainer.main_ppo "${ARGS[@]}"
"""
TOGETHER = [
    "run-line-2 takes the branch of line 5 too",
    "run-without-line-2 takes the branch of line 5 too",
    "run-without-line-5 takes the branch of line 2 too",
]
IN_ONE_LINE = "if [ $M = a ]; then L=token; elif [ $M = b ]; then L=sequence; fi\n" + (
    "python3 -m verl.trainer.main_ppo algorithm.rollout_correction.rollout_is=$L\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "made"),
    [
        (
            "run.sh", TWO_SWITCHES,
            {"run-line-2": ("sequence", 3.0), "run-without-line-2": ("sequence", 2.0),
             "run-without-line-5": ("token", 3.0)},
        ),
        ("run.sh", IN_ONE_LINE, {"run-line-1": ("token", 2.0), "run-line-1-2": ("sequence", 2.0)}),
        ("two.py", TWO_CALLS.replace(")\n", "); ", 1), {"two-line-1": ("token", 2.0), "two-line-1-2": ("token", 3.0)}),
        ("run.sh", VERL_BRANCHES, {"run-line-1": ("token", 2.0), "run-line-4": ("sequence", 5.0)}),
        ("two.py", TWO_CALLS, {"two-line-1": ("token", 2.0), "two-line-2": ("token", 3.0)}),
    ],
)  # fmt: skip
def test_what_a_file_says_in_two_ways_stands_side_by_side(
    name: str, text: str, made: dict[str, tuple[str, float]], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    found = [correction for _, correction in read_configurations(tmp_path / name)]
    bounds = {one.name: (one.weight.level, one.weight.bounds[1]) for one in found if one.weight}
    assert bounds == made
    dump = SAMPLE_DATA / "dense"
    done = run("analyze", dump, "--config", tmp_path / name, "--json")
    assert [one["name"] for one in json.loads(done.stdout)["corrections"]] == list(made)
    assert f"{name}: its branches or calls differ: {', '.join(made)} stand side by side" in done.stderr
    assert done.stderr.count("read as") == 1
    together = [line for line in done.stderr.splitlines() if line.endswith(" too")]
    assert [line.partition(": ")[2] for line in together] == (TOGETHER if text is TWO_SWITCHES else [])


ONE_BRANCH = """if [ "$1" = corrected ]; then
  OPTIONS="algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=3.0"
fi
python3 -m verl.trainer.main_ppo trainer.total_epochs=1 $OPTIONS
"""
ONE_SAYS_IT = """GRPOConfig(output_dir="a", use_vllm=True)
GRPOConfig(output_dir="a", use_vllm=True, vllm_importance_sampling_mode="token_truncate")
"""
ONE_BRANCH_OF_TRL = """if [ "$1" = truncated ]; then OPTIONS="--vllm_importance_sampling_mode token_truncate"; fi
trl grpo --use_vllm true --loss_type grpo $OPTIONS
"""


@pytest.mark.parametrize(
    ("name", "text", "framework", "made"),
    [
        ("run.sh", ONE_BRANCH, "", {"run": "token"}),  # the other branch holds nothing of a correction
        ("two.py", ONE_SAYS_IT, "", {"two-line-1": "sequence", "two-line-2": "token"}),  # TRL masks sequences by itself
        ("run.sh", ONE_BRANCH_OF_TRL, "", {"run": "token"}),  # whose the other branch is, nothing says
        ("run.sh", ONE_BRANCH_OF_TRL, "trl", {"run-line-1": "token", "run-without-line-1": "sequence"}),
    ],
)
def test_what_says_nothing_of_a_correction_is_read_where_it_is_known_whose_it_is(
    name: str, text: str, framework: str, made: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    found = [correction for _, correction in read_configurations(tmp_path / name, framework)]
    assert {one.name: one.weight.level for one in found if one.weight} == made


@pytest.mark.parametrize(("high", "caught"), [("", True), ("epsilon_high: 0.28", True), ("epsilon_high: 5.0", False)])
def test_the_bounds_that_a_trap_looks_at_are_those_of_the_file(high: str, caught: bool, tmp_path: Path) -> None:
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
def test_a_switch_that_is_missing_is_told(text: str, level: str, place: str, tmp_path: Path) -> None:
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
def test_what_a_script_writes_into_a_file_is_no_command_of_it(which: str) -> None:
    """An apostrophe in such a file refused the script, a flag in it was read as one that launches."""
    (read,) = parse_shell(f"{HERE[which]}python train.py --use-tis --tis-clip 2\n")
    assert read.keys == {"--use-tis": True, "--tis-clip": 2}


@pytest.mark.parametrize("which", COMMANDS)
def test_a_here_document_that_is_launched_is_read(which: str) -> None:
    (read,) = parse_shell(COMMANDS[which].format("python train.py --use-tis --tis-clip 3"))
    assert read.keys == {"--use-tis": True, "--tis-clip": 3}


def test_lines_are_counted_with_here_documents() -> None:
    script = "cat > c <<EOF\n1\n2\nEOF\nif a; then\n python t.py --tis-clip 2\nelse\n python t.py --tis-clip 3\nfi\n"
    assert [read.line for read in parse_shell(script)] == [5, 7]
