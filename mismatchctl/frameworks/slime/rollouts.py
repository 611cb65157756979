"""slime and Miles: `rollout_data/{rollout}.pt`, written before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mismatchctl.frameworks.layout import File, Layout, Row


def _rows(file: File) -> Iterator[Row]:
    content = file.torch()
    for sample in content["samples"]:
        mask = [0] * sample["response_length"] if sample.get("remove_sample") else sample.get("loss_mask")
        versions = [str(one) for one in sample.get("weight_versions") or ()]
        yield {
            **response_of(sample["tokens"], sample["response_length"], mask),
            "step": content["rollout_id"],
            "sequence_id": sample["index"],
            "rollout_log_probs": [] if sample["response_length"] == 0 else sample.get("rollout_log_probs"),
            "prompt_id": sample.get("group_index"),
            "rollout_ids": sample.get("rollout_id"),
            "reward": sample.get("reward"),
            "rollout_version": min(map(int, versions)) if versions and all(map(str.isdecimal, versions)) else None,
        }


def response_of(tokens: list[int], length: int, mask: Any) -> Row:
    """The response's part; no mask: all of it is valid."""
    return {"response_ids": tokens[len(tokens) - length :], "mask": [1] * length if mask is None else mask}


LAYOUT = Layout(
    framework="slime-rollout",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "response_mask": "mask",
        "token_ids": "response_ids",
        "prompt_id": "prompt_id",
        "rollout_ids": "rollout_ids",
        "reward": "reward",
        "rollout_version": "rollout_version",
    },
    mask="1 on sampled tokens, 0 on tool tokens and removed samples; none saved: all 1",
    patterns=("[0-9]*.pt",),
    rows=_rows,
    recognizes=lambda file: file.holds("rollout_id", "samples") and not file.holds("format_version"),
)
