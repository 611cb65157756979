"""What TRL calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS = {
    "sampling_per_token_logps": "rollout_log_probs",
    "old_per_token_logps": "train_log_probs",
    "ref_per_token_logps": "ref_log_probs",
    # Tool tokens are valid in it: a dump with tools needs completion_mask * tool_mask.
    "completion_mask": "response_mask",
    "completion_ids": "token_ids",
}
