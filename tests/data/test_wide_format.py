import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.data import blocks as wide_module
from mismatchctl.data.formats import ListColumn
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump
from mismatchctl.errors import ConfigError
from tests.factories.dump_files import MASK, ROLLOUT, TRAIN, batches, content, lists, read, to_long, wide, write

pytestmark = pytest.mark.usefixtures("file_format")


def test_the_simplest_dump_is_read(tmp_path):
    path = write(tmp_path / "a.parquet", wide((3, 0, 2), step=[1, 1, 2], sequence_id=[7, 8, 9]))
    dump = open_dump([path])
    (file,) = dump.files
    assert (file.layout, file.rows, file.contents.rows, file.run) == ("wide", 3, (3,), "a")
    assert file.size == Path(path).stat().st_size
    assert file.columns == {name: name for name in [ROLLOUT, TRAIN, "step", "sequence_id"]}
    assert file.types["step"] == pa.int64()
    (unit,) = dump.units
    assert (unit.index, unit.row_group, unit.rows) == (0, 0, 3)
    (batch,) = dump.read(unit, Problems())
    assert batch.segments.offsets.tolist() == [0, 3, 3, 5]
    assert batch.rollout.dtype == np.float32
    assert batch.rollout.tolist() == [0, -1 / 64, -2 / 64, -3 / 64, -4 / 64]
    assert (batch.train == batch.rollout - np.float32(0.25)).all()
    assert batch.position is None
    assert batch.current is batch.advantages is None
    assert batch.rows.tolist() == [0, 1, 2]
    assert {name: values.dtype for name, values in batch.columns.items()} == {
        "step": np.dtype("int64"), "sequence_id": np.dtype("int64"), "run": np.dtype("O")
    }  # fmt: skip


def test_fully_valid_tokens_are_not_copied(tmp_path):
    path = write(tmp_path / "a.parquet", wide((3, 2), **{MASK: [[True] * 3, [True] * 2]}))
    (batch,) = batches(open_dump([path]))
    assert not batch.rollout.flags.owndata
    assert not batch.rollout.flags.writeable  # the array uses Arrow's memory without a copy


@pytest.mark.parametrize("value", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 2)])
def test_float_and_list_types_are_read(tmp_path, value, shape):
    rows = [np.array([-0.5, -1.0], value), np.array([-2.0, -0.25], value)]
    columns = {name: lists(rows, shape(pa.from_numpy_dtype(value))) for name in (ROLLOUT, TRAIN)}
    (batch,) = batches(open_dump([write(tmp_path / "a.parquet", columns)]))
    assert batch.rollout.dtype == value
    assert batch.rollout.tolist() == [-0.5, -1.0, -2.0, -0.25]


@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.uint8, np.int64, np.float16, np.float32, np.float64])
def test_mask_types_are_read(tmp_path, kind):
    rows = [np.array(row).astype(kind) for row in ([0, 1, 0], [1, 1])]
    native = pa.array(rows, pa.list_(pa.from_numpy_dtype(kind)))
    result = read(write(tmp_path / "a.parquet", wide((3, 2), **{MASK: native})))
    assert result["rollout"] == [[-1 / 64], [-3 / 64, -4 / 64]]
    assert result["positions"] == [[0], [0, 1]]


def test_masked_positions_can_contain_any_value(tmp_path):
    columns = {
        ROLLOUT: lists([[np.nan, -1, 5, None, -2], [np.inf]]),
        TRAIN: lists([[None, -1, np.inf, np.nan, -2], [-np.inf]]),
        MASK: [[0, 1, 0, 0, 1], [0]],
    }
    result = read(write(tmp_path / "a.parquet", columns))
    assert result["rollout"] == [[-1, -2], []]
    assert result["positions"] == [[0, 3], []]


def test_positions_are_kept_only_with_masked_gaps(tmp_path):
    path = write(tmp_path / "a.parquet", wide((4, 3), **{MASK: [[0, 1, 1, 0], [0, 0, 1]]}))
    (batch,) = batches(open_dump([path]))
    assert batch.position is None
    path = write(tmp_path / "a.parquet", wide((4, 3), **{MASK: [[0, 1, 0, 1], [0, 0, 1]]}))
    (batch,) = batches(open_dump([path]))
    assert batch.position.tolist() == [0, 2, 0]
    assert batch.position.dtype == np.int64


def test_only_needed_columns_are_read(tmp_path):
    extra = {
        "current_log_probs": lists([[-1.0, -2.0]]),
        "advantages": lists([[0.5, 0.25]]),
        "worker": ["w"],
        "temperature": [0.7],
        "entropy": [1.5],
        "ref_log_probs": lists([[-1.0, -2.0]]),
    }
    path = write(tmp_path / "a.parquet", wide((2,), **extra))
    (batch,) = batches(open_dump([path]))
    assert batch.current is batch.advantages is None
    assert set(batch.columns) == {"run"}
    wanted = ["current_log_probs", "advantages", "worker", "entropy", "ref_log_probs", "reward"]
    (batch,) = batches(open_dump([path], wanted=wanted, by=["temperature", "worker"]))
    assert batch.current.tolist() == [-1, -2]
    assert batch.advantages.tolist() == [0.5, 0.25]
    assert set(batch.columns) == {"run", "worker", "entropy", "temperature"}


def test_scalar_advantages_are_repeated(tmp_path):
    path = write(tmp_path / "a.parquet", wide((2, 0, 1), advantages=[1.5, None, -2.0]))
    (batch,) = batches(open_dump([path], wanted=["advantages"]))
    assert batch.advantages.tolist() == [1.5, 1.5, -2.0]


def test_scalar_columns_are_read(tmp_path):
    extra = {
        "reward": pa.array([1, None, 3], pa.int32()),
        "prompt_id": pa.array(["p", "q", "p"]).dictionary_encode(),
        "sequence_id": pa.array([2**63 + 5, 1, 2], pa.uint64()),
        "step": pa.array([1.0, 2.0, 3.0]),
        "worker": pa.array([4.0, None, 5.0]),
        "micro_batch": pa.array([1, None, 2]),
        "flag": [True, None, False],
        "when": pa.array([0, None, 1], pa.timestamp("s")),
        "count": pa.array([1, 2, 3], pa.uint64()),
        "gone": pa.array([1, None, 3]),
        "blob": pa.array([b"ok", None, b"\xff"]),
    }
    by = ["flag", "when", "count", "gone", "blob"]
    path = write(tmp_path / "a.parquet", wide((1, 1, 1), **extra))
    (batch,) = batches(open_dump([path], wanted=["worker"], by=by))
    values = {name: column.tolist() for name, column in batch.columns.items()}
    np.testing.assert_array_equal(batch.columns["reward"], [1, np.nan, 3])
    np.testing.assert_array_equal(batch.columns["gone"], [1, np.nan, 3])
    assert values["prompt_id"] == ["p", "q", "p"]
    assert values["sequence_id"] == [2**63 + 5, 1, 2]
    assert (batch.columns["step"].dtype, values["step"]) == (np.int64, [1, 2, 3])
    assert values["worker"] == [4, None, 5]
    assert values["micro_batch"] == [1, None, 2]
    assert values["flag"] == [True, None, False]
    assert values["when"] == ["1970-01-01 00:00:00", None, "1970-01-01 00:00:01"]
    assert batch.columns["count"].dtype == np.int64
    assert values["blob"] == ["ok", None, "\\xff"]


def test_non_utf8_strings_are_read(tmp_path):
    names = pa.array([b"a\xff", b"b"]).view(pa.string())
    path = write(tmp_path / "a.parquet", wide((1, 1), prompt_id=names))
    assert read(path)["prompt_id"] == ["a\\xff", "b"]


def test_dumps_can_be_pickled(tmp_path):
    dump = open_dump([write(tmp_path / "a.parquet", wide(step=[1, 2]))])
    assert content(pickle.loads(pickle.dumps(dump))) == content(dump)


def test_sliced_list_arrays_are_read():
    offsets, values = pa.array([0, 2, 5, 6, 8], pa.int32()), pa.array(range(8), pa.float32())
    hidden = pa.ListArray.from_arrays(offsets, values, mask=pa.array([False, True, False, False]))
    fixed = pa.FixedSizeListArray.from_arrays(values, 2, mask=pa.array([False, True, False, False]))
    for array, expected in [(hidden, [[0, 1], None, [5], [6, 7]]), (fixed, [[0, 1], None, [4, 5], [6, 7]])]:
        for start in range(4):
            own = ListColumn.of(array.slice(start))
            flat = [value for row in expected[start:] if row for value in row]
            assert own.flat(None).to_pylist() == flat
            assert own.lengths.tolist() == [len(row or ()) for row in expected[start:]]
            keep = np.array([row is not None and len(row) > 1 for row in expected[start:]])
            kept = [value for row in expected[start:] if row and len(row) > 1 for value in row]
            assert own.flat(keep).to_pylist() == kept


@pytest.mark.skipif(not hasattr(pa, "list_view"), reason="this pyarrow has no list views")
def test_list_views_are_read(tmp_path):
    values = pa.array([-3, -1, -2], pa.float32())  # out of order, because views can have any offset
    rows = pa.ListViewArray.from_arrays(pa.array([1, 0, 0]).cast("int32"), pa.array([2, 0, 1]).cast("int32"), values)
    try:
        path = write(tmp_path / "a.parquet", {ROLLOUT: rows, TRAIN: rows})
    except pa.ArrowNotImplementedError:
        pytest.skip("this pyarrow can't write them")
    assert read(path)["rollout"] == [[-1, -2], [], [-3]]


def test_fixed_size_lists_with_null_rows_are_read(tmp_path):
    rows = pa.array([[-1, -2], None, [-3, -4]], pa.list_(pa.float32(), 2))
    try:
        path = write(tmp_path / "a.parquet", {ROLLOUT: rows, TRAIN: rows})
        if path.endswith(".parquet"):
            pq.read_table(path)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        pytest.skip("this pyarrow can't write them, or not read what it wrote")
    assert read(path, on_bad="skip")["rollout"] == [[-1, -2], [-3, -4]]


def test_bool_and_decimal_rewards_are_numbers(tmp_path):
    path = write(tmp_path / "a.parquet", wide((1, 1), reward=[True, None]))
    np.testing.assert_array_equal(read(path)["reward"], [1, np.nan])
    path = write(tmp_path / "a.parquet", wide((1, 1), reward=pa.array([1, 2], pa.decimal128(5, 2))))
    assert read(path)["reward"] == [1, 2]


def test_impossible_breakdown_columns_are_refused(tmp_path):
    path = write(tmp_path / "a.parquet", wide((2,), temperature=[1.0], token_ids=[[1, 2]]))
    with pytest.raises(ConfigError, match=r"by='temprature': no file has.*did you mean 'temperature'"):
        open_dump([path], by=["temprature"])
    with pytest.raises(ConfigError, match="by='token_ids': the column contains lists of numbers"):
        open_dump([path], by=["token_ids"])
    path = write(tmp_path / "b.parquet", to_long(wide((2,), token_ids=[[1, 2]])))
    with pytest.raises(ConfigError, match="by='token_ids': the column contains one value per token"):
        open_dump([path], by=["token_ids"])
    path = write(tmp_path / "c.parquet", wide((2,), turn=["a"]))
    with pytest.raises(ConfigError, match=r"by='turn': the column contains text .* rename the column"):
        open_dump([path], by=["turn"])


def test_a_breakdown_column_of_a_wrong_type_is_ignored_if_another_file_has_it(tmp_path):
    for name, turn in (("d/1.parquet", 3), ("d/2.parquet", "a")):
        write(tmp_path / name, wide((2,), turn=[turn]))
    dump = open_dump([str(tmp_path / "d")], by=["turn"])
    assert (content(dump)["turn"], len(content(dump)["train"])) == ([3], 2)
    assert any("turn is ignored, because it contains text" in warning for warning in dump.warnings)


def test_step_ranges_are_known_before_reading(tmp_path, file_format, monkeypatch):
    path = write(tmp_path / "a.parquet", wide((1,) * 5, step=[3, 4, 4, 4, 9]), rows=2)
    for together, steps in ((1, [(3, 4), (4, 4), (9, 9)]), (4, [(3, 4), (9, 9)]), (5, [(3, 9)])):
        monkeypatch.setattr("mismatchctl.data.catalog.UNIT_TOKENS", together)
        known = [None] * len(steps) if file_format == "stream" else steps
        units = open_dump([path]).units
        assert [unit.step_range for unit in units] == known
        assert (sum(unit.rows for unit in units), sum(unit.tokens for unit in units)) == (5, 5)
    path = write(tmp_path / "a.parquet", wide((1,) * 2, step=[3, 4]), write_statistics=False)
    assert open_dump([path]).units[0].step_range is None
    path = write(tmp_path / "a.parquet", wide((1,) * 2, step=["a", "b"]))
    assert open_dump([path]).units[0].step_range is None


def test_large_row_groups_are_read_in_parts(tmp_path, monkeypatch):
    columns = wide(range(40), **{MASK: [[n % 3 > 0] * n for n in range(40)]})
    path = write(tmp_path / "a.parquet", columns)
    whole = read(path)
    monkeypatch.setattr(wide_module, "BATCH_TOKENS", 100)
    dump = open_dump([path])
    assert len(list(batches(dump))) > 5
    assert content(dump) == whole
    assert whole["rows"] == list(range(40))


def test_empty_files_and_rows_are_read(tmp_path):
    write(tmp_path / "d/a.parquet", wide(()))
    write(tmp_path / "d/b.parquet", {ROLLOUT: pa.array([[], []]), TRAIN: pa.array([[], []])})
    write(tmp_path / "d/c.parquet", wide((2,)))
    assert read(tmp_path / "d")["rollout"] == [[], [], [0, -1 / 64]]


def test_aliases_and_renames_are_applied(tmp_path):
    columns = wide((2,))
    aliased = {"rollout_logprobs": columns[ROLLOUT], "old_log_probs": columns[TRAIN], "loss_mask": [[0, 1]]}
    aliases = {"rollout_logprobs": ROLLOUT, "old_log_probs": TRAIN, "loss_mask": MASK, "prev_logprobs": TRAIN}
    path = write(tmp_path / "a.parquet", aliased)
    dump = open_dump([path], aliases=aliases)
    assert dump.files[0].columns == {ROLLOUT: "rollout_logprobs", TRAIN: "old_log_probs", MASK: "loss_mask"}
    assert content(dump)["rollout"] == [[-1 / 64]]
    dump = open_dump([path], rename={ROLLOUT: "rollout_logprobs", TRAIN: "old_log_probs"})
    assert content(dump)["rollout"] == [[0, -1 / 64]]
    # The canonical name wins over an alias, and --column over both.
    both = {**columns, "old_log_probs": lists([[-7.0, -8.0]])}
    path = write(tmp_path / "b.parquet", both)
    assert read(path, aliases=aliases)["train"] == [[-0.25, -0.25 - 1 / 64]]
    assert read(path, aliases=aliases, rename={TRAIN: "old_log_probs"})["train"] == [[-7, -8]]


def test_columns_with_dots_and_nested_columns_are_read(tmp_path):
    columns = wide((2,))
    dotted = {
        "actor.train": columns[TRAIN],
        "actor": [1],
        "a": pa.array([{"x": 1}]),
        ROLLOUT: columns[ROLLOUT],
    }
    path = write(tmp_path / "a.parquet", dotted)
    assert read(path, rename={TRAIN: "actor.train"}, by=["actor"])["actor"] == [1]


def test_token_ids_are_read(tmp_path, monkeypatch):
    ids = [[1, 2, 3], [4, None], [5], None, [6, 7]]
    masks = [[0, 1, 1], [1, 1], [1], [1], [1]]
    columns = wide((3, 2, 1, 1, 2), token_ids=pa.array(ids, pa.list_(pa.int32())), **{MASK: masks})
    path = write(tmp_path / "a.parquet", columns, rows=2)
    dump = open_dump([path])
    found = dump.token_ids(0, [0, 1, 2, 3, 4, 99])
    assert {row: values.tolist() for row, values in found.items()} == {0: [2, 3], 2: [5]}
    assert dump.token_ids(0, []) == {}
    assert open_dump([write(tmp_path / "b.parquet", wide())]).token_ids(0, [0]) == {}


RAGGED = st.lists(
    st.lists(st.tuples(st.integers(-99, 0), st.integers(-99, 0), st.booleans()), max_size=6),
    min_size=1,
    max_size=9,
)


def _columns(rows, left=0, right=0):
    """Return columns of (rollout, train, valid) tokens, padded with values that must not matter."""
    padded = [[(9, np.nan, False)] * left + row + [(np.inf, None, False)] * right for row in rows]
    names = [ROLLOUT, TRAIN, MASK]
    kinds = [pa.float32(), pa.float32(), pa.bool_()]
    return {
        name: lists([[token[i] for token in row] for row in padded], pa.list_(kind))
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
    }


@pytest.mark.slow
@settings(max_examples=20, derandomize=True)
@given(rows=RAGGED, left=st.integers(0, 3), right=st.integers(0, 3), group=st.integers(1, 4))
def test_padding_and_row_groups_do_not_change_results(tmp_path_factory, rows, left, right, group):
    folder = tmp_path_factory.mktemp("d")
    plain = read(write(folder / "a.parquet", _columns(rows)))
    other = read(write(folder / "a.parquet", _columns(rows, left, right), rows=group))
    assert plain == other
    for row, rollout, train, positions in zip(rows, plain["rollout"], plain["train"], plain["positions"], strict=True):
        places = [place for place, token in enumerate(row) if token[2]]
        assert rollout == [row[place][0] for place in places]
        assert train == [row[place][1] for place in places]
        assert positions == [place - places[0] for place in places]


@pytest.mark.slow
@settings(max_examples=20, derandomize=True)
@given(rows=RAGGED, group=st.integers(1, 5), drop_masked=st.booleans(), piece=st.integers(1, 12))
def test_wide_and_long_formats_agree(tmp_path_factory, rows, group, drop_masked, piece):
    rows = [row for row in rows if any(token[2] for token in row)] or [[(-1, -2, True)]]
    columns = _columns(rows)
    columns.update(
        step=[number // 3 for number in range(len(rows))],
        reward=[number / 2 for number in range(len(rows))],
        advantages=lists([[float(place) for place in range(len(row))] for row in rows]),
    )
    columns["sequence_id"] = list(range(len(rows)))
    folder, wanted = tmp_path_factory.mktemp("d"), ["advantages"]
    in_wide = read(write(folder / "a.parquet", columns), wanted=wanted)
    path = write(folder / "a.parquet", to_long(columns, drop_masked), rows=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mismatchctl.data.blocks.BATCH_TOKENS", piece)
        patch.setattr("mismatchctl.data.catalog._PIECE_ROWS", piece)
        dump = open_dump([path], wanted=wanted)
        in_long = content(dump)
    assert sum(unit.rows for unit in dump.units) == dump.files[0].rows
    in_wide.pop("rows")
    in_long.pop("rows")
    assert in_wide == in_long


def test_token_ids_with_bad_rows_and_runs_are_read(tmp_path):
    columns = wide((2, 2), token_ids=[[1, 2], [3, 4]], run=["a", "b"])
    columns[ROLLOUT] = [[-1.0], [-1.0, -2.0]]
    dump = open_dump([write(tmp_path / "a.parquet", columns)], on_bad="skip")
    assert {row: values.tolist() for row, values in dump.token_ids(0, [0, 1]).items()} == {1: [3, 4]}
