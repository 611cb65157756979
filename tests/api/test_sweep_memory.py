"""Memory and time of a sweep do not grow with sequences, groups or empty rows."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.sweep.result import Sweep
from mismatchctl.api.sweep.study import ThresholdAxis, make_studies
from mismatchctl.api.sweep.sweep import SweepAccumulator, sweep
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.grid import sums
from tests.factories.sequence_samples import read_sample

WISHES = [("rejected_tokens", 0.05), ("rejected_sequences", 0.2), ("ess_token", 0.9)]
STUDY = make_studies([find_preset("token_tis")], [ThresholdAxis.over("weight.truncate", 1.5, 3.0, 3)])


def written(path: Path, lengths: np.ndarray, steps: int) -> str:
    noise = np.random.default_rng(0)
    rollout = -noise.exponential(0.5, lengths.sum()) - 0.01
    train = np.minimum(rollout + 0.1 * noise.standard_normal(len(rollout)), -1e-6)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    lists = [pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values)) for values in (rollout, train)]
    step = np.arange(len(lengths)) % steps
    pq.write_table(pa.table({"rollout_log_probs": lists[0], "train_log_probs": lists[1], "step": step}), path)
    return str(path)


def peak(path: str, **options: Any) -> int:
    tracemalloc.start()
    try:
        sweep([path], STUDY, threads=1, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_target_memory_is_independent_of_sequences(tmp_path: Path) -> None:
    """A target belongs to a run, so the clusters of the run are folded at once (otherwise 170 kB each)."""
    few, many = (
        peak(written(tmp_path / f"{count}.parquet", np.ones(count, np.int64), 10), wishes=WISHES)
        for count in (2000, 6000)
    )
    assert few < 250e6
    assert many < few + 20e6


@pytest.mark.slow
def test_long_sequences_are_searched_once(tmp_path: Path) -> None:
    """Tokens below 400 veto thresholds are counted by bins and not per threshold."""
    path, tokens = written(tmp_path / "long.parquet", np.array([100_000]), 1), 100_000
    plain = peak(path)
    assert peak(path, wishes=WISHES) < plain + 40 * 8 * tokens  # 400 flags per token would take the space of 50 doubles


@pytest.mark.slow
def test_rows_without_tokens_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.zeros(3000, np.int64)
    lengths[:30] = 5
    with_empty, without = (
        written(tmp_path / "a.parquet", lengths, 10),
        written(tmp_path / "b.parquet", lengths[:30], 10),
    )
    measured: list[int] = []
    own = sums.block_columns

    def counted(family: Any, ratios: Any, block: Any, *more: Any, **options: Any) -> Any:
        measured.append(len(block))
        return own(family, ratios, block, *more, **options)

    monkeypatch.setattr(sums, "block_columns", counted)
    found = [sweep([path], STUDY, threads=1, wishes=WISHES) for path in (with_empty, without)]
    assert max(measured) == 30
    assert_same(*found)


def assert_same(one: Sweep, other: Sweep) -> None:
    for first, second in ((one.overall, other.overall), (one.groups.collect(), other.groups.collect())):
        assert first.drop("run").equals(second.drop("run"))
    targets = [[(target.rule, target.threshold, target.interval) for target in found.targets] for found in (one, other)]
    assert targets[0] == targets[1]


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_groups_can_be_finished_one_by_one(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.parquet", np.full(60, 9), 20)
    whole = sweep([path], STUDY, threads=1).groups.collect()
    monkeypatch.setattr(SweepAccumulator, "closing_size", size)
    assert len(whole) == 3 * 20 and sweep([path], STUDY, threads=1).groups.collect().equals(whole)


def test_empty_steps_are_skipped_in_predictions(tmp_path: Path) -> None:
    number = 3000
    rows = [[-0.5, -0.7]] + [[]] * (number - 1)
    table = {"rollout_log_probs": rows, "train_log_probs": rows, "step": list(range(number))}
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    sample = read_sample([str(tmp_path / "d.parquet")], [find_preset("token_tis")])
    assert sample.tokens.tolist() == [2] and sample.is_complete
