"""tinker-cookbook: `datums_step*.jsonl`, one Datum of forward_backward and what it returned per line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.lines import json_lines
from mismatchctl.frameworks.importers.tensors import step_of


def _rows(path: Path) -> Iterator[Row]:
    for line in json_lines(path):
        inputs, outputs = line["loss_fn_inputs"], line["loss_fn_outputs"]
        row = {name: _values(inputs.get(name)) for name in ("target_tokens", "logprobs", "advantages", "mask")}
        yield {**row, "trainer_logprobs": _values(outputs.get("logprobs")), "step": step_of(path)}


def _values(tensor: Any) -> Any:
    return None if tensor is None else tensor["data"]


LAYOUT = Layout(
    framework="tinker",
    columns={
        "rollout_log_probs": "logprobs",
        "train_log_probs": "trainer_logprobs",
        "response_mask": "mask",
        "token_ids": "target_tokens",
        "advantages": "advantages",
    },
    prompt=True,
    padding="none",
    mask="1 on sampled tokens; it is removed before a datum is sent, so save the datum before that",
    patterns=("datums_step*.jsonl",),
    rows=_rows,
    next_token=frozenset({"rollout_log_probs", "train_log_probs", "response_mask", "token_ids", "advantages"}),
)
