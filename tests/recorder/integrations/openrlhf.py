"""OpenRLHF: an Experience per micro-batch, with entry t about token t + 1."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.recorder.integrations.canonical import GARBAGE, GROUP, Step, padded
from tests.recorder.integrations.snippet import Case, Snippet

MICRO = 3


def _experience(step: Step, first: int) -> SimpleNamespace:
    rows = step.sequences[first : first + MICRO]
    return SimpleNamespace(
        index=list(range(first, first + MICRO)),
        sequences=padded((row.ids for row in rows), 0, torch.int64),
        attention_mask=padded(([1] * len(row.ids) for row in rows), 0, torch.int64),
        action_mask=padded((row.whole(row.ours, False)[1:] for row in rows), False, torch.bool),
        rollout_log_probs=padded((row.whole(row.sampled(row.rollout), 0.0)[1:] for row in rows), 0.0),
        action_log_probs=padded((row.whole(row.train, GARBAGE)[1:] for row in rows), GARBAGE),
        advantages=padded((row.whole([row.advantage] * len(row.response), 0.0)[1:] for row in rows), 0.0),
        rewards=torch.tensor([row.reward for row in rows]),
    )


def train(snippet: Snippet, steps: Sequence[Step]) -> None:
    args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=GROUP))
    names: dict[str, Any] = {"self": SimpleNamespace(args=args)}
    snippet.setup(names)
    for step in steps:
        names |= {"global_step": step.number, "experiences": [_experience(step, first) for first in (0, MICRO)]}
        snippet.hook(names)


CASES = (
    Case(
        "openrlhf",
        "openrlhf",
        train,
        columns=("token_ids", "advantages", "reward", "prompt_id"),
        mistakes=(
            ("ids about the token before", "e.sequences[:, 1:]", "e.sequences[:, :-1]"),
            ("shifted", "e.action_log_probs", "e.action_log_probs.roll(1, 1)"),
        ),
    ),
)
