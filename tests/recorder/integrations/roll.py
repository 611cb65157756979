"""ROLL: a DataProto whose log-probs are about token t + 1 and whose mask is about token t."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.recorder.integrations.canonical import GARBAGE, Step, padded
from tests.recorder.integrations.snippet import Case, Snippet


def train(snippet: Snippet, steps: Sequence[Step], after: bool = False) -> None:
    """The pipeline's run(), before (or, by mistake, after) the filters of the correction."""
    names: dict[str, Any] = {"self": SimpleNamespace()}
    snippet.setup(names)
    for step in steps:
        rows = step.sequences
        masks = [row.whole([int(ours and not (after and row.rejected)) for ours in row.ours], 0) for row in rows]
        batch = {
            "input_ids": padded((row.ids for row in rows), 0, torch.int64),
            "attention_mask": padded(([1] * len(row.ids) for row in rows), 0, torch.int64),
            "response_mask": padded(masks, 0, torch.int64),
            "infer_logprobs": padded((row.whole(row.sampled(row.rollout), 0.0)[1:] for row in rows), 0.0),
            "old_log_probs": padded((row.whole(row.train, GARBAGE)[1:] for row in rows), GARBAGE),
            "advantages": padded((row.whole([row.advantage] * len(row.response), 0.0)[1:] for row in rows), 0.0),
        }
        names |= {"batch": SimpleNamespace(batch=batch), "global_step": step.number}
        snippet.hook(names)


CASES = (
    Case(
        "roll",
        "roll",
        train,
        columns=("token_ids", "advantages"),
        mistakes=(("mask one token off", '["response_mask"][:, 1:]', '["response_mask"][:, :-1]'),),
        late=lambda snippet, steps: train(snippet, steps, after=True),
    ),
)
