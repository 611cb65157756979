"""The compiled kernel gives the same bits in the process that compiles it and in those that load it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REDUCED = """
import hashlib
import numpy as np
from mismatchctl.batch import Segments
from mismatchctl.measure.kernels.compiled import COMPILED
from mismatchctl.measure.kernels.kernel import PairTables, Places, RunTables
from mismatchctl.measure.layers import table_of

rng, lengths = np.random.default_rng(0), np.array([5000, 3000, 17, 2048])
reference = -rng.exponential(0.35, lengths.sum()).astype(np.float32)
policy = np.minimum(reference + (rng.standard_t(3, lengths.sum()) * 0.01).astype(np.float32), 0)
ratios = COMPILED.ratios(policy, reference, Segments(np.concatenate([[0], np.cumsum(lengths)])))
pair, run = PairTables(), RunTables(table_of(4))
rows = np.arange(4)
places = Places(rows, rows, rows)
found = *COMPILED.reduce(ratios, None, places, pair, run), pair.tokens, pair.sums, *run.breakdowns.values()
print([hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest() for values in found])
"""


def test_compiled_and_loaded_loops_give_the_same_bits(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", REDUCED], check=True, capture_output=True, text=True, env=environment)
        for _ in range(2)
    )
    assert list(tmp_path.rglob("*.nbc"))  # the first has left what the second loads
    assert first.stdout == second.stdout
