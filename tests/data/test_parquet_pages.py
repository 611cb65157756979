"""Our reader of Parquet list pages gives the same bytes as pyarrow or leaves the file to pyarrow, and never crashes."""

import random
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from mismatchctl.core import compiler
from mismatchctl.data import parquet_pages
from mismatchctl.data.formats import ParquetContents
from mismatchctl.io.parquet_footer import CompactReader
from mismatchctl.recorder.recorder import write_parquet
from tests.factories.protobuf import varint

LENGTHS = (3, 0, 0, 700, 1, 0, 2500, 8, 0)
OUTSIDE: list[int] = []
"""Accesses outside of an array that a compiled loop made."""


def bounded(name: str, **called: Any) -> Any:
    """Return a loop with bounds checks, also in the loops that it calls."""
    function = getattr(compiler, name).py_func
    return njit(boundscheck=True)(FunctionType(function.__code__, {**function.__globals__, **called}))


def watched(checked: Any) -> Any:
    """Return a loop with bounds checks that records accesses outside of an array."""

    def run(*given: Any) -> Any:
        try:
            return checked(*given)
        except IndexError:
            OUTSIDE.append(1)
            raise

    return run


ZEROS = bounded("find_zeros")
LISTS = bounded("find_list_offsets", find_zeros=ZEROS, _find_levels_end=bounded("_find_levels_end"))
CHECKED = {"find_list_offsets": watched(LISTS), "join_split_bytes": watched(bounded("join_split_bytes"))}


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    for name, loop in CHECKED.items():
        monkeypatch.setattr(parquet_pages, name, loop)
    OUTSIDE.clear()
    yield
    assert not OUTSIDE


def required(kind, large=False):
    return (pa.large_list if large else pa.list_)(pa.field("element", kind, nullable=False))


def table(kind=None, lengths=LENGTHS, large=False, nullable=False, seed=0):
    kind, rng = kind or pa.float32(), np.random.default_rng(seed)
    offsets, count = np.concatenate([[0], np.cumsum(lengths)]), sum(lengths)
    values = rng.integers(0, 2, count) if pa.types.is_boolean(kind) else rng.integers(-(2**30), 2**30, count)
    if pa.types.is_floating(kind):
        values = np.where(rng.random(count) < 0.01, np.nan, -rng.exponential(1, count))
    values = pa.array(values.astype(kind.to_pandas_dtype()), kind)
    made = pa.LargeListArray if large else pa.ListArray
    places = pa.array(offsets, pa.int64() if large else pa.int32())
    array = made.from_arrays(places, values, type=required(kind, large))
    field = pa.field("x", array.type, nullable=nullable, metadata={"dtype": "bfloat16"})
    step = pa.field("step", pa.int64(), nullable=False)
    return pa.table([pa.array(range(len(lengths))), array], schema=pa.schema([step, field]))


def save(path: Path, data: pa.Table, **options: Any) -> Path:
    plain = {"compression": "zstd", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    pq.write_table(data, path, **{**plain, **options})
    return path


def read(path: Path, groups: Any = None) -> tuple[pa.Array | None, ParquetContents]:
    with pa.OSFile(str(path)) as file:
        contents = ParquetContents.of(file)
        groups = range(len(contents.rows)) if groups is None else groups
        return parquet_pages.read_lists(file, contents.footer, contents.schema, groups, ["x"]).get("x"), contents


def raw(array: pa.Array) -> tuple[Any, ...]:
    assert array.null_count == array.values.null_count == 0
    flat = array.flatten()
    values = flat.to_numpy(zero_copy_only=False).tobytes()
    return array.type, (array.offsets.to_numpy() - array.offsets[0].as_py()).tolist(), values


def same(path: Path, groups: Any = None) -> bool:
    """Return True if our reader read the file. Its table must then equal pyarrow's."""
    found, contents = read(path, groups)
    if found is None:
        return False
    found.validate(full=True)
    wanted = pq.ParquetFile(path, page_checksum_verification=True)
    column = wanted.read_row_groups(list(range(len(contents.rows)) if groups is None else groups))["x"]
    assert raw(found) == raw(column.combine_chunks())
    return True


SPLIT = {"use_byte_stream_split": ["x.list.element"]}
TAKEN = {
    "as recorded": (table(), SPLIT),
    "plain": (table(), {}),
    "uncompressed": (table(), {**SPLIT, "compression": "none"}),
    "uncompressed and plain": (table(), {"compression": "none"}),
    "without checksums": (table(), {**SPLIT, "write_page_checksum": False}),
    "statistics": (table(), {**SPLIT, "write_statistics": True}),
    "double": (table(pa.float64()), SPLIT),
    "double, plain": (table(pa.float64()), {}),
    "int32": (table(pa.int32()), {}),
    "int64": (table(pa.int64()), {}),
    "flags": (table(pa.bool_()), {}),
    "large lists": (table(large=True), SPLIT),
    "several row groups": (table(), {**SPLIT, "row_group_size": 2}),
    "pages": (table(), {**SPLIT, "data_page_size": 100, "write_batch_size": 30}),
    "pages of flags": (table(pa.bool_()), {"data_page_size": 3, "write_batch_size": 30}),
    "pages and row groups": (table(), {"data_page_size": 100, "write_batch_size": 7, "row_group_size": 4}),
    "no list is empty": (table(lengths=(5, 1, 1, 900)), SPLIT),
    "every list is empty": (table(lengths=(0, 0, 0)), SPLIT),
    "lists of one": (table(lengths=(1,) * 500), SPLIT),
    "every other is empty": (table(lengths=(0, 1) * 300), {**SPLIT, "data_page_size": 64, "write_batch_size": 9}),
}
LEFT = {
    "version 2": (table(), {**SPLIT, "data_page_version": "2.0"}),
    "dictionary": (table(), {"use_dictionary": True}),
    "delta": (table(pa.int32()), {"column_encoding": {"step": "PLAIN", "x.list.element": "DELTA_BINARY_PACKED"}}),
    "lists may be null": (table(nullable=True), SPLIT),
    "values may be null": (pa.table({"x": pa.array([[1.0, None]])}), {}),
    "snappy": (table(), {"compression": "snappy"}),
    "gzip": (table(), {"compression": "gzip"}),
    "lz4": (table(), {"compression": "lz4"}),
    "halves": (table(pa.float16()), {}),
    "int16": (table(pa.int16()), {}),
    "unsigned": (table(pa.uint32()), {}),
    "lists of lists": (pa.table({"x": pa.array([[[1.0]], []])}), {}),
    "no list": (pa.table({"x": [1.0, 2.0]}), {}),
    "texts": (pa.table({"x": [["a"], []]}), {}),
    "no row": (table(lengths=()), SPLIT),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_recorder_files_use_the_page_decoder(tmp_path, name):
    data, options = TAKEN[name]
    assert same(save(tmp_path / "a.parquet", data, **options))


@pytest.mark.parametrize("name", LEFT)
def test_other_files_are_left_to_pyarrow(tmp_path, name):
    data, options = LEFT[name]
    assert not same(save(tmp_path / "a.parquet", data, **options))


def test_fixed_sizes_are_left_to_pyarrow(tmp_path):
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False), 2)
    data = pa.table([pa.array([[1.0, 2.0]], kind)], schema=pa.schema([pa.field("x", kind, nullable=False)]))
    assert not same(save(tmp_path / "a.parquet", data))


@pytest.mark.slow
def test_recorded_files_use_the_page_decoder(tmp_path):
    data = table().rename_columns(["step", "rollout_log_probs"])
    with open(tmp_path / "a.parquet", "wb") as file:
        write_parquet(data, file)
    with pa.OSFile(str(tmp_path / "a.parquet")) as file:
        contents = ParquetContents.of(file)
        assert [*parquet_pages.read_lists(file, contents.footer, contents.schema, [0], contents.schema.names)] == [
            "rollout_log_probs"
        ]


def test_row_groups_are_decoded_in_any_order(tmp_path):
    path = save(tmp_path / "a.parquet", table(), row_group_size=2, **SPLIT)
    for groups in ([3], [1, 2], [4, 0], [2, 2]):
        assert same(path, groups)
    assert not same(path, [])


def test_decoded_tables_equal_those_of_pyarrow(tmp_path):
    """Columns have their order and metadata, and no other columns are read."""
    path = save(tmp_path / "a.parquet", table(seed=3), row_group_size=2, **SPLIT)
    with pa.OSFile(str(path)) as file:
        contents = ParquetContents.of(file)
        for names in (["x", "step"], ["x"], ["step"]):
            (found,) = contents.decode(file, [0, 1], names, None)
            wanted = pq.ParquetFile(path).read_row_groups([0, 1], columns=names)
            assert found.schema.equals(wanted.schema, check_metadata=True)
            assert found.num_rows == wanted.num_rows == 4
            if "x" in names:
                assert raw(found["x"].combine_chunks()) == raw(wanted["x"].combine_chunks())


def test_stores_and_pipes_are_left_to_pyarrow(tmp_path, monkeypatch):
    path = save(tmp_path / "a.parquet", table(), **SPLIT)
    asked = []
    monkeypatch.setattr("mismatchctl.data.formats.compiled_loops_in_use", lambda: True)
    monkeypatch.setattr(parquet_pages, "read_lists", lambda *given: asked.append(1) or {})
    opened = (pa.BufferReader(path.read_bytes()), pa.PythonFile(path.open("rb")), pa.OSFile(str(path)))
    for file in opened:
        with file:
            (found,) = ParquetContents.of(file).decode(file, [0], ["x"], None)
        assert len(found) == len(LENGTHS)
    assert asked == [1]


class Chunk:
    """The pages of column `x` in a file of one row group, as (place of the header, its length, length of the body)."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        chunk = pq.read_metadata(path).row_group(0).column(1)
        self.start, self.stop = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
        self.pages, at = [], self.start
        while at < self.stop:
            header = CompactReader(self.data[at : self.stop])
            stored = header.struct(0, {3: 5})[3]
            self.pages.append((at, header.at, stored))
            at += header.at + stored

    def rewritten(self, path: Path, bodies: dict[int, bytes] | None = None, head: Any = None) -> Path:
        """Return the file with some bodies or headers replaced by others of the same length."""
        data = bytearray(self.data)
        for index, body in (bodies or {}).items():
            at, length, stored = self.pages[index]
            assert len(body) == stored
            data[at + length : at + length + stored] = body
        for at, value in (head or {}).items():
            data[at] = value
        path.write_bytes(bytes(data))
        return path


MANY = {"data_page_size": 600, "write_batch_size": 100, **SPLIT}


@pytest.mark.slow
@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_mutated_pages_match_pyarrow_or_are_left_to_it(tmp_path, checksums, compression):
    data = table(lengths=(3, 0, 40, 1, 0, 0, 90, 5))
    source = save(
        tmp_path / "a.parquet", data, **{**MANY, "compression": compression, "write_page_checksum": checksums}
    )
    chunk, rng, taken = Chunk(source), random.Random(17), 0
    for _ in range(400):
        changed = {}
        for _ in range(rng.choice((1, 1, 2, 5))):
            at, length, stored = rng.choice(chunk.pages)
            where = at + rng.randrange(length + min(stored, rng.choice((12, 30, stored))))
            changed[where] = rng.choice((0, 1, 127, 128, 255, chunk.data[where] ^ 1 << rng.randrange(8)))
        taken += same(chunk.rewritten(tmp_path / "b.parquet", head=changed))
    assert taken < 400 and (checksums or taken > 20)


def test_wrong_checksums_are_left_to_pyarrow(tmp_path):
    chunk = Chunk(save(tmp_path / "a.parquet", table(), **{**MANY, "compression": "none"}))
    at, length, stored = chunk.pages[1]
    place = at + length + stored - 1
    path = chunk.rewritten(tmp_path / "b.parquet", head={place: chunk.data[place] ^ 1})
    assert not same(path)
    with pa.OSFile(str(path)) as file, pytest.raises(OSError, match="CRC"):
        list(ParquetContents.of(file).decode(file, [0], ["x"], None))


def test_truncated_pages_are_refused(tmp_path):
    source = save(tmp_path / "a.parquet", table(lengths=(3, 0, 40)), **MANY)
    data, start = source.read_bytes(), Chunk(source).start
    footer = pq.read_metadata(source)
    for length in range(start, len(data), 11):
        cut = tmp_path / "cut.parquet"
        cut.write_bytes(data[:length])
        with pa.OSFile(str(cut)) as file:
            found = parquet_pages.read_lists(file, footer, footer.schema.to_arrow_schema(), [0], ["x"])
            column = footer.row_group(0).column(1)
            assert bool(found) == (length >= column.data_page_offset + column.total_compressed_size)


def test_inconsistent_counts_are_left_to_pyarrow(tmp_path):
    """The footer of one file is combined with the pages of another."""
    one = table(lengths=(4, 4, 4))
    source = save(tmp_path / "a.parquet", one, compression="none")
    for other in (
        table(lengths=(4, 8)), table(lengths=(4, 4, 4, 0)), table(lengths=(3, 4, 4)), table(lengths=(40, 40)),
        table(pa.float64(), lengths=(4, 4, 4)), table(pa.bool_(), lengths=(4, 4, 4)), table(lengths=(12, 0, 0)),
    ):  # fmt: skip
        footer = pq.read_metadata(save(tmp_path / "b.parquet", other, compression="none"))
        with pa.OSFile(str(source)) as file:
            found = parquet_pages.read_lists(file, footer, footer.schema.to_arrow_schema(), [0], ["x"])
        assert not found or raw(found["x"])[2] == raw(one["x"].chunk(0))[2]


def test_short_frames_are_left_to_pyarrow(tmp_path):
    """The rest of the buffer would stay uninitialized."""
    source = save(tmp_path / "a.parquet", table(lengths=(900, 30)), write_page_checksum=False, **SPLIT)
    chunk = Chunk(source)
    (at, length, stored), codec, tried = chunk.pages[0], pa.Codec("zstd"), 0
    sizes = CompactReader(chunk.data[at:]).struct(0, {2: 5})
    whole = codec.decompress(chunk.data[at + length : at + length + stored], sizes[2], asbytes=True)
    for size in range(60, len(whole), 40):
        body = codec.compress(whole[:size], asbytes=True)
        skipped = stored - len(body) - 8
        if skipped >= 0:  # a frame that the decoder skips fills the rest
            body += (0x184D2A50).to_bytes(4, "little") + skipped.to_bytes(4, "little") + bytes(skipped)
            assert not same(chunk.rewritten(tmp_path / "b.parquet", {0: body}))
            tried += 1
    assert tried > 20


def levels(data: bytes, count: int) -> list[int] | None:
    """Decode levels of one bit slowly, as the format describes them."""
    at, found = 0, []
    while len(found) < count:
        header = shift = 0
        while True:
            if at == len(data) or shift > 28:
                return None
            header, at = header | (data[at] & 127) << shift, at + 1
            if data[at - 1] < 128:
                break
            shift += 7
        length, groups = header >> 1, header & 1
        body = data[at : at + (length if groups else 1)]
        if not length or len(body) < (length if groups else 1):
            return None
        if not groups and (body[0] > 1 or length > count - len(found)):
            return None
        if groups and 8 * length - (count - len(found)) > 7:
            return None
        at += len(body)
        found += [byte >> bit & 1 for byte in body for bit in range(8)] if groups else [body[0]] * length
    return found[:count] if at == len(data) else None


RUN = st.builds(
    lambda length, groups, body: bytes([length << 1 & 127 | groups]) + body,
    st.integers(0, 63), st.integers(0, 1), st.binary(max_size=4) | st.sampled_from([b"\0", b"\1"]),
)  # fmt: skip


@given(
    data=st.lists(RUN | st.binary(max_size=3), max_size=6).map(b"".join),
    count=st.integers(1, 300),
    room=st.integers(0, 300),
)
def test_levels_match_the_format_or_are_refused(data, count, room):
    body, out = np.frombuffer(data + b"\xff\xff", np.uint8), np.empty(room, np.int64)
    made = ZEROS(body, 0, len(data), count, out)
    wanted = levels(data, count)
    places = None if wanted is None else [place for place, level in enumerate(wanted) if not level]
    if places is None or len(places) > room:
        assert made == -1
    else:
        assert out[:made].tolist() == places


def signed(value: int) -> bytes:
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)


def encoded(rng: random.Random, found: list[int]) -> bytes:
    """Encode levels as random runs and groups of eight, after their length."""
    data, at = b"", 0
    while at < len(found):
        same_level = next((n for n, level in enumerate(found[at:]) if level != found[at]), len(found) - at)
        if rng.random() < 0.5 and (len(found) - at <= 8 or same_level < 8):
            bits = found[at : at + 8] + [rng.randrange(2)] * max(0, 8 - len(found[at:]))
            data, at = data + bytes([3, sum(bit << n for n, bit in enumerate(bits))]), at + 8
        else:
            length = rng.randint(1, same_level)
            data, at = data + varint(length << 1) + bytes([found[at]]), at + length
    return len(data).to_bytes(4, "little") + data


def page(body: bytes, count: int, **changed: int) -> bytes:
    """Return a page: a header in Thrift's compact protocol, and the body."""
    said = {"kind": 0, "size": len(body), "stored": len(body), "encoding": 0, "levels": 3, **changed}
    data = b"".join(b"\x15" + signed(value) for value in (count, said["encoding"], said["levels"], said["levels"]))
    head = b"".join(b"\x15" + signed(said[name]) for name in ("kind", "size", "stored"))
    return head + b"\x2c" + data + b"\0\0" + body


def read_pages(parts: list[bytes], count: int, rows: int, kind: pa.DataType | None = None) -> list[Any] | None:
    data = b"".join(parts)
    chunk = SimpleNamespace(
        num_values=count, total_compressed_size=len(data), data_page_offset=0, compression="UNCOMPRESSED",
        has_dictionary_page=False,
    )  # fmt: skip
    try:
        return parquet_pages._read_chunks(
            pa.BufferReader(data), [(rows, chunk)], required(kind or pa.int32())
        ).to_pylist()
    except (parquet_pages._RefusedError, LookupError, ValueError, OSError, pa.ArrowException):
        return None


def lists_of(starts: list[int], held: list[int], values: list[int]) -> list[list[int]] | None:
    """Return the lists that levels make of values, or None if the levels are invalid."""
    rows: list[list[int]] = []
    places, is_open = iter(values), False
    for begins_no_list, holds in zip(starts, held, strict=True):
        if not begins_no_list:
            rows.append([])
        elif not is_open or not holds:
            return None
        is_open = bool(holds)
        if holds:
            rows[-1].append(next(places))
    return rows


@pytest.mark.parametrize("sound", [True, False])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=150)
def test_random_levels_give_correct_lists_or_none(sound, seed):
    """Random levels in random pages are decoded exactly if pyarrow accepts them."""
    rng = random.Random(seed)
    count = rng.choice((1, 2, 5, 9, 40, 300))
    rate = rng.choice((0.05, 0.5, 0.95))
    starts = [0] + [int(rng.random() > rate) for _ in range(count - 1)]
    held = [1] * count
    for place in range(count) if rng.random() < 0.7 else ():
        alone = not starts[place] and (place + 1 == count or not starts[place + 1])
        held[place] = int(not (alone and rng.random() < 0.5))
    if not sound:
        for found in (starts, held):
            for _ in range(rng.randrange(3)):
                found[rng.randrange(count)] ^= 1
    values, parts, at, used = [*range(sum(held))], [], 0, 0
    while at < count:
        stop = rng.randint(at + 1, count)
        own = sum(held[at:stop])
        body = encoded(rng, starts[at:stop]) + encoded(rng, held[at:stop])
        parts.append(page(body + np.array(values[used : used + own], np.int32).tobytes(), stop - at))
        at, used = stop, used + own
    wanted = lists_of(starts, held, values)
    assert read_pages(parts, count, starts.count(0)) == wanted
    assert wanted is not None or not sound
    assert read_pages(parts, count, starts.count(0) + rng.choice((-1, 1))) is None
    assert read_pages(parts, count + rng.choice((-1, 1)), starts.count(0)) is None


LEVELS = b"\2\0\0\0\x08\0" + b"\2\0\0\0\x08\1"  # four lists of one value
VALUES = bytes(16)
SPOILT = {
    "a value too few": page(LEVELS + VALUES[:-4], 4),
    "a value too many": page(LEVELS + VALUES + bytes(4), 4),
    "a byte too many": page(LEVELS + VALUES + b"\0", 4),
    "split values too few": page(LEVELS + VALUES[:-4], 4, encoding=9),
    "split values too many": page(LEVELS + VALUES + bytes(4), 4, encoding=9),
    "more than the bytes": page(LEVELS + VALUES, 4, stored=400),
    "fewer than the bytes": page(LEVELS + VALUES, 4, stored=20),
    "no byte": page(LEVELS + VALUES, 4, stored=0),
    "less than nothing": page(LEVELS + VALUES, 4, stored=-1),
    "another size": page(LEVELS + VALUES, 4, size=1 << 20),
    "a huge size": page(LEVELS + VALUES, 4, size=2**31 - 1),
    "a size below zero": page(LEVELS + VALUES, 4, size=-28),
    "another kind of page": page(LEVELS + VALUES, 4, kind=2),
    "other encodings of levels": page(LEVELS + VALUES, 4, levels=4),
    "another encoding of values": page(LEVELS + VALUES, 4, encoding=5),
    "a page behind the last": page(LEVELS + VALUES, 4) * 2,
    "bytes behind the last page": page(LEVELS + VALUES, 4) + b"\0",
    "no values": page(LEVELS + VALUES, 0),
    "levels longer than the page": page(b"\xff\xff\xff\x7f" + LEVELS[4:] + VALUES, 4),
    "levels longer than all memory": page(LEVELS[:6] + b"\xff\xff\xff\xff" + LEVELS[10:] + VALUES, 4),
    "levels beyond the page": page(LEVELS[:6] + b"\xff\0\0\0" + b"\2\1", 4),
    "groups beyond the page": page(LEVELS[:6] + b"\xff\0\0\0" + b"\3", 4),
    "nothing but a length": page(LEVELS[:4], 4),
    "a long run": page(b"\3\0\0\0\x88\x7f\0" + LEVELS[6:] + VALUES, 4),
    "a run of none": page(b"\4\0\0\0\0\0\x08\0" + LEVELS[6:] + VALUES, 4),
    "groups that are not there": page(b"\1\0\0\0\x03" + LEVELS[6:] + VALUES, 4),
    "a level that is none": page(LEVELS[:5] + b"\2" + LEVELS[6:] + VALUES, 4),
    "levels behind the last": page(b"\4\0\0\0\x08\0\x08\0" + LEVELS[6:] + VALUES, 4),
    "a header without end": b"\x15" + b"\xff" * 40,
    "a header too long": b"\x19\xfc" + varint(900) + b"\x15" * 2000,
    "nested without end": b"\x1c" * 900,
    "lists nested without end": b"\xf9" + b"\x19" * 900,
    "nothing": b"",
}


@pytest.mark.parametrize("name", SPOILT)
def test_contradictory_pages_are_left_to_pyarrow(name):
    assert read_pages([page(LEVELS + VALUES, 4)], 4, 4) == [[0]] * 4
    assert read_pages([SPOILT[name]], 4, 4) is None
    if name.startswith("split"):
        assert read_pages([SPOILT[name]], 4, 4, pa.float64()) is None


@pytest.mark.parametrize("count", [0, -1, 1 << 25, 2**62])
def test_pages_that_claim_too_many_values_are_left_to_pyarrow(count):
    assert read_pages([page(LEVELS + VALUES, 4)], count, 4) is None
    assert read_pages([page(LEVELS + VALUES, 4)], 4, count) is None
    assert read_pages([page(LEVELS + VALUES, count % 2**31)], count, 4) is None
