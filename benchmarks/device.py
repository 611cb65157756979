"""Compare a GPU with the CPU: the times of whole analyses, the numbers in the Results, and the GPU memory.

    python benchmarks/device.py --write benchmarks/results.md

The analyses run in one process, so the start of torch and CUDA is measured separately. Writes the section "GPU".
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from measure import make_parser, publish, table, temporary_dump

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.core.batch import TokenBatch
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.reduction import MeasurePlan, reduce_batch
from mismatchctl.results.model import Result

PRESETS = ("token_tis", "seq_is", "geo_rs", "slime-mis", "nemo-icepop")
THREADS = (4, 16)
START = "import torch; torch.zeros(1, device='cuda').item()"


def make_cases() -> dict[str, list[Correction]]:
    """Return the corrections of each row. The last row is the worst case: nearly all sequences reach each bound."""
    bounds = [1.02 + 0.002 * index for index in range(5)]
    narrow = [
        Correction(name=f"within {bound:.3f}", weight=Weight(truncate=bound), gates=(Gate(keep=(1 / bound, bound)),))
        for bound in bounds
    ]
    presets = [find_preset(name) for name in PRESETS]
    return {"none": [], f"{len(presets)} presets": presets, f"{len(narrow)} narrow corrections": narrow}


def measure_start() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", START], check=True)
    return time.perf_counter() - start


def measure_rows(folder: Path, repeat: int) -> Iterator[tuple[object, ...]]:
    """Yield the rows of the table. After a warm-up, the CPU and the GPU take turns, and the fastest round counts."""
    for name, corrections in make_cases().items():
        for threads in THREADS:
            best, results = {"cpu": math.inf, "cuda": math.inf}, {}
            devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
            for number in range(repeat + 1):
                for device in devices:
                    start = time.perf_counter()
                    results[device] = analyze([str(folder)], corrections, threads=threads, device=device)
                    if number:
                        best[device] = min(best[device], time.perf_counter() - start)
            seconds = (f"{best[device]:.2f}" for device in devices)
            difference = f"{find_largest_difference(results['cpu'], results['cuda']):.1e}"
            yield name, threads, *seconds, f"{best['cuda'] / best['cpu']:.2f}", difference


def list_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from list_numbers(each)
    elif isinstance(value, (int, float)):
        yield float(value)


def find_largest_difference(one: Result, other: Result) -> float:
    """Return the largest relative difference between numbers of the runs in two Results."""
    a, b = (np.array([*list_numbers(json.loads(each.to_json())["runs"])]) for each in (one, other))
    unequal = a != b
    return float(np.max(np.abs(a - b)[unequal] / np.maximum(np.abs(a), np.abs(b))[unequal], initial=0.0))


def memory_rows(device: str) -> Iterator[tuple[object, ...]]:
    """Yield the peak GPU memory of one thread for a block of tokens."""
    import torch

    from mismatchctl.core.batch import Segments
    from mismatchctl.measure.kernels.device_kernel import BLOCK_TOKENS, DeviceKernel

    rng = np.random.default_rng(0)
    rollout, train, current = -rng.exponential(0.5, (3, BLOCK_TOKENS)).astype(np.float32)
    offsets = np.append(np.arange(0, BLOCK_TOKENS, 2500), BLOCK_TOKENS)
    rows, presets = np.arange(len(offsets) - 1), tuple(map(find_preset, PRESETS))
    for name, third in (("rollout and train", None), ("rollout, train and current", current)):
        batch = TokenBatch(Segments(offsets), rollout, train, third, rows=rows)
        has = frozenset({"current_log_probs"} if third is not None else ())
        torch.cuda.reset_peak_memory_stats()
        reduce_batch(batch, "run", MeasurePlan(presets, available_columns=has, kernel=DeviceKernel([device])))
        yield name, f"{torch.cuda.max_memory_allocated() / 1e6:.0f}"


def main() -> None:
    given = make_parser(__doc__, 50e6, 2).parse_args()
    from mismatchctl.measure.kernels.device_kernel import DeviceKernel, accelerators

    devices = accelerators()
    if not devices:
        sys.exit("no GPU found. The section stays as it is")
    start, rows = measure_start(), []
    with temporary_dump(given.tokens, 2500) as folder:
        for row in measure_rows(folder, given.repeat):
            print(*row, flush=True)
            rows.append(row)
    text = HEAD.format(
        device=DeviceKernel(devices).device, processors=os.cpu_count(), tokens=given.tokens / 1e6, start=start,
        repeat=given.repeat,
    )  # fmt: skip
    times = table(("corrections", "threads", "CPU, s", "GPU, s", "GPU / CPU", "largest difference"), rows)
    memory = table(("log-probs", "GPU memory of a thread, MB"), memory_rows(devices[0]))
    publish(f"{text}\n{times}\n{memory}", given.write)


HEAD = """## GPU

`benchmarks/device.py` on {device}, next to {processors} cores. The dump has {tokens:g} million tokens. The analyses ran
in one process, and the table shows the fastest of {repeat} rounds. The start of torch and CUDA takes another
{start:.1f} s. The last column shows the largest relative difference between two numbers of the Results.
"""


if __name__ == "__main__":
    main()
