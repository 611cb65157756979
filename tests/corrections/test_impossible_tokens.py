"""A token with train probability 0 has a ratio of 0 in every gate."""

import math
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.core.batch import TokenBatch
from mismatchctl.core.ratios import compute_ratios
from mismatchctl.corrections.application import apply_correction
from mismatchctl.corrections.model import Correction
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import open_dump

Row = list[tuple[float, bool]]
"""The log ratio and the mask of each token."""


def make_rows(seed: int) -> list[Row]:
    random = np.random.default_rng(seed)
    ratios = [np.where(random.random(size) < 0.1, -np.inf, random.normal(0, 0.1, size)) for size in range(1, 40)]
    return [[*zip(row.tolist(), (random.random(len(row)) < 0.8).tolist(), strict=True)] for row in ratios]


def write(path: Path, rows: list[Row], layout: str) -> Path:
    if layout == "wide":
        columns: dict[str, Any] = {
            "rollout_log_probs": [[-3.0] * len(row) for row in rows],
            "train_log_probs": [[ratio - 3.0 for ratio, _ in row] for row in rows],
            "response_mask": [[mask for _, mask in row] for row in rows],
        }
    else:
        flat = [(number, place, *token) for number, row in enumerate(rows) for place, token in enumerate(row)]
        columns = {
            "sequence_id": [one[0] for one in flat], "position": [one[1] for one in flat],
            "rollout_log_probs": [-3.0] * len(flat), "train_log_probs": [one[2] - 3.0 for one in flat],
            "response_mask": [one[3] for one in flat],
        }  # fmt: skip
    pq.write_table(pa.table(columns), path)
    return path


def groups_of(over: str, row: Row) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the valid tokens whose ratios a gate aggregates, and the tokens that the gate decides on."""
    valid = [place for place, (_, mask) in enumerate(row) if mask]
    if over == "sequence":
        yield from [(valid, valid)] * bool(valid)
    elif over == "token":
        yield from (([place], [place]) for place in valid)
    elif over == "prefix":
        yield from (([one for one in valid if one <= place], [place]) for place in valid)
    else:
        starts = [place for place in valid if place - 1 not in valid]
        for start, end in pairwise([*starts, len(row)]):
            turn = [place for place in valid if start <= place < end]
            yield turn, turn


def aggregate(level: str, ratios: list[float]) -> float:
    if level == "mean":
        return sum(map(math.exp, ratios)) / len(ratios)
    if level == "token":
        return math.exp(ratios[0])
    found = {"sequence": sum(ratios), "geometric": sum(ratios) / len(ratios), "min": min(ratios), "max": max(ratios)}
    return math.exp(found[level])


def read(path: Path) -> TokenBatch:
    dump = open_dump([str(path)])
    (batch,) = dump.read(dump.units[0], Problems())
    return batch


@pytest.mark.parametrize("layout", ["wide", "long"])
@pytest.mark.parametrize(
    ("over", "level"),
    [("token", "token"), *product(("sequence", "segment", "prefix"), ("sequence", "geometric", "min", "mean"))],
)
def test_ratio_zero_is_below_every_lower_bound(over: str, level: str, layout: str, tmp_path: Path) -> None:
    rows = make_rows(7)
    gate = {"statistic": "ratio", "level": level, "keep": [0.9, None]} | ({} if over == "token" else {"over": over})
    batch = read(write(tmp_path / "dump.parquet", rows, layout))
    correction = Correction.model_validate({"name": "x", "gates": [gate]})
    kept = apply_correction(correction, compute_ratios(batch, {"train/rollout"}), batch).kept.expand().tolist()
    wanted = []
    for row in rows:
        passes = {}
        for seen, judged in groups_of(over, row):
            value = aggregate(level, [row[place][0] for place in seen])
            assert abs(value - 0.9) > 1e-6
            passes |= dict.fromkeys(judged, value >= 0.9)
        wanted += [passes[place] for place in sorted(passes) if row[place][0] > -math.inf]
    assert set(wanted) == {True, False}
    assert kept == wanted


def test_weights_of_turns_include_ratio_zero(tmp_path: Path) -> None:
    rows = make_rows(8)
    batch = read(write(tmp_path / "dump.parquet", rows, "wide"))
    weight = {"level": "geometric", "over": "segment", "truncate": 2.0}
    correction = Correction.model_validate({"name": "x", "weight": weight})
    found = apply_correction(correction, compute_ratios(batch, {"train/rollout"}), batch).token_weights()
    wanted = [
        aggregate("geometric", [row[place][0] for place in turn])
        for row in rows for turn, _ in groups_of("segment", row) for place in turn if row[place][0] > -math.inf
    ]  # fmt: skip
    assert 0.0 in wanted
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=3e-9)  # log ratios are bounded at -20


def test_gates_over_a_batch_accept_a_last_sequence_without_other_tokens(tmp_path: Path) -> None:
    rows: list[Row] = [[(0.5, True), (-math.inf, True), (0.01, True)], [(-math.inf, True)]]
    batch = read(write(tmp_path / "dump.parquet", rows, "wide"))
    gate = {"statistic": "k2", "level": "mean", "over": "batch", "keep": [None, 0.01]}
    correction = Correction.model_validate({"name": "x", "gates": [gate]})
    kept = apply_correction(correction, compute_ratios(batch, {"train/rollout"}), batch).kept.expand().tolist()
    assert kept == [False, True]
