"""TRL: the dict of `_generate_and_score_completions`, saved with torch.save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.tensors import batch_rows, holds


def _rows(path: Path) -> Iterator[Row]:
    for row in batch_rows(path):
        yield {**row, "mask": row["completion_mask"] * row.get("tool_mask", np.ones_like(row["completion_mask"]))}


LAYOUT = Layout(
    framework="trl",
    columns={
        "rollout_log_probs": "sampling_per_token_logps",
        "train_log_probs": "old_per_token_logps",
        "response_mask": "mask",
        "token_ids": "completion_ids",
        "advantages": "advantages",
    },
    prompt=False,
    padding="right",
    mask="1 on completion tokens that no tool wrote",
    patterns=("*.pt",),
    rows=_rows,
    next_token=frozenset({}),
    recognizes=lambda path: holds(path, "sampling_per_token_logps", "completion_mask"),
)
