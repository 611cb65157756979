"""Make small dumps for tests of readers and commands."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.recorder.recorder import Recorder


def make_dump(path: Path, rows: int = 64, seed: int = 0) -> Path:
    noise = np.random.default_rng(seed)
    rollout = -0.5 - noise.random((rows, 32))
    train = rollout + 0.02 * noise.standard_normal((rows, 32))
    ids = {"step": np.arange(rows) // max(rows // 4, 1), "prompt_id": np.arange(rows) % 16}
    table = pa.table({"rollout_log_probs": list(rollout), "train_log_probs": list(train), **ids})
    pq.write_table(table, path, row_group_size=8)
    return path


def write_dump(folder: Path, *, seed: int = 0, steps: int = 3, bad: float | None = None) -> Path:
    rng = np.random.default_rng(seed)
    with Recorder(folder) as recorder:
        for step in range(steps):
            rollout = [-rng.exponential(1.0, int(n)) for n in rng.integers(3, 30, 8)]
            train = [np.minimum(x + rng.normal(0, 0.05, len(x)), 0) for x in rollout]
            if bad is not None and step == 1:
                train[2][1] = bad
            recorder.write(
                step=step, rollout_log_probs=rollout, train_log_probs=train, sequence_id=np.arange(8),
                prompt_id=np.arange(8) // 4, reward=rng.random(8), worker=np.arange(8) % 2,
            )  # fmt: skip
    return folder


def write_labeled_dump(path: Path, rollout: float = -1.0, train: float = -1.5, names: tuple[str, ...] = ("a",)) -> Path:
    rows = [(name, number) for name in names for number in range(12)]
    usual = [-0.4, -0.7, -1.1]
    table = {
        "rollout_log_probs": [[*usual, rollout if number == 3 else -0.5] for _, number in rows],
        "train_log_probs": [[value + 1e-3 * (number % 5 - 2) for value in usual] + [train] for _, number in rows],
        "response_mask": [[1] * 4 for _ in rows],
        "step": [number % 3 for _, number in rows],
        "sequence_id": [f"{name}-{number}" for name, number in rows],
        "prompt_id": [f"p{number // 2}" for _, number in rows],
        "worker": [name for name, _ in rows],
    }
    pq.write_table(pa.table(table), path)
    return path
