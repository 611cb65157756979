"""open-instruct: several sequences in a packed row, numbered in attention_masks."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.recorder.integrations.canonical import GARBAGE, Sampled, Step, padded
from tests.recorder.integrations.snippet import Case, Snippet

INVALID_LOGPROB = 1.0


def _collated(packs: Sequence[Sequence[Sampled]]) -> dict[str, torch.Tensor]:
    def packed(values: Callable[[Sampled], list[Any]], fill: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return padded(([value for row in pack for value in values(row)] for pack in packs), fill, dtype)

    numbers = {id(row): number for pack in packs for number, row in enumerate(pack, 1)}
    return {
        "query_responses": packed(lambda row: row.ids, 0, torch.int64),
        "attention_masks": packed(lambda row: [numbers[id(row)]] * len(row.ids), 0, torch.int64),
        "response_masks": packed(lambda row: row.whole(row.ours, False), False, torch.bool),
        "vllm_logprobs": packed(lambda row: row.whole(row.rollout, math.nan), 0.0),
        "advantages": packed(lambda row: row.whole([row.advantage] * len(row.response), 0.0), 0.0),
        "local": packed(lambda row: row.whole(row.train, GARBAGE), GARBAGE),
    }


def train(snippet: Snippet, steps: Sequence[Step]) -> None:
    loader = SimpleNamespace(training_step=0)
    names: dict[str, Any] = {"self": SimpleNamespace(rank=0, dataloader=loader)}
    snippet.setup(names)
    for step in steps:
        rows = step.sequences
        batches = [_collated([rows[:2], rows[2:4]]), _collated([rows[4:]])]
        loader.training_step = step.number
        names["data_BT"] = SimpleNamespace(**{name: [batch[name] for batch in batches] for name in batches[0]})
        for epoch_idx in range(2):
            for i, batch in enumerate(batches):
                mask = batch["response_masks"][:, 1:]
                old = batch["local"][:, 1:].masked_fill(~mask, INVALID_LOGPROB)
                names |= {"epoch_idx": epoch_idx, "i": i, "response_mask_BT": mask, "old_logprob_BT": old}
                snippet.hook(names)


CASES = (
    Case(
        "open-instruct",
        "open-instruct",
        train,
        columns=("token_ids", "advantages"),
        mistakes=(
            ("shifted", "data_BT.vllm_logprobs[i][:, 1:]", "data_BT.vllm_logprobs[i][:, :-1]"),
            ("every epoch", "if epoch_idx == 0:", "if True:"),
        ),
    ),
)
