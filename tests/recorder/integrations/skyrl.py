"""SkyRL: a TrainingInputBatch with responses at the right edge and copies as its last rows."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.recorder.integrations.canonical import GARBAGE, Step, padded
from tests.recorder.integrations.snippet import Case, Snippet

PAD = 2
MISSING = -9999.0


class TrainingInputBatch(dict[str, Any]):
    metadata: dict[str, Any]


class RayPPOTrainer:
    def __init__(self) -> None:
        self.global_step = 0

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        data["advantages"] = data.pop("known_advantages")
        return data


def batch(step: Step, missing: int | None = None) -> TrainingInputBatch:
    """Make the batch of a step. The engine returned no log-prob for the first token of row `missing`."""
    rows = step.sequences
    rollout = [row.sampled(row.rollout) for row in rows]
    if missing is not None:
        rollout[missing][0] = MISSING
    data = TrainingInputBatch(
        sequences=padded((row.ids for row in rows), 0, torch.int64, "left"),
        attention_mask=padded(([1] * len(row.ids) for row in rows), 0, torch.int64, "left"),
        response_mask=padded(([1] * len(row.response) for row in rows), 0, torch.int64, "left"),
        loss_mask=padded((row.ours for row in rows), 0.0, torch.float32, "left"),
        rollout_logprobs=padded(rollout, 0.0, side="left"),
        action_log_probs=padded((row.train for row in rows), GARBAGE, side="left"),
        rewards=padded(([0.0] * (len(row.response) - 1) + [row.reward] for row in rows), 0.0, side="left"),
        known_advantages=padded(([row.advantage] * len(row.response) for row in rows), 0.0, side="left"),
    )
    for name, tensor in data.items():
        data[name] = torch.cat([tensor, tensor[:PAD].clone()])
    data["loss_mask"][-PAD:] = 0
    uids = [f"{step.number}-{row.prompt_id}" for row in rows] + [f"pad{row}" for row in range(PAD)]
    data.metadata = {"pad_size": PAD, "response_length": data["loss_mask"].shape[1], "uids": uids}
    return data


def train(snippet: Snippet, steps: Sequence[Step], missing: int | None = None) -> None:
    names: dict[str, Any] = {"RayPPOTrainer": RayPPOTrainer, "torch": SimpleNamespace(nan=torch.nan)}
    snippet.setup(names)
    snippet.hook(names)
    trainer = names["RecordingTrainer"]()
    for step in steps:
        trainer.global_step = step.number
        assert len(trainer.compute_advantages_and_returns(batch(step, missing))["advantages"]) == 6 + PAD


CASES = (
    Case(
        "skyrl",
        "skyrl",
        train,
        columns=("token_ids", "reward", "prompt_id"),
        mistakes=(
            ("copies", 'slice(-data.metadata["pad_size"] or None)', "slice(None)"),
            ("ids from the left edge", "-rollout.shape[1] :", ": rollout.shape[1]"),
            ("tools' tokens", '"loss_mask"', '"response_mask"'),
        ),
    ),
)
