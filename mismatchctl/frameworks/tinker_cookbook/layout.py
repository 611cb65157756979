"""tinker-cookbook: `datums_step*.jsonl`, one Datum of forward_backward and what it returned per line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mismatchctl.frameworks.layout import File, Layout, Row


def _values(tensor: Any) -> Any:
    """Of TensorData its values; plain lists as they are."""
    return tensor["data"] if isinstance(tensor, dict) else tensor


def _rows(file: File) -> Iterator[Row]:
    for line in file.lines():
        row: Row = {"step": file.step}
        for part in ("loss_fn_inputs", "loss_fn_outputs"):
            row |= {f"{part}.{name}": _values(tensor) for name, tensor in line[part].items()}
        yield row


LAYOUT = Layout(
    framework="tinker",
    columns={
        "rollout_log_probs": "loss_fn_inputs.logprobs",
        "train_log_probs": "loss_fn_outputs.logprobs",
        "response_mask": "loss_fn_inputs.mask",
        "token_ids": "loss_fn_inputs.target_tokens",
        "advantages": "loss_fn_inputs.advantages",
    },
    prompt=True,
    padding="none",
    mask="1 on sampled tokens; it is removed before a datum is sent, so save the datum before that",
    patterns=("datums_step*.jsonl",),
    rows=_rows,
    next_token=frozenset({"rollout_log_probs", "train_log_probs", "response_mask", "token_ids", "advantages"}),
)
