"""ROLL: tensors of a batch, saved with torch.save."""

from __future__ import annotations

from mismatchctl.frameworks.importers.layout import Layout
from mismatchctl.frameworks.importers.tensors import batch_rows, holds

LAYOUT = Layout(
    framework="roll",
    columns={
        "rollout_log_probs": "infer_logprobs",
        "train_log_probs": "old_log_probs",
        "response_mask": "response_mask",
        "token_ids": "input_ids",
        "advantages": "advantages",
    },
    prompt=True,
    padding="right",
    mask="1 on sampled tokens",
    patterns=("*.pt",),
    rows=batch_rows,
    next_token=frozenset({"rollout_log_probs", "train_log_probs", "advantages"}),
    recognizes=holds("infer_logprobs", "old_log_probs"),
)
