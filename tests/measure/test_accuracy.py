"""Metrics compared with the oracle for log ratios from 1e-12 to 1e2, within the bounds of docs/reference/metrics.md."""

import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import mismatchctl as mm
from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.measure.metrics.registry import MISMATCH_METRICS
from mismatchctl.results.model import Value
from tests.oracles.metrics import mismatch
from tests.oracles.tolerances import ABSOLUTE_TOLERANCE, EXACT_METRICS, RELATIVE_TOLERANCES

SCALES = [10.0**exponent for exponent in range(-12, 3)]
ESTIMATED = ("khat", "_z", "worst_share", "ois")
"""Fits and tests, for which the decimal oracle has its own tolerance."""


def dump(scale: float, path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Write 12 sequences of 5 to 60 tokens whose log ratios have one size."""
    noise = np.random.default_rng(abs(int(np.log10(scale))) + 7)
    rollout, train = [], []
    for length in noise.integers(5, 60, 12):
        x = scale * noise.standard_normal(length)
        low = -noise.exponential(1.0, length) - 1e-3 - np.maximum(x, 0)
        rollout.append(low)
        train.append(low + x)
    pq.write_table(pa.table({"rollout_log_probs": rollout, "train_log_probs": train}), path)
    return rollout, train


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES, ids="{:g}".format)
def test_metrics_are_exact_within_their_bounds(scale: float, tmp_path: Path) -> None:
    rows = zip(*dump(scale, tmp_path / "a.parquet"), strict=True)
    truth = mismatch([{"rollout": a.tolist(), "train": b.tolist(), "mask": [1] * len(a)} for a, b in rows])
    found = analyze([str(tmp_path / "a.parquet")], []).runs["a"].overall.metrics
    off = {}
    for key in (*RELATIVE_TOLERANCES, *EXACT_METRICS):
        right, value = truth[key].value, found[key].value
        assert right is not None and value is not None, f"{key}: {found[key].status}"
        bound = RELATIVE_TOLERANCES.get(key, 0.0)
        if float(abs(Decimal(value) - right)) > bound * float(abs(right)) + (ABSOLUTE_TOLERANCE if bound else 0):
            off[key] = f"{value!r}, not {float(right)!r}"
    assert not off


def test_every_metric_has_a_bound() -> None:
    known = {*RELATIVE_TOLERANCES, *EXACT_METRICS}
    without = [m.key for m in MISMATCH_METRICS if m.key not in known and not any(word in m.key for word in ESTIMATED)]
    assert without == []


def test_small_weights_are_exact_to_their_digits() -> None:
    def weights(log_ratios: NDArray[np.float64], **rule: str) -> dict[str, Value]:
        rows = {
            "rollout": list(np.full((8, 50), -0.5)),
            "train": list(-0.5 + log_ratios.reshape(8, 50)),
            "step": [0] * 8,
        }
        made = mm.analyze(rows, corrections={"name": "own", "weight": {"level": "token", **rule}})
        found: dict[str, Value] = next(iter(made.runs.values())).overall.corrections["own"]
        return found

    for mean in (-5.0, -9.2, -12.0, -16.0):
        assert weights(np.full(400, mean), normalize="token")["weight_std"].value == 0.0
    spread = np.log(np.tile([0.5, 1.5], 200))
    found = weights(spread - 9.2, normalize="token")
    assert found["weight_std"].value == pytest.approx(0.5, rel=1e-6)
    assert found["ess_token"].value == pytest.approx(0.8, rel=1e-9)
    for mean, known in ((-20.0, True), (-40.0, False), (-80.0, False)):
        found = weights(spread + mean, clamp="none")
        assert found["weight_std"].value == 0.0 and math.copysign(1, found["weight_std"].value) == 1
        for key in ("ess_token", "ess_sequence"):
            assert (found[key].status == "ok") == known
    assert weights(spread - 20, clamp="none")["ess_token"].value == pytest.approx(0.8, rel=1e-6)
