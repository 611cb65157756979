"""OpenRLHF: an Experience, saved with torch.save as a dict."""

from __future__ import annotations

from mismatchctl.frameworks.importers.layout import Layout
from mismatchctl.frameworks.importers.tensors import batch_rows, holds

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
    rows=batch_rows,
    next_token=frozenset({"rollout_log_probs", "train_log_probs", "response_mask", "advantages"}),
    recognizes=holds("action_log_probs", "action_mask", "rollout_log_probs"),
)
