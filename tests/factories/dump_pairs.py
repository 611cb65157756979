"""Two dumps with a known difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.api.compare.compare import compare
from mismatchctl.api.compare.comparison import Comparison
from mismatchctl.core.batch import Float64s


@dataclass(frozen=True)
class Tokens:
    rollout: list[Float64s]
    train: list[Float64s]
    worker: list[int]
    step: list[int]
    prompt: list[str]
    name: list[str]
    ids: list[list[int]]

    def scaled(self, factor: Callable[[int, Float64s, Float64s], Any]) -> Tokens:
        """Scale log ratios by factor(sequence, positions, rollout log-probs), without a change of the rollout."""
        train = []
        for index, (rollout, own) in enumerate(zip(self.rollout, self.train, strict=True)):
            scale = np.broadcast_to(factor(index, np.arange(len(rollout), dtype=np.float64), rollout), rollout.shape)
            train.append(np.where(scale == 1, own, np.minimum(rollout + scale * (own - rollout), 0.0)))
        return replace(self, train=train)

    def chosen(self, rows: Any) -> Tokens:
        picked = {name: [values[row] for row in rows] for name, values in vars(self).items()}
        return Tokens(**picked)


def make_tokens(seed: int = 0, *, prompts: int = 24, steps: int = 3, longest: int = 160, noise: float = 0.03) -> Tokens:
    """Make sequences with noise, two per prompt and step, on four workers."""
    rng = np.random.default_rng(seed)
    made = Tokens([], [], [], [], [], [], [])
    for step in range(steps):
        for index in range(2 * prompts):
            length = int(rng.integers(longest // 4, longest))
            rollout = -rng.exponential(1.0, length) - 0.2
            made.rollout.append(rollout)
            made.train.append(np.minimum(rollout + rng.normal(0, noise, length), 0.0))
            made.worker.append(index % 4)
            made.step.append(step)
            made.prompt.append(f"p{index // 2}")
            made.name.append(f"{step}-{index}")
            made.ids.append(rng.integers(0, 50_000, length).tolist())
    return made


def write_tokens(path: Path, tokens: Tokens, *, leave_out: tuple[str, ...] = (), **more: Any) -> Path:
    columns = {
        "rollout_log_probs": pa.array([row.tolist() for row in tokens.rollout], pa.list_(pa.float64())),
        "train_log_probs": pa.array([row.tolist() for row in tokens.train], pa.list_(pa.float64())),
        "worker": pa.array(tokens.worker),
        "step": pa.array(tokens.step),
        "prompt_id": pa.array(tokens.prompt),
        "sequence_id": pa.array(tokens.name),
        "token_ids": pa.array(tokens.ids),
    } | {name: pa.array(values) for name, values in more.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: values for name, values in columns.items() if name not in leave_out})
    pq.write_table(table, path, row_group_size=40)
    return path


BASE = make_tokens()
"""The reference dump of all pairs."""


def k3(tokens: Tokens) -> Float64s:
    x = np.concatenate(tokens.train) - np.concatenate(tokens.rollout)
    return np.exp(x) - 1 - x


def spread(tokens: Tokens, values: list[Any]) -> Any:
    return np.repeat(np.array(values), [len(row) for row in tokens.rollout])


def pair(folder: Path, other: Tokens, base: Tokens = BASE, **leave_out: Any) -> Comparison:
    paths = [write_tokens(folder / f"{n}.parquet", t, **leave_out) for n, t in (("base", base), ("other", other))]
    return compare([str(path) for path in paths], by=["worker"])
