"""SkyRL: `dumped_data/global_step_*_training_input.pkl`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mismatchctl.errors import DataError
from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.safe import load_skyrl, load_torch
from mismatchctl.frameworks.importers.standins import DamagedError, from_bytes, plain_dtype
from mismatchctl.frameworks.importers.tensors import array, step_of


def _tensor(path: Path, name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return None
    kind = value.get("format", "numpy")
    try:
        if kind == "torch":  # what numpy has no type for: bfloat16
            return array(load_torch(path, value["data"]))
        if kind != "numpy":
            raise DataError(f"is saved as {kind!r}, not as one tensor", file=str(path), column=name)
        return from_bytes(value["data"], plain_dtype(value["dtype"]), value["shape"])
    except (DamagedError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"is no array: {error}", file=str(path), column=name) from error


def _rows(path: Path) -> Iterator[Row]:
    state = load_skyrl(path)
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise DataError("holds no TrainingInputBatch", file=str(path))
    wanted = {*LAYOUT.columns.values(), "sequences"}
    columns = {name: _tensor(path, name, value) for name, value in state["batch_dict"].items() if name in wanted}
    if columns.get("loss_mask") is None:
        raise DataError("there is no such value", file=str(path), column="loss_mask")
    rows, width = columns["loss_mask"].shape
    metadata = state.get("metadata")
    padded = metadata.get("pad_size") if isinstance(metadata, dict) else 0
    for number in range(rows - int(padded or 0)):
        row: Row = {name: None if value is None else value[number] for name, value in columns.items()}
        if row.get("sequences") is not None:
            row["response_ids"] = row["sequences"][-width:]
        yield {**row, "step": step_of(path.with_name(path.name.replace("_training_input", "")))}


LAYOUT = Layout(
    framework="skyrl",
    columns={
        "rollout_log_probs": "rollout_logprobs",
        "train_log_probs": "action_log_probs",
        "response_mask": "loss_mask",
        "token_ids": "response_ids",
        "ref_log_probs": "base_action_log_probs",
        "advantages": "advantages",
    },
    prompt=False,
    padding="left",
    mask="above 0 on sampled tokens that are trained on; the last pad_size rows are copies and left out",
    patterns=("*_training_input.pkl",),
    rows=_rows,
    missing=(-9999.0,),
)
