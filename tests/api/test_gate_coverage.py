"""Skipped, missing and masked data never improve a verdict of the gate."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mismatchctl.api.gate.coverage import Tolerances
from mismatchctl.api.gate.gate import Baseline, judge
from mismatchctl.api.gate.rules import parse_rules
from mismatchctl.api.gate.verdict import Verdict
from mismatchctl.recorder.recorder import Recorder
from mismatchctl.results.model import InputFile, Result, SkippedData
from mismatchctl.results.reader import read_result
from tests.cli import command
from tests.factories.cluster_results import noisy, result, table

STEPS = range(4)


def record(folder: Path, *, hide: bool = False, lost: int = 0, **columns: Any) -> str:
    """Write 4 steps of 16 sequences. `hide` masks half of every second one, `lost` ones per step contain NaN."""
    with Recorder(folder) as recorder:
        for step in columns.pop("steps", STEPS):
            noise = np.random.default_rng(step)
            rollout = -0.5 - noise.random((16, 40)).astype(np.float32)
            train = (rollout + 0.01 * noise.standard_normal((16, 40))).astype(np.float32)
            mask = np.ones((16, 40), bool)
            mask[8:, 20:] = not hide
            if lost:
                train[-lost:, 3] = np.nan
            recorder.write(
                step=step,
                rollout_log_probs=rollout,
                train_log_probs=train,
                response_mask=mask,
                prompt_id=np.arange(16),
                worker=np.arange(16) // 8,
            )
    return str(folder)


def run(*words: object) -> tuple[int, str]:
    done = command.run(*words)
    return done.exit_code, " ".join(done.output.split())


def verdict(new: Result, base: Result, rule: str = "k3:increase=25%", **options: Any) -> Verdict:
    return judge(new, parse_rules(rule), Baseline("base.json", base), **options)


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    place = tmp_path / "baseline.json"
    rules = "--rule", "k3:increase=25%", "--rule", "k3:increase=25%,per=step", "--rule", "k3:increase=25%,per=worker"
    assert run("gate", record(tmp_path / "base"), *rules, "--save-baseline", place, "--accept")[0] == 0
    return place


def test_results_without_their_bad_rows_are_undecided(tmp_path: Path, baseline: Path) -> None:
    kept = tmp_path / "kept.json"
    dump = record(tmp_path / "new", lost=8)
    assert run("analyze", dump, "--on-bad", "skip", "-q", "-o", kept)[0] == 0
    code, words = run("gate", kept, "--baseline", baseline, "--rule", "k3:increase=25%")
    assert code == 4 and "sequences left out as bad undecided 50% 1%" in words and "--max-skipped" in words
    allowed = "--max-skipped", "60%", "--max-missing", "50%"
    assert run("gate", kept, "--baseline", baseline, "--rule", "k3:increase=25%", *allowed)[0] == 0
    assert run("gate", kept, "--baseline", baseline, "--rule", "k3:increase=25%", *allowed[:2])[0] == 4
    assert run("gate", kept, "--baseline", baseline, "--max-skipped", "101%")[0] == 2


@pytest.mark.parametrize(("skipped", "most", "outcome"), [(1, 0.5, "passed"), (1, 0.01, "undecided"), (0, 0, "passed")])
def test_skipped_sequences_count_against_their_run(skipped: int, most: float, outcome: str) -> None:
    made = result(noisy(16, 1.0, 1))
    made.runs["run"].overall.metrics["sequences"].value = 1.0
    made.runs["run"].overall.metrics["empty_sequences"].value = 0.0
    made.provenance.inputs[0].skipped = skipped
    assert verdict(made, made, limits=Tolerances(most)).outcome == outcome


def test_skipped_files_count() -> None:
    made = result(noisy(16, 1.0, 1))
    made.provenance.left_out = [SkippedData(file="worse.parquet", reason="file", count=1, example="not Parquet")]
    found = verdict(made, made)
    assert found.outcome == "undecided" and found.checks[-1].title == "files left out as bad"
    assert found.checks[-1].value == pytest.approx(1 / 3)
    assert verdict(made, made, limits=Tolerances(0.34)).outcome == "passed"


def test_skipped_sequences_of_earlier_results_count_by_reason() -> None:
    made = result(noisy(16, 1.0, 1))
    made.provenance.inputs = [InputFile(path="a", run="run", size=1, rows=9, tokens=9, layout="wide", dtypes={})]
    made.provenance.left_out = [SkippedData(file="a", reason="NaN", count=10**6, example="row 1")]
    assert verdict(made, made).outcome == "undecided"


def test_runs_of_the_baseline_must_be_present() -> None:
    base, new = result(noisy(16, 1.0, 1)), result(noisy(16, 1.0, 1))
    base.runs["worse"] = base.runs["run"]
    found = verdict(new, base)
    assert found.outcome == "undecided" and found.checks[-1].title == "run worse"
    assert verdict(base, base).outcome == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("per", ["step", "worker"])
def test_parts_of_the_baseline_must_be_present(tmp_path: Path, baseline: Path, per: str) -> None:
    dump = record(tmp_path / "new", steps=[0, 1, 2]) if per == "step" else record(tmp_path / "new")
    rule = "--rule", f"k3:increase=100%,per={per}"
    if per == "worker":
        whole, half = record(tmp_path / "whole"), tmp_path / "half.parquet"
        import polars as pl

        pl.read_parquet(f"{whole}/*.parquet").filter(pl.col("worker") == 0).write_parquet(half)
        dump = str(half)
    code, words = run("gate", dump, "--baseline", baseline, *rule)
    assert code == 4 and f"the dump lacks {per} {3 if per == 'step' else 1} of the baseline" in words
    assert run("gate", record(tmp_path / "same"), "--baseline", baseline, *rule)[0] == 0


def test_later_steps_of_the_training_are_comparable(tmp_path: Path, baseline: Path) -> None:
    dump = record(tmp_path / "new", steps=[10, 11, 12, 13])
    assert run("gate", dump, "--baseline", baseline, "--rule", "k3:increase=100%,per=step")[0] == 0


def test_huge_token_counts_are_not_evidence() -> None:
    base = result(noisy(16, 1.0, 1))
    new = result(table([1e6] * 16, tokens=[-1.0] + [100.0] * 15))
    assert verdict(new, base).outcome != "passed"
    for bad in (float("inf"), float("nan")):  # analyze refuses the dump
        with pytest.raises(ValidationError):
            table([1e6] * 16, tokens=[bad] + [100.0] * 15)


@pytest.mark.parametrize("hide", [False, True])
def test_masks_that_hide_bad_tokens_do_not_pass(tmp_path: Path, baseline: Path, hide: bool) -> None:
    code, words = run("gate", record(tmp_path / "new", hide=hide), "--baseline", baseline, "--rule", "k3:increase=99%")
    assert (code == 4 and "response_mask" in words) if hide else code == 0


def test_different_lengths_are_not_hidden_tokens() -> None:
    noise = np.random.default_rng(3)
    one, two = (noise.integers(50, 150, 32).astype(float).tolist() for _ in range(2))
    base, new = (result(table([1.0] * 32, tokens=tokens)) for tokens in (one, two))
    assert [check.title for check in verdict(new, base, "k3:max=100").checks] == ["K3 KL"]


def test_far_fewer_tokens_and_steps_are_reported(tmp_path: Path, baseline: Path) -> None:
    dump = record(tmp_path / "new", steps=[0])
    words = "gate", dump, "--baseline", baseline, "--rule", "k3:max=1", "--markdown", "-"
    code, said = run(*words)
    assert code == 4 and "the dump lacks 3 of the baseline's 4 steps" in said
    code, said = run(*words, "--max-missing", "75%")
    assert code == 0
    for text in ("has 640 tokens, and the baseline has 2,560", "has 1 steps, and the baseline has 4"):
        assert text in said
    assert "has 16 sequences, and the baseline has 64" in said


def test_baselines_record_skipped_data(tmp_path: Path, baseline: Path) -> None:
    kept, place = tmp_path / "kept.json", tmp_path / "second.json"
    assert run("analyze", record(tmp_path / "new", lost=1), "--on-bad", "skip", "-q", "-o", kept)[0] == 0
    assert run("gate", kept, "--save-baseline", place, "--accept", "--rule", "k3:max=1")[0] == 0
    assert sum(file.skipped for file in read_result(place).provenance.inputs) == 4
    assert "4 sequences of the baseline were left out" in run("gate", tmp_path / "base", "--baseline", place)[1]


def write_rows(folder: Path, *, scale: float = 1.0, copies: int = 1, rows: int = 64, seed: int = 0) -> str:
    """Write rows of 40 tokens, 4 per prompt. The first half of the rows is repeated `copies` times."""
    noise = np.random.default_rng(seed)
    rollout = -noise.exponential(1.0, (rows, 40))
    train = np.minimum(rollout + scale * 0.02 * noise.standard_normal((rows, 40)), 0)
    index = np.concatenate([np.tile(np.arange(rows // 2), copies), np.arange(rows // 2, rows)])
    with Recorder(folder) as recorder:
        recorder.write(
            step=0, rollout_log_probs=list(rollout[index]), train_log_probs=list(train[index]), prompt_id=index // 4,
            sequence_id=np.arange(len(index)),
        )  # fmt: skip
    return str(folder)


def test_repeated_sequences_are_counted_by_every_command(tmp_path: Path) -> None:
    dump = write_rows(tmp_path / "dump", copies=5)
    saved = tmp_path / "saved.json"
    assert run("analyze", dump, "-q", "-o", saved)[0] == 0
    (found,) = read_result(saved).runs.values()
    assert found.content is not None and (found.content.sequences, found.content.repeated) == (192, 128)
    assert found.content.repeated_tokens == 128 * 40
    assert "duplicated_rows" in [finding.cause for finding in found.findings]
    assert '"duplicated_rows"' in run("diagnose", dump, "--json")[1]
    code, words = run("gate", dump, "--rule", "k3:max=1")
    assert (
        code == 4
        and "repeated sequences: 128 of 192 sequences repeat another sequence, with 66.7% of the tokens" in words
    )
    assert run("gate", dump, "--rule", "k3:max=1", "--max-skipped", "70%")[0] == 0
    once = write_rows(tmp_path / "once")
    assert run("gate", once, "--rule", "k3:max=1")[0] == 0


def test_a_baseline_with_the_same_share_of_repeated_sequences_allows_them(tmp_path: Path) -> None:
    place = tmp_path / "baseline.json"
    first, second = (write_rows(tmp_path / str(seed), copies=2, seed=seed) for seed in (1, 2))
    assert run("gate", first, "--save-baseline", place, "--accept", "-q")[0] == 0
    assert run("gate", second, "--baseline", place, "--rule", "k3:increase=100%")[0] == 0


def test_skipped_data_is_counted_in_tokens_too(tmp_path: Path) -> None:
    """One of 200 sequences has most of the tokens and a NaN."""
    noise = np.random.default_rng(0)
    rollout = [-noise.exponential(1.0, 20_000 if row == 7 else 20) for row in range(200)]
    train = [values + 0.01 for values in rollout]
    train[7][3] = np.nan
    with Recorder(tmp_path / "dump") as recorder:
        recorder.write(step=0, rollout_log_probs=rollout, train_log_probs=[np.minimum(t, 0) for t in train])
    saved = tmp_path / "kept.json"
    assert run("analyze", tmp_path / "dump", "--on-bad", "skip", "-q", "-o", saved)[0] == 0
    checks = {check.title: check for check in judge(read_result(saved), parse_rules("k3:max=1")).checks}
    assert checks["sequences left out as bad"].value == pytest.approx(1 / 200)
    assert checks["tokens left out as bad"].value == pytest.approx(20_000 / (20_000 + 199 * 20))
    assert [checks[f"{what} left out as bad"].outcome for what in ("sequences", "tokens")] == ["passed", "undecided"]


def test_a_broken_file_counts_by_its_size(tmp_path: Path) -> None:
    big, small = write_rows(tmp_path / "big", rows=512), write_rows(tmp_path / "small", rows=8)
    folder = tmp_path / "dump"
    folder.mkdir()
    for number in range(120):
        shutil.copy(next(Path(small).glob("*.parquet")), folder / f"{number:03d}.parquet")
    content = next(Path(big).glob("*.parquet")).read_bytes()
    (folder / "999.parquet").write_bytes(content[:-8] + b"12345678")
    saved = tmp_path / "kept.json"
    assert run("analyze", folder, "--on-bad", "skip", "-q", "-o", saved)[0] == 0
    checks = {check.title: check for check in judge(read_result(saved), parse_rules("k3:max=1")).checks}
    assert checks["files left out as bad"].outcome == "passed"
    estimated = checks["tokens left out as bad (estimated from the size of the unreadable files)"]
    assert estimated.outcome == "undecided" and (estimated.value or 0) > 0.05


def test_different_file_names_are_reported(tmp_path: Path) -> None:
    dump = Path(write_rows(tmp_path / "dump"))
    (file,) = dump.glob("*.parquet")
    shutil.copy(file, dump / "_hidden.parquet")
    shutil.copy(file, dump / "part.parquet.tmp")
    code, words = run("gate", dump, "--rule", "k3:max=1")
    assert code == 0 and "2 hidden or temporary files are ignored by convention" in words
    shutil.copy(file, dump / "more.bin")
    code, words = run("gate", dump, "--rule", "k3:max=1")
    assert code == 4 and "more.bin looks like a dump, but was not read because of the file name" in words
    (dump / "more.bin").write_bytes(b"anything else")
    (dump / "notes.txt").write_text("rollout_log_probs are in nats")
    assert run("gate", dump, "--rule", "k3:max=1")[0] == 0


def test_a_bitwise_baseline_requires_a_bitwise_dump(tmp_path: Path) -> None:
    same, other, place = write_rows(tmp_path / "a", scale=0), write_rows(tmp_path / "b", seed=1), tmp_path / "base.json"
    assert run("gate", same, "--save-baseline", place, "--accept", "-q")[0] == 0
    code, words = run("gate", write_rows(tmp_path / "c", scale=0, seed=2), "--baseline", place)
    assert code == 0 and "all log-probs identical passed" in words
    assert "the baseline is bit-identical, so every token of the dump must be bit-identical too" in words
    assert run("gate", other, "--baseline", place)[0] == 3
    assert run("gate", other, "--save-baseline", place, "--accept", "-q")[0] == 0
    code, words = run("gate", same, "--baseline", place)
    assert code == 3 and "all log-probs are bit-identical, as if one column was saved twice" in words


def test_tokens_that_differ_are_counted_and_located(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    rollout = -noise.exponential(1.0, (16, 30))
    train = rollout.copy()
    train[5, 7] -= 0.25
    train[9, 2] -= 0.125
    with Recorder(tmp_path / "dump") as recorder:
        recorder.write(step=0, rollout_log_probs=list(rollout), train_log_probs=list(train), prompt_id=np.arange(16))
    code, words = run("gate", tmp_path / "dump", "--expect-bitwise")
    assert code == 3 and "2 of 480 tokens differ, the largest by 0.25 nats at row 5, position 7 of" in words


def test_values_far_above_their_limit_never_pass() -> None:
    """A single token can make K3 large, so a sample of this size is not enough."""
    rows = [[100.0, 1.0, 10_000.0, 0.1, 1.0] for _ in range(40)]
    base = result(table([row[3] for row in rows], hashes=range(40)))
    for factor, outcome in ((1.5, "passed"), (437.0, "undecided")):
        k3 = [0.1] * 39 + [0.1 + 4.0 * (factor - 1)]
        check = verdict(result(table(k3, hashes=range(100, 140))), base, "k3:increase=0%").checks[0]
        assert check.value is not None and check.limit is not None and check.value > check.limit
        assert check.outcome in ("undecided", outcome), check.says


def test_other_prompts_do_not_dilute_the_prompts_of_the_baseline() -> None:
    base = result(noisy(16, 1e-3, 0))
    worse, good = noisy(16, 4e-3, 1), noisy(160, 1e-3, 2, first=1000)
    mixed = worse.model_copy(update={name: [*getattr(worse, name), *getattr(good, name)]
                                     for name in ("hashes", "groups", "sums")})  # fmt: skip
    found = verdict(result(mixed), base, "k3:increase=50%").checks[0]
    assert found.outcome == "undecided" and "above the limit on the baseline's prompts" in found.reason
