"""AReaL: a trajectory batch before PPOActor shifts it. Only prox_logp is about the next token."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.recorder.integrations.canonical import GARBAGE, Step, padded
from tests.recorder.integrations.snippet import Case, Snippet


def _data(step: Step, after: bool) -> dict[str, torch.Tensor]:
    rows = step.sequences
    data = {
        "input_ids": padded((row.ids for row in rows), 0, torch.int32),
        "attention_mask": padded(([True] * len(row.ids) for row in rows), False, torch.bool),
        "loss_mask": padded((row.whole(map(int, row.ours), 0) for row in rows), 0, torch.int32),
        "logprobs": padded((row.whole(row.sampled(row.rollout), 0.0) for row in rows), 0.0),
        "versions": padded((row.whole(row.versions, -1) for row in rows), -1, torch.int32),
        "rewards": torch.tensor([row.reward for row in rows]),
        # Entry t is about token t + 1, so the last entry has no token.
        "prox_logp": padded(([*row.whole(row.train, GARBAGE)[1:], GARBAGE] for row in rows), GARBAGE),
    }
    if after:  # the columns after compute_advantages
        data["loss_mask"] = data["loss_mask"].float().roll(-1, 1)
        data["logprobs"] = data["logprobs"].roll(-1, 1) * data["loss_mask"]
    return data


def train(snippet: Snippet, steps: Sequence[Step], after: bool = False) -> None:
    """PPOActor._compute_advantages on two ranks of one data-parallel group."""
    for rank in range(2):
        engine = SimpleNamespace(is_data_parallel_head=lambda rank=rank: rank == 0, data_parallel_rank=0)
        names: dict[str, Any] = {"self": SimpleNamespace(engine=engine)}
        snippet.setup(names)
        for step in steps:
            engine.get_version = lambda number=step.number: number
            names["data"] = _data(step, after)
            snippet.hook(names)


CASES = (
    Case(
        "areal",
        "areal",
        train,
        columns=("token_ids", "reward", "rollout_version", "train_version"),
        mistakes=(
            ("one token off", 'data["prox_logp"][:, :-1]', 'data["prox_logp"][:, 1:]'),
            ("copies of other ranks", "self.engine.is_data_parallel_head()", "True"),
        ),
        late=lambda snippet, steps: train(snippet, steps, after=True),
    ),
)
