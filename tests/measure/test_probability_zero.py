"""Tokens with a train log-prob of -inf, which have probability 0."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mismatchctl as mm
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.recorder.recorder import Recorder
from mismatchctl.results.summary import data_notes
from tests.cli import command

VETO = Correction(name="veto", gates=(Gate(level="min", keep=(1e-4, None), clamp="none"),))
SEQUENCE = Correction(name="sequence", weight=Weight(level="sequence", truncate=2.0))
GEOMETRIC = Correction(name="geometric", gates=(Gate(level="geometric", keep=(0.9, 1.1)),))
K1_SUM = Correction(name="k1", gates=(Gate(statistic="k1", level="sum", keep=(-25.0, 25.0), clamp="token"),))
ONE, TWO, FAR = 3, 7, 9
"""Rows with one and two tokens of probability 0, and with one token of ratio exp(-12)."""


def _rows() -> tuple[list[list[float]], list[list[float]]]:
    random = np.random.default_rng(0)
    rollout = [-random.exponential(1, int(random.integers(20, 60))) for _ in range(40)]
    train = [np.minimum(row + random.normal(0, 0.02, len(row)), 0) for row in rollout]
    train[ONE][5] = train[TWO][0] = train[TWO][9] = -math.inf
    train[FAR][2] = rollout[FAR][2] - 12
    return [row.tolist() for row in rollout], [row.tolist() for row in train]


ROLLOUT, TRAIN = _rows()
TABLE = pa.table({"rollout_log_probs": ROLLOUT, "train_log_probs": TRAIN, "step": [row // 8 for row in range(40)]})
TOKENS = sum(map(len, ROLLOUT))
K3 = [
    math.expm1(t - r) - (t - r)
    for rows in zip(ROLLOUT, TRAIN, strict=True)
    for r, t in zip(*rows, strict=True)
    if t > -math.inf
]


def _values(correction: Correction) -> dict[str, float | None]:
    (run,) = mm.analyze(TABLE, corrections=correction).runs.values()
    return {key: value.value for key, value in run.overall.corrections[correction.name].items()}


def test_means_exclude_impossible_tokens_and_a_note_counts_them() -> None:
    result = mm.analyze(TABLE)
    (run,) = result.runs.values()
    assert run.overall.metrics["k3"].value == pytest.approx(sum(K3) / len(K3), rel=1e-12)
    assert run.overall.metrics["tokens"].value == TOKENS - 3
    assert [(item.count, item.example) for item in result.provenance.left_out] == [(3, "train_log_probs of -inf")]
    assert "3 tokens with train probability 0: means leave these tokens out, vetoes count them" in " ".join(
        data_notes(result)
    )
    assert mm.k3(ROLLOUT, TRAIN) == pytest.approx(sum(K3) / len(K3), rel=1e-12)


def test_vetoes_reject_and_count_impossible_tokens() -> None:
    found = _values(VETO)
    assert found["catastrophic_tokens"] == pytest.approx(4 / TOKENS, rel=1e-12)
    assert found["catastrophic_sequences"] == found["rejected_sequences"] == 3 / 40
    swept = mm.sweep(TABLE, correction=VETO, vary={"gates.0.keep.0": [1e-6, 1e-5, 1e-4]})
    points = swept.rows(swept.runs[0], "veto")
    assert points["catastrophic_tokens"].to_list() == pytest.approx([3 / TOKENS, 4 / TOKENS, 4 / TOKENS], rel=1e-12)
    assert points["rejected_sequences"].to_list() == [2 / 40, 3 / 40, 3 / 40]
    weights, kept = mm.weights(ROLLOUT, TRAIN, correction=VETO)
    assert [row for row, flags in enumerate(kept) if not all(flags)] == [ONE, TWO, FAR]
    assert all(math.isfinite(weight) for row in weights for weight in row)


def test_sequence_ratios_are_zero() -> None:
    assert _values(SEQUENCE)["weight_min"] == pytest.approx(math.exp(-20))
    assert mm.weights(ROLLOUT, TRAIN, correction=SEQUENCE)[0][ONE] == pytest.approx([math.exp(-20)] * len(TRAIN[ONE]))
    assert _values(GEOMETRIC)["rejected_sequences"] == 3 / 40
    assert _values(K1_SUM)["rejected_sequences"] == 1 / 40  # clamped per token: 20 for one token, 40 for two


@pytest.mark.parametrize("correction", [VETO, SEQUENCE, GEOMETRIC, K1_SUM])
def test_sweep_and_analyze_agree(correction: Correction) -> None:
    path = "weight.truncate" if correction.weight else "gates.0.keep.0"
    value: Any = correction.weight.truncate if correction.weight else correction.gates[0].keep[0]
    swept = mm.sweep(TABLE, correction=correction, vary={path: [value, value * 1.1]})
    point = swept.rows(swept.runs[0], correction.name).to_dicts()[0]
    for key, expected in _values(correction).items():
        if expected is not None and key in point:
            assert point[key] == pytest.approx(expected, rel=1e-9, abs=1e-12), key


def test_arrays_and_mappings_match_the_dump() -> None:
    (run,) = mm.analyze({"rollout": ROLLOUT, "train": TRAIN}).runs.values()
    assert run.overall.metrics["tokens"].value == TOKENS - 3


def test_recorded_dumps_are_valid_and_pass_the_gate(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.write(step=0, rollout_log_probs=ROLLOUT, train_log_probs=TRAIN)
    assert f"{TOKENS - 3:,} valid tokens" in command.run("schema", "--check", tmp_path, code=0).output
    ran = command.run("gate", tmp_path, "--rule", "k3:max=10", "--json", code=0)
    checks = {check["title"]: check for check in json.loads(ran.stdout)["checks"]}
    assert checks["tokens left out of means"]["value"] == pytest.approx(3 / TOKENS)
    assert {check["outcome"] for check in checks.values()} == {"passed"}


def test_other_infinite_values_are_refused(tmp_path: Path) -> None:
    rollout = [[-math.inf, *row[1:]] for row in ROLLOUT]
    pq.write_table(TABLE.set_column(0, "rollout_log_probs", pa.array(rollout)), tmp_path / "dump.parquet")
    with pytest.raises(mm.DataError, match="infinite"):
        mm.analyze(tmp_path / "dump.parquet")
    with pytest.raises(mm.DataError, match="infinite"):
        mm.k3(rollout, TRAIN)
    with pytest.raises(mm.DataError, match="infinite"):
        mm.k3(ROLLOUT, [[math.inf, *row[1:]] for row in TRAIN])


def test_dumps_of_only_impossible_tokens_have_no_tokens(tmp_path: Path) -> None:
    table = TABLE.set_column(1, "train_log_probs", pa.array([[-math.inf] * len(row) for row in TRAIN]))
    with pytest.raises(mm.DataError, match="no valid token"):
        mm.analyze(table)
