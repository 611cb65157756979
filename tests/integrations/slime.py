"""slime and Miles: the lists of tensors of one data-parallel rank, which every tensor-parallel rank holds too."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from integrations.canonical import GROUP, Step
from integrations.snippet import Case, Snippet


def _data(step: Step, rank: int) -> dict[str, list[Any]]:
    rows = step.sequences[3 * rank : 3 * rank + 3]
    return {
        "tokens": [torch.tensor(row.ids) for row in rows],
        "response_lengths": [len(row.response) for row in rows],
        "total_lengths": [len(row.ids) for row in rows],
        "loss_masks": [torch.tensor(row.ours, dtype=torch.int32) for row in rows],
        "rollout_log_probs": [torch.tensor(row.sampled(row.rollout)) for row in rows],
        "log_probs": [torch.tensor(row.train) for row in rows],
        "advantages": [torch.tensor([row.advantage] * len(row.response)) for row in rows],
        "local_raw_reward": [row.reward for row in rows],
        "sample_indices": [GROUP * 3 * step.number + 3 * rank + place for place in range(3)],
    }


def _ranks() -> Iterator[tuple[int, ModuleType]]:
    """Two data-parallel ranks, each on two tensor-parallel ones."""
    for data_rank in range(2):
        for tensor_rank in range(2):
            mpu = ModuleType("megatron.core.mpu")
            mpu.get_data_parallel_rank = lambda rank=data_rank: rank  # type: ignore[attr-defined]
            mpu.get_tensor_model_parallel_rank = lambda rank=tensor_rank: rank  # type: ignore[attr-defined]
            yield data_rank, mpu


def _args() -> SimpleNamespace:
    return SimpleNamespace(n_samples_per_prompt=GROUP)


def slime(snippet: Snippet, steps: Sequence[Step]) -> None:
    """The function of --rollout-data-postprocess-path, as MegatronTrainRayActor.train_actor calls it."""
    for rank, mpu in _ranks():
        core = ModuleType("megatron.core")
        core.mpu = mpu  # type: ignore[attr-defined]
        names: dict[str, Any] = {}
        with patch.dict(sys.modules, {"megatron": ModuleType("megatron"), "megatron.core": core}):
            snippet.setup(names)
            snippet.hook(names)
        for step in steps:
            names["record"](_args(), step.number, _data(step, rank))


def miles(snippet: Snippet, steps: Sequence[Step]) -> None:
    """MegatronTrainRayActor.train_actor, which knows `mpu` and names the columns `rollout_data`."""
    for rank, mpu in _ranks():
        names: dict[str, Any] = {"self": SimpleNamespace(args=_args()), "mpu": mpu}
        snippet.setup(names)
        for step in steps:
            names |= {"rollout_id": step.number, "rollout_data": _data(step, rank)}
            snippet.hook(names)


_COLUMNS = ("token_ids", "advantages", "prompt_id")

CASES = (
    Case(
        "slime",
        "slime",
        slime,
        columns=_COLUMNS,
        mistakes=(
            ("ids of the prompt", "t[len(t) - n :]", "t[:n]"),
            (
                "copies of tensor-parallel ranks",
                "get_tensor_model_parallel_rank() == 0",
                "get_tensor_model_parallel_rank() >= 0",
            ),
        ),
    ),
    Case(
        "miles",
        "miles",
        miles,
        columns=_COLUMNS,
        mistakes=(("no mask", 'rollout_data["loss_masks"]', "None"),),
    ),
)
