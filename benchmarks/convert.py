"""Print the peak memory and speed of `convert` on JSONL files of several sizes (docs/reference/framework-files.md).

python benchmarks/convert.py 20 200 2000        # megabytes
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LENGTH = 900
CODE = """
import re, sys
from pathlib import Path
from mismatchctl.data.conversion import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]))
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def line(seed: int) -> str:
    rng = np.random.default_rng(seed)
    rollout = -rng.exponential(size=LENGTH)
    train = np.minimum(rollout + 0.05 * rng.normal(size=LENGTH), 0)
    lists = {"token_loss_mask": [0, *[1] * (LENGTH - 1)], "token_ids": rng.integers(0, 150_000, LENGTH).tolist()}
    lists |= {"generation_logprobs": rollout.tolist(), "prev_logprobs": train.tolist()}
    values = ", ".join(f'"{name}": [{value}]' for name, value in lists.items())
    return f'{{"input_lengths": [{LENGTH}], "sample_loss_mask": [1.0], "rewards": [1.0], {values}}}\n'


def main() -> None:
    lines = [line(seed) for seed in range(20)]
    print("| JSON lines | peak memory | MB/s | load |\n|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in map(int, sys.argv[1:] or ("20", "200")):
            source = Path(folder, "train_data_step1.jsonl")
            with source.open("w") as file:
                while file.tell() < megabytes * 1e6:
                    file.writelines(lines)
            begin = time.perf_counter()
            words = [sys.executable, "-c", CODE, str(source), str(Path(folder, "out.parquet"))]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            speed = megabytes / (time.perf_counter() - begin)
            peak = int(re.findall(r"\d+", done.stdout)[-1]) / 1024
            print(f"| {megabytes:,} MB | {peak:,.0f} MB | {speed:.0f} | {os.getloadavg()[0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
