"""What findings add to an analysis: processor time with and without them, in one process and as a whole command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from measure import make_dump

from mismatchctl.api.analyze.analyze import analyze

ROUNDS, WARM = 6, 1
LARGE = 3_000_000
SOME = ("clean", "top-k 8", "temperature 0.7", "shift +1", "reversed")
"""Dumps of a model: nothing wrong, and causes after whose repair all tests are asked again."""


def cost_section(dumps: Path, model: str) -> list[str]:
    """Its table, of dumps of one model and of a made one."""
    rows = []
    for name, path in _dumps(dumps / model):
        full, plain = _in_process(path)
        whole = _command(path)
        tokens, count = _size(path)
        rows.append(
            f"| {name} | {tokens:,} | {count:,} | {1000 * (full - plain):.0f} of {1000 * full:.0f} ms | "
            f"{100 * (full - plain) / full:.0f} % | {100 * (full - plain) / whole:.1f} % of {whole:.1f} s |"
        )
    return [
        "| dump | tokens | rows | search for causes | share of the analysis | share of the command |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _dumps(folder: Path) -> Iterator[tuple[str, Path]]:
    for name in SOME:
        yield name, folder / f"{name}.parquet"
    with tempfile.TemporaryDirectory() as made:
        make_dump(Path(made), LARGE, 800)
        yield "made, healthy", Path(made)


def _size(path: Path) -> tuple[int, int]:
    """Tokens and rows."""
    table = pq.read_table(path, columns=["rollout_log_probs"])
    return sum(len(chunk.flatten()) for chunk in table.column(0).chunks), table.num_rows


def _in_process(path: Path) -> tuple[float, float]:
    """Seconds of processor time of an analysis with findings, and without."""
    spent: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(WARM + ROUNDS):
        for findings, times in spent.items():
            started = time.process_time()
            analyze([str(path)], threads=1, findings=findings)
            if turn >= WARM:
                times.append(time.process_time() - started)
    full, plain = (float(np.mean(sorted(times)[: ROUNDS // 3])) for times in spent.values())
    return full, plain


def _command(path: Path) -> float:
    """Seconds of processor time of the command, the lower of two."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    spent = []
    for _ in range(2):
        before = os.times()
        words = [sys.executable, "-m", "mismatchctl", "analyze", str(path)]
        subprocess.run(words, check=True, capture_output=True, env=environment)
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(spent)
