"""Measure the cost of a third column: an analysis and a decode with and without `reference_log_probs`.

    python benchmarks/third_column.py --write benchmarks/results.md

Each case is a fresh process on one thread. The cases are interleaved, and ratios are computed within a round. Writes
the section "Third column".
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure import Rounds, make_dump, make_parser, measure_rounds, publish, report_cost, table

CASES = ("analyze two", "analyze three", "decode two", "decode three")
LIMIT = 0.40
REFERENCE = "reference_log_probs"


def add_reference(folder: Path, target: Path) -> None:
    """Copy the dump and add reference log-probs."""
    rng = np.random.default_rng(2)
    for path in folder.iterdir():
        table = pq.read_table(path)
        train = table["train_log_probs"].combine_chunks()
        values = np.minimum(train.values.to_numpy() + 0.003 * rng.standard_t(3, len(train.values)), 0)
        element = pa.field("element", pa.float32(), nullable=False)
        lists = pa.LargeListArray.from_arrays(
            train.offsets, pa.array(values.astype(np.float32)), type=pa.large_list(element)
        )
        split = [f"{name}.list.element" for name in ("rollout_log_probs", "train_log_probs", REFERENCE)]
        pq.write_table(
            table.append_column(pa.field(REFERENCE, lists.type, nullable=False), lists), target / path.name,
            row_group_size=512, compression="zstd", compression_level=1, use_dictionary=False,
            use_byte_stream_split=split, write_statistics=["step"], write_page_checksum=True,
        )  # fmt: skip


def run_case(case: str, folder: Path) -> None:
    """Run one analysis or decode in this process and print its cost. A first run on one file loads the loops."""
    from mismatchctl.api.analyze import analyze as analyze_module
    from mismatchctl.api.scan import OPTIONAL_COLUMNS
    from mismatchctl.data.problems import Problems
    from mismatchctl.data.reader import open_dump
    from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL

    analyze_module.choose_kernel = lambda tokens, device: COMPILED_KERNEL

    def analyze(path: Path) -> None:
        analyze_module.analyze([str(path)], threads=1)

    def decode(path: Path) -> None:
        dump = open_dump([str(path)], wanted=(*OPTIONAL_COLUMNS, REFERENCE))
        for unit in dump.units:
            for _ in dump.read(unit, Problems()):
                pass

    work = analyze if case.startswith("analyze") else decode
    work(min(folder.iterdir()))
    with report_cost():
        work(folder)


def main() -> None:
    given = make_parser(__doc__, 12e6, 4).parse_args()
    if given.case:
        run_case(given.case, given.folder)
        return
    with tempfile.TemporaryDirectory() as place:
        two, three = (Path(place) / name for name in ("two", "three"))
        two.mkdir(), three.mkdir()
        make_dump(two, int(given.tokens), 1000)
        add_reference(two, three)
        cases = {case: ("--case", case, "--folder", three if "three" in case else two) for case in CASES}
        rounds = measure_rounds(__file__, cases, given.repeat)
    machine = {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    head = HEAD.format(tokens=given.tokens / 1e6, repeat=given.repeat, **machine)
    publish(head + share_table(rounds), given.write)


def share_table(rounds: Rounds) -> str:
    """Return a table with each case and the added cost of the third column, relative to the analysis of two columns."""
    shares = {case: rounds.values("processor", case, "analyze two") for case in CASES}
    decode = [b - a for a, b in zip(shares["decode two"], shares["decode three"], strict=True)]
    added = [share - 1 for share in shares["analyze three"]]
    rest = [a - b for a, b in zip(added, decode, strict=True)]
    missed = ", **missed**" * (statistics.median(rest) > LIMIT)
    rows = {
        **shares,
        "added by the third column": added,
        "part of the added cost: decode": decode,
        f"part of the added cost: everything else (at most {LIMIT:.2f}{missed})": rest,
    }
    heads = ("processor time, relative to the analysis of two columns", "median", "least", "most")
    ends = (statistics.median, min, max)
    return table(heads, ((name, *(f"{end(values):.2f}" for end in ends)) for name, values in rows.items()))


HEAD = """## Third column

`benchmarks/third_column.py`: {tokens:g} M tokens with and without `reference_log_probs`, one thread, {repeat}
rounds of fresh processes, causes included (load {load:.1f} on {cores} cores). The reference adds two pairs of
policies, the error of each side. The goal is one decode and at most 40 % of a pair.

"""


if __name__ == "__main__":
    main()
