"""tinker-cookbook: Datums with one entry per target token."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.recorder.integrations.canonical import GARBAGE, Sampled, Step, repeated
from tests.recorder.integrations.snippet import Case, Snippet


@dataclass
class TensorData:
    data: Sequence[float]
    dtype: str
    shape: list[int]

    def to_torch(self) -> torch.Tensor:
        return torch.tensor(self.data, dtype=getattr(torch, self.dtype)).reshape(self.shape)


def _targets(row: Sampled, values: Sequence[Any], dtype: str = "float32") -> TensorData:
    data = row.whole(values, 0)[1:]
    return TensorData(data, dtype, [len(data)])


def _datum(row: Sampled) -> SimpleNamespace:
    return SimpleNamespace(
        loss_fn_inputs={
            "target_tokens": TensorData(row.ids[1:], "int64", [len(row.ids) - 1]),
            "logprobs": _targets(row, row.sampled(row.rollout)),
            "advantages": _targets(row, repeated(row)),
            "mask": _targets(row, [float(ours) for ours in row.ours]),
        }
    )


def train(snippet: Snippet, steps: Sequence[Step]) -> None:
    names: dict[str, Any] = {}
    snippet.setup(names)
    for step in steps:
        names["i_batch"] = step.number
        names["data_D"] = [_datum(row) for row in step.sequences]
        names["training_logprobs_D"] = [torch.tensor(row.whole(row.train, GARBAGE)[1:]) for row in step.sequences]
        snippet.hook(names)


CASES = (
    Case(
        "tinker-cookbook",
        "tinker-cookbook",
        train,
        columns=("token_ids", "advantages"),
        mistakes=(
            ("no mask", 'column("mask")', "None"),
            ("shifted", "training_logprobs_D", "[t.roll(1) for t in training_logprobs_D]"),
        ),
    ),
)
