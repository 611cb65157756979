"""What a sweep costs: 1,000 points against one `analyze`, against single runs, and against a padded torch loop.

    python benchmarks/sweep.py --tokens 20e6 --repeat 3 --write docs/benchmarks-sweep.md

Every case runs in a fresh process on one thread (its processor time counts, imports included), the cases interleaved;
the table gives medians and their ratio to one `analyze` of the same round, and the peak of resident memory (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

STEPS, PER_PROMPT, LONGEST = 16, 8, 16384
SINGLE_RUNS, PADDED_THRESHOLDS = 50, 5
COLUMNS = ("rollout_log_probs", "train_log_probs")
ANALYZE, RUNS, PADDED = "analyze, 1 correction", f"analyze, {SINGLE_RUNS} times", "padded torch loop"
SWEEPS = {
    "sweep, 1,000 truncations of token weights": ("token_tis", {"weight.truncate": "1.01:4:1000:log"}),
    "sweep, 1,000 geometric rejections": ("geo_rs", {"gates.0.keep": "1.0001:1.1:1000:log"}),
    "sweep, 1,000 token rejections": ("slime-mis", {"gates.0.keep.1": "1.01:4:1000:log"}),
    "sweep, 32 x 32 weights and rejections": (
        "miles-moe-2",
        {"weight.clip.1": "1.1:4:32", "gates.0.keep.1": "1.0001:1.1:32:log"},
    ),
}


def make_dump(folder: Path, tokens: int, mean: int) -> None:
    """Log-normal lengths, small noise with heavy tails; one file and one training step each."""
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        lengths: list[int] = []
        while sum(lengths) < tokens // STEPS:
            lengths.append(int(np.clip(rng.lognormal(np.log(mean) - 0.5, 1.0), 16, LONGEST)))
        count = len(lengths) // PER_PROMPT * PER_PROMPT
        offsets = np.concatenate([[0], np.cumsum(lengths[:count])])
        rollout = -rng.exponential(0.5, offsets[-1]).astype(np.float32)
        train = np.minimum(rollout + 0.01 * rng.standard_t(3, offsets[-1]).astype(np.float32), 0).astype(np.float32)
        lists = [pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)) for values in (rollout, train)]
        table = pa.table(
            {
                "step": np.full(count, step),
                "prompt_id": np.arange(count) // PER_PROMPT,
                "sequence_id": np.arange(count),
                "reward": rng.random(count),
                **dict(zip(COLUMNS, lists, strict=True)),
            }
        )
        split = [f"{name}.list.element" for name in COLUMNS]
        pq.write_table(
            table, folder / f"step_{step:05d}.parquet", row_group_size=512, compression="zstd", compression_level=1,
            use_dictionary=False, use_byte_stream_split=split,
        )  # fmt: skip


def run_case(case: str, folder: Path) -> None:
    """One case, in this process; prints its peak memory."""
    if case == PADDED:
        padded_loop(folder)
    else:
        from mismatchctl.analyze import analyze
        from mismatchctl.frameworks import preset
        from mismatchctl.sweep import Axis, Study, sweep

        if case in SWEEPS:
            name, axes = SWEEPS[case]
            study = Study(preset(name), tuple(Axis.parse(path, values) for path, values in axes.items()))
            sweep([str(folder)], [study], threads=1)
        else:
            for _ in range(SINGLE_RUNS if case == RUNS else 1):
                analyze([str(folder)], [preset("token_tis")], threads=1)
    status = Path("/proc/self/status").read_text()
    print(json.dumps(int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])))


def padded_loop(folder: Path) -> None:
    """What notebooks do: pad a step's sequences, then loop over thresholds."""
    import torch

    torch.set_num_threads(1)
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path, columns=list(COLUMNS)).to_pydict()
        rollout, train = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in table[name]], batch_first=True)
            for name in COLUMNS
        )
        lengths = torch.tensor([len(row) for row in table[COLUMNS[0]]])
        mask = torch.arange(rollout.shape[1])[None, :] < lengths[:, None]
        ratio = torch.exp(torch.clamp(train - rollout, -20, 20))
        for threshold in np.geomspace(1.01, 4, PADDED_THRESHOLDS):
            weights = torch.clamp(ratio, max=float(threshold)) * mask
            bounded = ((ratio > threshold) & mask).sum() / mask.sum()
            ess = weights.sum() ** 2 / (mask.sum() * (weights**2).sum())
            per_sequence = weights.sum(dim=1) / lengths
            _ = float(bounded), float(ess), float(weights.sum() / mask.sum()), float(per_sequence.var())


def measure(case: str, folder: Path) -> tuple[float, float]:
    """(seconds of processor time, MB) of a case in a fresh process."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, json.loads(done.stdout) / 1000


def table_of(folder: Path, tokens: int, mean: int, repeat: int, once: bool) -> str:
    """Markdown for one dump."""
    cases = [ANALYZE, *SWEEPS]
    rounds = [{case: measure(case, folder) for case in cases} for _ in range(repeat)]
    base = statistics.median(found[ANALYZE][0] for found in rounds)
    lines = [
        f"{tokens / 1e6:g} M tokens, mean length {mean:,}, {repeat} rounds", "",
        "| case | seconds, median [least, most] | against one `analyze` | peak memory, MB |", "|---|---|---|---|",
    ]  # fmt: skip
    for case in cases:
        seconds, memory = zip(*(found[case] for found in rounds), strict=True)
        ratio = statistics.median(found[case][0] / found[ANALYZE][0] for found in rounds)
        spread = f"{statistics.median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"
        lines.append(f"| {case} | {spread} | {ratio:.2f} | {statistics.median(memory):,.0f} |")
    if once:
        seconds, memory = measure(RUNS, folder)
        lines.append(f"| {RUNS} (once, one process) | {seconds:.1f} | {seconds / base:.0f} | {memory:,.0f} |")
        seconds, memory = measure(PADDED, folder)
        name = f"{PADDED}, {PADDED_THRESHOLDS} truncations (once)"
        lines.append(f"| {name} | {seconds:.1f} | {seconds / base:.0f} | {memory:,.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=20e6)
    parser.add_argument("--means", type=int, nargs="+", default=[400, 2500], help="mean lengths, a dump each")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--write", type=Path, help="write the tables here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        run_case(given.case, given.folder)
        return
    tables = []
    for number, mean in enumerate(given.means):
        with tempfile.TemporaryDirectory() as name:
            make_dump(Path(name), int(given.tokens), mean)
            tables.append(
                table_of(Path(name), int(given.tokens), mean, given.repeat, once=number == len(given.means) - 1)
            )
            print(tables[-1], flush=True)
    text = "\n".join([HEAD, *tables])
    if given.write:
        given.write.write_text(text, encoding="utf-8")


HEAD = """# What a sweep costs

Made by `benchmarks/sweep.py` on a machine that did other work too: processor time of fresh processes on one thread,
imports included, ratios within rounds of cases that follow each other. The padded loop computes one truncation after
the other, four numbers each, without errors, groups or any other key, and its time grows with their number.

The goal was 1.5 times one `analyze` at most. It is met at a mean length of 2,500. At 400, where 20 M tokens are six
times as many sequences, 1,000 truncations of token weights and 1,000 token rejections miss it: they need a number for
every sequence and point.
"""


if __name__ == "__main__":
    main()
