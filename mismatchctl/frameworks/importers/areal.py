"""AReaL: a trajectory batch before compute_advantages, saved with torch.save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.tensors import batch_rows, holds


def _rows(path: Path) -> Iterator[Row]:
    for row in batch_rows(path, {*LAYOUT.columns.values(), "attention_mask"}):
        # prox_logp has T entries about the token after each; the last one is about none.
        yield {**row, "prox_logp": row["prox_logp"][:-1]}


LAYOUT = Layout(
    framework="areal",
    columns={
        "rollout_log_probs": "logprobs",
        "train_log_probs": "prox_logp",
        "response_mask": "loss_mask",
        "token_ids": "input_ids",
        "reward": "rewards",
    },
    prompt=True,
    padding="right",
    mask="1 on sampled tokens",
    patterns=("*.pt",),
    rows=_rows,
    next_token=frozenset({"train_log_probs"}),
    recognizes=holds("prox_logp", "logprobs", "loss_mask"),
)
