"""Typical misreadings of the documents of verl, slime and Miles: one test for each row of a table.

ROWS contains the tests by row number. The examples of the documents are in tests/fixtures/framework_configs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
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

EXAMPLES = FIXTURES / "framework_configs"
ROWS: dict[int, Callable[[Path], None]] = {}
"""Tests by row number."""


def row(number: int) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register the test of a row. The test gets a folder with a dump `d` of three steps."""

    def put(test: Callable[[Path], None]) -> Callable[[Path], None]:
        assert number not in ROWS
        ROWS[number] = test
        return test

    return put


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


@row(3)
def scalars_and_versions(folder: Path) -> None:
    """1e-4 is a number, as in Hydra. The keys determine the version, which is named by its date."""
    flat = "rollout_is: true\nrollout_is_threshold: 2.0\nrollout_is_veto_threshold: 1e-4\n"
    for text in (flat, f"algorithm:\n{''.join(f'  {line}' for line in flat.splitlines(keepends=True))}"):
        path = written(folder, text)
        framework, correction = read_native(path)
        assert (framework.title, correction.gates[0].keep) == ("verl@2025-10", (1e-4, None))
        assert {finding["level"] for finding in lint(path)} <= {"info"}
        assert overall(analyzed(folder / "d", "--config", path), "mine")["rejected_sequences"] == pytest.approx(1 / 12)
    for framework, words in (("verl", 0), ("verl@2026-08", 2)):  # without a version, that of the keys
        run("analyze", folder / "d", "--config", path, "--framework", framework, code=words)
    old = written(folder, "rollout_correction: {rollout_is: token, rollout_token_veto_threshold: 1e-5}")
    assert read_native(old)[0].title == "verl@2025-11-25"
    with pytest.raises(ConfigError, match=r"verl@2026-08: unknown key .*: verl@2025-11-07 to verl@2025-11-25 do"):
        load_framework("verl@2026-08").correction(yaml.safe_load(old.read_text()))
    assert load_framework("verl@d").title == "verl@2026-08" and load_framework("slime@seed").title == "slime@2026-01"


@row(4)
def keys_that_nothing_reads(folder: Path) -> None:
    """Names that only the document uses are errors that list the real keys, in every version."""
    for name in ("level", "mode", "lower_bound", "upper_bound", "veto_threshold", "batch_normalize"):
        path = written(folder, f"use_tis: true\nmis_{name}: 1\n")
        (found,) = [finding for finding in lint(path) if finding["place"] == f"mis_{name}"]
        assert found["level"] == "error"
        assert "the code reads" in found["consequence"]
        done = run("analyze", folder / "d", "--config", path, code=2)
        assert f"mis_{name}" in done.stderr and "the code reads" in done.stderr
    mis = yaml.safe_load((EXAMPLES / "slime-mis.yaml").read_text())
    done = run("analyze", folder / "d", "--config", written(folder, yaml.safe_dump(mis)), "--framework", "verl", code=2)
    assert "this is a configuration of slime" in done.stderr
    for title in find_adapter("verl").titles:
        misspelt = {"algorithm": {"rollout_correction": {}, "rollout_is_treshold": 2}, "lr": 1}
        assert [item.key for item in load_framework(title).unread(misspelt)][-1] == "rollout_is_treshold"
    for title in (*find_adapter("slime").titles, *find_adapter("miles").titles):
        with pytest.raises(ConfigError, match="did you mean 'tis_upper_bound'"):
            load_framework(title).correction(mis | {"tis_uper_bound": 2})
        assert not load_framework(title).unread(mis | {"my_own": 2})
    done = run("analyze", folder / "d", "--config", written(folder, "use_tis: true\nmy_own: 3"), code=0)
    assert "my_own" not in done.stderr


@row(5)
def what_is_written_is_read_back(folder: Path) -> None:
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
        path = written(folder, done.stdout)
        assert is_same(read_native(path)[1], find_preset("ppo_is_bypass"))
        assert analyzed(folder / "d", "--config", path)
    done = run("presets", "show", "slime-mis", "--as", "slime")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "denominators; slime@2026-01 can" in done.stderr


@row(6)
def bypass_has_one_meaning(folder: Path) -> None:
    """PPO in bypass mode has no weights, for every spelling of the option."""
    for keys in ("bypass_old_logprob_for_rollout: true", "bypass_mode: true", "bypass_mode: true, loss_type: ppo_clip"):
        path = written(folder, f"rollout_correction: {{rollout_is: token, rollout_is_threshold: 2.0, {keys}}}")
        found = overall(analyzed(folder / "d", "--config", path, "-c", "ppo_is_bypass"), "mine")
        assert found == overall(analyzed(folder / "d", "-c", "ppo_is_bypass"), "ppo_is_bypass")
        assert found["weight_mean"] == 1


@row(9)
def the_documents_lower_bound(folder: Path) -> None:
    """seq_mis and geo_mis keep the tokens that verl's code keeps. `lint` and `presets` describe the document's rule."""
    for name, lower in (("seq_mis", "0.5"), ("geo_mis", "0.999001")):
        assert "verl's document" in run("presets", "show", name).stdout
        path = written(folder, run("presets", "show", name, "--as", "verl@2025-11").stdout)
        (found,) = [finding for finding in lint(path, folder / "d") if "verl's document" in finding["consequence"]]
        assert lower in found["consequence"]
        document = Correction.model_validate(yaml.safe_load(run("presets", "show", "seq_is_rs").stdout))
        if name == "seq_mis":
            rejected = overall(analyzed(folder / "d", "-c", "seq_is_rs"), document.name)["rejected_tokens"]
            ours = overall(analyzed(folder / "d", "-c", "seq_mis"), "seq_mis")["rejected_tokens"]
            assert f"rejects {rejected:.3%} of tokens (now {ours:.3%})" in found["change"]


@row(11)
def presets_as_the_post_states_them(folder: Path) -> None:
    """The preset has no veto, and a second preset has the veto."""
    for number in "123":
        plain, vetoed = find_preset(f"miles-moe-{number}"), find_preset(f"miles-moe-{number}-veto")
        assert [gate.is_veto for gate in plain.gates] == [False]
        assert [gate.is_veto for gate in vetoed.gates] == [False, True]
        assert plain.weight == vetoed.weight
        assert is_same(read_native(EXAMPLES / f"miles-moe-{number}.yaml", "miles@2026-01")[1], plain)
    assert is_same(read_native(EXAMPLES / "miles-moe-4.yaml")[1], find_preset("miles-moe-4"))


@row(13)
def micro_batches(folder: Path) -> None:
    """A dump without micro-batches gives a warning. With the flag, N rows of a step are normalized together."""
    words = (folder / "d", "-c", "miles-moe-1")
    warned = analyzed(*words)
    assert any("--micro-batch-size N" in text and "whole step" in text for text in warned["warnings"])
    assert not analyzed(folder / "d", "-c", "token_tis")["warnings"]
    sequences = folder / "sequences.parquet"
    alone = run("analyze", *words, "--micro-batch-size", "1", "--sequences", sequences, "--force", "--json", code=0)
    assert not json.loads(alone.stdout)["warnings"]
    import polars as pl

    assert pl.read_parquet(sequences)["miles-moe-1.weight"].to_list() == pytest.approx([1] * 36, rel=1e-12)
    four = overall(analyzed(*words, "--micro-batch-size", "4"), "miles-moe-1")
    with Recorder(folder / "named") as recorder:
        rows = pl.read_parquet(str(folder / "d" / "**" / "*.parquet")).to_dicts()
        for step in range(3):
            chosen = [found for found in rows if found["step"] == step]
            recorder.write(
                step=step, rollout_log_probs=[found["rollout_log_probs"] for found in chosen],
                train_log_probs=[found["train_log_probs"] for found in chosen], micro_batch=np.arange(12) // 4,
            )  # fmt: skip
    named = overall(analyzed(folder / "named", "-c", "miles-moe-1"), "miles-moe-1")
    for name in ("weight_std", "normalization_factor", "ess_token"):
        assert four[name] == pytest.approx(named[name], rel=1e-7)


ADVICE = [
    ("rollout_is: sequence", "not normalized", "step size"),
    ("rollout_is: token\n  rollout_is_threshold: 1.2", "range, 1.5 to 5", "leaves an effective sample size of"),
    ("rollout_rs: geometric\n  rollout_rs_threshold: 1.5", "range, 1.0002 to 1.001", "rejects"),
    ("rollout_token_veto_threshold: 0.5", "outside 1e-06 to 0.0001", "rejects"),
    (
        "rollout_is: token\n  rollout_is_threshold: 1.5\n  rollout_is_batch_normalize: true",
        "Of two runs",
        "divides weights",
    ),
]


@row(14)
def advice(folder: Path) -> None:
    for keys, says, changes in ADVICE:
        path = written(folder, f"rollout_correction:\n  {keys}\n")
        found = [finding for finding in lint(path, folder / "d") if finding["level"] in ("advice", "info")]
        (one,) = [finding for finding in found if says in finding["consequence"]]
        assert one["source"] and one["fix"]
        assert one["change"].startswith("d: ")
        assert changes in one["change"] + one["consequence"]
        run("lint", path, code=0)


@row(16)
def before_3915(folder: Path) -> None:
    """Rejection sets weights to zero and does not change the mask. The veto is on by default."""
    old, new = load_framework("verl@3694"), load_framework("verl@3915")
    assert (old.title, new.title) == ("verl@2025-10-14", "verl@2025-10")
    keys = {"rollout_is": True, "rollout_is_threshold": 2.0, "rollout_is_mode": "mask"}
    before, after = old.correction(keys), new.correction(keys)
    assert [(gate.keep, gate.effect) for gate in before.gates] == [((0.5, 2.0), "zero"), ((1e-4, None), "zero")]
    assert [(gate.keep, gate.effect) for gate in after.gates] == [((0.5, 2.0), "mask")]
    assert len(old.correction(keys | {"rollout_is_veto_threshold": None}).gates) == 1
    unapplied = old.correction(keys | {"rollout_is": False})
    assert (unapplied.weight, unapplied.gates) == (None, ())  # without weights there is nothing to zero
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
    path = written(folder, yaml.safe_dump(keys))
    values = overall(analyzed(folder / "d", "--config", path, "--framework", "verl@2025-10-14"), "mine")
    assert values["rejected_tokens"] > overall(analyzed(folder / "d", "--config", path), "mine")["rejected_tokens"]


@row(18)
def the_summary_table(folder: Path) -> None:
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


@row(20)
def truly_on_policy(folder: Path) -> None:
    """The finding on the flag names the command that checks it."""
    (found,) = lint(EXAMPLES / "slime-true-on-policy.sh")
    assert "gate DUMP --expect-bitwise" in found["fix"]
    run("gate", folder / "d", "--expect-bitwise", code=3)


@row(22)
def no_invented_addresses(folder: Path) -> None:
    """All addresses of the project are pages of its repository."""
    urls = parse_toml((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls.keys() >= {"Homepage", "Issues", "Changelog"}
    assert [url for url in urls.values() if not url.startswith(urls["Homepage"])] == []


@row(1)
def a_log_can_differ(folder: Path) -> None:
    """K3 of 1e-12 differs from a logged 9e-7, and K3 times 1.0001 differs from K3."""
    for name, scale, factor in (("tiny", 1.5e-6, 7e5), ("usual", 0.05, 1.0001)):
        rng, made = np.random.default_rng(1), folder / f"log-{name}"
        rollout = [-0.6 - rng.exponential(1.0, 100) for _ in range(8)]
        train = [values + rng.normal(0, scale, 100) for values in rollout]
        made.mkdir()
        columns = {"rollout_log_probs": rollout, "train_log_probs": train, "step": [0] * 8}
        pq.write_table(pa.table(columns), made / "a.parquet")  # in float64, so that the smallest is no rounding
        x = np.concatenate(train) - np.concatenate(rollout)
        true = float(np.mean(np.expm1(x) - x))
        for value, agrees in ((true, True), (true * factor, False)):
            log = written(folder, json.dumps({"step": 0, "rollout_corr/k3_kl": value}), "log.jsonl")
            found = analyzed(made, "-c", "none", "--framework", "verl", "--against", log)
            (each,) = found["runs"].values()
            item = each["against"]["none"]["names"]["rollout_corr/k3_kl"]
            assert item["agrees"] is agrees
            assert item["difference"] == pytest.approx(abs(value - item["dump"]) / max(value, item["dump"]), rel=1e-6)


@row(2)
def longer_responses_under_a_bias(folder: Path) -> None:
    """The predicted interval for 4,096 tokens contains the exact value, or there is no prediction."""
    rng = np.random.default_rng(5)

    def predicted(name: str, x: np.ndarray, length: int) -> dict[str, Any]:
        with Recorder(folder / name) as recorder:
            rollout = -2.0 - rng.exponential(1.0, x.shape)
            recorder.write(step=0, rollout_log_probs=list(rollout), train_log_probs=list(rollout + x))
        given = ("-c", "{gates: [{level: geometric, keep: [0.998004, 1.002]}], name: g}")
        vary = ("--vary", "gates.0.keep.1=1.002:1.01:2", "--at-length", str(length))
        done = run("sweep", folder / name, *given, *vary, "--json", code=0)
        first = min(json.loads(done.stdout)["predictions"], key=lambda each: each["point"])
        (found,) = [each for each in first["predictions"] if each["quantity"] == "rejected_sequences"]
        return dict(found)

    def truth(bias: float, noise: float) -> float:
        spread = math.hypot(bias, noise / 64)
        return math.erfc(math.log(1.002) / spread / math.sqrt(2))

    for number, bias in enumerate((0.0, 0.002, 0.004)):
        x = rng.normal(0, 0.02, (256, 256)) + rng.normal(0, 1, (256, 1)) * bias
        found, true = predicted(f"bias{number}", x, 4096), truth(bias, 0.02)
        low, high = found["interval"]
        assert low <= true <= high, (bias, true, found)
        assert found["value"] == pytest.approx(true, abs=0.12)
        assert found["check"]["lengths"] and found["status"] == "ok"
    sound = predicted("sound", rng.normal(0, 0.02, (256, 256)), 512)
    fading = rng.normal(0, 0.1, (256, 256)) * np.where(np.arange(256) < 64, 1.0, 0.01)
    missed = predicted("fading", fading, 512)
    assert missed["status"].startswith("the model misses")
    widths = [found["interval"][1] - found["interval"][0] for found in (sound, missed)]
    assert widths[1] > widths[0] + 0.1
    refused = predicted("far", fading, 1 << 16)
    assert refused["interval"] is None and refused["status"].startswith("refused: anything from")


@row(7)
def kl_and_losses(folder: Path) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(5, 30, 16)
    rollout = [-rng.exponential(1.0, int(n)) - 0.5 for n in lengths]
    train, current, ref = (
        [values + rng.normal(0, size, len(values)) for values in rollout] for size in (0.02, 0.1, 0.3)
    )
    with Recorder(folder / "ref") as recorder:
        recorder.write(
            step=0, rollout_log_probs=rollout, train_log_probs=train, current_log_probs=current, ref_log_probs=ref,
            advantages=rng.normal(size=16), response_mask=[np.full(int(n), i != 3) for i, n in enumerate(lengths)],
        )  # fmt: skip
    (found,) = analyzed(folder / "ref", "-c", "none")["runs"].values()
    kept = [i for i in range(16) if i != 3]
    x = [current[i] - ref[i] for i in kept]
    biased = [np.exp(-v) - 1 + v for v in x]
    unbiased = [np.exp(current[i] - train[i]) * values for i, values in zip(kept, biased, strict=True)]
    for key, parts in (("ref_k3", biased), ("ref_k3_unbiased", unbiased)):
        value = found["overall"]["metrics"][key]["value"]
        assert value == pytest.approx(np.concatenate(parts).mean(), rel=1e-5)
        value = found["overall"]["metrics"][f"{key}_seq_mean"]["value"]
        assert value == pytest.approx(np.mean([part.mean() for part in parts]), rel=1e-5)
    assert {"loss", "loss_seq_sum", "loss_seq_mean"} <= found["overall"]["corrections"]["none"].keys()
    run("gate", folder / "ref", "--rule", "ref_k3_unbiased:max=10", code=0)


@row(8)
def what_the_run_logged(folder: Path) -> None:
    """Every logged name is kept. It is compared if it has a metric, and drawn next to the lag of K3."""
    values = dict(zip("abc", ([0.5, 0.25, 1.0], [40.0, 41.0, 39.0], [1.5, 2.5, 3.5]), strict=True))
    plain = analyzed(folder / "d", "-c", "none", "--framework", "verl")
    (found,) = plain["runs"].values()
    truth = found["logged"]["none"]["rollout_corr/k3_kl"]
    names = {"reward": values["a"], "response_length/mean": values["b"], "actor/grad_norm": values["c"]}
    rows = [
        {"step": step, "rollout_corr/k3_kl": truth[step], "rollout_corr/training_log_ppl": 9.0}
        | {name: series[step] for name, series in names.items()}
        for step in range(3)
    ]
    log = written(folder, "\n".join(map(json.dumps, rows)), "log.jsonl")
    for words in (("--framework", "verl"), ()):
        (found,) = analyzed(folder / "d", "-c", "none", *words, "--against", log)["runs"].values()
        assert {name: found["log"][name] for name in names} == names
        assert found["log"].keys() == rows[0].keys() - {"step"}
        compared = (found["against"]["none"] if words else found["against_metrics"])["names"]
        assert not compared.keys() & names.keys()
        assert compared["rollout_corr/k3_kl"]["agrees"]
        if words:
            assert not compared["rollout_corr/training_log_ppl"]["agrees"]
    done = run("analyze", folder / "d", "-c", "none", "--framework", "verl", "--against", log, "-v")
    assert "in the log, but not compared: reward, response_length/mean, actor/grad_norm" in done.stdout


@row(10)
def the_mean_of_weights(folder: Path) -> None:
    """A gate on the arithmetic mean of a sequence's ratios equals slime's sequence level with the mean."""
    rng = np.random.default_rng(4)
    rollout = [-rng.exponential(1.0, 20) - 1.0 for _ in range(30)]
    train = [values + rng.normal(0, 0.3, 20) for values in rollout]
    with Recorder(folder / "mean") as recorder:
        recorder.write(step=0, rollout_log_probs=rollout, train_log_probs=train)
    found = overall(analyzed(folder / "mean", "-c", "{gates: [{level: mean, keep: [0.95, 1.1]}], name: m}"), "m")
    means = [np.exp(a - b).mean() for a, b in zip(train, rollout, strict=True)]
    share = np.mean([not 0.95 <= value <= 1.1 for value in means])
    assert 0 < share < 1
    assert found["rejected_sequences"] == pytest.approx(share)


@row(12)
def prompts_of_the_run(folder: Path) -> None:
    """A prompt is one cluster in all steps."""
    rng = np.random.default_rng(6)
    with Recorder(folder / "prompts") as recorder:
        for step in range(2):
            rollout = [-rng.exponential(1.0, 10) for _ in range(32)]
            train = [np.minimum(values + rng.normal(0, 0.1, 10), 0) for values in rollout]
            recorder.write(
                step=step, rollout_log_probs=rollout, train_log_probs=train, prompt_id=[i // 4 for i in range(32)]
            )
    (found,) = analyzed(folder / "prompts", "-c", "none")["runs"].values()
    assert found["overall"]["metrics"]["prompts"]["value"] == 8
    assert found["groups"]["metrics"]["prompts"]["value"] == [8, 8]


@row(15)
def routing_that_is_replayed(folder: Path) -> None:
    """The rule requires the same experts on both sides."""
    rng = np.random.default_rng(8)
    rollout = [-rng.exponential(1.0, 12) for _ in range(4)]
    experts = [[rng.permutation(8)[:2].tolist() for _ in range(12)] for _ in range(4)]
    flipped = [[token[::-1] for token in row] for row in experts]
    other = [[[9, 10], *row[1:]] for row in experts]
    for name, train, code in (("replayed", flipped, 0), ("not", other, 3)):
        columns = {"rollout_log_probs": rollout, "train_log_probs": rollout, "rollout_experts": experts}
        pq.write_table(pa.table({**columns, "train_experts": train}), folder / f"{name}.parquet")
        run("gate", folder / f"{name}.parquet", "--rule", "routing_differs:max=0", "--expect-bitwise", code=code)


@row(17)
def both_drifts_together(folder: Path) -> None:
    """Rollout and current are a pair of policies, which is the sum of two drifts."""
    (found,) = analyzed(folder / "d", "-c", "none")["runs"].values()
    metrics = found["overall"]["metrics"]
    assert {"k3", "drift_k3", "total_k3"} <= metrics.keys()
    shares = [metrics[f"total_share_{part}"]["value"] for part in ("mismatch", "drift")]
    assert sum(shares) == pytest.approx(1)
    run("gate", folder / "d", "--rule", "total_k3:max=1", code=0)


@row(19)
def growth_of_one_run_against_another(folder: Path) -> None:
    """`compare` tests whether K3 grows more slowly or later in one run."""
    rng = np.random.default_rng(9)
    for name, rate in (("plain", 0.12), ("masked", 0.0)):
        with Recorder(folder / f"grows-{name}") as recorder:
            for step in range(16):
                rollout = [-rng.exponential(1.0, 40) - 0.5 for _ in range(8)]
                train = [values + rng.normal(0, 0.02 * np.exp(rate * step / 2), 40) for values in rollout]
                recorder.write(step=step, rollout_log_probs=rollout, train_log_probs=train)
    done = run("compare", folder / "grows-plain", folder / "grows-masked", "--json", code=0)
    (contrast,) = json.loads(done.stdout)["contrasts"]
    told = [contrast["growth"][what]["verdict"] for what in ("reference", "other", "quotient")]
    assert told == ["grew", "steady", "fell"]


@row(21)
def paths_in_python(folder: Path) -> None:
    """A string and a Path are the same path."""
    import mismatchctl as mm

    for path in (str(folder / "d"), folder / "d"):
        assert len(mm.analyze(path, findings=False).runs) == 1


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
    "verl-pr-3915.yaml": ["none"],  # without the threshold that switches everything on
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir()))
def test_documented_examples_give_the_documented_corrections(name: str, dump: Path) -> None:
    """The examples run through lint and `analyze --config` and match the preset of their name."""
    run("lint", EXAMPLES / name, code=0)
    framework = "slime@2026-01" if name.startswith("slime") else "miles@2026-01" if name.startswith("miles") else ""
    result = analyzed(dump / "d", "--config", EXAMPLES / name, *(["--framework", framework] if framework else []))
    found = [Correction.model_validate(item) for item in result["corrections"]]
    for one, wanted in zip(found, READ_AS[name], strict=bool(READ_AS[name])):
        assert is_same(one, find_preset(wanted)), (name, wanted)


def test_every_row_of_the_table_has_a_test() -> None:
    assert sorted(ROWS) == list(range(1, 23))


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(ROWS))
def test_documented_configurations_give_the_documented_results(number: int, dump: Path) -> None:
    ROWS[number](dump)
