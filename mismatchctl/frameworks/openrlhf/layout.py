"""OpenRLHF: an Experience, saved with torch.save as a dict."""

from __future__ import annotations

from mismatchctl.frameworks.layout import Layout

LAYOUT: Layout = Layout(
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
    rows=lambda file: file.batch({*LAYOUT.columns.values(), "attention_mask"}),
    next_token=frozenset({"rollout_log_probs", "train_log_probs", "response_mask", "advantages"}),
    recognizes=lambda file: file.holds("action_log_probs", "action_mask", "rollout_log_probs"),
)
