"""slime and Miles: lists of tensors of one data-parallel rank, with copies on tensor-parallel ranks."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.recorder.integrations.canonical import GROUP, Step
from tests.recorder.integrations.snippet import Case, Snippet

Rollouts = list[tuple[int, list[dict[str, Any]]]]
"""The columns of each data-parallel rank, for every rollout."""


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


def _ranks(number: int) -> Iterator[tuple[int, ModuleType]]:
    for data_rank in range(number):
        for tensor_rank in range(2):
            mpu = ModuleType("megatron.core.mpu")
            mpu.get_data_parallel_rank = lambda rank=data_rank: rank  # type: ignore[attr-defined]
            mpu.get_tensor_model_parallel_rank = lambda rank=tensor_rank: rank  # type: ignore[attr-defined]
            yield data_rank, mpu


def _megatron(mpu: ModuleType) -> AbstractContextManager[Any]:
    core = ModuleType("megatron.core")
    core.mpu = mpu  # type: ignore[attr-defined]
    return patch.dict(sys.modules, {"megatron": ModuleType("megatron"), "megatron.core": core})


def _args() -> SimpleNamespace:
    return SimpleNamespace(n_samples_per_prompt=GROUP)


def postprocess(snippet: Snippet, rollouts: Rollouts) -> None:
    for rank, mpu in _ranks(len(rollouts[0][1])):
        names: dict[str, Any] = {}
        with _megatron(mpu):
            snippet.setup(names)
            snippet.hook(names)
        for rollout_id, ranks in rollouts:
            names["record"](_args(), rollout_id, ranks[rank])


def train_actor(snippet: Snippet, rollouts: Rollouts) -> None:
    """Miles: MegatronTrainRayActor.train_actor, whose file does not import mpu."""
    for rank, mpu in _ranks(len(rollouts[0][1])):
        names: dict[str, Any] = {"self": SimpleNamespace(args=_args())}
        for rollout_id, ranks in rollouts:
            with _megatron(mpu):
                snippet.setup(names)
                snippet.hook(names | {"rollout_id": rollout_id, "rollout_data": ranks[rank]})


def _rollouts(steps: Sequence[Step]) -> Rollouts:
    return [(step.number, [_data(step, rank) for rank in range(2)]) for step in steps]


_COLUMNS = ("token_ids", "advantages", "prompt_id")

CASES = (
    Case(
        "slime",
        "slime",
        lambda snippet, steps: postprocess(snippet, _rollouts(steps)),
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
        lambda snippet, steps: train_actor(snippet, _rollouts(steps)),
        columns=_COLUMNS,
        mistakes=(("no mask", 'rollout_data["loss_masks"]', "None"),),
    ),
)
