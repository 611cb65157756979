"""Metrics against 50 digits, over fourteen decades of the log ratio; the bounds stand in docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

import extended
import mpmath as mp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.analyze import analyze
from mismatchctl.measure.accuracy import ABSOLUTE, EXACT, RELATIVE
from mismatchctl.measure.metrics import MISMATCH_METRICS

SCALES = [10.0**exponent for exponent in range(-12, 3)]
ESTIMATED = ("khat", "_z", "worst_share", "ois")
"""Fits and tests, which the decimal oracle holds to its own slack."""


def dump(scale: float, path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """12 sequences of 5 to 60 tokens whose log ratios are of one size."""
    noise = np.random.default_rng(abs(int(np.log10(scale))) + 7)
    rollout, train = [], []
    for length in noise.integers(5, 60, 12):
        x = scale * noise.standard_normal(length)
        low = -noise.exponential(1.0, length) - 1e-3 - np.maximum(x, 0)
        rollout.append(low)
        train.append(low + x)
    pq.write_table(pa.table({"rollout_log_probs": rollout, "train_log_probs": train}), path)
    return rollout, train


@pytest.mark.parametrize("scale", SCALES, ids="{:g}".format)
def test_metrics_are_exact_within_their_bounds(scale: float, tmp_path: Path) -> None:
    sides = dump(scale, tmp_path / "a.parquet")
    with mp.workdps(extended.DIGITS):
        truth = extended.metrics(extended.exact(*sides))
        found = analyze([str(tmp_path / "a.parquet")], []).runs["a"].overall.metrics
        off = {}
        for key, right in truth.items():
            value = found[key].value
            assert value is not None, f"{key}: {found[key].status}"
            bound = RELATIVE.get(key, 0.0)
            error = abs(mp.mpf(value) - right)
            if error > bound * abs(right) + (ABSOLUTE if bound else 0):
                off[key] = f"{value!r}, not {mp.nstr(right, 17)}"
    assert not off


def test_every_metric_has_a_bound() -> None:
    known = {*RELATIVE, *EXACT}
    without = [m.key for m in MISMATCH_METRICS if m.key not in known and not any(word in m.key for word in ESTIMATED)]
    assert without == []
