"""ms-swift: the batch of GRPOTrainer._compute_loss_and_metrics."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.recorder.integrations.canonical import GARBAGE, Step, padded
from tests.recorder.integrations.snippet import Case, Snippet


class GRPOTrainer:
    def __init__(self) -> None:
        self.state = SimpleNamespace(global_step=0)
        self.model = SimpleNamespace(training=True)

    def _compute_loss_and_metrics(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["advantages"].sum()


def batch(step: Step) -> dict[str, Any]:
    rows = step.sequences
    ids = torch.cat(
        [
            padded((row.prompt for row in rows), 0, torch.int64, "left"),
            padded((row.response for row in rows), 0, torch.int64),
        ],
        1,
    )
    return {
        "input_ids": ids,
        "completion_mask": padded(([int(ours) for ours in row.ours] for row in rows), 0, torch.int64).bool(),
        "truncated_mask": torch.zeros(len(rows), dtype=torch.bool),
        "advantages": torch.tensor([row.advantage for row in rows]),
        "old_per_token_logps": padded((row.train for row in rows), GARBAGE),
        "rollout_per_token_logps": padded((row.sampled(row.rollout) for row in rows), 0.0),
    }


def train(snippet: Snippet, steps: Sequence[Step]) -> None:
    names: dict[str, Any] = {"GRPOTrainer": GRPOTrainer}
    snippet.setup(names)
    snippet.hook(names)
    trainer = names["RecordingTrainer"]()
    for step in steps:
        trainer.state.global_step = step.number
        trainer.model.training = True
        trainer._compute_loss_and_metrics(trainer.model, batch(step))
        trainer.model.training = False
        trainer._compute_loss_and_metrics(trainer.model, batch(step))


CASES = (
    Case(
        "ms-swift",
        "ms-swift",
        train,
        columns=("token_ids", "advantages"),
        mistakes=(
            ("shifted", 'inputs["rollout_per_token_logps"]', 'inputs["rollout_per_token_logps"].roll(-1, 1)'),
            ("evaluations", "if model.training:", "if True:"),
        ),
    ),
)
