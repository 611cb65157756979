"""What the benchmarks share: a made dump, and cases measured in fresh processes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

STEPS, PER_PROMPT, LONGEST = 16, 8, 16384
COLUMNS = ("rollout_log_probs", "train_log_probs")


def make_dump(folder: Path, tokens: int, mean: int) -> int:
    """About so many tokens: log-normal lengths, small noise with heavy tails; returns how many there are.

    A file is a training step, of one prompt at least.
    """
    rng, made = np.random.default_rng(0), 0
    for step in range(STEPS):
        lengths: list[int] = []
        while sum(lengths) < tokens // STEPS or len(lengths) < PER_PROMPT:
            lengths.append(int(np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0), 16, LONGEST)))
        count = len(lengths) // PER_PROMPT * PER_PROMPT
        known = np.array(lengths[:count], np.int64)
        write_lists(folder / f"step_{step:05d}.parquet", known, rng, step, row_group_size=512)
        made += int(known.sum())
    return made


def write_lists(path: Path, lengths: NDArray[np.int64], rng: np.random.Generator, step: int, **options: int) -> None:
    """One file as the recorder writes them, of sequences of these lengths."""
    count, offsets = len(lengths), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rollout = -rng.exponential(0.5, offsets[-1]).astype(np.float32)
    train = np.minimum(rollout + 0.01 * rng.standard_t(3, offsets[-1]).astype(np.float32), 0).astype(np.float32)
    element = pa.field("element", pa.float32(), nullable=False)
    lists = [
        pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values), type=pa.large_list(element))
        for values in (rollout, train)
    ]
    columns = {
        "step": pa.array(np.full(count, step)),
        "prompt_id": pa.array(np.arange(count) // PER_PROMPT),
        "sequence_id": pa.array(np.arange(count)),
        "reward": pa.array(rng.random(count)),
        **dict(zip(COLUMNS, lists, strict=True)),
    }
    required = pa.schema([pa.field(name, values.type, nullable=False) for name, values in columns.items()])
    pq.write_table(
        pa.table(columns, schema=required), path, compression="zstd", compression_level=1, use_dictionary=False,
        use_byte_stream_split=[f"{name}.list.element" for name in COLUMNS], write_statistics=["step"],
        write_page_checksum=True, **options,
    )  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What a process took: seconds by the clock, seconds of processor time, and its peak of resident memory in MB."""

    wall: float
    processor: float
    memory: float


def measure(script: str, *words: str) -> Cost:
    """A case of a script in a fresh process; the case ends by printing `report()`."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run([sys.executable, script, *words], check=True, capture_output=True, text=True, env=environment)
    wall, processor, memory = map(float, done.stdout.split()[-3:])
    return Cost(wall, processor, memory)


def in_turns(cases: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """The cases of each round, every other one backwards: what a case leaves behind is not always the same one's."""
    order = [*cases]
    for number in range(rounds):
        yield order[:: -1 if number % 2 else 1]


def report(wall: float, processor: float) -> None:
    """Print what the case took, and the peak memory of this process (VmHWM: that of a parent does not count)."""
    status = Path("/proc/self/status").read_text()
    memory = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1000
    print(wall, processor, memory)


def parser_of(about: str | None, tokens: float, repeat: int) -> argparse.ArgumentParser:
    """What all take; `case` and `folder` are given by `measure` alone."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=tokens)
    parser.add_argument("--repeat", type=int, default=repeat)
    parser.add_argument("--write", type=Path, help="write the tables here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser
