"""prime-rl: `token_exports/step_*/rank_*.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.frameworks.layout import File, Layout, Row


def _rows(file: File) -> Iterator[Row]:
    for line in file.lines():
        rank, index = line.get("rank", 0), line.get("export_sequence_idx")
        yield {**line, "sequence_id": None if index is None else f"{rank}:{index}"}


LAYOUT = Layout(
    framework="prime-rl",
    columns={
        "rollout_log_probs": "inference_logprobs",
        "train_log_probs": "trainer_logprobs",
        "response_mask": "loss_mask",
        "token_ids": "token_ids",
        "advantages": "advantages",
        "entropy": "entropy",
        "micro_batch": "micro_step",
    },
    prompt=True,
    padding="none",
    mask="true on sampled tokens that are trained on",
    patterns=("rank_*.jsonl",),
    rows=_rows,
)
