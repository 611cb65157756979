"""Measure the cost of recording in a training loop, and find the file settings that are fastest to read.

    python benchmarks/recorder.py --tokens 4e6 --repeat 7 --write benchmarks/results.md

Runs in one process on one thread with interleaved cases. States medians of wall time, and of ratios of processor time
within a round. The files are in the page cache. Writes the section "Recorder".
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure import COLUMNS, STEPS, make_parser, publish, table, temporary_dump

from mismatchctl.recorder.recorder import ROW_GROUP_TOKENS, Recorder, write_arrow, write_parquet

STEP_SECONDS = 100
"""Duration of a training step, for the share of the step that recording takes."""
CHOSEN = "as recorded: required lists, byte-stream-split, zstd 1, a million tokens a row group, checksums"


def list_settings(table: pa.Table) -> dict[str, tuple[pa.Table, dict[str, Any]]]:
    """Return cases by name: a table, and the options that differ from the recorder's Parquet settings."""
    rows = len(table) / len(table["rollout_log_probs"].combine_chunks().values)
    plain = {"use_byte_stream_split": False}
    nullable = pa.Table.from_arrays(
        [column.cast(pa.list_(pa.float32())) if pa.types.is_list(column.type) else column for column in table.columns],
        names=table.column_names,
    )
    groups = {"1/16": 1 / 16, "1/4": 1 / 4, "4": 4, "16": 16}
    return {
        CHOSEN: (table, {}),
        "lists and elements may be null": (nullable, {}),
        "floats plain": (table, plain),
        "floats in a dictionary": (table, {**plain, "use_dictionary": True}),
        "lz4": (table, {"compression": "lz4", "compression_level": None}),
        "snappy": (table, {"compression": "snappy", "compression_level": None}),
        "zstd 3": (table, {"compression_level": 3}),
        "not compressed": (table, {"compression": "none", "compression_level": None}),
        "not compressed, floats plain": (table, {"compression": "none", "compression_level": None, **plain}),
        "without checksums": (table, {"write_page_checksum": False}),
        "data pages of version 2": (table, {"data_page_version": "2.0"}),
        "pyarrow's defaults (snappy, dictionary, may be null)": (
            nullable,
            {"compression": "snappy", "compression_level": None, "use_dictionary": True, **plain},
        ),
        **{
            f"{name} million tokens a row group": (
                table,
                {"row_group_size": max(1, min(len(table), int(ROW_GROUP_TOKENS * factor * rows)))},
            )
            for name, factor in groups.items()
        },
    }


def make_required(table: pa.Table) -> pa.Table:
    """Return the table with lists in the form that the recorder writes."""
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False))
    types = [kind if field.name in COLUMNS else field.type for field in table.schema]
    names = table.column_names
    return table.cast(pa.schema([pa.field(n, t, nullable=False) for n, t in zip(names, types, strict=True)]))


def decode_parquet(path: Path) -> None:
    with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=True) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=list(COLUMNS), use_threads=False)


def decode_arrow(path: Path) -> None:
    with pa.memory_map(str(path)) as source:
        options = pa.ipc.IpcReadOptions(use_threads=False)
        reader = pa.ipc.open_file(source, options=options)
        for number in range(reader.num_record_batches):
            reader.get_batch(number)


def time_call(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    run()
    return clock() - started


def settings_table(folder: Path, content: pa.Table, repeat: int) -> str:
    """Return a table with the file size and the times to write and decode for each setting."""
    cases: dict[str, tuple[Path, Callable[[Any], None], Callable[[Path], None]]] = {}
    for name, (written, changed) in list_settings(content).items():
        path = folder / f"{len(cases)}.parquet"
        write = lambda handle, c=written, s=changed: write_parquet(c, handle, **s)  # noqa: E731
        cases[name] = (path, write, decode_parquet)
    for compression in ("lz4", "zstd"):
        path = folder / f"{compression}.arrow"
        write = lambda handle, how=compression: write_arrow(content, handle, how)  # noqa: E731
        cases[f"Arrow IPC, {compression}"] = (path, write, decode_arrow)

    def write_case(name: str) -> None:
        with open(cases[name][0], "wb") as handle:
            cases[name][1](handle)

    rng = np.random.default_rng(0)
    writing, reading = [], []
    for _ in range(repeat):  # in a random order
        order = rng.permutation(list(cases)).tolist()
        writing.append({name: time_call(lambda n=name: write_case(n), time.process_time) for name in order})
        reading.append({name: time_call(lambda n=name: cases[n][2](cases[n][0]), time.process_time) for name in order})
    tokens = len(content["rollout_log_probs"].combine_chunks().values)
    lines = []
    for name in cases:
        size = cases[name][0].stat().st_size / tokens
        read, wrote = (statistics.median(r[name] / r[CHOSEN] for r in rounds) for rounds in (reading, writing))
        lines.append((name, f"{size:.2f}", f"{read:.2f}", f"{wrote:.2f}"))
    speed = tokens / statistics.median(r[CHOSEN] for r in reading) / 1e6
    text = table(("setting", "bytes/token", "time to decode", "time to write"), lines)
    return f"{text}\n1.00 is {speed:.0f} M tokens/s decoded."


def write_table(folder: Path, content: pa.Table, repeat: int) -> str:
    """Return a table with the time of `write` for padded tensors and lists, with and without the background thread."""
    arrays = {name: content[name].to_pylist() for name in COLUMNS}
    lengths = np.array([len(row) for row in arrays["rollout_log_probs"]])
    width, tokens = int(lengths.max()), int(lengths.sum())
    mask = np.arange(width) < lengths[:, None]
    padded = {}
    for name, rows in arrays.items():
        padded[name] = np.zeros((len(rows), width), np.float32)
        padded[name][mask] = np.concatenate([np.array(row, np.float32) for row in rows])
    ragged = {name: [row[:length] for row, length in zip(padded[name], lengths, strict=True)] for name in COLUMNS}
    inputs = {"padded [B, T]": {**padded, "response_mask": mask}, "list of rows": ragged}
    makes: dict[str, dict[str, Any]] = {
        "Parquet": {}, "Arrow": {"format": "arrow"}, "Parquet, background=2": {"background": 2},
    }  # fmt: skip
    heads = (
        f"{len(lengths):,} sequences, {tokens / 1e6:.2f} M tokens, width {width:,}",
        "ms in `write`", "ms until on disk", "M tokens/s", "MB/s of log-probs", f"share of a step of {STEP_SECONDS} s",
    )  # fmt: skip
    rows = []
    cases = [(made, given) for made in makes for given in inputs]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {case: [] for case in cases}
    for step in range(repeat):
        for made, given in cases:
            recorder = Recorder(folder / "recorded", **makes[made])
            inside = time_call(lambda r=recorder, g=given, s=step: r.write(step=s, **inputs[g]))
            found[made, given].append((inside, inside + time_call(recorder.close)))
    for (made, given), times in found.items():
        inside, whole = (statistics.median(column) for column in zip(*times, strict=True))
        rates = f"{tokens / whole / 1e6:.1f}", f"{8 * tokens / whole / 1e6:.0f}"
        times = f"{1e3 * inside:.0f}", f"{1e3 * whole:.0f}"
        rows.append((f"{made}, {given}", *times, *rates, f"{100 * inside / STEP_SECONDS:.2f} %"))
    return table(heads, rows)


def step_table(folder: Path, repeat: int, rows: int = 1024, width: int = 4096) -> str:
    """Return a table with the time of `write` for one step of padded responses with token ids."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(7.6, 0.7, rows).astype(int) + 16, width)
    rollout = -rng.exponential(0.5, (rows, width)).astype(np.float32)
    columns = {
        "rollout_log_probs": rollout,
        "train_log_probs": rollout + rng.normal(0, 0.01, (rows, width)).astype(np.float32),
        "response_mask": (np.arange(width) < lengths[:, None]).astype(np.int64),
        "token_ids": rng.integers(0, 150_000, (rows, width)),
        "prompt_id": np.arange(rows) // 8,
    }
    heads = "", "ms in `write`", "ms until on disk", f"share of a step of {STEP_SECONDS} s"
    lines = []
    for name, options in {"Parquet": {}, "Parquet, background=2": {"background": 2}}.items():
        times = []
        for step in range(repeat):
            recorder = Recorder(folder / name, **options)
            inside = time_call(lambda r=recorder, s=step: r.write(step=s, **columns))
            times.append((inside, inside + time_call(recorder.close)))
        inside, whole = (statistics.median(column) for column in zip(*times, strict=True))
        lines.append((name, f"{1e3 * inside:.0f}", f"{1e3 * whole:.0f}", f"{100 * inside / STEP_SECONDS:.2f} %"))
    title = f"### A step of {rows:,} x {width:,} tokens, {lengths.sum() / 1e6:.2f} M of them valid"
    return f"{title}\n\n{table(heads, lines)}"


def main() -> None:
    parser = make_parser(__doc__, 4e6, 7)
    parser.add_argument("--means", type=int, nargs="+", default=[400, 2500], help="mean lengths, one table each")
    given = parser.parse_args()
    pa.set_cpu_count(1)
    parts = [HEAD.format(repeat=given.repeat, load=os.getloadavg()[0])]
    for mean in given.means:
        with temporary_dump(given.tokens * STEPS, mean) as folder:
            content = make_required(pq.read_table(min(folder.glob("step_*.parquet"))).combine_chunks())
            title = f"### {len(content):,} sequences of {mean:,} tokens on average"
            tables = write_table(folder, content, given.repeat), settings_table(folder, content, given.repeat)
            parts.append("\n".join([f"{title}\n", *tables]))
            print(parts[-1], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        parts.append(step_table(Path(folder), given.repeat))
    publish("\n\n".join(parts) + "\n", given.write)


HEAD = """## Recorder

`benchmarks/recorder.py`: one process, one thread, {repeat} rounds of interleaved cases, medians, files in the
page cache (load {load:.1f}). `ms in write` is the time that the training loop waits. With `background`, a
thread does the rest. Times to decode and to write are ratios of processor time to the recorder's own
settings."""


if __name__ == "__main__":
    main()
