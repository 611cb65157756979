"""NeMo-RL: `train_data_step*.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mismatchctl.errors import DataError
from mismatchctl.frameworks.layout import File, Layout, Row

PADDED = ("token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs")


def _unwrapped(name: str, value: Any) -> Any:
    """A row's value: each is a micro-batch of one, except in a line that somebody else wrote."""
    if not isinstance(value, list) or len(value) != 1 or (name in PADDED and not isinstance(value[0], list)):
        return value
    return value[0]


def _rows(file: File) -> Iterator[Row]:
    step = re.search(r"step(\d+)", file.path.name)
    for number, line in enumerate(file.lines()):
        row = {name: _unwrapped(name, value) for name, value in line.items()}
        for name in PADDED:
            if isinstance(row.get(name), list):
                row[name] = row[name][: row.get("input_lengths")]
        rollout, previous = row.get("generation_logprobs"), row.get("prev_logprobs")
        if isinstance(previous, list) and isinstance(rollout, list) and any(rollout) and not any(previous):
            raise DataError(
                "all values are zero: the run skipped the recomputation (force_on_policy_ratio)",
                file=str(file.path),
                row=number,
                column="prev_logprobs",
                remedy="switch force_on_policy_ratio off to write them",
            )
        if row.get("sample_loss_mask") == 0 and isinstance(row.get("token_loss_mask"), list):
            row["token_loss_mask"] = [0] * len(row["token_loss_mask"])
        yield {**row, "step": int(step[1]) if step else None}


LAYOUT = Layout(
    framework="nemo-rl",
    columns={
        "rollout_log_probs": "generation_logprobs",
        "train_log_probs": "prev_logprobs",
        "response_mask": "token_loss_mask",
        "token_ids": "token_ids",
        "advantages": "advantages",
        "reward": "rewards",
    },
    prompt=True,
    padding="right",
    mask="1 on sampled tokens; rows with sample_loss_mask 0 are left out of training",
    patterns=("train_data_step*.jsonl",),
    rows=_rows,
)
