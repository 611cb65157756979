"""NeMo-RL: the train_data of grpo_train, over prompt and response, with entry t about token t."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.recorder.integrations.canonical import GARBAGE, Sampled, Step, padded
from tests.recorder.integrations.snippet import Case, Snippet

EXPERTS = torch.tensor([[0, 1], [2, 3]])
"""Offsets [layers, choices] that are added to a token id to give the experts of the engine."""


def _token_mask(row: Sampled) -> list[int]:
    """A sequence that is left out keeps its token mask, and only sample_mask is 0."""
    return row.whole([int(ours or not any(row.ours)) for ours in row.ours], 0)


def train(snippet: Snippet, steps: Sequence[Step], after: bool = False) -> None:
    """The part of grpo_train between the log-probs and the masking of sequences by their error."""
    names: dict[str, Any] = {}
    snippet.setup(names)
    for step in steps:
        rows = step.sequences
        kept = [float(any(row.ours) and not (after and row.rejected)) for row in rows]
        names["train_data"] = {
            "input_ids": padded((row.ids for row in rows), 0, torch.int64),
            "input_lengths": torch.tensor([len(row.ids) for row in rows]),
            "generation_logprobs": padded((row.whole(row.sampled(row.rollout), 0.0) for row in rows), 0.0),
            "prev_logprobs": padded(([0.0, *row.whole(row.train, GARBAGE)[1:]] for row in rows), GARBAGE),
            "token_mask": padded((_token_mask(row) for row in rows), 0, torch.int64),
            "sample_mask": torch.tensor(kept),
            "routed_experts": padded((row.ids for row in rows), 0, torch.int64)[..., None, None] + EXPERTS,
        }
        names["repeated_batch"] = {"idx": [100 * step.number + row.prompt_id for row in rows]}
        names["rewards"] = torch.tensor([row.reward for row in rows])
        names["total_steps"] = step.number - 1
        snippet.hook(names)


CASES = (
    Case(
        "nemo-rl",
        "nemo-rl",
        train,
        columns=("token_ids", "reward", "prompt_id"),
        mistakes=(
            ("sequences left out", ' * train_data["sample_mask"][:, None]', ""),
            ("shifted", 'train_data["prev_logprobs"]', 'train_data["prev_logprobs"].roll(-1, 1)'),
        ),
        late=lambda snippet, steps: train(snippet, steps, after=True),
    ),
)
