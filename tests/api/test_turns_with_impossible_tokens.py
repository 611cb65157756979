"""`--by turn` divides tokens of train probability 0 and thresholds of a step among the turns."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze, split_by_turn
from mismatchctl.corrections.model import Correction
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump

GATE = {"statistic": "k2", "level": "mean", "over": "batch", "keep": [None, 0.01]}


@pytest.mark.parametrize("recorded", [False, True])
def test_turns_have_their_own_impossible_tokens(recorded: bool, tmp_path: Path) -> None:
    train = [[-1.0, -math.inf, -1.1, -1.0, -1.2], [-1.0, -1.0, -9.0, -1.0, -math.inf], [-1.0] * 5]
    columns = {
        "rollout_log_probs": [[-1.0] * 5] * 3,
        "train_log_probs": train,
        "response_mask": [[1, 1, 1, 1, 1] if recorded else [1, 1, 0, 1, 1]] * 3,
        "step": [0, 1, 1],
    }
    if recorded:
        columns["turn"] = [[1, 1, 1, 2, 2]] * 3
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table(columns), path)
    dump = open_dump([str(path)], wanted=["turn"])
    (batch,) = dump.read(dump.units[0], Problems())
    turns = split_by_turn(batch)
    np.testing.assert_array_equal(turns.columns["turn"], [1, 2] * 3)
    np.testing.assert_array_equal(turns.impossible, [1, 0, 0, 1, 0, 0])
    correction = Correction.model_validate({"name": "x", "gates": [GATE]})
    run = analyze([str(path)], [correction], by=["turn"]).runs["d"]
    assert run.overall.metrics["tokens"].value == (13 if recorded else 10)
