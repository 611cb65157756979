"""SkyRL: `dumped_data/global_step_*_training_input.pkl`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mismatchctl.errors import DataError
from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.safe import load_skyrl
from mismatchctl.frameworks.importers.tensors import step_of

MISSING = -9999.0
"""What stands where the engine gave no finite value."""


def _tensor(path: Path, name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return None
    if value.get("format") != "numpy":
        raise DataError(f"is saved as {value.get('format')!r}, not as numpy", file=str(path), column=name)
    return np.frombuffer(value["data"], dtype=np.dtype(value["dtype"])).reshape(value["shape"])


def _rows(path: Path) -> Iterator[Row]:
    state = load_skyrl(path)
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise DataError("holds no TrainingInputBatch", file=str(path))
    columns = {name: _tensor(path, name, value) for name, value in state["batch_dict"].items()}
    if columns.get("response_mask") is None:
        raise DataError("there is no such value", file=str(path), column="response_mask")
    width = columns["response_mask"].shape[1]
    count = len(columns["response_mask"]) - int(state.get("metadata", {}).get("pad_size", 0) or 0)
    for number in range(count):
        row: Row = {name: None if value is None else value[number] for name, value in columns.items()}
        if row.get("sequences") is not None:
            row["response_ids"] = row["sequences"][-width:]
        for name in ("rollout_logprobs", "action_log_probs"):
            if row.get(name) is not None:
                row[name] = np.where(row[name] == MISSING, np.nan, row[name])
        yield {**row, "step": step_of(path.with_name(path.name.replace("_training_input", "")))}


LAYOUT = Layout(
    framework="skyrl",
    columns={
        "rollout_log_probs": "rollout_logprobs",
        "train_log_probs": "action_log_probs",
        "response_mask": "loss_mask",
        "token_ids": "response_ids",
        "advantages": "advantages",
    },
    prompt=False,
    padding="left",
    mask="above 0 on sampled tokens that are trained on; the last pad_size rows are copies and left out",
    patterns=("*_training_input.pkl",),
    rows=_rows,
)
