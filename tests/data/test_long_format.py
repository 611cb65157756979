import numpy as np
import pyarrow as pa
import pytest

from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump
from mismatchctl.errors import DataError
from tests.factories.dump_files import MASK, ROLLOUT, TRAIN, batches, content, read, to_long, wide, write

pytestmark = pytest.mark.usefixtures("file_format")


def long(ids, positions, **extra):
    values = [-(n + 1) / 64 for n in range(len(ids))]
    return {ROLLOUT: values, TRAIN: values, "sequence_id": ids, "position": positions, **extra}


def refuse(path, *words, **options):
    with pytest.raises(DataError) as caught:
        content(open_dump([str(path)], **options))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    return caught.value


def skip(path, **options):
    dump, problems = open_dump([str(path)], on_bad="skip", **options), Problems()
    return content(dump, problems), problems


def test_units_end_at_sequence_boundaries(tmp_path):
    lengths = [3, 9, 1, 2, 4]
    columns = to_long(wide(lengths, step=[1, 1, 1, 2, 3], prompt_id=["a", "a", "b", "b", "b"]))
    dump = open_dump([write(tmp_path / "a.parquet", columns, rows=4)])
    assert dump.files[0].layout == "long"
    assert [(unit.row_group, unit.start, unit.rows) for unit in dump.units] == [(0, 0, 12), (3, 12, 7)]
    assert sum(unit.rows for unit in dump.units) == 19
    assert [unit.sequences for unit in dump.units] == [len(batch) for batch in batches(dump)]
    assert [unit.step_range for unit in dump.units] == [
        (min(batch.columns["step"]), max(batch.columns["step"])) for batch in batches(dump)
    ]
    backwards = [batch for unit in reversed(dump.units) for batch in dump.read(unit, Problems())]
    assert [len(batch) for batch in backwards][::-1] == [len(batch) for batch in batches(dump)]
    joined = content(dump)
    assert [len(tokens) for tokens in joined["rollout"]] == lengths
    assert joined["rows"] == [0, 3, 12, 13, 15]
    assert joined["prompt_id"] == ["a", "a", "b", "b", "b"]


def test_ids_can_repeat_in_other_steps_and_runs(tmp_path):
    columns = long([5, 5, 5, 5], [0, 1, 0, 0], step=[1, 1, 2, 3])
    assert [len(tokens) for tokens in read(write(tmp_path / "a.parquet", columns))["rollout"]] == [2, 1, 1]
    columns = long([5, 5, 5, 5], [0, 1, 0, 0], run=["x", "x", "y", "z"])
    assert read(write(tmp_path / "a.parquet", columns))["run"] == ["x", "y", "z"]
    for step in [1, 2]:
        write(tmp_path / f"h/step={step}/a.parquet", long([5, 5], [0, 1]))
    assert len(read(tmp_path / "h")["rollout"]) == 2


def test_equal_numbers_with_other_bits_are_no_change(tmp_path):
    other_nan = float(np.array([0xFFF8000000000001], np.uint64).view(np.float64)[0])
    rewards = [0.0, -0.0, np.nan, other_nan]
    path = write(tmp_path / "a.parquet", long([1, 1, 2, 2], [0, 1, 0, 1], reward=rewards))
    assert [len(tokens) for tokens in read(path)["rollout"]] == [2, 2]


def test_positions_are_kept(tmp_path):
    columns = long([1, 1, 1, 2, 2], [4, 5, 8, 2, 3])
    (batch,) = batches(open_dump([write(tmp_path / "a.parquet", columns)]))
    assert batch.position.tolist() == [0, 1, 4, 0, 1]
    columns = long([1, 1, 1, 2, 2], [4, 5, 6, 2, 3], **{MASK: [0, 1, 1, 0, 0]})
    (batch,) = batches(open_dump([write(tmp_path / "a.parquet", columns)]))
    assert batch.position is None
    assert batch.segments.offsets.tolist() == [0, 2, 2]
    columns["position"] = [4.0, 5.0, 7.0, 2.0, 3.0]
    (batch,) = batches(open_dump([write(tmp_path / "a.parquet", columns)]))
    assert batch.positions.tolist() == [0, 2]


def test_missing_long_columns_are_named(tmp_path):
    columns = long([1, 1], [0, 1])
    columns["pos"] = columns.pop("position")
    path = write(tmp_path / "a.parquet", columns)
    refuse(
        path,
        path,
        "missing required column position, which a file with one row per token needs",
        "columns={'position': 'NAME'}",
        "pos",
    )
    assert len(read(path, rename={"position": "pos"})["rollout"]) == 1


def test_scattered_sequences_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", long([1, 2, 1, 3], [0, 0, 1, 0]))
    error = refuse(
        path, "the rows of sequence 1 are not adjacent", "begin at row 0", "sort the rows by sequence_id and position"
    )
    assert (error.file, error.row, error.column) == (path, 2, "sequence_id")
    joined, problems = skip(path)
    assert joined["sequence_id"] == [2, 3]
    assert problems.counts == {(path, "sequence_id: rows not adjacent"): 2}


def test_sequences_in_two_files_are_refused(tmp_path):
    first = write(tmp_path / "d/a.parquet", long([1, 2, 2], [0, 0, 1]))
    second = write(tmp_path / "d/b.parquet", long([2, 3], [2, 0]))
    error = refuse(tmp_path / "d", "sequence 2 is also in", f"{first} (row 1)", "keep each sequence in one file")
    assert error.file == second
    assert error.row == 0
    joined, problems = skip(tmp_path / "d")
    assert joined["sequence_id"] == [1, 3]
    assert problems.sequences == 2
    runs = open_dump([first, second])
    assert len(content(runs)["rollout"]) == 4


@pytest.mark.parametrize(
    ("change", "row", "column", "words"),
    [
        ({"position": [0, 1, 1, 0, 1]}, 2, "position", ["position 1 follows 1", "sort the rows"]),
        ({"position": [0, 2, 1, 0, 1]}, 2, "position", ["position 1 follows 2"]),
        ({"position": [0, None, 2, 0, 1]}, 1, "position", ["position is missing"]),
        ({"sequence_id": [1, 1, 1, None, None]}, 3, "sequence_id", ["lacks sequence_id"]),
        ({"reward": [1.0, 1.0, 2.0, 0.0, 0.0]}, 2, "reward", ["reward changes within a sequence"]),
        ({"reward": [1.0, 1.0, 1.0, None, 0.0]}, 4, "reward", ["reward changes within a sequence"]),
        ({"prompt_id": ["a", "a", "b", "b", "b"]}, 2, "prompt_id", ["prompt_id changes within a sequence"]),
        ({"step": [1, 1, 2, 2, 2]}, 2, "step", ["step changes within a sequence"]),
        ({"step": [1, 1, 1, None, None]}, 3, "step", ["missing"]),
        ({ROLLOUT: [-1.0, -1.0, None, -1.0, -1.0]}, 2, ROLLOUT, ["null"]),
        ({TRAIN: [-1.0, -1.0, -1.0, -1.0, 0.5]}, 4, TRAIN, ["must not be above 0", "0.5"]),
        ({MASK: [1, 1, 1, 2, 1]}, 3, MASK, ["mask", "2"]),
    ],
)
@pytest.mark.parametrize("group", [None, 1, 2])
def test_bad_long_rows_are_reported(tmp_path, change, row, column, words, group):
    columns = {**long([1, 1, 1, 2, 2], [0, 1, 2, 0, 1]), **change}
    path = write(tmp_path / "a.parquet", columns, rows=group)
    error = refuse(path, *words)
    assert (error.file, error.row, error.column) == (path, row, column)
    joined, problems = skip(path)
    assert problems.files == {}
    assert problems.sequences + len(joined["rows"]) == (3 if words == ["step changes within a sequence"] else 2)
    assert problems.examples[next(iter(problems.counts))].row == row


def test_missing_rewards_are_nan(tmp_path):
    columns = long([1, 1, 2], [0, 1, 0], reward=pa.array([None, None, 1.0]))
    assert str(read(write(tmp_path / "a.parquet", columns))["reward"]) == "[nan, 1.0]"
    columns["reward"] = [float("nan"), float("nan"), 1.0]
    assert str(read(write(tmp_path / "a.parquet", columns))["reward"]) == "[nan, 1.0]"


def test_string_ids_and_dictionaries_are_read(tmp_path):
    ids = pa.array(["x", "x", "y", "z", "z"]).dictionary_encode()
    path = write(tmp_path / "a.parquet", long(ids, [0, 1, 0, 0, 1]), rows=2)
    assert read(path)["sequence_id"] == ["x", "y", "z"]


def test_long_token_ids_are_read(tmp_path):
    columns = to_long(wide((3, 2), token_ids=[[1, 2, 3], [4, 5]], **{MASK: [[0, 1, 1], [1, 1]]}))
    dump = open_dump([write(tmp_path / "a.parquet", columns, rows=2)])
    rows = content(dump)["rows"]
    found = dump.token_ids(0, rows)
    assert {row: values.tolist() for row, values in found.items()} == {0: [2, 3], 3: [4, 5]}


def test_long_columns_per_token_and_sequence_are_read(tmp_path):
    columns = long([1, 1, 2], [0, 1, 0], advantages=[1, 2, 3], entropy=[0.5, 0.25, 1.0], worker=["a", "a", "b"])
    dump = open_dump([write(tmp_path / "a.parquet", columns)], wanted=["advantages", "entropy", "worker"])
    (batch,) = batches(dump)
    assert batch.advantages.tolist() == [1, 2, 3]
    assert batch.columns["worker"].tolist() == ["a", "b"]
    assert "entropy" not in batch.columns


def test_empty_long_files_are_read(tmp_path):
    schema = pa.schema({ROLLOUT: pa.float32(), TRAIN: pa.float32(), "sequence_id": pa.int64(), "position": pa.int64()})
    path = write(tmp_path / "a.parquet", schema.empty_table())
    dump = open_dump([path])
    assert (dump.units, dump.files[0].layout) == ((), "long")
