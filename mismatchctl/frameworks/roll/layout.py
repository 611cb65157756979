"""ROLL: tensors of a batch, saved with torch.save."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.frameworks.layout import File, Layout, Row


def _rows(file: File) -> Iterator[Row]:
    return file.batch({*LAYOUT.columns.values(), "attention_mask"})


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
    rows=_rows,
    next_token=frozenset({"rollout_log_probs", "train_log_probs", "advantages"}),
    recognizes=lambda file: file.holds("infer_logprobs", "old_log_probs"),
)
