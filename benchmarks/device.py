"""Compare an accelerator with the CPU: reductions, the copy of the tokens, and whole analyses.

    python benchmarks/device.py --write benchmarks/results.md

Whole analyses run in fresh processes, interleaved, and include the start of torch and of the device. Without an
accelerator, the tables say "not measured". Writes the section "GPU".
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from measure import make_dump, make_parser, measure_rounds, publish, report_cost, table

from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.kernels.device_kernel import BLOCK_TOKENS, DeviceKernel, accelerators

COUNTS = (0, 5, 50)
BYTES = 8
"""Bytes copied per token: two log-probs in float32."""
NOT_MEASURED = "not measured"


def make_corrections(number: int) -> list[Correction]:
    """Make corrections whose bounds most sequences of a heavy-tailed dump reach."""
    bounds = [1.02 + 0.002 * index for index in range(number)]
    return [
        Correction(name=f"within {bound:.3f}", weight=Weight(truncate=bound), gates=(Gate(keep=(1 / bound, bound)),))
        for bound in bounds
    ]


def run_case(device: str, number: int, folder: Path, threads: int) -> None:
    """Run one analysis in this process and print its cost, including the start of torch and of the device."""
    from mismatchctl.api.analyze.analyze import analyze

    with report_cost():
        analyze([str(folder)], make_corrections(number), threads=threads, device=device)  # type: ignore[arg-type]


def measure_rate(work: Callable[[], object], repeat: int, finish: Callable[[], None]) -> float:
    """Return how often per second a computation finishes on the device, as a median."""
    work()
    finish()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        finish()
        seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds)


def measure_kernel(device: str, repeat: int) -> list[float]:
    """Return tokens per second: copied through page-locked memory, then reduced with each number of corrections."""
    import torch

    from mismatchctl.core.batch import Segments, TokenBatch
    from mismatchctl.core.bins import new_layer_table
    from mismatchctl.measure.kernels.device_kernel import to_device
    from mismatchctl.measure.kernels.kernel import BUCKETS, PairTables, RunTables, SequencePlaces

    rng, location, kernel = np.random.default_rng(0), torch.device(device), DeviceKernel([device])
    offsets = np.append(np.arange(0, BLOCK_TOKENS, 2500), BLOCK_TOKENS)
    rollout = -rng.exponential(0.5, BLOCK_TOKENS).astype(np.float32)
    train = np.minimum(rollout + 0.01 * rng.standard_t(3, BLOCK_TOKENS), 0).astype(np.float32)
    batch = TokenBatch(Segments(offsets), rollout, train, rows=np.arange(len(offsets) - 1))
    buckets, pair, run = np.arange(len(batch)) % BUCKETS, PairTables(), RunTables(new_layer_table(len(batch)))
    places = SequencePlaces(buckets, buckets, np.arange(len(batch)))
    blocks = kernel.split_blocks(batch)  # while the object exists, work runs on its stream
    _, block = next(blocks)

    def finish() -> None:
        if location.type == "cuda":
            torch.cuda.synchronize(location)

    def copy() -> None:
        to_device(rollout, location)
        to_device(train, location)

    def sums(given: list[Correction]) -> None:
        ratios = kernel.compute_ratios(block.train, block.rollout, block.segments)
        kernel.reduce_tokens(ratios, None, places, pair, run)
        for correction in given:
            correction_columns(correction, {"train/rollout": ratios}, ratios.k3_sum, block, all_tokens=True)

    rates = [measure_rate(copy, repeat, finish)]
    rates += [measure_rate(partial(sums, make_corrections(number)), repeat, finish) for number in COUNTS]
    return [each * BLOCK_TOKENS for each in rates]


def kernel_table(devices: tuple[str, ...], repeat: int) -> str:
    """Return a table with the rates of the copy and of the reductions."""
    found = measure_kernel(devices[0], repeat) if devices else []
    names = ["copy to the device", *(f"sums and {number} corrections, on the device" for number in COUNTS)]
    cells = [(f"{each / 1e6:,.0f}", f"{each / found[0]:.0%}") for each in found] or [(NOT_MEASURED, "")] * len(names)
    rows = ((name, *own) for name, own in zip(names, cells, strict=True))
    text = table(("work of one thread on a block", "M tokens/s", "relative to the copy"), rows)
    if found:
        text += f"\nThe copy moves {found[0] * BYTES / 1e9:.1f} GB/s, including the copy into page-locked memory.\n"
    return text


def analysis_table(devices: tuple[str, ...], folder: Path, tokens: int, repeat: int, threads: int) -> str:
    """Return a table with the wall time of an analysis on the CPU and on the device, by number of corrections."""
    rows: list[tuple[object, ...]] = []
    for number in COUNTS if devices else ():
        arguments = ("--corrections", number, "--folder", folder, "--threads", threads)
        rounds = measure_rounds(__file__, {case: ("--case", case, *arguments) for case in ("cpu", "cuda")}, repeat)
        cpu, cuda = (f"{rounds.median('wall', case):.1f}" for case in ("cpu", "cuda"))
        rows.append((number, cpu, cuda, f"{rounds.median('wall', 'cuda', 'cpu'):.2f}"))
    rows = rows or [(number, NOT_MEASURED, NOT_MEASURED, "") for number in COUNTS]
    about = f"{tokens / 1e6:g} M tokens, {threads} threads, {repeat} rounds" if devices else "No accelerator"
    return f"{about}\n\n" + table(("corrections", "CPU, s", "device, s", "device / CPU"), rows)


def main() -> None:
    parser = make_parser(__doc__, 200e6, 5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--corrections", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        run_case(given.case, given.corrections, given.folder, given.threads)
        return
    devices, tokens = accelerators(), int(given.tokens)
    where = DeviceKernel(devices).device if devices else "no accelerator"
    sections = [HEAD.format(device=where, processors=os.cpu_count(), load=os.getloadavg()[0])]
    sections += ["### Reductions only\n", kernel_table(devices, given.repeat), "### A whole analysis\n"]
    with tempfile.TemporaryDirectory() as location:
        folder = Path(location)
        if devices:
            make_dump(folder, tokens, 2500)
        sections.append(analysis_table(devices, folder, tokens, given.repeat, given.threads))
    publish("\n".join(sections), given.write)


HEAD = """## GPU

`benchmarks/device.py` on {device}, next to {processors} cores (load {load:.1f}). Nearly all sequences of this
dump reach a bound of every correction, the worst case for the kernel. Whole analyses are fresh processes,
interleaved, and include the start of torch and of the device.
"""


if __name__ == "__main__":
    main()
