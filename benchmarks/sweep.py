"""Measure the cost of a sweep with 1,000 points relative to one `analyze`, single runs and a padded torch loop.

    python benchmarks/sweep.py --tokens 20e6 --repeat 3 --write benchmarks/results.md

Each case runs in a fresh process on one thread, and the cases are interleaved. Processor time includes imports. The
table states medians, their ratio to one `analyze` of the same round, and peak memory. Writes the section "sweep".
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from measure import COLUMNS, make_parser, measure, measure_rounds, publish, report, table, temporary_dump

SINGLE_RUNS, PADDED_THRESHOLDS = 50, 5
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


def run_case(case: str, folder: Path) -> None:
    """Run one case in this process and print its cost."""
    if case == PADDED:
        padded_loop(folder)
    else:
        from mismatchctl.api.analyze.analyze import analyze
        from mismatchctl.api.sweep.study import Study, ThresholdAxis
        from mismatchctl.api.sweep.sweep import sweep
        from mismatchctl.frameworks.registry import find_preset

        if case in SWEEPS:
            name, axes = SWEEPS[case]
            study = Study(find_preset(name), tuple(ThresholdAxis.parse(path, values) for path, values in axes.items()))
            sweep([str(folder)], [study], threads=1)
        else:
            for _ in range(SINGLE_RUNS if case == RUNS else 1):
                analyze([str(folder)], [find_preset("token_tis")], threads=1)
    report(time.perf_counter(), time.process_time())


def padded_loop(folder: Path) -> None:
    """Pad the sequences of each step, then loop over thresholds, as notebooks do."""
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


def cost_table(folder: Path, tokens: int, mean: int, repeat: int, once: bool) -> str:
    """Return the table for one dump."""
    given, cases = ("--folder", str(folder)), [ANALYZE, *SWEEPS]
    rounds = measure_rounds(__file__, {case: ("--case", case, *given) for case in cases}, repeat)
    base, rows = rounds.median("processor", ANALYZE), []
    for case in cases:
        ratio, memory = rounds.median("processor", case, ANALYZE), rounds.median("memory", case)
        rows.append((case, rounds.spread("processor", case), f"{ratio:.2f}", f"{memory:,.0f}"))
    if once:
        names = {RUNS: f"{RUNS} (once, one process)", PADDED: f"{PADDED}, {PADDED_THRESHOLDS} truncations (once)"}
        for case, name in names.items():
            found = measure(__file__, "--case", case, *given)
            rows.append((name, f"{found.processor:.1f}", f"{found.processor / base:.0f}", f"{found.memory:,.0f}"))
    heads = "case", "seconds, median [least, most]", "relative to one `analyze`", "peak memory, MB"
    return f"{tokens / 1e6:g} M tokens, mean length {mean:,}, {repeat} rounds\n\n{table(heads, rows)}"


def main() -> None:
    parser = make_parser(__doc__, 20e6, 3)
    parser.add_argument("--means", type=int, nargs="+", default=[400, 2500], help="mean lengths, one dump each")
    given = parser.parse_args()
    if given.case:
        run_case(given.case, given.folder)
        return
    tables = []
    for number, mean in enumerate(given.means):
        with temporary_dump(given.tokens, mean) as folder:
            last = number == len(given.means) - 1
            tables.append(cost_table(folder, int(given.tokens), mean, given.repeat, once=last))
            print(tables[-1], flush=True)
    publish("\n".join([HEAD, *tables]), given.write)


HEAD = """## sweep

`benchmarks/sweep.py`: processor time of fresh processes on one thread, imports included, with ratios within a
round. The padded loop computes one truncation after the other with four numbers each. The goal is at most 1.5
times one `analyze`.
"""


if __name__ == "__main__":
    main()
