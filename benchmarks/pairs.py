"""Measure the cost of the policy pairs in an analysis. A dump with current log-probs has three pairs.

    python benchmarks/pairs.py --write benchmarks/results.md

Each case leaves out some pairs and runs in a fresh process, and the cases are interleaved. Writes the section "Current
log-probs".
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure import make_parser, measure_rounds, publish, report_cost, table, temporary_dump

WITHOUT: dict[str, tuple[str, ...]] = {
    "all": (), "without the total": ("total",), "without the total and the drift": ("total", "drift"),
}  # fmt: skip


def add_current(folder: Path) -> None:
    """Add log-probs of a policy after an update to each file."""
    rng = np.random.default_rng(1)
    for path in folder.iterdir():
        table = pq.read_table(path)
        train = table["train_log_probs"].combine_chunks()
        current = np.minimum(
            train.values.to_numpy() + 0.02 * rng.standard_t(3, len(train.values)).astype(np.float32), 0
        )
        lists = pa.LargeListArray.from_arrays(train.offsets, pa.array(current.astype(np.float32)))
        pq.write_table(table.append_column("current_log_probs", lists), path, row_group_size=512, use_dictionary=False)


def run_case(case: str, folder: Path) -> None:
    """Run one analysis in this process and print its cost."""
    from mismatchctl.api.analyze import analyze as analyze_module
    from mismatchctl.measure import reduction
    from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL

    analyze_module.choose_kernel = lambda tokens, device: COMPILED_KERNEL  # for the first file too
    reduction.PAIRS = tuple(pair for pair in reduction.PAIRS if pair.name not in WITHOUT[case])
    analyze_module.analyze([str(min(folder.iterdir()))], threads=1)
    with report_cost():
        analyze_module.analyze([str(folder)], threads=1)


def main() -> None:
    given = make_parser(__doc__, 30e6, 6).parse_args()
    if given.case:
        run_case(given.case, given.folder)
        return
    with temporary_dump(given.tokens, 1000) as folder:
        add_current(folder)
        rounds = measure_rounds(
            __file__, {case: ("--case", case, "--folder", folder) for case in WITHOUT}, given.repeat
        )
    rows = ((case, rounds.spread("processor", case, "all")) for case in WITHOUT)
    head = HEAD.format(tokens=given.tokens / 1e6, repeat=given.repeat)
    publish(head + table(("analysis", "processor time, relative to all"), rows), given.write)


HEAD = """## Current log-probs

`benchmarks/pairs.py`: {tokens:g} M tokens with current log-probs, no correction, one thread, {repeat} rounds
of fresh processes: the median within a round, the least and the most. Such a dump is measured as three pairs:
the mismatch, the drift of the update, and the total from rollout to current. A dump without current log-probs
is measured as one.

"""


if __name__ == "__main__":
    main()
