"""Change bytes that C code decodes, and check that decoding does not end the process.

The decoders are pyarrow (Parquet, Arrow), torch, pickle, numpy, libyaml, JSON and TensorBoard events. `python -m
tests.reliability.natives FIRST COUNT [PARTS]` prints one line of JSON per part: how many inputs were decoded, refused,
and not survived. Pages have no checksums here, so that changed bytes are decoded.
"""

import json
import mmap
import os
import pickle
import random
import resource
import signal
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import mismatchctl
from mismatchctl.api.analyze.run_log import read_run_log
from mismatchctl.data.formats import ArrowContents, FileContents, ParquetContents
from mismatchctl.data.importers.pickles import load_pickle, load_torch
from mismatchctl.errors import MismatchctlError
from mismatchctl.io.yaml import TextError, parse_json, parse_toml, parse_yaml
from tests.reliability.fuzzing import FRAMEWORKS
from tests.reliability.fuzzing_commands import VerbMaker

COLUMNAR = ("pages", "footer", "arrow")
"""Parquet without its footer, footers, and Arrow files and streams."""
PARTS = (*COLUMNAR, "torch", "pickles", "text", "events")
REFUSED = (pa.ArrowException, OSError, ValueError)
"""Errors of libraries that mismatchctl turns into an error message."""
SENTENCES = (MismatchctlError, TextError)
"""Errors for users."""
AT_ONCE = 500
SMALL = 200_000
"""Largest size of a framework's file in bytes."""
PATIENCE = 60
_WORDS = [struct.pack("<i", number) for number in (0, 1, 2, 3, 8, 100, 1000, 65536, 2**30, 2**31 - 1, -1, -8, -(2**31))]
_WORDS += [struct.pack("<q", number) for number in (0, -1, 2**63 - 1, 2**32, 2**56)]


def table() -> pa.Table:
    noise, rows = np.random.default_rng(0), 24
    lengths = noise.integers(0, 40, rows)
    flat = -noise.exponential(1.0, lengths.sum())
    parts = [list(part) for part in np.split(flat, np.cumsum(lengths)[:-1])]
    return pa.table(
        {
            "rollout_log_probs": pa.array(parts, pa.list_(pa.float32())),
            "train_log_probs": pa.array(parts, pa.large_list(pa.float64())),
            "response_mask": pa.array([[value < -0.1 for value in part] for part in parts]),
            "token_ids": pa.array([list(range(count)) for count in lengths], pa.list_(pa.int32())),
            "step": pa.array(noise.integers(0, 3, rows)),
            "worker": pa.array([f"w{row % 3}" for row in range(rows)]).dictionary_encode(),
            "text": pa.array(["x" * (row % 7) if row % 5 else None for row in range(rows)]),
            "blob": pa.array([b"ab" * row for row in range(rows)]),
            "rollout_top_ids": pa.array([[[1, 2, 3]] * count for count in lengths], pa.list_(pa.list_(pa.int32(), 3))),
            "rollout_top_log_probs": pa.array([[[-0.5, -1.0]] * count for count in lengths]),
            "both": pa.array([{"a": 1, "b": [1.0, 2.0]}] * rows),
            "void": pa.nulls(rows),
            "half": pa.array(noise.random(rows).astype(np.float16)),
            "moment": pa.array(range(rows), pa.timestamp("ms")),
        }
    )


@cache
def sound(part: str) -> list[bytes]:
    whole, made = table(), []
    if part == "torch":
        files = [path.read_bytes() for path in sorted(FRAMEWORKS.rglob("*.pt"))]
        return [content for content in files if len(content) < SMALL]
    if part == "pickles":
        held = {name: whole.column(name).combine_chunks().to_numpy(False) for name in ("step", "half", "text")}
        plain = {
            "one": np.float32(1),
            "flags": np.ones((2, 3), bool),
            "big": np.arange(3, dtype=">i8"),
            "rows": [{"a": 1}],
        }
        return [pickle.dumps(held | plain, protocol) for protocol in range(6)]
    if part == "text":
        shelves = Path(mismatchctl.__file__).parent.glob("frameworks/*/presets.yaml")
        return [path.read_bytes()[:1000] for path in sorted(shelves)]
    if part == "arrow":
        views = {
            "view": pa.array([f"a long string, number {row}" for row in range(len(whole))], pa.string_view()),
            "runs": pa.RunEndEncodedArray.from_arrays(pa.array([10, len(whole)], pa.int32()), pa.array(["a", "b"])),
        }
        wide = pa.table({**{name: whole.column(name) for name in whole.column_names}, **views})
        for taken in (wide, whole.select(["rollout_log_probs", "response_mask", "step"])):
            for write in (pa.ipc.new_file, pa.ipc.new_stream):
                for packed in (None, "lz4", "zstd"):
                    made.append(BytesIO())
                    options = pa.ipc.IpcWriteOptions(compression=packed)
                    with write(made[-1], taken.schema, options=options) as writer:
                        writer.write_table(taken, max_chunksize=random.Random(len(made)).choice([7, 100]))
        return [one.getvalue() for one in made]
    split = {
        "rollout_log_probs.list.element": "BYTE_STREAM_SPLIT",
        **dict.fromkeys(("token_ids.list.element", "step"), "DELTA_BINARY_PACKED"),
        "text": "DELTA_BYTE_ARRAY",
        "blob": "DELTA_LENGTH_BYTE_ARRAY",
    }
    for packed in ("none", "snappy", "zstd", "gzip", "lz4", "brotli"):
        for version in ("1.0", "2.0"):
            for coded in ({"use_dictionary": True}, {"use_dictionary": False, "column_encoding": split}):
                made.append(BytesIO())
                pq.write_table(
                    whole, made[-1], compression=packed, data_page_version=version, row_group_size=9, data_page_size=64,
                    write_page_checksum=False, store_schema=len(made) % 3 > 0, **coded,
                )  # fmt: skip
    return [one.getvalue() for one in made]


def made(part: str, seed: int) -> bytes:
    rng = random.Random(seed)
    if part == "events":  # with correct checksums
        return VerbMaker(seed, Path()).events([{"step": rng.choice([0, 1, 2**70]), "actor/kl": 0.5}] * 3)
    data = bytearray(rng.choice(sound(part)))
    low, high = 0, len(data)
    if part in ("pages", "footer"):
        start = high - 8 - struct.unpack_from("<I", data, high - 8)[0]
        low, high = (4, start) if part == "pages" else (start, high)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        high = min(high, len(data))  # a replacement at the end can be shorter
        at = rng.randrange(low, high)
        if part == "arrow" and rng.random() < 0.5:
            at &= ~3
        match rng.randrange(5):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                word = rng.choice(_WORDS)
                data[at : at + len(word)] = word
            case 3:
                other, count = rng.randrange(low, high), rng.randint(1, 16)
                data[at : at + count] = data[other : other + count]
            case 4:
                data[at] = rng.choice([*range(9), 15, 16, 127, 128, 255])
    return bytes(data)


def take(part: str, data: bytes) -> str:
    """Read bytes like a command does, and return how the reading ended."""
    if part in COLUMNAR:
        return columns(part, data)
    words = data.decode(errors="replace")
    readers: dict[str, list[Callable[[], Any]]] = {
        "torch": [lambda: load_torch(Path("a.pt"), data)],
        "pickles": [lambda: unpickled(data)],
        "text": [lambda: parse_yaml(words), lambda: parse_json(words), lambda: parse_toml(words)],
        "events": [lambda: read_events(data)],
    }
    ended = "refused"
    for act in readers[part]:
        with suppress(*SENTENCES):
            act()
            ended = "decoded"
    return ended


def unpickled(data: bytes) -> Any:
    with open(os.memfd_create("a.pkl"), "wb") as file:
        file.write(data)
        file.flush()
        return load_pickle(Path(f"/proc/self/fd/{file.fileno()}"), {})


def read_events(data: bytes) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "events.out.tfevents.1"
        place.write_bytes(data)
        return read_run_log(place)


def columns(part: str, data: bytes) -> str:
    file = pa.BufferReader(data)
    try:
        contents: FileContents = ArrowContents.of(file) if part == "arrow" else ParquetContents.of(file)
        names = contents.schema.names
    except REFUSED:
        return "refused"
    ended = "decoded"
    for name in names:
        acts: list[Any] = [
            lambda name=name: contents.is_all_null(nullcontext(file), name),
            lambda name=name: contents.integer_ranges(nullcontext(file), name),
            *(
                lambda name=name, rows=rows: [*contents.decode(file, range(len(contents.rows)), [name], rows)]
                for rows in (None, 5)
            ),
        ]
        for act in acts:
            try:
                act()
            except REFUSED:
                ended = "refused"
    return ended


@dataclass
class Native:
    """Counts of decoded and refused files of a part, and the seeds of files that were not survived."""

    part: str
    files: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def natives(part: str, first: int, count: int) -> Native:
    """Decode the files of seeds in forks of a few hundred. A fork that dies leaves its seed."""
    found, seed, place = Native(part, count), first, mmap.mmap(-1, 8 + (64 << 10))
    totals: Counter[str] = Counter()
    sound(part)
    while seed < first + count:
        stop = min(first + count, seed + AT_ONCE)
        if not (child := os.fork()):
            _play(part, range(seed, stop), place)
        _, status = os.waitpid(child, 0)
        (at,) = struct.unpack_from("<q", place)
        place.seek(8)
        said = json.loads(place.readline())
        totals += Counter(said["ended"])
        found.wrong += said["wrong"]
        if status:
            found.wrong.append(f"seed {at}: ended by signal {os.WTERMSIG(status)}")
        seed = at + 1
    return Native(part, count, dict(totals), found.wrong)


def _play(part: str, seeds: range, place: mmap.mmap) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in seeds:
        struct.pack_into("<q", place, 0, seed)
        line = json.dumps({"ended": ended, "wrong": wrong}).encode() + b"\n"
        place[8 : 8 + len(line)] = line
        signal.alarm(PATIENCE)
        try:
            ended[take(part, made(part, seed))] += 1
        except BaseException as error:
            wrong.append(f"seed {seed}: {error!r}"[:200])
    line = json.dumps({"ended": ended, "wrong": wrong}).encode() + b"\n"
    place[8 : 8 + len(line)] = line
    os._exit(0)


if __name__ == "__main__":
    for one in sys.argv[3:] or PARTS:
        print(json.dumps(asdict(natives(one, int(sys.argv[1]), int(sys.argv[2])))), flush=True)
