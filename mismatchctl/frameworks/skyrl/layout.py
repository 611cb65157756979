"""SkyRL: `dumped_data/global_step_*_training_input.pkl`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mismatchctl.errors import DataError
from mismatchctl.frameworks.layout import File, Layout, Row, array

_MODULE = "skyrl.backends.skyrl_train.training_batch"
CLASSES = {
    (_MODULE, "_rebuild_tensor_batch"): lambda cls, state: state,
    (_MODULE, "TrainingInputBatch"): None,
}


def _tensor(file: File, name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return None
    kind = value.get("format", "numpy")
    try:
        if kind == "torch":  # what numpy has no type for: bfloat16
            return array(file.torch(value["data"]))
        if kind != "numpy":
            raise DataError(f"is saved as {kind!r}, not as one tensor", file=str(file.path), column=name)
        return file.array(value["data"], value["dtype"], value["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"is no array: {error}", file=str(file.path), column=name) from error


def _rows(file: File) -> Iterator[Row]:
    state = file.pickle(CLASSES)
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise DataError("holds no TrainingInputBatch", file=str(file.path))
    wanted = {*LAYOUT.columns.values(), "sequences"}
    columns = {name: _tensor(file, name, value) for name, value in state["batch_dict"].items() if name in wanted}
    if columns.get("loss_mask") is None:
        raise DataError("there is no such value", file=str(file.path), column="loss_mask")
    rows, width = columns["loss_mask"].shape
    metadata = state.get("metadata")
    padded = metadata.get("pad_size") if isinstance(metadata, dict) else 0
    for number in range(rows - int(padded or 0)):
        row: Row = {name: None if value is None else value[number] for name, value in columns.items()}
        if row.get("sequences") is not None:
            row["response_ids"] = row["sequences"][-width:]
        yield {**row, "step": file.step}


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
