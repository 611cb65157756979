"""verl: the DataProto of the legacy trainer, and the TransferQueue of V1."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.recorder.integrations.canonical import Sampled, Step, padded, repeated
from tests.recorder.integrations.snippet import Case, Snippet


def _mask(sequence: Sampled, after: bool) -> list[int]:
    return [int(ours and not (after and sequence.rejected)) for ours in sequence.ours]


def _scores(sequence: Sampled) -> list[float]:
    return [0.0] * (len(sequence.response) - 1) + [sequence.reward]


def _proto(step: Step, after: bool) -> SimpleNamespace:
    rows = step.sequences
    batch = {
        "prompts": padded((row.prompt for row in rows), 0, torch.int64, "left"),
        "responses": padded((row.response for row in rows), 0, torch.int64),
        "response_mask": padded((_mask(row, after) for row in rows), 0, torch.int64),
        "rollout_log_probs": padded((row.sampled(row.rollout) for row in rows), 0.0),
        "old_log_probs": padded((row.train for row in rows), 0.0),
        "token_level_scores": padded((_scores(row) for row in rows), 0.0),
    }
    uids = [f"8c5c1f0e-{step.number}-{row.prompt_id}" for row in rows]
    return SimpleNamespace(batch=batch, non_tensor_batch={"uid": np.array(uids, dtype=object)})


def _trainer() -> SimpleNamespace:
    config = SimpleNamespace(trainer=SimpleNamespace(experiment_name="qwen3-gsm8k"))
    return SimpleNamespace(config=config, global_steps=0)


def legacy(snippet: Snippet, steps: Sequence[Step], after: bool = False) -> None:
    names: dict[str, Any] = {"self": _trainer()}
    snippet.setup(names)
    for step in steps:
        names["self"].global_steps = step.number
        names["batch"] = _proto(step, after)
        snippet.hook(names)


class _Queue:
    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        assert partition_id == "train"
        columns: dict[str, Any] = {}
        for field in select_fields:
            values = [self.rows[key][field] for key in keys]
            columns[field] = (
                torch.nested.as_nested_tensor(values, layout=torch.jagged)
                if torch.is_tensor(values[0])
                else SimpleNamespace(tolist=lambda values=values: values)
            )
        return columns


def _fields(step: Step, row: Sampled) -> dict[str, Any]:
    return {
        "uid": f"uid-{step.number}-{row.prompt_id}",
        "responses": torch.tensor(row.response),
        "response_mask": torch.tensor(_mask(row, after=True)),
        "loss_mask": torch.tensor(_mask(row, after=False)),
        "rollout_log_probs": torch.tensor(row.sampled(row.rollout)),
        "old_log_probs": torch.tensor(row.train),
        "advantages": torch.tensor(repeated(row)),
        "rm_scores": torch.tensor(_scores(row)),
    }


def v1(snippet: Snippet, steps: Sequence[Step]) -> None:
    """The end of PPOTrainer._compute_advantage, after rejection changed response_mask."""
    queue = _Queue()
    names: dict[str, Any] = {"self": _trainer(), "tq": queue}
    snippet.setup(names)
    for step in steps:
        keys = [f"{step.number}_{place}" for place in range(len(step.sequences))]
        for key, row in sorted(zip(keys, step.sequences, strict=True), reverse=True):
            queue.rows[key] = _fields(step, row)
        names["self"].global_steps = step.number
        names["batch"] = SimpleNamespace(keys=keys, partition_id="train")
        snippet.hook(names)


CASES = (
    Case(
        "verl-legacy",
        "verl",
        legacy,
        columns=("token_ids", "reward", "prompt_id"),
        mistakes=(("shifted", 'batch.batch["old_log_probs"]', 'batch.batch["old_log_probs"].roll(1, 1)'),),
        late=lambda snippet, steps: legacy(snippet, steps, after=True),
    ),
    Case(
        "verl-v1",
        "verl",
        v1,
        columns=("token_ids", "advantages", "reward", "prompt_id"),
        mistakes=(("mask after rejection", '"loss_mask"', '"response_mask"'),),
        number=1,
    ),
)
