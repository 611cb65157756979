"""NeMo-RL: `train_data_step*.jsonl`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mismatchctl.errors import DataError
from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.lines import json_lines


def _rows(path: Path) -> Iterator[Row]:
    step = re.search(r"step(\d+)", path.name)
    for number, line in enumerate(json_lines(path)):
        row = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in line.items()}
        length = row.get("input_lengths")
        for name in ("token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs"):
            if isinstance(row.get(name), list):
                row[name] = row[name][:length]
        if row.get("prev_logprobs") and not any(row["prev_logprobs"]):
            raise DataError(
                "all values are zero: the run skipped the recomputation (force_on_policy_ratio)",
                file=str(path),
                row=number,
                column="prev_logprobs",
                remedy="switch force_on_policy_ratio off to write them",
            )
        if row.get("sample_loss_mask") == 0:
            row["token_loss_mask"] = [0] * len(row["token_loss_mask"])
        row["step"] = int(step[1]) if step else None
        row["reward"] = row.get("rewards") if isinstance(row.get("rewards"), (int, float)) else None
        yield row


LAYOUT = Layout(
    framework="nemo-rl",
    columns={
        "rollout_log_probs": "generation_logprobs",
        "train_log_probs": "prev_logprobs",
        "response_mask": "token_loss_mask",
        "token_ids": "token_ids",
        "advantages": "advantages",
    },
    prompt=True,
    padding="right",
    mask="1 on sampled tokens; rows with sample_loss_mask 0 are left out of training",
    patterns=("train_data_step*.jsonl",),
    rows=_rows,
)
