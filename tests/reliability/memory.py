"""Peak memory of commands on small files that decode to millions of rows."""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.paths import ROOT

MOST_MB = 1000
_FLOATS = pa.list_(pa.field("element", pa.float32(), nullable=False))


def lists(lengths: Any, value: float = -0.5) -> pa.Array:
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(np.full(int(np.sum(lengths)), value, np.float32)), type=_FLOATS)


def rows(path: Path, lengths: Any, group: int = 1 << 26, **columns: pa.Array) -> None:
    values = lists(lengths)
    table = pa.table({"rollout_log_probs": values, "train_log_probs": values, **columns})
    pq.write_table(table, path, compression="zstd", row_group_size=group)


def texts(size: int, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["a" * size]))


def tokens(path: Path, sequences: Any, position: Any) -> None:
    values = pa.array(np.full(len(sequences), -0.5, np.float32))
    table = pa.table(
        {"rollout_log_probs": values, "train_log_probs": values, "sequence_id": sequences, "position": position}
    )
    pq.write_table(
        table,
        path,
        compression="zstd",
        use_dictionary=["rollout_log_probs", "train_log_probs"],
        column_encoding={"sequence_id": "DELTA_BINARY_PACKED", "position": "DELTA_BINARY_PACKED"},
    )


def arrow(path: Path, length: int) -> None:
    values = lists([length])
    table = pa.table({"rollout_log_probs": values, "train_log_probs": values})
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(table)


def plain_texts(path: Path, size: int, count: int) -> None:
    values = lists([4] * count)
    table = pa.table({"rollout_log_probs": values, "train_log_probs": values, "prompt_id": ["a" * size] * count})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)


def archive(path: Path, size: int) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (1, size // 4)}
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("rollout_log_probs.npy", "w", force_zip64=True) as stream,
    ):
        np.lib.format.write_array_header_1_0(stream, header)
        for _ in range(size >> 24):
            stream.write(bytes(1 << 24))


_COUNT = 20_000_000
FILES: dict[str, Callable[[Path], object]] = {
    "one row of 10 M equal tokens.parquet": lambda path: rows(path, [10_000_000]),
    "one row of 100 M equal tokens.parquet": lambda path: rows(path, [100_000_000]),
    "a row of 60 M tokens among 1,000 short ones.parquet": lambda path: rows(path, [4] * 1000 + [60_000_000]),
    "20 M empty rows.parquet": lambda path: rows(path, np.zeros(_COUNT, np.int64)),
    "20 M empty rows in 20 row groups.parquet": lambda path: rows(path, np.zeros(_COUNT, np.int64), 1 << 20),
    "advantages of 60 M values for 4 tokens.parquet": lambda path: rows(path, [4], advantages=lists([60_000_000], 1)),
    "an id of 3 MB in 1,000 rows.parquet": lambda path: rows(path, [4] * 1000, prompt_id=texts(3_000_000, 1000)),
    "an id of 50 MB in 1,000 rows.parquet": lambda path: rows(path, [4] * 1000, prompt_id=texts(50_000_000, 1000)),
    "ids of 1 MB in 1,000 rows, not encoded.parquet": lambda path: plain_texts(path, 1_000_000, 1000),
    "one long sequence of 20 M rows.parquet": lambda path: tokens(path, np.zeros(_COUNT, np.int64), np.arange(_COUNT)),
    "2 M sequences of one row.parquet": lambda path: tokens(path, np.arange(2_000_000), np.zeros(2_000_000, np.int64)),
    "one row of 60 M equal tokens.arrow": lambda path: arrow(path, 60_000_000),
    "a column of 4 GB in 4 MB.npz": lambda path: archive(path, 1 << 32),
}
"""Functions by file name that write the file."""


VERBS: dict[str, list[str]] = {
    "analyze": ["analyze", "{}", "-o", "out.json", "--html", "out.html", "--sequences", "out.parquet"],
    "diagnose": ["diagnose", "{}", "--json"],
    "compare": ["compare", "{}", "{}", "-o", "out.json", "--html", "out.html"],
    "gate": ["gate", "{}", "--rule", "k3:max=1", "--save-baseline", "out.json", "--html", "out.html", "--accept"],
}
"""Command lines by command."""


def measure(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    path = folder / f"hostile.{name.rpartition('.')[2]}"
    pid = os.fork()  # the memory for writing the file does not count
    if not pid:
        FILES[name](path)
        os._exit(0)
    os.waitpid(pid, 0)
    for verb, words in VERBS.items():
        command = [sys.executable, "-m", "mismatchctl", *(word.format(path.name) for word in words)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (folder / "stderr").open("wb") as stderr:
            process = subprocess.Popen([*command, "--force"] if verb != "diagnose" else command, cwd=folder,
                                       stdout=subprocess.DEVNULL, stderr=stderr, env=environment)  # fmt: skip
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        reported = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
        yield {
            "name": name,
            "verb": verb,
            "bytes": path.stat().st_size,
            "code": process.returncode,
            "mb": used.ru_maxrss // 1000,
            "cpu": round(used.ru_utime + used.ru_stime, 1),
            "wrong": reported[-300:] if process.returncode not in (0, 4) or "Traceback" in reported else "",
        }


if __name__ == "__main__":
    for one in sys.argv[1:] or FILES:
        with tempfile.TemporaryDirectory(prefix="memory-") as place:
            for found in measure(one, Path(place)):
                print(json.dumps(found), flush=True)
