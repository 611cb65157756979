"""Compare Ray with threads, with and without a killed worker.

    python benchmarks/cluster.py [--files 32] [--tokens 4000000] [--repeats 5] [--write benchmarks/results.md]

Each case is a fresh process with its own Ray on this machine, and the start of Ray is not counted. All Results must
have the same bytes. With more workers than cores, the times are not meaningful. Writes the section "Ray and threads".
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from measure import measure, publish, report_cost, table, write_lists  # noqa: E402

WORKERS = (1, 2, 4)
CORRECTIONS = ("token_tis", "geo_rs")
LENGTH, PER_PROMPT = 2000, 8


def make_step(folder: Path, step: int, tokens: int) -> None:
    """Write a file with one step of sequences of the same length, eight per prompt."""
    lengths = np.full(tokens // LENGTH // PER_PROMPT * PER_PROMPT, LENGTH)
    write_lists(folder / f"step_{step:05d}.parquet", lengths, np.random.default_rng(step), step, row_group_size=512)


def case(dump: str, engine: str, workers: int, result: str) -> None:
    """Run one analysis. `engine` is local, ray, or killed, which is Ray with one worker killed during the analysis."""
    from mismatchctl.api.analyze.analyze import analyze
    from mismatchctl.data.engines import LocalEngine, RayEngine
    from mismatchctl.frameworks.registry import find_preset

    corrections = [find_preset(name) for name in CORRECTIONS]
    if engine != "local":
        import ray

        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        analyze([dump], corrections, engine=RayEngine())  # workers start and load their modules
    if engine == "killed":
        threading.Thread(target=_kill_worker, daemon=True).start()
    with report_cost(), contextlib.redirect_stdout(sys.stderr):  # Ray reports the lost worker on stdout
        made = analyze([dump], corrections, engine=LocalEngine(workers) if engine == "local" else RayEngine()).to_json()
    Path(result).write_text(hashlib.sha256(made.encode()).hexdigest())
    sys.stdout.flush()
    os._exit(0)  # so that Ray cannot print after the report


def _kill_worker() -> None:
    """Kill a worker of this cluster while it computes a shard."""
    while True:
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                is_descendant = _is_descendant(int(folder.name), os.getpid())
                if is_descendant and (folder / "cmdline").read_bytes().startswith(b"ray::compute_on_worker"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    return
        time.sleep(0.01)


def _is_descendant(process: int, ancestor: int) -> bool:
    while process > 1 and process != ancestor:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process == ancestor


def main(
    files: int = 32,
    tokens: int = 4_000_000,
    repeats: int = 5,
    write: Path | None = None,
    scratch: Annotated[Path | None, typer.Option(help="Folder for the dump. [default: a temporary folder]")] = None,
) -> None:
    """Measure, print, and write the table."""
    cases = [(engine, workers) for workers in WORKERS for engine in ("local", "ray", "killed")]
    costs: dict[tuple[str, int], list[float]] = {one: [] for one in cases}
    hashes = set()
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        root = Path(made)
        dump = root / "run"
        dump.mkdir()
        for step in range(files):
            make_step(dump, step, tokens)
        measure(__file__, "case", str(dump), "local", "1", str(root / "hash"))  # warm up
        for _ in range(repeats):
            for engine, workers in cases:
                cost = measure(__file__, "case", str(dump), engine, str(workers), str(root / "hash"))
                costs[engine, workers].append(cost.wall)
                hashes.add((root / "hash").read_text())
    medians = {one: statistics.median(walls) for one, walls in costs.items()}
    publish(_format_section(files, tokens, repeats, medians, len(hashes)), write)
    if len(hashes) > 1:
        raise typer.Exit(1)


def _format_section(files: int, tokens: int, repeats: int, medians: dict[tuple[str, int], float], hashes: int) -> str:
    one = medians["local", 1]
    cases = ("local", "ray", "killed")
    rows = ((workers, *(f"{medians[name, workers] / one:.2f}" for name in cases)) for workers in WORKERS)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    same = "All Results have the same bytes." if hashes == 1 else f"MISSED: {hashes} different Results."
    return "\n".join(
        [
            "## Ray and threads",
            "",
            f"`benchmarks/cluster.py`: {files} files of {tokens:,} tokens, one machine with {os.cpu_count()} cores "
            f"(load {load}), medians of {repeats} fresh processes. Wall time, one thread is 1, without Ray's start.",
            "",
            table(("workers", "threads", "Ray", "Ray, one worker killed"), rows),
            same,
            "",
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        case(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        typer.run(main)
