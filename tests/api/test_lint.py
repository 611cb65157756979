"""`lint` names the place and the consequence of each trap, and accepts sound configurations."""

import json
from pathlib import Path

import numpy as np
import pytest

from mismatchctl.frameworks.lint import format_decimal
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.recorder.recorder import Recorder
from tests.cli.command import run
from tests.frameworks.native_config import read_native

MIS = """
use_tis: true
use_rs: {use_rs}
tis_level: {tis_level}
rs_level: token
tis_mode: {tis_mode}
tis_lower_bound: {tis_lower}
tis_upper_bound: {tis_upper}
rs_lower_bound: {rs_lower}
rs_upper_bound: {rs_upper}
rs_veto_threshold: {veto}
tis_batch_normalize: {normalize}
"""
SOUND = {
    "use_rs": "true", "tis_level": "token", "tis_mode": "clip", "tis_lower": "0.5", "tis_upper": "2.0",
    "rs_lower": "0.2", "rs_upper": "5.0", "veto": "null", "normalize": "false",
}  # fmt: skip


def mis(extra: str = "", **changed: str) -> str:
    return MIS.format(**{**SOUND, **changed}) + extra


def lint(tmp_path: Path, text: str, *words: str | Path) -> tuple[int, list[dict[str, str]]]:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    done = run("lint", file, *words, "--json")
    assert done.exit_code in (0, 3), done.stderr
    return done.exit_code, json.loads(done.stdout)["findings"]


VERL = [
    # version, configuration, level, place, words of the message
    ("d", 'rollout_rs: seq_sum_k1\nrollout_rs_threshold: "0.2_1.5"', "warning", "rollout_rs_threshold",
     ["rollout/train", "0.667 to 5"]),
    ("d", "rollout_rs: seq_mean_k1\nrollout_rs_threshold: 1.001", "info", "rollout_rs_threshold",
     ["uses rollout/train", "fraction_high counts ratios train/rollout below"]),
    ("d", "algorithm: {rollout_correction: {bypass_mode: true, loss_type: reinforce, rollout_is: token}}\ntrainer: {}",
     "error", "algorithm.rollout_correction.bypass_mode", ["V1 trainer", "ignores loss_type and rollout_is"]),
    ("d", "algorithm: {rollout_correction: {bypass_mode: true, rollout_rs: token_k3, rollout_rs_threshold: 1}}\n"
     "trainer: {}", "error", "algorithm.rollout_correction.bypass_mode", ["ignores rollout_rs"]),
    ("d", "defaults: [{algorithm@algorithm.rollout_correction: mine}, _self_]\nalgorithm: {rollout_correction: {}}",
     "unknown", "defaults", ["algorithm/mine, but this file was not found"]),
    ("d", "rollout_is: sequence\nrollout_is_threshold: '0.5_2.0'", "warning", "rollout_is_threshold",
     ["ZeroDivisionError"]),
    ("d", "bypass_mode: true\nloss_type: reinforce", "warning", "bypass_mode", ["V1 trainer"]),
    ("d", "rllm: {algorithm: {rollout_correction: {tis_mode: token, tis_cap: 3, bypass_mode: true}}}", "error",
     "rllm.algorithm.rollout_correction.tis_mode", ["rLLM's verl backend raises ValueError"]),
    ("d", "algorithm: {rollout_correction: {bypass_mode: true}}\n"
     "actor_rollout_ref: {actor: {policy_loss: {loss_mode: bypass_mode}}}", "error",
     "actor_rollout_ref.actor.policy_loss.rollout_correction", ["sequence weights truncated at 2"]),
    ("d", "algorithm: {rollout_correction: {bypass_mode: true, loss_type: reinforce}}\n"
     "actor_rollout_ref: {actor: {policy_loss: {loss_mode: bypass_mode, rollout_correction: {rollout_is: null}}}}",
     "error", "actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type", ["'ppo_clip'", "'reinforce'"]),
    ("d", "actor_rollout_ref: {actor: {policy_loss: {loss_mode: bypass_mode}}}\ntrainer: {nnodes: 1}", "error",
     "actor_rollout_ref.actor.policy_loss.loss_mode", ["recomputed log-probs as the rollout's"]),
    ("d", "rollout_is: token\nbypass_mode: 'false'", "error", "bypass_mode", ["text 'false'", "any text as true"]),
    ("d", "rollout_is: token\nbypass_mode: '${oc.env:BYPASS}'", "unknown", "bypass_mode", ["${oc.env:BYPASS}"]),
    ("d", "bypass_mode: true\nrollout_is: token\ntrainer: {use_v1: false}", "warning", "rollout_is", ["only logged"]),
    ("d", "loss_type: reinforce", "error", "loss_type", ["without bypass_mode"]),
    ("d", "rollout_is: token\nrollout_is_threshold: null", "error", "rollout_is_threshold", ["silently"]),
    ("d", "rollout_rs_threshold: 2.0", "error", "rollout_rs_threshold", ["without rollout_rs"]),
    ("d", "rollout_is_threshold: 2.0", "info", "rollout_is", ['"sequence"', "null"]),
    ("d", "rollout_is: token\nrollout_is_threshold: 1.0e+9", "warning", "rollout_is_threshold", ["exp(20)"]),
    ("d", "rollout_rs: token_k3\nrollout_rs_threshold: 1.0e+9", "warning", "rollout_rs_threshold", ["4.85e8"]),
    ("d", "rollout_rs: seq_mean_k2\nrollout_rs_threshold: 201", "warning", "rollout_rs_threshold", ["200"]),
    ("d", "rollout_rs: token_k1\nrollout_rs_threshold: nan", "error", "rollout_rs_threshold", ["every token"]),
    ("d", "rollout_rs: token_k1\nrollout_rs_threshold: 0.5", "error", "rollout_rs_threshold", ["lower <= upper"]),
    ("d", 'rollout_rs: token_k1\nrollout_rs_threshold: "1.5_2.0"', "error", "rollout_rs_threshold", ["policies agree"]),
    ("d", "rollout_rs: token_k1\nrollout_rs_threshold: 0", "error", "rollout_rs_threshold", ["division by zero"]),
    ("d", "rollout_rs: token_k4\nrollout_rs_threshold: 2.0", "error", "rollout_rs", ["Invalid rollout_rs option"]),
    ("d", "rollout_rs: token_k1", "error", "rollout_rs_threshold", ["explicitly provided"]),
    ("d", 'rollout_is: token\nrollout_is_threshold: "2.0_5.0"', "error", "rollout_is_threshold", ["is 0 instead of 1"]),
    ("d", "rollout_is: token\nrollout_is_threshold: 0.5_5", "error", "rollout_is_threshold", ["the number 0.55"]),
    ("d", "rollout_rs: seq_mean_k1,seq_mean_k3\nrollout_rs_threshold: 2.0", "warning", "rollout_rs_threshold",
     ["a ratio", "a divergence"]),
    ("d", "rollout_correction: {rollout_token_veto_threshold: 1.0e-4}", "error",
     "rollout_correction.rollout_token_veto_threshold", ["does not start"]),
    ("d", "rollout_correction: [rollout_is]", "error", "rollout_correction", ["keys and values"]),
    ("d", "algorithm: {rollout_correction: {rollout_is: token}}\n"
     "actor_rollout_ref: {rollout: {calculate_log_probs: false}}", "error",
     "actor_rollout_ref.rollout.calculate_log_probs", ["no log-probs"]),
    ("c2", "algorithm: {rollout_correction: {rollout_is: token}}\nactor_rollout_ref: {rollout: {n: 8}}", "error",
     "actor_rollout_ref.rollout.calculate_log_probs", ["no log-probs"]),
    ("c2", "bypass_mode: true\nuse_policy_gradient: true\nrollout_token_veto_threshold: 1.0e-4", "error",
     "rollout_token_veto_threshold", ["only with rollout_rs"]),
    ("c2", "bypass_mode: true\nrollout_token_veto_threshold: 1.0e-4", "error", "rollout_token_veto_threshold",
     ["nothing is vetoed"]),
    ("c2", "rollout_token_veto_threshold: 1.0e-4", "info", "rollout_token_veto_threshold", ["Its probability"]),
    ("c2", "rollout_token_veto_threshold: '1e-4'", "error", "rollout_token_veto_threshold", ["quotes", "TypeError"]),
    ("c2", "rollout_token_veto_threshold: 0", "error", "rollout_token_veto_threshold", ["must be positive"]),
    ("c2", "rollout_correction: {bypass_mode: true}\ntrainer: {use_v1: true}", "info", "rollout_correction.rollout_is",
     ['"sequence"']),
    ("c2", "bypass_mode: true\nrollout_is: token", "warning", "rollout_is", ["exactly 1"]),
    ("c2", "bypass_mode: true\nrollout_rs: token\nrollout_rs_threshold: 2.0", "error", "rollout_rs", ["rejected"]),
    ("c2", "use_policy_gradient: true", "error", "use_policy_gradient", ["without bypass_mode"]),
    ("c2", "rollout_rs: token\nrollout_rs_threshold: 0.9", "error", "rollout_rs_threshold", ["every token"]),
    ("c2", "rollout_rs: geometric\nrollout_rs_threshold: 1.001", "warning", "rollout_rs_threshold", ["loss is NaN"]),
    ("c2", "rollout_is: geometric", "error", "rollout_is", ["Invalid rollout_is: geometric"]),
    ("c1", "rollout_is: sequence\nrollout_is_batch_normalize: true", "warning", "rollout_is_batch_normalize",
     ["without a valid token"]),
    ("d", "rollout_is: None\nrollout_is_threshold: 2.0", "error", "rollout_is", ["'None' is a string", "write null"]),
    ("d", "rollout_rs: None", "error", "rollout_rs_threshold", ["'None' is a string", "write null"]),
    ("b", "rollout_rs: geometric\nrollout_rs_threshold: 1.5\nrollout_rs_threshold_lower: 2.0", "error",
     "rollout_rs_threshold", ["an empty interval"]),
    ("b", "rollout_rs: geometric\nrollout_rs_threshold: 0.5\nrollout_rs_threshold_lower: 0.2", "info",
     "rollout_rs_threshold_lower", ["1/threshold = 2"]),
    ("b", "rollout_rs: geometric\nrollout_rs_threshold: .nan\nrollout_rs_threshold_lower: 0.9", "error",
     "rollout_rs_threshold", ["an empty interval"]),
    ("b", "rollout_rs: geometric\nrollout_rs_threshold: 0.0\nrollout_rs_threshold_lower: 0.9", "error",
     "rollout_rs_threshold", ["an empty interval"]),
    ("d", 'rollout_rs: "seq_mean_k1,token_k3"\nrollout_rs_threshold: "0.2_1.5,nan"', "warning",
     "rollout_rs_threshold", ["0.667 to 5"]),
    ("a", "rollout_is_veto_threshold: token", "warning", "rollout_is_threshold", ["nothing is computed"]),
    ("b", "rollout_is: token", "warning", "", ["TypeError"]),
    ("b", "rollout_is: token\nrollout_is_threshold: 2.0\nrollout_token_veto_threshold: .nan", "error",
     "rollout_token_veto_threshold", ["no effect"]),
    ("a", "rollout_is_threshold: 2.0", "warning", "rollout_is", ["default is false"]),
    ("a", "rollout_is: false\nrollout_is_threshold: 2.0", "warning", "rollout_is", ["not applied"]),
    ("a", "rollout_is: true\nrollout_is_level: token", "error", "rollout_is_threshold", ["everything off"]),
    ("a", "rollout_is: true\nrollout_is_threshold: 0", "error", "rollout_is_threshold", ["division by zero"]),
    ("a", "rollout_is: true\nrollout_is_threshold: 2.0\nrollout_is_threshold_lower: 0.5", "warning",
     "rollout_is_threshold_lower", ["no lower bound"]),
    ("a", "rollout_is: true\nrollout_is_mode: mask\nrollout_is_threshold: 0.5", "error", "rollout_is_threshold",
     ["every token"]),
    ("a", "rollout_is: true\nrollout_is_threshold: 2.0\nrollout_is_veto_threshold: 0", "error",
     "rollout_is_veto_threshold", ["no effect"]),
]  # fmt: skip

SLIME = [
    (mis(veto="1e-4"), "error", "rs_veto_threshold", ["1e-4 as text", "torch"]),
    (mis(tis_upper="5e8"), "error", "tis_upper_bound", ["as text"]),
    (mis(tis_level="geometric", normalize="true"), "error", "tis_batch_normalize", ["Unsupported tis_level"]),
    (mis(rs_lower="null"), "warning", "tis_lower_bound", ["falls back to tis_lower_bound", "below 0.5"]),
    (mis(rs_lower="null", tis_lower="null"), "warning", "tis_lower_bound", ["1 / tis_upper_bound"]),
    (mis(rs_upper="null"), "warning", "tis_upper_bound", ["falls back to tis_upper_bound"]),
    (mis(use_rs="false", tis_mode="truncate"), "warning", "tis_lower_bound", ["no lower bound"]),
    (mis(tis_level="sequence", normalize="true"), "warning", "tis_batch_normalize", ["no effect"]),
    (mis("micro_batch_size: 1", tis_level="sequence", normalize="true"), "error", "tis_batch_normalize", ["no effect"]),
    (mis("micro_batch_size: 1", normalize="true"), "warning", "tis_batch_normalize", ["mean weight becomes 1"]),
    (mis(normalize="true"), "info", "tis_batch_normalize", ["per micro-batch"]),
    (mis(tis_mode="mask", normalize="true"), "warning", "tis_batch_normalize", ["one outlier"]),
    (mis(veto="1.0e-4"), "warning", "rs_veto_threshold", ["ratio", "probability"]),
    (mis(veto="6.94e-7"), "warning", "rs_veto_threshold", ["below 6.94e-7"]),
    (mis(veto="1.0e-4", use_rs="false"), "error", "rs_veto_threshold", ["only inside rejection"]),
    (mis(veto="0"), "error", "rs_veto_threshold", ["no effect"]),
    (mis(tis_upper="1.0e+9"), "warning", "tis_upper_bound", ["exp(20)"]),
    (mis(rs_upper="1.0e+9"), "warning", "rs_upper_bound", ["never exceeds 4.85e8"]),
    (mis().replace("rs_level: token", "rs_level: tok"), "error", "rs_level", ["Invalid level: tok"]),
    (mis("eps_clip_c: 0.5"), "error", "eps_clip_c", ["clip_ratio_c"]),
    (mis(rs_lower="1.5"), "error", "rs_upper_bound", ["two policies agree"]),
    (mis(rs_lower="6.0"), "error", "rs_lower_bound", ["asserts"]),
    (mis(), "info", "use_tis", ["--get-mismatch-metrics"]),
    (mis("get_mismatch_metrics: true"), "warning", "use_tis", ["turns weights and rejection on"]),
    (mis("use_rollout_logprobs: true"), "error", "use_rollout_logprobs", ["corrected twice"]),
    (mis("tis_clip: 3.0"), "warning", "tis_clip", ["only applies to the built-in weights"]),
    (mis("use_mask: true"), "error", "use_mask", ["the code reads tis_mode"]),
    (mis("rs_threshold: 1.0"), "error", "rs_threshold", ["no code reads this key"]),
    (mis().replace("use_tis: true", ""), "error", "use_rs", ["without use_tis"]),
    (mis().replace("use_tis: true", "use_tis: false"), "warning", "use_rs", ["without use_tis"]),
    ("use_tis: true\ntis_level: token", "error", "tis_mode", ["AttributeError at 'tis_mode'"]),
    ("--use-tis: true\n--tis-level: token", "error", "--tis-level", ["command-line flag"]),
    ("--use-tis: true\n--tis-clip: 0.5", "warning", "--tis-clip", ["is 0.5 instead of 1"]),
    (
        "use_tis: true\ntis_mode: clip\ncustom_tis_function_path: slime.backends.megatron_utils.loss.icepop_function",
        "info",
        "use_tis",
        ["overrides"],
    ),
    ("use_tis: true\nget_mismatch_metrics: true", "error", "custom_tis_function_path", ["does not measure"]),
]


def check(found: tuple[int, list[dict[str, str]]], level: str, place: str, words: list[str], whole: str) -> None:
    code, findings = found
    assert [
        finding
        for finding in findings
        if (finding["level"], finding["place"]) == (level, place) and all(w in finding["consequence"] for w in words)
    ], f"{whole}\n{json.dumps(findings, indent=1)}"
    assert code == (3 if any(finding["level"] == "error" for finding in findings) else 0)
    assert all(finding["fix"] and finding["source"] for finding in findings)


@pytest.mark.parametrize(("version", "text", "level", "place", "words"), VERL)
def test_traps_of_verl_are_reported(
    tmp_path: Path, version: str, text: str, level: str, place: str, words: list[str]
) -> None:
    check(lint(tmp_path, text, "--framework", f"verl@{version}"), level, place, words, text)


def test_a_veto_of_nan_is_none(tmp_path: Path) -> None:
    (tmp_path / "verl.yaml").write_text("rollout_token_veto_threshold: .nan")
    assert read_native(tmp_path / "verl.yaml", "verl@b")[1].gates == ()


@pytest.mark.parametrize(("text", "level", "place", "words"), SLIME)
def test_traps_of_slime_are_reported(tmp_path: Path, text: str, level: str, place: str, words: list[str]) -> None:
    check(lint(tmp_path, text), level, place, words, text)


def test_the_ignored_dual_clip_is_reported(tmp_path: Path) -> None:
    text = "use_tis: true\neps_clip_c: 3.0"
    check(lint(tmp_path, text, "--framework", "slime@seed"), "error", "eps_clip_c", ["no dual clip"], text)
    assert lint(tmp_path, text) == (0, [])


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0}}",
        "rollout_is: token\nrollout_is_threshold: '0.5_5.0'",
        "rollout_is: null\nrollout_rs: seq_mean_k3\nrollout_rs_threshold: 0.01",
        "rollout_is: true\nrollout_is_threshold: 2.0\nrollout_is_mode: mask",
        "use_tis: true\ntis_clip: 2.0",
        "use_tis: false\nget_mismatch_metrics: true\n"
        "custom_tis_function_path: examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    ],
)
def test_correct_configurations_have_no_findings(tmp_path: Path, text: str) -> None:
    assert lint(tmp_path, text) == (0, [])


def test_a_correct_mis_yaml_has_one_warning(tmp_path: Path) -> None:
    """Since 2026, rejected tokens stay in the denominators for any mis.yaml."""
    code, findings = lint(tmp_path, mis())
    assert code == 0
    found = [(finding["level"], finding["place"]) for finding in findings]
    assert found == [("warning", "use_rs"), ("info", "use_tis")]
    code, findings = lint(tmp_path, mis(), "--framework", "slime@2026-01")
    assert [finding["level"] for finding in findings] == ["info"]


def test_several_traps_are_all_reported(tmp_path: Path) -> None:
    """The file has text in place of a number, an unknown key and a refused threshold."""
    _, findings = lint(tmp_path, mis("use_mask: true", veto="1e-4", rs_lower="null", normalize="true"))
    assert {"rs_veto_threshold", "use_mask", "tis_lower_bound", "tis_batch_normalize"} <= {f["place"] for f in findings}
    levels = [finding["level"] for finding in findings]
    assert levels == sorted(levels, key=["error", "warning", "info"].index)


def test_json_numbers_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"rollout_is": null, "rollout_rs": "geometric", "rollout_rs_threshold": 1.5, '
                    '"rollout_rs_threshold_lower": 5e-1, "rollout_token_veto_threshold": 1e-4}')  # fmt: skip
    done = run("lint", file, "--json", code=0)
    assert "text" not in done.stdout


def test_findings_are_printed_as_sentences(tmp_path: Path) -> None:
    file = tmp_path / "mis.yaml"
    file.write_text(mis(veto="1e-4"))
    done = run("lint", file, code=3)
    for words in (" as slime@", "1 error", "rs_veto_threshold", "write 1.0e-4, without quotes", "mis.py"):
        assert words in done.stdout
    assert run("lint", file, "--quiet").stdout == ""
    file.write_text("use_tis: true")
    assert "no findings" in run("lint", file).stdout


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (None, [], "the file does not exist"),
        ("a: [", [], "not valid YAML"),
        ("- a", [], "expected keys and values"),
        ("learning_rate: 1.0e-6", [], "--framework"),
        ("use_tis: true", ["--framework", "slme"], "did you mean 'slime'"),
    ],
)
def test_unreadable_configurations_are_usage_errors(
    tmp_path: Path, text: str | None, words: list[str], says: str
) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    done = run("lint", file, *words, code=2)
    assert says in done.stderr


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write three steps. From the second step on, the mean log ratio is 0.02."""
    folder, rng = tmp_path_factory.mktemp("dumps") / "drifting", np.random.default_rng(0)
    with Recorder(folder) as recorder:
        for step in range(3):
            rollout = [-rng.exponential(1.0, 50) - 1 for _ in range(8)]
            train = [row + (0.02 if step else 0.0) + rng.normal(0, 1e-6, 50) for row in rollout]
            recorder.write(step=step, rollout_log_probs=rollout, train_log_probs=train)
    return folder


@pytest.mark.parametrize(
    ("text", "level", "place", "words"),
    [
        ("rollout_is: null\nrollout_rs: seq_mean_k1\nrollout_rs_threshold: '0.999_1.001'", "error",
         "rollout_rs_threshold", ["drifting", "2 of 3 steps (1, 2)"]),
        ("rollout_is: null\nrollout_rs: seq_mean_k1\nrollout_rs_threshold: '0.999999999_1.000000001'", "error",
         "rollout_rs_threshold", ["rejects everything"]),
        ("rollout_rs: geometric\nrollout_rs_threshold: 1.001\nrollout_rs_threshold_lower: 0.999", "error",
         "rollout_rs_threshold", ["2 of 3 steps"]),
        (mis(rs_lower="0.99", rs_upper="1.01"), "error", "rs_upper_bound", ["2 of 3 steps"]),
    ],
)  # fmt: skip
def test_gates_that_reject_the_whole_dump_are_reported(
    tmp_path: Path, dump: Path, text: str, level: str, place: str, words: list[str]
) -> None:
    check(lint(tmp_path, text, dump), level, place, words, text)


def test_gates_that_together_reject_everything_are_reported(tmp_path: Path) -> None:
    """One gate rejects one half of the sequences, the second gate the other half."""
    with Recorder(tmp_path / "halves") as recorder:
        rollout = [np.full(10, -2.0) for _ in range(4)]
        recorder.write(step=0, rollout_log_probs=rollout, train_log_probs=[row + d for row, d in zip(
            rollout, (0.5, 0.5, -0.5, -0.5), strict=True)])  # fmt: skip
    text = "rollout_is: null\nrollout_rs: token_k1,seq_mean_k1\nrollout_rs_threshold: '0.5_1.1,0.9_2.0'"
    _, findings = lint(tmp_path, text, tmp_path / "halves")
    assert findings[0]["level"] == "error"
    assert "the combination of all gates rejects everything" in findings[0]["consequence"]


def test_gates_that_fit_the_dump_pass(tmp_path: Path, dump: Path) -> None:
    assert lint(tmp_path, "rollout_is: null\nrollout_rs: seq_mean_k3\nrollout_rs_threshold: 0.01", dump) == (0, [])


def test_unusable_dumps_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("use_tis: true")
    run("lint", file, tmp_path / "absent", code=4)


@pytest.mark.parametrize(
    "framework", ["verl@a", "verl@b", "verl@c1", "verl@c2", "verl@d", "slime@seed", "slime", "miles"]
)
@pytest.mark.parametrize(
    "native",
    [
        {},
        {1: 2},
        {"algorithm": {}},
        {"algorithm": {"rollout_correction": None}},
        {"rollout_is": [1], "rollout_is_threshold": "x"},
        {"rollout_rs": {}, "rollout_rs_threshold": []},
        {"rollout_is_threshold": -1, "rollout_is_veto_threshold": -1, "rollout_token_veto_threshold": "y"},
        {"bypass_mode": "yes", "rollout_is": "token", "loss_type": 3},
        {"use_tis": "yes", "tis_level": 3},
        {"rs_veto_threshold": "x", "use_tis": True},
    ],
)
def test_any_mapping_can_be_linted(framework: str, native: dict[str, object]) -> None:
    for finding in load_framework(framework).lint(native):
        assert finding.level in ("error", "warning", "info")


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-4", "1.0e-4"), ("5e8", "5.0e+8"), ("1.5E3", "1.5e+3"), (" 2.0", "2.0"), (0.0001, "0.0001")],
)
def test_numbers_are_written_for_yaml(text: object, number: str) -> None:
    assert format_decimal(text) == number


def test_slime_is_checked_although_a_bound_is_refused(tmp_path: Path) -> None:
    """The negative bound is an error, and the warnings about other lines stay."""
    text = mis(tis_lower="-1", tis_mode="truncate", rs_lower="null", rs_upper="null", normalize="true")
    code, found = lint(tmp_path, text)
    assert code == 3 and "-1 is not a valid bound" in found[0]["consequence"]
    assert {"tis_lower_bound", "tis_upper_bound", "tis_batch_normalize"} <= {one["place"] for one in found}


def test_integers_that_are_no_floats_give_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(f"RolloutCorrectionConfig(rollout_is='token', rollout_is_threshold={10**400})\n")
    run("lint", file, code=0)
