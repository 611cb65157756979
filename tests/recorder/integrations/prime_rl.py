"""prime-rl: packed micro-batches [1, L] of the trainer, with entry t about token t."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.recorder.integrations.canonical import GARBAGE, Sampled, Step
from tests.recorder.integrations.snippet import Case, Snippet

PADDING = 3


def _locals(rows: Sequence[Sampled]) -> dict[str, Any]:
    """Return the local variables of train() for one micro-batch, after the log-probs were shifted."""

    def packed(values: Callable[[Sampled], list[Any]], pad: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([[value for row in rows for value in values(row)] + [pad] * PADDING], dtype=dtype)

    lengths = [len(row.ids) for row in rows]
    lengths[-1] += PADDING  # padding belongs to the last sequence
    trained = packed(lambda row: row.whole(row.train, GARBAGE), GARBAGE)
    trained[0, 0] = math.log(1 / 1000)  # the filler of the shift
    return {
        "micro_batch": {"input_ids": packed(lambda row: row.ids, 0, torch.int64), "sequence_lengths": lengths},
        "loss_mask": packed(lambda row: row.whole(row.ours, False), False, torch.bool),
        "inference_logprobs": packed(lambda row: row.whole(row.sampled(row.rollout), 0.0), 0.0),
        "advantages": packed(lambda row: row.whole([row.advantage] * len(row.response), 0.0), 0.0),
        "out": {"logprobs": trained.requires_grad_() * 1.0},
    }


def train(snippet: Snippet, steps: Sequence[Step]) -> None:
    """The micro-batches of train() on two context-parallel ranks, both with the gathered log-probs."""
    for cp_rank in range(2):
        names: dict[str, Any] = {"world": SimpleNamespace(rank=cp_rank), "cp_rank": cp_rank}
        snippet.setup(names)
        for step in steps:
            names["progress"] = SimpleNamespace(step=step.number)
            for rows in (step.sequences[:3], step.sequences[3:4], step.sequences[4:]):
                snippet.hook(names | _locals(rows))


CASES = (
    Case(
        "prime-rl",
        "prime-rl",
        train,
        columns=("token_ids", "advantages"),
        mistakes=(
            ("shifted", 'out["logprobs"]', 'out["logprobs"].roll(-1, 1)'),
            ("copies of other ranks", "cp_rank == 0", "cp_rank >= 0"),
        ),
        keep=lambda sequence: any(sequence.ours),
    ),
)
