"""TRL: the dict that GRPOTrainer._generate_and_score_completions returns."""

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

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [example["sequence"] for example in inputs]
        # The mask of a truncated completion is 0 everywhere. Tool tokens are only in tool_mask.
        complete = [[int(any(row.ours))] * len(row.response) for row in rows]
        tools = [[int(ours or not any(row.ours)) for ours in row.ours] for row in rows]
        return {
            "prompt_ids": padded((row.prompt for row in rows), 0, torch.int64, "left"),
            "prompt_mask": padded(([1] * len(row.prompt) for row in rows), 0, torch.int64, "left"),
            "completion_ids": padded((row.response for row in rows), 0, torch.int64),
            "completion_mask": padded(complete, 0, torch.int64),
            "tool_mask": padded(tools, 1, torch.int64),
            "advantages": torch.tensor([row.advantage for row in rows]),
            "num_items_in_batch": torch.tensor(sum(map(sum, complete))),
            "old_per_token_logps": padded((row.train for row in rows), GARBAGE),
            "sampling_per_token_logps": padded((row.sampled(row.rollout) for row in rows), 0.0),
            "importance_sampling_ratio": torch.ones(len(rows), 1),
        }


def train(snippet: Snippet, steps: Sequence[Step]) -> None:
    names: dict[str, Any] = {"GRPOTrainer": GRPOTrainer}
    snippet.setup(names)
    snippet.hook(names)
    trainer = names["RecordingTrainer"]()
    for step in steps:
        inputs = [{"prompt": f"question {row.prompt_id}", "sequence": row} for row in step.sequences]
        trainer.state.global_step = step.number
        trainer.model.training = True
        assert trainer._generate_and_score_completions(inputs)["advantages"].shape == (6,)
        trainer.model.training = False
        trainer._generate_and_score_completions(inputs)


CASES = (
    Case(
        "trl",
        "trl",
        train,
        columns=("token_ids", "advantages", "prompt_id"),
        mistakes=(
            ("tools' tokens", ' * out.get("tool_mask", 1)', ""),
            ("shifted", 'out.get("sampling_per_token_logps")', 'out["sampling_per_token_logps"].roll(-1, 1)'),
            ("evaluations", "if self.model.training:", "if True:"),
        ),
    ),
)
