"""TRL: the dict of `_generate_and_score_completions`, saved with torch.save; its own completions are text only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mismatchctl.frameworks.layout import File, Layout, Row


def _rows(file: File) -> Iterator[Row]:
    for row in file.batch({*LAYOUT.columns.values(), "completion_mask", "tool_mask"}):
        mask = np.asarray(row["completion_mask"])
        tools = row.get("tool_mask")  # its padding is 1
        yield {**row, "mask": mask if tools is None else mask * np.asarray(tools)}


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
    recognizes=lambda file: file.holds("sampling_per_token_logps", "completion_mask"),
)


COMPLETIONS = Layout(
    framework="trl-completions",
    columns={},
    prompt=False,
    padding="none",
    mask="none",
    patterns=("completions/completions_[0-9]*.parquet",),
    rows=lambda path: iter(()),
)
