"""What ROLL calls the columns of the dump contract."""

from __future__ import annotations

COLUMNS = {"infer_logprobs": "rollout_log_probs", "old_log_probs": "train_log_probs"}
