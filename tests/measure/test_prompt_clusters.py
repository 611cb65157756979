"""A prompt is one cluster of its run in all steps, and one cluster per step in metrics of a step."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.sweep.study import Study, ThresholdAxis
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.corrections.model import Correction
from mismatchctl.results.model import RunResult

STEPS, PROMPTS, EACH = 6, 10, 4
GATE = Correction.model_validate({"name": "geo", "gates": [{"level": "geometric", "keep": [0.999, None]}]})


def dump_of(folder: Path, prompts: int = PROMPTS, *, named: bool = True) -> Path:
    """Write steps with the same prompts, each with its own bias."""
    random = np.random.default_rng(1)
    bias = random.normal(0, 0.004, prompts)
    rows = [(step, prompt) for step in range(STEPS) for prompt in range(prompts) for _ in range(EACH)]
    rollout = [-0.5 - random.exponential(1.0, 30) for _ in rows]
    train = [
        log_probs + bias[prompt] + random.normal(0, 0.005, 30)
        for (_, prompt), log_probs in zip(rows, rollout, strict=True)
    ]
    columns = {"step": [step for step, _ in rows], "rollout_log_probs": rollout, "train_log_probs": train}
    if named:
        columns["prompt_id"] = [prompt for _, prompt in rows]
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "dump.parquet", row_group_size=17)
    return folder


def analyzed(folder: Path) -> RunResult:
    return analyze([str(folder)], [GATE], findings=False).runs[folder.name]


def by_hand(folder: Path) -> tuple[float, float]:
    """Return the standard error of K1 over prompts, and the share of prompts without a kept token."""
    table = pq.read_table(folder / "dump.parquet").to_pydict()
    prompts = np.array(table["prompt_id"])
    log_ratio = np.array(table["train_log_probs"]) - np.array(table["rollout_log_probs"])
    sums = np.array([-log_ratio[prompts == prompt].sum() for prompt in range(prompts.max() + 1)])
    tokens = log_ratio.size / len(sums)
    kept = np.array([(log_ratio[prompts == p].mean(axis=1) >= np.log(0.999)).any() for p in range(len(sums))])
    error = np.sqrt(((sums - sums.mean()) ** 2).sum() * len(sums) / (len(sums) - 1)) / (tokens * len(sums))
    return float(error), float((~kept).mean())


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [PROMPTS, 400])
def test_standard_errors_are_clustered_by_prompt(tmp_path: Path, prompts: int) -> None:
    """This includes tables with more rows than are kept separately."""
    folder = dump_of(tmp_path / "run", prompts)
    run, (error, empty) = analyzed(folder), by_hand(folder)
    assert run.overall.metrics["prompts"].value == prompts
    assert run.overall.corrections["geo"]["empty_prompts"].value == pytest.approx(empty)
    assert 0 < empty < 1
    assert run.overall.metrics["k1"].se == pytest.approx(error, rel=1e-6 if prompts == PROMPTS else 0.1)
    assert run.groups.metrics["prompts"].value == [prompts] * STEPS


def test_sweeps_cluster_by_prompt(tmp_path: Path) -> None:
    folder = dump_of(tmp_path / "run")
    found = sweep([str(folder)], [Study(GATE, (ThresholdAxis("gates.0.keep.0", (0.99, 0.999)),))])
    row = next(row for row in found.overall.to_dicts() if row["point"] == 1)
    wanted = analyzed(folder).overall.corrections["geo"]
    for key in ("empty_prompts", "rejected_sequences", "ess_token"):
        assert row[key] == pytest.approx(wanted[key].value)
    errors = [key for key in wanted if f"{key}_se" in row]
    assert "rejected_sequences" in errors
    for key in errors:
        assert row[f"{key}_se"] == pytest.approx(wanted[key].se)


def test_sequences_without_prompts_cluster_by_step(tmp_path: Path) -> None:
    run = analyzed(dump_of(tmp_path / "run", named=False))
    assert run.overall.metrics["prompts"].value == STEPS * PROMPTS * EACH
