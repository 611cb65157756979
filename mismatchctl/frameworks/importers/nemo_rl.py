"""NeMo-RL: `train_data_step*.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mismatchctl.errors import DataError
from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.lines import json_lines

PADDED = ("token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs")


def _rows(path: Path) -> Iterator[Row]:
    step = re.search(r"step(\d+)", path.name)
    for number, line in enumerate(json_lines(path)):
        # Every value is a micro-batch of one, except in a line that somebody else wrote.
        row = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in line.items()}
        for name in PADDED:
            if isinstance(row.get(name), list):
                row[name] = row[name][: row.get("input_lengths")]
        previous = row.get("prev_logprobs")
        if isinstance(previous, list) and previous and not any(previous):
            raise DataError(
                "all values are zero: the run skipped the recomputation (force_on_policy_ratio)",
                file=str(path),
                row=number,
                column="prev_logprobs",
                remedy="switch force_on_policy_ratio off to write them",
            )
        if row.get("sample_loss_mask") == 0 and isinstance(row.get("token_loss_mask"), list):
            row["token_loss_mask"] = [0] * len(row["token_loss_mask"])
        reward = row.get("rewards")
        yield {**row, "step": int(step[1]) if step else None, "reward": None if isinstance(reward, list) else reward}


LAYOUT = Layout(
    framework="nemo-rl",
    columns={
        "rollout_log_probs": "generation_logprobs",
        "train_log_probs": "prev_logprobs",
        "response_mask": "token_loss_mask",
        "token_ids": "token_ids",
        "advantages": "advantages",
        "reward": "reward",
    },
    prompt=True,
    padding="right",
    mask="1 on sampled tokens; rows with sample_loss_mask 0 are left out of training",
    patterns=("train_data_step*.jsonl",),
    rows=_rows,
)
