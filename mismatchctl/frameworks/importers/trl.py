"""TRL: the dict of `_generate_and_score_completions`, saved with torch.save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.tensors import batch_rows, holds


def _rows(path: Path) -> Iterator[Row]:
    for row in batch_rows(path):
        mask = row["completion_mask"]
        yield {**row, "mask": mask * row["tool_mask"] if "tool_mask" in row else mask}  # its padding is 1


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
    recognizes=holds("sampling_per_token_logps", "completion_mask"),
)
