"""What `--cache` saves: a dump, then the same with one step more. Writes a Markdown table.

python benchmarks/cache.py [--files 100] [--tokens 4000000] [--repeats 5] [--write docs/benchmarks-cache.md]

Every case is a process of its own. A first run without a cache, one that fills it, one on the same dump, and one on the
dump and a new file; all but the first take a cache in the state that the run before left. The goal: the last takes at
most 3 % of the first plus the new file's share of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from measure import measure, publish, reported, table  # noqa: E402

GOAL = 0.03
LENGTH, PER_PROMPT, ROWS = 2000, 8, 512
CORRECTIONS = ("token_tis", "geo_rs")


def make_step(folder: Path, step: int, tokens: int) -> None:
    """One step of its own noise in one file; sequences of one length, eight to a prompt."""
    rng = np.random.default_rng(step)
    count = tokens // LENGTH // PER_PROMPT * PER_PROMPT
    offsets = pa.array(np.arange(count + 1) * LENGTH)
    rollout = -rng.exponential(0.5, count * LENGTH).astype(np.float32)
    train = np.minimum(rollout + 0.01 * rng.standard_normal(count * LENGTH).astype(np.float32), 0)
    table = pa.table(
        {
            "step": np.full(count, step),
            "prompt_id": np.arange(count) // PER_PROMPT,
            "sequence_id": np.arange(count),
            "rollout_log_probs": pa.LargeListArray.from_arrays(offsets, pa.array(rollout)),
            "train_log_probs": pa.LargeListArray.from_arrays(offsets, pa.array(train)),
        }
    )
    pq.write_table(
        table, folder / f"step_{step:05d}.parquet", row_group_size=ROWS, compression="zstd", use_dictionary=False
    )


def case(dump: str, kept: str, threads: int, result: str) -> None:
    """One analysis, its time without the start of the interpreter; `kept` empty: without a cache."""
    from mismatchctl.api.analyze.analyze import analyze
    from mismatchctl.data.engines.cache import CachedEngine
    from mismatchctl.data.engines.engine import LocalEngine
    from mismatchctl.frameworks.registry import find_preset

    engine = CachedEngine(LocalEngine(threads), Path(kept)) if kept else LocalEngine(threads)
    with reported():
        made = analyze([dump], [find_preset(name) for name in CORRECTIONS], engine=engine).to_json()
    Path(result).write_text(hashlib.sha256(made.encode()).hexdigest())


def main(
    files: int = 100,
    tokens: int = 4_000_000,
    repeats: int = 5,
    threads: int = 2,
    write: Path | None = None,
    scratch: Annotated[Path | None, typer.Option(help="Where the dump is made; default: a temporary folder.")] = None,
) -> None:
    """Measure, print, and write the table."""
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        root = Path(made)
        dump, last = root / "run", root / f"step_{files:05d}.parquet"
        dump.mkdir()
        for step in range(files):
            make_step(dump, step, tokens)
        make_step(root, files, tokens)
        time.sleep(3)  # until the times of the files are relied on
        names = ("without", "filling", "same", "grown", "grown without")
        costs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        hashes: dict[str, set[str]] = {name: set() for name in names}
        measure(__file__, "case", str(dump), "", str(threads), str(root / "hash"))  # compiles; disks warm up
        for _ in range(repeats):
            kept = root / "kept"
            for name in names:
                if name == "grown":
                    shutil.move(last, dump / last.name)
                place = "" if name.endswith("without") else str(kept)
                cost = measure(__file__, "case", str(dump), place, str(threads), str(root / "hash"))
                costs[name].append((cost.wall, cost.processor, cost.memory))
                hashes[name].add((root / "hash").read_text())
            size = sum(place.stat().st_size for place in (kept / "parts").iterdir())
            shutil.rmtree(kept)
            shutil.move(dump / last.name, last)
        assert hashes["without"] == hashes["filling"] == hashes["same"] and len(hashes["same"]) == 1
        assert hashes["grown"] == hashes["grown without"] and len(hashes["grown"]) == 1
        dumped = sum(file.stat().st_size for file in dump.iterdir())
    publish(_document(files, tokens, repeats, threads, costs, size / dumped), write)


def _document(
    files: int, tokens: int, repeats: int, threads: int, costs: dict[str, list[tuple[float, float, float]]], size: float
) -> str:
    middle = {name: [statistics.median(values) for values in zip(*rows, strict=True)] for name, rows in costs.items()}
    first, grown = middle["without"][0], middle["grown"][0]
    rows = {
        "without": "without a cache",
        "filling": "with an empty cache",
        "same": "again",
        "grown": "again, with one file more",
        "grown without": "that without a cache",
    }
    cells = (
        (words, f"{middle[name][0] / first:.3f}", f"{middle[name][1] / first:.3f}", f"{middle[name][2]:.0f}")
        for name, words in rows.items()
    )
    allowed = GOAL + 1 / files
    verdict = "met" if grown / first <= allowed else "missed"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return "\n".join(
        [
            "# What a cache saves",
            "",
            f"Written by `python benchmarks/cache.py`: {files} files of {tokens:,} tokens, {threads} threads, "
            f"{os.cpu_count()} processors, load {load}; medians of {repeats}, each in a fresh process, the start of "
            "the interpreter not counted. Times as a share of the wall time without a cache; all Results of one dump "
            "have the same bytes.",
            "",
            table(("run", "wall time", "processor time", "peak MB"), cells),
            f"The goal for one file more is 3 % and the file's share, {allowed:.3f} in all: {grown / first:.3f}, "
            f"{verdict}. The cache takes {size:.1%} of what the dump takes.",
            "",
        ]
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        case(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        typer.run(main)
