"""Files in the layouts of frameworks give the true log-probs, masks and ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatchctl.convert import convert
from mismatchctl.errors import DataError

DUMPS = Path(__file__).parent / "framework_dumps"
PEERS = DUMPS / "peers"
SOURCES = ["nemo_rl/logs", "prime_rl/token_exports", "trl", "openrlhf", "roll", "areal", "skyrl"]


@pytest.mark.parametrize("source", SOURCES)
def test_valid_tokens_are_the_true_ones(source: str, tmp_path: Path) -> None:
    convert(PEERS / source, tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    truth = pq.read_table(PEERS / "canonical_input.parquet").to_pylist()
    assert len(rows) == len(truth)
    for row, true in zip(rows, truth, strict=True):
        mask, valid = np.array(row["response_mask"]), np.array(true["response_mask"])
        assert mask.sum() == valid.sum()
        for name in ("rollout_log_probs", "train_log_probs"):
            expected = {np.float32(value).item() for value in np.array(true[name])[valid]}
            current = {np.float32(value).item() for value in np.array(true["current_log_probs"])[valid]}
            given = {np.float32(value).item() for value in np.array(row[name])[mask]}
            assert given == expected or (source.startswith("prime") and name[0] == "t" and given == current)


def _nemo(path: Path, shift: int, zero: bool = False) -> Path:
    rng = np.random.default_rng(1)
    lines = []
    for _ in range(20):
        rollout = -rng.exponential(size=30)
        train = np.zeros(30) if zero else np.roll(rollout + 0.01 * rng.normal(size=30), shift)
        mask = [0] * 5 + [1] * 25
        row = {"input_lengths": [30], "token_loss_mask": [mask], "sample_loss_mask": [1.0], "rewards": [1.0]}
        row |= {"generation_logprobs": [rollout.tolist()], "prev_logprobs": [train.tolist()]}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("shift", "zero", "words"), [(1, False, "shifted by one"), (-1, False, "shifted by one"), (0, True, "zero")]
)
def test_shifted_and_missing_log_probs_are_refused(shift: int, zero: bool, words: str, tmp_path: Path) -> None:
    source = _nemo(tmp_path / "train_data_step3.jsonl", shift, zero)
    with pytest.raises(DataError, match=words):
        convert(source, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    "source", ["slime_seed/train_data", "slime_head/train_data", "miles_head/train_data", "miles_head/train_data_cuda"]
)
def test_ranks_hold_what_the_rollout_says(source: str, tmp_path: Path) -> None:
    convert(DUMPS / "slime_miles" / source, tmp_path / "out.parquet")
    dashboard = DUMPS / "slime_miles/miles_head/dashboard_columns/rollout_0.parquet"
    truth = {str(row["sample_index"]): row for row in pq.read_table(dashboard).to_pylist()}
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert len(rows) == (4 if source.endswith("cuda") else 8)
    for row in rows:
        true = truth[row["sequence_id"]]
        mask = np.array(row["response_mask"], bool)
        if not mask.any():
            continue
        valid = np.array(true["loss_mask"] or [1] * true["response_length"], bool)
        assert np.array_equal(np.array(row["rollout_log_probs"])[mask], np.array(true["rollout_log_probs"])[valid])
        assert np.array_equal(np.array(row["token_ids"])[mask], np.array(true["tokens"])[-len(valid) :][valid])


def test_tensor_parallel_duplicates_are_read_once(tmp_path: Path) -> None:
    source = tmp_path / "train_data"
    source.mkdir()
    content = (DUMPS / "slime_miles/miles_head/train_data/0_0.pt").read_bytes()
    for rank in range(2):
        (source / f"0_{rank}.pt").write_bytes(content)
    done = convert(source, tmp_path / "out.parquet")
    assert (done.rows, done.copies) == (4, 4)


def test_context_parallel_slices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="context-parallel"):
        convert(DUMPS / "slime_miles/miles_head/cp2/train_data", tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []
