"""Measure the processor time of the search for causes. diagnose.py writes the table into docs/methods/causes.md."""

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
SYNTHETIC_TOKENS = 3_000_000
CASES = ("clean", "top-k 8", "temperature 0.7", "shift +1", "reversed")
"""Dumps of a model: a clean one, and causes after whose repair `diagnose` repeats all tests."""


def cost_section(dumps: Path, model: str) -> list[str]:
    """Return the table for dumps of one model and a synthetic dump."""
    rows = []
    for name, path in _list_dumps(dumps / model):
        full, plain = _time_analysis(path)
        whole = _time_command(path)
        tokens, count = _count(path)
        rows.append(
            f"| {name} | {tokens:,} | {count:,} | {1000 * (full - plain):.0f} of {1000 * full:.0f} ms | "
            f"{100 * (full - plain) / full:.0f}% | {100 * (full - plain) / whole:.1f}% of {whole:.1f} s |"
        )
    return [
        "| dump | tokens | rows | search for causes | share of the analysis | share of the command |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def _list_dumps(folder: Path) -> Iterator[tuple[str, Path]]:
    for name in CASES:
        yield name, folder / f"{name}.parquet"
    with tempfile.TemporaryDirectory() as made:
        make_dump(Path(made), SYNTHETIC_TOKENS, 800)
        yield "synthetic, clean", Path(made)


def _count(path: Path) -> tuple[int, int]:
    """Return the numbers of tokens and rows."""
    table = pq.read_table(path, columns=["rollout_log_probs"])
    return sum(len(chunk.flatten()) for chunk in table.column(0).chunks), table.num_rows


def _time_analysis(path: Path) -> tuple[float, float]:
    """Return processor seconds of an analysis with findings and without."""
    spent: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(WARM + ROUNDS):
        for findings, times in spent.items():
            started = time.process_time()
            analyze([str(path)], threads=1, findings=findings)
            if turn >= WARM:
                times.append(time.process_time() - started)
    full, plain = (float(np.mean(sorted(times)[: ROUNDS // 3])) for times in spent.values())
    return full, plain


def _time_command(path: Path) -> float:
    """Return processor seconds of the command, the lower of two runs."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    spent = []
    for _ in range(2):
        before = os.times()
        words = [sys.executable, "-m", "mismatchctl", "analyze", str(path)]
        subprocess.run(words, check=True, capture_output=True, env=environment)
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(spent)
