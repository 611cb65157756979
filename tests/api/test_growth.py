"""All commands report the same onset and factor of growth, and rare tokens do not count as growth."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.analyze.run_log import read_run_log
from mismatchctl.api.compare.compare import compare
from mismatchctl.api.diagnose import diagnose
from mismatchctl.report.pages.compare import compare_screen
from mismatchctl.report.terminal import print_document
from mismatchctl.results.summary import fit_run_growth, get_summary

STEPS, ROWS, TOKENS, ONSET = 180, 8, 50, 101


@pytest.fixture(scope="module")
def jump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dump that is larger than the sample of a diagnosis, and whose noise grows 4x at a step."""
    draw = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("growth") / "jump.parquet"
    write(path, [draw.normal(0, 0.02 * (4 if step >= ONSET else 1), (ROWS, TOKENS)) for step in range(STEPS)])
    return path


def write(path: Path, log_ratios: list[np.ndarray]) -> None:
    draw, rows = np.random.default_rng(2), []
    for step, block in enumerate(log_ratios):
        rollout = -draw.exponential(1, block.shape) - np.abs(block)
        rows += [
            {"step": step, "prompt_id": f"{step}-{row // 4}", "rollout_log_probs": own.tolist(),
             "train_log_probs": (own + block[row]).tolist()}
            for row, own in enumerate(rollout)
        ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_analyze_diagnose_and_compare_agree_on_growth(jump: Path, tmp_path: Path) -> None:
    run = next(iter(analyze([str(jump)]).runs.values()))
    reported = get_summary(run).growth
    assert (reported.onset, reported.shape) == (ONSET, "jump")
    (findings,) = diagnose([str(jump)]).runs.values()
    for found in (findings, run.findings):
        growing = next(finding for finding in found if finding.cause == "growing_mismatch")
        facts = {fact.name: fact.value for fact in growing.evidence}
        assert facts["onset"] == reported.onset
        assert facts["factor"] == pytest.approx(reported.factor, rel=1e-3)  # rounded
        assert reported.text in growing.summary
    compared = compare([str(jump), str(shutil.copy(jump, tmp_path / "again.parquet"))])
    assert [side.growth for side in compared.sides] == [reported, reported]
    print_document(compare_screen(compared), Console(width=400, file=(screen := io.StringIO())))
    assert screen.getvalue().count(f"K3 {reported.text}") == 2


def test_one_rare_token_is_not_growth(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    blocks = [draw.normal(0, 0.04, (32, 35)) for _ in range(3)]
    blocks[1][4, 7] = blocks[2][9, 30] = 27.6
    write(tmp_path / "rare.parquet", blocks)
    run = next(iter(analyze([str(tmp_path / "rare.parquet")]).runs.values()))
    found = fit_run_growth(run)
    assert (found.verdict, found.factor, found.driven_by) == ("uneven", None, 2)
    assert "driven by 2 tokens" in get_summary(run).answer("since when").text


def test_results_contain_the_order_of_log_and_k3(jump: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(4).normal(0, 0.04, (2, STEPS))
    rows = [
        {"step": step, "train/grad_norm": float((0.07 if step < 90 else 0.02) * np.exp(noise[0, step])),
         "reward": float(noise[1, step] + (0.6 if step < 120 else 0.2))}
        for step in range(STEPS)
    ]  # fmt: skip
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    run = next(iter(analyze([str(jump)], log=read_run_log(log)).runs.values()))
    assert run.order == f"train/grad_norm fell at step 90, then K3 rose at step {ONSET}, then reward fell at step 120"
