"""Measure processor time and peak memory of `advise` and `analyze` on synthetic dumps.

    python benchmarks/advise_cost.py FOLDER [TOKENS ...]

Writes the dumps to FOLDER and runs each command in a fresh process with one thread. Prints the table of "Cost" in
docs/methods/advice.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTH, RESPONSES, STEPS, VOCABULARY = 500, 8, 10, 50_000
NOISE = 0.03


def make_dump(path: Path, tokens: int) -> None:
    """Write responses of about `LENGTH` tokens, `RESPONSES` per prompt, in `STEPS` steps."""
    random = np.random.default_rng(7)
    count = max(tokens // LENGTH // RESPONSES, STEPS) * RESPONSES
    lengths = random.integers(LENGTH // 2, LENGTH * 3 // 2, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rollout = -random.exponential(0.5, offsets[-1]).astype(np.float32)
    train = np.minimum(rollout + random.normal(-(NOISE**2) / 2, NOISE, len(rollout)).astype(np.float32), 0)
    ids = np.minimum(random.zipf(1.3, len(rollout)), VOCABULARY).astype(np.int32)
    columns = {"rollout_log_probs": rollout, "train_log_probs": train, "token_ids": ids}
    lists = {name: pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for name, values in columns.items()}
    prompt = np.arange(count) // RESPONSES
    scalars = {"prompt_id": prompt, "step": prompt * STEPS // (count // RESPONSES), "reward": random.random(count)}
    pq.write_table(pa.table({**lists, **scalars}), path, row_group_size=1024)


def measure_command(*arguments: str) -> tuple[float, float]:
    """Run a command, and return its processor seconds and peak memory in MiB."""
    command = [sys.executable, "-m", "mismatchctl", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: status {status}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main(folder: Path, sizes: list[int]) -> None:
    """Print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    print("| tokens | analyze: CPU s, MiB | advise | advise / analyze |")
    print("|---|---|---|---|")
    for size in sizes:
        path = folder / f"{size}.parquet"
        if not path.exists():
            make_dump(path, size)
        analyze = measure_command("analyze", str(path), "--threads", "1", "-q")
        advise = measure_command("advise", str(path), "-q")
        cells = [f"{seconds:.1f}, {memory:,.0f}" for seconds, memory in (analyze, advise)]
        print(f"| {size:,} | {' | '.join(cells)} | {advise[0] / analyze[0]:.1f} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]] or [100_000, 1_000_000, 5_000_000])
