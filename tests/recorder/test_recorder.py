"""The recorder writes what it gets, in complete files."""

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.core.schema import COLUMNS, ColumnKind
from mismatchctl.core.schema import NESTED_KINDS as CONTRACT_NESTED
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump
from mismatchctl.recorder.recorder import EXPERT_COLUMNS, NESTED_COLUMNS, Recorder

RAGGED = [np.array([-0.5, -1.0, -0.25], np.float32), np.array([], np.float32), np.array([-2.0], np.float32)]


def record(folder: Path, **columns: Any) -> pa.Table:
    with Recorder(folder) as recorder:
        path = recorder.write(**{"step": 0, **columns})
    return pq.read_table(path)


def test_ragged_rows_are_read_back(tmp_path: Path) -> None:
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


def test_padding_is_removed_and_masked_gaps_are_kept(tmp_path: Path) -> None:
    rollout = np.array([[np.nan, -1, -2, -3], [-4, -5, -6, np.inf], [7, 7, 7, 7]], np.float32)
    table = record(
        tmp_path,
        rollout_log_probs=rollout,
        train_log_probs=[[-1.5, -2.5, -3.5], [-4.5], []],  # the responses alone
        response_mask=np.array([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4]),
        token_ids=[[0, 1, 2, 3], [4, 0, 0, 0], [0, 0, 0, 0]],  # padded alike
    )
    assert table["rollout_log_probs"].to_pylist() == [[-1, -2, -3], [-4], []]
    assert table["train_log_probs"].to_pylist() == [[-1.5, -2.5, -3.5], [-4.5], []]
    assert table["response_mask"].to_pylist() == [[True, False, True], [True], []]
    assert table["token_ids"].to_pylist() == [[1, 2, 3], [4], []]


def test_masks_given_as_lists_keep_whole_rows(tmp_path: Path) -> None:
    rows = [[-1.0, -2.0, -3.0], [-4.0]]
    table = record(tmp_path, rollout_log_probs=rows, train_log_probs=rows, response_mask=[[0, 1, 0], [1]])
    assert table["rollout_log_probs"].to_pylist() == rows
    assert table["response_mask"].to_pylist() == [[False, True, False], [True]]


def test_expert_ids_are_recorded(tmp_path: Path) -> None:
    flat = [[[0, 7, 3, 1], [2, 300, 3, 1]], [], [[5, 6, 7, 0]]]
    layered = np.zeros((3, 4, 2, 2), np.int64)  # left-padded: layers of two experts each
    layered[0, 2:] = np.reshape(flat[0], (2, 2, 2))
    layered[2, 3:] = np.reshape(flat[2], (1, 2, 2))
    mask = np.array([[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]])
    rows = [[-1.0, -2.0], [], [-3.0]]
    table = record(
        tmp_path,
        rollout_log_probs=rows,
        train_log_probs=rows,
        response_mask=mask,
        rollout_experts=layered,
        train_experts=flat,
    )
    assert table["rollout_experts"].to_pylist() == table["train_experts"].to_pylist() == flat


def test_ids_of_many_types_are_recorded(tmp_path: Path) -> None:
    table = record(
        tmp_path,
        rollout_log_probs=RAGGED,
        train_log_probs=RAGGED,
        prompt_id=np.array(["a\0", "b", "c"], object),  # like verl's uid
        sequence_id=(5, 6, 7),
        rollout_ids=np.array([1, 1, 2], np.uint8),
        split="train",
        solved=[True, False, True],
    )
    assert table["prompt_id"].to_pylist() == ["a\0", "b", "c"]
    assert table["sequence_id"].to_pylist() == [5, 6, 7]
    assert table["rollout_ids"].to_pylist() == [1, 1, 2]
    assert table["split"].to_pylist() == ["train"] * 3
    assert table["solved"].to_pylist() == [True, False, True]


def test_the_original_dtype_is_stored_with_exact_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = -torch.rand(2, 4, generator=torch.Generator().manual_seed(1))
    table = record(
        tmp_path,
        rollout_log_probs=values.bfloat16(),
        train_log_probs=list(values.half().numpy()),
        current_log_probs=values.double(),
        response_mask=torch.ones(2, 4),
        reward=[0.0, 1.0],
    )
    kinds = {field.name: (field.metadata or {}).get(b"dtype") for field in table.schema}
    assert kinds["rollout_log_probs"] == b"bfloat16"
    assert kinds["train_log_probs"] == b"float16"
    assert kinds["current_log_probs"] == b"float64"
    assert kinds["response_mask"] is None and kinds["reward"] is None
    assert table["rollout_log_probs"].to_pylist() == values.bfloat16().double().tolist()
    assert table["train_log_probs"].to_pylist() == values.half().double().tolist()


def test_none_adds_no_column(tmp_path: Path) -> None:
    table = record(tmp_path, rollout_log_probs=RAGGED, train_log_probs=RAGGED, ref_log_probs=None, reward=None)
    assert table.column_names == ["step", "rollout_log_probs", "train_log_probs"]


def test_tensors_without_numpy_data_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for tensor in (torch.zeros(3, 1, device="meta"), torch.zeros(3, 1).to_sparse()):
        with pytest.raises(ValueError, match="train_log_probs: "):
            record(tmp_path, rollout_log_probs=RAGGED, train_log_probs=tensor, response_mask=np.ones((3, 1)))


def test_empty_writes_create_no_file(tmp_path: Path) -> None:
    with Recorder(tmp_path / "dumps") as recorder:
        assert recorder.write(step=0, rollout_log_probs=[], train_log_probs=[], reward=[]) is None
        empty = np.zeros((0, 7))
        assert recorder.write(step=0, rollout_log_probs=empty, train_log_probs=empty, response_mask=empty) is None
        rows = recorder.write(
            step=0, rollout_log_probs=np.zeros((2, 0)), train_log_probs=[[], []], response_mask=np.zeros((2, 0))
        )
    assert rows is not None and pq.read_table(rows)["train_log_probs"].to_pylist() == [[], []]


def test_inputs_can_change_after_write(tmp_path: Path) -> None:
    rollout, reward = np.full((1, 3), -1.0, np.float32), np.zeros(1)
    with Recorder(tmp_path, file_bytes=1 << 20) as recorder:
        recorder.write(step=0, rollout_log_probs=list(rollout), train_log_probs=list(rollout), reward=reward)
        rollout[:], reward[:] = -9, 9
    table = pq.read_table(tmp_path / "step_00000.parquet")
    assert table["rollout_log_probs"].to_pylist() == [[-1, -1, -1]] and table["reward"].to_pylist() == [0]


def test_torch_tensors_are_recorded(tmp_path: Path) -> None:
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

    def cut(padded: Any) -> list[list[float]]:
        first, *others = padded.tolist()
        return [first[2:], *others]

    assert table["rollout_log_probs"].to_pylist() == cut(rollout.detach().bfloat16().float())
    assert table["train_log_probs"].to_pylist() == table["ref_log_probs"].to_pylist() == cut(rollout)
    assert table["current_log_probs"].to_pylist() == cut(rollout.detach().half().float())
    assert table["response_mask"].to_pylist() == cut(mask.bool())
    assert table["token_ids"].to_pylist() == cut(torch.arange(15).reshape(3, 5))
    assert table["advantages"].to_pylist() == [1.0, -1.0, 0.5]
    assert table["step"].to_pylist() == [4, 4, 4]


def test_nested_tensors_are_recorded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rows = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    for number, layout in enumerate((torch.jagged, torch.strided)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that nested tensors are a prototype
            nested = torch.nested.nested_tensor(rows, layout=layout, dtype=torch.bfloat16)
        masks = torch.nested.nested_tensor([torch.tensor([0, 1]), torch.tensor([1])], layout=torch.jagged)
        table = record(tmp_path / str(number), rollout_log_probs=nested, train_log_probs=rows, response_mask=masks)
        assert table["rollout_log_probs"].to_pylist() == [[-1.0, -2.0], [-3.0]]
        assert table["response_mask"].to_pylist() == [[False, True], [True]]


def test_columns_have_the_documented_types(tmp_path: Path) -> None:
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


def test_parquet_files_have_the_documented_settings(tmp_path: Path) -> None:
    rows = [np.linspace(-1, -0.1, 1024, dtype=np.float32)] * 2049
    with Recorder(tmp_path, run="a") as recorder:
        path = recorder.write(step=3, rollout_log_probs=rows, train_log_probs=rows, reward=np.zeros(2049))
    file = pq.ParquetFile(path)
    assert not any(field.nullable for field in file.schema_arrow)
    assert not file.schema_arrow.field("rollout_log_probs").type.value_field.nullable
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [1024, 1024, 1]
    group = file.metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert not any(column.has_dictionary_page for column in columns.values())
    assert columns["step"].statistics.min == columns["step"].statistics.max == 3
    assert not any(column.is_stats_set for name, column in columns.items() if name != "step")
    for name in ("rollout_log_probs.list.element", "train_log_probs.list.element", "reward"):
        assert "BYTE_STREAM_SPLIT" in columns[name].encodings
    assert pq.read_table(path, page_checksum_verification=True)["run"].to_pylist() == ["a"] * 2049


TWO = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"train_log_probs": RAGGED[:2]}, "train_log_probs: 2 rows, but there are 3 sequences"),
        ({"train_log_probs": [*RAGGED[:2], [-1.0, -2.0]]}, "train_log_probs: row 2 has 2 values.* has 1"),
        ({"token_ids": [[1, 2, 3], [], [4, 5]]}, "token_ids: row 2 has 2 values"),
        ({"token_ids": [[1.5, 2.0, 3.0], [], [4.0]]}, "token_ids: needs integers"),
        ({"response_mask": [[1, 2, 1], [], [0]]}, "response_mask: needs zeros and ones"),
        ({"response_mask": [1, 1, 1]}, "response_mask: needs one list of values per sequence"),
        ({"rollout_log_probs": -0.5}, "rollout_log_probs: needs one list"),
        ({"rollout_log_probs": []}, "train_log_probs: 3 rows, but there are 0 sequences"),
        ({"rollout_log_probs": TWO, "response_mask": np.ones((2, 4))}, "row 0 has 3 values, but response_mask has 4"),
        (
            {"rollout_log_probs": TWO, "train_log_probs": [[0.0], [0.0]], "response_mask": [[1, 0, 0], [1, 1, 0]]},
            "train_log_probs: row 0 has 1 values, but response_mask has 3",
        ),
        (
            {
                "rollout_log_probs": TWO,
                "train_log_probs": [[0.0], [0.0]],
                "response_mask": np.array([[1, 0, 0], [1, 1, 0]]),
            },
            r"row 1 has 1 values, but response_mask has 3 \(2 of them from the first to the last valid token\)",
        ),
        ({"rollout_experts": [[[1, 2], [1, 2], [1, 2]], [], [[1]]]}, "rollout_experts: needs the same number"),
        ({"rollout_experts": [[[70_000]] * 3, [], [[1]]]}, "rollout_experts: needs expert ids below 32,768, got 70000"),
        ({"prompt_id": ["a", 1, "b"]}, "prompt_id: "),
        ({"prompt_id": 2**70}, "prompt_id: "),
        ({"rollout_log_probs": TWO, "train_log_probs": TWO}, "response_mask: missing"),
        ({"reward": [1.0, 2.0]}, "reward: 2 rows, but there are 3 sequences"),
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
        ({"prompt_id": ["a", "\udc80", "b"]}, "prompt_id: .*surrogates"),
        ({"rollout_log_probs": [[[0.0], [0.0, 1.0]], [], []]}, "rollout_log_probs: "),
        (
            {"rollout_log_probs": None, "train_log_probs": None},
            "rollout_log_probs: needs one list of values per sequence, got None",
        ),
        ({"step": -1}, "step: -1 is negative"),
        ({"step": 2**63}, "step: 9223372036854775808 is too large"),
        ({"step": 1.5}, "step: needs a whole number, got 1.5"),
    ],
)
def test_wrong_shapes_are_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    given = {"rollout_log_probs": RAGGED, "train_log_probs": RAGGED, **columns}
    with pytest.raises(ValueError, match=message):
        record(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_expert_columns_match_the_schema() -> None:
    assert {column.name for column in COLUMNS if column.kind is ColumnKind.EXPERTS} == set(EXPERT_COLUMNS)
    assert {column.name for column in COLUMNS if column.kind in CONTRACT_NESTED} == set(NESTED_COLUMNS)


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[tuple[int, float, float, int]]]]:
    """Draw arguments of `write`, with (position, rollout, train, token id) of the valid tokens by sequence."""
    torch = pytest.importorskip("torch")
    masks = draw(st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=5))
    width = max(map(len, masks)) + draw(st.integers(0, 2))
    left = draw(st.booleans())
    padded_mask = draw(st.booleans())
    values = iter(range(1, 10_000))

    def fill() -> list[list[int]]:
        return [[next(values) % 128 for _ in mask] for mask in masks]

    def pad(rows: list[list[Any]], filler: float) -> np.ndarray:
        spare = [[filler] * (width - len(row)) for row in rows]
        return np.array([gap + row if left else row + gap for row, gap in zip(rows, spare, strict=True)])

    def part(mask: list[bool], row: list[Any]) -> list[Any]:
        valid = [place for place, flag in enumerate(mask) if flag]
        return row[valid[0] : valid[-1] + 1] if valid else []

    def give(rows: list[list[Any]], dtypes: list[Any], filler: float) -> Any:
        """Return the rows in a form of a framework: padded with the mask, or the response alone."""
        form = draw(st.sampled_from(("padded", "padded rows", "response") if padded_mask else ("rows", "nested")))
        dtype = draw(st.sampled_from(dtypes))
        in_torch = isinstance(dtype, torch.dtype)
        if form in ("padded", "padded rows"):
            padded = pad(rows, filler)
            array = torch.tensor(padded).to(dtype) if in_torch else padded.astype(dtype)
            return array if form == "padded" else list(array)
        if form == "response":
            rows = [part(mask, row) for mask, row in zip(masks, rows, strict=True)]
        if form == "nested":
            tensors = [torch.tensor(row, dtype=dtype if in_torch else torch.float32) for row in rows]
            return torch.nested.nested_tensor(tensors, layout=torch.jagged)
        if draw(st.booleans()):
            return rows
        return [torch.tensor(row, dtype=dtype) if in_torch else np.array(row, dtype) for row in rows]

    # Multiples of 0.5 up to 64 are exact in every type, including bfloat16.
    floats = [torch.float64, torch.float32, torch.bfloat16, torch.float16, np.float64, np.float32, np.float16]
    rollout, train = ([[-value / 2 for value in row] for row in fill()] for _ in range(2))
    tokens = fill()
    arguments = {
        "rollout_log_probs": give(rollout, floats, float("nan")),
        "train_log_probs": give(train, floats, 7.0),
        "current_log_probs": give(train, floats, float("inf")),
        "token_ids": give(tokens, [np.int64, torch.int32], 0) if padded_mask else tokens,
        "sequence_id": draw(st.sampled_from((list, np.array, torch.tensor)))(list(range(len(masks)))),
    }
    if padded_mask:
        kind = draw(st.sampled_from((np.bool_, np.int64, np.float32)))
        arguments["response_mask"] = pad([[int(flag) for flag in mask] for mask in masks], 0).astype(kind)
    else:
        arguments["response_mask"] = [[int(flag) for flag in mask] for mask in masks]
    expected = [
        [
            (place - mask.index(True), *cells)
            for place, (valid, *cells) in enumerate(zip(mask, *row, strict=True))
            if valid
        ]
        for mask, *row in zip(masks, rollout, train, tokens, strict=True)
    ]
    return arguments, expected


@pytest.mark.slow
@settings(max_examples=60)
@given(
    written=st.lists(calls(), min_size=1, max_size=3),
    file_bytes=st.sampled_from((0, 200)),
    background=st.integers(0, 2),
)
def test_any_mixture_of_arguments_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, written: list[Any], file_bytes: int, background: int
) -> None:
    folder = tmp_path_factory.mktemp("dump")
    with Recorder(folder, run="a", file_bytes=file_bytes, background=background) as recorder:
        for step, (arguments, _) in enumerate(written):
            recorder.write(step=step, **arguments)
    dump = open_dump([str(folder)], wanted=["current_log_probs"])
    found: dict[tuple[int, int], list[tuple[int, float, float, int]]] = {}
    for unit in dump.units:
        for batch in dump.read(unit, Problems()):
            ids = dump.token_ids(unit.file.index, batch.rows.tolist())
            assert batch.current is not None and np.array_equal(batch.current, batch.train)
            for index, (start, stop) in enumerate(pairwise(batch.segments.offsets)):
                key = int(batch.columns["step"][index]), int(batch.columns["sequence_id"][index])
                tokens = ids[int(batch.rows[index])].tolist()
                columns = (batch.positions, batch.rollout, batch.train)
                found[key] = list(zip(*(column[start:stop].tolist() for column in columns), tokens, strict=True))
    assert found == {
        (step, sequence): tokens for step, (_, rows) in enumerate(written) for sequence, tokens in enumerate(rows)
    }


@pytest.mark.parametrize(("missing", "there"), [("rollout", "train"), ("train", "rollout")])
def test_one_sided_log_probs_are_recorded_with_one_warning(
    missing: str, there: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training continues without the missing log-probs."""
    with Recorder(tmp_path) as recorder:
        for step in (1, 2):
            sides = {f"{missing}_log_probs": None, f"{there}_log_probs": [[-1.0, -2.0], [-3.0]]}
            recorder.write(step=step, **sides)
    names = pq.read_table(tmp_path).column_names
    assert f"{there}_log_probs" in names
    assert f"{missing}_log_probs" not in names
    assert [record.message for record in caplog.records] == [
        f"{missing}_log_probs is None: only {there}_log_probs is recorded, so no comparison is possible (does the "
        "engine return log-probs, and does the trainer recompute them?)"
    ]


def test_sampling_masks_are_recorded_as_sizes(tmp_path: Path) -> None:
    table = record(
        tmp_path,
        rollout_log_probs=RAGGED,
        train_log_probs=RAGGED,
        sampling_mask=[[[5, 7], [5], [1, 2, 3]], [], [[9]]],
    )
    assert table["kept_tokens"].to_pylist() == [[2, 1, 3], [], [1]]
    assert "sampling_mask" not in table.column_names
    with pytest.raises(ValueError, match="kept_tokens: row 0 has 1 values"):
        record(tmp_path, rollout_log_probs=RAGGED, train_log_probs=RAGGED, sampling_mask=[[[5]], [], [[9]]])
    with pytest.raises(ValueError, match="sampling_mask: "):
        record(tmp_path, rollout_log_probs=RAGGED, train_log_probs=RAGGED, sampling_mask=[[5, 5, 5], [], [9]])
