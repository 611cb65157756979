"""The recorder: what goes in comes out of the file, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.recorder import Recorder

RAGGED = [np.array([-0.5, -1.0, -0.25], np.float32), np.array([], np.float32), np.array([-2.0], np.float32)]


def record(folder: Path, **columns: Any) -> pa.Table:
    with Recorder(folder) as recorder:
        path = recorder.write(**{"step": 0, **columns})
    return pq.read_table(path)


def test_ragged_rows_round_trip(tmp_path: Path) -> None:
    table = record(
        tmp_path,
        rollout_log_probs=RAGGED,
        train_log_probs=[row - 0.125 for row in RAGGED],
        token_ids=[[1, 2, 256], [], [70_000]],
        advantages=[[1.0, 1.0, 0.0], [], [-1.0]],
        prompt_id=["a", "a", "b"],
        reward=np.array([0.5, 0.0, 1.0]),
        worker=[0, 1, 2],
        rollout_version=7,
    )
    assert table["rollout_log_probs"].to_pylist() == [row.tolist() for row in RAGGED]
    assert table["train_log_probs"].to_pylist() == [[-0.625, -1.125, -0.375], [], [-2.125]]
    assert table["token_ids"].to_pylist() == [[1, 2, 256], [], [70_000]]
    assert table["advantages"].to_pylist() == [[1.0, 1.0, 0.0], [], [-1.0]]
    assert table["prompt_id"].to_pylist() == ["a", "a", "b"]
    assert table["reward"].to_pylist() == [0.5, 0.0, 1.0]
    assert table["worker"].to_pylist() == [0, 1, 2]
    assert table["rollout_version"].to_pylist() == [7, 7, 7]
    assert table["step"].to_pylist() == [0, 0, 0]
    assert "response_mask" not in table.column_names and "run" not in table.column_names


@pytest.mark.parametrize("mask", [[[0, 1, 1], [1, 1, 1]], [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
def test_padding_stays_with_its_mask(tmp_path: Path, mask: list[list[float]]) -> None:
    rollout = np.array([[np.nan, -1.0, -2.0], [-3.0, -4.0, -5.0]], np.float32)
    table = record(tmp_path, rollout_log_probs=rollout, train_log_probs=rollout, response_mask=np.array(mask))
    np.testing.assert_array_equal(table["rollout_log_probs"].to_pylist(), rollout)
    assert table["response_mask"].to_pylist() == np.array(mask, bool).tolist()


def test_torch_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rollout = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 5, dtype=torch.int64)
    mask[0, :2] = 0
    table = record(
        tmp_path,
        rollout_log_probs=rollout.bfloat16(),
        train_log_probs=rollout.requires_grad_(),
        current_log_probs=rollout.half(),
        ref_log_probs=[row[:5] for row in rollout],
        response_mask=mask,
        token_ids=torch.arange(15).reshape(3, 5),
        advantages=torch.tensor([1.0, -1.0, 0.5]).bfloat16(),
        step=torch.tensor(4),
    )
    assert table["rollout_log_probs"].to_pylist() == rollout.detach().bfloat16().float().tolist()
    assert table["train_log_probs"].to_pylist() == table["ref_log_probs"].to_pylist() == rollout.tolist()
    assert table["current_log_probs"].to_pylist() == rollout.detach().half().float().tolist()
    assert table["response_mask"].to_pylist() == mask.bool().tolist()
    assert table["token_ids"].to_pylist() == torch.arange(15).reshape(3, 5).tolist()
    assert table["advantages"].to_pylist() == [1.0, -1.0, 0.5]
    assert table["step"].to_pylist() == [4, 4, 4]


def test_nested_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rows = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    table = record(tmp_path, rollout_log_probs=nested, train_log_probs=nested)
    assert table["train_log_probs"].to_pylist() == [[-1.0, -2.0], [-3.0]]


def test_types_on_disk(tmp_path: Path) -> None:
    table = record(
        tmp_path,
        rollout_log_probs=[[-0.1], [-0.2, -0.3]],
        train_log_probs=[np.array([-0.1]), np.array([-0.2, -0.3])],
        response_mask=[[1], [True, 0]],
        token_ids=[np.array([2]), np.array([3, 4])],
        big=[[2**40], [1, 2]],
    )
    leaves = {field.name: getattr(field.type, "value_type", field.type) for field in table.schema}
    assert leaves == {
        "step": pa.int64(),
        "rollout_log_probs": pa.float32(),
        "train_log_probs": pa.float64(),
        "response_mask": pa.bool_(),
        "token_ids": pa.int32(),
        "big": pa.int64(),
    }


def test_parquet_settings(tmp_path: Path) -> None:
    rows = [np.linspace(-1, -0.1, 20, dtype=np.float32)] * 1025
    with Recorder(tmp_path, run="a") as recorder:
        path = recorder.write(step=3, rollout_log_probs=rows, train_log_probs=rows, reward=np.zeros(1025))
    file = pq.ParquetFile(path)
    assert not any(field.nullable for field in file.schema_arrow)
    assert not file.schema_arrow.field("rollout_log_probs").type.value_field.nullable
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [512, 512, 1]
    group = file.metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert not any(column.has_dictionary_page for column in columns.values())
    assert columns["step"].statistics.min == columns["step"].statistics.max == 3
    assert not any(column.is_stats_set for name, column in columns.items() if name != "step")
    for name in ("rollout_log_probs.list.element", "train_log_probs.list.element", "reward"):
        assert "BYTE_STREAM_SPLIT" in columns[name].encodings
    assert pq.read_table(path, page_checksum_verification=True)["run"].to_pylist() == ["a"] * 1025


def test_names(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"rollout_log_probs": RAGGED, "train_log_probs": RAGGED}
    with Recorder(tmp_path / "deep" / "folder") as recorder:
        names = [recorder.write(step=step, **columns).name for step in (3, 3, 4, 3)]
    assert names == [
        "step_00003.parquet",
        "step_00003_001.parquet",
        "step_00004.parquet",
        "step_00003_002.parquet",
    ]
    with Recorder(recorder.folder, rank=2) as ranked:
        assert ranked.write(step=3, **columns).name == "step_00003_rank00002.parquet"
    with Recorder(recorder.folder) as again:
        assert again.write(step=4, **columns).name == "step_00004_001.parquet"
    assert sorted(path.suffix for path in recorder.folder.iterdir()) == [".parquet"] * 6


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(table: pa.Table, handle: Any, **settings: Any) -> None:
        handle.write(b"PAR1")
        raise OSError(28, "No space left on device")

    columns: dict[str, Any] = {"step": 0, "rollout_log_probs": RAGGED, "train_log_probs": RAGGED}
    with Recorder(tmp_path) as recorder:
        with monkeypatch.context() as patch:
            patch.setattr(pq, "write_table", full_disk)
            with pytest.raises(OSError, match="No space"):
                recorder.write(**columns)
        assert list(tmp_path.iterdir()) == []
        assert recorder.write(**columns).name == "step_00000.parquet"


def test_a_killed_writer_loses_only_its_file(tmp_path: Path) -> None:
    (tmp_path / ".step_00000.parquet.tmp").write_bytes(b"PAR1")
    with Recorder(tmp_path) as recorder:
        path = recorder.write(step=0, rollout_log_probs=RAGGED, train_log_probs=RAGGED)
    assert path.name == "step_00000_001.parquet"
    assert sorted(tmp_path.glob("*.parquet")) == [path]


TWO = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"train_log_probs": RAGGED[:2]}, "train_log_probs: 2 rows for 3 sequences"),
        ({"train_log_probs": [*RAGGED[:2], [-1.0, -2.0]]}, "train_log_probs: row 2 has 2 values.* has 1"),
        ({"token_ids": [[1, 2, 3], [], [4, 5]]}, "token_ids: row 2 has 2 values"),
        ({"token_ids": [[1.5, 2.0, 3.0], [], [4.0]]}, "token_ids: needs integers"),
        ({"response_mask": [[1, 2, 1], [], [0]]}, "response_mask: needs zeros and ones"),
        ({"response_mask": [1, 1, 1]}, "response_mask: needs one list of values per sequence"),
        ({"rollout_log_probs": -0.5}, "rollout_log_probs: needs one list"),
        ({"rollout_log_probs": [], "train_log_probs": []}, "rollout_log_probs: needs one list|0 sequences"),
        ({"rollout_log_probs": TWO, "train_log_probs": TWO}, "response_mask: missing"),
        ({"reward": [1.0, 2.0]}, "reward: 2 rows for 3 sequences"),
        ({"reward": [1.0, None, 2.0]}, "reward: needs numbers, booleans or strings"),
        (
            {"current_log_probs": np.zeros((3, 2, 2))},
            r"current_log_probs: a row must be .* got shape \(2, 2\)",
        ),
        (
            {"advantages": [[1.0, 1.0, 1.0], 0.5, [1.0]]},
            "advantages: a row must be one value or one-dimensional",
        ),
        ({"train_log_probs": [["a", "b", "c"], [], ["d"]]}, "train_log_probs: needs numbers"),
        ({"step": -1}, "step: -1 is negative"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    given = {"rollout_log_probs": RAGGED, "train_log_probs": RAGGED, **columns}
    with pytest.raises(ValueError, match=message):
        record(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_writers_of_one_step_never_overwrite_each_other(tmp_path: Path) -> None:
    def write(value: int) -> str:
        rows = [[-float(value)]]
        return Recorder(tmp_path).write(step=0, rollout_log_probs=rows, train_log_probs=rows).name

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(write, range(40)))
    values = {pq.read_table(tmp_path / name)["train_log_probs"][0].as_py()[0] for name in names}
    assert values == {-float(value) for value in range(40)}
    assert len(list(tmp_path.iterdir())) == 40


def test_a_closed_recorder_refuses(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        pass
    with pytest.raises(ValueError, match="closed"):
        recorder.write(step=0, rollout_log_probs=RAGGED, train_log_probs=RAGGED)


def test_imports_numpy_and_pyarrow_only() -> None:
    script = """if True:
        import sys, tempfile
        from mismatchctl.recorder import Recorder
        with tempfile.TemporaryDirectory() as folder, Recorder(folder) as recorder:
            recorder.write(step=0, rollout_log_probs=[[-1.0]], train_log_probs=[[-1.0]])
        ours = sorted(name for name in sys.modules if name.startswith("mismatchctl"))
        assert ours == ["mismatchctl", "mismatchctl.recorder"], ours
        heavy = {"torch", "polars", "pandas", "scipy", "pydantic", "rich", "typer"} & set(sys.modules)
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", script], check=True)
