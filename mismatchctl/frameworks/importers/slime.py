"""slime and Miles: `train_data/{rollout}_{rank}.pt`; slime HEAD: one `train_data/{rollout}.pt` (format_version 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mismatchctl.errors import DataError
from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.safe import load_torch
from mismatchctl.frameworks.importers.tensors import array, holds


def _rows(path: Path) -> Iterator[Row]:
    content = load_torch(path)
    if content.get("format_version") == 2:
        samples = content["samples"]
    else:
        data = content["rollout_data"]
        if content.get("cp_size", 1) > 1:
            remedy = "save with one context-parallel rank"
            raise DataError("holds context-parallel slices, which are not reassembled", file=str(path), remedy=remedy)
        if "log_probs" not in data:
            remedy = "a later pipeline stage writes them: leave this file out"
            raise DataError("there are no log_probs (--use-rollout-logprobs?)", file=str(path), remedy=remedy)
        count = len(data["tokens"])
        columns = {name: list(value) for name, value in data.items() if hasattr(value, "__len__")}
        columns = {name: value for name, value in columns.items() if len(value) == count and name != "raw_reward"}
        samples = [{name: value[number] for name, value in columns.items()} for number in range(count)]
    for sample in samples:
        row = {name: array(value) for name, value in sample.items()}
        length = int(row["response_lengths"])
        row["response_ids"] = row["tokens"][-length:] if length else row["tokens"][:0]
        index = row.get("sample_index", row.get("sample_indices"))
        yield {**row, "step": content["rollout_id"], "sequence_id": index, "reward": row.get("rewards")}


LAYOUT = Layout(
    framework="slime",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "train_log_probs": "log_probs",
        "response_mask": "loss_masks",
        "token_ids": "response_ids",
        "advantages": "advantages",
    },
    prompt=False,
    padding="none",
    mask="1 on sampled tokens, 0 on tool tokens and removed samples",
    patterns=("[0-9]*.pt",),
    rows=_rows,
    duplicates=True,
    recognizes=lambda path: holds(path, "rollout_data") or holds(path, "format_version", "samples"),
)
