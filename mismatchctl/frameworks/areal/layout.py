"""AReaL: a trajectory batch before compute_advantages, saved with torch.save."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.frameworks.layout import File, Layout, Row


def _rows(file: File) -> Iterator[Row]:
    for row in file.batch({*LAYOUT.columns.values(), "attention_mask"}):
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
    recognizes=lambda file: file.holds("prox_logp", "logprobs", "loss_mask"),
)
