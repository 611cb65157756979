"""verl: a saved DataProto or TransferQueue batch, which takes verl's own classes to open, and is refused."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.errors import DataError
from mismatchctl.frameworks.layout import File, Layout, Row


def _rows(file: File) -> Iterator[Row]:
    raise DataError(
        "is a pickle of verl's and tensordict's classes, and nothing in a file is executed",
        file=str(file.path),
        remedy="run docs/integrations/verl_to_parquet.py on it where verl is installed",
    )


LAYOUT = Layout(
    framework="verl",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "train_log_probs": "old_log_probs",
        "response_mask": "loss_mask, else response_mask",
        "token_ids": "responses",
        "ref_log_probs": "ref_log_prob",
        "advantages": "advantages",
    },
    padding="right",
    mask="1 on sampled tokens; rejection sampling writes its result into response_mask, not into loss_mask",
    patterns=("*.dp", "tq_batch.pt"),
    rows=_rows,
)
