"""A small dump to try things on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def make_dump(path: Path, rows: int = 64, seed: int = 0) -> Path:
    """Sequences of 32 tokens in 4 steps."""
    noise = np.random.default_rng(seed)
    rollout = -0.5 - noise.random((rows, 32))
    train = rollout + 0.02 * noise.standard_normal((rows, 32))
    ids = {"step": np.arange(rows) // max(rows // 4, 1), "prompt_id": np.arange(rows) % 16}
    table = pa.table({"rollout_log_probs": list(rollout), "train_log_probs": list(train), **ids})
    pq.write_table(table, path, row_group_size=8)
    return path
