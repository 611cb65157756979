"""ROLL: tensors of a batch, saved with torch.save."""

from __future__ import annotations

from mismatchctl.frameworks.layout import Layout

LAYOUT: Layout = Layout(
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
    rows=lambda file: file.batch({*LAYOUT.columns.values(), "attention_mask"}),
    next_token=frozenset({"rollout_log_probs", "train_log_probs", "advantages"}),
    recognizes=lambda file: file.holds("infer_logprobs", "old_log_probs"),
)
