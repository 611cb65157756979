"""Context-parallel slices of slime and Miles are joined token for token."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from mismatchctl.data.conversion import convert_dump
from mismatchctl.errors import DataError
from tests.paths import FIXTURES

MILES = FIXTURES / "framework_dumps/slime_miles/miles_head"
NAMES = {
    "rollout_log_probs": "rollout_log_probs",
    "train_log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "advantages": "advantages",
}


def rows_of(source: Path, out: Path) -> list[dict[str, Any]]:
    convert_dump(source, out)
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return rows


def split(values: np.ndarray, prompt: int, rank: int, size: int, axis: int) -> torch.Tensor:
    """Return the slice of a rank. The chunk of a position determines the rank of the next token."""
    chunk = next(width for width in range(1, axis + 1) if width * 2 * size >= axis)
    kept = []
    for chosen in (rank, 2 * size - 1 - rank):
        for position in range(prompt + len(values)):
            token = position + 1 - prompt
            if position // chunk == chosen and 0 <= token < len(values):
                kept.append(values[token])
    return torch.tensor(kept, dtype=torch.float32)


def write_ranks(folder: Path, size: int, tensor_parallel: int = 1, bshd: bool = False) -> list[dict[str, Any]]:
    """Write the files of two data-parallel ranks with `size` context-parallel ranks each. Return the samples."""
    rng = np.random.default_rng(size)
    folder.mkdir()
    shapes = [(prompt, length) for prompt in (1, 2, 7, 16) for length in (1, 2, 3, 5, 8, 13, 31, 64)]
    truth = [
        {"index": index, "prompt": prompt, "mask": rng.random(length) > 0.2}
        | {name: (-rng.exponential(size=length)).astype(np.float32) for name in NAMES.values()}
        for index, (prompt, length) in enumerate(shapes)
    ]
    number = 0
    for part in (truth[::2], truth[1::2]):
        totals = [sample["prompt"] + len(sample["mask"]) for sample in part]
        width = max(totals) + 5
        data: dict[str, Any] = {
            "tokens": [torch.arange(total) for total in totals],
            "response_lengths": [len(sample["mask"]) for sample in part],
            "total_lengths": totals,
            "loss_masks": [torch.tensor(sample["mask"], dtype=torch.int32) for sample in part],
            "sample_indices": [sample["index"] for sample in part],
            "rewards": [0.0] * len(part),
        }
        if bshd:
            data["max_seq_lens"] = [width] * len(part)
        for rank in range(size):
            axes = [width if bshd else total for total in totals]
            slices = {
                name: [split(s[name], s["prompt"], rank, size, axis) for s, axis in zip(part, axes, strict=True)]
                for name in NAMES.values()
            }
            head = {"rollout_id": 3, "cp_rank": rank, "cp_size": size, "qkv_format": "bshd" if bshd else "thd"}
            for _ in range(tensor_parallel):
                torch.save({**head, "rank": number, "rollout_data": data | slices}, folder / f"3_{number}.pt")
                number += 1
    return truth


def check(rows: list[dict[str, Any]], truth: list[dict[str, Any]]) -> None:
    assert sorted(int(row["sequence_id"]) for row in rows) == list(range(len(truth)))
    for row in rows:
        sample = truth[int(row["sequence_id"])]
        length = len(sample["mask"])
        assert row["step"] == 3
        assert row["response_mask"] == sample["mask"].tolist()
        assert row["token_ids"] == list(range(sample["prompt"], sample["prompt"] + length))
        for column, name in NAMES.items():
            assert row[column] == sample[name].tolist()


def test_slices_of_miles_are_joined(tmp_path: Path) -> None:
    full = torch.load(MILES / "cp2/full_for_comparison.pt", weights_only=True)
    rows = rows_of(MILES / "cp2/train_data", tmp_path / "out.parquet")
    assert [row["sequence_id"] for row in rows] == [str(index) for index in full["sample_indices"]]
    for number, row in enumerate(rows):
        assert row["response_mask"] == full["loss_masks"][number].bool().tolist()
        assert row["token_ids"] == full["tokens"][number][-full["response_lengths"][number] :].tolist()
        for column, name in NAMES.items():
            assert row[column] == full[name][number].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("bshd", [False, True])
def test_slices_of_any_number_of_ranks_are_joined(size: int, bshd: bool, tmp_path: Path) -> None:
    truth = write_ranks(tmp_path / "train_data", size, bshd=bshd)
    check(rows_of(tmp_path / "train_data", tmp_path / "out.parquet"), truth)


def test_tensor_parallel_copies_of_slices_are_read_once(tmp_path: Path) -> None:
    truth = write_ranks(tmp_path / "train_data", 2, tensor_parallel=2)
    check(rows_of(tmp_path / "train_data", tmp_path / "out.parquet"), truth)


def test_slices_without_names_are_matched_by_tokens(tmp_path: Path) -> None:
    truth = write_ranks(tmp_path / "train_data", 4, tensor_parallel=2)
    for path in (tmp_path / "train_data").iterdir():
        content = torch.load(path, weights_only=True)
        del content["rollout_data"]["sample_indices"]
        torch.save(content, path)
    rows = rows_of(tmp_path / "train_data", tmp_path / "out.parquet")
    assert len({row["sequence_id"] for row in rows}) == len(rows) == len(truth)
    check([row | {"sequence_id": s["index"]} for row, s in zip(rows, truth[::2] + truth[1::2], strict=True)], truth)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_ranks_are_named(missing: int, tmp_path: Path) -> None:
    write_ranks(tmp_path / "train_data", 3)
    (tmp_path / f"train_data/3_{missing}.pt").unlink()
    with pytest.raises(DataError, match=rf"of 3, and the files of rank {missing} are missing.*3_\*\.pt"):
        convert_dump(tmp_path / "train_data", tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_slices_by_another_rule_are_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path / "train_data", 2)
    for rank, other in ((0, 1), (1, 0)):
        path = tmp_path / f"train_data/3_{rank}.pt"
        content = torch.load(path, weights_only=True)
        torch.save(content | {"cp_rank": other}, path)
    with pytest.raises(DataError, match=r"but rank 0 of 2 has .* in the zigzag layout"):
        convert_dump(tmp_path / "train_data", tmp_path / "out.parquet")


def test_slices_without_a_rank_are_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path / "train_data", 2)
    for path in (tmp_path / "train_data").iterdir():
        content = torch.load(path, weights_only=True)
        torch.save({name: content[name] for name in ("rollout_id", "rank", "rollout_data")}, path)
    with pytest.raises(DataError, match=r"of a response's \d+ tokens"):
        convert_dump(tmp_path / "train_data", tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("rank", "size", "says"), [(0, 10**15, "rank 1, 2, 3"), (7, 2, "rank 7 of 2"), (0, "2", "does not have the layout")]
)
def test_impossible_ranks_are_refused(rank: Any, size: Any, says: str, tmp_path: Path) -> None:
    content = torch.load(MILES / "cp2/train_data/0_0.pt", weights_only=True)
    torch.save(content | {"cp_rank": rank, "cp_size": size}, tmp_path / "0_0.pt")
    with pytest.raises(DataError, match=says):
        convert_dump(tmp_path / "0_0.pt", tmp_path / "out.parquet")
