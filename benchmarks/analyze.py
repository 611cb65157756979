"""Measure the time of `analyze` relative to a bare decode of the same columns, and its start-up time.

    python benchmarks/analyze.py --write benchmarks/results.md            # sections "analyze" and "start"
    python benchmarks/analyze.py --start --write benchmarks/results.md    # section "start" only

Each case runs in a fresh process, and the cases are interleaved. The section "analyze" does not count imports or the
loading of compiled loops. The section "start" measures whole commands.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from measure import (
    COLUMNS,
    make_dump,
    make_parser,
    measure,
    measure_rounds,
    publish,
    report_cost,
    table,
    temporary_dump,
)

from mismatchctl.__main__ import COLLECT_AFTER

if TYPE_CHECKING:
    from mismatchctl.core.batch import TokenBatch
    from mismatchctl.corrections.model import Correction
    from mismatchctl.data.catalog import ReadUnit
    from mismatchctl.measure.reduction import MeasurePlan
    from mismatchctl.measure.sums import ClusterTable

ROOT = Path(__file__).parent.parent
DECODE, BARE, CORRECTED = "decode of the two columns", "analyze, no correction", "analyze, five corrections"
PAGES = "decode by page, as in analyze"
NO_FINDINGS, SUMS = "five corrections, without findings", "reading and sums only"
CORE = "reading, sums by sequence and prompt only"
START = """\
Loaded libraries: numpy, pyarrow, pydantic, typer, rich, jinja2 and PyYAML. polars, numba, torch and matplotlib are
not loaded. If pandas is installed, pyarrow loads it, which takes longer. A large analysis loads the machine code of its
loops in 0.05 s."""
LARGE, COLD = "analyze of {:g} M tokens, one thread", "the same, with loops compiled at first use"
LIBRARIES = "import jinja2, numpy, pyarrow.parquet, pydantic, rich.console, typer.main, yaml"
CASES = (DECODE, PAGES, BARE, CORRECTED, NO_FINDINGS, SUMS, CORE)


def run_case(case: str, folder: Path, threads: int) -> None:
    """Run one case in this process and print its cost. Garbage is collected as rarely as by the command."""
    gc.set_threshold(COLLECT_AFTER)
    if case in (DECODE, PAGES):
        if case == PAGES:
            load_loops()
        with report_cost():
            decode(folder, threads, by_page=case == PAGES)
    else:
        from mismatchctl.api.analyze.analyze import analyze
        from mismatchctl.frameworks.registry import DEFAULT_CORRECTIONS, find_preset

        corrections = [] if case == BARE else [find_preset(name) for name in DEFAULT_CORRECTIONS]
        analyze([str(ROOT / "sample_data" / "dense")], corrections)
        if sum(pq.ParquetFile(file).metadata.num_rows for file in folder.iterdir()) > 1000:
            load_loops()
        with report_cost():
            if case in (SUMS, CORE):
                read_and_sum(folder, corrections, threads, core=case == CORE)
            else:
                analyze([str(folder)], corrections, threads=threads, findings=case != NO_FINDINGS)


def decode(folder: Path, threads: int, by_page: bool = False) -> None:
    """Decode every row group of the two columns, with pyarrow or page by page. Footers are read once."""

    def read(place: tuple[Path, pq.FileMetaData, int]) -> None:
        path, footer, group = place
        if by_page:
            from mismatchctl.data.parquet_pages import read_lists

            with pa.OSFile(str(path)) as file:
                found = read_lists(file, footer, footer.schema.to_arrow_schema(), [group], COLUMNS)
            assert len(found) == len(COLUMNS)
        else:
            file = pq.ParquetFile(path, metadata=footer)
            file.read_row_group(group, columns=list(COLUMNS), use_threads=False)

    footers = [(path, pq.read_metadata(path)) for path in sorted(folder.iterdir())]
    groups = [(path, footer, group) for path, footer in footers for group in range(footer.num_row_groups)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, groups))


def read_and_sum(folder: Path, corrections: Sequence[Correction], threads: int, core: bool) -> None:
    """Read and reduce each unit as `analyze` does, without merging, metrics or findings.

    With `core`, only compute the sums and extremes of each sequence and their sums by prompt, which corrections and
    standard errors need. Histograms, tails and breakdowns are left out.
    """
    from mismatchctl.api.scan import OPTIONAL_COLUMNS, UnitBatches
    from mismatchctl.data.reader import open_dump
    from mismatchctl.io.process import ordered_map
    from mismatchctl.measure.kernels import choose_kernel
    from mismatchctl.measure.reduction import MeasurePlan, reduce_batch

    dump = open_dump([str(folder)], wanted=OPTIONAL_COLUMNS)
    plan = MeasurePlan(tuple(corrections), kernel=choose_kernel(sum(unit.tokens for unit in dump.units), "cpu"))

    def reduce_unit(unit: ReadUnit) -> None:
        for batch in UnitBatches(dump, unit):
            if core:
                core_sums(batch, plan)
            else:
                reduce_batch(batch, unit.file.run, plan)

    for _ in ordered_map(reduce_unit, dump.units, threads):
        pass


def core_sums(batch: TokenBatch, plan: MeasurePlan) -> ClusterTable:
    """Add up the sequence columns of the mismatch and of each correction by cluster."""
    import numpy as np

    from mismatchctl.measure.columns import correction_columns, pair_columns
    from mismatchctl.measure.kernels.kernel import PairTables, SequencePlaces
    from mismatchctl.measure.reduction import correction_ratios
    from mismatchctl.measure.sums import BatchTable, cluster_hashes

    table, first = None, np.zeros(len(batch), np.int64)
    for _, block in plan.kernel.split_blocks(batch):
        ratios, places = correction_ratios(block, plan), SequencePlaces(*(first[: len(block)] for _ in range(3)))
        gap = ratios["train/rollout"]
        made = [pair_columns(gap, *plan.kernel.reduce_tokens(gap, block.position, places, PairTables()))]
        made += [correction_columns(each, ratios, made[0][0]["k3"], block, None) for each in plan.corrections]
        sums, maxima = ([values for own in kind for values in own.values()] for kind in zip(*made, strict=True))
        table = table or BatchTable(first, cluster_hashes(batch), first.view(np.uint64), len(sums), len(maxima))
        table.add(sums, maxima)
    assert table is not None
    return next(table.tables(1, np.zeros((0, len(table))), 0))


def load_loops() -> None:
    """Compile the kernel's loops, or load the stored machine code."""
    import numpy as np

    from mismatchctl.core.batch import Segments
    from mismatchctl.core.bins import new_layer_table
    from mismatchctl.data.parquet_pages import find_list_offsets, join_split_bytes
    from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL
    from mismatchctl.measure.kernels.kernel import PairTables, RunTables, SequencePlaces
    from mismatchctl.measure.sequence_terms import ValidTokens, compute_sequence_terms

    values = np.full(8, -1.0, np.float32)
    ratios = COMPILED_KERNEL.compute_ratios(values, values, Segments(np.array([0, 8])))
    first = np.zeros(1, np.int64)
    COMPILED_KERNEL.reduce_tokens(
        ratios, None, SequencePlaces(first, first, first), PairTables(), RunTables(new_layer_table(1))
    )
    COMPILED_KERNEL.find_outside(ratios, np.zeros(1, np.int64), -1.0, 1.0)
    segments, valid = Segments(np.array([0, 8])), np.ones(8, np.bool_)
    compute_sequence_terms(segments, values, values, valid, ValidTokens.of(segments, valid))
    body = np.zeros(8, np.uint8)
    find_list_offsets(body, 0, *(np.zeros(3, np.int64) for _ in range(3)))
    join_split_bytes(body, 0, 0, np.zeros(1, np.uint32))


def compare_with_decode(folder: Path, tokens: int, mean: int, repeat: int, threads: int) -> str:
    given = ("--folder", folder, "--threads", threads)
    rounds = measure_rounds(__file__, {case: ("--case", case, *given) for case in CASES}, repeat)
    heads = (
        "case", "processor seconds, median [least, most]", "M tokens/s", "relative to the decode", "in wall time",
        "relative to the decode by page", "peak memory, MB",
    )  # fmt: skip
    rows = []
    for case in CASES:
        speed = tokens / 1e6 / rounds.median("processor", case)
        ratios = (
            f"{rounds.median(*each):.2f}"
            for each in (("processor", case, DECODE), ("wall", case, DECODE), ("processor", case, PAGES))
        )
        memory = rounds.median("memory", case)
        rows.append((case, rounds.spread("processor", case), f"{speed:.0f}", *ratios, f"{memory:,.0f}"))
    about = f"{tokens / 1e6:g} M tokens, mean length {mean:,}, {threads} thread{'s' * (threads > 1)}, {repeat} rounds"
    return f"{about}\n\n{table(heads, rows)}"


def children_seconds() -> float:
    """Return the processor time of the child processes that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def start_table(tokens: int, repeat: int) -> str:
    """Measure whole processes: the bare interpreter, imports, --help, small analyses and a large one.

    The modules have bytecode, as in an installed package, regardless of PYTHONDONTWRITEBYTECODE.
    """
    command = shutil.which("mismatchctl", path=str(Path(sys.executable).parent)) or "mismatchctl"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "dump"
        large.mkdir()
        make_dump(large, tokens, 2500)
        small = [command, "analyze", str(ROOT / "sample_data" / "moe"), "--quiet", "--force"]
        whole = [command, "analyze", str(large), "--quiet", "--force", "--threads", "1", "-o", f"{folder}/result.json"]
        cases = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "imports alone": [sys.executable, "-c", LIBRARIES],
            "mismatchctl --help": [command, "--help"],
            "analyze of sample_data/moe": [*small, "-o", f"{folder}/result.json"],
            "analyze of sample_data/moe with its report": [*small, "--html", f"{folder}/report.html"],
            LARGE.format(tokens / 1e6): whole,
            COLD: whole,
        }
        for turn in range(repeat + 1):
            for name, arguments in cases.items():
                kept = {"NUMBA_CACHE_DIR": f"{folder}/{turn}"} if name == COLD else {}
                before, clock = children_seconds(), time.perf_counter()
                subprocess.run(arguments, check=True, capture_output=True, env=environment | kept)
                spent = children_seconds() - before, time.perf_counter() - clock
                if turn:  # the first run compiles loops and reads files from disk for the other runs
                    found.setdefault(name, []).append(spent)
    bare = statistics.median(spent for spent, _ in found["python -c pass"])
    heads = "command", "processor seconds, median [least]", "relative to the bare interpreter", "wall seconds"
    rows = []
    for name, costs in found.items():
        seconds, clocks = zip(*costs, strict=True)
        median, clock = statistics.median(seconds), statistics.median(clocks)
        rows.append((name, f"{median:.3f} [{min(seconds):.3f}]", f"{median / max(bare, 0.001):.0f}", f"{clock:.3f}"))
    return f"### Start\n\n{repeat} rounds\n\n{table(heads, rows)}\n{START}\n"


def main() -> None:
    parser = make_parser(__doc__, 50e6, 5)
    parser.add_argument("--start", action="store_true", help="measure the start only")
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        run_case(given.case, given.folder, given.threads)
        return
    if given.start:
        publish(start_table(int(given.tokens), given.repeat), given.write, "start")
        return
    tokens, sections = int(given.tokens), [HEAD]
    for mean in (2500, 400):
        with temporary_dump(tokens, mean) as folder:
            measure(__file__, "--case", CORRECTED, "--folder", str(folder))  # compile the missing loops
            for threads in (1, 2):
                sections.append(compare_with_decode(folder, tokens, mean, given.repeat, threads))
                print(sections[-1], flush=True)
    publish("\n".join(sections), given.write)
    publish(start_table(tokens, given.repeat), given.write, "start")


HEAD = f"""## analyze

`benchmarks/analyze.py` on {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f}). Each case is a fresh
process and cases are interleaved. Times are processor time. Ratios are computed within a round. `analyze`
computes everything that the report shows, findings included. The dump is stored as the recorder writes it.
`analyze` decodes such files page by page in about half the time of pyarrow. pyarrow decodes other files and
object stores.
"""


if __name__ == "__main__":
    main()
