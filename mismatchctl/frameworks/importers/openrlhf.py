"""OpenRLHF: an Experience, saved with torch.save as a dict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.tensors import batch_rows, holds


def _rows(path: Path) -> Iterator[Row]:
    return batch_rows(path, {*LAYOUT.columns.values(), "attention_mask"})


LAYOUT = Layout(
    framework="openrlhf",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "train_log_probs": "action_log_probs",
        "response_mask": "action_mask",
        "token_ids": "sequences",
        "advantages": "advantages",
    },
    prompt=True,
    padding="right",
    mask="1 on sampled tokens",
    patterns=("*.pt",),
    rows=_rows,
    next_token=frozenset({"rollout_log_probs", "train_log_probs", "response_mask", "advantages"}),
    recognizes=holds("action_log_probs", "action_mask", "rollout_log_probs"),
)
