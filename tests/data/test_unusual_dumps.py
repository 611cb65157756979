"""Unusual ids, positions and masks give a result or an error message, never a traceback."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.data.formats import MOST_SEQUENCE_TOKENS
from mismatchctl.data.reader import open_dump
from mismatchctl.errors import DataError
from mismatchctl.io import parquet_footer
from tests.cli import command
from tests.factories.dumps import make_dump
from tests.paths import ROOT


def run(*words: object) -> tuple[int, str]:
    done = command.run(*words, COLUMNS="1000")
    assert done.exit_code in (0, 2, 3, 4), done.exception
    return done.exit_code, done.output


def wide(path: Path, **columns: Any) -> Path:
    noise = np.random.default_rng(0)
    rollout = -0.5 - noise.random((12, 8))
    given = {
        "rollout_log_probs": list(rollout),
        "train_log_probs": list(rollout + 0.01 * noise.standard_normal((12, 8))),
    }
    pq.write_table(pa.table({**given, **columns}), path)
    return path


@pytest.mark.slow
def test_run_names_are_one_shared_object(tmp_path: Path) -> None:
    dump = open_dump([str(wide(tmp_path / "dump.parquet"))])
    (batch,) = dump.read(dump.units[0], dump.problems)
    assert len(set(map(id, batch.columns["run"].tolist()))) == 1


def long(path: Path, position: Any, ids: Any = None) -> Path:
    values = -0.5 - np.random.default_rng(0).random(24)
    ids = np.repeat(np.arange(4), 6) if ids is None else ids
    columns = {"rollout_log_probs": values, "train_log_probs": values - 0.01, "sequence_id": ids, "position": position}
    pq.write_table(pa.table(columns), path)
    return path


PLACES = np.tile(np.arange(6), 4)


@pytest.mark.parametrize("kind", ["float32", "float64", "uint64", "int8"])
def test_positions_of_any_integer_type_are_read(tmp_path: Path, kind: str) -> None:
    usual, other = long(tmp_path / "a.parquet", PLACES), long(tmp_path / "b.parquet", PLACES.astype(kind))
    found = []
    for path in (usual, other):
        code, words = run("analyze", path, "--json")
        assert code == 0
        found.append(json.loads(words)["runs"][path.stem]["worst_tokens"][0]["position"])
    assert found[0] == found[1] and isinstance(found[1], int)


@pytest.mark.parametrize("bad", [float("nan"), 2.5, float("inf"), 1e300])
def test_invalid_positions_are_named(tmp_path: Path, bad: float) -> None:
    positions = PLACES.astype(float)
    positions[8] = bad
    code, words = run("analyze", long(tmp_path / "a.parquet", positions))
    assert code == 4 and "row 8, column position" in words and "is not a whole number" in words


def test_boolean_positions_are_checked_for_order(tmp_path: Path) -> None:
    code, words = run("analyze", long(tmp_path / "a.parquet", PLACES > 2))
    assert code == 4 and "positions must ascend" in words


@pytest.mark.slow
@pytest.mark.parametrize(
    "ids",
    [
        np.arange(12) + 0.5,
        np.array([np.nan, *range(11)]),
        np.array([1e300, -1e300, np.inf, -np.inf, *range(8)], float),
        np.arange(12) % 2 == 0,
        np.arange(12, dtype=np.uint64) + np.uint64(2**64 - 12),
        np.arange(12).astype("datetime64[ns]"),
        np.arange(12).astype("timedelta64[ns]"),
    ],
    ids=["halves", "missing", "huge", "flags", "beyond int64", "times", "durations"],
)
@pytest.mark.parametrize("column", ["sequence_id", "prompt_id", "worker", "micro_batch", "run"])
def test_ids_of_any_type_are_read(tmp_path: Path, column: str, ids: Any) -> None:
    dump = wide(tmp_path / "a.parquet", **{column: ids})
    assert run("analyze", dump, "--by", "worker" if column == "worker" else "run", "--json")[0] == 0
    assert run("sweep", dump, "-c", "token_tis", "--vary", "weight.truncate=1:2:2", "--json", "-q")[0] == 0


@pytest.mark.parametrize("steps", [np.arange(12) + 0.5, np.arange(12, dtype=np.uint64) + np.uint64(2**64 - 12)])
def test_large_and_other_steps_are_read(tmp_path: Path, steps: Any) -> None:
    dump = wide(tmp_path / "a.parquet", step=steps)
    assert run("sweep", dump, "-c", "token_tis", "--vary", "weight.truncate=1:2:2", "--at-step", "+2", "--json")[0] == 0
    assert run("analyze", dump, "--json")[0] == 0


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8", "bool"])
def test_masks_of_any_type_are_read(tmp_path: Path, kind: str) -> None:
    mask = np.ones((12, 8), kind)
    mask[:, 5:] = 0
    dump = wide(tmp_path / "a.parquet", response_mask=list(mask))
    code, words = run("convert", dump, tmp_path / "b.parquet")
    assert code == 0 and "60 valid tokens" in words


def test_fractional_masks_are_converted_and_then_refused(tmp_path: Path) -> None:
    dump = wide(tmp_path / "a.parquet", response_mask=list(np.full((12, 8), 0.5)))
    assert run("convert", dump, tmp_path / "b.parquet")[0] in (0, 4)
    code, words = run("analyze", dump)
    assert code == 4 and "a mask must contain only 0 and 1" in words


def test_memory_limits_work_without_units(tmp_path: Path) -> None:
    empty = pa.table({name: pa.array([], pa.list_(pa.float32())) for name in ("rollout_log_probs", "train_log_probs")})
    pq.write_table(empty, tmp_path / "a.parquet")
    code, words = run("analyze", tmp_path / "a.parquet", "--memory-limit", "50MB")
    assert code == 4 and "Traceback" not in words


def test_runs_without_a_breakdown_can_be_compared(tmp_path: Path) -> None:
    one, two = wide(tmp_path / "a.parquet"), tmp_path / "b.parquet"
    mask = np.zeros((12, 8), bool)
    mask[0, 0] = True
    wide(two, response_mask=list(mask), rollout_version=np.arange(12.0), entropy=list(np.full((12, 8), np.nan)))
    assert run("compare", one, two, "--html", tmp_path / "c.html")[0] == 0
    assert run("compare", two, one, "--html", tmp_path / "d.html")[0] == 0


VOID: dict[str, pa.DataType] = {
    "current_log_probs": pa.list_(pa.float32()), "ref_log_probs": pa.list_(pa.float32()),
    "response_mask": pa.list_(pa.bool_()), "advantages": pa.float64(), "reward": pa.float64(), "step": pa.int64(),
    "prompt_id": pa.string(), "rollout_experts": pa.list_(pa.list_(pa.int32())), "rollout_version": pa.int64(),
}  # fmt: skip
"""Empty optional columns, as a writer with a fixed schema writes them."""


@pytest.mark.parametrize(
    ("void", "form"),
    [
        ("null", "statistics"), ("null", "none"), ("null", "file"), ("of null", "rows"), ("of null", "stream"),
        ("empty", "none"),
    ],
)  # fmt: skip
def test_empty_columns_are_ignored(tmp_path: Path, form: str, void: str) -> None:
    """Rows can be null, contain nulls or be empty, in every format."""

    def cell(kind: pa.DataType) -> Any:
        return None if void == "null" or not pa.types.is_list(kind) else [] if void == "empty" else [None] * 8

    plain = pq.read_table(wide(tmp_path / "plain.parquet"))
    columns = {name: pa.array([cell(kind)] * 12, kind) for name, kind in VOID.items()}
    table = plain
    for name, column in columns.items():
        table = table.append_column(name, column)
    path = tmp_path / ("void.arrow" if form in ("file", "stream") else "void.parquet")
    if form == "file":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, 5)
    elif form == "stream":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, 5)
    else:
        pq.write_table(table, path, row_group_size=5 if form == "rows" else None, write_statistics=form != "none")
    results = []
    for file in (tmp_path / "plain.parquet", path):
        code, words = run("analyze", file, "--json", "-c", "token_tis")
        assert code == 0, words
        results.append(json.loads(words))
    (expected,), (found,) = (result["runs"].values() for result in results)
    assert found["overall"] == expected["overall"] and found["groups"] == expected["groups"]
    assert results[0]["warnings"] == results[1]["warnings"]


@pytest.mark.parametrize(("rows", "held"), [([[]] * 12, False), ([[0.5]] * 12, True), ([[]] * 11 + [[0.5] * 8], True)])
def test_lists_without_nulls_or_statistics_are_read(tmp_path: Path, rows: list[list[float]], held: bool) -> None:
    """The recorder writes such lists. Their number of entries is in the footer."""
    table = pq.read_table(wide(tmp_path / "plain.parquet"))
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False))
    table = table.append_column(pa.field("advantages", kind, nullable=False), pa.array(rows, kind))
    pq.write_table(table, tmp_path / "lists.parquet", write_statistics=False)
    assert open_dump([str(tmp_path / "lists.parquet")]).has("advantages") is held


def test_columns_with_one_value_are_used(tmp_path: Path) -> None:
    rewards = pa.array([None] * 11 + [1.0], pa.float64())
    for name, rows in (("a", 5), ("b", None)):
        path = wide(tmp_path / f"{name}.parquet", reward=rewards)
        pq.write_table(pq.read_table(path), path, row_group_size=rows, write_statistics=rows is None)
        code, words = run("schema", path, "--json")
        assert code == 0 and "reward" in words
    path = wide(tmp_path / "c.parquet", current_log_probs=pa.array([None] * 11 + [[-1.0] * 8], pa.list_(pa.float32())))
    code, words = run("analyze", path)
    assert code == 4 and "the list is null" in words


def test_empty_sequences_need_no_column_values(tmp_path: Path) -> None:
    """A file of empty sequences has the columns of its neighbors."""
    (tmp_path / "dump").mkdir()
    full = pq.read_table(wide(tmp_path / "dump" / "a.parquet", current_log_probs=[np.full(8, -1.0)] * 12))
    nothing = [pa.array([[]] * 2, column.type) for column in full.columns]
    pq.write_table(pa.table(nothing, schema=full.schema), tmp_path / "dump" / "b.parquet")
    code, words = run("analyze", tmp_path / "dump", "--json")
    assert code == 0, words
    assert not [warning for warning in json.loads(words)["warnings"] if "current_log_probs" in warning]
    (found,) = json.loads(words)["runs"].values()
    assert found["overall"]["metrics"]["drift_k3"]["status"] == "ok"


def forged(folder: Path) -> bytes:
    """Write a dump in which the column has another type in the schema than in its values."""
    sound = make_dump(folder / "a.parquet", rows=8).read_bytes()
    start = len(sound) - 8 - struct.unpack_from("<I", sound, len(sound) - 8)[0]
    made = bytearray(sound)
    made[start + 0x5AFF % (len(sound) - start)] = 0x4A
    return bytes(made)


@pytest.mark.parametrize(
    ("place", "command", "code"),
    [
        ("d.parquet", ["analyze", "d.parquet", "-q"], 4),
        ("d.parquet", ["convert", "a.parquet", "b.parquet", "--join", "d.parquet"], 4),
        ("d.parquet", ["convert", "a.parquet", "d.parquet"], 2),
        ("dashboard_columns/rollout_0.parquet", ["convert", "dashboard_columns", "b.parquet"], 4),
    ],
    ids=["dump", "joined", "output", "miles"],
)
def test_contradictory_footers_are_reported(
    place: str, command: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the same for reading and for replacing a file."""
    monkeypatch.chdir(tmp_path)
    content = forged(tmp_path)
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).write_bytes(content)
    ended, words = run(*command)
    assert ended == code and place in words and "Traceback" not in words, words
    assert Path(place).read_bytes() == content and not Path("b.parquet").exists()


def test_slow_footers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forged(tmp_path)
    sound = pa.BufferReader((tmp_path / "a.parquet").read_bytes())
    parquet_footer.check_footer(sound)
    monkeypatch.setattr(parquet_footer, "MOST_FOOTER_BYTES", 100)
    with pytest.raises(pa.ArrowInvalid, match="takes too long"):
        parquet_footer.check_footer(sound)


@pytest.mark.parametrize(
    "data",
    [
        b"",  # nothing
        b"\x19" * 100_000,  # lists in lists
        b"\x15" + b"\xff" * 100_000,  # a number that does not end
        b"\x29\x17" + bytes(8),  # a schema of floats
        b"\x2c\x00\x00",  # a schema that is not a list
        b"\x29\x1c\x56\x02\x00\x00",  # an element with a 64-bit number of children, which pyarrow ignores
    ],
)
def test_unreadable_footers_are_refused(data: bytes) -> None:
    file = b"PAR1" + data + len(data).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(pa.ArrowInvalid, match="footer is damaged"):
        parquet_footer.check_footer(pa.BufferReader(file))


def test_out_of_range_timestamps_give_no_step_range(tmp_path: Path) -> None:
    table = pq.read_table(make_dump(tmp_path / "a.parquet"))
    table = table.set_column(
        table.column_names.index("step"), "step", pa.array([2**62] * len(table), pa.timestamp("ms"))
    )
    pq.write_table(table, tmp_path / "b.parquet")
    code, words = run("analyze", tmp_path / "b.parquet", "-q")
    assert code in (0, 4) and "Traceback" not in words, words


def test_valid_footers_are_accepted() -> None:
    files = [*(ROOT / "sample_data").rglob("*.parquet"), *(ROOT / "tests").rglob("*.parquet")]
    for path in files:
        with pa.OSFile(str(path)) as file:
            parquet_footer.check_footer(file)
            assert file.tell() == 0
    assert len(files) > 100


@pytest.mark.parametrize("value", [1e300, -1e300, 5.0])
def test_impossible_reference_values_are_refused(tmp_path: Path, value: float) -> None:
    table = pq.read_table(make_dump(tmp_path / "a.parquet"))
    given = [[value] * len(row) for row in table["rollout_log_probs"].to_pylist()]
    given[0] = [float("nan")] * len(given[0])
    pq.write_table(table.append_column("reference_log_probs", pa.array(given)), tmp_path / "b.parquet")
    code, words = run("analyze", tmp_path / "b.parquet")
    assert code == 4 and "reference_log_probs" in words and "row 1" in words, words
    assert run("diagnose", tmp_path / "b.parquet", "-q")[0] == 0


@pytest.mark.parametrize(
    ("column", "values"),
    {"reward": ["=x"] * 64, "worker": [{"a": 1}] * 64, "token_ids": [3] * 64}.items(),
)
def test_joined_columns_keep_their_type(tmp_path: Path, column: str, values: list[Any]) -> None:
    table = pq.read_table(make_dump(tmp_path / "a.parquet"))
    ids = pa.array(range(len(table)))
    pq.write_table(table.append_column("sequence_id", ids), tmp_path / "b.parquet")
    pq.write_table(pa.table({"sequence_id": ids, column: pa.array(values)}), tmp_path / "c.parquet")
    code, words = run("convert", tmp_path / "b.parquet", tmp_path / "d.parquet", "--join", tmp_path / "c.parquet")
    assert code == 4 and "c.parquet" in words and column in words and not (tmp_path / "d.parquet").exists(), words


def constant_lists(lengths: list[int]) -> pa.Array:
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    values = pa.array(np.full(sum(lengths), -0.5, np.float32))
    return pa.ListArray.from_arrays(offsets, values)


@pytest.mark.parametrize(
    ("lengths", "advantages", "words"),
    [
        ([MOST_SEQUENCE_TOKENS + 1], None, "too many values .2,097,153 in 1 rows"),
        ([4] * 100 + [MOST_SEQUENCE_TOKENS + 1], None, "too many values .2,097,553 in .* bytes"),
        ([4], [MOST_SEQUENCE_TOKENS + 1], "'advantages': too many values .2,097,153 in 1 rows"),
    ],
)
def test_too_long_rows_are_refused_before_decoding(
    tmp_path: Path, lengths: list[int], advantages: list[int] | None, words: str
) -> None:
    values = constant_lists(lengths)
    columns = {"rollout_log_probs": values, "train_log_probs": values}
    columns |= {"advantages": constant_lists(advantages)} if advantages else {}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", compression="zstd")
    dump = open_dump([str(tmp_path / "a.parquet")], wanted=["advantages"])
    with pytest.raises(DataError, match=words) as caught:
        for unit in dump.units:
            list(dump.read(unit, dump.problems))
    assert "at most 2,097,152 tokens" in str(caught.value)


def test_too_long_rows_are_named(tmp_path: Path) -> None:
    lengths = [4, 4, MOST_SEQUENCE_TOKENS + 1, 4]
    noise = pa.array(-np.random.default_rng(0).random(sum(lengths), np.float32))
    values = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), noise)
    pq.write_table(pa.table({"rollout_log_probs": values, "train_log_probs": values}), tmp_path / "a.parquet")
    code, words = run("analyze", tmp_path / "a.parquet")
    assert code == 4 and "row 2: the row has 2,097,153 tokens" in words


def test_long_rows_are_read_in_parts(tmp_path: Path) -> None:
    lengths = [3] * 1000 + [1_800_000] * 3
    noise = pa.array(-np.random.default_rng(0).random(sum(lengths), np.float32))
    values = pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32()), noise)
    pq.write_table(pa.table({"rollout_log_probs": values, "train_log_probs": values}), tmp_path / "a.parquet")
    dump = open_dump([str(tmp_path / "a.parquet")])
    batches = [batch for unit in dump.units for batch in dump.read(unit, dump.problems)]
    assert [batch.segments.lengths.max() for batch in batches] == [3, 3, 1_800_000, 1_800_000, 1_800_000]
    assert [row for batch in batches for row in batch.rows.tolist()] == list(range(1003))


def test_shared_texts_stay_dictionary_encoded(tmp_path: Path) -> None:
    texts = pa.array(["a" * 3_000_000, "a" * 3_000_000 + "b", "short"])
    ids = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2] * 4, pa.int32()), texts)
    path = wide(tmp_path / "a.parquet", prompt_id=ids)
    dump = open_dump([str(path)])
    (batch,) = dump.read(dump.units[0], dump.problems)
    first, second, third = batch.columns["prompt_id"][:3].tolist()
    assert third == "short" and first != second and {len(first), len(second)} == {118}
    assert batch.columns["prompt_id"].tolist() == [first, second, third] * 4
    code, words = run("convert", path, tmp_path / "b.parquet")
    assert code == 0, words
    assert pq.read_table(tmp_path / "b.parquet")["prompt_id"].to_pylist()[:3] == texts.to_pylist()
    assert (tmp_path / "b.parquet").stat().st_size < 100_000


def test_expanding_record_batches_are_refused(tmp_path: Path) -> None:
    values = constant_lists([4] * 100 + [MOST_SEQUENCE_TOKENS])
    table = pa.table({"rollout_log_probs": values, "train_log_probs": values})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema, options=options) as file:
        file.write_table(table)
    code, words = run("analyze", tmp_path / "a.arrow")
    assert (
        code == 4 and "record batch 0, column 'rollout_log_probs': too many values (2,097,552 in 2,360 bytes)" in words
    )
