"""slime and Miles: `rollout_data/{rollout}.pt`, written before training, and the columns of it for Miles' dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.errors import DataError
from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.tensors import holds, loaded, step_of


def _rows(path: Path) -> Iterator[Row]:
    content = loaded(path)
    for sample in content["samples"]:
        mask = [0] * sample["response_length"] if sample.get("remove_sample") else sample.get("loss_mask")
        versions = [str(one) for one in sample.get("weight_versions") or ()]
        yield {
            **_response(sample["tokens"], sample["response_length"], mask),
            "step": content["rollout_id"],
            "sequence_id": sample["index"],
            "rollout_log_probs": [] if sample["response_length"] == 0 else sample.get("rollout_log_probs"),
            "prompt_id": sample.get("group_index"),
            "rollout_ids": sample.get("rollout_id"),
            "reward": sample.get("reward"),
            "rollout_version": max(map(int, versions)) if versions and all(map(str.isdecimal, versions)) else None,
        }


def _dashboard_rows(path: Path) -> Iterator[Row]:
    if path.name.startswith("rollout_eval_"):
        return  # nothing is trained on it
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                for row in batch.to_pylist():
                    response = _response(row["tokens"], row["response_length"], row["loss_mask"])
                    yield {**row, **response, "step": step_of(path), "sequence_id": row["sample_index"]}
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"is no Parquet file: {str(error).splitlines()[0]}", file=str(path)) from error


def _response(tokens: list[int], length: int, mask: Any) -> Row:
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
    prompt=False,
    padding="none",
    mask="1 on sampled tokens, 0 on tool tokens and removed samples; none saved: all 1",
    patterns=("[0-9]*.pt",),
    rows=_rows,
    recognizes=lambda path: holds("rollout_id", "samples")(path) and not holds("format_version")(path),
)

DASHBOARD = Layout(
    framework="miles-dashboard",
    columns={"rollout_log_probs": "rollout_log_probs", "response_mask": "mask", "token_ids": "response_ids"},
    prompt=False,
    padding="none",
    mask="1 on sampled tokens, 0 on tool tokens; none saved: all 1, removed samples too",
    patterns=("dashboard_columns/rollout_*.parquet",),
    rows=_dashboard_rows,
)
