"""Miles: `policy_loss_debug/rank_{rank}_call_{call}.pt`, a micro-batch of a rank, with current log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

from mismatchctl.frameworks.importers.layout import Layout, Row
from mismatchctl.frameworks.importers.tensors import array, holds, loaded
from mismatchctl.frameworks.importers.zigzag import check_whole


def _rows(path: Path) -> Iterator[Row]:
    content = loaded(path)
    for number, sample in enumerate(content["samples"]):
        row = {name: array(value) for name, value in sample.items()}
        have, remedy = len(row["old_log_probs"]), "convert train_data instead, which is put together"
        check_whole(path, number, have, int(row["response_length"]), remedy)
        # The file names no samples: tensor-parallel copies have the same values, data-parallel ranks have others.
        values = crc32(row["old_log_probs"].tobytes())
        name = f"{content['call']}:{row['index']}:{values:08x}"
        yield {**row, "sequence_id": name, "micro_batch": f"{content['rank']}:{content['call']}"}


LAYOUT = Layout(
    framework="miles-policy-loss",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "train_log_probs": "old_log_probs",
        "current_log_probs": "train_log_probs",
        "response_mask": "local_loss_mask",
        "advantages": "advantages",
        "micro_batch": "micro_batch",
    },
    prompt=False,
    padding="none",
    mask="1 on sampled tokens, 0 on tool tokens and removed samples",
    patterns=("rank_*_call_*.pt",),
    rows=_rows,
    duplicates=True,
    recognizes=holds("call", "samples"),
)
