"""Arrow files give the same Result as Parquet files, bit for bit, and errors name damaged files."""

import json

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.data.formats import ArrowContents
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump
from mismatchctl.errors import DataError
from mismatchctl.frameworks.registry import find_preset
from tests.factories.dump_files import MASK, ROLLOUT, TRAIN, batches, content, lists, read, wide, write
from tests.paths import SAMPLE_DATA

SAMPLES = SAMPLE_DATA


def copied(source, target, compression="lz4", new=pa.ipc.new_file):
    target.parent.mkdir(parents=True, exist_ok=True)
    parquet = pq.ParquetFile(source)
    with new(target, parquet.schema_arrow, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for group in range(parquet.num_row_groups):
            writer.write_table(parquet.read_row_group(group))
    return target


def without_provenance(result):
    return {name: value for name, value in json.loads(result.model_dump_json()).items() if name != "provenance"}


@pytest.mark.slow
@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_copies_give_the_same_result(tmp_path, new):
    runs = [SAMPLES / "dense", SAMPLES / "moe"]
    for run in runs:
        for file in sorted(run.iterdir())[:4]:
            copied(file, tmp_path / "arrow" / run.name / f"{file.stem}.arrow", new=new)
            target = tmp_path / "parquet" / run.name / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    corrections = [find_preset("token_tis"), find_preset("geo_rs")]
    there, here = (
        analyze([str(tmp_path / kind / run.name) for run in runs], corrections) for kind in ("parquet", "arrow")
    )
    assert without_provenance(here) == json.loads(
        json.dumps(without_provenance(there)).replace(".parquet", ".arrow").replace("/parquet/", "/arrow/")
    )
    assert [file.rows for file in here.provenance.inputs] == [file.rows for file in there.provenance.inputs]


@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
@pytest.mark.parametrize("name", ["a.arrow", "a.arrows", "a.feather", "a.ipc", "a"])
def test_arrow_buffers_and_names_are_read(tmp_path, compression, name):
    source = write(tmp_path / "p/a.parquet", wide((3, 0, 2), step=[1, 1, 2], prompt_id=["x", None, "y"]), rows=2)
    assert read(copied(source, tmp_path / name, compression)) == read(source)


def test_arrow_files_of_other_writers_are_read(tmp_path):
    table = pa.table(wide((3, 2), prompt_id=["x", "y"], step=[1, 2]))
    expected = read(write(tmp_path / "a.parquet", table))
    pa.feather.write_feather(table, str(tmp_path / "f.feather"), compression="zstd")
    pl.from_arrow(table).write_ipc(tmp_path / "p.arrow", compression="lz4")
    pl.from_arrow(table).write_ipc_stream(tmp_path / "s.arrow")
    named = table.set_column(2, "prompt_id", table.column("prompt_id").dictionary_encode())
    for kind, new in (("d", pa.ipc.new_file), ("ds", pa.ipc.new_stream)):
        with new(tmp_path / f"{kind}.arrow", named.schema) as writer:
            writer.write_table(named, max_chunksize=1)
    legacy = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    with pa.ipc.new_stream(tmp_path / "l.arrow", table.schema, options=legacy) as writer:
        writer.write_table(table)
    for name in ("f.feather", "p.arrow", "s.arrow", "d.arrow", "ds.arrow", "l.arrow"):
        found = read(tmp_path / name)
        assert {**found, "run": None} == {**expected, "run": None}, name


def test_growing_dictionaries_in_streams_are_read(tmp_path):
    """Each batch has its own dictionary, which replaces the dictionary of the batch before."""
    kinds = [pa.array(words).dictionary_encode() for words in (["x"], ["y"], ["z"])]
    tables = [pa.table(wide((2,), prompt_id=kind)) for kind in kinds]
    with pa.ipc.new_stream(tmp_path / "a.arrow", tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    assert read(tmp_path / "a.arrow")["prompt_id"] == ["x", "y", "z"]


def test_formats_can_be_mixed_in_one_folder(tmp_path):
    source = write(tmp_path / "d/step=1/a.parquet", wide((2,)))
    copied(source, tmp_path / "d/step=2/a.arrow")
    copied(source, tmp_path / "d/step=10/a.feather")
    assert read(tmp_path / "d")["step"] == [1, 2, 10]
    assert read(tmp_path / "d/step=*/*.*")["step"] == [1, 2, 10]


@pytest.mark.usefixtures("row_groups_apart")
def test_units_know_their_rows_and_tokens(tmp_path):
    columns = wide((5, 1, 0, 7), x=pa.array([{"a": [1], "b": "c"}] * 4), step=[3, 1, None, None])
    columns = {"x": columns.pop("x"), **columns}
    path = copied(write(tmp_path / "a.parquet", columns, rows=2), tmp_path / "b.arrow")
    units = open_dump([str(path)]).units
    assert [(unit.rows, unit.start, unit.tokens) for unit in units] == [(2, 0, 6), (2, 2, 7)]
    assert [unit.step_range for unit in units] == [(1, 3), None]


def test_only_needed_columns_are_read(tmp_path):
    text = "".join(np.random.default_rng(1).choice(list("abcdefghijklmnop"), 2000))
    path = copied(write(tmp_path / "p/a.parquet", wide((2,), note=[text])), tmp_path / "a.arrow")
    data = bytearray(path.read_bytes())
    place = data.index(text[:12].encode())
    data[place - 12 : place] = bytes(12)  # the head of the compressed buffer
    path.write_bytes(data)
    assert read(path)["rollout"] == [[0, -1 / 64]]
    with pytest.raises(DataError, match="record batch 0 cannot be decoded"):
        read(path, by=["note"])


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_every_truncation_gives_one_sentence(tmp_path, new):
    source = write(tmp_path / "p/a.parquet", wide((3, 4), step=[1, 2]), rows=1)
    path = copied(source, tmp_path / "a.arrow", new=new)
    data = path.read_bytes()
    ends = _ends(path) if new is pa.ipc.new_stream else set()
    for length in range(0, len(data) - 8, 7):
        path.write_bytes(data[:length])
        if length in ends:
            continue  # a stream may end after any message
        with pytest.raises(DataError) as caught:
            read(path)
        assert caught.value.file == str(path)
        assert "\n" not in str(caught.value)


def _ends(path):
    with pa.OSFile(str(path)) as file:
        contents = ArrowContents.of(file)
    return {message.start + message.size for message in (*contents.batches, *contents.others)}


@settings(max_examples=50, derandomize=True)
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255), stream=st.booleans())
def test_damaged_bytes_never_crash_the_reader(tmp_path_factory, place, byte, stream):
    folder = tmp_path_factory.mktemp("d")
    source = write(folder / "a.parquet", wide((3, 4), step=[1, 2], sequence_id=["a", "b"]), rows=1)
    path = copied(source, folder / "a.arrow", new=pa.ipc.new_stream if stream else pa.ipc.new_file)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = byte
    path.write_bytes(data)
    try:
        dump = open_dump([str(path)])
        assert sum(len(batch) for batch in batches(dump, Problems())) <= 2
    except DataError as error:
        assert error.file == str(path)


@pytest.mark.parametrize(
    "content_", [b"FEA1" + bytes(40), b"PAR1" + bytes(40), b"words" * 20, b"ARROW1\0\0" + bytes(8)]
)
def test_other_files_named_arrow_are_refused(tmp_path, content_):
    (tmp_path / "a.arrow").write_bytes(content_)
    with pytest.raises(DataError, match="this is not a complete Arrow file"):
        open_dump([str(tmp_path / "a.arrow")])


ROWS = st.lists(
    st.lists(
        st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32), st.sampled_from([True, False, True])),
        max_size=6,
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=30, derandomize=True)
@given(
    rows=ROWS,
    group=st.integers(1, 5),
    compression=st.sampled_from(["lz4", "zstd", None]),
    stream=st.booleans(),
    large=st.booleans(),
)
def test_arrow_files_are_read_back(tmp_path_factory, rows, group, compression, stream, large):
    folder = tmp_path_factory.mktemp("d")
    kind = pa.large_list if large else pa.list_
    names = {ROLLOUT: pa.float32(), TRAIN: pa.float32(), MASK: pa.bool_()}
    columns = {
        name: lists([[token[place] for token in row] for row in rows], kind(value))
        for place, (name, value) in enumerate(names.items())
    }
    table = pa.table({**columns, "reward": np.arange(len(rows)) / 2})
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(folder / "a.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=group)
    found = content(open_dump([str(folder / "a.arrow")]))
    assert found["rollout"] == [[token[0] for token in row if token[2]] for row in rows]
    assert found["train"] == [[token[1] for token in row if token[2]] for row in rows]
    assert found["reward"] == [number / 2 for number in range(len(rows))]
