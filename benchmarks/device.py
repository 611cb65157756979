"""Compare an accelerator with the CPU: the arithmetic alone, the copy of the tokens, and whole analyses.

    python benchmarks/device.py --write benchmarks/results.md

Whole analyses run in fresh processes, interleaved, and count the start of torch and of the device. Without an
accelerator the tables say so.
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
from measure import in_rounds, make_dump, parser_of, publish, reported, table

from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.kernels.device_kernel import BLOCK_TOKENS, DeviceKernel, accelerators

COUNTS = (0, 5, 50)
BYTES = 8
"""Bytes per token that are copied: two log-probs in float32."""
NOT_MEASURED = "not measured"


def corrections(number: int) -> list[Correction]:
    """Rules on tokens whose bounds most sequences of a heavy-tailed dump reach."""
    bounds = [1.02 + 0.002 * index for index in range(number)]
    return [
        Correction(name=f"within {bound:.3f}", weight=Weight(truncate=bound), gates=(Gate(keep=(1 / bound, bound)),))
        for bound in bounds
    ]


def run_case(device: str, number: int, folder: Path, threads: int) -> None:
    """One whole analysis, in this process; reading Python's own modules is not counted, torch and the device are."""
    from mismatchctl.api.analyze.analyze import analyze

    with reported():
        analyze([str(folder)], corrections(number), threads=threads, device=device)  # type: ignore[arg-type]


def rate(work: Callable[[], object], repeat: int, finish: Callable[[], None]) -> float:
    """Return the median rate per second of a computation that the device has finished."""
    work()
    finish()
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        finish()
        seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds)


def arithmetic(device: str, repeat: int) -> list[float]:
    """Tokens a second: copied through page-locked memory; there, summed with each number of corrections."""
    import torch

    from mismatchctl.core.batch import Segments, TokenBatch
    from mismatchctl.core.bins import new_layer_table
    from mismatchctl.measure.kernels.device_kernel import to_device
    from mismatchctl.measure.kernels.kernel import BUCKETS, PairTables, RunTables, SequencePlaces

    rng, place, kernel = np.random.default_rng(0), torch.device(device), DeviceKernel([device])
    offsets = np.append(np.arange(0, BLOCK_TOKENS, 2500), BLOCK_TOKENS)
    rollout = -rng.exponential(0.5, BLOCK_TOKENS).astype(np.float32)
    train = np.minimum(rollout + 0.01 * rng.standard_t(3, BLOCK_TOKENS), 0).astype(np.float32)
    batch = TokenBatch(Segments(offsets), rollout, train, rows=np.arange(len(offsets) - 1))
    buckets, pair, run = np.arange(len(batch)) % BUCKETS, PairTables(), RunTables(new_layer_table(len(batch)))
    places = SequencePlaces(buckets, buckets, np.arange(len(batch)))
    blocks = kernel.split_blocks(batch)  # while the object exists, work runs on its stream
    _, block = next(blocks)

    def finish() -> None:
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    def copy() -> None:
        to_device(rollout, place)
        to_device(train, place)

    def sums(given: list[Correction]) -> None:
        ratios = kernel.compute_ratios(block.train, block.rollout, block.segments)
        kernel.reduce_tokens(ratios, None, places, pair, run)
        for correction in given:
            correction_columns(correction, {"train/rollout": ratios}, ratios.k3_sum, block, all_tokens=True)

    rates = [rate(copy, repeat, finish)]
    rates += [rate(partial(sums, corrections(number)), repeat, finish) for number in COUNTS]
    return [each * BLOCK_TOKENS for each in rates]


def arithmetic_table(devices: tuple[str, ...], repeat: int) -> str:
    """One row per number of corrections."""
    found = arithmetic(devices[0], repeat) if devices else []
    names = ["copy to the device", *(f"sums and {number} corrections, on the device" for number in COUNTS)]
    cells = [(f"{each / 1e6:,.0f}", f"{each / found[0]:.0%}") for each in found] or [(NOT_MEASURED, "")] * len(names)
    rows = ((name, *own) for name, own in zip(names, cells, strict=True))
    text = table(("work of one thread on a block", "M tokens/s", "of the copy's rate"), rows)
    if found:
        text += f"\nThe copy moves {found[0] * BYTES / 1e9:.1f} GB/s, its way into page-locked memory included.\n"
    return text


def whole_table(devices: tuple[str, ...], folder: Path, tokens: int, repeat: int, threads: int) -> str:
    """Seconds on the CPU and on the device, and their ratio within rounds."""
    rows: list[tuple[object, ...]] = []
    for number in COUNTS if devices else ():
        words = ("--corrections", number, "--folder", folder, "--threads", threads)
        rounds = in_rounds(__file__, {case: ("--case", case, *words) for case in ("cpu", "cuda")}, repeat)
        cpu, cuda = (f"{rounds.median('wall', case):.1f}" for case in ("cpu", "cuda"))
        rows.append((number, cpu, cuda, f"{rounds.median('wall', 'cuda', 'cpu'):.2f}"))
    rows = rows or [(number, NOT_MEASURED, NOT_MEASURED, "") for number in COUNTS]
    about = f"{tokens / 1e6:g} M tokens, {threads} threads, {repeat} rounds" if devices else "No accelerator here"
    return f"{about}\n\n" + table(("corrections", "CPU, s", "device, s", "device / CPU"), rows)


def main() -> None:
    parser = parser_of(__doc__, 200e6, 5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--corrections", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        run_case(given.case, given.corrections, given.folder, given.threads)
        return
    devices, tokens = accelerators(), int(given.tokens)
    where = DeviceKernel(devices).device if devices else "no accelerator (the tables wait for one)"
    sections = [HEAD.format(device=where, processors=os.cpu_count(), load=os.getloadavg()[0])]
    sections += ["### The arithmetic alone\n", arithmetic_table(devices, given.repeat), "### A whole analysis\n"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if devices:
            make_dump(folder, tokens, 2500)
        sections.append(whole_table(devices, folder, tokens, given.repeat, given.threads))
    publish("\n".join(sections), given.write)


HEAD = """## GPU

`benchmarks/device.py` on {device}, next to {processors} cores (load {load:.1f}). Nearly all sequences of this
dump reach a bound of every correction, the worst case for the kernel. Whole analyses are fresh processes,
interleaved, and include the start of torch and of the device.
"""


if __name__ == "__main__":
    main()
