"""slime and Miles: `train_data/{rollout}_{rank}.pt`; slime HEAD: one `train_data/{rollout}.pt` (format_version 2).

And `rollout_data/{rollout}.pt`, written before training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mismatchctl.errors import DataError
from mismatchctl.frameworks.layout import File, FileLayout, Row, array
from mismatchctl.frameworks.slime.zigzag import check_whole, ranks, responses


def _rows(file: File) -> Iterator[Row]:
    content = file.torch()
    for sample in content["samples"] if content.get("format_version") == 2 else _of_rank(file, content):
        row = {name: array(value) for name, value in sample.items()}
        length = int(row["response_lengths"])
        row["response_ids"] = row["tokens"][len(row["tokens"]) - length :]
        index = row.get("sample_index", row.get("sample_indices"))
        yield {**row, "step": content["rollout_id"], "sequence_id": index}


def _of_rank(file: File, content: dict[str, Any]) -> list[dict[str, Any]]:
    """The samples of one rank; none where another rank's file gives them.

    A pipeline stage that computes no log-probs has none; of context-parallel ranks the first one has all.
    """
    data = content["rollout_data"]
    if "log_probs" not in data:
        if any(rank.log_probs for rank in ranks(file)):
            return []
        remedy = "let the trainer recompute them"
        problem = "no rank has log_probs of this rollout (--use-rollout-logprobs?)"
        raise DataError(problem, file=str(file.path), column="log_probs", remedy=remedy)
    count = len(data["tokens"])
    columns = {name: value for name, value in data.items() if hasattr(value, "__len__") and len(value) == count}
    columns.pop("raw_reward", None)  # of the whole batch, not of this rank
    if content.get("cp_size", 1) > 1:
        whole = responses(file, content)
        if not whole:
            return []
        columns |= whole
    elif "cp_size" not in content:
        for number, (values, length) in enumerate(zip(columns["log_probs"], columns["response_lengths"], strict=True)):
            check_whole(file, number, len(values), int(length), "save with a version that saves cp_rank and cp_size")
    return [{name: value[number] for name, value in columns.items()} for number in range(count)]


LAYOUT = FileLayout(
    framework="slime",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "train_log_probs": "log_probs",
        "response_mask": "loss_masks",
        "token_ids": "response_ids",
        "ref_log_probs": "ref_log_probs",
        "advantages": "advantages",
        "reward": "rewards",
        "rollout_ids": "rollout_ids",
    },
    mask="1 on sampled tokens, 0 on tool tokens and removed samples",
    patterns=("[0-9]*.pt",),
    rows=_rows,
    duplicates=True,
    recognizes=lambda file: file.holds("rollout_data", "rollout_id") or file.holds("format_version", "samples"),
)


def _rollout_rows(file: File) -> Iterator[Row]:
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


ROLLOUTS = FileLayout(
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
    rows=_rollout_rows,
    recognizes=lambda file: file.holds("rollout_id", "samples") and not file.holds("format_version"),
)
