"""open-instruct: `{run}_rollouts_*.jsonl`, which hold no train log-probs."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.frameworks.layout import File, Layout, Row


def _rows(file: File) -> Iterator[Row]:
    for line in file.lines():
        yield {**line, "sequence_id": line["sample_idx"], "mask": [1] * len(line["response_tokens"])}


LAYOUT = Layout(
    framework="open-instruct",
    columns={
        "rollout_log_probs": "logprobs",
        "response_mask": "mask",
        "token_ids": "response_tokens",
        "prompt_id": "prompt_idx",
        "advantages": "advantage",
        "reward": "reward",
    },
    prompt=False,
    padding="none",
    mask="1 on the whole response: the file does not say which tokens a tool wrote",
    patterns=("*_rollouts_[0-9]*.jsonl",),
    rows=_rows,
)
